"""Attention as users run it on a processor: blocks of keys in vector registers."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import attention_checks
import numpy as np
import pytest
from attention_cases import AttentionCase, rotated
from helpers import KernelSources, from_values, full_only
from mutation_cases import NOTICED

import kvcupy as kv
from kvcupy import devices, reference
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call

pytestmark = pytest.mark.usefixtures("lenient_host")

CPUINFO = Path("/proc/cpuinfo")
# Without the wider vectors of newer processors.
OLDER = {
    "avx2": ("-mno-avx512f",), "avx": ("-mno-avx2", "-mno-fma", "-mno-f16c"), "sse": ("-mno-avx",),
}  # fmt: skip


@pytest.fixture
def host(monkeypatch):
    device = HostDevice()
    assert device.warp_lanes == 1
    monkeypatch.setitem(devices._devices, "host", device)
    monkeypatch.setattr(kv.config, "_fallback", "error")
    monkeypatch.setattr(call, "_plans", {})
    return device


# Values -------------------------------------------------------------------------------------------


def check_few_rows(device, fmt="fp32"):
    """K and V are read where they lie, with a tail of keys; a block without its first page."""
    case = AttentionCase(device, 70)
    args = case.arguments([77, 0, 1, 200], fmt=fmt, heads=(6, 2), widths=(64, 96), page_size=16)
    table = args["block_table"].view.copy()
    table[3, 4] = -1
    case.attend(args | {"block_table": case.table(table)})
    return case


def check_many_rows(device, fmt="fp32"):
    """Tiles that are taken together, and some that are not whole; windows that few rows see."""
    case = AttentionCase(device, 71)
    args = case.arguments(
        [150, 90, 41, 3], [70, 33, 41, 0], fmt=fmt, heads=(6, 2), widths=(80, 64), page_size=16
    )
    case.attend(args)
    case.attend(args, window=19, sink_tokens=5)
    return case


def check_no_keys_of_a_tile(device):
    """The rows of a first tile see no key, those of the next do."""
    case = AttentionCase(device, 72)
    args = case.arguments([41, 30], [33, 20], heads=(2, 1), key_starts=[20, 30])
    case.attend(args)
    return case


def check_values_that_are_no_numbers(device, query_lens=(3, 4), fmt="fp32"):
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
    return case


def check_scores_that_are_no_numbers(device):
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
    return case


def check_four_bits(device, fmt="nvfp4", how="NHD"):
    """Scales of K and V beside those of groups, which lie behind the rows or by themselves; a block
    without its first page."""
    case = AttentionCase(device, 75)
    args = case.arguments(
        [77, 0, 1, 45], [3, 0, 1, 9], fmt="bf16", cache_fmt=fmt, heads=(6, 2), widths=(128, 256),
        page_size=16, how=how, scales=("per head", "float"),
    )  # fmt: skip
    table = args["block_table"].view.copy()
    table[3, 2] = -1
    case.attend(args | {"block_table": case.table(table)})
    return case


def check_rotated_four_bits(device, fmt="int4", *, interleaved=False):
    """Keys that are rotated when they are read."""
    case = AttentionCase(device, 76)
    args = case.arguments(
        [41, 0, 33], [2, 0, 1], fmt="fp16", cache_fmt=fmt, heads=(4, 2), widths=(128, 128)
    )
    case.attend(args | case.rope(64, start=32, interleaved=interleaved))
    return case


def check_stored_rotated(device):
    """Keys and values that are stored rotated, and values alone."""
    case = AttentionCase(device, 77)
    for new in ([2, 0, 1], [33, 0, 2]):
        args = case.arguments(
            [41, 0, 33], new, fmt="fp16", cache_fmt="nvfp4", heads=(4, 2), widths=(128, 96)
        )
        case.attend(rotated(args))
        case.attend(rotated(args, "v_cache"))
    return case


CHECKS = (
    check_few_rows, check_many_rows, check_no_keys_of_a_tile, check_values_that_are_no_numbers,
    check_scores_that_are_no_numbers, check_stored_rotated,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_values(host, check):
    check(host)


@pytest.mark.parametrize(
    ("check", "fmt"),
    [
        (check_few_rows, "bf16"), full_only(check_few_rows, "fp16"),
        (check_many_rows, "fp16"), full_only(check_many_rows, "bf16"),
    ],
)  # fmt: skip
def test_values_of_16_bits(host, check, fmt):
    check(host, fmt)


@pytest.mark.parametrize(
    ("fmt", "how"),
    [("nvfp4", "NHD"), full_only("mxfp4", "HND"), full_only("int4_g128", "NHD")],
)
def test_values_of_four_bits(host, fmt, how):
    check_four_bits(host, fmt, how)


@pytest.mark.parametrize(
    ("fmt", "interleaved"), [("int4", False), full_only("nvfp4", True), full_only("mxfp4", False)]
)
def test_rotated_keys_of_four_bits(host, fmt, interleaved):
    check_rotated_four_bits(host, fmt, interleaved=interleaved)


def test_a_value_that_is_no_number_among_many_rows(host):
    check_values_that_are_no_numbers(host, (40, 33), "bf16")


def test_weights_are_powers_to_within_an_ulp(host):
    """Of two keys, the second weighs 2**-x beside the first, for x from 0 to past the smallest."""
    x = np.concatenate([np.linspace(0, 127, 2000), np.linspace(127, 400, 40), [1e30, np.inf]])
    x = x.astype(np.float32)
    keys = np.zeros((len(x), 2, 1, 16), np.float32)
    keys[:, 1, 0, 0] = -x
    values = np.zeros_like(keys)
    values[:, 1] = 1
    query = np.zeros((len(x), 1, 16), np.float32)
    query[..., 0] = 1
    table = np.arange(len(x), dtype=np.int32)[:, None]
    lengths = np.full(len(x), 2, np.int32)
    # The score is multiplied with log2(e) rounded, which the scale undoes up to a rounding.
    scale = float(1 / np.log2(np.e))
    out = kv.paged_attention(query, keys, values, table, lengths, sm_scale=scale)[:, 0, 0]
    factor = np.float64(np.float32(scale * np.log2(np.e)))
    weight = np.exp2(-(x.astype(np.float64) * factor))
    want = weight / (1 + weight)
    normal = x < 126
    error = np.abs(out - want)[normal] / want[normal]
    assert error.max() < 2.0**-24 * (3 + x[normal].max())
    assert error[x[normal] < 4].max() < 6 * 2.0**-24
    assert out[x > 127].max() == 0


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86-64")
@pytest.mark.parametrize(
    ("check", "processor"),
    [
        (check_few_rows, "avx2"), full_only(check_few_rows, "avx"),
        full_only(check_few_rows, "sse"), full_only(check_many_rows, "avx2"),
        full_only(check_many_rows, "avx"), (check_many_rows, "sse"),
    ],
)  # fmt: skip
def test_older_processors(host, check, processor):
    if "avx2" not in CPUINFO.read_text().split():
        pytest.skip("this processor has none of what the flags leave out")
    host.extra_flags = OLDER[processor]
    check(host, "bf16")


WIDE_ROWS = """
import threading
import numpy as np
import kvcupy as kv

