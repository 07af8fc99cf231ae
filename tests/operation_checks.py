"""One small check of each thing that an operation does, for whatever device runs it.

A check takes a device, calls an operation with arguments that tell its mistakes, compares all with
the reference, and returns the `Case`. `ops/test_mutants.py` runs them on broken kernels,
`ops/test_geometry.py` on devices that lay threads out in another way.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from helpers import Case
from rope_cases import RopeCase
from shift_cases import POSITIONS as SHIFTS
from shift_cases import ShiftCase
from state_cases import StateCase, lay_out
from transfer_cases import TransferCase, pools

import kvcupy as kv
from kvcupy.arrays import bytes_of, view

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


# The rotary operations -----------------------------------------------------------------------

POSITIONS = np.array([5, 0, 63, 64, 17, 40, -1, 9, 31, 2, 62, 1])
"""The last of the table and the first past it among them."""


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


PAIRS = ([8, -1, 0, 5, 9, 3, 7, 2], [1, 6, 12, -4, 2, 13, 5, 0])
"""Pages of nine onto pages of thirteen; the last of either, skipped ones, and some past the end."""


def check_transfer(device):
    """Short rows in any order of axes, some layers, scales that go along."""
    case = TransferCase(device, 24)
    both = pools(
        case, "fp8_e4m3", ("layer_first", "page_head"), pages=(9, 13), layers=5, page_size=8,
        heads=8, widths=(80, 48), placements=("device", "pinned"),
    )  # fmt: skip
    case.transfer(*both, *PAIRS, layers=[1, 3], method="kernel")
    return case


def check_transfer_by_copies(device):
    """The host finds what is past the end, and a kernel records it."""
    case = TransferCase(device, 30)
    both = pools(case, layouts=("page_first", "page_head"), pages=(9, 13))
    for pages in (PAIRS, ([0, 9, 1], [3, 4, 5]), ([0, 1], [77, 4])):
        case.transfer(*both, *pages, method="copy")
    return case


def check_transfer_of_a_few_short_rows(device):
    """Fewer rows than threads that could have them, of pages that all exist."""
    case = TransferCase(device, 25)
    both = pools(case, layouts=("page_first", "layer_first"), pages=(13, 13))
    case.transfer(*both, [3, 12], [12, 0], method="kernel")
    return case


def check_transfer_of_long_rows(device):
    """Rows of several pieces, the last of them not whole, V the longer."""
    case = TransferCase(device, 26)
    layouts = ("page_first", "page_first_direct")
    both = pools(case, "fp16", layouts, widths=(603, 1003), page_size=3, pages=(9, 13))
    case.transfer(*both, *PAIRS, method="kernel")
    return case


def check_transfer_converts(device):
    """Into a quantised pool, with the scales of every row, and out of another."""
    case = TransferCase(device, 27)
    near = pools(case, ("bf16", "int8"), widths=(24, 17), pages=(9, 13))
    case.transfer(*near, *PAIRS, method="kernel")
    layouts = ("page_head", "page_first_direct")
    wide = pools(case, ("fp8_e5m2", "fp32"), layouts, heads=3, widths=(72, 8), pages=(9, 13))
    case.transfer(*wide, *PAIRS, method="kernel")
    return case


def check_transfer_converts_wide_rows(device):
    """Rows of two, three and four packs per lane, and of more than a thread holds."""
    case = TransferCase(device, 28)
    for fmt, widths in (
        ("fp16", (50, 40)), ("fp16", (100, 17)), ("fp16", (80, 128)), ("fp16", (40, 131)),
        ("bf16", (576, 264)), ("fp32", (512, 24)), ("fp32", (520, 24)),
    ):  # fmt: skip
        near, far = pools(case, (fmt, "int8"), widths=widths, pages=(9, 13))
        case.transfer(near, far, *PAIRS, method="kernel")
        back = case.pool("page_head", "fp32", widths=widths, pages=13)
        case.transfer(far, back, [3, 0], [1, 12], method="kernel")
    return case


TRANSFERS = (
    check_transfer, check_transfer_by_copies, check_transfer_of_a_few_short_rows,
    check_transfer_of_long_rows, check_transfer_converts, check_transfer_converts_wide_rows,
)  # fmt: skip


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


def check_shift_with_scales(device):
    """Of each row, of which a part is rotated."""
    for fmt, kind in (("int8", "kv"), ("fp8_e4m3", "mla")):
        case = ShiftCase(device, kind, dtype=fmt, scales=True)
        case.shift((6, 0, 9), (3, -2, 1), out_pages=(1, 5, 2))
        case = ShiftCase(device, kind, dtype=fmt, scales=True)
        case.shift((1, 2, -1), 4, interleaved=True)
    return case
