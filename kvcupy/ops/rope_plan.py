"""What the signature of a call on RoPE decides, and issuing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import streams
from ..arrays import ArrayView, view
from ..errors import CompileError
from . import checks, plan, rope_expressions, rope_launch
from .rope_launch import ARRAYS, INDEX, REPORT_POSITIONS, REPORT_SLOTS, Part, Rotation, Store
from .store_expressions import report_slots, store_rows

NAMES = tuple({"table": "rope_table", "slots": "slot_mapping"}.get(name, name) for name in ARRAYS)
OUTPUTS = tuple(
    ARRAYS.index(name)
    for name in ("query_out", "key_out", "k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
)
NUM_ROWS = ARRAYS.index("positions")  # the arrays before are moved in whole words


@dataclass
class RopePlan(plan.Plan):
    """A rotation, with or without a store."""

    rotation: Rotation
    parts: list[Part]
    store: Store | None
    alignment: int
    loads: bool = True  # False: only for its checks

    def __post_init__(self) -> None:
        super().__post_init__()
        turned = [("query", part.query) for part in self.parts]
        turned += [("key", part.key) for part in self.parts if part.turns]
        self.in_place = tuple(
            (ARRAYS.index(f"{name}_out"), ARRAYS.index(name))
            for name, one in turned
            if one is not None and one.rows == one.out
        )
        if self.rotation.num_tokens == 0 or not self.loads:
            return
        try:
            for part in self.parts:
                self.launches.append(
                    rope_launch.launch(self.device, part, self.rotation, self.store, self.alignment)
                )
        except CompileError as cause:
            self.cause = cause

    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe what the parts touch: rows of the tokens that there are, caches by pages."""
        tokens = self.rotation.num_tokens
        stored = self.store.slots.shape[0] if self.store is not None else 0
        found: list[ArrayView | None] = [None] * len(ARRAYS)

        def put_rows(name: str, rows: checks.Rows, source: str) -> None:
            i = INDEX[source]
            found[INDEX[name]] = _rows_view(rows, pointers[i], tokens, view(arrays[i]))

        for part in self.parts:
            for i in part.pointers():
                if i is not None and pointers[i] and found[i] is None:
                    found[i] = view(arrays[i])
            for name, turned in (("query", part.query), ("key", part.key)):
                if turned is None:
                    continue
                if turned.out is None:
                    put_rows(name, turned.rows, name)
                elif part.turns:
                    put_rows(name, turned.rows, name)
                    put_rows(f"{name}_out", turned.out, f"{name}_out")
                else:  # read from where an earlier launch has written
                    found[INDEX[f"{name}_out"]] = None
                    put_rows(name, turned.out, f"{name}_out")
            for name, side in (("k_cache", part.k), ("v_cache", part.v)):
                if side is not None:
                    i = INDEX[name]
                    found[i] = side.cache_view(pointers[i], view(arrays[i]))
            if part.v is not None:
                i = INDEX["value"]
                found[i] = part.v.rows_view(pointers[i], stored, view(arrays[i]))
        return found

    def label(self, output: int, views: list[ArrayView | None]) -> str:
        """Name an output as the caller does: what is written in place is query or key itself."""
        name = self.names[output]
        source = name.removesuffix("_out")
        in_place = source != name and views[ARRAYS.index(ARRAYS[output][:-4])] is None
        return self.names[ARRAYS.index(source)] if in_place else name

    def slots(self, views: list[ArrayView | None], output: int) -> ArrayView | None:
        """Return the slots, for the caches."""
        return views[ARRAYS.index("slots")] if "cache" in ARRAYS[output] else None

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Rotate and store as array expressions."""
        views = dict(zip(ARRAYS, self.views(pointers, arrays), strict=True))
        device, rotation = self.device, self.rotation
        table, positions = views["table"], views["positions"]
        assert table is not None and positions is not None
        valid = rope_expressions.valid_tokens(device, rotation, positions)
        if any(part.reports & REPORT_POSITIONS for part in self.parts):
            rope_expressions.report_positions(device, rotation, positions)
        for part in self.parts:
            turned_key = None
            for name, turned in (("query", part.query), ("key", part.key)):
                rows, target = views[name], views[f"{name}_out"]
                if turned is None:
                    continue
                assert rows is not None
                bits = device.carrier(rows).copy()
                if part.turns:
                    bits[valid] = rope_expressions.turned_rows(
                        device, rotation, rows, views[f"{name}_norm"], table, positions, valid
                    )
                if target is not None and part.turns:
                    device.carrier(target)[valid] = bits[valid]
                if name == "key":
                    turned_key = bits
            self._store(part, views, turned_key, valid)

    def _store(self, part: Part, views: dict[str, ArrayView | None], key: Any, valid: Any) -> None:
        slots = views["slots"]
        if slots is None or self.store is None:
            return
        device, count = self.device, slots.shape[0]
        side = part.k or part.v
        if side is not None and part.reports & REPORT_SLOTS:
            report_slots(
                device, slots, side.cache.num_slots, self.store.skip_slot, self.store.fault_id,
                valid[:count],
            )  # fmt: skip
        for name, side in (("k", part.k), ("v", part.v)):
            if side is None:
                continue
            value, cache_view = views["value"], views[f"{name}_cache"]
            assert cache_view is not None
            rows = key[:count] if name == "k" else device.carrier(value)  # type: ignore[arg-type]
            store_rows(
                device, side, rows, cache_view, slots, self.store.skip_slot,
                views[f"{name}_scale"], views[f"{name}_scale_cache"], valid[:count],
            )  # fmt: skip


def _rows_view(rows: checks.Rows, pointer: int, num_tokens: int, like: ArrayView) -> ArrayView:
    shape = (num_tokens, rows.num_heads, rows.width)
    strides = (rows.token_bytes, rows.head_bytes, like.itemsize)
    return ArrayView(pointer, shape, strides, like.format, like.device, owner=like.owner)


@dataclass
class AlternatePlan:
    """Rotation, then the K copy on the stream and the V copy on another, ordered by events."""

    whole: RopePlan  # only for its checks
    rotate: RopePlan
    store_k: RopePlan
    store_v: RopePlan
    used_at: int = 0

    def settle(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Prepare the checks, and let go of the call for which this was made."""
        for one in (self.whole, self.rotate, self.store_k, self.store_v):
            one.settle(pointers, arrays)

    def run_on(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Any, alternate: Any
    ) -> None:
        """Issue the three launches and the events between them."""
        device, library = self.whole.device, self.whole.library
        main = device.as_stream(stream, library)
        try:
            other = device.as_stream(alternate, library)
        except (TypeError, ValueError) as error:
            raise type(error)(f"alt_{error}") from None
        self.whole.check(pointers, arrays)
        if any(one.cause is not None for one in (self.rotate, self.store_k, self.store_v)):
            for on in (main, other):
                device.check_fallback(self.rotate.operation, on)
        self.rotate.issue(pointers, arrays, main)
        streams.fork(main, other)
        self.store_k.issue(pointers, arrays, main)
        self.store_v.issue(pointers, arrays, other)
        streams.join(main, other)
