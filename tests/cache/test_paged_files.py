"""`PagedKVCache`: sequences into safetensors files and back, bit for bit."""

from __future__ import annotations

import itertools
import json
import struct

import numpy as np
import pytest
from helpers import FORMATS, QUANTISED
from paged_cases import BINARY, SMALL, Twin, rope_of
from paged_snapshot import pages_of_pool, snapshot

import kvcupy as kv
from kvcupy.cache.paged import files

pytest.importorskip("safetensors")


def rows_of(twin, name):
    """All bits that a sequence has in the pool, scales too, token after token.

    What the pool holds at the places of the model's tokens, by the pages of the block table.
    """
    cache = twin.cache
    cache.begin_forward([name], [1])
    table = twin.device.to_numpy(cache.block_table())[0]
    cache.end_forward()
    cache.pop_tokens(name, 1)
    size, length = cache.pool.page_size, cache.sequence_length(name)
    tokens = np.arange(length)
    return [
        part.reshape(-1, *part.shape[2:])[table[tokens // size] * size + tokens % size]
        for part in pages_of_pool(cache.pool)
    ]


def same(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.covering
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("length", [0, 1, 8, 11])
def test_round_trip(device, tmp_path, fmt, length):
    """Under another name, within a cache that holds others."""
    twin = Twin(device, dtype=fmt, v_head_dim=12, rope=rope_of(8))
    twin.prefill("b", 3)
    twin.add("a")
    if length:
        twin.step("a", [length])
    twin.cache.save_sequence("a", tmp_path / "a.safetensors")
    twin.cache.load_sequence("again", str(tmp_path / "a.safetensors"))
    assert twin.cache.sequence_length("again") == length and "a" in twin.cache
    assert twin.cache.num_available_pages == 40 - 1 - 2 * -(-length // 4)
    if length:
        same(rows_of(twin, "a"), rows_of(twin, "again"))


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


def test_the_file(device, tmp_path):
    """A header of JSON behind its length; tensors within the file, one after another."""
    twin, path = Twin(device, seed=5, dtype="bf16"), tmp_path / "a.safetensors"
    twin.prefill("a", 11)
    twin.cache.save_sequence("a", path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    spans = sorted(v["data_offsets"] for k, v in header.items() if k != "__metadata__")
    assert spans[0][0] == 0 and spans[-1][1] == len(content) - 8 - length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    tokens = sum(np.prod(v["shape"]) for k, v in header.items() if v.get("dtype") == "BF16")
    assert tokens == 11 * 2 * 2 * (8 + 8)


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


def test_formats_of_one_width(device, tmp_path):
    """The same number of bytes is not the same format."""
    for fmt, others in (("fp16", ["bf16"]), ("int8", ["fp8_e4m3", "fp8_e5m2"])):
        saved(device, tmp_path / fmt, dtype=fmt)
        for other in others:
            refuses(
                Twin(device, seed=8, dtype=other), "new", tmp_path / fmt, ValueError,
                rf"^path: expected a saved sequence with dtype {other}, got {fmt}$",
            )  # fmt: skip


@pytest.mark.parametrize("fmt", QUANTISED)
def test_dynamic_and_static_scales(device, tmp_path, fmt):
    """A file with a scale a token is not one of a cache without."""
    saved(device, tmp_path / "dynamic", dtype=fmt)
    static = Twin(device, seed=9, dtype=fmt, k_scale=0.05, v_scale=0.05)
    refuses(static, "new", tmp_path / "dynamic", ValueError, r"\bpath\b")


def test_files_that_are_none(device, tmp_path):
    twin = saved(device, tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for name, broken in {
        "empty": b"", "short": content[:5], "header": content[: 8 + length // 2],
        "cut": content[:-1], "longer": content + b"\0",
        "length": struct.pack("<Q", 2**62) + content[8:],
        "text": b"not safetensors, but long enough to be read as a header's length",
        "json": content[:8] + b"]" + content[9:],
        "names": content[: 8 + length].replace(b"BF16", b"F16 ").replace(b'"F32"', b'"I32"')
        + content[8 + length :],
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(broken)
        refuses(twin, "new", tmp_path / name, ValueError, r"\bpath\b")
    with pytest.raises((OSError, ValueError)):
        twin.cache.load_sequence("new", tmp_path / "missing")
    assert "new" not in twin.cache
    twin.check()


def test_names_and_room(device, tmp_path):
    twin = saved(device, tmp_path / "a", num_pages=5)
    refuses(twin, "a", tmp_path / "a", ValueError, r"\bseq\b")
    refuses(twin, "new", tmp_path / "a", kv.CacheFull, "pages")
    twin.pop("a", 1)
    twin.cache.load_sequence("new", tmp_path / "a")
    assert twin.cache.num_available_pages == 0


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


def test_tensors_of_other_shapes_than_the_file_says(device, tmp_path):
    twin = Twin(device, seed=40)
    twin.prefill("a", 6)
    twin.cache.save_sequence("a", tmp_path / "a")
    tensors, metadata = files.read_file(tmp_path / "a")
    before = twin.cache.num_available_pages
    for wrong in ({"length": "5"}, {"length": "-1"}, {"length": "x"}):
        files.write_file(tmp_path / "b", tensors, {**metadata, **wrong})
        with pytest.raises(ValueError, match=r"\bpath\b"):
            twin.cache.load_sequence("b", tmp_path / "b")
    assert "b" not in twin.cache and twin.cache.num_available_pages == before
