"""Attention as users run it on a processor: blocks of keys in vector registers."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import full_only
from kernel_checks import check_attention, check_no_number_in_k, check_no_number_in_v

import kvcupy as kv
from kvcupy import devices
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


CHECKS = [
    ("few rows", {}),
    ("few rows", {"fmt": "bf16"}),
    full_only("few rows", {"fmt": "fp16"}),
    ("many rows", {}),
    ("many rows", {"fmt": "fp16"}),
    full_only("many rows", {"fmt": "bf16"}),
    ("heads that are taken together", {}),
    ("few rows beside many", {}),
    ("no keys of a tile", {}),
    ("stored rotated", {}),
    ("four bits", {}),
    full_only("four bits", {"cache_fmt": "mxfp4", "how": "HND"}),
    full_only("four bits", {"cache_fmt": "int4"}),
    ("rotated four bits", {}),
    full_only("rotated four bits", {"cache_fmt": "nvfp4", "interleaved": True}),
    full_only("rotated four bits", {"cache_fmt": "mxfp4"}),
]


@pytest.mark.parametrize(("check", "changes"), CHECKS)
def test_values(host, check, changes):
    check_attention(host, check, **changes)


def test_keys_that_are_no_numbers(host):
    check_no_number_in_k(host)


@pytest.mark.parametrize(("query_lens", "fmt"), [((3, 4), "fp32"), ((40, 33), "bf16")])
def test_values_that_are_no_numbers(host, query_lens, fmt):
    check_no_number_in_v(host, query_lens, fmt)


@pytest.mark.parametrize("invariant", [False, True])
def test_bits_do_not_depend_on_cores(host, monkeypatch, invariant):
    """Neither how keys are cut nor who takes the pieces does."""
    rng = np.random.default_rng(3)
    query = rng.standard_normal((2, 8, 64), np.float32)
    k, v = (rng.standard_normal((200, 16, 4, 64), np.float32) for _ in "kv")
    table = rng.permutation(200).astype(np.int32).reshape(2, 100)
    lengths = np.array([1600, 900], np.int32)
    outs = []
    for cores in (1, 3, 64):
        monkeypatch.setattr(call, "_plans", {})
        host.num_workers = host.sm_count = cores
        out = kv.paged_attention(query, k, v, table, lengths, batch_invariant=invariant)
        outs.append(out.tobytes())
    assert outs[0] == outs[1] == outs[2]


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
        ("few rows", "avx2"), full_only("few rows", "avx"),
        full_only("few rows", "sse"), full_only("many rows", "avx2"),
        full_only("many rows", "avx"), ("many rows", "sse"),
    ],
)  # fmt: skip
def test_older_processors(host, check, processor):
    if "avx2" not in CPUINFO.read_text().split():
        pytest.skip("this processor has none of what the flags leave out")
    host.extra_flags = OLDER[processor]
    check_attention(host, check, fmt="bf16")


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
