"""`kvcupy.testing`: the references and kvcupy conform, and every kind of mistake is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import examples

from kvcupy import reference, testing
from kvcupy.testing import Implementation, Mismatch, conform, run_case
from kvcupy.testing.arrays import GUARD_BYTES, from_values
from kvcupy.testing.conformance import own_kernels

CASES = testing.cases()


def case_of(operation, name):
    (case,) = (c for c in testing.cases([operation]) if c.name == name)
    return case


# Plain NumPy implementations, from which the mistakes below are made ---------------------------


def store_kv(key, value, k_cache, v_cache, slot_mapping, **options):
    reference.store_kv(key, value, k_cache, v_cache, slot_mapping, **options)


def store_mla(latent, rope_key, cache, slot_mapping, **options):
    reference.store_mla(latent, rope_key, cache, slot_mapping, **options)


def gather_kv(k_cache, v_cache, slots, **options):
    reference.gather_kv(k_cache, v_cache, slots, **options)


def apply_rope(query, key, rope_table, positions, *, query_out=None, key_out=None, **options):
    rotated = reference.apply_rope(query, key, rope_table, positions, **options)
    inside = np.atleast_2d((positions >= 0) & (positions < len(rope_table))).all(axis=0)
    targets = (query if query_out is None else query_out, key if key_out is None else key_out)
    for target, rows in zip(targets, rotated, strict=True):
        target[inside] = rows[inside]


def rope_store_kv(**arguments):
    reference.rope_store_kv(**arguments)


def paged_attention(*, out, lse_out=None, batch_invariant=False, **arguments):
    exact, lse, _ = reference.paged_attention(**arguments)
    out[...] = from_values(exact, reference.format_of(out))
    if lse_out is not None:
        lse_out[...] = lse


def merge_states(*, out, lse_out, **states):
    exact, lse = reference.merge_states(**states)
    out[...] = from_values(exact, reference.format_of(out))
    lse_out[...] = lse


def copy_pages(cache, src_pages, dst_pages):
    reference.copy_pages(cache, src_pages, dst_pages)


def shift_pages(pool, pages, delta, rope_table, **options):
    reference.shift_pages(pool, pages, delta, rope_table, **options)


def store_state(states, caches, slots, **options):
    reference.store_state(states, caches, slots, **options)


def gather_state(caches, slots, **options):
    reference.gather_state(caches, slots, **options)


def update_conv_state(x, cache, slots, cu_query_lens, **options):
    reference.update_conv_state(x, cache, slots, cu_query_lens, **options)


def slot_mapping(block_table, seq_lens, append_lens, page_size, *, out):
    out[...] = reference.slot_mapping(block_table, seq_lens, append_lens, page_size)


PLAIN = {
    f.__name__: f
    for f in (
        store_kv, store_mla, gather_kv, apply_rope, rope_store_kv, paged_attention, merge_states,
        copy_pages, shift_pages, store_state, gather_state, update_conv_state, slot_mapping,
    )
}  # fmt: skip


@pytest.mark.parametrize("operation", testing.OPERATIONS)
def test_the_references_conform(operation):
    """They are what the cases compare with, so that this is about the cases: none is impossible."""
    outcomes = conform(operation, PLAIN[operation], device="host", seed=3)
    assert len(outcomes) == len(testing.cases([operation])) >= 4
    assert {str(outcome) for outcome in outcomes if outcome.verdict != "conforms"} == set()


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation}, {case.name}")
def test_kvcupy_conforms(device, case):
    outcome = run_case(case, own_kernels(), device=device)
    assert outcome.verdict == "conforms", outcome.detail


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


def truncate(array):
    return (array.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def all_rows(key, value, k_cache, v_cache, slot_mapping):
    unused = np.setdiff1d(np.arange(20), slot_mapping)[: len(key) - len(slot_mapping)]
    store_kv(key, value, k_cache, v_cache, np.concatenate([slot_mapping, unused]))


def times_the_reciprocal(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    rows = [a * (np.float32(1) / s[:, None]) for a, s in ((key, k_scale), (value, v_scale))]
    store_kv(*rows, k_cache, v_cache, slot_mapping)


def parts_swapped(latent, rope_key, cache, slot_mapping):
    store_mla(rope_key, latent, cache, slot_mapping)


def rotated_in_place(query, key, rope_table, positions, query_out, key_out):
    apply_rope(query, key, rope_table, positions)
    query_out[...], key_out[...] = query, key


def raw_key_stored(key, value, k_cache, v_cache, slot_mapping, **rotary):
    store_kv(key, value, k_cache, v_cache, slot_mapping)
    apply_rope(key=key, **rotary)


def heads_interleaved(query, out, **arguments):
    group = query.shape[1] // arguments["k_cache"].shape[2]
    order = np.arange(query.shape[1]).reshape(-1, group).T.reshape(-1)
    paged_attention(query=query[:, order], out=out, **arguments)


def tails_read(seq_lens, **arguments):
    page_size = arguments["k_cache"].shape[1]
    paged_attention(seq_lens=-(-seq_lens // page_size) * page_size, **arguments)


def truncated_outputs(out, **arguments):
    out[...] = truncate(reference.paged_attention(**arguments)[0])


def pages_swapped(cache, src_pages, dst_pages):
    copy_pages(cache, dst_pages, src_pages)


def first(arrays):
    return arrays[0]


def old_inputs_dropped(cache, slots, cu_query_lens, **arguments):
    cache[slots[np.diff(cu_query_lens) > 0]] = 0
    update_conv_state(cache=cache, slots=slots, cu_query_lens=cu_query_lens, **arguments)


def slots_of_the_first_tokens(block_table, seq_lens, append_lens, page_size, out):
    slot_mapping(block_table, append_lens, append_lens, page_size, out=out)


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
    (all_rows, "store_kv, more rows than slots", STRAY),
    (with_other("store_kv", slot_mapping=lambda s: s % 20), "store_kv, padding", STRAY),
    (with_other("store_kv", slot_mapping=lambda s: np.minimum(s, 19)), "store_kv, past the end",
     "k_cache"),
    (ignoring("store_kv", "skip_slot"), "store_kv, a sink slot", STRAY),
    (then("store_kv", lambda v_cache, **_: np.bitwise_xor.at(past_the_end(v_cache), 0, 1)),
     "store_kv, bf16", "wrote outside its arrays"),
    (then("store_kv", lambda key, k_scale, **_: np.divide(key, k_scale, out=key)),
     "store_kv, fp32 to fp8_e4m3, scales", "key: "),
    (with_other("store_kv", key=truncate, value=truncate), "store_kv, fp32 to bf16", VALUE),
    (times_the_reciprocal, "store_kv, fp32 to int8, scales by head", VALUE),
    (with_other("store_kv", k_scale_cache=np.copy), "store_kv, bf16 to fp8_e4m3, scales by row",
     "k_scale_cache: "),
    (parts_swapped, "store_mla, bf16", VALUE),
    (with_other("gather_kv", slots=lambda s: np.maximum(s, 0)), "gather_kv, padding", STRAY),
    (ignoring("gather_kv", "v_scale"), "gather_kv, fp8_e4m3 to bf16, scales", "v_out: "),
    (with_other("apply_rope", rope_table=negated_sines), "apply_rope, fp32", TOO_FAR),
    (ignoring("apply_rope", "interleaved"), "apply_rope, fp16, interleaved", TOO_FAR),
    (with_other("apply_rope", rope_table=lambda t: t.astype(np.float16).astype(np.float32)),
     "apply_rope, bf16", TOO_FAR),
    (then("apply_rope", lambda key, rope_table, **_: key[..., rope_table.shape[1] :].fill(0)),
     "apply_rope, a part of each head", "key: "),
    (rotated_in_place, "apply_rope, to outputs", "query: "),
    (raw_key_stored, "rope_store_kv, bf16", "k_cache: "),
    (with_other("paged_attention", causal=False), "paged_attention, prefill", TOO_FAR),
    (ignoring("paged_attention", "causal"), "paged_attention, prefill, not causal", TOO_FAR),
    (ignoring("paged_attention", "window"), "paged_attention, decode, window", TOO_FAR),
    (with_other("paged_attention", window=9), "paged_attention, decode, window", TOO_FAR),
    (ignoring("paged_attention", "sink_tokens"), "paged_attention, decode, window and first keys",
     TOO_FAR),
    (ignoring("paged_attention", "sinks"), "paged_attention, decode, learned sinks", TOO_FAR),
    (ignoring("paged_attention", "logits_soft_cap"), "paged_attention, decode, soft cap and scale",
     "times what"),
    (ignoring("paged_attention", "sm_scale"), "paged_attention, decode, soft cap and scale",
     TOO_FAR),
    (ignoring("paged_attention", "tree_mask"), "paged_attention, a tree of drafted tokens",
     TOO_FAR),
    (ignoring("paged_attention", "v_scale"), "paged_attention, decode, fp8_e4m3 cache", TOO_FAR),
    (heads_interleaved, "paged_attention, decode", TOO_FAR),
    (tails_read, "paged_attention, decode, poisoned tails", "got nan"),
    (then("paged_attention", lambda lse_out, **_: np.divide(lse_out, np.log(2), out=lse_out)),
     "paged_attention, decode, lse", "lse_out: "),
    (truncated_outputs, "paged_attention, decode", TOO_FAR),
    (then("merge_states", lambda out, lse_out, **_: out.__setitem__(np.isneginf(lse_out), 1e-3)),
     "merge_states, neither saw a key", "within 0.0"),
    (then("merge_states", lambda out, out_a, out_b, **_: np.copyto(
        out, (out_a.astype(np.float32) + out_b) / 2, casting="unsafe")),
     "merge_states, bf16", TOO_FAR),
    (ignoring("merge_states", "lse_base"), "merge_states, base 2", TOO_FAR),
    (pages_swapped, "copy_pages, pages", STRAY),
    (with_other("copy_pages", cache=lambda c: c[0] if isinstance(c, tuple) else c),
     "copy_pages, K and V", MISSING),
    (with_other("copy_pages", src_pages=lambda p: p % 9, dst_pages=lambda p: p % 9),
     "copy_pages, padding", STRAY),
    (ignoring("shift_pages", "interleaved"), "shift_pages, fp16, interleaved", TOO_FAR),
    (with_other("shift_pages", rope_table=lambda t: np.concatenate([t[:1] ** 0, t[1:]])),
     "shift_pages, bf16", TOO_FAR),
    (with_other("shift_pages", delta=np.abs), "shift_pages, a delta for each page", TOO_FAR),
    (with_other("shift_pages", delta=lambda d: d + 1), "shift_pages, fp8_e4m3", "pool: "),
    (with_other("store_state", slots=lambda s: np.where(s == 19, 18, s + 1)),
     "store_state, conv", STRAY),
    (with_other("store_state", caches=first, states=first), "store_state, conv and ssm", MISSING),
    (ignoring("store_state", "skip_slot"), "store_state, a sink slot", STRAY),
    (with_other("gather_state", slots=lambda s: np.maximum(s, 0)), "gather_state, padding", VALUE),
    (with_other("gather_state", caches=first, out=first), "gather_state, conv and ssm", MISSING),
    (with_other("update_conv_state", x=np.flip), "update_conv_state, bf16", VALUE),
    (with_other("update_conv_state", cu_query_lens=lambda s: np.minimum(s, s[-2])),
     "update_conv_state, a token per sequence", MISSING),
    (old_inputs_dropped, "update_conv_state, bf16", VALUE),
    (slots_of_the_first_tokens, "slot_mapping, ragged", "out: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "where", "text"), MISTAKES, ids=[f"{i}-{w}" for i, (_, w, _) in enumerate(MISTAKES)]
)
def test_a_mistake_is_noticed(mistake, where, text):
    operation, name = where.split(", ", 1)
    broken = Implementation("broken", {operation: mistake})
    outcome = run_case(case_of(operation, name), broken, device="host")
    assert outcome.failed and text in str(outcome), outcome


def test_every_canary_is_looked_at(device):
    for change in (0, GUARD_BYTES - 1, -GUARD_BYTES, -1):
        arguments = testing.Arguments(device, seed=abs(change))
        cache = arguments.output("bf16", (4, 2, 8), name="cache")
        arguments.check_buffers()
        with cache.buffer.opened():
            cache.buffer.raw[change] ^= 1
        with pytest.raises(Mismatch, match="canary") as caught:
            arguments.check_buffers()
        assert caught.value.kind == "outside"


def test_faults_are_compared():
    """kvcupy records indices past the end; that it does not, or does where none is, differs."""
    for fault, name in ((False, "past the end"), (True, "bf16")):
        own = Implementation("own", {"store_kv": store_kv}, has_fault=lambda _, fault=fault: fault)
        outcome = run_case(case_of("store_kv", name), own, device="host")
        assert outcome.verdict == "differs" and "recorded" in outcome.detail


def test_what_a_function_does_not_take_is_not_supported():
    def store(key, value, k_cache, v_cache, slot_mapping):
        store_kv(key, value, k_cache, v_cache, slot_mapping)

    outcomes = conform("store_kv", store, device="host", lacks={"padding": "no padding here"})
    reasons = {o.case: o.detail for o in outcomes if o.verdict == "not supported"}
    assert reasons["a sink slot"] == "it takes no skip_slot"
    assert reasons["padding"] == "no padding here"
    assert "bf16" not in reasons and not any(outcome.failed for outcome in outcomes)


def test_require_lists_all_that_fails():
    testing.require("slot_mapping", slot_mapping, device="host")
    with pytest.raises(Mismatch, match=r"(?s)a token per sequence: differs.*poisoned table: diff"):
        testing.require("slot_mapping", slots_of_the_first_tokens, device="host")


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
