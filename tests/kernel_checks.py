"""One small check of each thing that kernels do, for whatever device runs them.

A check takes a device, calls an operation with arguments that tell its mistakes, and compares all
with the reference. `ops/test_mutants.py` runs them on broken kernels, `ops/test_geometry.py` on
devices that lay threads out in another way, `ops/test_attention_host.py` as users run them.
`valid_calls.checks_of` makes further checks of the conformance cases.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import four_bit_cases
import numpy as np
import pytest
from attention_cases import AttentionCase, Views, as_rotated, first_elements, rotated
from four_bit_cases import place_rows
from helpers import LAYOUTS, Case, cache_shape, from_values
from prefill_calls import Call
from rope_cases import RopeCase, store_arguments
from shift_cases import POSITIONS as SHIFTS
from shift_cases import ShiftCase
from store_calls import shuffled_slots
from transfer_cases import TransferCase, pools

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import bytes_of, view

HEADS = 2


def caches(case, fmt, widths, pages, page_size):
    """Two caches of `pages` pages, each in the middle of a buffer of three times as many.

    Pages have a gap between them. A row that misses its cache lands in the buffer, and is noticed.
    """
    return [
        case.output(fmt, (3 * pages, page_size + 1, HEADS, width),
                    lambda a: a[pages : 2 * pages, :page_size], name=name)
        for name, width in zip(("k_cache", "v_cache"), widths, strict=True)
    ]  # fmt: skip


def slots_of_every_kind(num_slots):
    """All slots, from the last, 5 is to be skipped; negative ones; the first two past the end."""
    return [-1, num_slots, *range(num_slots - 1, -1, -1), -7, num_slots + 1]


# Rows of a cache ---------------------------------------------------------------------------------


def check_store(device, fmt="nvfp4", source="fp32"):
    """Four-bit rows that a thread takes in several packs, and V wider than K."""
    case = Case(device, 1)
    key, value = (place_rows(case, source, (24, HEADS, n), name=str(n)) for n in (128, 384))
    k_cache, v_cache = caches(case, fmt, (128, 384), 5, 4)
    case.store_kv(
        key, value, k_cache, v_cache, slots_of_every_kind(20), skip_slot=5,
        v_scale=np.float32([0.013, 1.9]),
    )  # fmt: skip


def check_narrow(device):
    """Codes in words of 1, 2 and 4 bytes."""
    for width in (16, 32, 64):
        case = Case(device, 2)
        key, value = (place_rows(case, "fp32", (24, HEADS, width)) for _ in range(2))
        stored, slots = caches(case, "nvfp4", (width, width), 5, 3), slots_of_every_kind(15)
        case.store_kv(key, value, *stored, slots)
        shapes = [(19, HEADS, width)] * 2
        four_bit_cases.check_gather(case, stored, case.slots(slots), shapes, "fp32")


def check_gather(device, fmt="nvfp4"):
    case = Case(device, 3)
    stored, slots = caches(case, fmt, (128, 384), 5, 4), case.slots(slots_of_every_kind(20))
    shapes, scales = [(24, HEADS, n) for n in (128, 384)], np.float32([0.013, 1.9])
    four_bit_cases.check_gather(case, stored, slots, shapes, "fp32", k_scale=0.37, v_scale=scales)


def there_and_back(
    case, fmt, widths, source, target, *, slots=9, heads=2, layout="slots", rule="absmax"
):  # fmt: skip
    """Store K and V and gather them, each rotated or not; arguments hold bits of every kind."""
    key, value = (place_rows(case, source, (slots, heads, n), name=str(n)) for n in widths)
    for rotates in ((True, True), (True, False), (False, True), (False, False)):
        stored = [
            case.output(fmt, cache_shape(layout, 4, 3, heads, n), name=f"cache {n}").ruled(rule)
            for n in widths
        ]
        stored = [c.rotated() if r else c for c, r in zip(stored, rotates, strict=True)]
        options = {"layout": layout} if layout in LAYOUTS else {}
        options["k_scale"] = 0.37
        chosen = shuffled_slots(case, slots, 12)
        case.store_kv(key, value, *stored, chosen, **options)
        shapes = [(slots, heads, n) for n in widths]
        four_bit_cases.check_gather(case, stored, chosen, shapes, target, **options)


def check_rotated_blocks(device, fmt="nvfp4"):
    """A block of a thread, of two and of 32; K and V rotated otherwise."""
    for widths in ((48, 96), (512, 128)):
        there_and_back(Case(device, 1), fmt, widths, "fp32", "fp32", slots=5)


def check_long_rotated_rows(device):
    """Several blocks of a row, which lanes take in steps."""
    there_and_back(Case(device, 2), "nvfp4", (192, 768), "bf16", "fp32", slots=5)


def check_scale_rule(device, source="fp32", rotates=False):
    """K by the rule and V not, then V and not K, in rows of several packs per thread."""
    case = Case(device, 1)
    key, value = (place_rows(case, source, (24, 2, n)) for n in (128, 384))
    stored = [case.output("nvfp4", (27, 2, n), name="cache") for n in (128, 384)]
    if rotates:
        stored = [cache.rotated() for cache in stored]
    for rules in (("four_over_six", "absmax"), ("absmax", "four_over_six")):
        chosen = [cache.ruled(rule) for cache, rule in zip(stored, rules, strict=True)]
        options = {"k_scale": 0.37, "v_scale": np.float32([1.0, 1.9])}
        case.store_kv(key, value, *chosen, shuffled_slots(case, 24, 27), **options)


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


# Rotary operations -------------------------------------------------------------------------------

POSITIONS = np.array([5, 0, 63, 64, 17, 40, -1, 9, 31, 2, 62, 1])
"""The last of the table and the first past it among them."""


def check_rope_store_mla(device):
    """The rope part of MLA goes behind the latent."""
    case = RopeCase(device, 16)
    query, latent = case.rows("bf16", (12, 3, 16)), case.rows("bf16", (12, 64))
    cache = case.output("bf16", (15, 4, 82), lambda a: a[5:10, :, :80], name="cache")
    case.rotate(
        "rope_store_mla", query, latent, case.rows("bf16", (12, 16)), case.table(16, POSITIONS),
        case.positions(POSITIONS), cache, [19, -1, 0, 7, 20, 5, 3, 4, 11, -7, 8, 21], skip_slot=5,
    )  # fmt: skip


def check_rope(device, v_width=128):
    """Keys are rotated, and encoded from what their warp has staged."""
    case = RopeCase(device, 4)
    args = store_arguments(case, "fp32", "int4", width=64, v_width=v_width, rotary_dim=40)
    case.rotate("rope_store_kv", *args, [7, 0, -1, 11, 3, 4], k_scale=0.5, write_key=False)


def check_rotated_rope(device):
    """K and V of one warp, of blocks of different sizes."""
    for rotates in ((True, True), (False, True)):
        case = RopeCase(device, 3)
        *args, k_cache, v_cache = store_arguments(
            case, "bf16", "nvfp4", width=128, v_width=64, rotary_dim=48
        )
        stored = [c.rotated() if r else c for c, r in zip((k_cache, v_cache), rotates, strict=True)]
        case.rotate("rope_store_kv", *args, *stored, [7, 12, -1, 11, 3, 4])


def check_shift(device, fmt="bf16"):
    """Onto other pages, by a delta for each, with every kind of fault, and a value too wide."""
    case = ShiftCase(device, dtype=fmt)
    case.shift((6, 0, 3, -1, 8, 2, 2), (5, -SHIFTS, 1 - SHIFTS, 1, 1, SHIFTS, 1),
               out_pages=(1, 5, 7, 4, 4, 4, 8))  # fmt: skip
    case.shift((6, 0), 0, out_pages=(4, 5), interleaved=True)


def check_shift_of_latents(device, fmt="fp16"):
    """A part of each row, after another, in place and not."""
    case = ShiftCase(device, "mla", dtype=fmt, layout="page_first")
    case.shift((6, 0, 3), (5, -6, 0))
    case.shift((6, 0), 3, out_pages=(4, 5), interleaved=True)


def check_shift_with_scales(device):
    """Of each row, of which a part is rotated."""
    for fmt, kind in (("int8", "kv"), ("fp8_e4m3", "mla")):
        case = ShiftCase(device, kind, dtype=fmt, scales=True)
        case.shift((6, 0, 9), (3, -2, 1), out_pages=(1, 5, 2))
        case = ShiftCase(device, kind, dtype=fmt, scales=True)
        case.shift((1, 2, -1), 4, interleaved=True)


def lay_out(case, slots, channels, inputs, dtype, order, *, pad=0):
    """A cache, (slots, channels, inputs), of which inputs or channels are contiguous."""
    if order == "channels last":
        shape, cut = (slots, inputs, channels + pad), lambda a: a[..., :channels].swapaxes(1, 2)
    else:
        shape, cut = (slots, channels, inputs + pad), lambda a: a[..., :inputs]
    return case.bits(shape, dtype, cut, name="cache")


def check_conv_state(device, order="inputs last", dtype=np.float16):
    """Any number of new tokens, in the middle of a buffer, of more channels than a piece has."""
    case = Case(device, 31)
    new = [2, 3, 0, 9, 1, 4, 2, 5, 1]
    sums = np.cumsum([0, *new])
    x = case.bits((sums[-1] + 9, 1040), dtype, lambda a: a[4:-4, :1029], name="x")
    cache = lay_out(case, 30, 1029, 5, dtype, order, pad=3).sub(lambda a: a[10:20])
    sums[-2] = 10**6
    slots = [9, -1, 4, 0, 10, 7, 5, -3, 2]
    case.call("update_conv_state", x, cache, slots, case.slots(sums, "int32"), skip_slot=5)
    end = len(x.view)
    for others in ([0, 7, 2], [-2, 0, 3], [4, end + 5, end + 5], [0, 0, end], [end, end, end]):
        case.call("update_conv_state", x, cache, [3, 8], others)


# Transfers ---------------------------------------------------------------------------------------

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


def check_transfer_of_four_bits(
    device, src="fp8_e4m3", dst="nvfp4", widths=(128, 1056), scales=True
):  # fmt: skip
    """Rows with scales where a format has some, in steps, by one block."""
    case = TransferCase(device, 1)
    # Nothing goes to page 0, where rows without a page point.
    pages = [8, -1, 0, 5, 9, 3, 7, 2], [1, 6, 8, -4, 2, 13, 5, 4]
    both = pools(case, (src, dst), widths=widths, heads=3, page_size=3, layers=2, scales=scales)
    case.transfer(*both, *pages, method="kernel", max_blocks=1)


def check_transfer_of_latents(device):
    """A part of each row is rotated."""
    case = TransferCase(device, 5)
    options = {"pages": (4, 4), "page_size": 3, "layers": 2, "latent": 128, "rope": 64}
    case.transfer(*pools(case, ("fp16", "nvfp4+hadamard"), **options), [1, 2, 0], [3, 0, 1])


# Attention ---------------------------------------------------------------------------------------

LENS = [6, 0, 4, 13, 21]
NEW = [3, 0, 1, 13, 6]
MORE_LENS = [30, 0, 41, 13, 21]
MORE_NEW = [9, 0, 20, 13, 6]
ROWS = sum(NEW) + 2
EVICTED = {
    "evicted": [(4, 3), (0, 5), (9, 8), (14, 2), (0, 4)], "key_starts": [2, 0, 11, 0, 30],
    "widths": (24, 40), "page_size": 3,
}  # fmt: skip


def attends(seed, seq_lens, query_lens=None, *calls, rope=None, change=None, out=None, **arguments):
    """Return a function that attends once with each of some options, and checks the results.

    Parameters
    ----------
    seq_lens, query_lens, arguments : of `AttentionCase.arguments`; `rope` of `AttentionCase.rope`
    calls : options by name, or functions of the case that make them; none: a call without options
    change : called with the case and its arguments, returns other ones
    out : the format of the output; None: the query's
    """

    def check(device, **changes):
        case = AttentionCase(device, seed)
        names = {"interleaved"} & changes.keys()
        rotation = rope and rope | {name: changes.pop(name) for name in names}
        args = case.arguments(seq_lens, query_lens, **arguments | changes)
        args |= case.rope(**rotation) if rotation else {}
        args = change(case, args) if change else args
        for options in calls or ({},):
            made = {n: make(case) if callable(make) else make for n, make in options.items()}
            case.attend(args, *(case.results(args, fmt=out) if out else ()), **made)
        return case

    return check


def in_turn(*checks):
    """Return a function that makes several checks."""

    def check(device, **changes):
        for each in checks:
            each(device, **changes)

    return check


def rising_scales(case, args):
    """Scales of V of very different sizes."""
    scales = args["v_scale_cache"].view
    scales = (scales * 2.0 ** case.rng.integers(-9, 9, scales.shape)).astype(np.float32)
    return args | {"v_scale_cache": case.place(scales, "fp32", name="scales")}


def without_page(sequence, entry):
    """Take a page out of a block table."""

    def change(case, args):
        table = args["block_table"].view.copy()
        table[sequence, entry] = -1
        return args | {"block_table": case.table(table)}

    return change


def latent_values(case, args):
    """Values that are the first elements of keys; a page is missing."""
    keys = args["k_cache"]
    if keys.fmt in reference.FOUR_BIT:
        args["v_cache"] = first_elements(keys, 512)
    else:
        args["v_cache"] = keys.sub(lambda a: a[..., :512])
    if "k_scale" in args:
        args["v_scale"] = args["k_scale"]
    return without_page(0, 3)(case, args)


def quiet_quarter(case, args):
    """Latents, and queries that are small in the first quarter of their depth."""
    args = latent_values(case, args)
    query = args["query"].view.astype(np.float32)
    query[..., :144] *= 2.0**-20
    return args | {"query": case.place(from_values(query, "bf16"), "bf16", name="query")}


def shorter_table(columns):
    return lambda case, args: (
        args | {"block_table": args["block_table"].sub(lambda a: a[:, :columns])}
    )


def trees(nodes, new, **tail):
    """Add trees with nodes of earlier steps, and their positions."""
    return lambda case, args: args | case.nodes(nodes, new) | case.tail(nodes, **tail)


def vary_scales(case, args, low=-3, high=4):
    """Multiply each group of K and V by its own power of two, but those that are poison."""
    for arg in (args["k_cache"], args["v_cache"]):
        rows = arg.view
        values = reference.decode_scales(rows.scales, rows.fmt)
        powers = np.exp2(case.rng.integers(low, high, values.shape))
        bits = reference.encode_scales(
            np.where(np.isnan(values), 1.0, values) * powers, np.zeros(values.shape, bool), rows.fmt
        )
        rows.scales[...] = np.where(np.isnan(values), rows.scales, bits)
        arg.buffer.restore()
    return args


def vary_and_rotate(case, args):
    return rotated(vary_scales(case, args))


def large_values(case, args):
    """Values of int4 past the largest of fp16, in a tile that is not the first."""
    for entry, scale in ((0, 8000), (9, 30000)):  # of one warp
        page = args["block_table"].view[0, entry]
        args["v_cache"].view.scales[page] = np.float16(scale).view(np.uint16)
    args["v_cache"].buffer.restore()
    return args


def rising_exponents(case, args):
    """Values of mxfp4 whose exponents rise within a warp, of every other pair of chunks alone."""
    page = args["block_table"].view[0, 9]
    args["v_cache"].view.scales[page, ..., 1:3] += 5
    args["v_cache"].buffer.restore()
    return args


def rotated_latents(latent):
    """Rows of which the first part alone is rotated; of 512, more than a warp holds at once."""

    def change(case, args):
        k = as_rotated(args["k_cache"], latent)
        return args | {
            "k_cache": k, "v_cache": Views(k.array[..., :latent], k.view.columns(0, latent))
        }  # fmt: skip

    return change


PAGES_16 = {"page_size": 16}
DECODE = {"heads": (6, 2), "widths": (24, 40), "page_size": 3}
LATENT = {"widths": (576, 512), "page_size": 16, "fmt": "bf16", "change": latent_values}
OF_HEAD = {"scales": ("per head", "float")}
CODES = {"fmt": "bf16", "heads": (8, 2), "loud": 0.3, "out": "fp32", **OF_HEAD, **PAGES_16}
ONE_SEQUENCE = {
    "fmt": "bf16", "heads": (4, 1), "widths": (128, 128), "loud": 0.3, "out": "fp32", **PAGES_16
}  # fmt: skip
WINDOWS = ({"window": 30, "sink_tokens": 5, "logits_soft_cap": 6.0},)
ROTARY = {"dim": 32, "start": 8, "positions": 25}
BYTES = {"dim": 32, "start": 16, "positions": 250}


def latents(*, fmt="bf16", cache_fmt=None, scale="none"):
    """A tile of heads, and two of heads and tokens."""
    options = LATENT | {"fmt": fmt, "cache_fmt": cache_fmt, "scales": (scale, "none")}
    return in_turn(
        attends(63, [130, 0, 37], heads=(16, 1), **options),
        attends(63, [70, 3, 5], [3, 1, 0], heads=(8, 1), **options),
    )


def masks(fmt):
    """Windows with first keys, learned sinks, a cap, and trees with them."""
    return attends(
        49, LENS, NEW, {"window": 5, "sink_tokens": 3}, {"window": 4, "causal": False},
        {"sinks": lambda case: case.sinks(4), "logits_soft_cap": 6.0},
        {"tree_mask": lambda case: case.tree(NEW, ROWS, 15), "window": 4, "sink_tokens": 2},
        {"tree_mask": lambda case: case.tree(NEW, ROWS, 15, any_mask=True), "causal": False},
        fmt=fmt, padding=2,
    )  # fmt: skip


def spans(fmt, new=None):
    """Evicted spans and hidden first keys, with a window that keeps first keys."""
    return attends(54, MORE_LENS, new, {}, {"window": 8, "sink_tokens": 4}, fmt=fmt, **EVICTED)


def shared_keys(fmt):
    """More queries than keys, which all see all of them; with a window, queries before the first
    position see none, and a tile of them sees whole tiles of keys."""
    calls = {"causal": False}, {"causal": False, "window": 90}
    return attends(59, [70, 3, 0], [140, 9, 4], *calls, fmt=fmt, heads=(1, 1))


def old_trees(fmt):
    """Nodes of earlier steps, rotated by their tree positions, some past the table."""
    nodes = [12, 0, 0, 13, 9]
    return attends(
        56, MORE_LENS, MORE_NEW, {}, {"window": 4, "sink_tokens": 2}, fmt=fmt, widths=(32, 24),
        rope={"dim": 32}, change=trees(nodes, MORE_NEW, columns=11, low=-5, high=60),
    )  # fmt: skip


def wide_rows(cache_fmt, widths, scales):
    """V is not part of K; a scale per slot for either; few new tokens; windows and trees."""
    return attends(
        64, [75, 40, 3], [3, 1, 2], *WINDOWS,
        {"tree_mask": lambda case: case.tree([3, 1, 2], 8)}, fmt="fp16", cache_fmt=cache_fmt,
        heads=(6, 2), widths=widths, padding=2, scales=scales,
    )  # fmt: skip


ATTENTION = {
    # One token per sequence, three query heads per KV head, odd pages, values of another width.
    "decode": attends(40, LENS, **DECODE),
    "decode, bf16": attends(40, LENS, fmt="bf16", **DECODE),
    "decode, HND, combined": attends(41, LENS, fmt="bf16", widths=(128, 128), how="combined HND"),
    # Enough keys for several blocks, whose largest scores differ.
    "long decode": attends(42, [1300, 0, 5, 700], heads=(2, 1), **PAGES_16),
    "long decode, fp16": attends(
        42, [1300, 0, 5, 700], fmt="fp16", heads=(8, 1), **PAGES_16),
    "long append": attends(52, [1300, 5], [2, 1], heads=(2, 1), padding=2, **PAGES_16),
    "long decode, fp8": attends(
        42, [700, 0, 31], fmt="bf16", cache_fmt="fp8_e4m3", heads=(8, 2), widths=(32, 64),
        **OF_HEAD, **PAGES_16),
    "decode, int8": attends(
        43, LENS, fmt="bf16", cache_fmt="int8", heads=(6, 3), scales=("dynamic", "per head")),
    "decode, fp32, int8": attends(
        43, LENS, cache_fmt="int8", heads=(6, 3), scales=("dynamic", "per head")),
    "decode, scales that rise": attends(
        60, [290, 7], fmt="fp16", cache_fmt="int8", heads=(4, 1), scales=("float", "dynamic"),
        change=rising_scales),
    "decode, fp8": attends(
        44, LENS, fmt="fp16", cache_fmt=("fp8_e4m3", "fp8_e5m2"), how="HND",
        scales=("float", "dynamic")),
    "decode, masks": in_turn(
        attends(45, LENS, None, {"window": 5, "sink_tokens": 3},
                {"window": 7, "sinks": lambda case: case.sinks(4), "logits_soft_cap": 6.0},
                fmt="fp16"),
        attends(45, [100, 40], None, {"window": 37, "sink_tokens": 20}, fmt="fp16", heads=(8, 2),
                **PAGES_16)),
    # Few new tokens, of which the last alone sees all of the last keys.
    "append, whole tiles": attends(
        61, [64, 33], [12, 5], {}, {"window": 31}, fmt="bf16", heads=(1, 1), **PAGES_16),
    "latents": latents(),
    "latents, fp8": latents(cache_fmt="fp8_e4m3", scale="float"),
    "latents, nvfp4": latents(cache_fmt="nvfp4", scale="float"),
    "latents, mxfp4": latents(cache_fmt="mxfp4", scale="float"),  # rows of 306 bytes
    "latents, int4": latents(cache_fmt="int4", scale="float", fmt="fp16"),
    "heads": attends(65, [70, 0, 3], heads=(100, 1), **LATENT),
    "heads, fp8": attends(
        65, [75, 2], heads=(40, 1), cache_fmt="fp8_e4m3", scales=("float", "none"),
        **LATENT | {"change": quiet_quarter}),
    "heads, wide rows": attends(
        66, [44, 21], [3, 1], *WINDOWS, {"tree_mask": lambda case: case.tree([3, 1], 6)},
        fmt="fp16", cache_fmt="int8", heads=(20, 2), widths=(320, 272), padding=2,
        scales=("dynamic", "dynamic"), change=rising_scales),
    # Small scores, and an output of float32: rounding weights would show.
    "heads, bits": attends(67, [70], heads=(18, 1), loud=0.5, out="fp32", **LATENT),
    "wide rows": wide_rows("int8", (320, 272), ("dynamic", "dynamic")),
    "wide rows, mxfp4": wide_rows("mxfp4", (320, 256), ("per head", "float")),
    **{
        f"append, {fmt}": attends(
            46, LENS, NEW, {}, {"causal": False}, fmt=fmt, padding=3, **DECODE)
        for fmt in ("fp32", "bf16")
    },
    # More queries than a tile, over more keys than one.
    "append, long": attends(
        47, [150], [70], fmt="bf16", heads=(1, 1), widths=(64, 64), **PAGES_16),
    "append, quantised": in_turn(*(
        attends(48, LENS, NEW, fmt="bf16", cache_fmt=fmt, heads=(6, 3), scales=scales)
        for fmt, scales in (
            ("int8", ("dynamic", "per head")), ("fp8_e4m3", ("per head", "dynamic")))
    )),
    "append, masks": masks("fp32"), "append, masks, bf16": masks("bf16"),
    "evicted spans": spans("fp32"), "evicted spans, fp16": spans("fp16"),
    "append, evicted spans": spans("fp16", MORE_NEW),
    # A length that fits into the table only without its evicted span.
    "an evicted span at the end": attends(
        55, [14, 16], evicted=[(5, 1), (7, 4)], change=shorter_table(4)),
    "shared keys": shared_keys("fp32"), "shared keys, fp16": shared_keys("fp16"),
    "trees": old_trees("fp32"), "trees, fp16": old_trees("fp16"),
    # Few nodes, some of which no query of a tile sees.
    "small trees": attends(
        62, [40, 21, 16], [3, 5, 2], {}, {"window": 20, "sink_tokens": 2}, fmt="bf16",
        widths=(32, 24), rope={"dim": 32}, change=trees([12, 5, 4], [3, 5, 2])),
    # A part of each key is rotated by its position; past the table, by the last.
    **{
        f"rotated keys, {fmt}{', interleaved' * by}": attends(
            57, MORE_LENS, cache_fmt=fmt, widths=(40, 24), rope=ROTARY | {"interleaved": by})
        for fmt in ("fp32", "int8") for by in (False, True)
    },
    "rotated keys, fp16": attends(57, MORE_LENS, fmt="fp16", widths=(40, 24), rope=ROTARY),
    **{
        f"rotated bytes{', interleaved' * by}": attends(
            58, [260, 31], fmt="fp16", cache_fmt="fp8_e5m2", widths=(80, 32),
            rope=BYTES | {"interleaved": by}, **PAGES_16)
        for by in (False, True)
    },
    **{
        f"append, rotated keys{', interleaved' * by}": attends(
            58, MORE_LENS, MORE_NEW, fmt="fp16", widths=(40, 24), out="fp32",
            rope=ROTARY | {"interleaved": by})
        for by in (False, True)
    },
    # Two tiles of keys and more, and scales of each kind, dequantised in shared memory.
    "prefill of 8 bits": attends(
        59, [150, 40], [70, 40], fmt="bf16", cache_fmt="fp8_e4m3", heads=(4, 2), widths=(128, 64),
        loud=1.0, scales=("dynamic", "dynamic"), index=("int64", "int32"), **PAGES_16),
    "prefill of 4 bits": attends(
        60, [150, 40], [70, 40], fmt="fp16", cache_fmt="nvfp4", heads=(4, 2), widths=(64, 128),
        loud=1.0, **OF_HEAD, **PAGES_16),
    # A sequence that takes all of its row of the table is no fault.
    "a full table": attends(51, [8, 3], change=shorter_table(2)),
    # Two tiles of a warp; groups of very different sizes; a scale per head.
    **{
        f"{cache_fmt}, {widths[0]}, {widths[1]}": attends(
            70, [300, 0, 37], cache_fmt=cache_fmt, widths=widths, change=vary_scales, **CODES)
        for cache_fmt, widths in (
            ("nvfp4", (128, 64)), ("mxfp4", (128, 128)), ("int4", (128, 64)), ("int4", (128, 128)))
    },
    **{
        f"{cache_fmt}, rotated keys{', interleaved' * by}": attends(
            70, [300, 0, 37], cache_fmt=cache_fmt, widths=(128, 128), change=vary_scales,
            rope={"dim": 64, "start": 64, "positions": 250, "interleaved": by}, **CODES)
        for cache_fmt, by in (("nvfp4", False), ("int4", False), ("nvfp4", True))
    },
    **{
        f"nvfp4, {widths[0]}, {widths[1]}, stored rotated": attends(
            70, [300, 0, 37], cache_fmt="nvfp4", widths=widths, change=vary_and_rotate, **CODES)
        for widths in ((192, 128), (256, 256), (128, 64))
    },
    "fp32, nvfp4": attends(
        70, [300, 0, 37], cache_fmt="nvfp4", widths=(64, 96), change=vary_scales,
        **CODES | {"fmt": "fp32"}),
    "fp32, int4, rotated keys": attends(
        70, [300, 0, 37], cache_fmt="int4", widths=(128, 128), change=vary_scales,
        rope={"dim": 64, "start": 64, "positions": 250}, **CODES | {"fmt": "fp32"}),
    "fp32, nvfp4, stored rotated": attends(
        70, [300, 0, 37], cache_fmt="nvfp4", widths=(96, 128), change=vary_and_rotate,
        **CODES | {"fmt": "fp32"}),
    "large values of int4": attends(
        71, [200], cache_fmt="int4", change=large_values, **ONE_SEQUENCE),
    "exponents of mxfp4 that rise": attends(
        74, [200], cache_fmt="mxfp4", change=rising_exponents, **ONE_SEQUENCE),
    # Scores so large that they need more bits of the rotated queries than one fp16 has.
    "loud queries, stored rotated": attends(
        73, [300, 0, 37], fmt="bf16", cache_fmt="nvfp4", heads=(8, 2), widths=(128, 128), loud=4.0,
        out="fp32", change=lambda case, args: rotated(args), **PAGES_16),
    **{
        f"latents of {n}, stored rotated": attends(
            72, [37, 3], fmt="bf16", cache_fmt="nvfp4", heads=(4, 1), widths=(n + 64, n),
            out="fp32", change=rotated_latents(n), **PAGES_16)
        for n in (128, 512)
    },
    # As users run them on a processor. K and V are read where they lie, with a tail of keys; a
    # block without its first page.
    "few rows": attends(
        70, [77, 0, 1, 200], heads=(6, 2), widths=(64, 96), change=without_page(3, 4), **PAGES_16),
    # Tiles that are taken together, and some that are not whole; windows that few rows see.
    "many rows": attends(
        71, [150, 90, 41, 3], [70, 33, 41, 0], {}, {"window": 19, "sink_tokens": 5}, heads=(6, 2),
        widths=(80, 64), **PAGES_16),
    # More heads than a block takes, and more rows of each than a product.
    "heads that are taken together": in_turn(*(
        attends(75, [77, 1, 40], heads=heads, widths=(32, 64), **PAGES_16)
        for heads in ((18, 9), (35, 35), (25, 5))
    )),
    "few rows beside many": attends(
        76, [150, 70, 35], [90, 1, 2], {}, {"window": 40, "logits_soft_cap": 9.0}, heads=(6, 2),
        widths=(64, 64), **PAGES_16),
    # The rows of the first tile see no key, the rows of the next do.
    "no keys of a tile": attends(72, [41, 30], [33, 20], heads=(2, 1), key_starts=[20, 30]),
    # Scales of K and V beside group scales; a block without its first page.
    "four bits": attends(
        75, [77, 0, 1, 45], [3, 0, 1, 9], fmt="bf16", cache_fmt="nvfp4", heads=(6, 2),
        widths=(128, 256), change=without_page(3, 2), **OF_HEAD, **PAGES_16),
    "rotated four bits": attends(
        76, [41, 0, 33], [2, 0, 1], fmt="fp16", cache_fmt="int4", heads=(4, 2), widths=(128, 128),
        rope={"dim": 64, "start": 32}),
    # Keys and values that are stored rotated, and values alone.
    "stored rotated": in_turn(*(
        attends(77, [41, 0, 33], new, fmt="fp16", cache_fmt="nvfp4", heads=(4, 2),
                widths=(128, 96), change=lambda case, args, names=names: rotated(args, *names))
        for new in ([2, 0, 1], [33, 0, 2]) for names in ((), ("v_cache",))
    )),
}  # fmt: skip


def check_attention(device, name, **changes):
    """Make one of the checks of `ATTENTION`, with other arguments of its sequences."""
    ATTENTION[name](device, **changes)


def attention(*names):
    return tuple(partial(check_attention, name=name) for name in names)


def check_visible_nan(device):
    """A NaN of e4m3 in V shows in its column, and one in K in the rows that see the key."""
    rng = np.random.default_rng(45)
    query = from_values(rng.standard_normal((2, 8, 64)), "bf16")
    k, v = (from_values(rng.standard_normal((4, 16, 2, 64)), "fp8_e4m3") for _ in "kv")
    reference.bits_of(v, "fp8_e4m3")[1, 3, :, 5] = 0xFF  # of the first sequence
    reference.bits_of(k, "fp8_e4m3")[2, 7, :, 9] = 0x7F  # of the second
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    seq_lens = np.array([30, 20], np.int32)
    arrays = (device.asarray(array) for array in (query, k, v, table, seq_lens))
    out = device.to_numpy(kv.paged_attention(*arrays)).astype(np.float32)
    expected = np.zeros(out.shape, bool)
    expected[0, :, 5] = expected[1] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


def check_large_tiles(device):
    """Tiles of 128 rows, the last of which is not full, with a mask at their ends and without."""
    for masks in ({}, {"window": 50, "sink_keys": 3}, {"tree": True, "query_lens": (130, 9)}):
        arguments = {"seq_lens": (300, 140), "query_lens": (140, 9), "widths": (64, 64), **masks}
        Call(kernel="prefill of 128 rows", **arguments).check(device)


def check_faults(device, new=None, fmt="fp32"):
    """Negative pages, the page past the end, one far past it, and a length past the table; rows
    that do not exist."""
    case = AttentionCase(device, 50)
    args = case.arguments(LENS, new, fmt=fmt)
    for page in (len(args["k_cache"].view), 2**32 + 1):
        table = args["block_table"].view.astype(np.int64)
        table[0, 1], table[3, 2], table[4, 0] = page, -1, page
        case.attend({**args, "block_table": case.table(table, "int64")})
    case.attend(shorter_table(5)(case, args))
    if new:
        args = case.arguments(LENS, new)
        args["query"] = case.place(args["query"].view[:-2], "fp32", name="query")
        case.attend(args)


def check_decode_tree(device):
    """Nodes that no query sees, which are NaN in the cache."""
    Call(kernel="decode", tree=True, seq_lens=(40, 21), query_lens=(5, 6)).check(device)


def check_kept_keys_in_order(device):
    """More kept keys than the window leaves out."""
    Call(window=4, sink_keys=100, seq_lens=(60,), query_lens=(12,), kernel="decode").check(device)


def check_no_number_in_v(device, query_lens=(3, 4), fmt="fp32"):
    """A NaN in the value of the last key reaches the row that sees it alone."""
    case = AttentionCase(device, 73)
    args = case.arguments([45, 33], list(query_lens), fmt=fmt, heads=(2, 1), page_size=16)
    out, _ = case.attend(args)
    before = out.live().copy()
    table, values = args["block_table"].view, args["v_cache"].view.copy()
    values[table[0, 44 // 16], 44 % 16] = from_values(np.nan, fmt)
    args["v_cache"] = case.place(values, fmt, name="v_cache")
    after = reference.decode(device.to_numpy(case.issue(args)), fmt)
    sees = query_lens[0] - 1
    others = [row for row in range(len(after)) if row != sees]
    assert np.isnan(after[sees]).all()
    np.testing.assert_array_equal(after[others], reference.decode(before, fmt)[others])


def check_no_number_in_k(device):
    """A NaN or an infinity in a key reaches the rows that see it."""
    for number in (np.nan, np.inf):
        case = AttentionCase(device, 74)
        args = case.arguments([40, 33], [2, 9], heads=(1, 1), page_size=16)
        keys = args["k_cache"].view.copy()
        keys[args["block_table"].view[1, 0], 3] = number
        args["k_cache"] = case.place(keys, "fp32", name="k_cache")
        out = device.to_numpy(case.issue(args))
        assert np.isfinite(out[:2]).all()
        assert np.isnan(out[2:]).all()


# States ------------------------------------------------------------------------------------------


def states_of(case, fmt, shape, loud=4):
    """Outputs and logarithms, a third of them empty."""
    outs = from_values(case.rng.standard_normal(shape), fmt)
    lses = (case.rng.standard_normal(shape[:-1]) * loud).astype(np.float32)
    empty = case.rng.random(shape[:-1]) < 0.35
    lses[empty], outs[empty] = -np.inf, from_values(np.nan, fmt)
    lses[..., :2, :], outs[..., :2, :, :] = -np.inf, from_values(np.nan, fmt)
    return case.place(outs, fmt, name="out_a"), case.place(lses, "fp32", name="lse_a")


def check_merge_two(device, fmt="bf16"):
    """Empty states with NaN in them, natural and binary logarithms, small weights and none."""
    case = AttentionCase(device, 51)
    for base, loud in (("e", 4), ("2", 4), ("e", 90)):
        states = [states_of(case, fmt, (9, 3, 40), loud) for _ in "ab"]
        out, lse = case.output(fmt, (9, 3, 40)), case.output("fp32", (9, 3))
        case.merge(*states[0], *states[1], out, lse, base=base)


def check_merge_many(device):
    """Five states of odd width."""
    case = AttentionCase(device, 52)
    states = states_of(case, "fp32", (5, 9, 3, 33))
    case.merge(*states, out=case.output("fp32", (9, 3, 33)), lse=case.output("fp32", (9, 3)))


def check_merge_parts(device):
    """The last block of a tile merges what all have left, and leaves its counter at 0; in two
    steps if parts are many, in groups of 9, the last one smaller, and nine of them."""
    few = {"seq_lens": (350, 0), "query_lens": (3, 2), "heads": (4, 2), "learned": True}
    many = {"seq_lens": (150, 1200), "query_lens": (1, 2), "heads": (24, 2), "fmt": "bf16"}
    for splits in (2, 20):
        Call(kernel="decode", splits=splits, merges=True, sm_scale=30.0, **few).check(device)
    for splits in (70, 81):
        Call(kernel="decode", splits=splits, merges=True, **many).check(device)


def check_merge_parts_of_any_strides(device):
    """Pieces of a few new tokens, rows of no sequence, outputs of float32 and fp16, no lse."""
    case = AttentionCase(device, 53)
    args = case.arguments(
        [1300, 5], [2, 1], fmt="fp16", heads=(4, 2), page_size=16, widths=(32, 24), padding=2
    )
    case.attend(args, *case.results(args, fmt="fp32"))
    args["sinks"] = case.sinks(4)
    case.attend(args, case.results(args)[0], None)
