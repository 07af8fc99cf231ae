"""The script that measures what a call costs, and the help of all scripts."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BENCHMARKS = ("calls", "frames", "memory", "models", "order", "scale", "transfer")
RUN = [file.name for file in sorted(SCRIPTS.glob("*.py")) if "ArgumentParser" in file.read_text()]


@pytest.mark.parametrize("name", RUN)
def test_every_script_has_a_help(name, monkeypatch, capsys):
    """In this process: to start 13 of them takes as long as hundreds of tests."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / name), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    said = capsys.readouterr()
    assert (end.value.code, said.err) == (0, "")
    assert said.out.startswith(f"usage: {name.removesuffix('.py')}")


WITH_DEVICE = [
    (name.removesuffix(".py"), ()) for name in RUN if '"--device"' in (SCRIPTS / name).read_text()
]
WITH_DEVICE += [("bench", (name,)) for name in BENCHMARKS]
WITH_DEVICE += [("overlap_demo", (name,)) for name in ("steps", "offload")]
WITH_DEVICE += [("stress", (name,)) for name in ("soak", "replay")]
WITH_DEVICE += [(name, ()) for name in ("disaggregated_demo",)]


@pytest.mark.parametrize(("module", "benchmark"), WITH_DEVICE)
@pytest.mark.parametrize("device", ["frob", "cuda:63"])
def test_a_wrong_device_is_one_line(capsys, module, benchmark, device):
    try:
        status = importlib.import_module(module).main([*benchmark, "--device", device])
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith((f"{module}: ", "--device: ")) and device in line


def test_calls_are_measured(device_name, lenient_host, tmp_path, capsys, with_torch):
    import bench

    report = tmp_path / "new" / "calls.json"
    few = ["--device", device_name, "--quick", "--only", "store_kv", "layer"]
    assert bench.main(["calls", *few, "--json", str(report)]) == 0
    read = json.loads(report.read_text())
    operations = [row["operation"] for row in read["rows"]]
    assert operations == ["store_kv", "layer"] * (1 + with_torch)
    for row in read["rows"]:
        kinds = ["same", "fresh", "shape"]
        kinds += ["operator"] * (row["arrays"] == "torch")
        if row["operation"] == "layer":
            kinds = ["fresh"]
        if device_name == "host":
            kinds += [f"python_{kind}" for kind in kinds if kind != "shape"]
        if row["arrays"] == "torch" and row["operation"] == "store_kv":
            kinds.append("torch")
        for kind in kinds:
            assert 0 < row[f"least_{kind}_us"] <= row[f"median_{kind}_us"], kind
    for key in ("device", "processor", "versions", "date", "commit"):
        assert key in read
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:6] == ["operation", "arrays", "same", "us", "fresh", "us"]
