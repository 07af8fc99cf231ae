"""Remembered plans: what makes a new one, what does not, and that they keep no array alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from valid_calls import EXAMPLES, arrays_of, indices

import kvcupy as kv
from kvcupy.ops import call as op_call
from kvcupy.ops.spec import OPERATIONS


@pytest.fixture
def made(monkeypatch):
    """The operations that have made a plan, in order."""
    monkeypatch.setattr(op_call, "_plans", {})
    log, prepare = [], op_call.Operation.prepare

    def spy(self, arguments, options, make):
        def announced(*checked, **views):
            log.append(self.name)
            return make(*checked, **views)

        return prepare(self, arguments, options, announced)

    monkeypatch.setattr(op_call.Operation, "prepare", spy)
    return log


# Lifetime -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", EXAMPLES)
def test_no_array_is_kept(device, made, operation):
    """Neither by a plan that was made nor by one that was found."""
    for _ in range(2):
        call = EXAMPLES[operation](device)
        getattr(kv, operation)(**call)
        device.synchronize()
        alive = {name: weakref.ref(value) for name, value in arrays_of(call).items()}
        assert len(alive) >= 3
        del call
        gc.collect()
        assert [name for name, ref in alive.items() if ref() is not None] == []
    assert made == [operation]


@pytest.mark.parametrize("operation", EXAMPLES)
def test_no_array_is_kept_by_an_error(device, made, operation):
    call = EXAMPLES[operation](device)
    alive = {name: weakref.ref(value) for name, value in arrays_of(call).items()}
    with pytest.raises(TypeError):
        getattr(kv, operation)(**call, stream="none")
    del call
    gc.collect()
    assert [name for name, ref in alive.items() if ref() is not None] == []


# Signatures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", EXAMPLES)
def test_the_same_signature_is_planned_once(device, made, operation):
    """Other arrays, another stream, other content: all of that is the same call."""
    for turn in range(3):
        call = EXAMPLES[operation](device)
        if operation == "copy_pages":
            call["src_pages"][...] = turn % 2
        stream = device.stream() if turn == 2 else None
        device.synchronize()
        getattr(kv, operation)(**call, stream=stream)
        device.synchronize()
    assert made == [operation]


OPTIONS = {
    "interleaved": True, "eps": 1e-5, "skip_slot": 5, "write_key": False, "dtype": "int8",
    "window": 3, "causal": False, "sm_scale": 2.0, "logits_soft_cap": 3.0, "lse_base": "2",
}  # fmt: skip
"""Other values than those of examples."""


def changes():
    """Yield an operation, one of its arguments or options, and what is changed of it."""
    for operation in EXAMPLES:
        declaration = OPERATIONS[operation]
        for name, argument in declaration.public_arguments.items():
            in_example = argument.in_example and argument.shape
            if argument.example is not None and not argument.output:
                yield operation, name, "int32"
            if argument.words and in_example:
                yield operation, name, "moved"
            optional = not (declaration.is_required(name) or argument.output)
            if optional and in_example and operation != "merge_states":
                yield operation, name, "left out"
            if argument.number and in_example:
                yield operation, name, "a number"
        yield from ((operation, name, "another value") for name in declaration.parameters
                    if name in OPTIONS)  # fmt: skip


def changed(device, call, name, change):
    """Return a call that differs in one argument or option."""
    if change == "another value":
        return {n: x for n, x in call.items() if n[2:] != "out" or name != "dtype"} | {
            name: OPTIONS[name]
        }
    if change == "left out":
        return call | dict.fromkeys({name, f"{name}_out", f"{name}_norm"} & call.keys())
    if change == "a number":
        return call | {name: 1}
    if change == "int32":
        return call | {name: device.asarray(device.to_numpy(call[name]).astype(np.int32))}
    raw = device.zeros(call[name].size + 1, call[name].dtype)  # at another alignment
    return call | {name: raw[1:].reshape(call[name].shape)}


@pytest.mark.parametrize(
    ("operation", "name", "change"),
    [*changes(), *(("apply_rope", "sections_interleaved", value) for value in (False, True))],
)
def test_what_decides_the_work_is_part_of_the_signature(device, made, operation, name, change):
    """The plan of one call must not serve another; each is found again."""
    for _ in range(2):
        call = EXAMPLES[operation](device)
        getattr(kv, operation)(**call)
        if name == "sections_interleaved":
            positions = device.zeros((3, 3), np.int64)
            other = call | {"positions": positions, "sections": (1, 1, 0), name: change}
        else:
            other = changed(device, EXAMPLES[operation](device), name, change)
        device.synchronize()
        getattr(kv, operation)(**other)
        device.synchronize()
    assert made == [operation] * 2


def test_layouts_and_streams_are_part_of_the_signature(device, made):
    """Pages of as many slots, and the same bytes a page; the launch, and the three."""
    for options in ({}, {"layout": "HND"}, {"alt_stream": device.stream()}) * 2:
        call = EXAMPLES["rope_store_kv"](device) | options
        if "layout" in options:
            call |= {n: call[n].transpose(0, 2, 1, 3) for n in ("k_cache", "v_cache")}
        device.synchronize()
        kv.rope_store_kv(**call)
        device.synchronize()
    assert made == ["rope_store_kv"] * 3


@pytest.mark.parametrize("side", ["query", "key"])
def test_in_place_and_into_an_output_are_told_apart(device, made, side):
    """By the addresses, whether or not one plan serves both."""
    results = []
    for turn in range(4):
        call = EXAMPLES["apply_rope"](device)
        del call["query_out"]
        out = device.zeros(call[side].shape, np.float32)
        if turn % 2:
            call[f"{side}_out"] = out
        before = device.to_numpy(call[side])
        kv.apply_rope(**call)
        assert np.array_equal(device.to_numpy(call[side]), before) == bool(turn % 2)
        results.append(device.to_numpy(out if turn % 2 else call[side]))
    assert all(np.array_equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(("first", "then"), [(5, 5.0), (1, True), (0, False), (5, "5")], ids=repr)
def test_a_skip_slot_that_is_equal_but_of_another_type_is_refused(device, made, first, then):
    for operation in ("store_kv", "store_mla", "rope_store_kv", "rope_store_mla"):
        call = EXAMPLES[operation](device)
        getattr(kv, operation)(**call, skip_slot=first)
        with pytest.raises(TypeError, match="skip_slot"):
            getattr(kv, operation)(**call, skip_slot=then)
        getattr(kv, operation)(**call, skip_slot=first)


@pytest.mark.parametrize(("operation", "name"), [
    ("apply_rope", "sections_interleaved"), ("apply_rope", "interleaved"),
    ("rope_store_kv", "interleaved"),
])  # fmt: skip
def test_an_option_may_be_any_truth(device, made, operation, name):
    """1 is True here, and is remembered as such."""
    results = []
    for value in (True, 1, False, 0):
        call = EXAMPLES[operation](device)
        getattr(kv, operation)(**call, **{name: value})
        results.append(device.to_numpy(call["query_out"]))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[2], results[3])


def test_an_option_that_cannot_be_hashed_is_refused_as_any_other(device, made):
    for _ in range(2):
        with pytest.raises(ValueError, match="layout"):
            kv.gather_kv(**EXAMPLES["gather_kv"](device), layout=["NHD"])


def test_forget_drops_all(device, made):
    for _ in range(2):
        kv.copy_pages(**EXAMPLES["copy_pages"](device))
        op_call.forget()
    assert made == ["copy_pages"] * 2


# Outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["merge_states", "paged_attention"])
def test_outputs_that_are_not_zeroed_are_written_whole(device, monkeypatch, name):
    """Also outputs of a sequence without keys, and of one that is longer than its row."""
    arguments = EXAMPLES[name](device)
    if name == "paged_attention":
        arguments["seq_lens"] = indices(device, 0, 99)
        del arguments["lse_out"]
    outputs = {n: arguments.pop(n) for n in ("out", "lse_out") if n in arguments}
    allocate, poisoned = type(device).allocate, []

    def poison(self, *shape_and_dtype, zeroed, **options):
        array = allocate(self, *shape_and_dtype, zeroed=zeroed, **options)
        if not zeroed:
            array.fill(np.nan)
            poisoned.append(array)
        return array

    monkeypatch.setattr(type(device), "allocate", poison)
    monkeypatch.setattr(op_call, "_plans", {})
    results = getattr(kv, name)(**arguments)
    getattr(kv, name)(**arguments, **outputs)
    assert len(poisoned) == len(outputs)
    results = results if isinstance(results, tuple) else (results,)
    for got, want in zip(results, outputs.values(), strict=True):
        np.testing.assert_array_equal(device.to_numpy(got), device.to_numpy(want))
    if name == "paged_attention":
        with pytest.raises(kv.IndexFault):
            kv.check_faults(device)
