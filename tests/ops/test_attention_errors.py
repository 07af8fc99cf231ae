"""What `paged_attention` rejects before any launch, and what looks wrong but is accepted."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import from_values, refused, repeat_rows

import kvcupy as kv

BOTH = (TypeError, ValueError)


# What rows pass --------------------------------------------------------------------------------


def half(*shape, cut=None):
    return lambda case: case.input("fp16", shape, cut).array


def zeros(dtype, *shape):
    return lambda case: case.device.zeros(shape, dtype)


def ones(fmt, *shape, cut=None):
    return lambda case: case.place(from_values(np.ones(shape), fmt), fmt, cut).array


def part(start, *shape):
    """Elements of the memory that both arguments of a row are cut from."""
    stop = start + int(np.prod(shape))
    return lambda case: case.memory.sub(lambda a: a[start:stop].reshape(shape)).array


def strided(a):
    return a[..., ::2]


def reversed_(a):
    return a[..., ::-1]


def repeated(a):
    return repeat_rows(a, 6)


# Calls that rows change ------------------------------------------------------------------------


def valid(case, cache_fmt="fp16"):
    """All arguments of a valid call: six rows of two sequences, fp16, in caches of eight pages."""
    args = case.arguments([9, 6], [4, 2], fmt="fp16", cache_fmt=cache_fmt, widths=(8, 6), padding=0)
    out, lse = case.results(args)
    return {**args, "out": out, "lse_out": lse}


def valid_without_outputs(case, cache_fmt="fp16"):
    args = valid(case, cache_fmt)
    return {name: value for name, value in args.items() if name not in ("out", "lse_out")}


def valid_beside_memory(case):
    """A call in fp32 without outputs, whose keys are as wide as values, and `part`'s memory."""
    case.memory = case.output("fp32", (40 * 64,))
    args = case.arguments([9, 6], [4, 2], widths=(8, 8))
    assert len(args["k_cache"].view) == 8
    return args


def of_three_sequences(case):
    """A call whose rows are a sequence each: there are no `query_lens`."""
    return case.arguments([9, 6, 0], fmt="fp16")


def in_caches_of(cache_fmt):
    return lambda case: valid(case, cache_fmt)


def arguments_of(case, args):
    return {name: case.to_pass(value) for name, value in args.items()}


# Refused calls ---------------------------------------------------------------------------------

BAD_NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e60)
LENS = "block_table|seq_lens|query_lens"

# What is wrong; what is passed, by argument; the error; the argument that the message names.

# fmt: off
INPUTS = [  # without outputs: they would not fit either
    ("query 2-D", {"query": half(6, 32)}, ValueError, "query"),
    ("query 4-D", {"query": half(6, 4, 1, 8)}, ValueError, "query"),
    ("query wider than keys", {"query": half(6, 4, 9)}, ValueError, "query|k_cache"),
    ("query three heads for two", {"query": half(6, 3, 8)}, ValueError, "query|k_cache"),
    ("query one head for two", {"query": half(6, 1, 8)}, ValueError, "query|k_cache"),
    ("query last axis strided", {"query": half(6, 4, 16, cut=strided)}, ValueError, "query"),
    ("query last axis reversed", {"query": half(6, 4, 8, cut=reversed_)}, ValueError, "query"),
    *((f"query {fmt}", {"query": ones(fmt, 6, 4, 8)}, TypeError, "query")
      for fmt in ("fp8_e4m3", "fp8_e5m2", "int8")),
    *((f"{name} {what}", {name: cache}, ValueError, named)
      for name, width in [("k_cache", 8), ("v_cache", 6)] for what, cache, named in [
        ("3-D", half(32, 2, width), name),
        ("5-D", half(8, 4, 1, 2, width), name),
        ("2-D", half(32, 2 * width), name),
        ("more heads", half(8, 4, 4, width), "k_cache|v_cache"),
        ("more pages", half(9, 4, 2, width), "k_cache|v_cache"),
        ("larger pages", half(8, 5, 2, width), "k_cache|v_cache"),
        ("last axis strided", half(8, 4, 2, 2 * width, cut=strided), name),
        ("last axis reversed", half(8, 4, 2, width, cut=reversed_), name),
    ]),
    ("k_cache wider than queries", {"k_cache": half(8, 4, 2, 9)}, ValueError, "query|k_cache"),
    *((f"{name} {what}", {name: value}, TypeError, name)
      for name, *shape in [("query", 6, 4, 8), ("k_cache", 8, 4, 2, 8), ("v_cache", 8, 4, 2, 6)]
      for what, value in [
        ("float64", zeros(np.float64, *shape)),
        ("untagged", zeros(np.uint16, *shape)),
        ("list", [[[1.0]]]),
        ("None", None),
    ]),
]

