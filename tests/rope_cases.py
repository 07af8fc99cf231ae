"""Calls of the rotary operations that check everything, and arguments for them.

What is rotated is compared with float64, within `rotation_errors`; everything else bitwise. A cache
must hold, bit for bit, the store of the rotated key that the operation itself made.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import CONVERTED, GUARD_BYTES, Arg, Buffer, Case, cache_shape, check_faults, mirrored

import kvcupy as kv
from kvcupy import reference
from kvcupy.ops.spec import OPERATIONS
from kvcupy.testing.tolerances import rotation_errors

FLOATS = ("fp32", "fp16", "bf16")


def assert_rotated(
    got, rows, cosine, sine, *, norm=None, width=None, name="rows", seed=None, **options
) -> None:
    """Assert that the first `width` elements of `got` are the rotated `rows`."""
    options = {"interleaved": False, "eps": 1e-6, **options}
    fmt = reference.format_of(rows)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = reference.rotate(rows, cosine, sine, norm=norm, **options)
        allowed = rotation_errors(exact, rows, cosine, sine, fmt, norm=norm, **options)
        want = reference.decode(reference.encode(exact, fmt), fmt)
        values = reference.decode(got, fmt)
        right = (values == want) | (np.isnan(values) & np.isnan(want))
        right |= np.abs(values - exact) <= allowed
    wrong = ~right[..., :width]
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {wrong.size} elements differ; first at index {at}: "
            f"got {values[at]}, want {exact[at]} within {allowed[at]}, seed {seed}"
        )


# One call and its check ----------------------------------------------------------------------


def bits(array: np.ndarray) -> np.ndarray:
    return reference.bits_of(array, reference.format_of(array))


class RopeCase(Case):
    """The buffers of one test, with calls of the rotary operations that check everything."""

    def positions(self, values, dtype="int64", step=1):
        """An index array of one or two dimensions, every `step`-th of a longer one of poison."""
        return self.slots(values, dtype, step, name="positions")

    def table(self, rotary_dim, positions, max_positions=64, *, pad=0, **options):
        """A table that is NaN wherever no position looks, and between its rows."""
        positions = np.asarray(positions, np.int64)
        used = np.unique(positions[(positions >= 0) & (positions < max_positions)])
        content = np.full((max_positions, rotary_dim + pad), np.nan, np.float32)
        frequencies = reference.rope_frequencies(max_positions, rotary_dim, **options)
        content[used, :rotary_dim] = reference.rope_rows(used, *frequencies)
        return self.place(content, "fp32", lambda a: a[:, :rotary_dim], name="rope_table")

    def twin(self, arg):
        """A copy of an argument at the same alignment and strides, which is not compared."""
        buffer = arg.buffer
        payload = buffer.want[buffer.start : buffer.stop].copy().view(buffer.dtype)
        copy = Buffer(self, buffer.fmt, payload, buffer.start - GUARD_BYTES, buffer.name)
        copy.rotated_width, copy.scale_rule = buffer.rotated_width, buffer.scale_rule
        return Arg(copy, arg._cut)

    def issue(self, operation, call, stream):
        if stream is not None:
            self.device.synchronize()
        getattr(kv, operation)(**{n: self.to_pass(x) for n, x in call.items()}, stream=stream)
        if stream is not None:
            stream.synchronize()

    def take_over(self, rows, target, norm, call):
        """Check rotated rows, and let the mirror hold what the device holds of them."""
        if rows is None:
            return
        target = rows if target is None else target
        table, positions = call["rope_table"].view, call["positions"].view
        tokens = inside(positions, len(table))
        cosine, sine = reference.cos_sin(
            table, positions[..., tokens], call.get("sections"),
            call.get("sections_interleaved", False),
        )  # fmt: skip
        before, got = rows.view[tokens].copy(), target.live()[tokens]
        width = table.shape[1] if norm is None else before.shape[-1]
        assert_rotated(
            got, before, cosine, sine, width=width, name=rows.buffer.name, seed=self.seed,
            norm=mirrored(norm), interleaved=call.get("interleaved", False),
            eps=call.get("eps", 1e-6),
        )  # fmt: skip
        bits(target.view)[tokens] = bits(before)
        bits(target.view)[tokens, ..., :width] = bits(got)[..., :width]

    def rotate(self, operation, *args, stream=None, **options):
        """Check one call of a rotary operation.

        A key that was not written is asked for in a second call, on twins of what is written.
        """
        call = dict(zip(OPERATIONS[operation].parameters, args, strict=False)) | options
        store = operation.removeprefix("rope_")
        for source, target in CONVERTED.get(store, ()):
            call[target].buffer.exact &= call[source].fmt == call[target].fmt
        if "slot_mapping" in call and not isinstance(call["slot_mapping"], Arg):
            call["slot_mapping"] = self.slots(call["slot_mapping"])
        self.issue(operation, call, stream)
        self.take_over(call["query"], call.get("query_out"), call.get("query_norm"), call)
        name = "rope_key" if "rope_key" in call else "key"
        key = call[name]
        if not call.get("write_key", True):
            key = self.twin(key)
            again = {n: self.twin(x) for n, x in call.items() if x is not None and "cache" in n}
            again |= {name: key, "query": None, "write_key": True}
            alone = call.keys() - {"query_out", "query_norm"}
            self.issue(operation, {n: again.get(n, call[n]) for n in alone}, stream)
        self.take_over(key, call.get("key_out"), call.get("key_norm"), call)
        axes = np.atleast_2d(call["positions"].view)
        max_positions, count = len(call["rope_table"].view), axes.shape[1]
        # In an array (3, T), a token may be named by its own index or by that in memory.
        outside = [
            (place, int(axes[axis, token]))
            for axis, token in np.argwhere((axes < 0) | (axes >= max_positions)).tolist()
            for place in {token, axis * count + token}
        ]
        faults = {"positions": outside}
        if store != operation:
            stored = {n: mirrored(x) for n, x in call.items() if n in OPERATIONS[store].parameters}
            slots = call["slot_mapping"].view
            rotated = np.isin(np.arange(len(slots)), inside(axes, max_positions))
            stored |= {name: key.view, "slot_mapping": np.where(rotated, slots, -1)}
            faults["slot_mapping"] = getattr(reference, store)(**stored)
        check_faults(self.device, operation, faults)
        self.check_buffers()


def inside(positions, max_positions):
    """The tokens whose positions the table has."""
    axes = np.atleast_2d(positions)
    return np.flatnonzero(((axes >= 0) & (axes < max_positions)).all(axis=0))


# Arguments -----------------------------------------------------------------------------------

POSITIONS = (5, 0, 63, 5, 17, 40)


def arguments(
    case, fmt="bf16", *, tokens=6, heads=(3, 2), width=8, rotary_dim=None, positions=POSITIONS
):
    """Query, key, table and positions."""
    return (
        case.rows(fmt, (tokens, heads[0], width), name="query"),
        case.rows(fmt, (tokens, heads[1], width), name="key"),
        case.table(rotary_dim or width, positions),
        case.positions(positions),
    )


def store_arguments(
    case, fmt="bf16", cache_fmt=None, *, layout="slots", width=8, v_width=6, rotary_dim=None,
    positions=POSITIONS, tokens=6,
):  # fmt: skip
    """All of `rope_store_kv` up to the caches, which have 12 slots."""
    query, key, table, placed = arguments(
        case, fmt, width=width, rotary_dim=rotary_dim, positions=positions, tokens=tokens
    )
    value = case.input(fmt, (tokens, 2, v_width), name="value")
    k_cache = case.output(cache_fmt or fmt, cache_shape(layout, 3, 4, 2, width), name="k_cache")
    v_cache = case.output(cache_fmt or fmt, cache_shape(layout, 3, 4, 2, v_width), name="v_cache")
    return query, key, value, table, placed, k_cache, v_cache


SLOTS = (7, 0, -1, 11, 3, 4)


def mla_arguments(
    case, fmt="bf16", cache_fmt=None, *, rank=12, width=8, rotary_dim=None, positions=POSITIONS,
    paged=False, heads=3,
):  # fmt: skip
    """All of `rope_store_mla` up to the cache, which has 12 slots."""
    shape = (3, 4, rank + width) if paged else (12, rank + width)
    return (
        case.rows(fmt, (6, heads, width), name="query"),
        case.input(fmt, (6, rank), name="latent"),
        case.rows(fmt, (6, width), name="rope_key"),
        case.table(rotary_dim or width, positions),
        case.positions(positions),
        case.output(cache_fmt or fmt, shape, name="cache"),
    )


THREE = np.array([[5, 0, 63, 5, 17, 40], [1, 62, 3, 3, 0, 9], [2, 7, 7, 60, 61, 0]])
