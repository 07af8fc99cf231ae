"""Files of saved sequences: bit for bit, whole or not at all, and refused where they do not fit."""

from __future__ import annotations

import builtins
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import DTYPE, FORMATS, all_patterns
from paged_cases import BINARY, SMALL, Twin, rope_of, snapshot

import kvcupy as kv

pytest.importorskip("safetensors", minversion="0.8", reason="saved sequences need safetensors")

from kvcupy.cache.paged import files

TAGS = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16",
    "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "int8": "I8",
}  # fmt: skip


def bits_of(fmt, shape, seed=1):
    """Any bits, as an array of the format."""
    size = DTYPE[fmt].itemsize
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, count * size, dtype=np.uint8)
    return raw.view(DTYPE[fmt]).reshape(shape)


def every_pattern(fmt):
    """Every pattern of a format, or of fp32 the special ones: NaN of several payloads above all."""
    if fmt != "fp32":
        return all_patterns(fmt).view(DTYPE[fmt])
    return np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 1],
        np.uint32,
    ).view(np.float32)


def same(array, bits):
    """Whether a tensor that was read has these bits; it must be of that format and shape."""
    assert array.dtype == bits.dtype and array.shape == bits.shape
    return array.tobytes() == bits.tobytes()


def write_one(path, value=7):
    """Write a small file of one tensor whose elements are all `value`."""
    bits = np.full((2, 3), value, np.int8)
    files.write_file(path, {"k": bits}, {"num_layers": 2})
    return bits


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sequence.safetensors"


# --- Round trips ---


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_bit_comes_back(path, fmt):
    special, plain = every_pattern(fmt), bits_of(fmt, (3, 5, 2, 7))
    files.write_file(path, {"special": special, "plain": plain}, {})
    got, _ = files.read_file(path)
    assert got.keys() == {"special", "plain"}
    assert same(got["special"], special) and same(got["plain"], plain)


def test_strided_arrays(path):
    bits = bits_of("bf16", (6, 5, 4))
    views = {"t": bits.transpose(2, 0, 1), "s": bits[::2, 1:4], "r": bits[::-1]}
    files.write_file(path, views, {})
    got, _ = files.read_file(path)
    for name, v in views.items():
        assert same(got[name], v)


def test_other_loaders_read_it(path):
    """The package, whose tags say what torch makes of them."""
    import safetensors

    want = {fmt: every_pattern(fmt) for fmt in FORMATS}
    files.write_file(path, want, {"a": 1})
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert {fmt: read[fmt]["dtype"] for fmt in FORMATS} == TAGS
    for fmt, bits in want.items():
        assert list(read[fmt]["shape"]) == list(bits.shape)
        assert bytes(read[fmt]["data"]) == bits.tobytes()


def test_torch_reads_it(path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    kinds = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
    }  # fmt: skip
    want = {fmt: every_pattern(fmt) for fmt in FORMATS}
    files.write_file(path, want, {"a": 1})
    got = load_file(path)
    for fmt, bits in want.items():
        assert got[fmt].dtype == kinds[fmt]
        assert got[fmt].view(torch.uint8).numpy().tobytes() == bits.tobytes()


# --- Files that are none ---


def test_a_file_cut_short_anywhere(path):
    """Or longer by a byte."""
    write_one(path)
    whole = path.read_bytes()
    assert 100 < len(whole) < 400
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"^path: expected a safetensors file, got {path}: "):
            files.read_file(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=r"^path: expected a safetensors file"):
        files.read_file(path)
    path.write_bytes(whole)
    assert files.read_file(path)[0]["k"].dtype == np.int8


