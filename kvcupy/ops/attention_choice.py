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
# Four-bit formats whose codes times group scales are exact in a format of 16 bits.
_EXACT_CODES = {"fp16": ("nvfp4",), "bf16": ("nvfp4", "mxfp4")}

# A piece has at least 256 keys, or 128 KiB of them. Where sequences are long it has at least 512
# keys, 384 KiB of them, and 16 times the bytes of its state: on an H100 a piece that reads nothing
# takes as long as one that reads 96 KiB while all blocks read.
_MIN_KEYS, _MIN_BYTES = 256, 128 << 10
_MIN_KEYS_OF_LONG, _MIN_BYTES_OF_LONG, _MIN_BYTES_PER_STATE_BYTE = 512, 384 << 10, 16


@dataclass(frozen=True)
class Tiling:
    """The kernel of a call, and its tiles.

    Attributes
    ----------
    rows : packed rows per tile
    lanes : threads that share a key, in the decode kernel
    threads : per block
    smem_bytes : of dynamic shared memory per block
    blocks_per_sm : that run at a time; with 4, short sequences do not leave an SM idle
    heads : KV heads of a block
    slow_path_reason : why the call runs on a GPU without tensor cores; "" otherwise
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
    invariant = call.options.batch_invariant

    def on_tensor_cores(chosen: Specialisation, most_blocks: int, more_bytes: int = 0) -> Tiling:
        """Return the tiling of a kernel; registers of an SM have room for `most_blocks`."""
        rows, threads = kernels.tile_of(chosen)
        smem_bytes = kernels.smem_bytes(chosen, device.arch) + more_bytes
        fitting = kernels.blocks_per_sm(smem_bytes, device.shared_bytes)
        blocks = max(1, min(most_blocks, fitting))
        return Tiling(chosen, rows, 1, threads, smem_bytes, blocks)

    if call.is_ragged and not invariant and suits_prefill(device, call, alignment):
        rows = _choose_prefill_rows(device, call)
        return on_tensor_cores(_prefill_specialisation_of(call, rows), 2)
    reason = _invariance_reason(call) or decode_mma_unsupported_reason(device, call, alignment)
    if not reason:
        chosen = _decode_mma_specialisation_of(device, call, alignment)
        most_blocks = kernels.decode_mma_blocks(chosen)
        return on_tensor_cores(chosen, most_blocks, _rest_bytes(call, chosen))
    if kernels.padded_widths(*_widths(call)) is None:
        reason = _invariance_reason(call) or latent_unsupported_reason(device, call, alignment)
    if not reason:
        # No more blocks than an SM holds: a piece writes as many bytes as 114 latents have.
        coded = call.k.four_bit is not None
        many = has_many_rows(call) and not invariant
        if many and device.arch != "sm_75" and not coded:
            chosen = kernels.heads_specialisation(call.k.cache_format.name, device.shared_bytes)
            return on_tensor_cores(chosen, 1)
        return on_tensor_cores(kernels.latent_specialisation(call.k.cache_format.name), 2)
    tiling = _decode_tiling(device, call, alignment)
    return replace(tiling, slow_path_reason=reason) if device.warp_lanes == 32 else tiling


def _invariance_reason(call: AttentionCall) -> str:
    """Return why no kernel on tensor cores is batch-invariant for a call that must be, or "".

    Decode rounds weights or values in units of the largest scale of a tile's values, and a tile of
    more tokens has later keys. The kernel for wide rows does so with scales per slot alone.
    """
    if not call.options.batch_invariant:
        return ""
    if call.arrays.v_scale_cache is not None:
        return "batch_invariant does not support v_scale_cache"
    name, is_wide = call.v.cache_format.name, kernels.padded_widths(*_widths(call)) is None
    if call.v.four_bit is not None and name != "nvfp4" and not is_wide:
        return f"batch_invariant does not support {name} caches"
    return ""


def latent_unsupported_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why the kernel for wide rows, such as latents, does not support a call, or "".

    Formats and alignment must be as for decode on tensor cores. It does not rotate keys, and Turing
    lacks the shared memory.
    """
    widths = _widths(call)
    if any(n > most for n, most in zip(widths, kernels.LATENT_WIDTHS, strict=True)):
        return f"head dims {widths} of K and V exceed {kernels.LATENT_WIDTHS}"
    if call.rotates_keys:
        return f"RoPE on read is not supported for head dims {widths}"
    if call.k.four_bit is not None:
        return _four_bit_latent_reason(device, call, alignment)
    if reason := _format_or_alignment_reason(device, call, alignment):
        return reason
    return _arch_reason(device, kernels.latent_specialisation(call.k.cache_format.name))


