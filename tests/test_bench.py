"""`scripts/bench.py models`: what it reports, what it checks, and what it says of baselines."""

from __future__ import annotations

import json

import bench as bench_script
import numpy as np
import pytest
from benchmarks.operations import command, measure
from benchmarks.operations.cases import Shape
from common.models import MODELS, Model

import kvcupy as kv

TINY = Model("tiny", 64, 2, 8, 2, 64, window=24)
TINY_MLA = Model("tiny-mla", 64, 2, 4, 0, 48, latent=32, rope=16)
SIZES = ("--tokens", "4", "--batch", "2", "--context", "40")


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    for model in (TINY, TINY_MLA):
        monkeypatch.setitem(MODELS, model.name, model)
    monkeypatch.setattr(measure, "SECONDS", 0.0)  # three rounds


def bench(device_name, *arguments):
    small = ("--device", device_name, "--quick", "--rotate-mb", "1")
    return bench_script.main(["models", *small, *map(str, arguments)])


def measured(device_name, tmp_path, *arguments):
    """Return the report of a run that succeeds."""
    file = tmp_path / "report.json"
    assert bench(device_name, "--json", file, *arguments) == 0
    return json.loads(file.read_text())


@pytest.mark.covering
@pytest.mark.parametrize(
    ("model", "absent"),
    [
        ("tiny", {"store_mla", "rope_store_mla"}),
        ("tiny-mla", {"store_kv", "rope_store_kv", "gather_kv", "shift_pages"}),
    ],
)
def test_every_operation_of_a_model(device_name, tmp_path, capsys, with_torch, model, absent):
    report = measured(device_name, tmp_path, "--model", model, *SIZES)
    assert {row["operation"] for row in report["rows"]} == set(command.OPERATIONS) - absent
    assert len({row["case"] for row in report["rows"]}) == len(report["rows"])
    for row in report["rows"]:
        assert row["model"] in (model, "any") and row["sets"] >= 1
        own = row["us"]["kvcupy"]
        assert own >= row["least_us"]["kvcupy"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / own / 1e3)
        assert not any("wrong" in why for why in row["not_measured"].values())
        if row["mode"] == "eager" and row["format"] != "fp8_e4m3":
            assert ("torch" in row["ratios"]) == with_torch, row["not_measured"]
    printed = capsys.readouterr().out
    assert all(row["case"] in printed for row in report["rows"])


def test_bytes_and_products_by_hand():
    full = Shape("paged_attention", TINY, 3, context=40)
    # K and V of 40 tokens, 2 heads of 64; a query and an output of 8 heads; 2 bytes each.
    assert full.bytes_moved == 3 * 2 * 2 * (40 * 2 * 64 + 8 * 64)
    assert full.flops == 3 * 40 * 8 * 64 * 2 * 2
    window = Shape("paged_attention", TINY, 1, context=40, new=4, window=8)
    assert window.bytes_moved == 2 * 2 * (11 * 2 * 64 + 4 * 8 * 64)
    assert window.flops == 4 * 8 * 8 * 64 * 2 * 2
    assert Shape("store_kv", TINY, 4, "fp8 static").bytes_moved == 4 * (256 * 3 + 8)


# Checks ------------------------------------------------------------------------------------------


def test_a_wrong_result_of_kvcupy_ends_it(device, monkeypatch, capsys):
    if device.name != "host":
        pytest.skip("the wrong result is put there by the host")
    attend = kv.paged_attention

    def wrong(*arguments, out, **options):
        attend(*arguments, out=out, **options)
        out[...] = (np.asarray(out, np.float32) + 0.1).astype(out.dtype)

    monkeypatch.setattr(kv, "paged_attention", wrong)
    assert bench("host", "--op", "paged_attention", "--model", "tiny", *SIZES) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: wrong result: paged_attention tiny bf16 decode")
    assert "is off by" in line
