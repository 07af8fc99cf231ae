"""`paged_attention` with one new token per sequence, and with several, as a user sees it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import FLOATS, AttentionCase, first_elements
from helpers import POISON_SLOT, as_numpy

import kvcupy as kv
from kvcupy import reference
from kvcupy.config import shared_bytes

# One token per sequence ----------------------------------------------------------------------


@pytest.mark.parametrize("lens", [None, [3, 2]])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_latent(device, fmt, lens):
    """Rows of 576 whose first 512 elements are the values; sixteen query heads share a KV head."""
    case = AttentionCase(device, 3)
    args = case.arguments(
        [19, 6], lens, fmt=fmt, heads=(16, 1), widths=(576, 1), page_size=16, loud=1.5
    )
    latent = args["k_cache"].sub(lambda a: a[:, :, 0])
    args["k_cache"] = latent.sub(lambda a: a[:, :, None, :])
    args["v_cache"] = latent.sub(lambda a: a[:, :, None, :512])
    case.attend(args, sm_scale=192**-0.5)


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("cache_fmt", [None, "int8"])
def test_values_that_end_after_their_keys(device, heads, cache_fmt):
    """Keys that are the first elements of their values."""
    case = AttentionCase(device, 4)
    args = case.arguments(
        [70, 5], fmt="bf16", cache_fmt=cache_fmt, heads=(heads, 1), widths=(512, 1), page_size=16
    )
    args["v_cache"] = args["k_cache"]
    for name in ("query", "k_cache"):
        args[name] = args[name].sub(lambda a: a[..., :128])
    case.attend(args)


@pytest.fixture
def watch_kernels(kernel_sources, monkeypatch):
    """A host device that takes the kernels of an architecture, and the names of those launched."""

    def make(arch):
        device, launched = kernel_sources.device(), set()
        device.arch, device.sm_count, device.shared_bytes = arch, 16, shared_bytes(arch)
        monkeypatch.setattr(kv.config, "_strict_arch", arch)
        launch = device.launch

        def note(function, *arguments):
            launched.add(function.specialisation.kernel.name)
            launch(function, *arguments)

        device.launch = note
        return device, launched

    return make


@pytest.mark.covering
@pytest.mark.parametrize("heads", [17, 32, 64, 100, 128])
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("cache_fmt", [None, "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("how", ["latent", "splits", "two tokens", "sinks", "dynamic"])
@pytest.mark.parametrize("arch", ["host", "sm_80"])
def test_many_heads_share_a_latent(kernel_sources, monkeypatch, heads, fmt, cache_fmt, how, arch):
    """On the host and on sm_80 a tile has 16 and 32 keys."""
    device = kernel_sources.device()
    device.arch, device.sm_count, device.shared_bytes = arch, 16, shared_bytes(arch)
    monkeypatch.setattr(kv.config, "_strict_arch", "sm_86" if arch == "host" else arch)
    case = AttentionCase(device, (9, heads))
    scale = "none" if cache_fmt is None else "dynamic" if how == "dynamic" else "float"
    args = case.arguments(
        [600, 7] if how == "splits" else [41, 2, 0], [2, 1, 0] if how == "two tokens" else None,
        fmt=fmt, cache_fmt=cache_fmt, heads=(heads, 1), widths=(576, 512), page_size=16, loud=1.5,
        scales=(scale, "none"),
    )  # fmt: skip
    args["v_cache"] = args["k_cache"].sub(lambda a: a[..., :512])
    for name in ("scale", "scale_cache"):
        if f"k_{name}" in args:
            args[f"v_{name}"] = args[f"k_{name}"]
    more = {"sinks": case.sinks(heads), "logits_soft_cap": 5.0} if how == "sinks" else {}
    case.attend(args, sm_scale=192**-0.5, **more)


@pytest.mark.covering
@pytest.mark.parametrize("heads", [5, 16, 40])
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "how", ["latent", "pieces", "two tokens", "values elsewhere", "other scales", "narrow"]
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_latents_of_nvfp4(watch_kernels, heads, fmt, how, arch):
    """On sm_80 their scales are decoded by arithmetic."""
    device, launched = watch_kernels(arch)
    case = AttentionCase(device, (11, heads))
    widths = (448, 384) if how == "narrow" else (576, 512)
    args = case.arguments(
        [600, 7] if how == "pieces" else [71, 2, 0], [2, 1, 0] if how == "two tokens" else None,
        fmt=fmt, cache_fmt="nvfp4", heads=(heads, 1), widths=widths, page_size=16, loud=1.5,
        scales=("float", "none"),
    )  # fmt: skip
    args["v_scale"] = args["k_scale"]
    table = args["block_table"].view.copy()
    table[0, 2] = -1
    args["block_table"] = case.table(table)
    if how != "values elsewhere":
        first_scale = 2 if how == "other scales" else 0
        args["v_cache"] = first_elements(args["k_cache"], widths[1], first_scale=first_scale)
    case.attend(args, sm_scale=192**-0.5)
    assert "attention_decode_latent" in launched


@pytest.mark.parametrize("sm_scale", [None, 0.02, 1.0, -0.3])
def test_scale_of_scores(device, sm_scale):
    for lens in (None, [1, 4]):
        case = AttentionCase(device, 4)
        case.attend(case.arguments([9, 14], lens, loud=1.2), sm_scale=sm_scale)


def test_large_scores(device):
    """Scores hundreds apart: weights underflow, and nothing overflows."""
    for lens, seed in itertools.product((None, [3, 5]), range(3)):
        case = AttentionCase(device, (5, seed))
        case.attend(case.arguments([9, 14], lens, loud=12.0))


# Several tokens ------------------------------------------------------------------------------


def test_queries_before_the_first_token(device):
    """They see nothing, unless all queries see all keys."""
    for options in ({}, {"causal": False}, {"window": 2}, {"causal": False, "window": 2}):
        case = AttentionCase(device, 10)
        args = case.arguments([2, 0, 5], [4, 2, 5])
        case.attend(args, **options)
        case.attend(args, sinks=case.sinks(4))


def test_the_result_is_out(device):
    case = AttentionCase(device, 12)
    args = case.arguments([6, 1, 9])
    out, lse = case.results(args)
    assert case.issue(args, out, lse) is out.array
    got = case.issue(args)
    assert type(got) is type(args["query"].array)
    assert as_numpy(device, got, "fp32").dtype == np.float32


@pytest.mark.parametrize("new", [None, [2, 1, 3]])
def test_the_log_sum_exp_is_returned(device, new):
    """It is allocated unless it is passed; rows of no sequence are zero in it."""
    case = AttentionCase(device, 31)
    args = case.arguments([6, 1, 9], new, fmt="bf16", padding=2 if new else 0)
    out, lse = case.results(args)
    case.attend(args, out, lse)
    call = {name: case.to_pass(value) for name, value in args.items()}
    rows = 6 if new else 3
    for passed in ({}, {"out": out.array, "lse_out": lse.array}):
        got = kv.paged_attention(**call, **passed, return_lse=True)
        assert not passed or (got[0] is out.array and got[1] is lse.array)
        for array, want, fmt in zip(got, (out, lse), ("bf16", "fp32"), strict=True):
            values, expected = (as_numpy(device, a, fmt) for a in (array, want.array))
            assert values[:rows].tobytes() == expected[:rows].tobytes()
            assert passed or not values[rows:].any()


# Layouts, strides, index types ---------------------------------------------------------------


def test_sequences_may_share_pages(device):
    case = AttentionCase(device, 20)
    args = case.arguments([9, 9, 9], [2, 3, 1])
    table = args["block_table"].view.copy()
    table[1:, :2] = table[0, :2]
    case.attend({**args, "block_table": case.table(table)})


# Faults --------------------------------------------------------------------------------------


def with_table(case, args, **entries):
    """Change entries of the block table, named like b1_2."""
    table = args["block_table"].view.astype(np.int64)
    for name, value in entries.items():
        table[tuple(int(n) for n in name[1:].split("_"))] = value
    return {**args, "block_table": case.table(table, "int64")}


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
@pytest.mark.parametrize("page", ["end", 1000, POISON_SLOT, 2**31, 2**32 + 1, 2**62])
def test_page_past_the_end(device, page, new):
    """Its keys are not visible, others are."""
    case = AttentionCase(device, 21)
    args = case.arguments([6, 3, 9], new)
    page = len(args["k_cache"].view) if page == "end" else page
    case.attend(with_table(case, args, b0_1=page, b2_0=page))
    case.attend(with_table(case, args, b1_0=page))  # the whole sequence
    case.attend(args)


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
def test_negative_pages_are_no_faults(device, new):
    for page in (-1, -7, -(2**31), -(2**32) + 1, -(2**63)):
        case = AttentionCase(device, 22)
        args = case.arguments([6, 3, 9], new)
        case.attend(with_table(case, args, b0_0=page, b1_0=page, b2_2=page))


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
def test_length_past_the_table(device, new):
    for length in (17, 60):
        case = AttentionCase(device, 23)
        args = case.arguments([6, 16, 9], new)
        width = args["block_table"].view.shape[1]
        args["block_table"] = args["block_table"].sub(lambda a: a[:, :4])
        assert width > 4
        case.attend({**args, "seq_lens": case.slots([6, length, 9], "int32")})


def test_rows_that_do_not_exist(device):
    """The last sequence has more tokens than there are rows, or starts past them."""
    for new, sequence in (([2, 1, 7], 1), ([2, 9, 1], 2)):
        case = AttentionCase(device, (24, sequence))
        args = case.arguments([6, 9, 9], [2, 1, 5])
        args["query_lens"] = case.slots(new, "int32")
        case.attend(args)


def test_negative_lengths_see_nothing(device):
    case = AttentionCase(device, 25)
    for dtype, lowest in (("int32", -(2**31)), ("int64", -(2**63))):
        args = case.arguments([6, 0, 0, 9])
        case.attend({**args, "seq_lens": case.slots([6, -1, lowest, 9], dtype)})


# Anything ------------------------------------------------------------------------------------


def test_exact_where_one_key_is_seen(device):
    """The value itself, rounded once to the format of the query: bitwise from the same format."""
    for fmt in FLOATS:
        case = AttentionCase(device, 26)
        args = case.arguments([1, 1], fmt=fmt, page_size=1)
        out, _ = case.attend(args)
        pages = args["block_table"].view[:, 0]
        want = np.repeat(args["v_cache"].view[pages, 0], 2, axis=1)
        assert np.array_equal(reference.bits_of(out.view, fmt), reference.bits_of(want, fmt))


@pytest.mark.usefixtures("lenient_host")
def test_more_tiles_than_a_grid_takes_in_one_dimension(device):
    """Each sequence has one key, whose value is its number."""
    count = 65537
    numbers = np.arange(count)
    value = device.asarray(numbers.astype(np.float32).reshape(count, 1, 1, 1))
    query, key = device.zeros((count, 1, 1), "fp32"), device.zeros((count, 1, 1, 1), "fp32")
    lengths = device.asarray(np.ones(count, np.int32))
    table = device.asarray(numbers.astype(np.int32).reshape(count, 1))
    out = kv.paged_attention(query, key, value, table, lengths)
    np.testing.assert_array_equal(device.to_numpy(out).ravel(), numbers)


def test_outputs_may_be_adjacent(device):
    case = AttentionCase(device, 7)
    args = case.arguments([9, 6], [4, 2], widths=(8, 8))
    near = case.output("fp32", (6 * 4 * 9,))
    out = near.sub(lambda a: a[:192].reshape(6, 4, 8))
    case.attend(args, out, near.sub(lambda a: a[192:].reshape(6, 4)))


def test_inputs_may_share_memory(device):
    """One cache for keys and values, one array for both lengths."""
    case = AttentionCase(device, 10)
    args = case.arguments([5, 5], [5, 5], widths=(8, 8))
    case.attend({**args, "v_cache": args["k_cache"], "query_lens": args["seq_lens"]})
