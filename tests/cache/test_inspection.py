"""`python -m kvcupy inspect`: what a file holds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cache import disk_cases
from tiered_cases import in_time

import kvcupy as kv
from kvcupy.__main__ import main
from kvcupy.cache.inspection import inspect
from kvcupy.cache.tiered import disk_format
from kvcupy.cache.tiered.disk_format import RECORD_BYTES, Layout

LAYOUT = Layout(6, disk_cases.PAGE_BYTES)


@pytest.fixture
def blocks(tmp_path):
    path = tmp_path / "blocks.kv"
    disk_cases.filled(path, {0: 11, 3: 12, 5: 11})
    return path


def change(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_disk_tier(blocks):
    found = inspect(blocks, verify=True)
    assert found == {
        "kind": "disk tier", **disk_cases.IDENTITY, "file_version": 2,
        "file_bytes": blocks.stat().st_size,
        "page_bytes": disk_cases.PAGE_BYTES, "slots": 6, "blocks": 3, "hashes": 2,
        "torn_records": 0, "damaged": 0,
    }  # fmt: skip
    assert inspect(blocks)["damaged"] is None


def test_blocks_of_the_previous_version(tmp_path):
    path = tmp_path / "blocks.kv"
    disk_cases.filled_by_previous(path, {0: 11, 3: 12})
    found = inspect(path, verify=True)
    assert (found["file_version"], found["blocks"], found["damaged"]) == (1, 2, 0)
    change(path, LAYOUT.payload_at(3) + 4999)
    assert inspect(path, verify=True)["damaged"] == 1


def test_a_file_in_use(blocks):
    before = blocks.read_bytes()
    with disk_cases.open_tier(blocks):
        assert inspect(blocks, verify=True)["blocks"] == 3
    assert blocks.read_bytes() == before


def test_what_is_damaged(blocks, capsys):
    change(blocks, LAYOUT.payload_at(3) + 4999)
    assert main(["inspect", str(blocks)]) == 0
    assert "not verified (--verify)" in capsys.readouterr().out
    assert main(["inspect", str(blocks), "--verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["damaged"], found["torn_records"]) == (3, 1, 0)
    change(blocks, LAYOUT.record_at(5))
    assert main(["inspect", str(blocks), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["hashes"], found["torn_records"]) == (2, 2, 1)


def test_a_file_that_is_cut_off(blocks):
    data = blocks.read_bytes()
    blocks.write_bytes(data[: LAYOUT.record_at(3) + RECORD_BYTES // 2])
    found = inspect(blocks, verify=True)
    assert (found["blocks"], found["torn_records"], found["damaged"]) == (1, 3, 1)


def test_saved_sequence(tmp_path, capsys):
    pytest.importorskip("safetensors")
    path = tmp_path / "sequence.safetensors"
    cache = kv.PagedKVCache(
        num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, num_pages=8, dtype="fp8_e4m3",
        device="host",
    )  # fmt: skip
    cache.add_sequence("a")
    cache.enable_sliding_window("a", 10, 2)
    with cache.forward(["a"], [5]):
        for layer in range(2):
            cache.attention(layer, *(np.ones((5, heads, 8), np.float32) for heads in (4, 2, 2)))
    cache.save_sequence("a", path)
    assert main(["inspect", str(path)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("dtype fp8_e4m3", "length 5", "window 10", "sink tokens 2", "rope mode none"):
        assert line in shown
    for tensor in ("k fp8_e4m3 (2, 5, 2, 8)", "k_scale fp32 (2, 5, 2)"):
        assert any(line.endswith(tensor) for line in shown)


@pytest.mark.parametrize("content", [b"", b"kvcupy", b"\0" * 5000])
def test_other_files(tmp_path, capsys, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["inspect", str(path)]) == 1
    assert capsys.readouterr().err.startswith("inspect: path: expected")
    assert main(["inspect", str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err


def crafted(path, identity, page_bytes=4096, num_slots=1):
    """Make a file with any header, whose digest fits."""
    fields = disk_format._HEADER.pack(
        b"kvcupydt", disk_format.VERSION, len(identity), page_bytes, num_slots
    )
    header = (fields + identity).ljust(4096 - 16, b"\0")
    path.write_bytes(header + disk_format._digest(header))


@pytest.mark.parametrize(
    "header",
    [(b"[" * 4000,), (b"[1]",), (b"5",), (b'{"a": 1}',), (b"\xff",), (b"{}", 0), (b"{}", 2**33),
     (b"{}", 4096, 0), (b"{}", 4096, 2**60)],
)  # fmt: skip
def test_crafted_headers(tmp_path, capsys, header):
    path = tmp_path / "file"
    crafted(path, *header)
    assert main(["inspect", str(path)]) == 1
    assert capsys.readouterr().err.startswith("inspect: disk: expected a header of kvcupy")
    with pytest.raises(ValueError, match=r"^disk: expected"):
        disk_cases.open_tier(path)


def test_a_header_can_claim_any_number_of_records():
    """A small file of 4 EiB, with one record at the end of its table; disks have smaller files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        check_many_records(Path(folder, "file"), 2**48)


def check_many_records(path, num_slots):
    crafted(path, b"{}", 4096, num_slots)
    with path.open("r+b") as file:
        file.truncate(2**62)
        file.seek(Layout(num_slots, 4096).record_at(num_slots - 1))
        file.write(b"x" * RECORD_BYTES)
    assert path.stat().st_blocks * 512 < 2**20
    found = in_time(lambda: inspect(path))
    assert (found["slots"], found["blocks"], found["torn_records"]) == (num_slots, 0, 1)
    assert in_time(lambda: main(["store", "list", str(path)])) == 0


def test_damaged_header(blocks, capsys):
    change(blocks, 100)
    assert main(["inspect", str(blocks)]) == 1
    assert "damaged" in capsys.readouterr().err


def test_an_encrypted_file(tmp_path, capsys):
    path = tmp_path / "blocks.kv"
    disk_cases.filled(path, {0: 11, 3: 12}, encryption_key=bytes(32))
    found = inspect(path, verify=True)
    assert (found["blocks"], found["hashes"], found["damaged"]) == (2, None, None)
    assert found["encryption"].startswith("AES-256-GCM, key ")
    assert main(["inspect", str(path), "--verify"]) == 0
    assert "encrypted" in capsys.readouterr().out
