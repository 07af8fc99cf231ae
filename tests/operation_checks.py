"""One small check of each thing that an operation does, for whatever device runs it.

A check takes a device, calls an operation with arguments that tell its mistakes, compares all with
the reference, and returns the `Case`. `ops/test_mutants.py` runs them on broken kernels,
`ops/test_geometry.py` on devices that lay threads out in another way.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from gather_cases import GatherCase
from helpers import Case, from_values
from page_cases import IndexCase, PagesCase, poisoned_table
from rope_cases import RopeCase
from shift_cases import POSITIONS as SHIFTS
from shift_cases import ShiftCase
from state_cases import StateCase, lay_out
from transfer_cases import TransferCase

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import bytes_of, view
from kvcupy.ops import states

HEADS = 2


def caches(case: Case, fmt: str, widths: tuple[int, int], pages: int, page_size: int):
    """Two caches of `pages` pages, each in the middle of a buffer of three times as many.

    Pages have a gap between them. A row that misses its cache lands in the buffer, and is noticed.
    """
    return [
        case.output(fmt, (3 * pages, page_size + 1, HEADS, width),
                    lambda a: a[pages : 2 * pages, :page_size], name=name)
        for name, width in zip(("k_cache", "v_cache"), widths, strict=True)
    ]  # fmt: skip


def slots_of_every_kind(num_slots: int) -> list[int]:
    """All slots, from the last, 5 is to be skipped; negative ones; the first two past the end."""
    return [-1, num_slots, *range(num_slots - 1, -1, -1), -7, num_slots + 1]


# store_kv ------------------------------------------------------------------------------------


def check_copy(device, page_size=4):
    """bf16 rows, V wider than K."""
    case = Case(device, 1)
    tokens = 5 * page_size + 4
    key, value = (case.input("bf16", (tokens, HEADS, width)) for width in (16, 40))
    k_cache, v_cache = caches(case, "bf16", (16, 40), 5, page_size)
    case.store_kv(key, value, k_cache, v_cache, slots_of_every_kind(5 * page_size), skip_slot=5)
    return case


def check_copy_by_int32(device):
    """Padding is negative in int32 too, and no fault."""
    case = Case(device, 2)
    key, value = (case.input("bf16", (6, HEADS, 16)) for _ in "kv")
    cached = caches(case, "bf16", (16, 16), 3, 4)
    case.store_kv(key, value, *cached, case.slots([-1, 3, 11, -7, 0, -(2**31)], "int32"))
    return case


def check_copy_of_odd_pages(device):
    return check_copy(device, page_size=3)


def values_that_tell(scale: np.float32) -> np.ndarray:
    """Values whose int8 changes if x / scale is rounded in another way, and others."""
    ties = (np.arange(-130, 130) + np.float32(0.5)) * scale
    near = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (-1e9, 1e9)])
    x = np.concatenate([ties, near]).astype(np.float32)
    differs = np.rint(x / scale) != np.rint(x * (np.float32(1) / scale))
    assert differs.any(), "the input tells nothing"
    special = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, -129 * scale])
    return np.concatenate([np.resize(x[differs], 64), special, x])


def check_convert(device, fmt="int8"):
    """fp32 rows with a scale for K and one a head for V."""
    case = Case(device, 2)
    k_scale, v_scale = np.float32(0.37), np.float32([0.013, 1.9])
    key = case.place(np.resize(values_that_tell(k_scale), (24, HEADS, 40)), "fp32")
    value = case.place(np.resize(values_that_tell(v_scale[1]), (24, HEADS, 24)), "fp32")
    k_cache, v_cache = caches(case, fmt, (40, 24), 5, 4)
    case.store_kv(
        key,
        value,
        k_cache,
        v_cache,
        slots_of_every_kind(20),
        skip_slot=5,
        k_scale=float(k_scale),
        v_scale=v_scale,
    )
    return case


def check_convert_to_fp8(device):
    return check_convert(device, "fp8_e4m3")


def check_convert_to_fp16(device):
    """Without scales: what is too large becomes an infinity."""
    case = Case(device, 29)
    rows = [np.resize(values_that_tell(np.float32(0.37)), (24, HEADS, n)) for n in (40, 24)]
    key, value = (case.place(r * np.float32(1000), "fp32") for r in rows)
    case.store_kv(key, value, *caches(case, "fp16", (40, 24), 5, 4), slots_of_every_kind(20))
    return case


def check_dynamic(device):
    """Rows that several warps share, their largest element in any place, in any thread order."""
    device.sm_count = 132  # few rows for so many: more threads a row
    for seed in range(1, 13):
        device.thread_order_seed = seed
        case = Case(device, seed)
        rows = case.rng.standard_normal((2, 24, HEADS, 1024)).astype(np.float32)
        places = case.rng.integers(0, 1024, (2, 24, HEADS, 1))
        np.put_along_axis(rows, places, case.rng.uniform(5, 50, places.shape), axis=3)
        rows[:, 2, 0] = 1e-9  # under the smallest absmax
        key, value = case.place(rows[0], "fp32"), case.place(rows[1, :, :, :512], "fp32")
        k_cache, v_cache = caches(case, "int8", (1024, 512), 5, 4)
        case.store_kv(
            key,
            value,
            k_cache,
            v_cache,
            slots_of_every_kind(20),
            skip_slot=5,
            **case.scale_caches(20),
        )
    return case


def check_dynamic_of_any_rows(device):
    """Rows that their lanes hold, and K or V of more, the largest element in any place."""
    for seed, widths in enumerate(((3000, 40), (128, 96), (40, 3000)), start=4):
        case = Case(device, seed)
        key, value = (case.rng.standard_normal((24, HEADS, n)).astype(np.float16) for n in widths)
        for rows in (key, value):
            places = case.rng.integers(0, rows.shape[2], (24, HEADS, 1))
            np.put_along_axis(rows, places, case.rng.uniform(5, 50, places.shape), axis=2)
        case.store_kv(
            case.place(key, "fp16"), case.place(value, "fp16"),
            *caches(case, "fp8_e4m3", widths, 5, 4), slots_of_every_kind(20), skip_slot=5,
            **case.scale_caches(20)
        )  # fmt: skip
    return case


def check_mla(device):
    """Latent and rope part of bf16 rows, in fp8."""
    case = Case(device, 3)
    latent, rope_key = case.input("bf16", (24, 64)), case.input("bf16", (24, 16))
    cache = case.output("fp8_e5m2", (15, 4, 85), lambda a: a[5:10, :, 2:82], name="cache")
    case.store_mla(latent, rope_key, cache, slots_of_every_kind(20), skip_slot=5, scale=0.3)
    return case


# The rotary operations -----------------------------------------------------------------------

POSITIONS = np.array([5, 0, 63, 64, 17, 40, -1, 9, 31, 2, 62, 1])
"""The last of the table and the first past it among them."""


def check_rotation(device, interleaved=False):
    """A part of each head turns, out of place and in place."""
    case = RopeCase(device, 10)
    query, key = (case.rows("bf16", (12, heads, 48), name="rows") for heads in (3, HEADS))
    table, positions = case.table(32, POSITIONS, pad=8), case.positions(POSITIONS)
    out = case.output("bf16", (12, 3, 48), name="query_out")
    case.apply(query, key, table, positions, query_out=out, interleaved=interleaved)
    return case


def check_interleaved_rotation(device):
    return check_rotation(device, interleaved=True)


def check_norm(device):
    """Heads that several threads share, some of them as small as the epsilon, some zero."""
    case = RopeCase(device, 11)
    sizes = np.float32([1, 1e-3, 0, 1e3, 1e-2, 3e-4])[:, None, None]
    rows = [case.rng.standard_normal((6, heads, 64)) * sizes for heads in (3, HEADS)]
    query, key = (case.place(from_values(r, "bf16"), "bf16") for r in rows)
    positions = POSITIONS[[0, 1, 2, 4, 5, 7]]
    norms = {f"{side}_norm": case.rows("fp32", (64,)) for side in ("query", "key")}
    case.apply(query, key, case.table(64, positions), case.positions(positions), **norms)
    return case


def check_partial_norm(device):
    """The mean is over the whole head, and what does not turn is normalised too."""
    case = RopeCase(device, 18)
    positions = POSITIONS[:3]
    key = case.rows("fp16", (3, HEADS, 24))
    norm = case.rows("fp16", (24,))
    case.apply(None, key, case.table(16, positions), case.positions(positions), key_norm=norm)
    return case


def check_sections(device, sections_interleaved=False):
    """Three positions a token; only the first 3 + 2 of 8 pairs do not turn by the last."""
    case = RopeCase(device, 12)
    positions = np.stack([np.roll(POSITIONS, i) for i in range(3)])
    counts = (2, 5, 1) if sections_interleaved else (3, 2, 3)
    query, key = (case.rows("fp32", (12, heads, 16)) for heads in (3, HEADS))
    case.apply(
        query, key, case.table(16, positions), case.positions(positions),
        sections=counts, sections_interleaved=sections_interleaved,
    )  # fmt: skip
    return case


def check_interleaved_sections(device):
    return check_sections(device, sections_interleaved=True)


def rope_store_arguments(case: RopeCase, fmt: str, cache_fmt: str, widths=(32, 24)):
    """All of `rope_store_kv`; two tokens have no slot, although valid slots follow in the array."""
    positions = np.resize(np.delete(POSITIONS, 6), 26)
    positions[9] = 64
    query, key = (case.rows(fmt, (26, heads, widths[0])) for heads in (3, HEADS))
    value = case.rows(fmt, (26, HEADS, widths[1]))
    k_cache, v_cache = caches(case, cache_fmt, widths, 5, 4)
    slots = slots_of_every_kind(20)
    slots[4] = -3  # so that this one is free for a token without a slot
    longer = case.place(np.array([*slots, 17, 17]), "int64", lambda a: a[:24], name="slots")
    table = case.table(widths[0] - 8, positions)
    return query, key, value, table, case.positions(positions), k_cache, v_cache, longer


def check_rope_store(device):
    """bf16 to bf16, all in place."""
    case = RopeCase(device, 13)
    case.store(*rope_store_arguments(case, "bf16", "bf16"), skip_slot=5)
    return case


def check_good_positions(device):
    """Slots past the end are the only faults."""
    case = RopeCase(device, 19)
    query, key, value, _, _, *store = rope_store_arguments(case, "bf16", "bf16")
    positions = np.resize(POSITIONS[:3], 26)
    case.store(query, key, value, case.table(24, positions), case.positions(positions), *store)
    return case


def check_rope_store_beside(device):
    """bf16 to fp8: the query goes elsewhere, the key to the cache alone."""
    case = RopeCase(device, 14)
    args = rope_store_arguments(case, "bf16", "fp8_e4m3")
    case.store(
        *args, skip_slot=5, write_key=False, k_scale=np.float32([0.7, 3.0]), v_scale=0.3,
        query_out=case.output("bf16", (26, 3, 32), name="query_out"),
    )  # fmt: skip
    return case


def check_rope_store_dynamic(device):
    """fp16 to int8: scales of rows that several threads share."""
    case = RopeCase(device, 15)
    args = rope_store_arguments(case, "fp16", "int8", widths=(72, 56))
    case.store(*args, skip_slot=5, **case.scale_caches(20))
    return case


def check_rope_store_mla(device):
    """The rope part of MLA goes behind the latent."""
    case = RopeCase(device, 16)
    query, latent = case.rows("bf16", (12, 3, 16)), case.rows("bf16", (12, 64))
    cache = case.output("bf16", (15, 4, 82), lambda a: a[5:10, :, :80], name="cache")
    case.store_mla_rotated(
        query, latent, case.rows("bf16", (12, 16)), case.table(16, POSITIONS),
        case.positions(POSITIONS), cache, [19, -1, 0, 7, 20, 5, 3, 4, 11, -7, 8, 21], skip_slot=5,
    )  # fmt: skip
    return case


# gather_kv, copy_pages, slot_mapping ---------------------------------------------------------


def check_gather(device, cache_fmt="bf16", **options):
    """Into rows of bf16, with room for more tokens."""
    case = GatherCase(device, 20)
    sources = caches(case, cache_fmt, (16, 40), 5, 4)
    outs = [case.output("bf16", (26, HEADS, width)) for width in (16, 40)]
    case.gather(*sources, slots_of_every_kind(20), *outs, **options)
    return case


def check_gather_static(device):
    """From int8, a scale a head for K and one for V."""
    return check_gather(device, "int8", k_scale=np.float32([0.7, 3.0]), v_scale=0.3)


def check_gather_dynamic(device):
    """From int8, a scale a row."""
    case = GatherCase(device, 21)
    scales = {
        f"{side}_scale_cache": case.place(
            case.rng.uniform(0.1, 9, (20, HEADS)).astype(np.float32), "fp32")
        for side in "kv"
    }  # fmt: skip
    sources = caches(case, "int8", (16, 40), 5, 4)
    outs = [case.output("bf16", (26, HEADS, width)) for width in (16, 40)]
    case.gather(*sources, slots_of_every_kind(20), *outs, **scales)
    return case


def check_gather_allocated(device, source="bf16", destination="bf16"):
    """Into memory that holds something: rows of skipped slots become zeros, others are written.

    An output that is passed keeps what it holds.
    """
    allocate = device.allocate

    def fill(array, byte):
        device.carrier(bytes_of(view(array))).view(np.uint8)[...] = byte
        return array

    def allocate_dirty(shape, dtype, stream, *, zeroed):
        array = allocate(shape, dtype, stream, zeroed=zeroed)
        return array if zeroed else fill(array, 0x5A)

    def is_zero(array):
        rows = device.carrier(bytes_of(view(array))).view(np.uint8).reshape(5, -1)
        return [not row.any() for row in rows]

    caches = [fill(device.zeros((3, 4, HEADS, width), source), 0x45) for width in (32, 64)]
    slots = device.asarray(np.array([1, -1, 99, 11, -7]))
    passed = [fill(device.zeros((5, HEADS, width), "fp32"), 7) for width in (32, 64)]
    with mock.patch.object(device, "allocate", allocate_dirty):
        outs = kv.gather_kv(*caches, slots, dtype=destination)
        for side in (0, 1):
            given = {("k_out", "v_out")[side]: passed[side]}
            outs += (kv.gather_kv(*caches, slots, **given)[1 - side],)
    for out in outs:
        assert is_zero(out) == [False, True, True, False, True]
    for out in passed:
        kept = (device.to_numpy(out).view(np.uint8) == 7).all(axis=(1, 2))
        assert kept.tolist() == [False, True, True, False, True]
    with pytest.raises(kv.IndexFault):
        kv.check_faults(device)


def check_pages(device):
    """Pages of three axes of rows, in the middle of a buffer, with words left over a thread."""
    case = PagesCase(device, 22)
    cache = case.pages((15, 2, 3, 2, 4405), lambda a: a[5:10, :, ::2, :, :4402])
    case.copy(cache, [2, 4, -1, 0, 5, 3, 2], [1, 3, 0, -2, 4, 6, 0])
    return case


def check_conv_state(device, order="inputs last", dtype=np.float16):
    """Any number of new tokens, in the middle of a buffer, of more channels than a piece has."""
    case = StateCase(device, 31)
    new = [2, 3, 0, 9, 1, 4, 2, 5, 1]
    sums = np.cumsum([0, *new])
    x = case.bits((sums[-1] + 9, 1040), dtype, lambda a: a[4:-4, :1029], name="x")
    cache = lay_out(case, 30, 1029, 5, dtype, order, pad=3).sub(lambda a: a[10:20])
    sums[-2] = 10**6
    slots = [9, -1, 4, 0, 10, 7, 5, -3, 2]
    case.run("update_conv_state", x, cache, slots, case.slots(sums, "int32"), skip_slot=5)
    end = len(x.view)
    for others in ([0, 7, 2], [-2, 0, 3], [4, end + 5, end + 5], [0, 0, end], [end, end, end]):
        case.run("update_conv_state", x, cache, [3, 8], others)
    return case


def check_plain_conv_state(device):
    """Byte by byte, as it is where a kernel of wider words is wrong."""
    case = StateCase(device, 32)
    x = case.bits((9, 37), np.float32, name="x")
    cache = lay_out(case, 6, 37, 3, np.float32, "inputs last")
    with mock.patch.object(states, "widest", lambda numbers: 1):
        case.run("update_conv_state", x, cache, [5, 2, 0], [0, 1, 5, 9])
    return case


def check_slot_mapping(device):
    """More sequences than a warp has lanes, and an output with room to spare."""
    case = IndexCase(device, 23)
    lengths = case.rng.integers(0, 40, 70)
    appended = np.minimum(case.rng.integers(0, 50, 70), lengths)
    table = case.indices(poisoned_table(case.rng, lengths, 8))
    lengths, appended = case.indices(lengths), case.indices(appended, "int64")
    want = reference.slot_mapping(table.view, lengths.view, appended.view, 8)
    out = case.place(np.full(len(want) + 77, 99), "int64", lambda a: a[2:-2], name="out")
    kv.slot_mapping(table.array, lengths.array, appended.array, 8, out=out.array)
    out.view[...] = -1
    out.view[: len(want)] = want
    case.check("slot_mapping", [])
    return case


PAIRS = ([8, -1, 0, 5, 9, 3, 7, 2], [1, 6, 12, -4, 2, 13, 5, 0])
"""Pages of nine onto pages of thirteen; the last of either, skipped ones, and some past the end."""


def check_transfer(device):
    """Short rows in any order of axes, some layers, scales that go along."""
    case = TransferCase(device, 24)
    pools = {"fmt": "fp8_e4m3", "layers": 5, "page_size": 8, "heads": 8,
             "widths": (80, 48), "scales": True}  # fmt: skip
    src = case.pool("layer_first", **pools)
    dst = case.pool("page_head", pages=13, placement="pinned", **pools)
    case.transfer(src, dst, *PAIRS, layers=[1, 3], method="kernel")
    return case


def check_transfer_by_copies(device):
    """The host finds what is past the end, and a kernel records it."""
    case = TransferCase(device, 30)
    src, dst = (case.pool(layout, pages=n) for layout, n in (("page_first", 9), ("page_head", 13)))
    for pages in (PAIRS, ([0, 9, 1], [3, 4, 5]), ([0, 1], [77, 4])):
        case.transfer(src, dst, *pages, method="copy")
    return case


def check_transfer_of_a_few_short_rows(device):
    """Fewer rows than threads that could have them, of pages that all exist."""
    case = TransferCase(device, 25)
    src, dst = (case.pool(layout, pages=13) for layout in ("page_first", "layer_first"))
    case.transfer(src, dst, [3, 12], [12, 0], method="kernel")
    return case


def check_transfer_of_long_rows(device):
    """Rows of several pieces, the last of them not whole, V the longer."""
    case = TransferCase(device, 26)
    pools = {"widths": (603, 1003), "fmt": "fp16", "page_size": 3}
    src, dst = case.pool("page_first", **pools), case.pool("page_first_direct", pages=13, **pools)
    case.transfer(src, dst, *PAIRS, method="kernel")
    return case


def check_transfer_converts(device):
    """Into a quantised pool, with the scales of every row, and out of another."""
    case = TransferCase(device, 27)
    near = case.pool("layer_first", "bf16", widths=(24, 17), content=case.values)
    far = case.pool("page_first", "int8", widths=(24, 17), scales=True, pages=13)
    case.transfer(near, far, *PAIRS, method="kernel", convert=True)
    wide = case.pool("page_head", "fp8_e5m2", heads=3, widths=(72, 8), scales=True,
                     content=case.values, multipliers=case.multipliers)  # fmt: skip
    exact = case.pool("page_first_direct", "fp32", heads=3, widths=(72, 8), pages=13)
    case.transfer(wide, exact, *PAIRS, method="kernel", convert=True)
    return case


def check_transfer_converts_wide_rows(device):
    """Rows of two, three and four packs per lane, and of more than a thread holds."""
    case = TransferCase(device, 28)
    for fmt, widths in (
        ("fp16", (50, 40)), ("fp16", (100, 17)), ("fp16", (80, 128)), ("fp16", (40, 131)),
        ("bf16", (576, 264)), ("fp32", (512, 24)), ("fp32", (520, 24)),
    ):  # fmt: skip
        near = case.pool("layer_first", fmt, widths=widths, content=case.values)
        far = case.pool("page_first", "int8", widths=widths, scales=True, pages=13)
        case.transfer(near, far, *PAIRS, method="kernel", convert=True)
        back = case.pool("page_head", "fp32", widths=widths, pages=13)
        case.transfer(far, back, [3, 0], [1, 12], method="kernel", convert=True)
    return case


CHECKS = (
    check_transfer,
    check_transfer_by_copies,
    check_transfer_of_a_few_short_rows,
    check_transfer_of_long_rows,
    check_transfer_converts,
    check_transfer_converts_wide_rows,
    check_copy,
    check_copy_of_odd_pages,
    check_convert,
    check_convert_to_fp8,
    check_convert_to_fp16,
    check_dynamic,
    check_dynamic_of_any_rows,
    check_mla,
    check_rotation,
    check_interleaved_rotation,
    check_norm,
    check_partial_norm,
    check_sections,
    check_interleaved_sections,
    check_rope_store,
    check_good_positions,
    check_rope_store_beside,
    check_rope_store_dynamic,
    check_rope_store_mla,
    check_gather,
    check_gather_static,
    check_gather_dynamic,
    check_pages,
    check_slot_mapping,
)


# shift_pages ---------------------------------------------------------------------------------


def check_shift(device, fmt="bf16"):
    """Onto other pages, by a delta for each, with every kind of fault, and a value too wide."""
    case = ShiftCase(device, dtype=fmt)
    case.shift((6, 0, 3, -1, 8, 2, 2), (5, -SHIFTS, 1 - SHIFTS, 1, 1, SHIFTS, 1),
               out_pages=(1, 5, 7, 4, 4, 4, 8))  # fmt: skip
    case.shift((6, 0), 0, out_pages=(4, 5), interleaved=True)
    return case


def check_shift_of_latents(device, fmt="fp16"):
    """A part of each row, behind another, in place and not."""
    case = ShiftCase(device, "mla", dtype=fmt, layout="page_first")
    case.shift((6, 0, 3), (5, -6, 0))
    case.shift((6, 0), 3, out_pages=(4, 5), interleaved=True)
    return case


def check_shift_in_place(device):
    """float32 of a part of each head, values untouched."""
    case = ShiftCase(device, dtype="fp32", layout="page_head", rotary_dim=16)
    case.shift((6, 0, 3), -3)
    case.shift((6, 0, 3), -3, interleaved=True)
    return case


def check_shift_with_scales(device):
    """Of each row, of which a part is rotated."""
    for fmt, kind in (("int8", "kv"), ("fp8_e4m3", "mla")):
        case = ShiftCase(device, kind, dtype=fmt, scales=True)
        case.shift((6, 0, 9), (3, -2, 1), out_pages=(1, 5, 2))
        case = ShiftCase(device, kind, dtype=fmt, scales=True)
        case.shift((1, 2, -1), 4, interleaved=True)
    return case


def check_shift_of_odd_rows(device):
    """Single pairs, and values in words of every size."""
    for width, v_width in ((6, 8), (10, 4), (14, 2), (8, 3)):
        case = ShiftCase(device, dtype="bf16", widths=(width, v_width))
        case.shift((6, 0, 3), (3, -2, 1), out_pages=(1, 5, 2))
        case.shift((6, 0, 3), 2, interleaved=True)
    return case
