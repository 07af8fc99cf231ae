"""Layers of one step that differ in their rows, options and pools: each is computed as if alone."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv

SHAPE = {"num_pages": 16, "page_size": 4, "num_layers": 12, "num_kv_heads": 2, "head_dim": 16}
HEADS = 4
COUNTS = {"a": 3, "b": 2}
NUM_TOKENS = sum(COUNTS.values())


def contiguous(x):
    return x


def misaligned(x):
    """Begin one element past a multiple of 16 bytes."""
    raw = np.zeros(x.size + 8, x.dtype)
    first = -raw.ctypes.data % 16 // x.itemsize + 1
    moved = raw[first : first + x.size].reshape(x.shape)
    moved[...] = x
    return moved


def packed(x):
    """Be part of a wider array."""
    wide = np.zeros((x.shape[0], x.shape[1] + 1, x.shape[2]), x.dtype)
    wide[:, 1:] = x
    return wide[:, 1:]


# Functions that make rows, formats other than fp16, options; neighbours differ in one thing.
LAYERS = [
    ({}, {}, {}),
    ({}, {}, {"window": 2}),
    ({}, {}, {"window": 2, "sink_tokens": 1}),
    ({}, {}, {"sm_scale": 0.3}),
    ({}, {}, {"logits_soft_cap": 0.5}),
    ({}, {}, {"sinks": "logits"}),
    ({"query": misaligned}, {}, {}),
    ({"key": packed}, {}, {}),
    ({"key": packed, "value": packed}, {}, {}),
    ({}, {"query": "float32"}, {}),
    ({}, {"value": "float32"}, {}),
    ({}, {}, {}),
]


def wrapped_pool(device):
    """A pool of which every third layer has gaps between its rows."""

    def array(layer):
        shape = (16, 4, 3 if layer % 3 == 1 else 2, 16)
        return device.zeros(shape, "fp16")[:, :, :2]

    arrays = [[array(layer) for layer in range(SHAPE["num_layers"])] for _ in "kv"]
    return kv.KVPool.wrap(*arrays)


def rows_of(layer, seed, device, wrap):
    makers, formats, _ = LAYERS[layer]
    rng = np.random.default_rng([seed, layer])
    shapes = {"query": HEADS, "key": 2, "value": 2}
    rows = {
        name: rng.normal(size=(NUM_TOKENS, heads, 16)).astype(formats.get(name, "float16"))
        for name, heads in shapes.items()
    }
    if device.kind == "host":
        rows = {name: makers.get(name, contiguous)(x) for name, x in rows.items()}
    else:
        rows = {name: device.asarray(x) for name, x in rows.items()}
    return {name: wrap(x) for name, x in rows.items()}


def options_of(layer, device):
    options = dict(LAYERS[layer][2])
    if options.get("sinks") == "logits":
        options["sinks"] = device.asarray(np.linspace(-1, 1, HEADS, dtype=np.float32))
    return options


@pytest.mark.parametrize("library", ["own", "torch"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_that_differ(device, lenient_host, library, wrapped):
    wrap = contiguous
    if library == "torch":
        torch = pytest.importorskip("torch")
        if device.kind != "host":
            pytest.skip("rows are made by the host")
        wrap = torch.from_numpy
    pool = wrapped_pool(device) if wrapped else kv.KVPool(**SHAPE, dtype="fp16", device=device)
    cache = kv.PagedKVCache(pool=pool, num_q_heads=HEADS)
    for name in COUNTS:
        cache.add_sequence(name)
    order = np.random.default_rng(5)
    for seed in range(3):
        with cache.forward(list(COUNTS), list(COUNTS.values())):
            lens = [np.array(list(ints), np.int32) for ints in (
                map(cache.sequence_length, COUNTS), COUNTS.values()
            )]  # fmt: skip
            seq_lens, query_lens = map(device.asarray, lens)
            slots = device.to_numpy(cache.slot_mapping())
            layers = range(len(LAYERS)) if seed == 0 else order.permutation(len(LAYERS)).tolist()
            for layer in layers:
                rows, options = rows_of(layer, seed, device, wrap), options_of(layer, device)
                got = device.to_numpy(cache.attention(layer, **rows, **options))
                for name, view in (("key", pool.k(layer)), ("value", pool.v(layer))):
                    stored = device.to_numpy(view).reshape(-1, 2, 16)[slots]
                    expected = device.to_numpy(rows[name]).astype(np.float16)
                    assert np.array_equal(stored, expected), (seed, layer, name)
                alone = kv.paged_attention(
                    rows["query"], pool.k(layer), pool.v(layer), cache.block_table(), seq_lens,
                    query_lens=query_lens, **options,
                )  # fmt: skip
                assert np.array_equal(got, device.to_numpy(alone)), (seed, layer)
