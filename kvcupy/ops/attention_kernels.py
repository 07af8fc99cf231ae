"""The attention kernels: their specialisations, and the shared memory of each.

`attention_prefill` works on tiles of 64 or 128 packed rows with tensor cores, where query and cache
are fp16, or bf16, or the cache has 8 or 4 bits; `attention_decode_mma` on tiles of 8 or 16, also of
caches of 8 and 4 bits, and `attention_decode_latent` where their rows are wide, and
`attention_decode_heads` on tiles of 64 where many heads share those. `attention_decode` takes every
other call: a few packed rows per tile.
`attention_schedule` runs before them where sequences may be long: it cuts their keys into pieces, a
block for each. `attention_starts` runs first where sequences have several new tokens.

A packed row is one query head of one token. The heads that share a KV head, of one token after
another, are the rows of a tile, so that K and V are loaded once for all of them.
"""

from __future__ import annotations

from ..config import shared_bytes
from ..formats import CACHE_FORMATS, FORMATS, FOUR_BIT, FourBitFormat
from ..kernels import Kernel, Specialisation, by_lanes
from .attention_call import PARAMS, STARTS_PARAMS

STARTS = by_lanes(
    "attention_schedule.cu", "attention_starts", STARTS_PARAMS, "AttentionStartsParams"
)
_SCHEDULE_THREADS = 512
SCHEDULE = by_lanes("attention_schedule.cu", "attention_schedule", PARAMS, "AttentionParams")
DECODE = by_lanes("attention.cu", "attention_decode", PARAMS, "AttentionParams")
# On tensor cores.
DECODE_MMA, DECODE_LATENT, DECODE_HEADS, PREFILL = (
    Kernel(f"{name}.cu", name, PARAMS, "AttentionParams", barriers=True)
    for name in (
        "attention_decode_mma", "attention_decode_latent", "attention_decode_heads",
        "attention_prefill",
    )
)  # fmt: skip

# Packed rows per tile of the plain kernel, by the packs of a row that a lane holds where a warp
# shares it. Tensor cores take most calls of 16 and 8 bits: what is left of those is bf16 on Turing,
# and queries of another format than a cache of 16 bits.
FOUR_BIT_CTYPES = tuple(dict.fromkeys(f.ctype for f in FOUR_BIT.values()))
_FOUR_BIT_KINDS = ("nvfp4", "mxfp4", "int4")  # one of each of them
_Rows = dict[str, dict[int, tuple[int, ...]]]
DECODE_ROWS: _Rows = {
    "float": {1: (1, 4), 3: (1,)}, "half": {1: (1, 4)}, "bfloat16": {1: (1, 4)},
    **{name: {1: (1, 4), 3: (1,)} for name in FOUR_BIT_CTYPES},
    "AnyFormat": {1: (1, 4, 8), 3: (1, 2)},
}  # fmt: skip
# Keys of 16 bits are rotated on tensor cores, as most of 8 bits; keys of float32 are few.
ROTATING_ROWS: _Rows = {
    "fp8_e4m3": {1: (1, 4)}, "fp8_e5m2": {1: (1, 4)}, "int8": {1: (1, 4)},
    **{name: {1: (1, 4), 3: (1,)} for name in FOUR_BIT_CTYPES},
    "AnyFormat": {1: (1, 4, 8), 3: (1,)},
}  # fmt: skip
ANY_FORMAT = "AnyFormat"  # formats read at run time, rows of any alignment

# kRows and kDecodeThreads of the kernel. With eight rows a warp has half as many accumulators.
DECODE_MMA_ROW_COUNTS = DECODE_MMA_FEW_ROWS, DECODE_MMA_ROWS = 8, 16
DECODE_MMA_THREADS = 128
_DECODE_WARPS = 4
_TILE_KEYS = {False: 16, True: 32}  # kKeys of the kernel; True: rows of 8 bits, which are narrow
_NARROW = 128  # elements

# kHeadsRows and kHeadsThreads of the kernel.
HEADS_ROWS = 64
HEADS_THREADS = 256
HEADS_KEYS = (32, 16)
"""Keys per tile of the kernel for many heads: the first where shared memory allows it."""

PREFILL_THREADS = 128  # kPrefillThreads of the kernel
PREFILL_ROWS = (64, 128)
"""Packed rows per tile of the prefill kernel: 16 or 32 per warp."""

