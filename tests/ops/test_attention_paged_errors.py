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


# Refused calls: the argument; what is wrong; what is passed; the error; what the message names.

# fmt: off
SPANS = [
    row for name in COUNTS for row in [
        (name, "int64", zeros(np.int64, 2), TypeError, name),
        (name, "int16", zeros(np.int16, 2), TypeError, name),
        (name, "uint32", zeros(np.uint32, 2), TypeError, name),
        (name, "float32", zeros(np.float32, 2), TypeError, name),
        (name, "bool", zeros(np.bool_, 2), TypeError, name),
        (name, "of one", zeros(np.int32, 1), ValueError, name),
        (name, "of three", zeros(np.int32, 3), ValueError, name),
        (name, "column", zeros(np.int32, 2, 1), ValueError, name),
        (name, "row", zeros(np.int32, 1, 2), ValueError, name),
        (name, "no axis", zeros(np.int32), ValueError, name),
        (name, "a number", 3, BOTH, name),
        (name, "list", [0, 0], TypeError, name),
    ]
] + [
    ("evicted_starts", "None", None, ValueError, "evicted_starts"),
    ("evicted_lens", "None", None, ValueError, "evicted_lens"),
]

ROTATION = [
    ("rope_table", "float64", zeros(np.float64, 50, 8), TypeError, "rope_table"),
    ("rope_table", "float16", zeros(np.float16, 50, 8), TypeError, "rope_table"),
    ("rope_table", "int32", zeros(np.int32, 50, 8), TypeError, "rope_table"),
    ("rope_table", "1-D", zeros(np.float32, 50), ValueError, "rope_table"),
    ("rope_table", "3-D", zeros(np.float32, 50, 1, 8), ValueError, "rope_table"),
    ("rope_table", "odd", zeros(np.float32, 50, 7), ValueError, "rope_table"),
    ("rope_table", "no columns", zeros(np.float32, 50, 0), ValueError, "rope_table"),
    ("rope_table", "no rows", zeros(np.float32, 0, 8), ValueError, "rope_table"),
    *(("rope_table", f"{width} rotated", zeros(np.float32, 50, width), ValueError,
       "rope_table|rotary_start") for width in (14, 18, 64)),
    ("rope_table", "strided", zeros(np.float32, 50, 16, cut=lambda a: a[:, ::2]), ValueError,
     "rope_table"),
    ("rope_table", "list", [[1.0, 0.0]], TypeError, "rope_table"),
    *(("rotary_start", repr(bad), bad, ValueError, "rotary_start")
      for bad in (9, 16, -1, -(2**40))),
    *(("rotary_start", repr(bad), bad, TypeError, "rotary_start")
      for bad in (1.0, "4", None, [4], True)),
    *(("interleaved", repr(bad), bad, TypeError, "interleaved")
      for bad in (1, 0, None, "yes", [True])),
]

TREES = [
    ("tree_mask", "None", None, ValueError, "tree_lens|tree_positions"),
    ("tree_positions", "int64", zeros(np.int64, 2, 5), TypeError, "tree_positions"),
    ("tree_positions", "float32", zeros(np.float32, 2, 5), TypeError, "tree_positions"),
    ("tree_positions", "bool", zeros(np.bool_, 2, 5), TypeError, "tree_positions"),
    ("tree_positions", "of one", zeros(np.int32, 1, 5), ValueError, "tree_positions"),
    ("tree_positions", "of three", zeros(np.int32, 3, 5), ValueError, "tree_positions"),
    ("tree_positions", "1-D", zeros(np.int32, 2), ValueError, "tree_positions"),
    ("tree_positions", "3-D", zeros(np.int32, 2, 5, 1), ValueError, "tree_positions"),
    ("tree_positions", "list", [[0]] * 2, TypeError, "tree_positions"),
]

AS_PAGED_ATTENTION = [
    ("window", "0", 0, ValueError, "window"),
    ("sinks", "of KV heads", zeros(np.float32, 2), ValueError, "sinks"),
]

SUMS = [
    ("cu_query_lens", *row, "cu_query_lens") for row in [
        ("int64", zeros(np.int64, 3), TypeError),
        ("of two", zeros(np.int32, 2), ValueError),
        ("column", zeros(np.int32, 3, 1), ValueError),
        ("strided", zeros(np.int32, 6, cut=lambda a: a[::2]), ValueError),
        ("list", [0, 4, 6], TypeError),
    ]
]

REFUSED = SUMS + SPANS + ROTATION + TREES + AS_PAGED_ATTENTION
# fmt: on


@pytest.mark.parametrize(
    ("argument", "value", "error", "name"),
    [pytest.param(argument, *row, id=f"{argument} {what}") for argument, what, *row in REFUSED],
)
def test_refused(device, argument, value, error, name):
    case = AttentionCase(device, 1)
    args = arguments_of(case, valid(case))
    args[argument] = value(case) if callable(value) else value
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
    refused(case, lambda: attend(**args), (ValueError, kv.DeviceError), name)


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
