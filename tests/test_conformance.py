"""`kvcupy.testing`: the references and kvcupy conform, and every kind of mistake is noticed."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from helpers import examples

import kvcupy as kv
from kvcupy import __main__ as command_line
from kvcupy import reference, testing
from kvcupy.testing import Implementation, Mismatch, conform, run_case
from kvcupy.testing.arrays import GUARD_BYTES, from_values

CASES = testing.cases()


def case_of(operation, name):
    (case,) = (c for c in testing.cases([operation]) if c.name == name)
    return case


# Plain NumPy implementations, which the mistakes below are made in ---------------------------


def store_kv(key, value, k_cache, v_cache, slot_mapping, **options):
    reference.store_kv(key, value, k_cache, v_cache, slot_mapping, **options)


def store_mla(latent, rope_key, cache, slot_mapping, **options):
    reference.store_mla(latent, rope_key, cache, slot_mapping, **options)


def gather_kv(k_cache, v_cache, slots, **options):
    reference.gather_kv(k_cache, v_cache, slots, **options)


def apply_rope(query, key, rope_table, positions, *, query_out=None, key_out=None, **options):
    rotated = reference.apply_rope(query, key, rope_table, positions, **options)
    inside = (positions >= 0) & (positions < len(rope_table))
    targets = (query if query_out is None else query_out, key if key_out is None else key_out)
    for target, rows in zip(targets, rotated, strict=True):
        target[inside] = rows[inside]


def rope_store_kv(**arguments):
    reference.rope_store_kv(**arguments)


def paged_attention(*, out, lse_out=None, **arguments):
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


def slot_mapping(block_table, seq_lens, append_lens, page_size, *, out):
    out[...] = reference.slot_mapping(block_table, seq_lens, append_lens, page_size)


PLAIN = {
    f.__name__: f
    for f in (
        store_kv, store_mla, gather_kv, apply_rope, rope_store_kv, paged_attention, merge_states,
        copy_pages, slot_mapping,
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
    outcome = run_case(case, testing.load("kvcupy", device), device=device)
    assert outcome.verdict == "conforms", outcome.detail


# Mistakes ------------------------------------------------------------------------------------


def one_slot_on(key, value, k_cache, v_cache, slot_mapping):
    kept = np.where(slot_mapping == 19, 18, slot_mapping + 1)
    store_kv(key, value, k_cache, v_cache, kept)


def swapped_in_pages(key, value, k_cache, v_cache, slot_mapping, layout="NHD"):
    store_kv(key, value, k_cache, v_cache, slot_mapping)


def last_token_left_out(key, value, k_cache, v_cache, slot_mapping):
    store_kv(key, value, k_cache, v_cache, slot_mapping[:-1])


def all_rows_stored(key, value, k_cache, v_cache, slot_mapping):
    unused = np.setdiff1d(np.arange(20), slot_mapping)[: len(key) - len(slot_mapping)]
    store_kv(key, value, k_cache, v_cache, np.concatenate([slot_mapping, unused]))


def padding_wraps(key, value, k_cache, v_cache, slot_mapping):
    store_kv(key, value, k_cache, v_cache, slot_mapping % 20)


def end_is_clipped(key, value, k_cache, v_cache, slot_mapping):
    store_kv(key, value, k_cache, v_cache, np.minimum(slot_mapping, 19))


def sink_is_written(key, value, k_cache, v_cache, slot_mapping, skip_slot=None):
    store_kv(key, value, k_cache, v_cache, slot_mapping)


def outside(cache):
    """The bytes of an array and those around it."""
    base = np.lib.stride_tricks.as_strided
    raw = cache.reshape(-1).view(np.uint8)
    return base(raw[:1], (raw.size + 1,), (1,))


def writes_past_the_end(key, value, k_cache, v_cache, slot_mapping):
    store_kv(key, value, k_cache, v_cache, slot_mapping)
    outside(v_cache)[-1] ^= 1


def scales_the_input(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    store_kv(key, value, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    key /= k_scale


def truncated(key, value, k_cache, v_cache, slot_mapping):
    rows = [(a.view(np.uint32) & 0xFFFF0000).view(np.float32) for a in (key, value)]
    store_kv(*rows, k_cache, v_cache, slot_mapping)


def times_the_reciprocal(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    rows = [a * (np.float32(1) / s[:, None]) for a, s in ((key, k_scale), (value, v_scale))]
    store_kv(*rows, k_cache, v_cache, slot_mapping)


def scales_not_written(k_scale_cache, v_scale_cache, **arguments):
    store_kv(**arguments, k_scale_cache=k_scale_cache.copy(), v_scale_cache=v_scale_cache)


def parts_swapped(latent, rope_key, cache, slot_mapping):
    store_mla(rope_key, latent, cache, slot_mapping)


def padding_gathered(k_cache, v_cache, slots, k_out, v_out):
    gather_kv(k_cache, v_cache, np.maximum(slots, 0), k_out=k_out, v_out=v_out)


def gathered_unscaled(k_cache, v_cache, slots, k_out, v_out, k_scale, v_scale):
    gather_kv(k_cache, v_cache, slots, k_out=k_out, v_out=v_out, k_scale=k_scale)


def other_way_round(query, key, rope_table, positions):
    pairs = rope_table.shape[1] // 2
    apply_rope(query, key, rope_table * np.repeat(np.float32([1, -1]), pairs), positions)


def halves_not_neighbours(query, key, rope_table, positions, interleaved):
    apply_rope(query, key, rope_table, positions)


def rounded_twice(query, key, rope_table, positions):
    apply_rope(query, key, rope_table.astype(np.float16).astype(np.float32), positions)


def unrotated_half_lost(query, key, rope_table, positions):
    apply_rope(query, key, rope_table, positions)
    key[..., rope_table.shape[1] :] = 0


def rotated_in_place(query, key, rope_table, positions, query_out, key_out):
    apply_rope(query, key, rope_table, positions)
    query_out[...], key_out[...] = query, key


def raw_key_stored(key, value, k_cache, v_cache, slot_mapping, **rotary):
    store_kv(key, value, k_cache, v_cache, slot_mapping)
    apply_rope(key=key, **rotary)


def without(*names, **others):
    """Attention that ignores some arguments, and takes others for those that are there."""

    def attend(**arguments):
        paged_attention(**{n: x for n, x in arguments.items() if n not in names} | others)

    return attend


def heads_interleaved(query, out, **arguments):
    group = query.shape[1] // arguments["k_cache"].shape[2]
    order = np.arange(query.shape[1]).reshape(-1, group).T.reshape(-1)
    paged_attention(query=query[:, order], out=out, **arguments)


def tails_read(seq_lens, **arguments):
    page_size = arguments["k_cache"].shape[1]
    paged_attention(seq_lens=-(-seq_lens // page_size) * page_size, **arguments)


def lse_of_base_2(out, lse_out, **arguments):
    paged_attention(out=out, lse_out=lse_out, **arguments)
    lse_out /= np.float32(np.log(2))


def truncated_outputs(out, **arguments):
    exact, _, _ = reference.paged_attention(**arguments)
    out[...] = (exact.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def unseen_not_zero(out, lse_out, **states):
    merge_states(out=out, lse_out=lse_out, **states)
    out[np.isneginf(lse_out)] = 1e-3


def mean_of_both(out, lse_out, **states):
    merge_states(out=out, lse_out=lse_out, **states)
    out[...] = (states["out_a"].astype(np.float32) + states["out_b"]) / 2


def natural(lse_base, **states):
    merge_states(**states)


def pages_swapped(cache, src_pages, dst_pages):
    copy_pages(cache, dst_pages, src_pages)


def first_array_alone(cache, src_pages, dst_pages):
    copy_pages(cache[0] if isinstance(cache, tuple) else cache, src_pages, dst_pages)


def page_padding_wraps(cache, src_pages, dst_pages):
    copy_pages(cache, src_pages % 9, dst_pages % 9)


def slots_of_the_first_tokens(block_table, seq_lens, append_lens, page_size, out):
    slot_mapping(block_table, append_lens, append_lens, page_size, out=out)


PAST_THE_END = "wrote outside its arrays"
STRAY, MISSING = "should not have been written", "were not written"
MISTAKES = [
    # The function, a case that must notice, and what it must say.
    (one_slot_on, "store_kv, bf16", STRAY),
    (swapped_in_pages, "store_kv, HND pages", "raised"),
    (last_token_left_out, "store_kv, bf16", MISSING),
    (all_rows_stored, "store_kv, more rows than slots", STRAY),
    (padding_wraps, "store_kv, padding", STRAY),
    (end_is_clipped, "store_kv, past the end", "k_cache"),
    (sink_is_written, "store_kv, a sink slot", STRAY),
    (writes_past_the_end, "store_kv, bf16", PAST_THE_END),
    (scales_the_input, "store_kv, fp32 to fp8_e4m3, scales", "key: "),
    (truncated, "store_kv, fp32 to bf16", "have another value"),
    (times_the_reciprocal, "store_kv, fp32 to int8, scales by head", "have another value"),
    (scales_not_written, "store_kv, bf16 to fp8_e4m3, scales by row", "k_scale_cache: "),
    (parts_swapped, "store_mla, bf16", "have another value"),
    (padding_gathered, "gather_kv, padding", STRAY),
    (gathered_unscaled, "gather_kv, fp8_e4m3 to bf16, scales", "v_out: "),
    (other_way_round, "apply_rope, fp32", "times what is allowed"),
    (halves_not_neighbours, "apply_rope, fp16, interleaved", "times what is allowed"),
    (rounded_twice, "apply_rope, bf16", "times what is allowed"),
    (unrotated_half_lost, "apply_rope, a part of each head", "key: "),
    (rotated_in_place, "apply_rope, to outputs", "query: "),
    (raw_key_stored, "rope_store_kv, bf16", "k_cache: "),
    (without("causal", causal=False), "paged_attention, prefill", "times what is allowed"),
    (without("causal"), "paged_attention, prefill, not causal", "times what is allowed"),
    (without("window"), "paged_attention, decode, window", "times what is allowed"),
    (without(window=9), "paged_attention, decode, window", "times what is allowed"),
    (
        without("sink_tokens"),
        "paged_attention, decode, window and first keys",
        "times what is allowed",
    ),
    (without("sinks"), "paged_attention, decode, learned sinks", "times what is allowed"),
    (without("logits_soft_cap"), "paged_attention, decode, soft cap and scale", "times what"),
    (without("sm_scale"), "paged_attention, decode, soft cap and scale", "times what is allowed"),
    (without("tree_mask"), "paged_attention, a tree of drafted tokens", "times what is allowed"),
    (without("v_scale"), "paged_attention, decode, fp8_e4m3 cache", "times what is allowed"),
    (heads_interleaved, "paged_attention, decode", "times what is allowed"),
    (tails_read, "paged_attention, decode, poisoned tails", "got nan"),
    (lse_of_base_2, "paged_attention, decode, lse", "lse_out: "),
    (truncated_outputs, "paged_attention, decode", "times what is allowed"),
    (unseen_not_zero, "merge_states, neither saw a key", "within 0.0"),
    (mean_of_both, "merge_states, bf16", "times what is allowed"),
    (natural, "merge_states, base 2", "times what is allowed"),
    (pages_swapped, "copy_pages, pages", STRAY),
    (first_array_alone, "copy_pages, K and V", MISSING),
    (page_padding_wraps, "copy_pages, padding", STRAY),
    (slots_of_the_first_tokens, "slot_mapping, ragged", "out: "),
]


@pytest.mark.parametrize(
    ("mistake", "where", "text"), MISTAKES, ids=[f"{m.__name__}-{w}" for m, w, _ in MISTAKES]
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


# torch and the stand-ins of other projects ---------------------------------------------------


def failing(name):
    own = testing.load(name, kv.device("host"))
    outcomes = [run_case(case, own, device="host") for case in CASES]
    return {f"{o.operation}, {o.case}" for o in outcomes if o.failed}, outcomes


def test_where_compositions_of_torch_differ():
    """Indices are not skipped, bf16 is rotated with a rounding per operation, NaN spreads."""
    pytest.importorskip("torch")
    failed, outcomes = failing("torch")
    indices = {
        f"{operation}, {kind}"
        for operation in ("store_kv", "store_mla", "gather_kv", "copy_pages", "rope_store_kv")
        for kind in ("padding", "past the end")
    }
    rotated = {
        f"{o.operation}, {o.case}"
        for o in outcomes if o.compared == "rotation" and o.verdict != "not supported"
    }  # fmt: skip
    unseen = {"merge_states, one of two saw no key", "merge_states, neither saw a key"}
    assert failed == indices | rotated | unseen


def test_where_other_projects_differ(monkeypatch):
    pytest.importorskip("torch")
    import peer_modules

    peer_modules.install(monkeypatch)
    rotations = {"rope_store_kv, bf16", "rope_store_kv, padding"}  # by a table that is bf16
    sink = {"store_kv, K and V of one width", "rope_store_kv, bf16"}  # slot 0
    for name, operations, differing in (
        ("flashinfer", {"store_kv", "rope_store_kv", "paged_attention"}, set()),
        ("vllm", {"store_kv", "store_mla", "rope_store_kv", "paged_attention"}, rotations),
        ("sglang", {"store_kv", "rope_store_kv"}, sink),
    ):
        failed, outcomes = failing(name)
        tried = {o.operation for o in outcomes if o.verdict != "not supported"}
        assert (tried, failed) == (operations, differing), name
    details = " ".join(o.detail for o in outcomes if o.verdict == "differs")
    assert "were not written" in details


# The command ---------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "new" / "conformance.json"
    arguments = ["--device", "host", "--impl", "kvcupy", "--op", "copy_pages", "slot_mapping"]
    assert command_line.main(["conformance", *arguments, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "copy_pages    6 of 6" in text and "all that is supported conforms" in text
    report = json.loads(file.read_text())
    assert {o["verdict"] for o in report["outcomes"]["kvcupy"]} == {"conforms"}


def test_a_module_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_kernels.py").write_text(
        "lacks = {'padding': 'none here'}\n"
        "def wrap(argument):\n    return argument.array[...]\n"
        "def copy_pages(cache, src_pages, dst_pages):\n    cache[src_pages] = cache[dst_pages]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert command_line.main(["conformance", "--device", "host", "--impl", "own_kernels"]) == 1
    text = capsys.readouterr().out
    assert (
        "copy_pages, pages: differs: cache 0: " in text and "copy_pages       1 of 5 (-1)" in text
    )


def test_a_project_that_is_not_here_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pytest.importorskip("torch")
    arguments = ["--device", "host", "--impl", "flashinfer", "--op", "store_kv"]
    assert command_line.main(["conformance", *arguments]) == 0
    assert "flashinfer: not here: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--op", "frob"), ("--device", "frob"), ("--impl", "frob_kernels")]
)
def test_an_option_that_is_wrong(option, value, capsys):
    arguments = ["--impl", "kvcupy", option, value]
    assert command_line.main(["conformance", *arguments]) == 2
    assert "frob" in capsys.readouterr().err


def test_the_command_lets_no_fallback_conform(monkeypatch, capsys):
    seen, copy = set(), kv.copy_pages
    monkeypatch.setattr(
        kv, "copy_pages", lambda *args, **options: seen.add(kv.config.fallback) or copy(**options)
    )
    before = kv.config.fallback
    arguments = ["--device", "host", "--impl", "kvcupy", "--op", "copy_pages"]
    assert command_line.main(["conformance", *arguments]) == 0
    assert seen == {"error"} and kv.config.fallback == before
