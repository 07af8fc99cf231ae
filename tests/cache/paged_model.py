"""A paged cache as lists of tokens, in float64: the oracle of `PagedKVCache`.

A sequence is a list of tokens, each with what every layer keeps of it, and beside it the list of
their places. Forks share tokens and pages by identity. A page is in use while any sequence has a
token on it; nothing is counted up or down.

With a demotion, a page that is demoted gets new tokens, with what the narrower format keeps of the
old ones, and a page that is converted back gets tokens that were rounded once more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from helpers import DTYPE, QUANTISED

from kvcupy import formats, reference
from kvcupy.testing.tolerances import FEW, ROUNDING, TINY, TRUNCATION, WEIGHT_ROUNDING, ulp


class Full(Exception):
    """There are fewer free pages than an operation needs."""


@dataclass(eq=False)
class Token:
    """What every layer keeps of a token, K and V as they come back from the cache."""

    k: np.ndarray  # float32 (num_layers, H, D)
    v: np.ndarray  # float32 (num_layers, H, Dv)


@dataclass(eq=False)
class Sequence:
    """Tokens in order, each with its (page, offset)."""

    tokens: list[Token] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of the nodes of its pending tree
    window: int | None = None
    sink_tokens: int = 0
    slid: bool = False  # whether a window has ever evicted a token

    @property
    def committed(self) -> int:
        return len(self.tokens) - len(self.parents)

    def copy(self) -> Sequence:
        return replace(self, tokens=[*self.tokens], places=[*self.places], parents=[*self.parents])

    def pages(self) -> set[int]:
        return {page for page, _ in self.places}

    def path(self, node: int) -> list[int]:
        """The nodes from a root to this one."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def positions(self) -> np.ndarray:
        """Of all tokens: their number, or for a node of a tree the depth past the committed."""
        depths = [self.committed + len(self.path(i)) - 1 for i in range(len(self.parents))]
        return np.array([*range(self.committed), *depths], np.int64)

    def sees(self, query: int, window: int | None, first_keys: int) -> np.ndarray:
        """Which tokens the token of this number sees, bool (n,)."""
        seen = np.arange(len(self.tokens)) <= query
        if self.parents:
            seen[self.committed :] = False
            seen[[self.committed + i for i in self.path(query - self.committed)]] = True
        if window is not None:
            positions = self.positions()
            seen &= (positions > positions[query] - window) | (positions < first_keys)
        return seen


Snapshot = dict[object, tuple[Sequence, Sequence]]  # each with a copy of what it was


def as_cached(
    rows: np.ndarray, fmt: str, scale: np.ndarray | None, *, rotated: bool = False,
    scale_rule: str = "absmax",
) -> np.ndarray:  # fmt: skip
    """What a cache of a format gives back of rows (T, H, D) that it stored, float32.

    Without `scale` (H,), an 8-bit cache has one for each row and head. Four-bit rows may be stored
    `rotated`.
    """
    given = reference.format_of(rows)
    if fmt in formats.FOUR_BIT:
        row_bytes = formats.FOUR_BIT[fmt].row_bytes(rows.shape[-1])
        bits = np.zeros((*rows.shape[:-1], row_bytes), np.uint8)
        width = rows.shape[-1] if rotated else 0
        packed = reference.FourBitRows.packed(bits, fmt, width, scale_rule)
        values = reference.decode(rows, given).astype(np.float32)
        reference.quantise_rows(values, packed, np.ones(rows.shape[:-1], np.float32))
        return reference.dequantise_rows(packed)
    if fmt not in QUANTISED:
        stored = reference.encode(reference.decode(rows, given), fmt)
        return reference.decode(stored, fmt).astype(np.float32)
    slots = np.arange(len(rows))
    cache, back = np.zeros(rows.shape, DTYPE[fmt]), np.zeros(rows.shape, np.float32)
    options = {"k_scale": scale}
    if scale is None:
        options = {"k_scale_cache": np.zeros(rows.shape[:2], np.float32)}
    reference.store_kv(rows, rows, cache, np.zeros_like(rows), slots, **options)
    reference.gather_kv(cache, cache, slots, k_out=back, v_out=np.zeros_like(back), **options)
    return back


