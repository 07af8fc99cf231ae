"""`kvcupy.testing`: the references and kvcupy conform, and every kind of mistake is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from kvcupy import reference, testing
from kvcupy.testing import Implementation, Mismatch, conform, run_case
from kvcupy.testing.arrays import from_values

CASES = testing.cases()


def case_of(operation, name):
    (case,) = (c for c in testing.cases([operation]) if c.name == name)
    return case


# Plain NumPy implementations, from which the mistakes below are made ---------------------------


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


def slot_mapping(block_table, seq_lens, append_lens, page_size, *, out):
    out[...] = reference.slot_mapping(block_table, seq_lens, append_lens, page_size)


OF_THEIR_OWN = {f.__name__: f for f in (apply_rope, paged_attention, merge_states, slot_mapping)}
PLAIN = {name: OF_THEIR_OWN.get(name, getattr(reference, name)) for name in testing.OPERATIONS}


@pytest.mark.parametrize("operation", testing.OPERATIONS)
def test_the_references_conform(operation):
    """They are what the cases compare with, so that this is about the cases: none is impossible."""
    outcomes = conform(operation, PLAIN[operation], device="host", seed=3)
    assert len(outcomes) == len(testing.cases([operation])) >= 4
    assert {str(outcome) for outcome in outcomes if outcome.verdict != "conforms"} == set()


# Mistakes ------------------------------------------------------------------------------------


def ignoring(operation, *names):
    """The operation without some of its options."""
    plain = PLAIN[operation]
    return lambda **call: plain(**{n: x for n, x in call.items() if n not in names})


def with_other(operation, **changes):
    """The operation with other arguments: values, or functions of the arguments they replace."""
    plain = PLAIN[operation]

    def run(**call):
        others = {n: x(call[n]) if callable(x) else x for n, x in changes.items()}
        plain(**call | others)

    return run


def then(operation, change, **changes):
    """The operation with other arguments, and what is done to its arguments afterwards."""
    plain = with_other(operation, **changes)

    def run(**call):
        plain(**call)
        change(**call)

    return run


def past_the_end(array):
    """The byte past an array."""
    raw = array.reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(raw[:1], (raw.size + 1,), (1,))[-1:]


def raw_key_stored(key, value, k_cache, v_cache, slot_mapping, **rotary):
    reference.store_kv(key, value, k_cache, v_cache, slot_mapping)
    apply_rope(key=key, **rotary)


def tails_read(seq_lens, **arguments):
    page_size = arguments["k_cache"].shape[1]
    paged_attention(seq_lens=-(-seq_lens // page_size) * page_size, **arguments)


def pages_swapped(cache, src_pages, dst_pages):
    reference.copy_pages(cache, dst_pages, src_pages)


def first(arrays):
    return arrays[0]


def negated_sines(table):
    return table * np.repeat(np.float32([1, -1]), table.shape[1] // 2)


TOO_FAR = "times what is allowed"
STRAY, MISSING = "should not have been written", "were not written"
VALUE = "have another value"
MISTAKES = [
    # The mistake, a case that must notice it, and what it must say.
    (with_other("store_kv", slot_mapping=lambda s: np.where(s == 19, 18, s + 1)),
     "store_kv, bf16", STRAY),
    (ignoring("store_kv", "layout"), "store_kv, HND pages", "raised"),
    (with_other("store_kv", slot_mapping=lambda s: s[:-1]), "store_kv, bf16", MISSING),
    (then("store_kv", lambda v_cache, **_: np.bitwise_xor.at(past_the_end(v_cache), 0, 1)),
     "store_kv, bf16", "wrote outside its arrays"),
    (then("store_kv", lambda key, k_scale, **_: np.divide(key, k_scale, out=key)),
     "store_kv, fp32 to fp8_e4m3, scales", "key: "),
    (with_other("store_mla", cache=np.copy), "store_mla, bf16", MISSING),
    (with_other("gather_kv", slots=lambda s: np.maximum(s, 0)), "gather_kv, padding", STRAY),
    (with_other("apply_rope", rope_table=negated_sines), "apply_rope, fp32", TOO_FAR),
    (raw_key_stored, "rope_store_kv, bf16", "k_cache: "),
    (with_other("paged_attention", window=9), "paged_attention, decode, window", TOO_FAR),
    (ignoring("paged_attention", "tree_mask"), "paged_attention, a tree of drafted tokens",
     TOO_FAR),
    (tails_read, "paged_attention, decode, poisoned tails", "got nan"),
    (then("merge_states", lambda out, lse_out, **_: out.__setitem__(np.isneginf(lse_out), 1e-3)),
     "merge_states, neither saw a key", "within 0.0"),
    (pages_swapped, "copy_pages, pages", STRAY),
    (with_other("shift_pages", delta=lambda d: d + 1), "shift_pages, fp8_e4m3", "pool: "),
    (with_other("store_state", caches=first, states=first), "store_state, conv and ssm", MISSING),
    (with_other("gather_state", caches=first, out=first), "gather_state, conv and ssm", MISSING),
    (with_other("update_conv_state", x=np.flip), "update_conv_state, bf16", VALUE),
    (with_other("slot_mapping", seq_lens=lambda n: n + 1), "slot_mapping, ragged", "out: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "where", "text"), MISTAKES, ids=[f"{i}-{w}" for i, (_, w, _) in enumerate(MISTAKES)]
)
def test_a_mistake_is_noticed(mistake, where, text):
    operation, name = where.split(", ", 1)
    broken = Implementation("broken", {operation: mistake})
    outcome = run_case(case_of(operation, name), broken, device="host")
    assert outcome.failed and text in str(outcome), outcome


def test_faults_are_compared():
    """kvcupy records indices past the end; that it does not, or does where none is, differs."""
    for fault, name in ((False, "past the end"), (True, "bf16")):
        own = Implementation("own", PLAIN, has_fault=lambda _, fault=fault: fault)
        outcome = run_case(case_of("store_kv", name), own, device="host")
        assert outcome.verdict == "differs" and "recorded" in outcome.detail


def test_require_lists_all_that_fails():
    testing.require("slot_mapping", slot_mapping, device="host")
    wrong = with_other("slot_mapping", seq_lens=lambda n: n + 1)
    with pytest.raises(Mismatch, match=r"(?s)a token per sequence: differs.*poisoned table: diff"):
        testing.require("slot_mapping", wrong, device="host")
