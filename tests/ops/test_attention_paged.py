"""What a cache adds to attention: evicted spans, first visible keys, trees of several steps.

The shapes "decode" and "few" take the decode kernel; "many" new tokens per sequence take tensor
cores in 16-bit formats.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import SHAPES, AttentionCase, attend, call_of, formats, shapes
from helpers import POISON_SLOT, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv

# Lengths, and all together ---------------------------------------------------------------------


@shapes
def test_sums_of_query_lens_that_are_there_already(device, shape):
    """Rows of no sequence are left alone, also where splits are merged."""
    case, args = call_of(device, 4, shape, "bf16")
    if "query_lens" not in args:
        args["query_lens"] = case.slots(np.ones(len(args["seq_lens"].view), np.int64), "int32")
    sums = np.append(0, np.cumsum(args["query_lens"].view)).astype(np.int32)
    args["cu_query_lens"] = case.place(sums, "int32", name="cu_query_lens")
    case.attend(args)
    args = case.arguments([1300], [3], fmt="bf16", heads=(2, 1), padding=4)
    args["cu_query_lens"] = case.slots([0, 3], "int32")
    case.attend(args)


def test_cumulative_lengths_alone(device, monkeypatch):
    """As FlashAttention passes them: the same bits as by counts, and one launch fewer."""
    query, k_cache, v_cache, table, lens, new = (
        device.asarray(x) for x in ragged_arrays(np.random.default_rng(6))
    )
    sums = np.append(0, np.cumsum(device.to_numpy(new))).astype(np.int32)
    launched, launch = [], type(device).launch

    def counting(self, function, *rest, **options):
        launched.append(function)
        return launch(self, function, *rest, **options)

    monkeypatch.setattr(type(device), "launch", counting)
    arrays = query, k_cache, v_cache, table, lens
    want = kv.paged_attention(*arrays, query_lens=new)
    by_counts = len(launched)
    got = kv.paged_attention(*arrays, cu_query_lens=device.asarray(sums))
    assert len(launched) == max(0, 2 * by_counts - 1)  # no launch without a compiler
    np.testing.assert_array_equal(device.to_numpy(got), device.to_numpy(want))
    with pytest.raises(ValueError, match=r"^query_lens: expected None with cu_query_lens"):
        kv.paged_attention(*arrays, query_lens=new, cu_query_lens=device.asarray(sums))
    with pytest.raises(TypeError, match=r"^cu_query_lens: expected int32"):
        kv.paged_attention(*arrays, cu_query_lens=device.asarray(sums.astype(np.int64)))


def ragged_arrays(rng):
    """Query, caches, table, lengths and new tokens of three sequences."""
    pages = rng.permutation(12).reshape(3, 4).astype(np.int32)
    rows = (rng.standard_normal(s).astype(np.float32) for s in [(9, 4, 32), *[(12, 4, 2, 32)] * 2])
    return *rows, pages, np.array([16, 5, 9]), np.array([4, 2, 3])


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "sums",
    [
        [-9, 3, 40, 44], [0, 30, 3, 44], [0, -5, -6, 44], [7, 3, 2, 1],
        [0, 30, 34, 45], [0, 60, 70, 80], [50, 50, 50, 50],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("longest", [60, 600], ids=["in one piece", "in pieces"])
def test_sums_of_query_lens_that_are_none(device, sums, fmt, longest):
    """Nothing outside of the query is read or written, and the first wrong one is reported."""
    case = AttentionCase(device, 5)
    args = case.arguments([40, 50, longest], [30, 4, 10], fmt=fmt, heads=(4, 2), widths=(32, 32))
    args["cu_query_lens"] = case.slots(sums, "int32")
    out, lse = case.results(args)
    case.issue(args, out, lse)
    with pytest.raises(kv.IndexFault, match="paged_attention: cu_query_lens") as caught:
        kv.check_faults(device)
    num_tokens = 44
    wrong = [
        (i, n) for i, n in enumerate(sums)
        if n > num_tokens or n < max(0, *sums[max(0, i - 1) : i], 0)
    ]  # fmt: skip
    assert caught.value.bound == "0 to 44, not decreasing"
    assert any(f"[{i}]: expected {caught.value.bound}, got {n};" in str(caught.value)
               for i, n in wrong), (wrong, caught.value)  # fmt: skip
    out.view[...], lse.view[...] = out.live(), lse.live()
    case.check_buffers()


@pytest.mark.covering(2)
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("new", [[2, 3], [30, 40]], ids=["few", "many"])
@pytest.mark.parametrize("longest", [90, 900], ids=["in one piece", "in pieces"])
def test_sums_past_the_query_count_as_its_end(device, longest, new, fmt):
    """The rows that there are have the positions, and bits, of sums that end with the query."""
    case = AttentionCase(device, 23)
    args = case.arguments([100, longest], new, fmt=fmt, heads=(4, 2), widths=(32, 32))
    del args["query_lens"]
    first, num_tokens = new[0], sum(new)
    for sums, past in (
        ([0, first, num_tokens], [0, first, num_tokens + 6]),
        ([0, first, num_tokens], [-70_000, first, 2**31 - 1]),
        ([0, num_tokens, num_tokens], [0, num_tokens + 6, num_tokens + 9]),
    ):
        results = []
        for entries in (sums, past):
            out, lse = case.results(args)
            case.issue({**args, "cu_query_lens": case.slots(entries, "int32")}, out, lse)
            results.append((out.live(), lse.live()))
            if entries is past:
                with pytest.raises(kv.IndexFault, match="paged_attention: cu_query_lens"):
                    kv.check_faults(device)
        for want, got in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("new", [[2, 3], [30, 40]], ids=["few", "many"])
def test_query_lens_past_the_query(device, new, fmt):
    case = AttentionCase(device, 24)
    args = case.arguments([100, 90], new, fmt=fmt, heads=(4, 2), widths=(32, 32))
    case.attend({**args, "query_lens": case.slots([new[0], new[1] + 6], "int32")})


@pytest.mark.covering(2)
@shapes
@pytest.mark.parametrize("evicted", [False, True], ids=["whole", "evicted"])
@pytest.mark.parametrize("starts", [False, True], ids=["all keys", "key starts"])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("rope", [False, True], ids=["as cached", "rotated"])
def test_together(device, evicted, starts, trees, rope, shape):
    """Each with each, under windows that keep first keys, caps and learned sinks."""
    for fmt in ("fp32", "bf16"):
        case, args = call_of(
            device, 2, shape, fmt, evicted=evicted, starts=starts, trees=trees,
            rope={"dim": 16, "start": 8} if rope else None, heads=(6, 2),
        )  # fmt: skip
        case.attend(args)
        case.attend(args, window=7, sink_tokens=3)
        case.attend(args, window=12, causal=False, logits_soft_cap=6.0, sinks=case.sinks(6))


# Pages ---------------------------------------------------------------------------------------


@shapes
def test_an_evicted_span_of_whole_pages(device, shape):
    """A span of table entries that is skipped gives the bits of a table without them."""
    lens, new = SHAPES[shape]
    case = AttentionCase(device, 5)
    args = case.arguments(lens, new, fmt="fp16", evicted=[(8, 12)] * len(lens))
    out, lse = case.attend(args)
    table = args["block_table"].view
    without = {n: a for n, a in args.items() if n not in ("evicted_starts", "evicted_lens")}
    without["block_table"] = case.table(np.delete(table, np.s_[2:5], axis=1))
    for got, want in zip(case.attend(without), (out, lse), strict=True):
        assert np.array_equal(got.view, want.view, equal_nan=True)


@pytest.mark.parametrize("new", [None, [2, 1, 5], [20, 20, 60]])
def test_length_past_the_table(device, new):
    """A length that fits only without its evicted span; of whole pages and of parts."""
    for evicted in (
        [(3, 0), (5, 2), (0, 9)],
        [(3, 70), (70, 70), (60, 4)],
        [(63, 1), (64, 1), (0, 64)],
    ):
        case = AttentionCase(device, 6)
        args = case.arguments([64, 64, 60], new, fmt="fp16", evicted=evicted)
        case.attend({**args, "block_table": args["block_table"].sub(lambda a: a[:, :16])})


@pytest.mark.parametrize("new", [None, [2, 1, 5], [14, 7, 60]])
def test_entries_that_are_not_pages(device, new):
    """The page past an evicted span, and the page within which it lies."""
    for entry, page in itertools.product((1, 2), (-1, POISON_SLOT, 2**33)):
        case = AttentionCase(device, 7)
        args = case.arguments([14, 7, 60], new, fmt="fp16", evicted=[(2, 3), (5, 6), (4, 5)])
        table = args["block_table"].view.astype(np.int64)
        table[:, entry] = page
        case.attend({**args, "block_table": case.table(table, "int64")})
        case.attend({**args, "block_table": case.table(table, "int64")}, window=5, sink_tokens=2)


# First visible keys --------------------------------------------------------------------------


@shapes
@formats
def test_no_key_is_visible(device, fmt, shape):
    """Some sequences have all their keys before `key_starts`, or fewer keys than that."""
    lens, new = SHAPES[shape]
    case = AttentionCase(device, 8)
    args = case.arguments(lens, new, fmt=fmt, key_starts=[9, 3, 2000, 2**31 - 1, 4])
    case.attend(args)
    case.attend(args, sinks=case.sinks(4))


@pytest.mark.covering
@shapes
@pytest.mark.parametrize("start", [0, 1, 3, 4, 6])
def test_sink_keys_before_the_start_are_hidden(device, start, shape):
    lens, new = SHAPES[shape]
    for window, sink_tokens in ((2, 4), (6, 4), (40, 3)):
        case = AttentionCase(device, 9)
        args = case.arguments(lens, new, fmt="fp16", key_starts=[start] * len(lens))
        case.attend(args, window=window, sink_tokens=sink_tokens)


@shapes
def test_two_parts_merge_to_the_whole(device, shape):
    """The keys before a position, and those from it on: in float32, from 16-bit queries."""
    lens, new = SHAPES[shape]
    case = AttentionCase(device, 10)
    args = case.arguments(lens, new, fmt="bf16")
    appended = [1] * len(lens) if new is None else new
    # All queries see all keys of the first part, in which they too have positions.
    first = [n - k if n - k >= k else 0 for n, k in zip(lens, appended, strict=True)]
    parts = [
        {**args, "seq_lens": case.slots(first, "int32")},
        {**args, "key_starts": case.slots(first, "int32")},
    ]
    results = [case.results(args, fmt="fp32") for _ in parts]
    case.attend(parts[0], *results[0], causal=False)
    case.attend(parts[1], *results[1])
    whole = case.attend(args, *case.results(args, fmt="fp32"))
    merged = case.results(args, fmt="fp32")
    kv.merge_states(
        *(a.array for pair in results for a in pair), out=merged[0].array, lse_out=merged[1].array
    )
    np.testing.assert_allclose(merged[0].live(), whole[0].live(), rtol=0, atol=2e-2)
    np.testing.assert_allclose(merged[1].live(), whole[1].live(), rtol=1e-5, atol=1e-4)


# Trees ---------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("columns", [3, 12, 60])
def test_columns_of_any_number(device, columns, shape):
    """Nodes past the last column are hidden; those past `tree_positions` keep their own."""
    for fmt in ("fp32", "bf16"):
        lens, new = SHAPES[shape]
        case = AttentionCase(device, 11)
        appended = [1] * len(lens) if new is None else new
        nodes = [min(n + 5, length) for n, length in zip(appended, lens, strict=True)]
        args = case.arguments(lens, new, fmt=fmt, widths=(32, 16)) | case.rope(32)
        args |= case.nodes(nodes, appended, columns=columns)
        case.attend(args)
        case.attend(args | case.tail(nodes, columns=max(2, columns - 3)), window=4)


@shapes
@formats
def test_nodes_are_sink_tokens_by_their_positions(device, fmt, shape):
    """Trees that begin before the sink tokens do: nodes of high numbers have low positions."""
    lens, new = SHAPES[shape]
    appended = [1] * len(lens) if new is None else new
    nodes = [min(max(n, length - 2), length) for n, length in zip(appended, lens, strict=True)]
    case = AttentionCase(device, 25)
    args = case.arguments(lens, new, fmt=fmt)
    args |= case.nodes(nodes, appended) | case.tail(nodes, low=0, high=9)
    for window, sink_tokens in ((1, 1), (2, 4), (3, 6), (1, 100)):
        case.attend(args, window=window, sink_tokens=sink_tokens)


@shapes
def test_no_trees_is_causal(device, shape):
    """A mask with no nodes in it, and none at all, give the same bits."""
    lens, new = SHAPES[shape]
    case = AttentionCase(device, 12)
    args = case.arguments(lens, new, fmt="fp16")
    rows = case.nodes([0] * len(lens), [1] * len(lens) if new is None else new, columns=5)
    for causal in (True, False):
        results = [case.attend(a, causal=causal) for a in (args, args | rows)]
        for plain, masked in zip(*results, strict=True):
            assert np.array_equal(plain.view, masked.view, equal_nan=True)


# Outputs, streams, anything ------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_split_keys(device, fmt):
    """Enough keys for several blocks, each with evicted spans and hidden keys."""
    case = AttentionCase(device, 20)
    evicted, starts = [(600, 37), (0, 0), (3, 40)], [300, 0, 5]
    args = case.arguments(
        [1300, 5, 700], fmt=fmt, heads=(2, 1), page_size=16, evicted=evicted, key_starts=starts
    ) | case.rope(16, positions=1500)
    case.attend(args, *case.results(args, fmt="fp32"))
    case.attend(args, window=500, sink_tokens=310)


def test_in_a_graph(device):
    """A replay reads the spans, starts, trees and positions that are there then."""
    for fmt, shape in (("fp32", "decode"), ("bf16", "few"), ("bf16", "many")):
        case, args = call_of(
            device, 21, shape, fmt, evicted=True, starts=True, trees=True, rope={"dim": 32},
        )  # fmt: skip
        stream = device.stream()
        case.attend(args, stream=stream)
        out, lse = case.results(args)
        with stream.capture() as graph:
            got = case.issue(args, out, lse, stream=stream)
        for name in ("k_cache", "v_cache"):  # any key may be seen now, so none may be NaN
            view = args[name].view
            view[...] = case.rng.standard_normal(view.shape).astype(view.dtype)
        for _ in range(2):
            args["evicted_lens"].view[...] = case.rng.integers(0, 5, 5) % (
                args["evicted_lens"].view + 1
            )
            args["evicted_starts"].view[...] = case.rng.integers(0, 9, 5)
            args["key_starts"].view[...] = case.rng.integers(0, 6, 5)
            args["tree_positions"].view[...] += 3
            args["tree_mask"].view[...] ^= True
            for arg in args.values():
                if hasattr(arg, "buffer"):
                    arg.buffer.restore()
            device.synchronize()
            graph.launch(stream)
            stream.synchronize()
            case.settle(args, got, out, lse)


def test_without_such_arguments_it_is_paged_attention(device):
    for shape in SHAPES:
        case, args = call_of(device, 22, shape, "bf16")
        (out, lse), (again, lse_again) = case.attend(args), case.results(args)
        arguments = {name: case.to_pass(value) for name, value in args.items()}
        got = attend(**arguments, out=again.array, lse_out=lse_again.array)
        assert got is again.array
        case.settle(args, got, again, lse_again)
        assert np.array_equal(out.view.view(np.uint16), again.view.view(np.uint16))
        assert np.array_equal(lse.view, lse_again.view)


@st.composite
def calls(draw):
    group, heads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    some = st.booleans()
    width = draw(st.sampled_from([16, 24, 32, 33]))
    counts = st.lists(st.integers(0, 45), min_size=len(lens), max_size=len(lens))
    new = None if draw(some) else [draw(st.integers(0, n)) for n in lens]
    dim = 2 * draw(st.integers(1, width // 2))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "seq_lens": lens,
        "query_lens": new,
        "heads": (group * heads, heads),
        "widths": (width, draw(st.sampled_from([8, 16, 21]))),
        "page_size": draw(st.integers(1, 17)),
        "fmt": draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        "evicted": list(zip(draw(counts), draw(counts), strict=True)) if draw(some) else None,
        "key_starts": draw(counts) if draw(some) else None,
        "rope": draw(st.one_of(st.none(), st.fixed_dictionaries(
            {"dim": st.just(dim), "start": st.integers(0, width - dim), "interleaved": some}
        ))),
        "nodes": draw(counts) if draw(some) else None,
        "tail": draw(some),
        "window": draw(st.one_of(st.none(), st.integers(1, 20))),
        "sink_tokens": draw(st.integers(0, 9)),
    }  # fmt: skip


@settings(max_examples=examples(60), deadline=None, database=None)
@given(call=calls())
def test_any_call(device, call):
    case = AttentionCase(device, call.pop("seed"))
    rope, nodes, tail = call.pop("rope"), call.pop("nodes"), call.pop("tail")
    window, sink_tokens = call.pop("window"), call.pop("sink_tokens")
    options = {} if window is None else {"window": window, "sink_tokens": sink_tokens}
    args = case.arguments(**call)
    lens, new = call["seq_lens"], call["query_lens"] or [1] * len(call["seq_lens"])
    if rope:
        args |= case.rope(**rope, positions=30)
    if nodes and sum(new):
        nodes = [0 if n % 3 == 0 else min(max(n, k), max(k, length))
                 for n, k, length in zip(nodes, new, lens, strict=True)]  # fmt: skip
        args |= case.nodes(nodes, new, columns=max(1, *nodes))
        if rope and tail:
            args |= case.tail(nodes, columns=max(1, *nodes), low=-3, high=40)
    case.attend(args, **options)
