"""`paged_attention` with one new token per sequence, and with several, as a user sees it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import ARRANGEMENTS, FLOATS, QUERY_VIEWS, AttentionCase, first_elements
from gather_cases import as_numpy
from helpers import POISON_SLOT, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy import reference
from kvcupy.config import shared_bytes

RAGGED = [5, 0, 1, 3, 4, 9, 8, 13]
"""In pages of four slots: empty, one token, and around one and more full pages."""


# One token per sequence ----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 128])
@pytest.mark.parametrize("fmt", FLOATS)
def test_ragged_lengths(device, fmt, page_size):
    """Lengths around the ends of pages."""
    case = AttentionCase(device, page_size)
    lens = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 1]
    case.attend(case.arguments(lens, fmt=fmt, page_size=page_size))


@pytest.mark.parametrize("batch", [1, 2, 7, 17, 40])
def test_batches(device, batch):
    case = AttentionCase(device, batch)
    case.attend(case.arguments(np.resize(RAGGED, batch), heads=(2, 1)))


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_long_context(device, fmt):
    """Longer than any tile, beside short sequences."""
    case = AttentionCase(device, 1)
    case.attend(case.arguments([4096, 3, 517], fmt=fmt, heads=(2, 1), page_size=16))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_query_heads_share_a_kv_head(device, fmt, group):
    case = AttentionCase(device, group)
    case.attend(case.arguments([6, 3, 21], fmt=fmt, heads=(2 * group, 2)))


@pytest.mark.parametrize("width", [1, 2, 5, 16, 64, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_widths(device, fmt, width):
    case = AttentionCase(device, width)
    case.attend(case.arguments([7, 22], fmt=fmt, heads=(2, 1), widths=(width, width)))


@pytest.mark.parametrize("widths", [(16, 24), (24, 16), (7, 64), (128, 3), (192, 128), (1, 2)])
@pytest.mark.parametrize("lens", [None, [2, 1, 5]])
def test_values_of_another_width(device, widths, lens):
    case = AttentionCase(device, 2)
    case.attend(case.arguments([7, 3, 12], lens, fmt="fp16", widths=widths))


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

APPENDED = [
    ([5, 9], [5, 9]),  # first chunks
    ([12, 30, 7], [3, 1, 7]),  # a few appended
    ([0, 6, 0, 4, 9], [0, 0, 0, 4, 1]),
    ([17, 40], [17, 17]),
    ([64, 70], [64, 1]),
    ([65], [65]),
    ([21, 21, 21], [1, 1, 1]),
]


@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize(("lens", "new"), APPENDED, ids=str)
def test_appended_tokens(device, lens, new, fmt):
    case = AttentionCase(device, 6)
    heads = (2, 1) if sum(new) > 40 else (4, 2)
    case.attend(case.arguments(lens, new, fmt=fmt, heads=heads), causal=sum(new) % 2 == 0)
    case.attend(case.arguments(lens, new, fmt=fmt, heads=heads))


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_a_long_chunk(device, fmt):
    case = AttentionCase(device, 7)
    case.attend(case.arguments([260, 9], [200, 3], fmt=fmt, heads=(1, 1), page_size=16))


@pytest.mark.parametrize("page_size", [1, 2, 3, 64, 128])
def test_appended_tokens_in_pages_of_any_size(device, page_size):
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, page_size)
        case.attend(case.arguments([19, page_size, 70], [17, 1, 3], fmt=fmt, page_size=page_size))


@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("width", [5, 64, 100, 128])
def test_appended_tokens_of_many_shapes(device, width, group):
    case = AttentionCase(device, (8, width))
    case.attend(
        case.arguments([19, 6], [17, 2], fmt="bf16", heads=(group, 1), widths=(width, width))
    )


def test_more_rows_than_tokens(device):
    """Rows past the last sequence are neither read nor written; zero in an allocated output."""
    for fmt, allocate in itertools.product(("fp32", "bf16"), (False, True)):
        case = AttentionCase(device, 9)
        args = case.arguments([7, 3, 5], [2, 0, 4], fmt=fmt, padding=5)
        case.attend(args, **({"out": None} if allocate else {}))


def test_queries_before_the_first_token(device):
    """They see nothing, unless all queries see all keys."""
    for options in ({}, {"causal": False}, {"window": 2}, {"causal": False, "window": 2}):
        case = AttentionCase(device, 10)
        args = case.arguments([2, 0, 5], [4, 2, 5])
        case.attend(args, **options)
        case.attend(args, sinks=case.sinks(4))


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
def test_with_and_without_logarithms(device, new):
    for out, lse in itertools.product((None, "placed"), repeat=2):
        case = AttentionCase(device, 11)
        case.attend(case.arguments([6, 1, 9], new, fmt="bf16"), out, lse)


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


def test_nothing_to_do(device):
    """No sequences, no rows, no table, no pages."""
    case = AttentionCase(device, 13)
    case.attend(case.arguments([], []))
    case.attend(case.arguments([]), None)
    case.attend(case.arguments([5, 3], [0, 0]))
    case.attend(case.arguments([5, 3], [0, 0], padding=2))
    args = case.arguments([0, 0])
    case.attend({**args, "block_table": args["block_table"].sub(lambda a: a[:, :0])})
    none = {f"{s}_cache": args[f"{s}_cache"].sub(lambda a: a[:0]) for s in "kv"}
    case.attend({**args, **none})


# Layouts, strides, index types ---------------------------------------------------------------


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_arrangements_of_caches(device, how, new):
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, 14)
        case.attend(case.arguments([6, 1, 9], new, fmt=fmt, how=how, page_size=3))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_views_of_pools(device, layout):
    case = AttentionCase(device, 15)
    args = case.arguments([6, 1, 9], [2, 1, 5], widths=(8, 6))
    pages, size, heads, width = args["k_cache"].view.shape
    pool = kv.KVPool(pages, size, 3, heads, width, v_head_dim=6, dtype="fp32", layout=layout,
                     device=device)  # fmt: skip
    for layer in range(3):
        for view, name in ((pool.k(layer), "k_cache"), (pool.v(layer), "v_cache")):
            content = args[name].view if layer == 1 else np.full(view.shape, np.nan, np.float32)
            view[...] = device.asarray(content)
    out, lse = case.results(args)
    arguments = {name: case.to_pass(value) for name, value in args.items()}
    arguments |= {"k_cache": pool.k(1), "v_cache": pool.v(1)}
    got = kv.paged_attention(**arguments, out=out.array, lse_out=lse.array)
    case.settle(args, got, out, lse)


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
@pytest.mark.parametrize("how", QUERY_VIEWS)
def test_strided_queries(device, how, new):
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, 16)
        case.attend(case.arguments([6, 1, 9], new, fmt=fmt, query_how=how))


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
def test_strided_results(device, new):
    for store, cut, lse_store, lse_cut in (
        ((8, 9, 16), lambda a: a[:, 2:6], (8, 7), lambda a: a[:, 3:]),
        ((8, 4, 21), lambda a: a[::-1, :, 3:19], (16, 4), lambda a: a[::2]),
        ((4, 8, 16), lambda a: a.transpose(1, 0, 2), (8, 4), lambda a: a[::-1]),
    ):
        case = AttentionCase(device, 17)
        args = case.arguments([6, 1, 9] if new else [6, 1, 9, 4, 0, 2, 3, 12], new, fmt="bf16")
        out = case.output("bf16", store, cut, name="out")
        case.attend(args, out, case.output("fp32", lse_store, lse_cut, name="lse_out"))


@pytest.mark.parametrize("misalign", [1, 2, 3, 4])
def test_alignment(device, misalign):
    """Elements need only be aligned to their size."""
    for fmt, new in itertools.product(("fp32", "bf16"), (None, [2, 1])):
        case = AttentionCase(device, 18)
        args = case.arguments([6, 9], new, fmt=fmt, widths=(64, 64))
        for name in ("query", "k_cache", "v_cache"):
            args[name] = case.place(args[name].view, fmt, misalign=misalign, name=name)
        out = case.output(fmt, (len(args["query"].view), 4, 64), misalign=misalign)
        case.attend(args, out, "placed")


@pytest.mark.parametrize("new", [None, [2, 1, 5]])
def test_index_types_and_strides(device, new):
    for index, table_how, step in (
        (("int64", "int32"), "plain", 1),
        (("int32", "int64"), "rows apart", 2),
        (("int64", "int64"), "strided", -1),
        (("int32", "int32"), "strided", 3),
    ):
        case = AttentionCase(device, 19)
        case.attend(case.arguments([6, 1, 9], new, index=index, table_how=table_how, step=step))


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


@st.composite
def attention_calls(draw):
    group, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    decode = draw(st.booleans())
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "seq_lens": lens,
        "query_lens": None if decode else [draw(st.integers(0, min(n, 9))) for n in lens],
        "heads": (group * heads, heads),
        "widths": (draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        "page_size": draw(st.integers(1, 9)),
        "how": draw(st.sampled_from(["NHD", "HND", "pages reversed", "wider rows"])),
        "fmt": draw(st.sampled_from(["fp32", "bf16"])),
        "padding": 0 if decode else draw(st.integers(0, 3)),
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.integers(1, 12))),
        "sinks": draw(st.sampled_from(["no", "learned", 1, 3])),
        "cap": draw(st.sampled_from([None, 4.0, 30.0])),
        "tree": draw(st.booleans()),
    }


@settings(max_examples=examples(60), deadline=None, database=None)
@given(call=attention_calls())
def test_any_call(device, call):
    case = AttentionCase(device, call.pop("seed"))
    options = {"causal": call.pop("causal"), "window": call.pop("window")}
    options["logits_soft_cap"], sinks = call.pop("cap"), call.pop("sinks")
    if sinks == "learned":
        options["sinks"] = case.sinks(call["heads"][0])
    elif sinks != "no" and options["window"] is not None:
        options["sink_tokens"] = sinks
    tree, query_lens = call.pop("tree"), call.get("query_lens")
    if tree and query_lens and sum(query_lens):
        rows = sum(query_lens) + call["padding"]
        options["tree_mask"] = case.tree(query_lens, rows, max(query_lens) + 2, any_mask=True)
    case.attend(case.arguments(**call), **options)


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
