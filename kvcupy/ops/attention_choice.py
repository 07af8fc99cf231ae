"""The attention kernel of a call, how it is tiled, and into how many pieces keys are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..devices.protocol import Device
from ..formats import bytes_per_element
from ..kernels import Specialisation
from . import attention_kernels as kernels
from .attention_call import AttentionCall, Schedule
from .kv_operand import KVOperand
from .launch import require_countable, widest

_PACKS_PER_LANE = (1, 3)
_HOST_ROWS = (1, 4, 8, 32, 64)  # the last for rows of up to _HOST_NARROW elements
_HOST_NARROW = 128
_HOST_BLOCKS = 16  # that run at a time on many cores
_HOST_MIN_BYTES = 512 << 10  # of a piece, by K or V
_HOST_FEW_ROWS, _HOST_ROWS_TOGETHER = 8, 32  # kFewRows, kRowsTogether of host/attention.h
_HOST_PACKS = (1, 2, 4, 8, 12, 16, 24, 32, 72, 96)  # where one thread holds all of a row
_PACK = 8  # elements of a row that a lane loads at a time; 16 bytes where they have 16 bits
_DECODE_THREADS = 128
_WORD_BYTES = 16  # rows are copied to shared memory in words of this size
_MIN_ROWS_PER_SEQUENCE = 16  # of prefill: with fewer, most of a tile would be empty
_MAX_GRID_Y = 65535
# Four-bit formats whose codes times block scales are exact in a format of 16 bits.
_EXACT_CODES = {"fp16": ("nvfp4",), "bf16": ("nvfp4", "mxfp4")}

# A piece has at least 256 keys, or 128 KiB of them. Where sequences are long it has at least 512
# keys, 384 KiB of them, and 16 times the bytes of its state: on an H100 a piece that reads nothing
# takes as long as one that reads 96 KiB while all blocks read.
_MIN_KEYS, _MIN_BYTES = 256, 128 << 10
_MIN_KEYS_OF_LONG, _MIN_BYTES_OF_LONG, _MIN_BYTES_PER_STATE_BYTE = 512, 384 << 10, 16


@dataclass(frozen=True)
class Tiling:
    """The kernel of a call, and its tiles.

    A tile has `rows` packed rows; `lanes` threads of the plain kernel share a key; a block has
    `heads` KV heads.
    """

    specialisation: Specialisation
    rows: int
    lanes: int
    threads: int
    smem_bytes: int
    blocks_per_sm: int = 4
    heads: int = 1
    slow_path_reason: str = ""


def choose_tiling(device: Device, call: AttentionCall, alignment: int) -> Tiling:
    """Choose the kernel of a call: prefill on tensor cores where it can take the call.

    `alignment` is the common alignment of query, caches, output and rope table, as a plan gets it.
    """
    if suits_prefill(device, call, alignment):
        rows = _choose_prefill_rows(device, call)
        return _tensor_core_tiling(device, _prefill_specialisation_of(call, rows), 2)
    if reason := slow_path_reason(device, call, alignment):
        tiling = _plain_tiling(device, call, alignment)
        return replace(tiling, slow_path_reason=reason) if device.warp_lanes == 32 else tiling
    name, invariant = call.k.cache_format.name, call.options.batch_invariant
    if not _is_wide(call):
        chosen = _decode_specialisation_of(device, call, alignment)
        most_blocks = kernels.decode_mma_blocks(chosen)
        return _tensor_core_tiling(device, chosen, most_blocks, _rest_bytes(call, chosen))
    # No more blocks than an SM holds: a piece writes as many bytes as 114 latents have.
    has_many_rows = _rows_per_sequence(call) > kernels.DECODE_MMA_ROWS
    if has_many_rows and not invariant and call.k.four_bit is None:
        chosen = kernels.heads_specialisation(name, device.shared_bytes)
        return _tensor_core_tiling(device, chosen, 1)
    return _tensor_core_tiling(device, kernels.latent_specialisation(name), 2)


def _tensor_core_tiling(
    device: Device, chosen: Specialisation, most_blocks: int, more_bytes: int = 0
) -> Tiling:
    """Return the tiling of a kernel; registers of an SM have room for `most_blocks`."""
    rows, threads = kernels.tile_of(chosen)
    smem_bytes = kernels.smem_bytes(chosen, device.arch) + more_bytes
    fitting = kernels.blocks_per_sm(smem_bytes, device.shared_bytes)
    return Tiling(chosen, rows, 1, threads, smem_bytes, max(1, min(most_blocks, fitting)))


# --- Whether tensor cores serve a call ------------------------------------------------------------

_UNALIGNED = "rows of query, out or the caches are not whole aligned 16-byte words"


def slow_path_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why decode on tensor cores does not support a call, or ""."""
    return (
        _invariance_reason(call)
        or _query_reason(device, call, alignment)
        or (_wide_reason(call) if _is_wide(call) else "")
        or (
            _four_bit_reason(device, call, alignment)
            if call.k.four_bit is not None
            else _row_reason(call, alignment)
        )
    )


