"""What `paged_attention` rejects before any launch, and what looks wrong but is accepted."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import from_values, refused, repeat_rows

import kvcupy as kv

BOTH = (TypeError, ValueError)


def valid(case, cache_fmt="fp16"):
    """All arguments of a valid call: six rows of two sequences, fp16, in caches of eight pages."""
    args = case.arguments([9, 6], [4, 2], fmt="fp16", cache_fmt=cache_fmt, widths=(8, 6), padding=0)
    out, lse = case.results(args)
    return {**args, "out": out, "lse_out": lse}


def arguments_of(case, args):
    return {name: case.to_pass(value) for name, value in args.items()}


def half(*shape, cut=None):
    return lambda c: c.input("fp16", shape, cut).array


def zeros(dtype, *shape):
    return lambda c: c.device.zeros(shape, dtype)


def floats(fmt, *shape):
    return lambda c: c.place(from_values(np.ones(shape), fmt), fmt).array


def always(value):
    return lambda c: value


def error_cases():
    """Yield (argument, what is passed, how to make it, error, the argument that it names)."""
    yield "query", "2-D", half(6, 32), ValueError, "query"
    yield "query", "4-D", half(6, 4, 1, 8), ValueError, "query"
    yield "query", "wider than keys", half(6, 4, 9), ValueError, "query|k_cache"
    yield "query", "three heads for two", half(6, 3, 8), ValueError, "query|k_cache"
    yield "query", "one head for two", half(6, 1, 8), ValueError, "query|k_cache"
    yield (
        "query",
        "last axis strided",
        half(6, 4, 16, cut=lambda a: a[..., ::2]),
        ValueError,
        "query",
    )
    yield (
        "query",
        "last axis reversed",
        half(6, 4, 8, cut=lambda a: a[..., ::-1]),
        ValueError,
        "query",
    )
    for fmt in ("fp8_e4m3", "fp8_e5m2", "int8"):
        yield "query", fmt, floats(fmt, 6, 4, 8), TypeError, "query"
    for side, width in (("k", 8), ("v", 6)):
        name, any_cache = f"{side}_cache", "k_cache|v_cache"
        yield name, "3-D", half(32, 2, width), ValueError, name
        yield name, "5-D", half(8, 4, 1, 2, width), ValueError, name
        yield name, "2-D", half(32, 2 * width), ValueError, name
        yield name, "more heads", half(8, 4, 4, width), ValueError, any_cache
        yield name, "more pages", half(9, 4, 2, width), ValueError, any_cache
        yield name, "larger pages", half(8, 5, 2, width), ValueError, any_cache
        yield (
            name,
            "last axis strided",
            half(8, 4, 2, 2 * width, cut=lambda a: a[..., ::2]),
            ValueError,
            name,
        )
        yield (
            name,
            "last axis reversed",
            half(8, 4, 2, width, cut=lambda a: a[..., ::-1]),
            ValueError,
            name,
        )
    yield "k_cache", "wider than queries", half(8, 4, 2, 9), ValueError, "query|k_cache"
    for name, shape in (("query", (6, 4, 8)), ("k_cache", (8, 4, 2, 8)), ("v_cache", (8, 4, 2, 6))):
        yield name, "float64", zeros(np.float64, *shape), TypeError, name
        yield name, "untagged", zeros(np.uint16, *shape), TypeError, name
        yield name, "list", always([[[1.0]]]), TypeError, name
        yield name, "None", always(None), TypeError, name
    for name, shape in (("block_table", (2, 3)), ("seq_lens", (2,)), ("query_lens", (2,))):
        lens = "block_table|seq_lens|query_lens"
        for dtype in (np.float32, np.uint32, np.int16, np.bool_):
            yield name, np.dtype(dtype).name, zeros(dtype, *shape), TypeError, name
        yield name, "list", always([[0, 0, 0]] * 2), TypeError, name
        yield name, "another axis", zeros(np.int32, *shape, 1), ValueError, name
        yield name, "no axis", zeros(np.int32), ValueError, name
        yield name, "three sequences", zeros(np.int32, 3, *shape[1:]), ValueError, lens
        yield name, "one sequence", zeros(np.int32, 1, *shape[1:]), ValueError, lens
    yield "block_table", "1-D", zeros(np.int32, 6), ValueError, "block_table"
    yield "block_table", "None", always(None), TypeError, "block_table"
    yield "seq_lens", "None", always(None), TypeError, "seq_lens"
    yield "query_lens", "None", always(None), ValueError, "query|query_lens|seq_lens"
    yield "layout", "unknown", always("NDH"), ValueError, "layout"
    yield "layout", "None", always(None), BOTH, "layout"
    for bad in (float("nan"), float("inf"), float("-inf"), 1e60):
        yield "sm_scale", str(bad), always(bad), ValueError, "sm_scale"
        yield "logits_soft_cap", str(bad), always(bad), ValueError, "logits_soft_cap"
    yield "logits_soft_cap", "negative", always(-3.0), ValueError, "logits_soft_cap"
    for name in ("sm_scale", "logits_soft_cap", "window"):
        yield name, "string", always("3"), TypeError, name
        yield name, "list", always([3]), TypeError, name
    for bad in (0, -1, -(2**40)):
        yield "window", str(bad), always(bad), ValueError, "window"
    yield "window", "not whole", always(4.5), BOTH, "window"
    yield "sinks", "not whole", always(1.5), BOTH, "sinks"
    yield "sinks", "string", always("2"), BOTH, "sinks"
    yield "sinks", "three for four heads", zeros(np.float32, 3), ValueError, "sinks"
    yield "sinks", "of KV heads", zeros(np.float32, 2), ValueError, "sinks"
    yield "sinks", "2-D", zeros(np.float32, 1, 4), ValueError, "sinks"
    for dtype in (np.float64, np.float16, np.int32):
        yield "sinks", np.dtype(dtype).name, zeros(dtype, 4), TypeError, "sinks"
    for dtype in (np.float32, np.uint8, np.int8, np.int32):
        yield "tree_mask", np.dtype(dtype).name, zeros(dtype, 6, 4), TypeError, "tree_mask"
    yield "tree_mask", "1-D", zeros(np.bool_, 6), ValueError, "tree_mask"
    yield "tree_mask", "3-D", zeros(np.bool_, 6, 4, 1), ValueError, "tree_mask"
    yield "tree_mask", "five rows", zeros(np.bool_, 5, 4), ValueError, "tree_mask|query"
    yield "tree_mask", "seven rows", zeros(np.bool_, 7, 4), ValueError, "tree_mask|query"
    yield "tree_mask", "list", always([[True]]), TypeError, "tree_mask"
    for shape in ((5, 4, 6), (7, 4, 6), (6, 2, 6), (6, 4, 8), (6, 24)):
        yield "out", str(shape), half(*shape), ValueError, "out"
    yield "out", "of another format", floats("bf16", 6, 4, 6), BOTH, "out"
    yield "out", "float64", zeros(np.float64, 6, 4, 6), TypeError, "out"
    yield "out", "last axis strided", half(6, 4, 12, cut=lambda a: a[..., ::2]), ValueError, "out"
    yield "out", "stride of zero", half(1, 4, 6, cut=lambda a: repeat_rows(a, 6)), ValueError, "out"
    yield "out", "list", always([1.0]), TypeError, "out"
    for shape in ((5, 4), (7, 4), (6, 2), (4, 6), (24,), (6, 4, 1)):
        yield "lse_out", str(shape), floats("fp32", *shape), ValueError, "lse_out"
    for dtype in (np.float64, np.float16, np.int32):
        yield "lse_out", np.dtype(dtype).name, zeros(dtype, 6, 4), TypeError, "lse_out"
    yield (
        "lse_out", "stride of zero",
        lambda c: c.place(np.ones((1, 4), np.float32), "fp32", lambda a: repeat_rows(a, 6)).array,
        ValueError, "lse_out",
    )  # fmt: skip


ERRORS = list(error_cases())


@pytest.mark.parametrize(
    ("argument", "make", "error", "name"), [(e[0], *e[2:]) for e in ERRORS],
    ids=[f"{e[0]} {e[1]}" for e in ERRORS],
)  # fmt: skip
def test_wrong_arguments(device, argument, make, error, name):
    case = AttentionCase(device, 1)
    args = arguments_of(case, valid(case)) | {argument: make(case)}
    if argument in ("query", "k_cache", "v_cache"):  # the outputs would not fit either
        del args["out"], args["lse_out"]
    refused(case, lambda: kv.paged_attention(**args), error, name)


def test_sinks_are_not_negative(device):
    case = AttentionCase(device, 2)
    args = arguments_of(case, valid(case))
    refused(case, lambda: kv.paged_attention(**args, window=3, sinks=-1), ValueError, "sinks")


def test_without_query_lens_each_row_is_a_sequence(device):
    case = AttentionCase(device, 3)
    args = arguments_of(case, case.arguments([9, 6, 0], fmt="fp16"))
    for rows in (2, 4):
        query = case.input("fp16", (rows, 4, 16)).array
        refused(
            case, lambda query=query: kv.paged_attention(**{**args, "query": query}), ValueError,
            "query|query_lens|seq_lens|block_table",
        )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["query", "k_cache", "v_cache", "block_table", "seq_lens", "query_lens", "out", "lse_out",
     "sinks", "tree_mask", "k_scale", "v_scale_cache"],
)  # fmt: skip
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
    with pytest.raises((ValueError, kv.DeviceError)):
        kv.paged_attention(**args)
    case.check("", [])


BAD_SCALES = {
    "zero": (0.0, ValueError),
    "negative": (-1.0, ValueError),
    "nan": (float("nan"), ValueError),
    "inf": (float("inf"), ValueError),
    "string": ("1.0", TypeError),
    "three for two heads": (np.ones(3, np.float32), ValueError),
    "of query heads": (np.ones(4, np.float32), ValueError),
    "float64": (np.ones(2, np.float64), TypeError),
}


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("bad", BAD_SCALES)
def test_wrong_scales(device, side, bad):
    scale, error = BAD_SCALES[bad]
    case = AttentionCase(device, 4)
    args = arguments_of(case, valid(case, "int8")) | {f"{side}_scale": case.to_pass(scale)}
    refused(case, lambda: kv.paged_attention(**args), error, f"{side}_scale")


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("cache_fmt", ["fp32", "fp16", "bf16"])
def test_scales_belong_to_quantised_caches(device, cache_fmt, side):
    case = AttentionCase(device, 5)
    args = arguments_of(case, valid(case, cache_fmt))
    for name, value in (
        (f"{side}_scale", 2.0),
        (f"{side}_scale", device.asarray(np.float32([2.0, 3.0]))),
        (f"{side}_scale_cache", device.asarray(np.ones((32, 2), np.float32))),
    ):
        call = args | {name: value}
        refused(case, lambda call=call: kv.paged_attention(**call), ValueError, name)
    case.attend(valid_without_outputs(case, cache_fmt) | {f"{side}_scale": 1.0})


def valid_without_outputs(case, cache_fmt="fp16"):
    args = valid(case, cache_fmt)
    return {name: value for name, value in args.items() if name not in ("out", "lse_out")}


@pytest.mark.parametrize("side", "kv")
def test_wrong_scale_caches(device, side):
    case = AttentionCase(device, 6)
    args = arguments_of(case, valid(case, "int8"))
    slots = args["k_cache"].shape[0] * 4
    name = f"{side}_scale_cache"

    def refuse(error, value, **options):
        call = args | {name: value} | options
        refused(case, lambda: kv.paged_attention(**call), error, name)

    for shape in ((slots, 4), (slots - 1, 2), (slots + 1, 2), (2 * slots,), (slots // 4, 4, 2)):
        refuse(ValueError, device.asarray(np.ones(shape, np.float32)))
    refuse(TypeError, device.asarray(np.ones((slots, 2))))
    refuse(TypeError, 1.0)
    good = device.asarray(np.ones((slots, 2), np.float32))
    refuse(ValueError, good, **{f"{side}_scale": 2.0})


# Outputs -------------------------------------------------------------------------------------


def test_outputs_overlap_nothing(device):
    """Neither may share bytes with an input or the other; adjacent memory is accepted."""
    case = AttentionCase(device, 7)
    args = case.arguments([9, 6], [4, 2], widths=(8, 8))
    pages = len(args["k_cache"].view)
    memory = case.output("fp32", (40 * 64,))

    def part(start, *shape):
        size = int(np.prod(shape))
        return memory.sub(lambda a: a[start : start + size].reshape(shape))

    def refuse(names, **options):
        call = arguments_of(case, args | options)
        refused(case, lambda: kv.paged_attention(**call), ValueError, names)

    out = {"out": part(0, 6, 4, 8)}
    refuse("out|query", **out, query=part(0, 6, 4, 8))
    refuse("out|query", **out, query=part(191, 6, 4, 8))
    refuse("out|k_cache", **out, k_cache=part(188, pages, 4, 2, 8))
    refuse("out|v_cache", **out, v_cache=part(100, pages, 4, 2, 8))
    refuse("out|lse_out", **out, lse_out=part(191, 6, 4))
    refuse("out|sinks", **out, sinks=part(3, 4))
    lse = {"lse_out": part(0, 6, 4)}
    refuse("lse_out|query", **lse, query=part(23, 6, 4, 8))
    refuse("lse_out|v_cache", **lse, v_cache=part(20, pages, 4, 2, 8))
    refuse("lse_out|sinks", **lse, sinks=part(8, 4))
    query = case.place(args["query"].view, "fp32")
    near = case.output("fp32", (6 * 4 * 9,))
    case.attend(
        {**args, "query": query}, near.sub(lambda a: a[:192].reshape(6, 4, 8)),
        near.sub(lambda a: a[192:].reshape(6, 4)),
    )  # fmt: skip


@pytest.mark.parametrize("output", ["out", "lse_out"])
def test_read_only_outputs_are_refused(device, output):
    case = AttentionCase(device, 8)
    args = arguments_of(case, valid(case))
    if not isinstance(args[output], np.ndarray):
        pytest.skip("this array library has no read-only arrays")
    args[output].flags.writeable = False
    refused(case, lambda: kv.paged_attention(**args), ValueError, output)


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
