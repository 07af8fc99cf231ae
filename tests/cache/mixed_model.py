"""A paged cache with old tokens in a narrower format: its model, and both driven together.

Each token knows what comes back of it. A page that is demoted gets new tokens, of what its format
leaves of the old ones; one that is converted back, tokens that are rounded once more.
"""

from __future__ import annotations

import numpy as np
from gather_cases import as_numpy
from helpers import QUANTISED
from paged_cases import Twin
from paged_model import PagedModel, Sequence, Token, stored_errors
from paged_model import as_cached as as_cached_by_element

from kvcupy import formats, reference
from kvcupy.testing.arrays import assert_near


def as_cached(
    rows: np.ndarray, fmt: str, scale: np.ndarray | None, *, rotated: bool = False,
    scale_rule: str = "absmax",
) -> np.ndarray:  # fmt: skip
    """What a cache of any format gives back of rows (T, H, D), which it may store rotated."""
    if fmt not in formats.FOUR_BIT:
        return as_cached_by_element(rows, fmt, scale)
    bits = np.zeros((*rows.shape[:-1], formats.FOUR_BIT[fmt].row_bytes(rows.shape[-1])), np.uint8)
    packed = reference.FourBitRows.packed(bits, fmt, rows.shape[-1] if rotated else 0, scale_rule)
    values = reference.decode(rows, reference.format_of(rows)).astype(np.float32)
    reference.quantise_rows(values, packed, np.ones(rows.shape[:-1], np.float32))
    return reference.dequantise_rows(packed)


