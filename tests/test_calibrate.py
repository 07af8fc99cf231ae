"""Calibrations: what is measured, how it is stored, and that `method="auto"` applies it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.__main__ import main
from kvcupy.commands import calibrate
from kvcupy.ops import transfer
from kvcupy.ops.transfer import NEVER, default_thresholds


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder for calibrations."""
    monkeypatch.setattr(calibrate.cache, "directory", lambda: tmp_path)
    transfer.forget_thresholds()
    yield tmp_path
    transfer.forget_thresholds()


def case(pieces: int, num_bytes: int, kernel: float, copy: float) -> dict[str, float]:
    return {"pieces": pieces, "bytes": num_bytes, "kernel": kernel, "copy": copy}


def test_the_crossover_is_where_copies_begin_to_win():
    times = [case(16, 512, 1, 9), case(16, 4096, 3, 4), case(16, 65536, 30, 20)]
    times += [case(64, 512, 1, 9), case(64, 4096, 5, 4), case(64, 65536, 90, 20)]
    assert calibrate.crossovers(times) == [(16, 65536), (64, 4096)]


def test_a_quick_calibration_is_kept_and_read(device, folder, capsys):
    assert main(["calibrate", "--quick", "--device", device.name]) == 0
    out = capsys.readouterr().out
    assert device.model in out and "to_host" in out
    (file,) = folder.glob("calibration-*.json")
    kept = json.loads(file.read_text())
    assert kept["device"] == device.model
    for direction in ("to_device", "to_host"):
        own = transfer.thresholds(device, direction)
        assert own.copy_from_bytes == tuple(map(tuple, kept[direction]["copy_from_bytes"]))
        assert own.staged is kept[direction]["staged"]
        assert own.blocks == kept[direction]["blocks"] >= 1
        assert kept["measured"][direction]
    assert transfer.thresholds(device, "within") == default_thresholds(device, "within")


def chosen(device, pages, *, host_layout="layer_first") -> str:
    """The method that "auto" chooses for pages of 1 KiB rows, from the device to the host."""
    near = kv.KVPool(64, 1, 4, 2, 256, device=device)
    far = kv.KVPool(64, 1, 4, 2, 256, layout=host_layout, placement="pinned", device=device)
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, label in (
            (transfer.StagedTransfer, "bind", "staged"),
            (transfer.LayerTransfer, "copy", "copy"),
            (transfer.LayerTransfer, "launches", "kernel"),
        ):
            whole = getattr(owner, name)

            def spy(*arguments, whole=whole, label=label, **options):
                taken.append(label)
                return whole(*arguments, **options)

            patch.setattr(owner, name, spy)
        kv.transfer_pages(near, far, pages, pages)
    return taken[0]


SCATTERED = np.arange(0, 64, 2)


@pytest.mark.parametrize(
    ("copy_from_bytes", "staged", "layout", "method"),
    [
        ([[1, NEVER]], False, "layer_first", "kernel"),
        ([[1, 1024]], False, "layer_first", "copy"),
        ([[1, 1025]], False, "layer_first", "kernel"),
        ([[1, 1025]], True, "layer_first", "kernel"),  # staging makes no piece longer
        ([[1, 4096]], True, "page_first", "staged"),
        ([[1, 4096]], False, "page_first", "kernel"),
        ([[1, 4097]], True, "page_first", "kernel"),
        ([[1, 0], [257, NEVER]], False, "layer_first", "copy"),  # 256 pieces
        ([[1, 0], [256, NEVER]], False, "layer_first", "kernel"),
    ],
)
def test_auto_goes_by_the_calibration(device, monkeypatch, copy_from_bytes, staged, layout, method):
    kept = {"copy_from_bytes": copy_from_bytes, "staged": staged, "blocks": 2}
    calibrate.save(device.model, {"to_host": kept})
    assert chosen(device, SCATTERED, host_layout=layout) == method


@pytest.mark.parametrize(
    "text",
    ["", "no json", "[]", '{"to_host": 3}', '{"to_host": {"copy_from_bytes": []}}',
     '{"to_host": {"copy_from_bytes": [["x"]], "staged": true, "blocks": 1}}'],
)  # fmt: skip
def test_a_file_that_makes_no_sense_counts_as_none(device, text):
    transfer.calibration_file(device.model).write_text(text)
    assert transfer.thresholds(device, "to_host") == default_thresholds(device, "to_host")
