"""Attention as array expressions: what runs where its kernels cannot be compiled."""

from __future__ import annotations

from typing import Any

from .. import faults
from ..arrays import ArrayView
from ..devices.protocol import Device
from . import expressions
from .attention_checks import Call
from .side import Side


def attend(device: Device, call: Call, given: dict[str, ArrayView]) -> None:
    """Attend sequence by sequence.

    Notes
    -----
    Lengths are read by the host, so this is not legal in a capture.
    """
    host = {
        name: device.to_numpy(given[name]).astype("int64")
        for name in ("block_table", "seq_lens", "query_lens")
        if name in given
    }
    table, seq_lens = host["block_table"], host["seq_lens"]
    new = host.get("query_lens")
    start = 0
    for b in range(call.num_sequences):
        length = 1 if new is None else int(max(new[b], 0))
        there = min(length, call.num_tokens - start)
        if new is not None and (new[b] < 0 or there < length):
            _note(device, "query_lens", b, new[b])
        if there:
            _sequence(device, call, given, b, table[b], int(seq_lens[b]), start, length, there)
        start += there


def _sequence(
    device: Device, call: Call, given: dict[str, ArrayView], b: int, table: Any, seq_len: int,
    start: int, length: int, there: int,
) -> None:  # fmt: skip
    """Attend with the new tokens of one sequence; the first `there` of them exist."""
    cache, options = call.k.cache, call.options
    num_keys = max(0, seq_len)
    if num_keys > call.max_keys:
        _note(device, "seq_lens", b, seq_len)
        num_keys = call.max_keys
    query = device.carrier(given["query"])[start : start + there]
    xp = expressions.module_of(query)
    query = expressions.decode(query, given["query"].format)
    first_new = max(seq_len, -1) - length
    positions = first_new + xp.arange(there)
    keys = xp.arange(num_keys)
    seen = _visible(device, call, given, keys, positions, first_new, start)
    pages = xp.where(seen.any(axis=0), xp.asarray(table)[keys // cache.page_size], -1)
    num_pages = cache.num_slots // cache.page_size
    for entry in sorted({int(i) for i in (keys // cache.page_size)[pages >= num_pages]}):
        _note(device, "block_table", b * call.max_pages + entry, table[entry])
    exists = (pages >= 0) & (pages < num_pages)
    where = xp.where(exists, pages, 0), keys % cache.page_size
    seen = seen & exists[None]
    k, v = (_rows(device, call, given, name, where) for name in "kv")
    query = query.reshape(there, cache.num_heads, call.group, -1)
    scores = xp.einsum("thgd,khd->htgk", query, k) * query.dtype.type(call.sm_scale)
    if options.soft_cap:
        cap = query.dtype.type(options.soft_cap)
        scores = cap * xp.tanh(scores / cap)
    mask = seen[None, :, None, :]
    scores = xp.where(mask, scores, -xp.inf)
    sinks = None
    if "sinks" in given:
        sinks = device.carrier(given["sinks"]).reshape(cache.num_heads, 1, call.group, 1)
    out, lse = _softmax(xp, scores, mask, v, sinks)
    rows = out.transpose(1, 0, 2, 3).reshape(there, call.num_heads, -1)
    bits = expressions.encode(rows.astype(xp.float32), given["out"].format)
    device.carrier(given["out"])[start : start + there] = bits
    if "lse_out" in given:
        flat = lse.transpose(1, 0, 2, 3).reshape(there, call.num_heads)
        device.carrier(given["lse_out"])[start : start + there] = flat


@expressions.QUIET
def _softmax(xp: Any, scores: Any, mask: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    """Return (heads, tokens, group, width) outputs and (heads, tokens, group, 1) LSE."""
    shape = (*scores.shape[:3], 1)
    largest = xp.full(shape, -xp.inf, scores.dtype)
    if scores.shape[3]:
        largest = scores.max(axis=3, keepdims=True)
    if sinks is not None:
        largest = xp.maximum(largest, sinks)
    origin = xp.where(xp.isinf(largest), 0, largest)
    weights = xp.where(mask, xp.exp(scores - origin), 0)
    total = weights.sum(axis=3, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - origin)
    known = xp.where(xp.isnan(v) & ~mask.any(axis=(0, 1, 2))[:, None, None], 0, v)
    out = xp.einsum("htgk,khd->htgd", weights, known)
    out = xp.where(total > 0, out / xp.where(total > 0, total, 1), xp.where(total == 0, 0, out))
    return out, (origin + xp.log(total)).astype(xp.float32)


def _rows(device: Device, call: Call, given: dict[str, ArrayView], name: str, where: Any) -> Any:
    """Return the float32 K or V rows of keys, (keys, heads, width)."""
    one: Side = getattr(call, name)
    cache = given[f"{name}_cache"]
    bits = device.carrier(one.cache_view(cache.pointer, cache))[where]
    values = expressions.decode(bits, one.cache_format.name)
    slots = where[0] * one.cache.page_size + where[1]
    if f"{name}_scale_cache" in given:
        own = device.carrier(given[f"{name}_scale_cache"])[slots]
        return expressions.multiply(values, own[..., None])
    if f"{name}_scale" in given:
        scale = device.carrier(given[f"{name}_scale"]).reshape(-1, 1)
        return expressions.multiply(values, scale)
    return expressions.multiply(values, values.dtype.type(one.scale.value))


def _visible(
    device: Device, call: Call, given: dict[str, ArrayView], keys: Any, positions: Any,
    first_new: int, start: int,
) -> Any:  # fmt: skip
    """Return which keys each new token sees, (tokens, keys)."""
    xp, options = expressions.module_of(positions), call.options
    at, key = positions[:, None], keys[None]
    if options.window:
        seen = (key > at - options.window) | (key < options.sink_keys)
    else:
        seen = xp.ones((len(positions), len(keys)), bool)
    if "tree_mask" in given:
        mask = device.carrier(given["tree_mask"])[start : start + len(positions)]
        columns = keys - first_new
        inside = (columns >= 0) & (columns < mask.shape[1])
        own = mask[:, xp.where(inside, columns, 0)].astype(bool) if mask.shape[1] else seen & False
        seen = xp.where(columns[None] >= 0, own & inside[None], seen)
    elif options.causal:
        seen = seen & (key <= at)
    return seen & (at >= 0)


def _note(device: Device, argument: str, position: int, value: Any) -> None:
    operation = faults.operation_id("paged_attention", argument)
    expressions.note_fault(device, 1, operation, position, value)
