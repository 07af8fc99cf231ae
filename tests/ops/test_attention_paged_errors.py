"""What `attend` refuses beyond what `paged_attention` does, before any launch."""

from __future__ import annotations

import re

import numpy as np
import pytest
from attention_cases import AttentionCase, attend
from helpers import refused
from test_refusals import changes_of

import kvcupy as kv

BOTH = (TypeError, ValueError)
COUNTS = ("evicted_starts", "evicted_lens", "key_starts", "tree_lens")
ARRAYS = (*COUNTS, "cu_query_lens", "rope_table", "tree_positions")
ACCEPTED = {"rope_table": r"axis 0 of \d+", "tree_positions": r"axis 1 of \d+"}
"""Tables of another length, and any number of columns."""


def valid(case, name=""):
    """Return a valid call: six rows of two sequences, eight of sixteen elements rotated."""
    args = case.arguments(
        [9, 6], [4, 2], fmt="fp16", evicted=[(2, 1), (0, 3)], key_starts=[1, 0], widths=(16, 8)
    )
    args |= case.rope(8, start=4) | case.nodes([5, 2], [4, 2]) | case.tail([5, 2])
    if name == "cu_query_lens":
        args[name] = case.slots([0, 4, 6], "int32")
        del args["query_lens"]
    out, lse = case.results(args)
    return {**args, "out": out, "lse_out": lse}


def arguments_of(case, args):
    return {name: case.to_pass(value) for name, value in args.items()}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_do_not_fit(device, name):
    """Their dtype, the size of each axis, the number of axes, strides, or that they are arrays."""
    case = AttentionCase(device, 1)
    args = arguments_of(case, valid(case, name))
    wrong = [*changes_of(args[name], device), ("a number", 3, BOTH)]
    if name != "rope_table":
        wrong.append(("int64", device.zeros(args[name].shape, np.int64), TypeError))
    if name == "cu_query_lens":
        wrong.append(("strided", device.zeros(6, np.int32)[::2], ValueError))
    for what, array, error in wrong:
        if not re.fullmatch(ACCEPTED.get(name, ""), what):
            refused(case, lambda array=array: attend(**args | {name: array}), error, name)


@pytest.mark.parametrize("name", ARRAYS)
def test_the_valid_call_is_valid(device, name):
    case = AttentionCase(device, 2)
    args = arguments_of(case, valid(case, name))
    attend(**args)
    kv.check_faults(device)


def zeros(dtype, *shape):
    return lambda case: case.device.zeros(shape, dtype)


# The argument, what is passed, the error, and what the message names.
OPTIONS = [
    *((name, None, ValueError, name) for name in ("evicted_starts", "evicted_lens")),
    ("tree_mask", None, ValueError, "tree_lens|tree_positions"),
    *(("rope_table", zeros(np.float32, 50, width), ValueError, "rope_table|rotary_start")
      for width in (0, 14, 18, 64)),
    ("rope_table", zeros(np.float32, 0, 8), ValueError, "rope_table"),
    *(("rotary_start", bad, ValueError, "rotary_start") for bad in (9, 16, -1, -(2**40))),
    *(("rotary_start", bad, TypeError, "rotary_start") for bad in (1.0, "4", None, [4], True)),
    *(("interleaved", bad, TypeError, "interleaved") for bad in (1, 0, None, "yes", [True])),
    ("window", 0, ValueError, "window"),
    ("sinks", zeros(np.float32, 2), ValueError, "sinks"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value", "error", "name"),
    [pytest.param(*row, id=f"{row[0]} {i}") for i, row in enumerate(OPTIONS)],
)
def test_refused(device, argument, value, error, name):
    case = AttentionCase(device, 1)
    args = arguments_of(case, valid(case))
    args[argument] = value(case) if callable(value) else value
    refused(case, lambda: attend(**args), error, name)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_another_device(device, name):
    case = AttentionCase(device, 3)
    args = valid(case, name)
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
