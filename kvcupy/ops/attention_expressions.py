"""Attention as array expressions: what runs where its kernels cannot be compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import faults
from ..arrays import ArrayView
from ..devices.protocol import Device
from . import expressions
from .attention_checks import Call
from .side import Side

_COUNTS = ("seq_lens", "query_lens", "hole_starts", "holes", "key_starts", "tree_lens")


@dataclass(frozen=True)
class _Sequence:
    """What the host knows of a sequence: its number, page table, lengths, tree and hole.

    `length` new tokens begin at row `start` of the query, of which `there` exist. `first_tree` is
    the first key that the tree mask is about, None if it is about none.
    """

    number: int
    table: Any
    seq_len: int
    start: int
    length: int
    there: int
    first_tree: int | None
    hole_start: int
    hole: int
    key_start: int

    @property
    def first_new(self) -> int:
        """The position of the first query."""
        return max(self.seq_len, -1) - self.length

    def keys_before(self, most: int) -> int:
        """Return how many keys lie at places before `most`."""
        return max(min(self.hole_start, most), most - self.hole)


def attend(device: Device, call: Call, given: dict[str, ArrayView]) -> None:
    """Attend sequence by sequence.

    Notes
    -----
    Lengths are read by the host, so this is not legal in a capture.
    """
    host = {
        name: device.to_numpy(given[name]).astype("int64")
        for name in ("block_table", *_COUNTS)
        if name in given
    }
    new = host.get("query_lens")
    start = 0
    for b in range(call.num_sequences):
        length = 1 if new is None else int(max(new[b], 0))
        there = min(length, call.num_tokens - start)
        if new is not None and (new[b] < 0 or there < length):
            _note(device, "query_lens", b, new[b])
        if there:
            counts = {name: int(max(host[name][b], 0)) for name in _COUNTS[2:] if name in host}
            seq_len, nodes = int(host["seq_lens"][b]), counts.get("tree_lens", length)
            first_tree = max(seq_len, -1) - nodes if nodes and "tree_mask" in given else None
            one = _Sequence(
                b, host["block_table"][b], seq_len, start, length, there, first_tree,
                counts.get("hole_starts", 0), counts.get("holes", 0), counts.get("key_starts", 0),
            )  # fmt: skip
            _attend_with(device, call, given, one)
        start += there


def _attend_with(device: Device, call: Call, given: dict[str, ArrayView], one: _Sequence) -> None:
    """Attend with the new tokens of one sequence."""
    cache, options, there = call.k.cache, call.options, one.there
    num_keys = max(0, one.seq_len)
    if num_keys > one.keys_before(call.max_keys):
        _note(device, "seq_lens", one.number, one.seq_len)
        num_keys = one.keys_before(call.max_keys)
    rows = slice(one.start, one.start + there)
    query = device.carrier(given["query"])[rows]
    xp = expressions.module_of(query)
    query = expressions.decode(query, given["query"].format)
    keys = xp.arange(num_keys)
    places = xp.where(keys < one.hole_start, keys, keys + one.hole)
    entries = places // cache.page_size
    seen = _visible(device, call, given, keys, one)
    pages = xp.where(seen.any(axis=0), xp.asarray(one.table)[entries], -1)
    num_pages = cache.num_slots // cache.page_size
    for entry in sorted({int(i) for i in entries[pages >= num_pages]}):
        _note(device, "block_table", one.number * call.max_pages + entry, one.table[entry])
    exists = (pages >= 0) & (pages < num_pages)
    where = xp.where(exists, pages, 0), places % cache.page_size
    seen = seen & exists[None]
    k, v = (_rows(device, call, given, name, where) for name in "kv")
    if "rope_table" in given:
        k = _turned(device, call, given, k, keys, one)
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
    flat_out = out.transpose(1, 0, 2, 3).reshape(there, call.num_heads, -1)
    bits = expressions.encode(flat_out.astype(xp.float32), given["out"].format)
    device.carrier(given["out"])[rows] = bits
    if "lse_out" in given:
        flat = lse.transpose(1, 0, 2, 3).reshape(there, call.num_heads)
        device.carrier(given["lse_out"])[rows] = flat


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


@expressions.QUIET
def _turned(
    device: Device, call: Call, given: dict[str, ArrayView], k: Any, keys: Any, one: _Sequence
) -> Any:
    """Turn the rows of keys by their positions."""
    xp, options = expressions.module_of(k), call.options
    table = device.carrier(given["rope_table"])
    positions = keys
    if "tail_positions" in given and one.first_tree is not None:
        tail = device.carrier(given["tail_positions"])[one.number]
        columns = keys - one.first_tree
        inside = (columns >= 0) & (columns < len(tail))
        if len(tail):
            positions = xp.where(inside, tail[xp.where(inside, columns, 0)], keys)
    angles = table[xp.clip(positions, 0, len(table) - 1)][:, None]
    half = table.shape[1] // 2
    cosines, sines = angles[..., :half], angles[..., half:]
    part = k[..., options.rotary_start : options.rotary_start + 2 * half]
    pairs = (
        (slice(0, None, 2), slice(1, None, 2)) if options.interleaved
        else (slice(half), slice(half, None))
    )  # fmt: skip
    a, b = (part[..., pair] for pair in pairs)
    turned = k.copy()
    into = turned[..., options.rotary_start : options.rotary_start + 2 * half]
    into[..., pairs[0]] = a * cosines - b * sines
    into[..., pairs[1]] = b * cosines + a * sines
    return turned


def _visible(
    device: Device, call: Call, given: dict[str, ArrayView], keys: Any, one: _Sequence
) -> Any:
    """Return which keys each new token sees, (tokens, keys)."""
    xp, options = expressions.module_of(keys), call.options
    at, key = one.first_new + xp.arange(one.there)[:, None], keys[None]
    seen = xp.repeat(key >= one.key_start, one.there, axis=0)
    if options.window:
        seen = seen & ((key > at - options.window) | (key < options.sink_keys))
    if options.causal:
        seen = seen & (key <= at)
    if one.first_tree is not None:
        mask = device.carrier(given["tree_mask"])[one.start : one.start + one.there]
        columns = keys - one.first_tree
        inside = (columns >= 0) & (columns < mask.shape[1])
        own = mask[:, xp.where(inside, columns, 0)].astype(bool) if mask.shape[1] else seen & False
        kept = own & inside[None] & (key >= one.key_start)
        seen = xp.where(columns[None] >= 0, kept, seen)
    if options.causal or options.window or one.first_tree is not None:
        seen = seen & (at >= 0)
    return seen


def _note(device: Device, argument: str, position: int, value: Any) -> None:
    operation = faults.operation_id("paged_attention", argument)
    expressions.note_fault(device, 1, operation, position, value)
