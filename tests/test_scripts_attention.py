"""scripts/bench.py attention: what it reports, what it notices."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("scripts_on_path")


def bench(device_name, *arguments):
    import bench

    small = ["--quick", "--rounds", "1", "--device", device_name]
    return bench.main(["attention", *small, *map(str, arguments)])


@pytest.mark.usefixtures("lenient_host")
def test_it_reports_every_case(device_name, tmp_path, capsys):
    assert bench(device_name, "--json", tmp_path / "result.json") == 0
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["device"] == kv.device(device_name).name and report["copy_gb_per_s"] > 0
    cases = report["rows"]
    for form in ("bf16", "fp32", "fp8_e4m3"):
        assert any(c["case"].startswith("decode") and c["case"].endswith(form) for c in cases)
    assert sum(c["case"].startswith("prefill") for c in cases) == 2
    for case in cases:
        assert case["us"]["kvcupy"] > 0 and case["gb_per_s"] > 0 and case["tflops"] > 0
        assert ("torch" in case["us"]) == (case["vs_torch"] is not None)
    assert "% of copy" in capsys.readouterr().out


def test_it_notices_a_wrong_result(device, device_name, monkeypatch):
    if device.name != "host":
        pytest.skip("the wrong result is put there by the host")
    from kvcupy.bench.checks import WrongBytes

    attend = kv.paged_attention

    def wrong(*arguments, out, **options):
        attend(*arguments, out=out, **options)
        out[...] = (np.asarray(out, np.float32) + 0.1).astype(out.dtype)

    monkeypatch.setattr(kv, "paged_attention", wrong)
    with pytest.raises(WrongBytes, match="is off by"):
        bench(device_name)


@pytest.mark.usefixtures("lenient_host")
def test_caches_of_more_values_than_are_drawn(device_name, monkeypatch):
    """The values repeat, and the results are right all the same."""
    from kvcupy.bench import attention

    monkeypatch.setattr(attention, "BANK", 10_007)
    assert bench(device_name) == 0
