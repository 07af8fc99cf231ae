"""`paged_attention` and `merge_states` on streams and in graphs."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase
from stream_cases import delay

import kvcupy as kv

cases = pytest.mark.parametrize(
    ("fmt", "new"), [("fp32", None), ("bf16", None), ("bf16", [2, 1, 5])], ids=str
)


def upload(device, *args):
    """Bring the mirror of arguments to the device again, at once."""
    for arg in args:
        arg.buffer.restore()
    device.synchronize()


@cases
def test_explicit_stream(device, fmt, new):
    case = AttentionCase(device, 1)
    case.attend(case.arguments([6, 1, 9], new, fmt=fmt), stream=device.stream())


@cases
def test_in_order_behind_a_slow_producer(device, fmt, new):
    """What is written late is what is attended to; what comes afterwards waits."""
    case = AttentionCase(device, 2)
    stream = device.stream()
    args = case.arguments([6, 1, 9], new, fmt=fmt)
    case.attend(args)
    out, lse = case.results(args)
    after = case.output(fmt, out.view.shape, name="copy of out")
    late = ("query", "k_cache", "v_cache", "block_table", "seq_lens")
    staged = {name: device.asarray(args[name].view.copy()) for name in late}
    before = {name: device.asarray(np.zeros_like(args[name].view)) for name in late}
    for name, array in before.items():
        device.copy(args[name].array, array, stream=stream)
    stream.synchronize()
    delay(stream)
    for name, array in staged.items():
        device.copy(args[name].array, array, stream=stream)
    got = case.issue(args, out, lse, stream=stream)
    device.copy(after.array, out.array, stream=stream)
    stream.synchronize()
    np.copyto(after.view, out.live())
    case.settle(args, got, out, lse)


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


def test_a_long_decode_in_a_graph(device):
    """If keys are split over several blocks, what joins them starts afresh with every replay."""
    case = AttentionCase(device, 5)
    stream = device.stream()
    args = case.arguments([1100, 40], heads=(2, 1), page_size=16)
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


def test_calls_after_one_another(device):
    """Calls of different shapes on one stream without waiting: workspaces are not mixed up."""
    case = AttentionCase(device, 6)
    stream = device.stream()
    long = case.arguments([600, 3], heads=(2, 1), page_size=16)
    short = case.arguments([2, 9, 31], heads=(2, 1), page_size=16)
    issued = []
    for args in (long, short, long):
        out, lse = case.results(args)
        issued.append((args, out, lse))
    device.synchronize()
    for args, out, lse in issued:
        case.issue(args, out, lse, stream=stream)
    stream.synchronize()
    for _, out, lse in issued:
        for arg in (out, lse):  # all are written before the first is looked at
            arg.view[...] = arg.live()
    for args, out, lse in issued:
        case.settle(args, out.array, out, lse)


def test_two_streams(device):
    """At the same time, each with its own sequences."""
    case = AttentionCase(device, 7)
    streams = [device.stream() for _ in range(2)]
    issued = []
    for i in range(4):
        args = case.arguments([300 + 40 * i, 3], heads=(2, 1), page_size=16)
        issued.append((args, *case.results(args)))
    device.synchronize()
    for i, (args, out, lse) in enumerate(issued):
        case.issue(args, out, lse, stream=streams[i % 2])
    for stream in streams:
        stream.synchronize()
    for _, out, lse in issued:
        out.view[...], lse.view[...] = out.live(), lse.live()
    for args, out, lse in issued:
        case.settle(args, out.array, out, lse)


def test_merging_in_a_graph(device):
    case = AttentionCase(device, 8)
    stream = device.stream()
    outs = [case.place(case.rng.standard_normal((5, 3, 8)).astype("f4"), "fp32") for _ in "ab"]
    lses = [case.place(case.rng.standard_normal((5, 3)).astype("f4"), "fp32") for _ in "ab"]
    states = (outs[0], lses[0], outs[1], lses[1])
    out, lse = case.output("fp32", (5, 3, 8)), case.output("fp32", (5, 3))
    case.merge(*states, out, lse, stream=stream)
    with stream.capture() as graph:
        kv.merge_states(*(a.array for a in states), out=out.array, lse_out=lse.array, stream=stream)
    for arg in states:
        arg.view[...] = case.rng.standard_normal(arg.view.shape)
    upload(device, *states)
    graph.launch(stream)
    stream.synchronize()
    replayed = out.live().copy(), lse.live().copy()
    out.view[...], lse.view[...] = replayed
    case.merge(*states, out, lse)  # checks itself, and must give the same bits
    assert np.array_equal(replayed[0], out.view) and np.array_equal(replayed[1], lse.view)