LENGTHS_AND_OPTIONS = [
    *((f"{name} {what}", {name: value}, error, named)
      for name, *axis in [("block_table", 3), ("seq_lens",), ("query_lens",)]
      for what, value, error, named in [
        ("float32", zeros(np.float32, 2, *axis), TypeError, name),
        ("uint32", zeros(np.uint32, 2, *axis), TypeError, name),
        ("int16", zeros(np.int16, 2, *axis), TypeError, name),
        ("bool", zeros(np.bool_, 2, *axis), TypeError, name),
        ("list", [[0, 0, 0]] * 2, TypeError, name),
        ("another axis", zeros(np.int32, 2, *axis, 1), ValueError, name),
        ("no axis", zeros(np.int32), ValueError, name),
        ("three sequences", zeros(np.int32, 3, *axis), ValueError, LENS),
        ("one sequence", zeros(np.int32, 1, *axis), ValueError, LENS),
    ]),
    ("block_table 1-D", {"block_table": zeros(np.int32, 6)}, ValueError, "block_table"),
    ("block_table None", {"block_table": None}, TypeError, "block_table"),
    ("seq_lens None", {"seq_lens": None}, TypeError, "seq_lens"),
    ("query_lens None", {"query_lens": None}, ValueError, "query|query_lens|seq_lens"),
    ("layout unknown", {"layout": "NDH"}, ValueError, "layout"),
    ("layout None", {"layout": None}, BOTH, "layout"),
    *((f"{name} {bad}", {name: bad}, ValueError, name)
      for name in ("sm_scale", "logits_soft_cap") for bad in BAD_NUMBERS),
    ("logits_soft_cap negative", {"logits_soft_cap": -3.0}, ValueError, "logits_soft_cap"),
    *((f"{name} {what}", {name: bad}, TypeError, name)
      for name in ("sm_scale", "logits_soft_cap", "window")
      for what, bad in [("string", "3"), ("list", [3])]),
    *((f"window {bad}", {"window": bad}, ValueError, "window") for bad in (0, -1, -(2**40))),
    ("window not whole", {"window": 4.5}, BOTH, "window"),
    ("sink tokens negative", {"sink_tokens": -1, "window": 3}, ValueError, "sink_tokens"),
    ("sink tokens not whole", {"sink_tokens": 1.5}, BOTH, "sink_tokens"),
    ("sink tokens a string", {"sink_tokens": "2"}, BOTH, "sink_tokens"),
    ("sinks a number", {"sinks": 2, "window": 3}, TypeError, "sinks"),
    ("return_lse a number", {"return_lse": 1}, TypeError, "return_lse"),
    ("sinks three for four heads", {"sinks": zeros(np.float32, 3)}, ValueError, "sinks"),
    ("sinks of KV heads", {"sinks": zeros(np.float32, 2)}, ValueError, "sinks"),
    ("sinks 2-D", {"sinks": zeros(np.float32, 1, 4)}, ValueError, "sinks"),
    ("sinks float64", {"sinks": zeros(np.float64, 4)}, TypeError, "sinks"),
    ("sinks float16", {"sinks": zeros(np.float16, 4)}, TypeError, "sinks"),
    ("sinks int32", {"sinks": zeros(np.int32, 4)}, TypeError, "sinks"),
    ("tree_mask float32", {"tree_mask": zeros(np.float32, 6, 4)}, TypeError, "tree_mask"),
    ("tree_mask uint8", {"tree_mask": zeros(np.uint8, 6, 4)}, TypeError, "tree_mask"),
    ("tree_mask int8", {"tree_mask": zeros(np.int8, 6, 4)}, TypeError, "tree_mask"),
    ("tree_mask int32", {"tree_mask": zeros(np.int32, 6, 4)}, TypeError, "tree_mask"),
    ("tree_mask 1-D", {"tree_mask": zeros(np.bool_, 6)}, ValueError, "tree_mask"),
    ("tree_mask 3-D", {"tree_mask": zeros(np.bool_, 6, 4, 1)}, ValueError, "tree_mask"),
    ("tree_mask five rows", {"tree_mask": zeros(np.bool_, 5, 4)}, ValueError, "tree_mask|query"),
    ("tree_mask seven rows", {"tree_mask": zeros(np.bool_, 7, 4)}, ValueError, "tree_mask|query"),
    ("tree_mask list", {"tree_mask": [[True]]}, TypeError, "tree_mask"),
]