def _four_bit_latent_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why the kernel for wide rows does not support a call over four-bit caches, or "".

    Codes must be whole words at aligned addresses, of 4 bytes in nvfp4 and of 2 in others, and
    scales have their strides.
    """
    if reason := _query_or_row_reason(device, call, alignment):
        return reason
    name, widths = call.k.cache_format.name, _widths(call)
    word_bytes = 4 if name == "nvfp4" else 2
    if call.k.rotated_width or call.v.rotated_width:
        return f"caches that are stored rotated are not supported for head dims {widths}"
    for operand in (call.k, call.v):
        scales = operand.cache.scales
        assert scales is not None
        axes = 2 if operand.cache.num_heads == 1 else 3
        if operand.code_word_bytes(alignment) < word_bytes:
            name = operand.arrays.cache.name
            return f"codes of {name} are not whole aligned {word_bytes}-byte words"
        if tuple(scales.strides[:axes]) != tuple(operand.cache_strides[:axes]):
            return f"codes and scales of {operand.arrays.cache.name} have other strides"
    return _arch_reason(device, kernels.latent_specialisation(name))


def _query_or_row_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    query, out = call.arrays.query, call.out
    if reason := _query_reason(device, call):
        return reason
    if widest((alignment, *map(abs, (*query.strides[:2], *out.strides[:2])))) < _WORD_BYTES:
        return _UNALIGNED
    return ""


def has_many_rows(call: AttentionCall) -> bool:
    """Return whether sequences have more rows than a tile of few, as far as shapes tell."""
    return _rows_per_sequence(call) > kernels.DECODE_MMA_ROWS


def _rows_per_sequence(call: AttentionCall) -> int:
    return call.group * -(-call.num_tokens // max(1, call.num_sequences))


def decode_mma_unsupported_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why the decode kernel on tensor cores does not support a call, or "".

    It does where threads run in warps, queries are fp16 or bf16, both caches have their format or
    one of 8 bits, and rows are whole 16-byte words at aligned addresses. One row alone wastes most
    of each product, which still takes less time than float32 arithmetic. `is_reachable` says what
    Turing lacks. Of four bits: `_four_bit_reason`.
    """
    if kernels.padded_widths(*_widths(call)) is None:
        return f"head dims {_widths(call)} of K and V exceed {kernels.PREFILL_WIDTHS[-1]}"
    if call.k.four_bit is not None:
        return _four_bit_reason(device, call, alignment)
    if reason := _format_or_alignment_reason(device, call, alignment):
        return reason
    if call.k.cache_format.itemsize == 1:
        if call.rotates_keys and not _has_rotary_packs(call, alignment, 2 * _PACK):
            return _rotary_reason(2 * _PACK)
    elif not _has_whole_packs(call, alignment):
        return _rotary_reason(_PACK)
    return _arch_reason(device, _decode_mma_specialisation_of(device, call, alignment))


