"""`paged_attention` and `merge_states` on streams and in graphs."""

from __future__ import annotations

import pytest
from attention_cases import AttentionCase


def upload(device, *args):
    """Bring the mirror of arguments to the device again, at once."""
    for arg in args:
        arg.buffer.restore()
    device.synchronize()


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
