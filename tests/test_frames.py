"""Warm calls stay short: how many Python frames they take, as `scripts/bench.py frames` counts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

# Of kvcupy's own functions, on the host device. Lower a bound when a change takes fewer.
STORE_KV = 10
FIRST_LAYER = 132
LOAD = 149
COUNTED = 12  # more, while metrics are enabled

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


def test_metrics_take_few_frames_and_none_when_disabled(device):
    from benchmarks.frames import count, own

    from kvcupy import metrics

    metrics.enable()
    try:
        counted = own(count(device, "store_kv"))
    finally:
        metrics.disable()
    assert 0 < len(counted) <= STORE_KV + COUNTED, "\n".join(counted)
    assert not [name for name in counted if "_describe" in name or "accessed" in name]
    called = own(count(device, "store_kv"))
    assert len(called) <= STORE_KV and not [name for name in called if "metrics" in name]


def test_frames_are_those_of_the_call():
    from benchmarks.frames import frames_of, own

    import kvcupy as kv

    assert own(frames_of(lambda: None)) == []
    assert own(frames_of(lambda: kv.device("host")))


def test_the_script_reports_them(device, tmp_path, capsys):
    import bench

    path = tmp_path / "frames.json"
    assert bench.main(["frames", "--names", "--device", device.name, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "frames" and len(report["rows"]) == 3
    for row in report["rows"]:
        assert sum(row["names"].values()) == row["frames"] <= row["all_frames"]
    assert "frames of kvcupy" in capsys.readouterr().out


# Ratios of least times within one run, which another machine, or a loaded one, hardly changes.
RATIOS = [
    ("fresh", "same", 1.8), ("same", "torch", 1.8), ("python_operator", "python_same", 4.0),
]  # fmt: skip


def test_what_calls_cost_in_proportion(device):
    """To one another, and to torch's own two assignments."""
    pytest.importorskip("torch")
    from benchmarks.calls import Cases, measure
    from benchmarks.operations.baselines import TorchArrays

    torch = TorchArrays(device)
    make = Cases(device, torch).store_kv
    rows = [measure(device, torch.torch, "store_kv", make, 60) for _ in range(3)]
    least = {kind: min(row[f"least_{kind}_us"] for row in rows)
             for pair in RATIOS for kind in pair[:2]}  # fmt: skip
    ratios = {(kind, base): least[kind] / least[base] for kind, base, _ in RATIOS}
    assert [(pair, ratio) for (*pair, most), ratio in zip(RATIOS, ratios.values(), strict=True)
            if ratio > most] == [], ratios  # fmt: skip
