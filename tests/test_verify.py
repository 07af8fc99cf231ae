"""Whether kernels are right on the machine at hand: `kv.verify`, and before a first use."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import __main__ as command_line
from kvcupy.testing import cases, verification

# kv.verify -----------------------------------------------------------------------------------

FAMILIES = ("store", "rope", "attention", "merge", "transfer", "pages", "indexing")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_of_a_family_are_right(device, family):
    report = kv.verify(device, families=[family])
    assert report.ok, str(report)
    assert str(report).startswith(f"verified on {device.name}: ")
    modules = {getattr(kv, outcome.operation).__module__ for outcome in report.outcomes}
    assert modules == {f"kvcupy.ops.{family}"}


def test_a_family_that_is_none():
    with pytest.raises(ValueError, match=r"families: expected some of store, .*, got 'frob'"):
        kv.verify("host", families=["pages", "frob"])


def test_what_was_recorded_before_is_raised(device):
    """Not taken for a fault of the kernels, nor cleared without a word."""
    kv.copy_pages(device.zeros((2, 4), "fp32"), *(device.asarray(n) for n in np.array([[0], [2]])))
    with pytest.raises(kv.IndexFault, match="dst_pages"):
        kv.verify(device, families=["pages"])


@pytest.mark.parametrize("broken", [False, True])
def test_the_first_line_says_whether_all_are_right(broken, kernel_sources, tmp_path, capsys,
                                                   monkeypatch):  # fmt: skip
    if broken:
        kernel_sources.replace("pages.cu", "* p.row_bytes_2", "* 0")
    kernel_sources.device("-O0")
    monkeypatch.setattr(verification, "_FAMILIES", {"copy_pages": "pages"})
    monkeypatch.setattr(verification, "cases", lambda: cases(["copy_pages"]))
    monkeypatch.setattr(verification, "_further_cases", lambda arch: [])
    file = tmp_path / "new" / "verify.json"

    status = command_line.main(["verify", "--device", "host", "--json", str(file)])

    first, *others = capsys.readouterr().out.splitlines()
    report = json.loads(file.read_text())
    assert (status, report["ok"]) == (int(broken), not broken)
    assert first.startswith("NOT verified on host: " if broken else "verified on host: ")
    assert bool(others) == broken
    failed = {o["case"] for o in report["outcomes"] if o["verdict"] != "conforms"}
    assert failed == ({"views"} if broken else set())


def test_a_device_that_is_none(capsys):
    assert command_line.main(["verify", "--device", "frob"]) == 2
    assert "device" in capsys.readouterr().err