class MixedModel(PagedModel):
    """What a `PagedKVCache` with a demotion does."""

    def __init__(
        self, *, past, recent, sinks=0, num_past_pages=None, num_pages, hadamard=False,
        scale_rule="absmax", **options
    ):  # fmt: skip
        super().__init__(num_pages=num_pages, **options)
        self.past, self.recent, self.sinks = past, recent, sinks
        self.rotated = hadamard  # rows of the past
        self.scale_rule = scale_rule
        self.num_past_pages = num_past_pages or num_pages
        self.past_pages: dict[int, dict[int, Token]] = {}  # every page that was ever demoted
        self.demoted: dict[int, int] = {}  # of pages that others still use
        self.replaced: set[int] = set()  # in the step that runs

    # Pages

    def _used(self) -> set[int]:
        return set().union(*(s.pages() for s in self.sequences.values()))

    @property
    def available(self) -> int:
        return self.num_pages - len(self._used() - self.past_pages.keys())

    @property
    def available_past(self) -> int:
        used = self._used() | self.replaced
        return self.num_past_pages - len(used & self.past_pages.keys())

    def _converted(self, token: Token, fmt: str) -> Token:
        return Token(
            *(np.stack([self._as_cached(layer[None], fmt)[0] for layer in side])
              for side in (token.k, token.v))
        )  # fmt: skip

    def _as_cached(self, rows: np.ndarray, fmt: str) -> np.ndarray:
        if fmt != self.past:
            return as_cached(rows, fmt, None)
        return as_cached(rows, fmt, None, rotated=self.rotated, scale_rule=self.scale_rule)

    def _forget(self, page: int) -> None:
        self.demoted = {w: p for w, p in self.demoted.items() if page not in (w, p)}

    def _move(self, sequence: Sequence, page: int) -> None:
        number = len(sequence.places)
        was_past = page in self.past_pages
        mine = [i for i in range(number) if sequence.places[i][0] == page]
        super()._move(sequence, page)
        if was_past and self._keeps_past:  # set_kv: a copy in the same format
            self.past_pages[sequence.places[mine[0]][0]] = {}
        elif was_past:
            for i in mine:
                sequence.tokens[i] = self._converted(sequence.tokens[i], self.fmt)

    _keeps_past = False

    def _append(self, sequence: Sequence, count: int) -> None:
        if sequence.places:
            page, offset = sequence.places[-1]
            if page in self.past_pages and offset != self.page_size - 1 and count:
                self.replaced.add(page)
                self._move(sequence, page)
        super()._append(sequence, count)

    def _pages_in_order(self, sequence: Sequence) -> list[int]:
        return list(dict.fromkeys(page for page, _ in sequence.places))

    def _leaving(self, sequence: Sequence) -> list[int]:
        """The pages that are to be demoted next."""
        oldest = sequence.committed - self.recent
        if oldest <= 0:
            return []
        order = self._pages_in_order(sequence)
        first = 0
        if self.sinks:
            last_sink = min(self.sinks, len(sequence.places)) - 1
            first = order.index(sequence.places[last_sink][0]) + 1
            if self.sinks > len(sequence.places):
                return []
        past = [i for i, page in enumerate(order) if page in self.past_pages]
        assert past == list(range(past[0], past[-1] + 1)) if past else True
        if past:
            if past[-1] + 1 < first:
                return []
            first = past[-1] + 1
        stop = len(order)
        if oldest < len(sequence.places):
            stop = order.index(sequence.places[oldest][0])
            if sequence.places[oldest][1] == 0:
                stop = order.index(sequence.places[oldest][0])
        elif sequence.places[-1][1] != self.page_size - 1:
            stop -= 1  # no recent tokens, and a last page that is not full
        return order[first:stop]

    def demote(self, sequences: list[Sequence]) -> None:
        for sequence, pages in [(s, self._leaving(s)) for s in sequences]:
            for page in pages:
                target = self.demoted.get(page)
                if target is None or target not in self._used():
                    if self.available_past == 0:
                        break
                    target = next(self._new_pages)
                    tokens = {
                        offset: token
                        for s in self.sequences.values()
                        for token, (p, offset) in zip(s.tokens, s.places, strict=True)
                        if p == page
                    }
                    self.past_pages[target] = {
                        offset: self._converted(token, self.past)
                        for offset, token in tokens.items()
                    }
                    self.demoted[page] = target
                for i, (p, offset) in enumerate(sequence.places):
                    if p == page:
                        sequence.places[i] = target, offset
                        sequence.tokens[i] = self.past_pages[target][offset]

    def end(self) -> None:
        sequences = [s for s, _ in self.batch]
        super().end()
        self.replaced = set()
        self.demote(sequences)

    def take_back(self) -> None:
        super().take_back()
        self.replaced = set()

    def _refuse_if_full(self, before) -> None:
        if self.available < 0 or self.available_past < 0:
            self.replaced = set()
        if self.available_past < 0:
            self.num_pages, kept = -1, self.num_pages
            try:
                super()._refuse_if_full(before)
            finally:
                self.num_pages = kept
        super()._refuse_if_full(before)

    # Sequences

    def pop(self, name, count) -> None:
        super().pop(name, count)
        sequence = self.sequences[name]
        if sequence.places and sequence.places[-1][1] != self.page_size - 1:
            self._forget(sequence.places[-1][0])

    def load(self, name, saved: Sequence) -> None:
        super().load(name, saved)
        self.replaced = set()
        sequence = self.sequences[name]
        sequence.tokens = [self._converted(token, self.fmt) for token in sequence.tokens]
        self.demote([sequence])

    def leave(self, name, copy) -> None:
        """Add a copy of a sequence, on pages of its own, as they are."""
        left = self.sequences[copy] = self.sequences[name].copy()
        own: dict[int, int] = {}
        for i, (page, offset) in enumerate(left.places):
            if page not in own:
                own[page] = next(self._new_pages)
                if page in self.past_pages:
                    self.past_pages[own[page]] = {}
            left.places[i] = own[page], offset
            left.tokens[i] = Token(left.tokens[i].k.copy(), left.tokens[i].v.copy())
            if page in self.past_pages:
                self.past_pages[own[page]][offset] = left.tokens[i]

    def set_kv(self, name, start, key, value) -> None:
        self._keeps_past = True
        try:
            super().set_kv(name, start, key, value)
        finally:
            self._keeps_past = False
        sequence = self.sequences[name]
        for i in range(key.shape[1]):
            page, offset = sequence.places[start + i]
            self._forget(page)
            if page not in self.past_pages:
                continue
            token = sequence.tokens[start + i]
            for layer in range(self.num_layers):
                for side, rows in (("k", key), ("v", value)):
                    stored = self._as_cached(rows[layer][i : i + 1], self.past)
                    getattr(token, side)[layer] = stored[0]
            self.past_pages[page][offset] = token

    def is_past(self, name) -> np.ndarray:
        """Which tokens of a sequence are in the narrower format."""
        return np.array([page in self.past_pages for page, _ in self.sequences[name].places], bool)

    def _allowed(self, *arguments):
        """A rotated key that is a unit off may be a step of its past format off."""
        fmt = self.fmt
        if self.mode == "normal":
            self.fmt = "fp8_e5m2" if self.past in formats.FOUR_BIT else self.past
        try:
            return super()._allowed(*arguments)
        finally:
            self.fmt = fmt


class MixedTwin(Twin):
    """A cache with `past` and its model."""

    Model = MixedModel

    def attend_layer(self, layer, *, window=None, sink_tokens=None, sinks=None, **options):
        """Attend, without those masks that a cache with `past` refuses."""
        if window is not None and window <= self.model.recent + 1:
            options["window"] = window
        return super().attend_layer(layer, **options)

    def check(self, contents=True):
        super().check(contents)
        assert self.cache.num_available_past_pages == self.model.available_past, "past pages"

    def check_contents(self, name, start=0, stop=None):
        if self.model.mode != "normal":
            super().check_contents(name, start, stop)
            return
        cache_fmt = self.options["dtype"]
        fmt = "bf16" if cache_fmt in QUANTISED else cache_fmt
        is_past = self.model.is_past(name)
        if len(is_past) == 0:
            return
        got, want = (c.get_kv(name, 0, len(is_past)) for c in (self.cache, self.model))
        for side, array, values in zip("KV", got, want, strict=True):
            stored = reference.decode(as_numpy(self.device, array, fmt), fmt)
            errors = [stored_errors(values, self.fmt, f) for f in (cache_fmt, self.model.past)]
            allowed = np.where(is_past[None, :, None, None], errors[0] + 2 * errors[1], errors[0])
            assert_near(
                f"{side} of {name!r}", stored, values.astype(np.float64), allowed, self.seed
            )

    def check_empty(self):
        super().check_empty()
        assert self.cache.num_available_past_pages == self.model.num_past_pages