def raw(header, data=b""):
    """The bytes of a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="I8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


FOUR = b"\1\2\3\4"
CORRUPT = {
    "empty": b"",
    "text": b"this is a text, and no tensors are in it",
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}",
    "zeros": bytes(64),
    "header that is a list": raw([]),
    "header cut": raw(b'{"k": {"dtype"'),
    "header not UTF-8": raw(b'{"\xff": 1}'),
    "header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "tensor without a shape": raw({"k": {"dtype": "I8", "data_offsets": [0, 4]}}, FOUR),
    "shape larger than the data": raw({"k": entry(shape=(5,))}, FOUR),
    "shape whose size overflows": raw({"k": entry(shape=(2**63, 4))}, FOUR),
    "negative offset": raw({"k": entry(offsets=(-4, 0))}, FOUR),
    "offsets past the end": raw({"k": entry(offsets=(4, 8))}, FOUR),
    "two tensors in one place": raw({"k": entry(), "v": entry()}, FOUR),
    "a gap": raw({"k": entry(), "v": entry(offsets=(8, 12))}, FOUR * 3),
    "bytes that are of no tensor": raw({"k": entry()}, FOUR * 2),
    "metadata that is no text": raw({"__metadata__": {"a": 1}, "k": entry()}, FOUR),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_corrupt_files(path, kind):
    path.write_bytes(CORRUPT[kind])
    with pytest.raises(ValueError, match=rf"^path: expected a safetensors file, got {path}: "):
        files.read_file(path)


def test_the_files_above_are_corrupt_in_that_alone(path):
    path.write_bytes(raw({"__metadata__": {"a": "1"}, "k": entry()}, FOUR))
    tensors, metadata = files.read_file(path)
    assert metadata == {"a": "1"} and tensors["k"].tolist() == [1, 2, 3, 4]


# --- What a file says of itself ---

FIELDS = {
    "num_layers": 2, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 64, "dtype": "bf16",
    "rope_mode": "normal",
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_with_another_field_or_without_it(path, field):
    files.write_file(path, {}, {**FIELDS, field: "else"})
    metadata = files.read_file(path)[1]
    want = FIELDS[field]
    with pytest.raises(ValueError, match=rf"^path: .* with {field} {want}, got else$"):
        files.check_metadata(metadata, FIELDS)
    del metadata[field]
    with pytest.raises(ValueError, match=rf"^path: .* with {field} {want}, got none$"):
        files.check_metadata(metadata, FIELDS)


# --- Writing that fails ---


def left_alone(path, bits):
    """Whether the old file is there as it was, and nothing beside it."""
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    return np.array_equal(files.read_file(path)[0]["k"], bits)


def test_no_room(path):
    """A limit on the size of files stands in for a full disk; the error is of that kind."""
    bits = write_one(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            files.write_file(path, {"k": np.zeros(1 << 17, np.int8)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_alone(path, bits)


def test_nothing_but_files_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match=r"^path: expected the name of a file, got "):
            write_one(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


CRASH = """
import os, pathlib, sys
import numpy as np
from kvcupy.cache.paged import files
def crash(*_): os._exit(9)
setattr(*{"fsync": (os, "fsync", crash), "replace": (pathlib.Path, "replace", crash)}[sys.argv[2]])
files.write_file(sys.argv[1], {"k": np.zeros((2, 3), np.int8)}, {})
"""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_before_the_file_has_its_name(path, step):
    bits = write_one(path)
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(path), step],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 9
    assert np.array_equal(files.read_file(path)[0]["k"], bits)


def test_it_is_on_disk_before_it_has_its_name(path, monkeypatch):
    order, real_fsync, real_replace = [], os.fsync, Path.replace

    def fsync(descriptor):
        order.append(("fsync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        real_fsync(descriptor)

    def replace(source, target):
        order.append(("replace", source.stat().st_ino, source.stat().st_size))
        assert source.parent == Path(target).parent
        return real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_one(path)
    now = path.stat()
    assert order == [(step, now.st_ino, now.st_size) for step in ("fsync", "replace")]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_only_the_owner_can_read_a_file(path, umask):
    """Also one that replaces a file for all."""
    before = os.umask(umask)
    try:
        for _ in range(2):
            write_one(path)
            assert path.stat().st_mode & 0o777 == 0o600
            path.chmod(0o644)
    finally:
        os.umask(before)


# --- Without the package ---


@pytest.mark.parametrize("missing", ["safetensors", "TensorSpec"])
def test_the_package_is_missing_or_old(path, monkeypatch, missing):
    real = builtins.__import__

    def refuse(name, globals=None, locals=None, fromlist=(), level=0):
        if name == "safetensors" and (missing == name or missing in (fromlist or ())):
            raise ImportError(f"no {missing}")
        return real(name, globals, locals, fromlist, level)

    bits = write_one(path)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        for call in (lambda: write_one(path, 2), lambda: files.read_file(path)):
            with pytest.raises(ImportError, match=r"pip install 'safetensors>=0\.8'"):
                call()
    assert left_alone(path, bits)


# --- Sequences ---


def test_into_another_cache(device, tmp_path):
    """With pages of another size; decoding continues there as it would have here."""
    twin, path = Twin(device, seed=1, rope=rope_of(8)), tmp_path / "one"
    twin.prefill("a", 11)
    twin.cache.save_sequence("a", path)
    other = Twin(device, seed=2, rope=rope_of(8), page_size=3, num_pages=9)
    other.prefill("b", 4)
    other.cache.load_sequence("a", path)
    other.model.load("a", twin.model.sequences["a"])
    other.check()
    other.step("ab", [2, 1])
    other.step("a", [1])


# --- Refused ---


def saved(device, path, **options):
    twin = Twin(device, seed=6, **options)
    twin.prefill("a", 9)
    twin.cache.save_sequence("a", path)
    return twin


def refuses(twin, name, path, error, match):
    cache, names = twin.cache, [*twin.model.sequences]
    before = snapshot(cache, names)
    with pytest.raises(error, match=match):
        cache.load_sequence(name, path)
    assert snapshot(cache, names) == before
    assert (name in cache) == (name in names)


@pytest.mark.parametrize("options", [
    {"num_layers": 3}, {"num_kv_heads": 4}, {"head_dim": 16}, {"v_head_dim": 16},
    {"dtype": "bf16"}, {"dtype": "int8"}, {"dtype": "fp8_e4m3"},
])  # fmt: skip
def test_caches_that_the_file_does_not_fit(device, tmp_path, options):
    saved(device, tmp_path / "a")
    other = Twin(device, seed=7, **{**SMALL, **options})
    other.prefill("b", 5)
    refuses(other, "new", tmp_path / "a", ValueError, r"\bpath\b")


def test_saving_what_cannot_be(device, tmp_path):
    """Unknown sequences, pending trees, sequences in a step: no file is left."""
    twin, path = Twin(device, seed=10), tmp_path / "a"
    twin.prefill("a", 9, "b", 4)
    with pytest.raises(kv.UnknownSequence):
        twin.cache.save_sequence("c", path)
    twin.step("a", [7], [BINARY])
    with pytest.raises(ValueError, match=r"\bseq\b"):
        twin.cache.save_sequence("a", path)
    twin.cache.begin_forward(["b"], [1])
    with pytest.raises(kv.KvcupyError):
        twin.cache.save_sequence("b", path)
    twin.cache.end_forward()
    assert not path.exists()
    with pytest.raises(OSError):
        twin.cache.save_sequence("b", tmp_path / "no" / "such" / "folder")