OUTPUTS = [
    *((f"out {shape}", {"out": half(*shape)}, ValueError, "out")
      for shape in [(5, 4, 6), (7, 4, 6), (6, 2, 6), (6, 4, 8), (6, 24)]),
    ("out of another format", {"out": ones("bf16", 6, 4, 6)}, BOTH, "out"),
    ("out float64", {"out": zeros(np.float64, 6, 4, 6)}, TypeError, "out"),
    ("out last axis strided", {"out": half(6, 4, 12, cut=strided)}, ValueError, "out"),
    ("out repeated", {"out": half(1, 4, 6, cut=repeated)}, ValueError, "out"),
    ("out list", {"out": [1.0]}, TypeError, "out"),
    *((f"lse_out {shape}", {"lse_out": ones("fp32", *shape)}, ValueError, "lse_out")
      for shape in [(5, 4), (7, 4), (6, 2), (4, 6), (24,), (6, 4, 1)]),
    ("lse_out float64", {"lse_out": zeros(np.float64, 6, 4)}, TypeError, "lse_out"),
    ("lse_out float16", {"lse_out": zeros(np.float16, 6, 4)}, TypeError, "lse_out"),
    ("lse_out int32", {"lse_out": zeros(np.int32, 6, 4)}, TypeError, "lse_out"),
    ("lse_out repeated", {"lse_out": ones("fp32", 1, 4, cut=repeated)}, ValueError, "lse_out"),
]

OVERLAPS = [  # an output shares bytes with an input or the other, whole or by one element
    *((f"{out} over {name}, {start}", {out: part(0, *shape), name: part(start, *other)}, ValueError,
       f"{out}|{name}")
      for out, shape, name, start, other in [
        ("out", (6, 4, 8), "query", 0, (6, 4, 8)),
        ("out", (6, 4, 8), "query", 191, (6, 4, 8)),
        ("out", (6, 4, 8), "k_cache", 188, (8, 4, 2, 8)),
        ("out", (6, 4, 8), "v_cache", 100, (8, 4, 2, 8)),
        ("out", (6, 4, 8), "lse_out", 191, (6, 4)),
        ("out", (6, 4, 8), "sinks", 3, (4,)),
        ("lse_out", (6, 4), "query", 23, (6, 4, 8)),
        ("lse_out", (6, 4), "v_cache", 20, (8, 4, 2, 8)),
        ("lse_out", (6, 4), "sinks", 8, (4,)),
    ]),
]

NO_QUERY_LENS = [
    (f"{rows} rows for three sequences", {"query": half(rows, 4, 16)}, ValueError, f"query|{LENS}")
    for rows in (2, 4)
]

SCALES = [
    *((f"{name} {what}", {name: bad}, error, name)
      for name in ("k_scale", "v_scale") for what, bad, error in [
        ("zero", 0.0, ValueError),
        ("negative", -1.0, ValueError),
        ("nan", float("nan"), ValueError),
        ("inf", float("inf"), ValueError),
        ("string", "1.0", TypeError),
        ("three for two heads", ones("fp32", 3), ValueError),
        ("of query heads", ones("fp32", 4), ValueError),
        ("float64", zeros(np.float64, 2), TypeError),
    ]),
    *((f"{name} {what}", {name: bad, **more}, error, name)
      for name, scale in [("k_scale_cache", "k_scale"), ("v_scale_cache", "v_scale")]
      for what, bad, more, error in [
        ("of four heads", ones("fp32", 32, 4), {}, ValueError),
        ("of 31 slots", ones("fp32", 31, 2), {}, ValueError),
        ("of 33 slots", ones("fp32", 33, 2), {}, ValueError),
        ("1-D", ones("fp32", 64), {}, ValueError),
        ("of pages", ones("fp32", 8, 4, 2), {}, ValueError),
        ("float64", zeros(np.float64, 32, 2), {}, TypeError),
        ("a number", 1.0, {}, TypeError),
        ("beside a scale", ones("fp32", 32, 2), {scale: 2.0}, ValueError),
    ]),
]

SCALES_OF_FLOATS = [
    (f"{name} {what}", {name: scale}, ValueError, name) for name, what, scale in [
        ("k_scale", "a number", 2.0), ("k_scale", "array", ones("fp32", 2)),
        ("v_scale", "a number", 2.0), ("v_scale", "array", ones("fp32", 2)),
        ("k_scale_cache", "array", ones("fp32", 32, 2)),
        ("v_scale_cache", "array", ones("fp32", 32, 2)),
    ]
]