# Rows of K and V for which a block of the prefill kernel holds two tiles each, where its own tile
# is large: wider ones take longer so on an H100.
_TWO_STAGES = (64, 64)

PREFILL_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths of K and V on tensor cores; others are padded to the first that fits."""

LATENT_WIDTHS = (576, 512)
"""The most elements of a row of K and of V that the kernel for wide rows supports."""

PREFILL_FORMATS = {"fp16": "half", "bf16": "bfloat16"}
LATENT_FORMATS = (*PREFILL_FORMATS, "fp8_e4m3", "fp8_e5m2", "int8")
DECODE_MMA_FORMATS = (*LATENT_FORMATS, *FOUR_BIT)

_ITEMSIZES = {f.ctype: f.itemsize for f in FORMATS.values()}
_TURING_SMEM_BYTES = 64 * 1024
RESERVED_SMEM_BYTES = 1024  # of each block, by the driver
# Decode kernels for which an architecture has too few registers: they would spill.
_SPILLING = {
    ("sm_75", "int4x2", "192", "128", "16"), ("sm_75", "mxfp4", "192", "128", "16", "true"),
    ("sm_75", ANY_FORMAT, "8", "1", "true"), ("sm_80", ANY_FORMAT, "8", "1", "true"),
}  # fmt: skip
_FASTEST_MEMORY = ("sm_100", "sm_103")
_DECODE_TILE_BYTES = 944  # a DecodeTile
_HEADS_TILE_BYTES = 2160  # a HeadsTile
_HEADS_DEPTH_STEPS, _HEADS_HELD_STEPS = 9, {32: 3, 16: 4}  # kDepthSteps, kHeldSteps by keys


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a call on a GPU can take."""
    decodes = [
        DECODE[32].specialise(name, rows, packs, rotates)
        for rotates, formats in ((False, DECODE_ROWS), (True, ROTATING_ROWS))
        for name, row_counts_by_packs in formats.items()
        for packs, row_counts in row_counts_by_packs.items()
        for rows in row_counts
    ]
    prefills = [
        prefill_specialisation(name, *widths, rows=rows, **kind)
        for kind in ({}, {"rotates": True}, {"quantised": True})
        for name in PREFILL_FORMATS
        for widths in PREFILL_WIDTHS
        for rows in PREFILL_ROWS
        if rows == PREFILL_ROWS[0] or widths[1] <= 128  # else registers do not hold the sums
    ]
    decodes += [
        decode_mma_specialisation(name, *widths, rows=rows, unaligned=unaligned)
        for rows in DECODE_MMA_ROW_COUNTS
        for unaligned, formats in (
            (False, (*LATENT_FORMATS, *_FOUR_BIT_KINDS)), (True, _FOUR_BIT_KINDS),
        )
        for name in formats
        for widths in PREFILL_WIDTHS
        if not unaligned or widths != PREFILL_WIDTHS[-1]
        if unaligned or name != "mxfp4" or widths[0] % 128 == 0  # whose scales are whole words
    ]  # fmt: skip
    decodes += [latent_specialisation(name) for name in (*LATENT_FORMATS, *_FOUR_BIT_KINDS)]
    decodes += [
        DECODE_HEADS.specialise(FORMATS[name].ctype, keys)
        for name in LATENT_FORMATS
        for keys in HEADS_KEYS
    ]
    starts = [kernel.specialise(lanes) for lanes, kernel in STARTS.items()]
    schedules = [schedule_specialisation(lanes) for lanes in SCHEDULE]
    return [*decodes, *prefills, *starts, *schedules]


def is_reachable(specialisation: Specialisation, arch: str) -> bool:
    """Return whether a call on an architecture can take a specialisation.

    Turing has little shared memory and no bf16 in its tensor cores. Decode over 16-bit rows wider
    than 64 has tiles of eight rows only where two blocks per SM do not saturate memory bandwidth.
    """
    kernel, format = specialisation.kernel, specialisation.arguments[0]
    if kernel is DECODE_HEADS:
        keys = specialisation.arguments[1]
        return arch != "sm_75" and keys == str(_heads_keys(shared_bytes(arch)))
    if kernel is DECODE_MMA and decode_mma_rows(specialisation) == DECODE_MMA_FEW_ROWS:
        is_wide = format in PREFILL_FORMATS.values() and int(specialisation.arguments[1]) > 64
        if is_wide and arch not in _FASTEST_MEMORY:
            return False
    if kernel in (DECODE_MMA, DECODE[32]) and (arch, *specialisation.arguments) in _SPILLING:
        return False
    if kernel is PREFILL and prefill_rows(specialisation) > PREFILL_ROWS[0]:
        blocks = blocks_per_sm(prefill_smem_bytes(specialisation), shared_bytes(arch))
        if blocks < 2:  # one would leave the tensor cores idle while it weighs its scores
            return False
    if arch != "sm_75" or kernel not in (PREFILL, DECODE_MMA, DECODE_LATENT):
        return True
    fits = smem_bytes(specialisation, arch) <= _TURING_SMEM_BYTES
    return fits and format != PREFILL_FORMATS["bf16"]