def _invariance_reason(call: AttentionCall) -> str:
    """Return why no kernel on tensor cores is batch-invariant for a call that must be, or "".

    Decode rounds weights or values in units of the largest scale of a tile's values, and a tile of
    more tokens has later keys.
    """
    if not call.options.batch_invariant:
        return ""
    if call.arrays.v_scale_cache is not None:
        return "batch_invariant does not support v_scale_cache"
    name = call.v.cache_format.name
    if call.v.four_bit is not None and name != kernels.WIDE_FOUR_BIT:
        return f"batch_invariant does not support {name} caches"
    return ""


def _query_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    query, out = call.arrays.query, call.out
    if device.warp_lanes != 32:
        return "the device has no warps"
    if device.arch == "sm_75":
        return "kernels on tensor cores need sm_80"
    if query.format not in kernels.PREFILL_FORMATS:
        return f"query is {query.format}, expected {' or '.join(kernels.PREFILL_FORMATS)}"
    strides = *query.strides[:2], *out.strides[:2]
    return "" if widest((alignment, *map(abs, strides))) == _WORD_BYTES else _UNALIGNED


def _wide_reason(call: AttentionCall) -> str:
    widths = _widths(call)
    if any(n > most for n, most in zip(widths, kernels.LATENT_WIDTHS, strict=True)):
        return f"head dims {widths} of K and V exceed {kernels.LATENT_WIDTHS}"
    if call.rotates_keys:
        return f"RoPE on read is not supported for head dims {widths}"
    if call.k.rotated_width or call.v.rotated_width:
        return f"caches that are stored rotated are not supported for head dims {widths}"
    return ""


def _row_reason(call: AttentionCall, alignment: int) -> str:
    """Return why formats or alignment of caches of 16 and 8 bits do not suit decode, or ""."""
    k, v = call.k.cache_format, call.v.cache_format
    if k is not v:
        return f"k_cache is {k.name} but v_cache is {v.name}"
    if k.name not in kernels.LATENT_FORMATS:
        return f"{k.name} caches are not supported for head dims {_widths(call)}"
    if k.itemsize == 2 and call.arrays.query.format != k.name:
        return f"query is {call.arrays.query.format} but the caches are {k.name}"
    if not all(_has_whole_words(each, alignment) for each in (call.k, call.v)):
        return _UNALIGNED
    if not _has_whole_packs(call, alignment):
        return f"RoPE on read needs rotary dims in whole aligned chunks of {_PACK} elements"
    return ""