class PagedModel:
    """The behaviour of a `PagedKVCache` with the same arguments; `rope` is a NumPy array.

    Arguments of a demotion are passed one by one, as to `helpers.demoting`.
    """

    def __init__(
        self, *, num_layers, num_q_heads, num_kv_heads, head_dim, num_pages, page_size=16,
        dtype="bf16", rope=None, interleaved=False, rope_mode="normal", v_head_dim=None,
        latent_dim=None, k_scale=None, v_scale=None, past=None, recent=0, sinks=0,
        num_demoted_pages=None, hadamard=False, scale_rule="absmax", **_,
    ):  # fmt: skip
        self.num_layers, self.group = num_layers, num_q_heads // num_kv_heads
        self.heads, self.k_width = num_kv_heads, head_dim
        self.v_width = latent_dim or v_head_dim or head_dim
        self.num_pages, self.page_size = num_pages, page_size
        self.fmt, _, rotation = dtype.partition("+")
        self.rope, self.interleaved = rope, interleaved
        self.mode = "none" if rope is None else rope_mode
        self.latent_dim = latent_dim
        self.k_scale, self.v_scale = k_scale, v_scale
        if latent_dim and self.fmt in QUANTISED:  # one scale for both parts, 1 unless given
            self.k_scale = self.v_scale = 1.0 if k_scale is None else k_scale
        self.past, self.recent, self.sinks = past, recent, sinks
        self.num_demoted_pages = (num_demoted_pages or num_pages) if past else 0
        self._rotated = {self.fmt: bool(rotation), past: hadamard}
        self._scale_rules = {past: scale_rule}
        self.taken = 0  # pages that others have
        self.sequences: dict[object, Sequence] = {}
        self.batch: list[tuple[Sequence, int]] = []  # of the step, with how many tokens are new
        self.demoted_pages: dict[int, dict[int, Token]] = {}  # every page that was ever demoted
        self._demoted: dict[int, int] = {}  # of pages that others still use
        self._replaced: set[int] = set()  # that the running step has copied, and would go back to
        self._keeps_demoted = False
        self._before: Snapshot = {}
        self._new_pages = itertools.count()

    # Pages

    def _used(self) -> set[int]:
        return set().union(*(s.pages() for s in self.sequences.values()))

    @property
    def available(self) -> int:
        used = self._used() | self._replaced
        return self.num_pages - self.taken - len(used - self.demoted_pages.keys())

    @property
    def available_demoted(self) -> int:
        used = self._used() | self._replaced
        return self.num_demoted_pages - len(used & self.demoted_pages.keys())

    @property
    def total_length(self) -> int:
        return sum(len(s.tokens) for s in self.sequences.values())

    def is_demoted(self, name) -> np.ndarray:
        """Which tokens of a sequence are in the narrower format."""
        return np.array(
            [page in self.demoted_pages for page, _ in self.sequences[name].places], bool
        )

    def _snapshot(self) -> Snapshot:
        return {name: (s, s.copy()) for name, s in self.sequences.items()}

    def _restore(self, before: Snapshot) -> None:
        """Make all as it was; the running step has the same sequences still."""
        for sequence, was in before.values():
            vars(sequence).update(vars(was))
        self.sequences = {name: sequence for name, (sequence, _) in before.items()}

    def _refuse_if_full(self, before: Snapshot) -> None:
        if self.available < 0 or self.available_demoted < 0:
            self._restore(before)
            raise Full

    def _move(self, sequence: Sequence, page: int) -> None:
        """Replace a page of a sequence by a new one."""
        own = next(self._new_pages)
        moved = [i for i, (p, _) in enumerate(sequence.places) if p == page]
        for i in moved:
            sequence.places[i] = own, sequence.places[i][1]
        if page in self.demoted_pages and self._keeps_demoted:  # a copy in the same format
            self.demoted_pages[own] = {}
        elif page in self.demoted_pages:
            for i in moved:
                sequence.tokens[i] = self._converted(sequence.tokens[i], self.fmt)

    def _is_shared(self, page: int) -> bool:
        return sum(page in s.pages() for s in self.sequences.values()) > 1

    def _append(self, sequence: Sequence, count: int) -> None:
        for _ in range(count):
            page, offset = sequence.places[-1] if sequence.places else (-1, self.page_size - 1)
            if offset == self.page_size - 1:
                sequence.places.append((next(self._new_pages), 0))
            else:
                if page in self.demoted_pages or self._is_shared(page):
                    self._replaced.add(page)
                    self._move(sequence, page)
                sequence.places.append((sequence.places[-1][0], offset + 1))
            widths = self.k_width, self.v_width
            shapes = [(self.num_layers, self.heads, width) for width in widths]
            sequence.tokens.append(Token(*(np.full(s, np.nan, np.float32) for s in shapes)))

    # Sequences

    def add(self, name) -> None:
        self.sequences[name] = Sequence()

    def remove(self, name) -> None:
        del self.sequences[name]

    def clear(self) -> None:
        self.sequences, self.batch, self._replaced = {}, [], set()

    def fork(self, parent, child, at=None) -> None:
        """Share full pages, copy the partial one."""
        before = self._snapshot()
        forked = self.sequences[parent].copy()
        at = len(forked.tokens) if at is None else at
        forked.tokens, forked.places = forked.tokens[:at], forked.places[:at]
        if forked.places and forked.places[-1][1] != self.page_size - 1:
            self._move(forked, forked.places[-1][0])
        self.sequences[child] = forked
        self._refuse_if_full(before)

    def load(self, name, saved: Sequence) -> None:
        """Add a sequence that was saved, on new pages, end to end."""
        before = self._snapshot()
        loaded = self.sequences[name] = replace(saved.copy(), tokens=[], places=[])
        while rest := saved.tokens[len(loaded.tokens) :]:
            if self.past and self.available:  # demoting makes room for more
                rest = rest[: self.available * self.page_size]
            self._append(loaded, len(rest))
            self._refuse_if_full(before)
            pages = [page for page, _ in saved.places[len(loaded.tokens) - len(rest) :]]
            loaded.tokens[-len(rest) :] = [
                self._converted(token, self.fmt) if page in self.demoted_pages else token
                for token, page in zip(rest, pages, strict=False)
            ]
            self._demote([loaded])

    def copy_over(self, name, copy) -> None:
        """Add a copy of a sequence, on new pages of the same formats."""
        copied = self.sequences[copy] = self.sequences[name].copy()
        own: dict[int, int] = {}
        for i, (page, offset) in enumerate(copied.places):
            if page not in own:
                own[page] = next(self._new_pages)
                if page in self.demoted_pages:
                    self.demoted_pages[own[page]] = {}
            copied.places[i] = own[page], offset
            copied.tokens[i] = Token(copied.tokens[i].k.copy(), copied.tokens[i].v.copy())
            if page in self.demoted_pages:
                self.demoted_pages[own[page]][offset] = copied.tokens[i]

    def pop(self, name, count) -> None:
        sequence = self.sequences[name]
        left = len(sequence.tokens) - count
        sequence.tokens, sequence.places = sequence.tokens[:left], sequence.places[:left]
        if sequence.places and sequence.places[-1][1] != self.page_size - 1:
            self._forget(sequence.places[-1][0])

    def enable_sliding_window(self, name, window, sink_tokens=0) -> None:
        sequence = self.sequences[name]
        sequence.window, sequence.sink_tokens = window, sink_tokens

    def _slide(self, sequence: Sequence) -> None:
        surplus = len(sequence.tokens) - sequence.sink_tokens - (sequence.window or 0)
        if sequence.window and surplus > 0 and not sequence.parents:
            gap = slice(sequence.sink_tokens, sequence.sink_tokens + surplus)
            del sequence.tokens[gap], sequence.places[gap]
            sequence.slid = True

    # Steps

    def begin(self, names, lens, trees=None) -> None:
        before = self._snapshot()
        for name, count, tree in zip(names, lens, trees or [None] * len(lens), strict=True):
            self._append(self.sequences[name], count)
            self.sequences[name].parents += tree or []
        try:
            self._refuse_if_full(before)
        except Full:
            self._replaced = set()
            raise
        self._before = before
        self.batch = [(self.sequences[n], c) for n, c in zip(names, lens, strict=True)]

    def end(self) -> None:
        sequences = [sequence for sequence, _ in self.batch]
        for sequence in sequences:
            self._slide(sequence)
        self.batch, self._replaced = [], set()
        self._demote(sequences)

    def take_back(self) -> None:
        """End a step as if it had not begun."""
        self._restore(self._before)
        self.batch, self._replaced = [], set()

    def commit(self, names, leaves) -> None:
        for name, leaf in zip(names, leaves, strict=True):
            sequence = self.sequences[name]
            first = sequence.committed
            kept = [sequence.tokens[first + node] for node in sequence.path(leaf)]
            sequence.tokens[first:] = kept
            sequence.places = sequence.places[: first + len(kept)]
            sequence.parents = []
            self._slide(sequence)

    def new_tokens(self) -> list[tuple[Sequence, int]]:
        """The step's tokens in the order of its rows: sequence, number in it."""
        return [
            (s, number)
            for s, count in self.batch
            for number in range(len(s.tokens) - count, len(s.tokens))
        ]

    def query_positions(self) -> np.ndarray:
        return np.array([s.positions()[number] for s, number in self.new_tokens()], np.int32)

    # Old tokens

    def _as_cached(self, rows: np.ndarray, fmt: str, scale=None) -> np.ndarray:
        rule = self._scale_rules.get(fmt, "absmax")
        return as_cached(rows, fmt, scale, rotated=self._rotated.get(fmt, False), scale_rule=rule)

    def _converted(self, token: Token, fmt: str) -> Token:
        return Token(
            *(np.stack([self._as_cached(layer[None], fmt)[0] for layer in side])
              for side in (token.k, token.v))
        )  # fmt: skip

    def _forget(self, page: int) -> None:
        self._demoted = {w: p for w, p in self._demoted.items() if page not in (w, p)}

    def _leaving(self, sequence: Sequence) -> list[int]:
        """The pages that are to be demoted next."""
        oldest = sequence.committed - self.recent
        if oldest <= 0 or self.sinks > len(sequence.places):
            return []
        order = list(dict.fromkeys(page for page, _ in sequence.places))
        first = order.index(sequence.places[self.sinks - 1][0]) + 1 if self.sinks else 0
        past = [i for i, page in enumerate(order) if page in self.demoted_pages]
        assert not past or past == list(range(past[0], past[-1] + 1))
        if past:
            if past[-1] + 1 < first:
                return []
            first = past[-1] + 1
        stop = len(order)
        if oldest < len(sequence.places):
            stop = order.index(sequence.places[oldest][0])
        elif sequence.places[-1][1] != self.page_size - 1:
            stop -= 1  # no recent tokens, and a last page that is not full
        return order[first:stop]

    def _demote(self, sequences: list[Sequence]) -> None:
        if not self.past:
            return
        for sequence, pages in [(s, self._leaving(s)) for s in sequences]:
            for page in pages:
                target = self._demoted.get(page)
                if target is None or target not in self._used():
                    if self.available_demoted == 0:
                        break
                    target = self._demoted[page] = next(self._new_pages)
                    self.demoted_pages[target] = {
                        offset: self._converted(token, self.past)
                        for s in self.sequences.values()
                        for token, (p, offset) in zip(s.tokens, s.places, strict=True)
                        if p == page
                    }
                for i, (p, offset) in enumerate(sequence.places):
                    if p == page:
                        sequence.places[i] = target, offset
                        sequence.tokens[i] = self.demoted_pages[target][offset]

    # Contents

    def scale_of(self, layer: int, scale) -> np.ndarray | None:
        """The static scales of a layer, float32 (H,), from any of the forms of `k_scale`."""
        if scale is None:
            return None
        values = np.asarray(scale, np.float32)
        if values.ndim == 2:
            values = values[layer]
        return np.broadcast_to(values, (self.heads,))

    def write(self, layer: int, tokens: list[Token], key: np.ndarray, value: np.ndarray) -> None:
        """Store rows of any format in tokens."""
        for side, rows, scale in (("k", key, self.k_scale), ("v", value, self.v_scale)):
            scales = self.scale_of(layer, scale)
            stored = self._as_cached(rows[: len(tokens)], self.fmt, scales)
            for token, row in zip(tokens, stored, strict=True):
                getattr(token, side)[layer] = row

    def get_kv(self, name, start, stop) -> tuple[np.ndarray, np.ndarray]:
        """float32 (num_layers, n, H, D) and (.., Dv)."""
        tokens = self.sequences[name].tokens[start:stop]
        none = np.zeros((self.num_layers, 0, self.heads, 1), np.float32)
        return tuple(
            np.stack([getattr(t, side) for t in tokens], 1) if tokens else none for side in "kv"
        )

    def set_kv(self, name, start, key, value) -> None:
        """Replace K and V of all layers, (num_layers, n, H, D), from a token on."""
        before = self._snapshot()
        sequence = self.sequences[name]
        numbers = range(start, start + key.shape[1])
        self._keeps_demoted = True
        for number in numbers:
            page = sequence.places[number][0]
            if self._is_shared(page):
                self._move(sequence, page)
        self._keeps_demoted = False
        self._refuse_if_full(before)
        for i, number in enumerate(numbers):
            token = sequence.tokens[number]
            token = sequence.tokens[number] = Token(token.k.copy(), token.v.copy())
            page, offset = sequence.places[number]
            self._forget(page)
            fmt = self.past if page in self.demoted_pages else self.fmt
            if page in self.demoted_pages:
                self.demoted_pages[page][offset] = token
            for layer in range(self.num_layers):
                for side, rows, scale in (("k", key, self.k_scale), ("v", value, self.v_scale)):
                    scales = self.scale_of(layer, scale)
                    stored = self._as_cached(rows[layer][i : i + 1], fmt, scales)
                    getattr(token, side)[layer] = stored[0]

    # Attention

    def attention(self, layer, query, key, value, **options) -> tuple[np.ndarray, np.ndarray]:
        """Store K and V of the step, attend; the unrounded results and how far one may be off.

        Only the rows of the step's tokens count, and come back: (T, Hq, Dv).
        """
        new = self.new_tokens()
        query, key, value = query[: len(new)], key[: len(new)], value[: len(new)]
        positions = self.query_positions()
        rotary = slice(self.latent_dim or 0, None)  # in MLA, the part past the latent
        if self.mode != "none":
            rotated_query, rotated_key = reference.apply_rope(
                np.ascontiguousarray(query[..., rotary]), np.ascontiguousarray(key[..., rotary]),
                self.rope, positions, interleaved=self.interleaved,
            )  # fmt: skip
            query = np.concatenate([query[..., : rotary.start], rotated_query], -1)
            if self.mode == "normal":
                key = np.concatenate([key[..., : rotary.start], rotated_key], -1)
        self.write(layer, [s.tokens[number] for s, number in new], key, value)
        outs, errors, row = [], [], 0
        for sequence, count in self.batch:
            rows = query[row : row + count]
            out, error = self._attend(layer, sequence, rows, **options)
            outs.append(out)
            errors.append(error)
            row += count
        return np.concatenate(outs), np.concatenate(errors)

    def keys_of(self, layer: int, sequence: Sequence) -> np.ndarray:
        """What a query is multiplied with, float64 (n, H, D)."""
        stored = np.stack([t.k[layer] for t in sequence.tokens])
        if self.mode != "inline":
            return stored.astype(np.float64)
        cosine, sine = reference.cos_sin(self.rope, sequence.positions())
        start = self.latent_dim or 0
        rotated = reference.rotate(
            np.ascontiguousarray(stored[..., start:]), cosine, sine, interleaved=self.interleaved
        )
        return np.concatenate([stored[..., :start].astype(np.float64), rotated], -1)

    def _attend(
        self, layer, sequence, query, *, sm_scale=None, window=None, sink_tokens=0, sinks=None,
        logits_soft_cap=None,
    ):  # fmt: skip
        fmt = reference.format_of(query)
        rows = reference.decode(query, fmt)
        keys = np.repeat(self.keys_of(layer, sequence), self.group, axis=1)
        stored = np.stack([t.v[layer] for t in sequence.tokens]).astype(np.float64)
        values = np.repeat(stored, self.group, axis=1)
        learned = sinks
        first = len(sequence.tokens) - len(rows)
        seen = np.stack([sequence.sees(first + i, window, sink_tokens) for i in range(len(rows))])

        scaling = 1 / np.sqrt(rows.shape[2]) if sm_scale is None else sm_scale
        scores = np.einsum("thd,nhd->htn", rows, keys) * scaling
        if logits_soft_cap is not None:
            scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        scores = np.where(seen, scores, -np.inf)
        highest = scores.max(2, keepdims=True)
        if learned is not None:
            highest = np.maximum(highest, learned.astype(np.float64)[:, None, None])
        weights = np.exp(scores - highest)
        total = weights.sum(2, keepdims=True)
        if learned is not None:
            total += np.exp(learned.astype(np.float64)[:, None, None] - highest)
        out = np.einsum("htn,nhd->thd", weights / total, values)
        return out, self._allowed(out, rows, keys, values, fmt, scaling, logits_soft_cap or 0.0)

    def _allowed(self, out, rows, keys, values, fmt, scaling, cap):
        """How far float32 arithmetic and one rounding may be off: `attention_errors`, and rope.

        A rotated element may be rounded the other way where float32 is near a tie, and then be a
        unit of its format off, or a step of quantisation; inline, a key may be rounded to the
        format of the query. One element has about 1 / sqrt(D) of a row's length.
        """
        width, count = rows.shape[2], len(keys)
        longest = np.sqrt((keys**2).sum(2)).max(0)
        largest = np.abs(values).max(0)
        if any(self._rotated.values()):  # sums are rotated back, each into its whole row
            largest = np.sqrt((values**2).sum(2)).max(0)[..., None]
        size = np.sqrt((rows**2).sum(2)) * longest * abs(scaling)
        units = FEW + 2 * np.sqrt(width) + TRUNCATION[fmt] * width
        of_score = ROUNDING * (size * units + FEW * cap)
        if self.mode != "none":
            of_score += 2 * size * (_unit(fmt) / np.sqrt(width) + FEW * ROUNDING)
            cached = self.past or self.fmt  # a rotated key may be a step of its format off
            if self.mode == "normal" and cached in QUANTISED:
                of_score += 2 * size * _unit(cached) / np.sqrt(width)
        of_sums = ROUNDING * (4 * FEW + 2 * np.sqrt(count))
        relative = 2 * of_score + of_sums + WEIGHT_ROUNDING[fmt]
        return relative[..., None] * largest * 1.01 + ulp(out, fmt) / 2 + TINY


def _unit(fmt: str) -> float:
    """The distance of neighbours, relative to the larger; of int8, to the largest of a row."""
    digits = {"fp32": 23, "fp16": 10, "bf16": 7, "fp8_e4m3": 3, "fp8_e5m2": 2, "int8": 7}
    return 2.0 ** -digits[fmt]


def stored_errors(values: np.ndarray, fmt: str, cache_fmt: str) -> np.ndarray:
    """Return the error of a rotated key in the cache: a unit of its format, and a cache step.

    `values` are float32 (.., D), of the format `fmt` before they were stored.
    """
    longest = np.abs(values).max(-1, keepdims=True).astype(np.float64)
    allowed = ulp(values.astype(np.float64), fmt) + 4 * ROUNDING * longest
    if cache_fmt == "int8":
        return allowed + longest * (_unit("int8") + _unit(fmt))
    if cache_fmt != fmt:
        allowed = allowed + np.abs(values) * (2 * _unit(cache_fmt) + 2 * _unit(fmt))
    return allowed
