"""`merge_states`, alone and with `paged_attention`, by what a user sees of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import FLOATS, AttentionCase
from helpers import from_values

import kvcupy as kv
from kvcupy import reference
from kvcupy.testing.tolerances import attention_errors

INF = np.inf
formats = pytest.mark.parametrize("fmt", FLOATS)
bases = pytest.mark.parametrize("base", ["e", "2"])


def state(case, fmt, shape, *, empty=0.2, cut=None, loud=6.0):
    """Draw outputs (..., Dv) and their logarithms; some empty, with NaN for an output."""
    outs = from_values(case.rng.standard_normal(shape), fmt)
    lses = (case.rng.standard_normal(shape[:-1]) * loud).astype(np.float32)
    nothing = case.rng.random(shape[:-1]) < empty
    lses[nothing] = -INF
    outs[nothing] = from_values(np.nan, fmt)
    return case.place(outs, fmt, cut, name="out_a"), case.place(lses, "fp32", cut, name="lse_a")


def results(case, fmt, shape):
    return case.output(fmt, shape, name="out"), case.output("fp32", shape[:-1], name="lse_out")


# Two -----------------------------------------------------------------------------------------


@pytest.mark.covering
@bases
@formats
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 16, 33, 64, 100, 128, 512])
def test_two(device, fmt, base, width):
    for allocate in (False, True):
        case = AttentionCase(device, width)
        shape = (6, 3, width)
        outputs = (None, None) if allocate else results(case, fmt, shape)
        case.merge(*state(case, fmt, shape), *state(case, fmt, shape), *outputs, base=base)


@formats
def test_many_rows(device, fmt):
    case = AttentionCase(device, 1)
    shape = (300, 5, 24)
    case.merge(*state(case, fmt, shape), *state(case, fmt, shape), *results(case, fmt, shape))


@bases
@formats
def test_empty_states(device, fmt, base):
    """One of them, or both: never NaN, and the other one bit for bit."""
    case = AttentionCase(device, 2)
    shape = (4, 2, 20)
    full, empty = state(case, fmt, shape, empty=0), state(case, fmt, shape, empty=1)
    for pair in itertools.product((full, empty), repeat=2):
        out, lse = results(case, fmt, shape)
        case.merge(*pair[0], *pair[1], out, lse, base=base)
        if pair[0] is not pair[1]:
            assert np.array_equal(
                reference.bits_of(out.view, fmt), reference.bits_of(full[0].view, fmt)
            )
            np.testing.assert_allclose(lse.view, full[1].view, rtol=1e-6)
    zero = reference.decode(out.view, fmt)
    assert not zero.any() and (lse.view == -INF).all()


@bases
def test_far_apart(device, base):
    """Logarithms of hundreds, and their differences: no overflow, no loss."""
    for a, b in ((500.0, 499.0), (-500.0, -501.0), (3e4, -3e4), (-3e38, 3e38), (80.0, -80.0)):
        case = AttentionCase(device, 3)
        shape = (3, 2, 9)
        states = [state(case, "fp32", shape, empty=0) for _ in "ab"]
        for (_, lse), value in zip(states, (a, b), strict=True):
            lse.view[...] = value
            lse.buffer.restore()
        case.merge(*states[0], *states[1], *results(case, "fp32", shape), base=base)


@bases
@pytest.mark.parametrize("strange", [np.nan, INF])
def test_strange_logarithms_are_not_hidden(device, base, strange):
    """Only minus infinity means that nothing was seen."""
    outs = device.asarray(np.ones((2, 1, 4), np.float32))
    some = device.asarray(np.float32([[0.5], [strange]]))
    other = device.asarray(np.float32([[strange], [0.25]]))
    _, lse = kv.merge_states(outs, some, outs, other, lse_base=base)
    assert not np.isfinite(device.to_numpy(lse)).any()


@formats
def test_in_place(device, fmt):
    """Into either state, or the outputs of one and the logarithms of the other."""
    for i, j in itertools.product((0, 1), repeat=2):
        case = AttentionCase(device, 4)
        states = [state(case, fmt, (5, 3, 40)) for _ in "ab"]
        case.merge(*states[0], *states[1], states[i][0], states[j][1])


# Many ----------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@bases
@formats
@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
def test_many(device, fmt, base, count):
    for width in (5, 64):
        case = AttentionCase(device, count)
        shape = (4, 3, width)
        some = state(case, fmt, (count, *shape), empty=0.4)
        case.merge(*some, out=(r := results(case, fmt, shape))[0], lse=r[1], base=base)
        case.merge(*some, base=base)


@formats
@pytest.mark.parametrize(("count", "width"), [(3, 512), (16, 128), (129, 64), (70, 1100), (40, 7)])
def test_a_row_of_several_warps(device, fmt, count, width):
    """Also where its last states saw no key, where none did, and where it is no whole round."""
    case = AttentionCase(device, count)
    outs, lses = state(case, fmt, (count, 3, 2, width), empty=0.3)
    lses.view[:, 0] = -INF
    lses.view[count // 2 :, 1] = -INF
    lses.buffer.restore()
    case.merge(outs, lses, None, None, *results(case, fmt, (3, 2, width)))


def test_results_of_several_warps_do_not_vary(device):
    """Whatever the order of threads: sums are added in order."""
    case = AttentionCase(device, 11)
    some = state(case, "fp32", (128, 2, 2, 512), empty=0.2)
    first, *others = (kv.merge_states(some[0].array, some[1].array, None, None) for _ in range(4))
    for other, a in itertools.product(others, (0, 1)):
        assert device.to_numpy(other[a]).tobytes() == device.to_numpy(first[a]).tobytes()


# With attention ------------------------------------------------------------------------------


def merged_matches(case, whole, parts, args):
    """Compare merged parts with the whole within the errors of all of them."""
    out, lse = whole
    got, got_lse = kv.merge_states(*(a.array for part in parts for a in part))
    views = {name: a.view if hasattr(a, "view") else a for name, a in args.items()}
    allowed, of_lse = attention_errors(views, out.view.astype(float), lse.view.astype(float))
    assert (np.abs(case.device.to_numpy(got) - out.view) <= 3 * allowed).all()
    assert (np.abs(case.device.to_numpy(got_lse) - lse.view) <= 3 * of_lse).all()


def test_two_halves_of_the_keys(device):
    """Attention to the first pages and to the others, merged, is attention to all."""
    case = AttentionCase(device, 8)
    lens, cut = np.array([30, 9, 21]), np.array([16, 4, 20])
    args = case.arguments(lens)
    whole = case.attend(args)
    first = case.attend({**args, "seq_lens": case.slots(cut, "int32")})
    table = np.full_like(args["block_table"].view, 2147480000)
    for b, pages in enumerate(cut // 4):
        table[b, : table.shape[1] - pages] = args["block_table"].view[b, pages:]
    rest = case.attend(
        {**args, "seq_lens": case.slots(lens - cut, "int32"), "block_table": case.table(table)}
    )
    merged_matches(case, whole, (first, rest), args)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 6.0}], ids=str)
def test_cascade(device, options):
    """A shared prefix, attended to once by all queries of a group, and the suffix of each."""
    case = AttentionCase(device, 9)
    prefix, suffixes, new = 24, np.array([7, 1, 12]), [3, 1, 5]
    args = case.arguments(suffixes + prefix, new)
    table = args["block_table"].view.copy()
    table[:, : prefix // 4] = table[0, : prefix // 4]
    args["block_table"] = case.table(table)
    whole = case.attend(args, **options)
    together = {
        "block_table": case.table(table[:1, : prefix // 4]),
        "seq_lens": case.slots([prefix], "int32"), "query_lens": case.slots([sum(new)], "int32"),
    }  # fmt: skip
    shared = case.attend({**args, **together}, causal=False, **options)
    apart = {
        "block_table": case.table(table[:, prefix // 4 :]),
        "seq_lens": case.slots(suffixes, "int32"),
    }
    own = case.attend({**args, **apart}, **options)
    merged_matches(case, whole, (shared, own), args)
