"""Warm calls stay short: how many Python frames they take, as `scripts/bench.py frames` counts."""

from __future__ import annotations

from itertools import pairwise

import pytest

# Of kvcupy's own functions, on the host device. Lower a bound when a change takes fewer.
STORE_KV = 10
FIRST_LAYER = 132
LOAD = 149

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host", "only_numpy")


@pytest.fixture(autouse=True)
def only_on_the_host(device):
    if device.kind != "host":
        pytest.skip("the bounds are those of the host device")


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("store_kv", STORE_KV),
        ("PagedKVCache.attention, first layer of a step", FIRST_LAYER),
        ("TransferEngine.load, 2 pages of 4 layers", LOAD),
    ],
)
def test_a_warm_call_takes_few_frames(device, call, most):
    from benchmarks.frames import count, own

    called = own(count(device, call))
    assert 0 < len(called) <= most, "\n".join(called)


def test_torch_tensors_take_as_few_frames(device):
    """At other addresses too."""
    torch = pytest.importorskip("torch")
    from benchmarks.frames import frames_of, own

    import kvcupy as kv

    caches = [torch.zeros(8, 2, 4) for _ in "kv"]
    rows = [torch.ones(1, 2, 4) for _ in range(6)]
    for key, value in pairwise(rows):
        slots = torch.tensor([1])
        called = own(frames_of(lambda: kv.store_kv(key, value, *caches, slots)))  # noqa: B023
    assert 0 < len(called) <= STORE_KV + 4, "\n".join(called)  # addresses, and versions
