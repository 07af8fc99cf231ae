"""Which keys a query of `paged_attention` sees: windows, sinks, caps and trees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import from_values

from kvcupy import reference
from kvcupy.testing.tolerances import attention_errors

LENS, NEW = [6, 1, 9, 30], [2, 1, 5, 11]
both = pytest.mark.parametrize("new", [None, NEW], ids=["decode", "append"])
formats = pytest.mark.parametrize("fmt", ["fp32", "bf16"])


# Windows -------------------------------------------------------------------------------------


@pytest.mark.covering
@both
@pytest.mark.parametrize("sink_tokens", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("window", [1, 6, 25])
def test_first_keys_stay_visible(device, new, window, sink_tokens):
    """Each key counts once, also where the first ones are within the window."""
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, (window, sink_tokens))
        case.attend(case.arguments(LENS, new, fmt=fmt), window=window, sink_tokens=sink_tokens)


def test_first_keys_mean_nothing_without_a_window(device):
    """As in a model whose layers share the number, and only some of which have a window."""
    case = AttentionCase(device, 21)
    case.attend(case.arguments(LENS, NEW), sink_tokens=2)


@pytest.mark.parametrize("sink_tokens", [None, 2])
def test_window_without_causality(device, sink_tokens):
    """A lower bound, and no upper one."""
    for fmt, window in itertools.product(("fp32", "bf16"), (1, 3, 12)):
        case = AttentionCase(device, window)
        args = case.arguments(LENS, NEW, fmt=fmt)
        case.attend(args, causal=False, window=window, sink_tokens=sink_tokens)


@pytest.mark.parametrize("sink_tokens", [None, 3])
@pytest.mark.parametrize("new", [None, [2, 1, 7]])
def test_what_has_left_the_window_is_not_read(device, new, sink_tokens):
    """Keys that no query sees may be NaN, and entries of their pages garbage."""
    window, lens = 6, [40, 9, 31]
    gone = [n - (1 if new is None else new[b]) - window + 1 for b, n in enumerate(lens)]
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, 1)
        args = case.arguments(lens, new, fmt=fmt)
        for b, count in enumerate(gone):
            for key in range(sink_tokens or 0, count):
                page = int(args["block_table"].view[b, key // 4])
                for name in ("k_cache", "v_cache"):
                    args[name].view[page, key % 4] = np.nan
        for name in ("k_cache", "v_cache"):
            args[name].buffer.restore()
        case.attend(args, window=window, sink_tokens=sink_tokens)
        for unused in (-1, 2147480000):
            table = args["block_table"].view.copy()
            for b, count in enumerate(gone):
                table[b, -(-(sink_tokens or 0) // 4) : max(count, 0) // 4] = unused
            case.attend(
                {**args, "block_table": case.table(table)}, window=window, sink_tokens=sink_tokens
            )


def test_long_window(device):
    """It starts in the middle of a long context."""
    case = AttentionCase(device, 2)
    args = case.arguments([1500, 700], heads=(2, 1), page_size=16)
    for options in ({"window": 513}, {"window": 100, "sink_tokens": 70}):
        case.attend(args, **options)


# Learned sinks and soft caps -----------------------------------------------------------------


def test_soft_cap_of_large_scores(device):
    """Scores of thousands, whose exponential would overflow."""
    for new in (None, NEW):
        case = AttentionCase(device, 5)
        case.attend(case.arguments(LENS, new, loud=40.0), logits_soft_cap=20.0)


# Trees ---------------------------------------------------------------------------------------


@formats
def test_any_mask(device, fmt):
    """A query may see later tokens and not itself; causality does not matter."""
    for causal in (True, False):
        case = AttentionCase(device, 7)
        args = case.arguments(LENS, NEW, fmt=fmt)
        case.attend(args, tree_mask=case.tree(NEW, any_mask=True), causal=causal)
        nothing = case.place(np.zeros((sum(NEW), 11), bool), "", name="tree_mask")
        case.attend(args, tree_mask=nothing, causal=causal)
        case.attend({**args, "seq_lens": case.slots(NEW, "int32")}, tree_mask=nothing)


def test_tree_of_one_token_each(device):
    for columns in (1, 4):
        case = AttentionCase(device, 8)
        mask = case.place(case.rng.random((4, columns)) < 0.5, "", name="tree_mask")
        case.attend(case.arguments(LENS), tree_mask=mask)


def test_a_chain_is_causal(device):
    """A tree without branches gives what causality gives."""
    case = AttentionCase(device, 10)
    args = case.arguments(LENS, NEW)
    mask = np.concatenate([np.arange(11) <= np.arange(n)[:, None] for n in NEW])
    causal = case.attend(args)
    chain = case.attend(args, tree_mask=case.place(mask, "", name="tree_mask"))
    np.testing.assert_allclose(chain[0].view, causal[0].view, atol=1e-5)
    np.testing.assert_allclose(chain[1].view, causal[1].view, atol=1e-4)


# All at once ---------------------------------------------------------------------------------

EVERYTHING = [
    {"tree": tree, "window": window, "kept": kept, "logits_soft_cap": cap}
    for tree, window, kept, cap in itertools.product(
        (False, True), (None, 4), ("none", "first", "learned"), (None, 8.0)
    )
    if window or kept != "first"
]


@pytest.mark.parametrize("options", EVERYTHING, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_combinations(device, options):
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, 11)
        args = case.arguments(LENS, NEW, fmt=fmt, padding=2)
        chosen = dict(options)
        if chosen.pop("tree"):
            chosen["tree_mask"] = case.tree(NEW, sum(NEW) + 2, 13)
        kept = chosen.pop("kept")
        chosen |= {"first": {"sink_tokens": 2}, "learned": {"sinks": case.sinks(4)}}.get(kept, {})
        case.attend(args, **chosen)


# torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "all", "window", "tree"])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_against_torch(device, fmt, mask):
    """scaled_dot_product_attention in float32, over keys gathered from their pages."""
    torch = pytest.importorskip("torch")
    length, new, heads, group = 37, 9, 2, 3
    case = AttentionCase(device, 12)
    args = case.arguments([length], [new], fmt=fmt, heads=(group * heads, heads), widths=(32, 24))
    i, j = np.arange(new)[:, None] + length - new, np.arange(length)[None]
    tree = case.tree([new])
    seen, options = {
        "causal": (j <= i, {}),
        "all": (j >= 0 * i, {"causal": False}),
        "window": ((j <= i) & (j > i - 11), {"window": 11}),
        "tree": (np.concatenate([np.ones((new, length - new), bool), tree.view], 1),
                 {"tree_mask": tree}),
    }[mask]  # fmt: skip
    out, _ = case.attend(args, **options)
    slots = (args["block_table"].view[0][j[0] // 4].astype(int), j[0] % 4)
    parts = [args["query"].view, *(args[f"{s}_cache"].view[slots] for s in "kv")]
    want = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(p.astype(np.float32)).transpose(0, 1)[None] for p in parts),
        attn_mask=torch.from_numpy(seen), enable_gqa=True,
    )[0].transpose(0, 1).numpy()  # fmt: skip
    views = {name: a.view for name, a in args.items() if not isinstance(a, str)}
    allowed, _ = attention_errors(
        views, reference.decode(from_values(want, fmt), fmt), 0 * i[:, :1]
    )
    got = reference.decode(out.view, fmt)
    assert (np.abs(got - want) <= allowed + 1e-5).all()
