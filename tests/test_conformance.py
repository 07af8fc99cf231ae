"""`kvcupy.testing`: the references conform, and every kind of mistake is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import examples

from kvcupy import reference, testing
from kvcupy.testing import Mismatch, conform, run_case
from kvcupy.testing.arrays import GUARD_BYTES, from_values


def case_of(operation, name):
    (case,) = (c for c in testing.cases([operation]) if c.name == name)
    return case


# References as functions that write their outputs in place -------------------------------------


def apply_rope(query, key, rope_table, positions, *, query_out=None, key_out=None, **options):
    rotated = reference.apply_rope(query, key, rope_table, positions, **options)
    inside = np.atleast_2d((positions >= 0) & (positions < len(rope_table))).all(axis=0)
    targets = (query if query_out is None else query_out, key if key_out is None else key_out)
    for target, rows in zip(targets, rotated, strict=True):
        target[inside] = rows[inside]


def paged_attention(*, out, lse_out=None, batch_invariant=False, **arguments):
    exact, lse, _ = reference.paged_attention(**arguments)
    out[...] = from_values(exact, reference.format_of(out))
    if lse_out is not None:
        lse_out[...] = lse


def merge_states(*, out, lse_out, **states):
    exact, lse = reference.merge_states(**states)
    out[...] = from_values(exact, reference.format_of(out))
    lse_out[...] = lse


def slot_mapping(*, out, **arguments):
    out[...] = reference.slot_mapping(**arguments)


IN_PLACE = {f.__name__: f for f in (apply_rope, paged_attention, merge_states, slot_mapping)}


def plain(operation):
    return IN_PLACE.get(operation) or getattr(reference, operation)


@pytest.mark.parametrize("operation", testing.OPERATIONS)
def test_the_references_conform(operation):
    """They are what the cases compare with, so that this is about the cases: none is impossible."""
    outcomes = conform(operation, plain(operation), device="host", seed=3)
    assert len(outcomes) == len(testing.cases([operation])) >= 4
    assert {str(outcome) for outcome in outcomes if outcome.verdict != "conforms"} == set()


# Mistakes ------------------------------------------------------------------------------------
# `test_verify_faults.py` has one for each device function; these are of each kind.


def with_other(operation, **changes):
    """The operation without some of its arguments (None), or with functions of them instead."""

    def run(**call):
        for name, change in changes.items():
            value = call.pop(name)
            if change is not None:
                call[name] = change(value)
        plain(operation)(**call)

    return run


def then(operation, change):
    """The operation, and what is done to its arguments afterwards."""

    def run(**call):
        plain(operation)(**call)
        change(**call)

    return run


def past_the_end(array):
    """The byte past an array."""
    raw = array.reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(raw[:1], (raw.size + 1,), (1,))[-1:]


def truncate(array):
    return (array.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def times_the_reciprocal(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    rows = [a * (np.float32(1) / s[:, None]) for a, s in ((key, k_scale), (value, v_scale))]
    reference.store_kv(*rows, k_cache, v_cache, slot_mapping)


def tails_read(seq_lens, **arguments):
    page_size = arguments["k_cache"].shape[1]
    paged_attention(seq_lens=-(-seq_lens // page_size) * page_size, **arguments)


def truncated_outputs(out, **arguments):
    out[...] = truncate(reference.paged_attention(**arguments)[0])


def of_the_first_tokens(block_table, seq_lens, append_lens, page_size, out):
    slot_mapping(
        block_table=block_table, seq_lens=append_lens, append_lens=append_lens,
        page_size=page_size, out=out,
    )  # fmt: skip


TOO_FAR = "times what is allowed"
STRAY, MISSING = "should not have been written", "were not written"
MISTAKES = [
    # The mistake, a case that must notice it, and what it must say.
    (with_other("store_kv", slot_mapping=lambda s: np.where(s == 19, 18, s + 1)),
     "store_kv, bf16", STRAY),
    (with_other("store_kv", slot_mapping=lambda s: s[:-1]), "store_kv, bf16", MISSING),
    (with_other("store_kv", layout=None), "store_kv, HND pages", "raised"),
    (with_other("store_kv", slot_mapping=lambda s: s % 20), "store_kv, padding", STRAY),
    (with_other("store_kv", slot_mapping=lambda s: np.minimum(s, 19)), "store_kv, past the end",
     "k_cache"),
    (then("store_kv", lambda v_cache, **_: np.bitwise_xor.at(past_the_end(v_cache), 0, 1)),
     "store_kv, bf16", "wrote outside its arrays"),
    (then("store_kv", lambda key, k_scale, **_: np.divide(key, k_scale, out=key)),
     "store_kv, fp32 to fp8_e4m3, scales", "key: "),
    (with_other("store_kv", key=truncate, value=truncate), "store_kv, fp32 to bf16",
     "have another value"),
    (times_the_reciprocal, "store_kv, fp32 to int8, scales by head", "have another value"),
    (with_other("store_kv", k_scale_cache=np.copy), "store_kv, bf16 to fp8_e4m3, scales by row",
     "k_scale_cache: "),
    (with_other("apply_rope", rope_table=lambda t: t.astype(np.float16).astype(np.float32)),
     "apply_rope, bf16", TOO_FAR),
    (then("apply_rope", lambda key, rope_table, **_: key[..., rope_table.shape[1] :].fill(0)),
     "apply_rope, a part of each head", "key: "),
    (with_other("paged_attention", window=lambda w: w + 1), "paged_attention, decode, window",
     TOO_FAR),
    (with_other("paged_attention", sinks=None), "paged_attention, decode, learned sinks", TOO_FAR),
    (tails_read, "paged_attention, decode, poisoned tails", "got nan"),
    (then("paged_attention", lambda lse_out, **_: np.divide(lse_out, np.log(2), out=lse_out)),
     "paged_attention, decode, lse", "lse_out: "),
    (truncated_outputs, "paged_attention, decode", TOO_FAR),
    (then("merge_states", lambda out, lse_out, **_: out.__setitem__(np.isneginf(lse_out), 1e-3)),
     "merge_states, neither saw a key", "within 0.0"),
    (with_other("copy_pages", cache=lambda c: c[0]), "copy_pages, K and V", MISSING),
    (with_other("shift_pages", delta=np.abs), "shift_pages, a delta for each page", TOO_FAR),
    (of_the_first_tokens, "slot_mapping, ragged", "out: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "where", "text"), MISTAKES, ids=[f"{i}-{w}" for i, (_, w, _) in enumerate(MISTAKES)]
)
def test_a_mistake_is_noticed(mistake, where, text):
    outcome = run_case(case_of(*where.split(", ", 1)), mistake, device="host")
    assert outcome.failed and text in str(outcome), outcome


def test_every_canary_is_looked_at(device):
    for change in (0, GUARD_BYTES - 1, -GUARD_BYTES, -1):
        arguments = testing.Arguments(device, seed=abs(change))
        cache = arguments.output("bf16", (4, 2, 8), name="cache")
        arguments.check_buffers()
        with cache.buffer.opened():
            cache.buffer.raw[change] ^= 1
        with pytest.raises(Mismatch, match="canary"):
            arguments.check_buffers()


def test_faults_are_compared():
    """kvcupy records indices past the end; that it does not differs."""
    case = case_of("store_kv", "past the end")
    outcome = run_case(case, reference.store_kv, device="host", records_faults=True)
    assert outcome.verdict == "differs" and "recorded none" in outcome.detail


def test_what_a_function_does_not_take_is_not_supported():
    def store(key, value, k_cache, v_cache, slot_mapping):
        reference.store_kv(key, value, k_cache, v_cache, slot_mapping)

    outcomes = conform("store_kv", store, device="host")
    reasons = {o.case: o.detail for o in outcomes if o.verdict == "not supported"}
    assert reasons["a sink slot"] == "it takes no skip_slot"
    assert "bf16" not in reasons and not any(outcome.failed for outcome in outcomes)


def test_require_lists_all_that_fails():
    testing.require("slot_mapping", slot_mapping, device="host")
    with pytest.raises(Mismatch, match=r"(?s)a token per sequence: differs.*poisoned table: diff"):
        testing.require("slot_mapping", of_the_first_tokens, device="host")


def test_an_operation_that_is_none():
    with pytest.raises(ValueError, match=r"operations: expected .* got 'frob'"):
        testing.cases(["frob"])


@pytest.mark.parametrize("operation", testing.OPERATIONS)
def test_seeds_draw_other_arguments(operation, device):
    case = testing.cases([operation])[0]
    drawn = []
    for seed in range(1, 2 + examples(8)):
        arguments = testing.Arguments(device, seed)
        case.build(arguments)
        drawn.append(b"".join(buffer.want.tobytes() for buffer in arguments.buffers))
    assert len(set(drawn)) == len(drawn) > 1
