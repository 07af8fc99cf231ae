"""`PagedKVCache`: what the machine of test_paged_machine.py does not do, or only by chance.

`Twin` (paged_cases.py) makes each call of the cache and of the model, and compares everything.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPE, as_numpy, to_device
from paged_cases import BINARY, Twin, random_tree, rope_of

import kvcupy as kv
from kvcupy.cache.paged import moves

LEARNED = np.float32([1.5, -2.0, 0.0, 3.0])

# --- Steps ---


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "width", "v_width"),
    [(28, 4, 16, None), (12, 2, 100, None), (4, 2, 40, 24), (8, 4, 128, 128), (32, 4, 64, None)],
)
def test_heads_and_widths(device, q_heads, kv_heads, width, v_width):
    shape = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": width}
    twin = Twin(device, seed=3, num_layers=1, **shape, v_head_dim=v_width, dtype="fp16")
    twin.prefill("a", 9, "b", 5)
    twin.step("ba", [1, 1])
    twin.step("ab", [2, 1])


def test_strided_rows(device):
    """Rows of every other token of wider arrays, and an output by columns."""
    twin = Twin(device, seed=7, num_layers=1)
    twin.add("a")
    twin.both("begin", ["a"], [5], None)
    rows = [np.float32(twin.rng.standard_normal((10, 12, 8))) for _ in range(3)]
    cuts = (lambda a: a[::2, :4], lambda a: a[1::2, 4:6], lambda a: a[::-2, 8:10])
    query, key, value = (to_device(device, a, cut) for a, cut in zip(rows, cuts, strict=True))
    out = to_device(device, np.zeros((4, 5, 8), np.float32), lambda a: a.swapaxes(0, 1))
    assert twin.cache.attention(0, query, key, value, out=out) is out
    want, allowed = twin.model.attention(
        0, *(np.ascontiguousarray(cut(a)) for a, cut in zip(rows, cuts, strict=True))
    )
    assert (np.abs(as_numpy(device, out, "fp32") - want) <= allowed).all()
    twin.both("end")
    twin.check()


def test_a_tree_wider_than_any_mask_word(device):
    """300 nodes at random."""
    twin = Twin(device, seed=9, num_pages=200, num_layers=1)
    twin.prefill("a", 10, "b", 3)
    trees = [random_tree(twin.rng, 300), random_tree(twin.rng, 65)]
    twin.step("ab", [300, 65], trees)
    twin.commit("ba", [64, 299])
    twin.step("ab", [1, 1])


def test_numbers_and_lists_of_numpy(device):
    """Names, lengths, positions, parents and leaves in arrays, tuples and integers of NumPy."""
    twin = Twin(device, seed=24)
    twin.prefill(0, 6, 1, 5)
    twin.model.begin([1, 0], [3, 1], [[-1, 0, 0], [-1]])
    trees = (np.array([-1, 0, 0]), (-1,))
    twin.cache.begin_forward(np.array([1, 0]), np.array([3, 1], np.int32), token_tree=trees)
    twin.attend()
    twin.both("end")
    twin.cache.commit_token_tree((1, 0), np.array([2, -1]))
    twin.model.commit([1, 0], [2, -1])
    twin.both("fork", 1, 2, np.int64(3))
    twin.both("pop", np.int64(0), np.int32(2))
    twin.slide(2, np.int64(3), np.int32(1))
    twin.check()
    twin.step([0, 1, 2], [2, 1, 3])


@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_keys_that_keep_their_rotation_are_logged(device, caplog, mode):
    """Once for each cache, and only where a window goes with rotated keys."""
    twin = Twin(device, seed=22, rope=rope_of(8), rope_mode=mode)
    twin.prefill("a", 3, "b", 3)
    caplog.clear()
    for name in "ab":
        twin.slide(name, 5)
    twin.step("ab", [4, 4])
    warnings = [r for r in caplog.records if r.name.startswith("kvcupy") and "window" in r.message]
    assert len(warnings) == int(mode == "normal")
    assert all("StreamingLLM" in r.message and "SlidingWindow" in r.message for r in warnings)
    assert all(twin.cache.sequence_length(name) == 5 for name in "ab")


# --- Positions of a table ---


@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_the_last_position_of_a_table(device, mode):
    """A step that needs the next is refused before anything is done."""
    twin = Twin(device, seed=7, rope=rope_of(8, positions=12), rope_mode=mode)
    twin.prefill("a", 11, "b", 2)
    twin.step("ab", [1, 1])
    if mode == "none":
        twin.step("a", [1])
        return
    for names, lens in ((["a"], [1]), (["b", "a"], [1, 1]), (["b"], [10])):
        with pytest.raises(ValueError, match=r"\bappend_lens\b"):
            twin.cache.begin_forward(names, lens)
        twin.check()
    twin.step("b", [9])


def test_a_tree_deeper_than_a_table(device):
    """Depth counts, not the number of nodes."""
    twin = Twin(device, seed=8, rope=rope_of(8, positions=12))
    twin.prefill("a", 10)
    twin.step("a", [5], [[-1, -1, 0, 0, 1]])
    twin.commit("a", [-1])
    with pytest.raises(ValueError, match=r"\b(append_lens|token_tree)\b"):
        twin.cache.begin_forward(["a"], [3], token_tree=[[-1, 0, 1]])
    twin.check()
    twin.step("a", [2])


# --- Shared prefixes ---


def family(device, **options):
    """Sequences that share pages at several depths, and one that shares none."""
    twin = Twin(device, num_pages=80, **options)
    twin.prefill("root", 17, "alone", 6)
    for name in ("a", "b"):
        twin.fork("root", name, 16)
        twin.step([name], [9], contents=False)
    for name, parent, at in (("a1", "a", None), ("a2", "a", 24), ("b1", "b", 20), ("c", "root", 8)):
        twin.fork(parent, name, at)
    return twin


FAMILY = ["root", "a", "a1", "alone", "b", "a2", "b1", "c"]


@pytest.mark.usefixtures("quick_host")
@pytest.mark.covering
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("masks", [
    {}, {"window": 5}, {"window": 30}, {"window": 6, "sink_tokens": 3}, {"sinks": LEARNED},
    {"window": 9, "sinks": LEARNED, "logits_soft_cap": 3.0}, {"padding": 5, "packed": True},
])  # fmt: skip
def test_families(device, masks, fmt):
    """A window may hide a shared prefix wholly, or cut through it; a learned sink counts once."""
    twin = family(device, seed=1, dtype=fmt, rope=rope_of(8))
    twin.step(FAMILY, [1] * 8, contents=False, **masks)
    twin.step(FAMILY[::-1], [1, 3, 1, 5, 2, 1, 4, 1], contents=False, **masks)
    trees = [BINARY if i % 2 else [-1] for i in range(8)]
    twin.step(FAMILY, [len(tree) for tree in trees], trees, contents=False)
    twin.commit(FAMILY[::-1], [5, 0, 3, 0, 6, -1, -1, 0])
    twin.remove("root", "a")
    twin.step(["b1", "a2", "c", "b", "a1"], [1] * 5, **masks)


# --- Contents and tables ---


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tables_are_those_of_the_operations(device, page_size):
    """`kv.slot_mapping` and `kv.page_table_csr` of the block table give what the cache gives."""
    twin = Twin(device, seed=19, page_size=page_size, num_pages=70)
    cache = twin.cache
    twin.prefill("a", 17, "b", 2, "c", 16)
    twin.fork("a", "d")
    for lens in ([1, 3, 2, 16], [1, 1, 1, 1]):
        cache.begin_forward(list("dcba"), lens)
        seq_lens = device.asarray(np.int32([cache.sequence_length(name) for name in "dcba"]))
        table = cache.block_table()
        slots = kv.slot_mapping(table, seq_lens, device.asarray(np.int32(lens)), page_size)
        got = (cache.slot_mapping(), *cache.page_table_csr())
        want = (slots, *kv.page_table_csr(table, seq_lens, page_size))
        for mine, other in zip(got, want, strict=True):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(*map(device.to_numpy, (mine, other)))
        cache.end_forward()


# --- The constructor ---


@pytest.mark.parametrize("options", [{}, {"dtype": DTYPE["bf16"]}, {"dtype": DTYPE["bf16"].type}])
def test_defaults(device, options):
    """bf16 in pages of 16, no rotation, 8192 tokens per step."""
    sizes = {"num_layers": 1, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8, "num_pages": 600}
    cache = kv.PagedKVCache(**sizes, **options, device=device)
    assert (cache.pool.page_size, cache.pool.dtype, cache.pool.num_pages) == (16, "bf16", 600)
    cache.add_sequence(0)
    with pytest.raises(ValueError, match="append_lens"):
        cache.begin_forward([0], [8193])
    cache.begin_forward([0], [8192])
    cache.end_forward()
    assert cache.num_available_pages == 600 - 512


# --- Copies of pages ---


def test_a_copy_that_failed_in_flight(device, monkeypatch):
    """The child never has that page, even where another caller has seen the failure."""
    if device.kind != "host":
        pytest.skip("work of the host device can be made to fail")
    twin = Twin(device, page_size=4)
    twin.prefill("parent", 6)

    def fail():
        raise ZeroDivisionError("in flight")

    with monkeypatch.context() as patch:
        patch.setattr(moves, "copy_pages", lambda *_, stream, **__: stream.call(fail))
        twin.cache.fork_sequence("parent", "child")
    with pytest.raises(kv.DeviceError, match="in flight"):
        twin.cache._steps.access.copy_stream.synchronize()
    rows = [device.zeros((1, heads, 8), "fp32") for heads in (4, 2, 2)]
    twin.cache.begin_forward(["child"], [1])
    with pytest.raises(kv.DeviceError, match="never copied") as raised:
        twin.cache.attention(0, *rows)
    assert "in flight" in repr(raised.value.__cause__)
    twin.cache.end_forward()
    twin.cache.remove_sequence("child")
    twin.step(["parent"], [2])


def test_a_stream_that_fails_and_surfaces(device):
    """Its failure is its owner's: later steps have their tables, and forks their pages."""
    if device.kind != "host":
        pytest.skip("work of the host device can be made to fail")
    twin, stream = Twin(device), device.stream()
    twin.prefill("a", 6)
    stream.call(lambda: 1 // 0)
    rows = [device.zeros((1, heads, 8), "fp32") for heads in (4, 2, 2)]
    twin.cache.begin_forward(["a"], [1])
    twin.cache.attention(0, *rows, stream=stream)
    twin.cache.abort_forward()
    with pytest.raises(kv.DeviceError):
        stream.synchronize()
    device.synchronize()
    for _ in range(3):
        twin.step(["a"], [1], stream=stream)
    twin.fork("a", "b", 6)
    twin.step("ab", [1, 2], stream=stream)