def attend():
    cache = np.ones((64, 16, 1, 768), np.float32)
    query = np.ones((512, 4, 768), np.float32)
    table = np.arange(64, dtype=np.int32)[None]
    lengths = np.array([1024], np.int32), np.array([512], np.int32)
    for _ in range(3):
        out = kv.paged_attention(query, cache, cache, table, lengths[0], query_lens=lengths[1])
    np.testing.assert_allclose(out, 1, rtol=1e-6)

kv.device("host").num_workers = 4
threading.stack_size(64 << 20)
thread = threading.Thread(target=attend)
thread.start()
thread.join()
print("attended")
"""


@pytest.mark.parametrize("program", [full_only(WIDE_ROWS)], ids=["wide rows"])
def test_threads_that_help_have_room_for_a_tile(program):
    """Whatever the system gives a thread by default."""
    command = 'ulimit -s 256; exec "$0" -c "$1"'
    result = subprocess.run(
        ["bash", "-c", command, sys.executable, program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout == "attended\n", (result.returncode, result.stderr)


# Broken in one place ------------------------------------------------------------------------------

FILE = "host/attention.h"
MUTATIONS = {
    "the last keys of a block forgotten": (
        "n < kKeys; n += kProductKeys", "n < kKeys - 4; n += kProductKeys", check_few_rows),
    "the scale of a key forgotten": (
        "* load_vector(block.k_scales + n) * p.score_scale", "* p.score_scale",
        attention_checks.check_attention_decode_int8),
    "values not rescaled": (
        "store_vector(values[r] + i, load_vector(values[r] + i) * rescale);", "", check_many_rows),
    "sums not rescaled": ("sums[r] *= rescale;", "", check_many_rows),
    "values that are no numbers weigh nothing and are added": (
        "finite = is_finite<T>(block, width);", "finite = true;",
        check_values_that_are_no_numbers),
    "rows without keys keep their range": (
        "t.num_visible == t.sinks", "false", check_no_keys_of_a_tile),
    "keys past the end of the first tile of those together": (
        "t.num_visible = max(t.num_visible, t.sinks + end - t.first_key);", "", check_many_rows),
    "keys after the query": (
        "block.keys[kKeys - 1] >= limits[r].end", "false", check_many_rows),
    "keys before the window": ("block.keys[0] < limits[r].start", "false", check_many_rows),
    "columns after whole products left out": (
        "for (; first < width; first += kLanes) {", "for (; false;) {", check_few_rows),
    "powers without their last term": (
        "power = multiply_add(power, rest, spread(1.3399931e-3f));",
        "power = power * rest;", None),
    "scales of four-bit rows twice": (
        "block.k_scales[n] = block.v_scales[n] = 1.0f;",
        "block.k_scales[n] = block.v_scales[n] = static_scale(p.v_scale, p.v, kv_head);",
        check_four_bits),
    "queries not rotated": ("rotate(query[r], p.k.group_scales);", "", check_stored_rotated),
    "values as they are stored": (
        "rotate(values[r], p.v.group_scales);", "", check_stored_rotated),
    "the first block of a row alone": (
        "first < rotation.rotated_width", "first < block", check_stored_rotated),
    "the page of the first key for all": (
        "if (entry_of(p, place) != entry) {", "if (entry < 0) {", check_few_rows),
}  # fmt: skip
TELLING = (
    "values not rescaled", "values that are no numbers weigh nothing and are added",
    "rows without keys keep their range", "keys after the query", "queries not rotated",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in TELLING else full_only(name) for name in MUTATIONS]
)
def test_a_broken_kernel_is_noticed(kernel_sources: KernelSources, name):
    old, new, check = MUTATIONS[name]
    kernel_sources.replace(FILE, old, new)
    device = kernel_sources.device("-O0")
    device.warp_lanes = 1
    with pytest.raises(NOTICED):
        (check or test_weights_are_powers_to_within_an_ulp)(device)