def tile_of(specialisation: Specialisation) -> tuple[int, int]:
    """Return the packed rows per tile of a kernel on tensor cores, and the threads of its block."""
    kernel = specialisation.kernel
    if kernel is PREFILL:
        return prefill_rows(specialisation), PREFILL_THREADS
    if kernel is DECODE_HEADS:
        return HEADS_ROWS, HEADS_THREADS
    rows = decode_mma_rows(specialisation) if kernel is DECODE_MMA else DECODE_MMA_ROWS
    return rows, DECODE_MMA_THREADS


def smem_bytes(specialisation: Specialisation, arch: str) -> int:
    """Return the dynamic shared memory of a block of a kernel on tensor cores."""
    if specialisation.kernel is DECODE_MMA:
        return decode_mma_smem_bytes(specialisation, arch)
    by_kernel = {
        PREFILL: prefill_smem_bytes, DECODE_LATENT: latent_smem_bytes,
        DECODE_HEADS: heads_smem_bytes,
    }  # fmt: skip
    return by_kernel[specialisation.kernel](specialisation)


def schedule_specialisation(warp_lanes: int) -> Specialisation:
    """Return the schedule of a device whose threads run in lockstep by so many."""
    return SCHEDULE[warp_lanes].specialise(schedule_threads(warp_lanes))


def schedule_threads(warp_lanes: int) -> int:
    """Return the threads of its block."""
    return 1 if warp_lanes == 1 else _SCHEDULE_THREADS


def prefill_specialisation(
    format_name: str, k_width: int, v_width: int, *, rows: int = 64, rotates: bool = False,
    quantised: bool = False,
) -> Specialisation:  # fmt: skip
    """Return the prefill kernel of a query's format whose padded widths fit rows of K and V.

    `rows` is one of `PREFILL_ROWS`. Of quantised caches no keys are rotated.
    """
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {PREFILL_WIDTHS[-1]}")
    stages = 1 + (rows > 64 and widths == _TWO_STAGES and not quantised)
    return PREFILL.specialise(
        PREFILL_FORMATS[format_name], *widths, rotates, rows, stages, quantised
    )


def prefill_rows(specialisation: Specialisation) -> int:
    """Return the packed rows per tile of a prefill kernel."""
    return int(specialisation.arguments[4])


def decode_mma_specialisation(
    format_name: str, k_width: int, v_width: int, *, rows: int = DECODE_MMA_ROWS,
    unaligned: bool = False,
) -> Specialisation:  # fmt: skip
    """Return the decode kernel of a cache's format whose padded widths fit rows of K and V.

    `rows` is one of `DECODE_MMA_ROW_COUNTS`. With `unaligned`, rows of four bits may be at any
    address; the widest may not.
    """
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {PREFILL_WIDTHS[-1]}")
    chosen = CACHE_FORMATS[format_name].ctype, *widths, rows
    return DECODE_MMA.specialise(*chosen, True) if unaligned else DECODE_MMA.specialise(*chosen)


def decode_mma_rows(specialisation: Specialisation) -> int:
    """Return the packed rows per tile of a decode kernel."""
    return int(specialisation.arguments[3])


def blocks_per_sm(block_bytes: int, most_bytes: int) -> int:
    """Return how many blocks of so many bytes the shared memory of an SM has room for.

    That is `most_bytes`, the most one block may have, and what the driver reserves for a block.
    """
    return (most_bytes + RESERVED_SMEM_BYTES) // (block_bytes + RESERVED_SMEM_BYTES)


