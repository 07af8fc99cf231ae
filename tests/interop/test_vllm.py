"""vLLM's gathers of cached rows and copies of blocks. Other calls are in `test_peer_calls.py`."""

from __future__ import annotations

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

from peers import ints, rows, same_bits  # noqa: E402

from kvcupy.interop import vllm  # noqa: E402

SIZE, TABLE, LENGTHS = 4, [[3, 0, 6], [1, 1, 1], [5, 2, 4]], [6, 0, 9]
STARTS = [3, 0, 1]
"""Blocks of three sequences, their lengths, and tokens in front of those that are read."""


def indices(place, dtype=torch.int32, lengths=LENGTHS):
    table, ends = ints(TABLE, place, dtype), ints(lengths, place, dtype).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0)).to(dtype)
    return table, starts, ints([0] * 6 + [2] * 9, place, dtype)


def gathered(cache, starts):
    flat, out = cache.flatten(0, 1), []
    for table, length, start in zip(TABLE, LENGTHS, starts or [0] * 3, strict=True):
        out += [flat[table[t // SIZE] * SIZE + t % SIZE] for t in range(start, start + length)]
    return torch.stack(out)


@pytest.mark.parametrize("starts", [None, STARTS])
@pytest.mark.parametrize("width", [2, 7, 24, 96])
def test_rows_are_gathered_by_sequence(place, width, starts):
    """As they are by both calls; rows past num_tokens, and of other sequences, stay."""
    cache = rows(7, SIZE, width, place=place, dtype=torch.bfloat16)
    table, cu_seq_lens, sequences = indices(place)
    seq_starts = None if starts is None else ints(starts, place, torch.int32)
    expected = gathered(cache, starts)
    dst = torch.full((17, width), 7, dtype=torch.bfloat16, device=place)
    vllm.gather_and_maybe_dequant_cache(
        cache, dst, table, cu_seq_lens, sequences, 15, "auto", torch.ones(1), seq_starts
    )
    assert torch.equal(dst[:15], expected) and (dst[15:] == 7).all()
    dst = torch.full_like(dst, 7)
    vllm.cp_gather_cache(cache, dst, table, cu_seq_lens, 3, seq_starts)
    assert torch.equal(dst[:15], expected) and (dst[15:] == 7).all()
    dst = torch.full_like(dst, 7)
    vllm.cp_gather_cache(cache, dst, table, cu_seq_lens, 1, seq_starts)
    assert torch.equal(dst[:6], expected[:6]) and (dst[6:] == 7).all()


def test_heads_are_part_of_a_row(place):
    cache = torch.arange(7 * SIZE * 6, device=place).view(7, SIZE, 3, 2).to(torch.uint8)
    dst = torch.zeros(15, 3, 2, dtype=torch.uint8, device=place)
    vllm.cp_gather_cache(cache, dst, *indices(place, torch.int64)[:2], 3)
    assert torch.equal(dst, gathered(cache, None))


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_dequantised(place, kind, dtype, as_bytes):
    stored = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
    cache = rows(7, SIZE, 96, place=place, dtype=stored)
    dst, scale = torch.empty(15, 96, dtype=dtype, device=place), torch.tensor([0.3], device=place)
    vllm.gather_and_maybe_dequant_cache(
        cache.view(torch.uint8) if as_bytes else cache, dst, *indices(place), 15, kind, scale
    )
    assert same_bits(dst, (gathered(cache, None).float() * scale).to(dtype))


def test_a_sequence_past_its_blocks_is_a_fault(device, place):
    cache, dst = rows(7, SIZE, 8, place=place), torch.zeros(19, 8, device=place)
    table, cu_seq_lens, _ = indices(place, lengths=[6, 0, 13])
    vllm.cp_gather_cache(cache, dst, table, cu_seq_lens, 3)
    with pytest.raises(kv.IndexFault, match="slot_mapping"):
        kv.check_faults(device)
    assert torch.equal(dst[:15], gathered(cache, None)) and not dst[18].any()


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
        pointers = [ints([x.data_ptr()], "cpu") for x in (src, host)]
        vllm.swap_blocks_batch(*pointers, ints([16], "cpu"))
    stream.synchronize()
    assert (host[5] == 3).all() and (host[0, 0, :4] == 3).all()
    assert not host[1:5].any() and not host[0, 0, 4:].any()


def test_bytes_are_swapped_by_address(place):
    src, dst = rows(64, place=place), torch.zeros(64, device=place)
    starts = [(0, 8, 20), (40, 0, 16), (0, 0, 0)]
    columns = [
        [x + base for x in offsets]
        for offsets, base in zip(
            zip(*starts, strict=True), (src.data_ptr(), dst.data_ptr(), 0), strict=True
        )
    ]
    expected = dst.clone()
    expected[2:7], expected[:4] = src[:5], src[10:14]
    vllm.swap_blocks_batch(*(ints(x, "cpu") for x in columns))
    kv.default_device().synchronize()
    assert torch.equal(dst, expected)