def _four_bit_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why decode on tensor cores does not support a call over four-bit caches, or "".

    Codes and the group scales of a row must be whole words of 4 bytes at aligned addresses, or be
    in the order of the pool's rows. Keys that RoPE rotates on their way must be whole chunks
    of 32 elements, and not stored rotated.
    """
    if reason := _query_or_row_reason(device, call, alignment):
        return reason
    padded = kernels.padded_widths(*_widths(call))
    assert padded is not None
    for operand, width in zip((call.k, call.v), padded, strict=True):
        is_wide = padded == kernels.PREFILL_WIDTHS[-1]
        room = 0 if is_wide else kernels.most_scale_bytes(operand.cache_format.name, width)
        if reason := _code_reason(operand, alignment, room):
            return reason
    if call.rotates_keys and call.k.rotated_width:
        return "RoPE on read is not supported for a k_cache that is stored rotated"
    if call.rotates_keys and not _has_rotary_packs(call, alignment, 4 * _PACK):
        return _rotary_reason(4 * _PACK)
    chosen = _decode_mma_specialisation_of(device, call, alignment)
    smem_bytes = kernels.smem_bytes(chosen, device.arch) + _rest_bytes(call, chosen)
    if call.k.rotated_width and smem_bytes > device.shared_bytes:
        return f"{device.arch} has too little shared memory for a cache that is stored rotated"
    return _arch_reason(device, chosen)


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
    inline = scales == (code_bytes, operand.cache.strides)
    if inline and word_bytes < 4 and operand.cache.width % 32 == 0:
        before = 4 - word_bytes
        if before + scale_bytes <= scale_room:
            return ""
    return (
        f"codes or scales of {operand.arrays.cache.name} ({scale_bytes} bytes of scales per row) "
        "are not whole aligned 4-byte words"
    )


_UNALIGNED = "rows of query, out or the caches are not whole aligned 16-byte words"


def _rotary_reason(elements: int) -> str:
    return f"RoPE on read needs rotary dims in whole aligned chunks of {elements} elements"


def _arch_reason(device: Device, specialisation: Specialisation) -> str:
    if kernels.is_reachable(specialisation, device.arch):
        return ""
    if device.arch == "sm_75" and specialisation.arguments[0] == kernels.PREFILL_FORMATS["bf16"]:
        return "sm_75 tensor cores do not support bf16"
    return f"{device.arch} has too few registers or too little shared memory for {specialisation}"


def _query_reason(device: Device, call: AttentionCall) -> str:
    if device.warp_lanes != 32:
        return "the device has no warps"
    query = call.arrays.query
    if query.format not in kernels.PREFILL_FORMATS:
        return f"query is {query.format}, expected {' or '.join(kernels.PREFILL_FORMATS)}"
    return ""


def _decode_mma_specialisation_of(
    device: Device, call: AttentionCall, alignment: int
) -> Specialisation:
    operands = call.k, call.v
    is_four_bit = call.k.four_bit is not None
    unaligned = is_four_bit and any(v.code_word_bytes(alignment) < 4 for v in operands)
    name = call.k.cache_format.name

    def of_rows(rows: int) -> Specialisation:
        return kernels.decode_mma_specialisation(
            name, *_widths(call), rows=rows, unaligned=unaligned
        )

    few = of_rows(kernels.DECODE_MMA_FEW_ROWS)
    suits = _rows_per_sequence(call) <= kernels.DECODE_MMA_FEW_ROWS
    # Batch-invariant tiles do not depend on the rows of a sequence.
    if suits and not call.options.batch_invariant and kernels.is_reachable(few, device.arch):
        return few
    return of_rows(kernels.DECODE_MMA_ROWS)


def _rest_bytes(call: AttentionCall, chosen: Specialisation) -> int:
    """Return the shared memory that decode needs for `rest` of queries over rotated keys."""
    return kernels.decode_mma_rest_bytes(chosen) if call.k.rotated_width else 0


def _format_or_alignment_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why formats or alignment do not suit decode on tensor cores, or ""."""
    query, out = call.arrays.query, call.out
    cache_format = call.k.cache_format
    if reason := _query_reason(device, call):
        return reason
    if cache_format is not call.v.cache_format:
        return f"k_cache is {cache_format.name} but v_cache is {call.v.cache_format.name}"
    if cache_format.name not in kernels.LATENT_FORMATS:
        return f"{cache_format.name} caches are not supported for head dims {_widths(call)}"
    if cache_format.itemsize == 2 and query.format != cache_format.name:
        return f"query is {query.format} but the caches are {cache_format.name}"
    strides = (*query.strides[:2], *out.strides[:2], *call.k.cache_strides, *call.v.cache_strides)
    row_bytes = [operand.cache.width * cache_format.itemsize for operand in (call.k, call.v)]
    whole = widest((alignment, *map(abs, strides), *row_bytes)) == _WORD_BYTES
    return "" if whole else _UNALIGNED


def _widths(call: AttentionCall) -> tuple[int, int]:
    return call.k.cache.width, call.v.cache.width


def suits_prefill(device: Device, call: AttentionCall, alignment: int) -> bool:
    """Return whether the prefill kernel can take a ragged call.

    It can where threads run in warps, query and caches are all fp16 or all bf16, or the caches have
    8 or 4 bits, rows are whole words at aligned addresses, the kernel `is_reachable` on the
    architecture, and sequences have rows enough on average, as far as shapes tell.
    """
    if (
        _query_or_row_reason(device, call, alignment)
        or kernels.padded_widths(*_widths(call)) is None
    ):
        return False
    query_format = call.arrays.query.format
    if _is_quantised(call):
        most = _most_decode_rows(device, call, alignment)
        suitable = _rows_per_sequence(call) > most and not call.rotates_keys
        suitable &= all(_is_dequantised(v, query_format, alignment) for v in (call.k, call.v))
    else:
        formats = {operand.cache_format.name for operand in (call.k, call.v)}
        suitable = formats == {query_format} and _has_whole_packs(call, alignment)
    chosen = _prefill_specialisation_of(call, kernels.PREFILL_ROWS[0])
    if not suitable or not kernels.is_reachable(chosen, device.arch):
        return False
    rows = call.num_tokens * call.group
    return rows >= _MIN_ROWS_PER_SEQUENCE * max(1, call.num_sequences)