TABLES = [
    (valid_without_outputs, "", INPUTS), (valid, "", LENGTHS_AND_OPTIONS), (valid, "", OUTPUTS),
    (valid_beside_memory, "", OVERLAPS), (of_three_sequences, "", NO_QUERY_LENS),
    (in_caches_of("int8"), "", SCALES),
    *((in_caches_of(fmt), f" of {fmt}", SCALES_OF_FLOATS) for fmt in ("fp32", "fp16", "bf16")),
]
# fmt: on


@pytest.mark.parametrize(
    ("base", "changes", "error", "name"),
    [
        pytest.param(base, *row, id=what + suffix)
        for base, suffix, table in TABLES for what, *row in table
    ],
)  # fmt: skip
def test_refused(device, base, changes, error, name):
    case = AttentionCase(device, 1)
    args = arguments_of(case, base(case))
    args |= {n: value(case) if callable(value) else value for n, value in changes.items()}
    refused(case, lambda: kv.paged_attention(**args), error, name)


ARRAYS = (
    "query", "k_cache", "v_cache", "block_table", "seq_lens", "query_lens", "out", "lse_out",
    "sinks", "tree_mask", "k_scale", "v_scale_cache",
)  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_another_device(device, name):
    case = AttentionCase(device, 13)
    args = valid(case, "int8")
    args |= {"sinks": case.sinks(4), "k_scale": case.place(np.float32([2.0]), "fp32")}
    args["tree_mask"] = case.tree([4, 2])
    args["v_scale_cache"] = case.place(np.ones((32, 2), np.float32), "fp32")
    view = args[name].view
    fmt = args[name].fmt or "bool"
    elsewhere = "cuda:7" if device.kind == "host" else "host"
    args = arguments_of(case, args)
    args[name] = kv.ArrayView(4096, view.shape, view.strides, fmt, elsewhere)
    refused(case, lambda: kv.paged_attention(**args), (ValueError, kv.DeviceError), name)


@pytest.mark.parametrize("output", ["out", "lse_out"])
def test_read_only_outputs_are_refused(device, output):
    case = AttentionCase(device, 8)
    args = arguments_of(case, valid(case))
    if not isinstance(args[output], np.ndarray):
        pytest.skip("this array library has no read-only arrays")
    args[output].flags.writeable = False
    refused(case, lambda: kv.paged_attention(**args), ValueError, output)


def test_arguments_after_the_lengths_are_keywords(device):
    case = AttentionCase(device, 11)
    args = arguments_of(case, case.arguments([9, 6]))
    names = ("query", "k_cache", "v_cache", "block_table", "seq_lens")
    with pytest.raises(TypeError):
        kv.paged_attention(*(args[name] for name in names), args["seq_lens"])
    case.check("", [])


def test_a_rejected_call_leaves_a_capture_intact(device):
    case = AttentionCase(device, 12)
    args = case.arguments([9, 6])
    out, lse = case.results(args)
    stream = device.stream()
    case.attend(args, stream=stream)
    with stream.capture() as graph:
        with pytest.raises(ValueError, match="window"):
            case.issue({**args, "window": 0}, out, lse, stream=stream)
        case.issue(args, out, lse, stream=stream)
    graph.launch(stream)
    stream.synchronize()
    case.settle(args, out.array, out, lse)


# What is accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("cache_fmt", ["fp32", "fp16", "bf16"])
def test_any_cache_may_have_a_scale_of_one(device, cache_fmt, side):
    case = AttentionCase(device, 5)
    case.attend(valid_without_outputs(case, cache_fmt) | {f"{side}_scale": 1.0})


def test_outputs_may_be_adjacent(device):
    case = AttentionCase(device, 7)
    args = case.arguments([9, 6], [4, 2], widths=(8, 8))
    near = case.output("fp32", (6 * 4 * 9,))
    out = near.sub(lambda a: a[:192].reshape(6, 4, 8))
    case.attend(args, out, near.sub(lambda a: a[192:].reshape(6, 4)))


def test_read_only_inputs_are_fine(device):
    case = AttentionCase(device, 9)
    args = valid_without_outputs(case, "int8")
    for arg in args.values():
        if hasattr(arg, "array") and isinstance(arg.array, np.ndarray):
            arg.array.flags.writeable = False
    case.attend(args)


def test_inputs_may_share_memory(device):
    """One cache for keys and values, one array for both lengths."""
    case = AttentionCase(device, 10)
    args = case.arguments([5, 5], [5, 5], widths=(8, 8))
    case.attend({**args, "v_cache": args["k_cache"], "query_lens": args["seq_lens"]})
