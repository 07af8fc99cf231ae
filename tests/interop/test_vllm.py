"""vLLM's caches with split rows, and copies of blocks. Other calls are in `test_peer_calls.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from peers import ints, quantised, rows  # noqa: E402

from kvcupy.interop import vllm  # noqa: E402

SIZE = 4


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "auto"), (torch.float32, "auto"), (torch.uint8, "fp8"),
     (torch.uint8, "fp8_e5m2")],
)  # fmt: skip
def test_split_rows(place, dtype, kind):
    """Keys are (blocks, heads, head_size / x, block_size, x), values (..., head_size, block_size).

    Of the value cache every other block is a tensor of someone else, and stays.
    """
    x = 16 // dtype.itemsize
    keys = torch.full((5, 2, 32 // x, SIZE, x), 7, device=place).to(dtype)
    whole = torch.full((5, 2, 2, 32, SIZE), 7, device=place).to(dtype)
    values, expected, expected_values = whole[:, 0], keys.clone(), whole.clone()
    k, v = (rows(4, 2, 32, place=place, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    if kind == "auto":
        k, v = k.to(dtype), v.to(dtype)
    stored, scales = (k, v), [torch.tensor([f], device=place) for f in (0.7, 1.3)]
    if kind != "auto":
        codes = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
        stored = [
            quantised(part, scale, codes).view(torch.uint8)
            for part, scale in zip((k, v), scales, strict=True)
        ]
    slots = [9, -1, 19, 0]
    for i, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, SIZE)
            expected[block, :, :, offset] = stored[0][i].view(2, 32 // x, x)
            expected_values[block, 0, :, :, offset] = stored[1][i]
    vllm.reshape_and_cache(k, v, keys, values, ints(slots, place), kind, *scales)
    assert torch.equal(keys, expected) and torch.equal(whole, expected_values)


PAIRS = [[2, 5], [6, 0], [-1, 3], [4, 3]]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("mapped_on", ["cpu", None])
def test_blocks_are_swapped(place, dtype, same, mapped_on):
    """By pairs, of which one with a negative block is skipped; within one tensor too."""
    src = torch.arange(7 * SIZE * 6, device=place).view(7, SIZE, 6).to(dtype)
    dst = src if same else torch.zeros(6, SIZE, 2, 3, dtype=dtype, device=place)
    expected = dst.clone()
    for pair in PAIRS:
        if pair[0] >= 0:
            expected[pair[1]] = src[pair[0]].view(expected.shape[1:])
    version = dst._version
    vllm.swap_blocks(src, dst, src[0].nbytes, ints(PAIRS, mapped_on or place))
    assert torch.equal(dst, expected) and dst._version > version
    vllm.swap_blocks(src, dst, src[0].nbytes, ints(PAIRS, "cpu")[:0])
    assert torch.equal(dst, expected)


@pytest.mark.gpu
def test_blocks_are_swapped_with_the_host(device, place):
    """Behind what the current stream writes."""
    host = torch.zeros(6, SIZE, 6).pin_memory()
    src, stream = torch.zeros(7, SIZE, 6, device=place), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        src.fill_(3.0)
        vllm.swap_blocks(src, host, src[0].nbytes, ints([[2, 5]], "cpu"))
    stream.synchronize()
    assert (host[5] == 3).all() and not host[:5].any()


@pytest.mark.parametrize("mapped_on", ["cpu", None])
def test_blocks_of_each_layer_are_copied(place, mapped_on):
    layers = [rows(7, SIZE, 6, place=place, seed=s) for s in range(4)]
    expected = [x.clone() for x in layers]
    for source, target in PAIRS:
        if source >= 0:
            for x, copy in zip(layers, expected, strict=True):
                copy[target] = x[source]
    vllm.copy_blocks(layers[:2], layers[2:], ints(PAIRS, mapped_on or place))
    assert all(torch.equal(x, y) for x, y in zip(layers, expected, strict=True))
    vllm.copy_blocks([], [], ints(PAIRS, place))