def _most_decode_rows(device: Device, call: AttentionCall, alignment: int) -> int:
    """Return how many rows of a sequence over quantised caches decode serves sooner than prefill.

    A tile of prefill dequantises its keys first, and takes longer than two tiles of decode; of
    narrow rows of 8 bits, than one (by count of instructions, not measured).
    """
    is_narrow = kernels.padded_widths(*_widths(call)) == kernels.PREFILL_WIDTHS[0]
    is_fast = is_narrow and call.k.four_bit is None
    if is_fast or decode_mma_unsupported_reason(device, call, alignment):
        return kernels.DECODE_MMA_ROWS
    return 2 * kernels.DECODE_MMA_ROWS


def _is_quantised(call: AttentionCall) -> bool:
    return call.k.cache_format.quantised and call.v.cache_format.quantised


def _is_dequantised(operand: KVOperand, query_format: str, alignment: int) -> bool:
    """Return whether prefill can dequantise a cache to the format of the query, exactly."""
    if operand.four_bit is None:
        strides = map(abs, operand.cache_strides)
        return widest((alignment, operand.cache.width, *strides)) == _WORD_BYTES
    if operand.cache_format.name not in _EXACT_CODES[query_format]:
        return False
    return not operand.rotated_width and not _code_reason(operand, alignment)


def _prefill_specialisation_of(call: AttentionCall, rows: int) -> Specialisation:
    return kernels.prefill_specialisation(
        call.arrays.query.format, *_widths(call), rows=rows, rotates=call.rotates_keys,
        quantised=_is_quantised(call),
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
    if call.num_tokens * call.group <= few * call.num_sequences:
        return few
    blocks = call.num_tokens * call.group * call.k.cache.num_heads / many
    return many if blocks * max(1, call.max_keys / _MIN_KEYS_OF_LONG) >= device.sm_count else few


def _decode_tiling(device: Device, call: AttentionCall, alignment: int) -> Tiling:
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
    sharing = call.group * tokens
    rows = next((n for n in row_counts if n >= sharing), row_counts[-1])
    groups = threads // lanes
    smem_floats = groups * rows * (2 + lanes * _PACK * packs_per_lane)
    heads = 1
    if device.warp_lanes == 1 and rows <= _HOST_FEW_ROWS:
        heads = min(call.k.cache.num_heads, _HOST_ROWS_TOGETHER // rows)
    smem_bytes = 0 if groups == 1 else 4 * smem_floats
    return Tiling(specialise(rows), rows, lanes, threads, smem_bytes, heads=heads)


def _has_whole_packs(call: AttentionCall, alignment: int) -> bool:
    """Return whether rows of both caches are whole packs at aligned addresses.

    With keys that are rotated, their rotated elements and the angles too.
    """
    strides = [n for operand in (call.k, call.v) for n in operand.cache_strides]
    word_bytes = min(_WORD_BYTES, _PACK * call.k.cache_format.itemsize)
    whole = all(operand.cache.width % _PACK == 0 for operand in (call.k, call.v))
    if not whole or widest((alignment, *map(abs, strides))) < word_bytes:
        return False
    return not call.rotates_keys or _has_rotary_packs(call, alignment, _PACK)


def _has_rotary_packs(call: AttentionCall, alignment: int, elements: int) -> bool:
    """Return whether rotated elements are whole packs, and their angles at aligned addresses."""
    table = call.arrays.rope_table
    assert table is not None
    rotated = table.shape[1] if call.options.interleaved else table.shape[1] // 2
    whole = call.options.rotary_start % elements == 0 and rotated % elements == 0
    return whole and widest((alignment, abs(table.strides[0]))) == _WORD_BYTES


def num_tiles(call: AttentionCall, rows: int) -> int:
    """Return a bound on the tiles of all sequences, as `find_tile` of the kernels numbers them."""
    packed = call.num_tokens * call.group
    require_countable(packed, "query")
    if not call.is_ragged:
        return call.num_sequences * -(-call.group // rows)
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
        tokens = -(-tiling.rows // call.group) + 1 if call.is_ragged else 1  # of a tile, at most
        visible_keys = min(visible_keys, options.window + tokens - 1 + options.sink_keys)
    heads = tiling.heads
    row_bytes = [
        heads * operand.cache.width * bytes_per_element(operand.cache_format.name)
        for operand in (call.k, call.v)
    ]
    state_rows = tiling.rows if call.is_ragged else min(tiling.rows, call.group)
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
