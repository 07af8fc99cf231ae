"""`paged_attention` and `merge_states` on streams and in graphs."""

from __future__ import annotations

import pytest
from attention_cases import AttentionCase

cases = pytest.mark.parametrize(
    ("fmt", "new"), [("fp32", None), ("bf16", None), ("bf16", [2, 1, 5])], ids=str
)


def upload(device, *args):
    """Bring the mirror of arguments to the device again, at once."""
    for arg in args:
        arg.buffer.restore()
    device.synchronize()


@cases
def test_in_a_graph(device, fmt, new):
    """A replay reads the lengths and tables of that time; captured, nothing runs."""
    case = AttentionCase(device, 3)
    stream = device.stream()
    args = case.arguments([14, 9, 30], new, fmt=fmt, padding=3 if new else 0)
    case.attend(args, stream=stream)
    out, lse = case.results(args)
    with stream.capture() as graph:
        got = case.issue(args, out, lse, stream=stream)
    device.synchronize()
    case.finish({})  # nothing has run yet
    table = args["block_table"].view
    rows, columns = table.shape
    for lens, appended in (
        ([14, 9, 30], new),
        ([30, 1, 0], new and [8, 1, 0]),
        ([2, 13, 29], new and [0, 3, 7]),
        ([0, 0, 5], new and [0, 0, 5]),
        ([36, 14, 3], new and [9, 1, 1]),
    ):
        used = [-(-n // 4) for n in lens]
        order = case.rng.permutation(len(args["k_cache"].view))
        assert sum(used) <= len(order) and max(used) <= columns
        table[...] = 2147480000
        for b in range(rows):
            table[b, : used[b]], order = order[: used[b]], order[used[b] :]
        for name in ("k_cache", "v_cache"):  # any page may be used now, so none may be NaN
            view = args[name].view
            view[...] = case.rng.standard_normal(view.shape).astype(view.dtype)
        args["seq_lens"].view[...] = lens
        if new:
            args["query_lens"].view[...] = appended
            args["query"].view[...] = case.rng.standard_normal(args["query"].view.shape).astype(
                args["query"].view.dtype
            )
        upload(device, *(args[n] for n in args if n != "layout"))
        graph.launch(stream)
        stream.synchronize()
        case.settle(args, got, out, lse)


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
def test_faults_come_with_every_replay(device, new):
    case = AttentionCase(device, 4)
    stream = device.stream()
    args = case.arguments([6, 3, 9], new)
    case.attend(args, stream=stream)
    out, lse = case.results(args)
    with stream.capture() as graph:
        got = case.issue(args, out, lse, stream=stream)
    args["block_table"].view[2, 1] = 88
    upload(device, args["block_table"])
    for _ in range(2):
        graph.launch(stream)
        stream.synchronize()
        case.settle(args, got, out, lse)


@pytest.mark.parametrize("fmt", ["fp32", "fp16"], ids=["by a kernel", "by the last block"])
def test_a_long_decode_in_a_graph(device, fmt):
    """If keys are split over several blocks, what joins them starts afresh with every replay."""
    case = AttentionCase(device, 5)
    stream = device.stream()
    args = case.arguments([1100, 40], fmt=fmt, heads=(2, 1), page_size=16)
    out, lse = case.results(args)
    case.attend(args, stream=stream)
    with stream.capture() as graph:
        got = case.issue(args, out, lse, stream=stream)
    for lens in ([1100, 40], [3, 38], [999, 0], [1100, 40]):
        args["seq_lens"].view[...] = lens
        upload(device, args["seq_lens"])
        graph.launch(stream)
        stream.synchronize()
        case.settle(args, got, out, lse)


@pytest.mark.parametrize("count", [1, 2])
def test_calls_beside_one_another(device, count):
    """Calls of different shapes on streams without waiting: workspaces are not mixed up."""
    case = AttentionCase(device, 6)
    streams = [device.stream() for _ in range(count)]
    long = case.arguments([600, 3], heads=(2, 1), page_size=16)
    short = case.arguments([2, 9, 31], heads=(2, 1), page_size=16)
    longer = case.arguments([340, 300], heads=(2, 1), page_size=16)
    issued = [(args, *case.results(args)) for args in (long, short, long, longer)]
    device.synchronize()
    for i, (args, out, lse) in enumerate(issued):
        case.issue(args, out, lse, stream=streams[i % count])
    for stream in streams:
        stream.synchronize()
    for _, out, lse in issued:  # all are written before the first is looked at
        out.view[...], lse.view[...] = out.live(), lse.live()
    for args, out, lse in issued:
        case.settle(args, out.array, out, lse)
