"""`transfer_pages` between number formats: the very bits of the reference, NaN for NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from four_bit_cases import FOUR_BIT, hard_rows
from helpers import FORMATS, QUANTISED, from_values, full_only
from store_calls import (
    by_reciprocal,
    in_float64,
    telling_values,
    traps,
)
from transfer_cases import TransferCase, ones, pools, repeated

import kvcupy as kv
from kvcupy import formats, reference

SRC, DST = [1, -1, 2, 0], [3, 0, 0, 1]
METHODS = ("kernel", "staged", "auto")
PAIRS = list(itertools.permutations(FORMATS, 2))

every_method = pytest.mark.parametrize("method", METHODS)


# Values ---------------------------------------------------------------------------------------


# All values of each format are decoded; boundaries (of fp32) and all values of 16 bits are encoded.
@pytest.mark.parametrize(
    "pair",
    [p if "fp32" in p or p[0] == "bf16" else full_only(p) for p in PAIRS],
    ids="-".join,
)
def test_every_value(device, pair):
    """All patterns of 8 and 16 bits, and from fp32 all boundaries of rounding, unscaled."""
    values = telling_values(*pair)
    if pair[0] == "fp32":
        values = values.astype(np.float32)
    case = TransferCase(device, 3)
    both = pools(
        case, pair, pages=(2, 1), page_size=-(-values.size // 128), layers=1, heads=1,
        widths=(128, 128), scales=False, content=lambda _, count: np.resize(values, count),
    )  # fmt: skip
    case.transfer(*both, [1], [0], method="kernel")


def products_that_tell(fmt):
    """Values of a format, and for each a scale whose product in float32 is halfway between two
    bf16, where the exact product is not."""
    rng = np.random.default_rng(4)
    values = from_values(rng.uniform(1, 100, 2**21), fmt)
    by = rng.uniform(0.5, 1, values.size).astype(np.float32)
    exact = reference.decode(values, fmt) * by
    rounded = exact.astype(np.float32)
    tells = (rounded != exact) & (rounded.view(np.uint32) & 0xFFFF == 0x8000)
    assert tells.sum() >= 8, "the input tells nothing"
    return values[tells][:64], by[tells][:64]


@pytest.mark.parametrize("fmt", QUANTISED)
@every_method
def test_a_product_is_rounded_to_float32(device, fmt, method):
    """And that to bf16, which twice rounds to another value than once."""
    values, by = products_that_tell(fmt)
    stored = np.repeat(values[:, None], 40, axis=1)
    stored[:, 8:] = np.resize(telling_values(fmt, "bf16"), (len(values), 32))
    case = TransferCase(device, 4)
    both = pools(
        case, (fmt, "bf16"), ("layer_first", "page_head"), pages=(1, 1), page_size=len(values),
        layers=1, heads=1, widths=(40, 40), content=lambda _, count: np.resize(stored, count),
        multipliers=lambda *_: by,
    )  # fmt: skip
    case.transfer(*both, [0], [0], method=method)


# Scales that the target gets --------------------------------------------------------------------


@pytest.mark.parametrize("fmt", QUANTISED)
@every_method
def test_scaling_is_two_float32_divisions(device, fmt, method):
    """absmax / limit, then x / that: neither by the reciprocal nor in float64."""
    limit = np.float32(reference.LIMIT[fmt])
    rng = np.random.default_rng(5)
    rows, found = [], 0
    for absmax in rng.uniform(0.5, 900, 96).astype(np.float32):
        for wrong in (by_reciprocal, in_float64):
            _, x = traps(fmt, wrong, [absmax / limit])
            found += x.size
            rows.append(np.concatenate([[-absmax], np.resize(x if x.size else [0], 63)]))
    assert found >= 50, "the input tells nothing"
    case = TransferCase(device, 5)
    both = pools(
        case, ("fp32", fmt), pages=(2, 2), page_size=96, layers=1, heads=1, widths=(64, 64),
        content=repeated(np.float32(rows)),
    )  # fmt: skip
    case.transfer(*both, [0, 1], [1, 0], method=method)


@pytest.mark.parametrize("method", ["kernel", "staged"])
@pytest.mark.parametrize("pair", [("fp32", "int8"), ("fp8_e5m2", "bf16")], ids="-".join)
def test_more_than_a_staging_buffer_holds(device, pair, method):
    """Counted in the wider format or in the narrower one: 48 MiB of fp32, or of bf16."""
    width = 16384 if "fp32" in pair else 32768
    case = TransferCase(device, 12)
    numbers = case.rng.standard_normal(99_991)
    both = pools(
        case, pair, ("page_first", "layer_first"), pages=(12, 12), page_size=16, heads=1,
        widths=(width, width), layers=2, multipliers=ones, content=repeated(numbers),
    )  # fmt: skip
    case.transfer(*both, case.rng.permutation(12), case.rng.permutation(12), method=method)


# Four bits --------------------------------------------------------------------------------------

THREADS_ALONE = [
    ("int8", "nvfp4"), ("fp8_e4m3", "mxfp4"), ("fp32", "int4"), ("nvfp4", "bf16"),
    ("mxfp4", "int8"), ("int4", "fp32"),
    ("bf16", "nvfp4+hadamard"), ("int4+hadamard", "int8"), ("nvfp4+hadamard", "nvfp4"),
    ("fp16", "nvfp4+four_over_six"),
]  # fmt: skip


@pytest.mark.parametrize("pair", THREADS_ALONE, ids="-".join)
def test_rows_that_a_thread_holds_alone(users_device, pair):
    """As users run it on the host device."""
    case = TransferCase(users_device, 11)
    both = pools(case, pair, pages=(4, 4), page_size=3, layers=2, widths=(384, 640))
    case.transfer(*both, SRC, DST, method="kernel")


@pytest.mark.parametrize("narrows", [True, False], ids=["to", "from"])
@pytest.mark.parametrize("offsets", list(itertools.product([0, 1, 2, 4, 8], [0, 1])), ids=str)
def test_wrapped_pools_of_any_alignment(offsets, narrows):
    """Codes in words of 1, 2, 4 and 8 bytes, next to rows in words and element by element."""
    host = kv.device("host")
    case = TransferCase(host, offsets)
    wide, packed, wanted = (
        [np.zeros((3, 4, 2, size + 16), np.uint8) for _ in "kv"] for size in (128, 36, 36)
    )
    halves = [a[..., 2 * offsets[1] : 2 * offsets[1] + 128].view(np.float16) for a in wide]
    codes, expected = (
        [a[..., offsets[0] : offsets[0] + 36] for a in part] for part in (packed, wanted)
    )
    for half, rows in zip(halves, hard_rows(case, "fp16", (2, 3, 4, 2, 64)), strict=True):
        half[...] = rows
    cache = [kv.view_as(a, "nvfp4") for a in expected]
    kv.store_kv(*(half.reshape(12, 2, 64) for half in halves), *cache, np.arange(12))
    outs = kv.gather_kv(*cache, np.arange(12), dtype="fp16")
    floats = kv.KVPool.wrap(*[[half] for half in halves])
    fours = kv.KVPool.wrap(*[[kv.view_as(a, "nvfp4")] for a in codes])
    options = {"convert": True, "method": "kernel"}
    if narrows:
        kv.transfer_pages(floats, fours, [0, 2], [0, 2], **options)
        for part, whole in zip(packed, wanted, strict=True):
            np.testing.assert_array_equal(part[[0, 2]], whole[[0, 2]])
            assert not part[1].any()
        return
    for part, whole in zip(packed, wanted, strict=True):
        part[...] = whole
    before = [a.copy() for a in wide]
    kv.transfer_pages(fours, floats, [0, 2], [0, 2], **options)
    for part, old, half, out in zip(wide, before, halves, outs, strict=True):
        np.testing.assert_array_equal(half[[0, 2]], out.reshape(half.shape)[[0, 2]])
        np.testing.assert_array_equal(part[1], old[1])
        ends = 2 * offsets[1], 2 * offsets[1] + 128
        assert not part[..., : ends[0]].any() and not part[..., ends[1] :].any()


@pytest.fixture
def copied_bytes(monkeypatch, device):
    """What the copy engine moves, call by call."""
    sizes, copy_runs = [], type(device).copy_runs

    def counting(self, dst, src, num_bytes, *args):
        sizes.append(int(num_bytes.sum()))
        return copy_runs(self, dst, src, num_bytes, *args)

    monkeypatch.setattr(type(device), "copy_runs", counting)
    return sizes


@pytest.mark.parametrize("packed", FOUR_BIT)
def test_a_quarter_of_the_bytes_crosses_the_link(device, packed, copied_bytes):
    """By way of the staging buffer, where the copy engine says how many: codes and group scales."""
    case = TransferCase(device, 7)
    near, far = pools(case, ("bf16", packed), placements=("device", "pinned"))
    case.transfer(near, far, [0, 2], [3, 1], method="staged")
    case.transfer(far, near, [3], [1], method="staged")
    assert copied_bytes == [2 * far.pool.page_bytes, far.pool.page_bytes]
    ratio = formats.bytes_per_element(packed) / 2
    assert far.pool.page_bytes == ratio * near.pool.page_bytes
    assert 1 / 4 < ratio < 2 / 7
