"""What `attend` refuses beyond what `paged_attention` does, before any launch."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase, attend
from helpers import refused

import kvcupy as kv

BOTH = (TypeError, ValueError)
COUNTS = ("evicted_starts", "evicted_lens", "key_starts", "tree_lens")


def valid(case):
    """Return a valid call: six rows of two sequences, eight of sixteen elements rotated."""
    args = case.arguments(
        [9, 6], [4, 2], fmt="fp16", evicted=[(2, 1), (0, 3)], key_starts=[1, 0], widths=(16, 8)
    )
    args |= case.rope(8, start=4) | case.nodes([5, 2], [4, 2]) | case.tail([5, 2])
    out, lse = case.results(args)
    return {**args, "out": out, "lse_out": lse}


def arguments_of(case, args):
    return {name: case.to_pass(value) for name, value in args.items()}


def zeros(dtype, *shape, cut=None):
    def make(case):
        array = case.device.zeros(shape, dtype)
        return array if cut is None else cut(array)

    return make


def always(value):
    return lambda case: value


def error_cases():
    """Yield (argument, what it is instead, error, what the message names)."""
    for name in COUNTS:
        for dtype in (np.int64, np.int16, np.uint32, np.float32, np.bool_):
            yield name, np.dtype(dtype).name, zeros(dtype, 2), TypeError, name
        for shape in ((1,), (3,), (2, 1), (1, 2), ()):
            yield name, str(shape), zeros(np.int32, *shape), ValueError, name
        yield name, "a number", always(3), BOTH, name
        yield name, "list", always([0, 0]), TypeError, name
    yield "evicted_starts", "None", always(None), ValueError, "evicted_starts"
    yield "evicted_lens", "None", always(None), ValueError, "evicted_lens"
    yield "tree_mask", "None", always(None), ValueError, "tree_lens|tree_positions"
    yield "rope_table", "None", always(None), ValueError, "rope_table|tree_positions"
    for dtype in (np.float64, np.float16, np.int32):
        yield "rope_table", np.dtype(dtype).name, zeros(dtype, 50, 8), TypeError, "rope_table"
    for shape in ((50,), (50, 1, 8), (50, 7), (50, 0), (0, 8)):
        yield "rope_table", str(shape), zeros(np.float32, *shape), ValueError, "rope_table"
    for width in (14, 18, 64):
        yield (
            "rope_table", f"{width} rotated", zeros(np.float32, 50, width), ValueError,
            "rope_table|rotary_start",
        )  # fmt: skip
    yield (
        "rope_table", "last axis strided", zeros(np.float32, 50, 16, cut=lambda a: a[:, ::2]),
        ValueError, "rope_table",
    )  # fmt: skip
    yield "rope_table", "list", always([[1.0, 0.0]]), TypeError, "rope_table"
    for bad in (9, 16, -1, -(2**40)):
        yield "rotary_start", str(bad), always(bad), ValueError, "rotary_start"
    for bad in (1.0, "4", None, [4], True):
        yield "rotary_start", repr(bad), always(bad), TypeError, "rotary_start"
    for bad in (1, 0, None, "yes", [True]):
        yield "interleaved", repr(bad), always(bad), TypeError, "interleaved"
    for dtype in (np.int64, np.float32, np.bool_):
        yield (
            "tree_positions",
            np.dtype(dtype).name,
            zeros(dtype, 2, 5),
            TypeError,
            "tree_positions",
        )
    for shape in ((1, 5), (3, 5), (2,), (2, 5, 1)):
        yield "tree_positions", str(shape), zeros(np.int32, *shape), ValueError, "tree_positions"
    yield "tree_positions", "list", always([[0]] * 2), TypeError, "tree_positions"
    yield "window", "0", always(0), ValueError, "window"  # what paged_attention refuses, too
    yield "sinks", "of KV heads", zeros(np.float32, 2), ValueError, "sinks"


ERRORS = list(error_cases())


@pytest.mark.parametrize(
    ("argument", "make", "error", "name"), [(e[0], *e[2:]) for e in ERRORS],
    ids=[f"{e[0]} {e[1]}" for e in ERRORS],
)  # fmt: skip
def test_wrong_arguments(device, argument, make, error, name):
    case = AttentionCase(device, 1)
    args = arguments_of(case, valid(case)) | {argument: make(case)}
    refused(case, lambda: attend(**args), error, name)


def test_the_valid_call_is_valid(device):
    case = AttentionCase(device, 2)
    args = valid(case)
    case.attend({n: a for n, a in args.items() if n not in ("out", "lse_out")},
                args["out"], args["lse_out"])  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTS, "rope_table", "tree_positions"])
def test_arrays_of_another_device(device, name):
    case = AttentionCase(device, 3)
    args = valid(case)
    view, fmt = args[name].view, args[name].fmt
    args = arguments_of(case, args)
    elsewhere = "cuda:7" if device.kind == "host" else "host"
    args[name] = kv.ArrayView(4096, view.shape, view.strides, fmt, elsewhere)
    with pytest.raises((ValueError, kv.DeviceError)):
        attend(**args)
    case.check("", [])


@pytest.mark.parametrize("name", ["evicted_lens", "tree_lens", "tree_positions", "rope_table"])
def test_outputs_overlap_nothing(device, name):
    """An output shares no byte with an input."""
    case = AttentionCase(device, 4)
    args = arguments_of(case, valid(case))
    shape, kind = args["lse_out"].shape, args[name].dtype
    count = int(np.prod(args[name].shape))
    memory = device.zeros((max(count, 24),), np.float32)
    args[name] = memory[:count].view(kind).reshape(args[name].shape)
    args["lse_out"] = memory[:24].reshape(shape)
    refused(case, lambda: attend(**args), ValueError, "lse_out")


def test_rotation_options_without_a_table_mean_nothing(device):
    case = AttentionCase(device, 5)
    args = case.arguments([9, 6], [4, 2], fmt="fp16")
    case.attend({**args, "interleaved": True, "rotary_start": 1000})
