"""Remembered plans: what makes a new one, what does not, and that they keep no array alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from valid_calls import EXAMPLES, array, arrays_of, indices, kv_caches

import kvcupy as kv
from kvcupy.ops import call as op_call


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


def without(*names):
    """Leave arguments out."""
    return lambda device, call: [call.pop(name) for name in names]


def setting(**changes):
    """Give options."""
    return lambda device, call: call.update(changes)


def replacing(**makers):
    """Make other arrays."""
    return lambda device, call: call.update({n: make(device) for n, make in makers.items()})


def in_layout_hnd(device, call):
    """Pages of as many slots, and the same bytes a page."""
    caches = {name: call[name].transpose(0, 2, 1, 3) for name in ("k_cache", "v_cache")}
    call.update(caches, layout="HND")


def int32(name):
    return lambda device, call: call.update(
        {name: device.asarray(device.to_numpy(call[name]).astype(np.int32))}
    )


def moved(name):
    """Begin one element later, and so at another alignment."""

    def change(device, call):
        old = call[name]
        raw = device.zeros(old.size + 1, old.dtype)
        call[name] = raw[1:].reshape(old.shape)

    return change


ROPE_CHANGES = {
    "no query": setting(query=None, query_out=None, query_norm=None),
    "no norm": without("key_norm"),
    "another epsilon": setting(eps=1e-5),
    "interleaved": setting(interleaved=True),
    "another rotary_dim": replacing(rope_table=lambda d: array(d, 16, 8)),
    "another table length": replacing(rope_table=lambda d: array(d, 17, 4)),
    "int32 positions": int32("positions"),
    "misaligned": moved("key"),
    "a format": replacing(
        query=lambda d: array(d, 3, 4, 8, fmt="fp16"),
        query_out=lambda d: array(d, 3, 4, 8, fmt="fp16"),
    ),
    "sections": lambda device, call: call.update(
        sections=(1, 1, 0), positions=device.zeros((3, 3), np.int64)),
    "interleaved sections": lambda device, call: call.update(
        sections=(1, 1, 0), sections_interleaved=True, positions=device.zeros((3, 3), np.int64)),
}  # fmt: skip
STORE_CHANGES = {
    "key not written": setting(write_key=False),
    "skip_slot": setting(skip_slot=5),
    "layout": in_layout_hnd,
    "int32 slots": int32("slot_mapping"),
    "one slot less": lambda device, call: call.update(slot_mapping=call["slot_mapping"][:2]),
    "no scale": without("k_scale"),
    "a number for a scale": setting(k_scale=0.5),
    "static scales": without("v_scale_cache"),
    "a cache in the rows' format": lambda device, call: (
        without("k_scale", "v_scale_cache")(device, call),
        call.update(kv_caches(device, "fp32", k_scale=None)),
    ),
    "two streams": lambda device, call: call.update(alt_stream=device.stream()),
}
GATHER_CHANGES = {
    "layout": in_layout_hnd,
    "int32 slots": int32("slots"),
    "dtype": setting(dtype="fp32"),
    "outputs in the caches' format": lambda device, call: call.update(
        k_out=device.zeros((3, 2, 8), np.int8), v_out=device.zeros((3, 2, 6), np.int8)),
    "no scale": without("k_scale"),
    "misaligned": moved("k_out"),
}  # fmt: skip
PAGES_CHANGES = {
    "int32 pages": int32("src_pages"),
    "other int32 pages": int32("dst_pages"),
    "gaps": lambda device, call: call.update(cache=call["cache"][:, :, :2]),
    "misaligned": moved("cache"),
}
CHANGES = [
    (EXAMPLES[operation], name, change)
    for operation, changes in {
        "apply_rope": ROPE_CHANGES, "rope_store_kv": ROPE_CHANGES | STORE_CHANGES,
        "gather_kv": GATHER_CHANGES, "copy_pages": PAGES_CHANGES,
    }.items()
    for name, change in changes.items()
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "change"),
    [(make, change) for make, _, change in CHANGES],
    ids=[f"{make.__name__}: {name}" for make, name, _ in CHANGES],
)
def test_what_decides_the_work_is_part_of_the_signature(device, made, make, change):
    """The plan of one call must not serve another; each is found again."""
    operation = getattr(kv, make.__name__)
    for _ in range(2):
        operation(**make(device))
        other = make(device)
        change(device, other)
        device.synchronize()
        operation(**other)
        device.synchronize()
    assert made == [make.__name__] * 2


@pytest.mark.parametrize("side", ["query", "key"])
def test_in_place_and_beside_are_told_apart(device, made, side):
    """By the addresses, whether or not one plan serves both."""
    results = []
    for turn in range(4):
        call = EXAMPLES["apply_rope"](device)
        del call["query_out"]
        beside = device.zeros(call[side].shape, np.float32)
        if turn % 2:
            call[f"{side}_out"] = beside
        before = device.to_numpy(call[side])
        kv.apply_rope(**call)
        assert np.array_equal(device.to_numpy(call[side]), before) == bool(turn % 2)
        results.append(device.to_numpy(beside if turn % 2 else call[side]))
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