def _four_bit_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why decode does not support a call over four-bit caches, or "".

    Codes and the block scales of a row must be whole words of 4 bytes at aligned addresses, or,
    unless rows are wide, be in the order of the pool's rows.
    """
    padded = kernels.padded_widths(*_widths(call))
    for operand, width in zip((call.k, call.v), padded or _widths(call), strict=True):
        name, scales = operand.arrays.cache.name, operand.cache.scales
        assert scales is not None
        if padded is None:
            axes = 2 if operand.cache.num_heads == 1 else 3
            if operand.code_word_bytes(alignment) < 4:
                return f"codes of {name} are not whole aligned 4-byte words"
            if tuple(scales.strides[:axes]) != tuple(operand.cache_strides[:axes]):
                return f"codes and scales of {name} have other strides"
            continue
        is_widest = padded == kernels.PREFILL_WIDTHS[-1]
        room = 0 if is_widest else kernels.most_scale_bytes(operand.cache_format.name, width)
        if reason := _code_reason(operand, alignment, room):
            return reason
    if padded is not None and call.k.rotated_width:
        chosen = _decode_specialisation_of(device, call, alignment)
        smem_bytes = kernels.smem_bytes(chosen, device.arch) + _rest_bytes(call, chosen)
        if smem_bytes > device.shared_bytes:
            return f"{device.arch} has too little shared memory for a cache that is stored rotated"
    return ""


def _code_reason(operand: KVOperand, alignment: int, scale_room: int = 0) -> str:
    """Return why codes and scales of a four-bit cache cannot be copied in words, or "".

    With `scale_room`, rows of whole chunks of 32 elements may be anywhere, if scales follow their
    codes, and fit so many bytes with the codes in their first word.
    """
    format, scales = operand.four_bit, operand.cache.scales
    assert format is not None
    assert scales is not None
    code_bytes = operand.cache.width // 2
    scale_bytes = operand.cache.width // format.group * format.scale_bytes
    steps = (scale_bytes, scales.start_bytes, *scales.strides)
    word_bytes = operand.code_word_bytes(alignment)
    if word_bytes >= 4 and not any(n % 4 for n in steps):
        return ""
    follows = scales == (code_bytes, operand.cache.strides)
    fits = 4 - word_bytes + scale_bytes <= scale_room
    if follows and fits and word_bytes < 4 and operand.cache.width % 32 == 0:
        return ""
    return (
        f"codes or scales of {operand.arrays.cache.name} ({scale_bytes} bytes of scales per row) "
        "are not whole aligned 4-byte words"
    )


def suits_prefill(device: Device, call: AttentionCall, alignment: int) -> bool:
    """Return whether a call is ragged and the prefill kernel can take it.

    Query and caches are then all fp16 or all bf16, or the caches have 8 or 4 bits, in any two
    formats, rows are whole words at aligned addresses, and sequences have rows enough on average,
    as far as shapes tell.
    """
    if not call.is_ragged or call.options.batch_invariant or _is_wide(call):
        return False
    if _query_reason(device, call, alignment):
        return False
    query_format, operands = call.arrays.query.format, (call.k, call.v)
    if _is_quantized(call):
        if not all(_is_dequantized(each, query_format, alignment) for each in operands):
            return False
        # A tile of prefill dequantizes its keys first, and takes longer than two tiles of decode;
        # of narrow rows of 8 bits, than one (by count of instructions, not measured).
        is_narrow = kernels.padded_widths(*_widths(call)) == kernels.PREFILL_WIDTHS[0]
        one_tile = (is_narrow and call.k.four_bit is None) or slow_path_reason(
            device, call, alignment
        )
        if _rows_per_sequence(call) <= kernels.DECODE_MMA_ROWS * (1 if one_tile else 2):
            return False
    else:
        formats = {each.cache_format.name for each in operands}
        if formats != {query_format} or not _has_whole_packs(call, alignment):
            return False
    rows = call.num_tokens * call.heads_per_kv_head
    return rows >= _MIN_ROWS_PER_SEQUENCE * max(1, call.num_sequences)


def _is_dequantized(operand: KVOperand, query_format: str, alignment: int) -> bool:
    """Return whether prefill can dequantize a cache to the format of the query, exactly."""
    if operand.four_bit is None:
        return _has_whole_words(operand, alignment)
    if operand.cache_format.name not in _EXACT_CODES[query_format]:
        return False
    return not operand.rotated_width and not _code_reason(operand, alignment)


# --- Shapes ---------------------------------------------------------------------------------------


def _widths(call: AttentionCall) -> tuple[int, int]:
    return call.k.cache.width, call.v.cache.width


def _is_wide(call: AttentionCall) -> bool:
    return kernels.padded_widths(*_widths(call)) is None


def _is_quantized(call: AttentionCall) -> bool:
    return call.k.cache_format.quantised and call.v.cache_format.quantised


def _rows_per_sequence(call: AttentionCall) -> int:
    return call.heads_per_kv_head * -(-call.num_tokens // max(1, call.num_sequences))


def _has_whole_words(operand: KVOperand, alignment: int) -> bool:
    row_bytes = operand.cache.width * operand.cache_format.itemsize
    return widest((alignment, row_bytes, *map(abs, operand.cache_strides))) == _WORD_BYTES


def _has_whole_packs(call: AttentionCall, alignment: int) -> bool:
    """Return whether rows of both caches are whole packs at aligned addresses.

    With keys that are rotated, their rotated elements and the angles too.
    """
    strides = [n for operand in (call.k, call.v) for n in operand.cache_strides]
    word_bytes = min(_WORD_BYTES, _PACK * call.k.cache_format.itemsize)
    whole = all(operand.cache.width % _PACK == 0 for operand in (call.k, call.v))
    if not whole or widest((alignment, *map(abs, strides))) < word_bytes:
        return False
    table = call.arrays.rope_table
    if table is None:
        return True
    rotated = table.shape[1] if call.options.interleaved else table.shape[1] // 2
    whole = call.options.rotary_start % _PACK == 0 and rotated % _PACK == 0
    return whole and widest((alignment, abs(table.strides[0]))) == _WORD_BYTES


# --- Tiles ----------------------------------------------------------------------------------------


def _decode_specialisation_of(
    device: Device, call: AttentionCall, alignment: int
) -> Specialisation:
    operands = call.k, call.v
    is_four_bit = call.k.four_bit is not None
    unaligned = is_four_bit and any(v.code_word_bytes(alignment) < 4 for v in operands)
    name = call.k.cache_format.name
    few, many = (
        kernels.decode_mma_specialisation(name, *_widths(call), rows=rows, unaligned=unaligned)
        for rows in kernels.DECODE_MMA_ROW_COUNTS
    )
    suits = _rows_per_sequence(call) <= kernels.DECODE_MMA_FEW_ROWS
    # Batch-invariant tiles do not depend on the rows of a sequence.
    is_few = suits and not call.options.batch_invariant and kernels.is_reachable(few, device.arch)
    return few if is_few else many


def _rest_bytes(call: AttentionCall, chosen: Specialisation) -> int:
    """Return the shared memory that decode needs for `rest` of queries over rotated keys."""
    return kernels.decode_mma_rest_bytes(chosen) if call.k.rotated_width else 0


def _prefill_specialisation_of(call: AttentionCall, rows: int) -> Specialisation:
    return kernels.prefill_specialisation(
        call.arrays.query.format, *_widths(call), rows=rows, rotates=call.rotates_keys,
        quantized=_is_quantized(call),
    )  # fmt: skip


def _choose_prefill_rows(device: Device, call: AttentionCall) -> int:
    """Return how many packed rows a tile of the prefill kernel has.

    With 128, matrices of K and V that are loaded from shared memory are multiplied twice. But tiles
    of sequences that have fewer rows are half empty, and where neither tiles nor pieces of their
    keys fill the device, twice as many tiles do.
    """
    few, many = kernels.PREFILL_ROWS
    widths = kernels.padded_widths(*_widths(call))
    if widths is None or widths[1] > 128:
        return few
    if not kernels.is_reachable(_prefill_specialisation_of(call, many), device.arch):
        return few
    if call.num_tokens * call.heads_per_kv_head <= few * call.num_sequences:
        return few
    blocks = call.num_tokens * call.heads_per_kv_head * call.k.cache.num_heads / many
    return many if blocks * max(1, call.max_keys / _MIN_KEYS_OF_LONG) >= device.sm_count else few


def _plain_tiling(device: Device, call: AttentionCall, alignment: int) -> Tiling:
    name = call.k.cache_format.ctype
    if call.k.four_bit is None and (
        call.k.cache_format is not call.v.cache_format or not _has_whole_packs(call, alignment)
    ):
        name = kernels.ANY_FORMAT
    row_counts: tuple[int, ...]

    def specialise(rows: int) -> Specialisation:
        return kernel.specialise(name, rows, packs_per_lane, call.rotates_keys)

    packs = -(-max(call.k.cache.width, call.v.cache.width) // _PACK)
    kernel = kernels.DECODE[device.warp_lanes]
    if device.warp_lanes == 1:
        threads, lanes, row_counts = 1, 1, _HOST_ROWS
        packs_per_lane = next(n for n in _HOST_PACKS if n >= packs)
        if packs_per_lane * _PACK > _HOST_NARROW:
            row_counts = row_counts[:-1]
    else:
        threads = _DECODE_THREADS
        packs_per_lane = next(n for n in _PACKS_PER_LANE if packs <= 32 * n)
        lanes = min(32, 1 << (-(-packs // packs_per_lane) - 1).bit_length())
        formats = kernels.ROTATING_ROWS if call.rotates_keys else kernels.DECODE_ROWS
        if packs_per_lane not in formats.get(name, {}):
            name = kernels.ANY_FORMAT
        row_counts = tuple(
            n for n in formats[name][packs_per_lane]
            if kernels.is_reachable(specialise(n), device.arch)
        )  # fmt: skip
    # Rows of a sequence that can share what is loaded, as far as shapes tell.
    tokens = 1 if call.options.batch_invariant else -(-call.num_tokens // call.num_sequences)
    sharing = call.heads_per_kv_head * tokens
    rows = next((n for n in row_counts if n >= sharing), row_counts[-1])
    subwarps = threads // lanes
    smem_floats = subwarps * rows * (2 + lanes * _PACK * packs_per_lane)
    heads = 1
    if device.warp_lanes == 1 and rows <= _HOST_FEW_ROWS:
        heads = min(call.k.cache.num_heads, _HOST_ROWS_TOGETHER // rows)
    smem_bytes = 0 if subwarps == 1 else 4 * smem_floats
    return Tiling(specialise(rows), rows, lanes, threads, smem_bytes, heads=heads)


def num_tiles(call: AttentionCall, rows: int) -> int:
    """Return a bound on the tiles of all sequences, as `find_tile` of the kernels numbers them."""
    packed = call.num_tokens * call.heads_per_kv_head
    require_countable(packed, "query")
    if not call.is_ragged:
        return call.num_sequences * -(-call.heads_per_kv_head // rows)
    return packed // rows + call.num_sequences


def grid_of(
    specialisation: Specialisation, num_pieces: int, num_kv_heads: int
) -> tuple[int, int, int]:
    """Return the grid of an attention kernel: in decode, heads run fastest."""
    if specialisation.kernel is kernels.PREFILL:
        return num_pieces, num_kv_heads, 1
    num_layers = -(-num_pieces // _MAX_GRID_Y)
    return num_kv_heads, -(-num_pieces // num_layers), num_layers


def merges_parts(specialisation: Specialisation) -> bool:
    """Return whether the last block of a tile merges its pieces, and not another kernel.

    That block has one SM. States of tiles with many rows take it longer than a launch, whose blocks
    are on all SMs. The plain kernel lacks registers, and on a processor a launch takes no time.
    """
    return specialisation.kernel in (kernels.DECODE_MMA, kernels.DECODE_LATENT)


def choose_schedule(device: Device, call: AttentionCall, tiling: Tiling) -> Schedule | None:
    """Return the bounds of a call's pieces, from shapes alone, or None where no tile needs two."""
    if call.options.batch_invariant:
        return None
    tiles, cache = num_tiles(call, tiling.rows), call.k.cache
    options, visible_keys = call.options, call.max_keys
    if options.window and options.causal and call.arrays.tree_mask is None:
        tokens = (
            -(-tiling.rows // call.heads_per_kv_head) + 1 if call.is_ragged else 1
        )  # of a tile, at most
        visible_keys = min(visible_keys, options.window + tokens - 1 + options.sink_keys)
    heads = tiling.heads
    row_bytes = [
        heads * operand.cache.width * bytes_per_element(operand.cache_format.name)
        for operand in (call.k, call.v)
    ]
    state_rows = tiling.rows if call.is_ragged else min(tiling.rows, call.heads_per_kv_head)
    state_bytes = 2 * 4 * heads * state_rows * call.v.cache.width  # written and read
    # Pieces of wide rows may have fewer keys, but as many bytes as their states.
    least_bytes = _HOST_MIN_BYTES if device.warp_lanes == 1 else _MIN_BYTES
    min_bytes = max(least_bytes, state_bytes)
    min_keys = min(_MIN_KEYS, math.ceil(min_bytes / max(row_bytes)))
    if visible_keys <= min_keys:
        return None
    # On a processor the cuts do not depend on its cores: any number of them gives the same bits.
    blocks = _HOST_BLOCKS if device.warp_lanes == 1 else tiling.blocks_per_sm * device.sm_count
    num_running = max(1, blocks * heads // cache.num_heads)
    # Finer pieces end more evenly, and need a larger workspace for their states.
    most_rounds = 4 if state_rows <= kernels.DECODE_MMA_ROWS else 2
    long_bytes = max(_MIN_BYTES_OF_LONG, _MIN_BYTES_PER_STATE_BYTE * state_bytes)
    least_keys = max(_MIN_KEYS_OF_LONG, int(long_bytes / sum(row_bytes)))
    # More pieces than tiles: see least_piece_keys of the kernel.
    all_keys = tiles * visible_keys
    more = max(num_running, min(num_running * most_rounds, all_keys // least_keys))
    more = min(more, all_keys // min_keys)
    num_pieces = tiles + more
    num_layers = -(-num_pieces // _MAX_GRID_Y)
    num_pieces = -(-num_pieces // num_layers) * num_layers
    return Schedule(
        tiles, num_pieces, min(tiles, more), tiling.rows, num_running, most_rounds, least_keys,
        min_keys, state_rows,
    )  # fmt: skip