def decode_mma_blocks(specialisation: Specialisation) -> int:
    """Return how many blocks of a decode kernel an SM runs if it has the shared memory,
    `DecodeShape::kMostBlocks` of the kernel.

    Of narrow rows of 16 bits in tiles of 16 one less: more blocks do not read faster on an H100.
    """
    ctype, widest = specialisation.arguments[0], max(map(int, specialisation.arguments[1:3]))
    if decode_mma_rows(specialisation) == DECODE_MMA_ROWS:
        return 3 if widest <= 64 and ctype in PREFILL_FORMATS.values() else 2
    if widest <= (_NARROW if ctype == "nvfp4" else 64):
        return 4
    return 2 if widest == 256 and ctype in FOUR_BIT_CTYPES else 3


def decode_mma_smem_bytes(specialisation: Specialisation, arch: str = "") -> int:
    """Return the dynamic shared memory of a block, `DecodeShape::kBytes` of the kernel."""
    ctype, *widths = specialisation.arguments[:3]
    k_width, v_width = map(int, widths)
    four_bit = next((f for f in FOUR_BIT.values() if f.ctype == ctype), None)
    itemsize = _ITEMSIZES.get(ctype, 1)
    keys = _TILE_KEYS[four_bit is not None or (itemsize == 1 and max(k_width, v_width) <= _NARROW)]
    tile_bytes = keys * itemsize * (k_width + v_width) // (1 if four_bit is None else 2)
    stages = 4 if tile_bytes <= 2048 else 2 if tile_bytes <= 10240 else 1
    rows = decode_mma_rows(specialisation)

    def block_bytes(stages: int) -> int:
        if four_bit is None:
            angles = stages * keys if itemsize == 2 else 1
            table_bytes = -(-(stages * (keys * (2 * 8 + 2 * 4) + 4)) // 8) * 8 + 8 * angles
        else:
            table_bytes = _four_bit_table_bytes(four_bit, stages, keys, k_width, v_width)
        per_warp = max(stages * tile_bytes, rows * (v_width + 8) * 4) + table_bytes
        return _DECODE_WARPS * per_warp + rows * k_width * 2 + _DECODE_TILE_BYTES

    if arch == "sm_75":
        return block_bytes(1)
    if arch == "sm_80" and itemsize == 1 and ctype != FORMATS["int8"].ctype:
        blocks = decode_mma_blocks(specialisation)
        while stages > 1 and blocks_per_sm(block_bytes(stages), shared_bytes(arch)) < blocks:
            stages //= 2
    return block_bytes(stages)


def decode_mma_rest_bytes(specialisation: Specialisation) -> int:
    """Return the bytes that stored rotation adds to a block, up to `kRotatedBytes`."""
    k_width, rows = int(specialisation.arguments[1]), decode_mma_rows(specialisation)
    moves_on = rows == DECODE_MMA_ROWS and k_width <= _NARROW  # the query, to registers
    return 0 if moves_on else rows * k_width * 2


def most_scale_bytes(format_name: str, width: int) -> int:
    """Return the bytes that a `DecodeTable` has for the group scales of a row of a padded width,
    `group_bytes` of the kernel."""
    format = FOUR_BIT[format_name]
    group = min(format.group, 32)
    more = 2 if format_name == "mxfp4" and width < PREFILL_WIDTHS[-1][0] else 0
    return -(-(width // group * format.scale_bytes + more) // 4) * 4


def _four_bit_table_bytes(
    format: FourBitFormat, stages: int, keys: int, k_width: int, v_width: int
) -> int:
    """Return the bytes of a `DecodeTable` of a four-bit format."""
    scales = [most_scale_bytes(format.name, n) for n in (k_width, v_width)]
    prepared = 16 + 4  # a float at a multiple of 16 bytes, and two fp16
    if format.group != 16:
        prepared = keys * (k_width // 32 * 4 + v_width // 32 * 2)
    total = stages * (keys * (16 + sum(scales)) + 4) + prepared
    return -(-total // 16) * 16


def latent_specialisation(format_name: str) -> Specialisation:
    """Return the kernel of a cache's format for rows up to `LATENT_WIDTHS`."""
    return DECODE_LATENT.specialise(CACHE_FORMATS[format_name].ctype)


def latent_smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `LatentShape::kBytes` of the kernel."""
    ctype, keys, width = specialisation.arguments[0], 32, LATENT_WIDTHS[0]
    coded = ctype in FOUR_BIT_CTYPES  # whose tiles have 16 bits
    scales_aside = coded and ctype != "nvfp4"
    itemsize, stages = (2, 1) if coded else (_ITEMSIZES[ctype], 2)
    tables = stages + 1 + coded
    angles = tables * keys if itemsize == 2 and not coded else 1
    table_bytes = tables * (keys * (2 * 8 + 2 * 4) + 4) + 8 * angles
    scores_bytes = DECODE_MMA_ROWS * (keys + 8) * 4
    query_bytes = (1 + scales_aside) * DECODE_MMA_ROWS * 2 * width
    tile_bytes = keys * (itemsize * width + scales_aside * 4 * (width // 32 + 2))
    tiles_bytes = stages * tile_bytes + query_bytes
    return tiles_bytes + scores_bytes + -(-table_bytes // 8) * 8 + _DECODE_TILE_BYTES


def heads_specialisation(format_name: str, fitting: int) -> Specialisation:
    """Return the kernel of a cache's format for many heads and rows up to `LATENT_WIDTHS`.

    `fitting` is the most shared memory of a block.
    """
    return DECODE_HEADS.specialise(FORMATS[format_name].ctype, _heads_keys(fitting))


def _heads_keys(fitting: int) -> int:
    """Return the most keys per tile that shared memory has room for, whatever the format."""
    widest_format = FORMATS["bf16"].ctype
    return next(
        n for n in HEADS_KEYS
        if n == HEADS_KEYS[-1]
        or heads_smem_bytes(DECODE_HEADS.specialise(widest_format, n)) <= fitting
    )  # fmt: skip


def heads_smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `HeadsShape::kBytes` of the kernel."""
    ctype, keys_per_tile = specialisation.arguments
    keys, itemsize = int(keys_per_tile), _ITEMSIZES[ctype]
    stages, warps, width = 2, HEADS_THREADS // 32, LATENT_WIDTHS[0]
    query_bytes = warps * (_HEADS_DEPTH_STEPS - _HEADS_HELD_STEPS[keys]) * 2 * 512
    sums_bytes = warps * 3 * 32 * keys
    angles = (stages + 1) * keys if itemsize == 2 else 1
    table_bytes = (stages + 1) * (keys * (2 * 8 + 2 * 4) + 4) + 8 * angles
    tiles_bytes = stages * keys * itemsize * width
    weights_bytes = HEADS_ROWS * keys * 4
    in_tables = -(-table_bytes // 8) * 8 + _HEADS_TILE_BYTES
    return tiles_bytes + query_bytes + sums_bytes + weights_bytes + in_tables


def padded_widths(k_width: int, v_width: int) -> tuple[int, int] | None:
    """Return the smallest widths of `PREFILL_WIDTHS` that fit rows of K and V, or None.

    >>> padded_widths(80, 80), padded_widths(192, 128), padded_widths(576, 512)
    ((128, 128), (192, 128), None)
    """
    return next((w for w in PREFILL_WIDTHS if k_width <= w[0] and v_width <= w[1]), None)


def prefill_smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `PrefillShape::kBytes` of the kernel."""
    k_width, v_width = map(int, specialisation.arguments[1:3])
    rows, stages = map(int, specialisation.arguments[4:6])
    rotates, quantised = (specialisation.arguments[i] == "true" for i in (3, 6))
    keys = 64 if k_width <= 192 else 32
    k_bytes, v_bytes = stages * 2 * keys * k_width, stages * 2 * keys * v_width
    query_bytes = 2 * rows * k_width
    query_moves = k_width * (rows // PREFILL_ROWS[0]) <= 192 and stages == 1  # on, to registers
    per_key = 16
    if quantised:  # keys and values take turns, and arrive in another place
        v_bytes, k_bytes = max(k_bytes, v_bytes), keys * max(k_width, v_width)
        per_key += 8 + (k_width + v_width) // 16
    values = max(v_bytes, query_bytes) if query_moves else v_bytes + query_bytes
    table_bytes = -(-(per_key * keys + 8 * (keys if rotates else 1) + 4 * (keys // 32)) // 8) * 8
    entries_bytes = 2 * 8 * keys
    tile_bytes = 136 + (16 + 4 * PREFILL_THREADS // PREFILL_ROWS[0]) * rows  # a PrefillTile
    tables_bytes = (stages + 1) * table_bytes + entries_bytes
    return k_bytes + values + tables_bytes + tile_bytes
