"""What all operations have in common, over the conformance cases (`kvcupy.testing.cases`).

The cases are one catalogue of valid calls: formats, scales, layouts, padding, indices past the
end. Here they run with arrays that are laid out in other ways, on one stream or two, in graphs and
with garbage for indices. Each call is compared whole: results, gaps, canaries, inputs, faults
(`valid_calls.py`). What only one operation does is in the file of its family; what calls refuse is
in `test_refusals.py`.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle, product

import helpers
import numpy as np
import pytest
from helpers import FORMATS, LAYOUTS, QUANTISED, address, examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log
from valid_calls import CASES, MEMORY, ValidCall, is_index

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import overlap, view
from kvcupy.formats import FOUR_BIT
from kvcupy.ops.spec import OPERATIONS, STREAMS


def cases(step, *others):
    """Return rows of `parametrize`: the cases with each of some other values.

    Of each operation every `step`-th row runs, the other values in turn; with --full all do.
    """
    rows, counts = [], Counter()
    for case in CASES:
        for number, other in enumerate(others or [None]):
            row = (case, other) if others else (case,)
            name = f"{case.operation}, {case.name}" + (f", {other}" if others else "")
            runs = (counts[case.operation] - number) % step == 0
            rows.append(pytest.param(*row, id=name) if runs else full_only(*row, id=name))
        counts[case.operation] += 1
    return rows


def some_cases(step):
    """Return a mark: the first case of each operation and each `step`-th after it."""
    return pytest.mark.parametrize("case", cases(step))


FLOATS = ("fp32", "fp16", "bf16")
FIRST = {case.operation: case for case in reversed(CASES)}
"""The first case of each operation."""
every_operation = pytest.mark.parametrize("operation", FIRST)


@pytest.mark.parametrize(("case", "layout"), cases(5, *MEMORY))
def test_arrays_of_any_strides(device, case, layout):
    call = ValidCall(device, case, layout=layout)
    call.run()
    call.check()


@pytest.mark.parametrize(
    ("case", "begin"), cases(4, "1 element", "2 elements", "4 elements", "8 elements")
)
def test_arrays_that_begin_anywhere(device, case, begin):
    """So many elements after 64 bytes; some with indices of 32 bits, others of 64."""
    misalign = int(begin[0])
    call = ValidCall(
        device, case, misalign=misalign, index="int32" if misalign in (1, 4) else "int64"
    )
    call.run()
    call.check()


@some_cases(6)
def test_rows_that_32_bits_do_not_count(device, case):
    call = ValidCall(device, case, far=True)
    call.run()
    call.check()


def sizes(low, high, step=1):
    return st.integers(low, high).map(lambda n: n * step)


def scaled(options):
    """Leave scales to caches that have some."""
    return options if options["cache_fmt"] in QUANTISED else options | {"scales": ""}


SCALES = st.sampled_from(["", "static", "per head", "dynamic"])
# Each pair of formats is a kernel; `test_formats` has them all.
FORMAT = st.sampled_from(FLOATS if helpers.full else ("fp32", "bf16"))
CACHE_FORMATS = st.sampled_from(FORMATS if helpers.full else ("fp32", "bf16", "int8"))
DRAWN = {
    "store_kv": st.fixed_dictionaries({
        "widths": st.tuples(sizes(1, 70), sizes(1, 70)), "tokens": sizes(0, 11),
        "spare": sizes(0, 2), "layout": st.sampled_from(LAYOUTS),
        "fmt": CACHE_FORMATS, "cache_fmt": CACHE_FORMATS,
        "kind": st.sampled_from(["", "padding", "past the end"]), "scales": SCALES,
    }).map(scaled),
    "store_mla": st.fixed_dictionaries({"cache_fmt": CACHE_FORMATS}),
    "rope_store_mla": st.fixed_dictionaries({
        "fmt": FORMAT, "cache_fmt": CACHE_FORMATS, "rank": sizes(1, 130), "width": sizes(1, 40, 2),
        "interleaved": st.booleans(), "kind": st.sampled_from(["", "padding", "past the end"]),
    }),
    "gather_kv": st.fixed_dictionaries({
        "widths": st.tuples(sizes(1, 70), sizes(1, 70)), "layout": st.sampled_from(LAYOUTS),
        "cache_fmt": CACHE_FORMATS, "fmt": FORMAT, "scales": SCALES,
    }).map(scaled),
    "apply_rope": st.fixed_dictionaries({
        "rotary_dim": sizes(1, 16, 2), "fmt": FORMAT,
        "interleaved": st.booleans(), "outputs": st.booleans(),
        "norm": st.sampled_from(["", "fp32"]), "kind": st.sampled_from(["", "past the end"]),
    }),
    "rope_store_kv": sizes(1, 70, 2).flatmap(lambda width: st.fixed_dictionaries({
        "width": st.just(width), "rotary_dim": sizes(1, width // 2, 2),
        "fmt": FORMAT, "cache_fmt": CACHE_FORMATS,
        "interleaved": st.booleans(), "norm": st.booleans(), "scales": SCALES,
        "kind": st.sampled_from(["", "padding", "past the end"]),
    }).map(scaled)),
    "paged_attention": st.lists(sizes(1, 40), min_size=1, max_size=4).flatmap(
        lambda lens: st.fixed_dictionaries({
            "seq_lens": st.just(tuple(lens)),
            "new": st.none() | st.tuples(*(sizes(0, n) for n in lens)).filter(any),
            "heads": st.tuples(sizes(1, 3), sizes(1, 5)),
            "widths": st.tuples(sizes(1, 48), sizes(1, 48)),
            "fmt": st.sampled_from(FLOATS), "poison": st.booleans(),
            "layout": st.sampled_from(LAYOUTS), "lse": st.booleans(), "sinks": st.booleans(),
        })),
    "merge_states": st.fixed_dictionaries({
        "states": sizes(2, 9), "tokens": sizes(4, 9), "width": sizes(1, 70),
        "fmt": st.sampled_from(FLOATS), "base": st.sampled_from("e2"),
        "unseen": st.sampled_from(["", "one", "both"]),
    }),
    "copy_pages": sizes(1, 70).flatmap(lambda width: st.fixed_dictionaries({
        "widths": st.tuples(st.just(width), sizes(width, 80)), "views": st.booleans(),
        "arrays": sizes(1, 3),
    })),
    "shift_pages": sizes(1, 40, 2).flatmap(lambda width: st.fixed_dictionaries({
        "width": st.just(width), "rotary_dim": sizes(1, width // 2, 2), "out": st.booleans(),
        "interleaved": st.booleans(), "latent": st.booleans(), "delta": sizes(-63, 63),
        "fmt": st.sampled_from(FORMATS),
    })),
    "store_state": st.fixed_dictionaries({"rows": sizes(0, 11)}),
    "gather_state": st.fixed_dictionaries({"kind": st.sampled_from(["", "padding"])}),
    "update_conv_state": st.fixed_dictionaries({
        "new": st.lists(sizes(0, 9), min_size=1, max_size=5), "inputs_first": st.booleans(),
        "widths": sizes(1, 70).map(lambda n: (n, n)), "fmt": st.sampled_from(["fp32", "fp16"]),
    }),
    "slot_mapping": st.tuples(*(sizes(0, n) for n in (5, 33, 16, 8))).map(
        lambda appended: {"appended": appended}
    ),
}  # fmt: skip
"""By operation, options of its first case: any sizes and formats."""


@pytest.mark.parametrize("operation", DRAWN)
@settings(max_examples=examples(100), deadline=None, database=None)
@given(
    data=st.data(),
    seed=sizes(0, 999),
    layout=st.sampled_from(list(MEMORY)),
    index=st.sampled_from(["int32", "int64"]),
    misalign=st.sampled_from([0, 0, 1, 2, 4, 8]),
)
def test_any_call(device, operation, data, seed, layout, index, misalign):
    options = data.draw(DRAWN[operation])
    call = ValidCall(
        device, FIRST[operation], options, seed=seed, layout=layout, index=index, misalign=misalign
    )  # fmt: skip
    call.run()
    call.check()


# Formats -----------------------------------------------------------------------------------------


def formats():
    """Yield an operation, and options of its first case: each pair of formats, in turn with scales
    of one kind."""
    kinds = cycle(["static", "per head", "dynamic"])
    for operation in ("store_kv", "gather_kv", "rope_store_kv", "paged_attention"):
        sources = FORMATS if operation == "store_kv" else FLOATS
        for fmt, cache_fmt in product(sources, (*FORMATS, *FOUR_BIT)):
            options = {"fmt": fmt, "cache_fmt": cache_fmt}
            four_bit, scales = cache_fmt in FOUR_BIT, next(kinds)
            if operation == "paged_attention":
                options |= {"seq_lens": (9, 20), "widths": (128, 128)}
                if cache_fmt in QUANTISED and scales == "dynamic":
                    options["scales"] = True
                elif cache_fmt in QUANTISED or four_bit:
                    options["options"] = {"k_scale": 0.03, "v_scale": 0.05}
            elif cache_fmt in QUANTISED or four_bit:
                options["scales"] = "static" if four_bit else scales
            if four_bit and operation == "rope_store_kv":
                options["width"] = 128
            elif four_bit:
                options["widths"] = (128, 256) if operation != "paged_attention" else (128, 128)
            yield operation, options
    yield from (("store_mla", {"cache_fmt": fmt}) for fmt in (*FORMATS, "nvfp4"))
    for fmt in (*FORMATS, *FOUR_BIT):
        yield "rope_store_mla", {"cache_fmt": fmt, "fmt": FLOATS[len(fmt) % 3], "width": 32}
    for fmt in FLOATS:
        yield from (("apply_rope", {"fmt": fmt, "norm": norm}) for norm in sorted({fmt, "fp32"}))
        yield from (("merge_states", {"fmt": a, "out_fmt": fmt}) for a in sorted({fmt, "fp32"}))
    yield from (("shift_pages", {"fmt": fmt, "width": 128}) for fmt in (*FORMATS, *FOUR_BIT))
    yield from (("update_conv_state", {"fmt": fmt}) for fmt in FLOATS)


@pytest.mark.parametrize(("operation", "options"), list(formats()))
def test_formats(device, operation, options):
    call = ValidCall(device, FIRST[operation], options)
    call.run()
    call.check()


@some_cases(5)
def test_builds_that_users_run(users_device, case):
    """On the host device not strict, with a thread to each row."""
    call = ValidCall(users_device, case)
    call.run()
    call.check()


# Indices -----------------------------------------------------------------------------------------

BOUNDS = {"positions": 64, "delta": 64, "slot_mapping": 20, "slots": 20, "cu_query_lens": 1000}
"""What index arrays of the cases index is smaller than this, or 9 pages."""
GARBAGE = {
    "int32": (2**31 - 1, 2**30, 2**24 + 3), "int64": (2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1),
}  # fmt: skip


@pytest.mark.parametrize("index", GARBAGE)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("padding", "past the end")],
    ids=[f"{c.operation}, {c.name}" for c in CASES if c.name in ("padding", "past the end")],
)  # fmt: skip
def test_garbage_for_indices(device, case, index):
    """Negative ones and those past the end may be any number, not one that is a slot in 32 bits."""
    for garbage in GARBAGE[index]:
        call = ValidCall(device, case, index=index)
        for name, argument in call.placed():
            if is_index(argument.fmt):
                values, bound = argument.view, BOUNDS.get(name, 9)
                values[values >= bound] = garbage
                values[(values < 0) & (values > -bound)] = -garbage
                argument.buffer.restore()
        call.run()
        call.check()


EMPTY = {
    "store_kv": "tokens", "store_mla": "tokens", "gather_kv": "tokens", "apply_rope": "tokens",
    "rope_store_kv": "tokens", "rope_store_mla": "tokens", "merge_states": "tokens",
    "copy_pages": "pairs",
    "shift_pages": "pairs", "store_state": "tokens", "gather_state": "tokens",
    "paged_attention": "sequences", "slot_mapping": "sequences",
}  # fmt: skip


@pytest.mark.parametrize(("operation", "dimension"), EMPTY.items())
def test_nothing_to_do(device, operation, dimension):
    """Without tokens, pages or sequences a call changes nothing."""
    call = ValidCall(device, FIRST[operation])
    for name, argument in call.placed():
        axes = OPERATIONS[operation].public_arguments[name].shape.split()
        if dimension in axes:
            empty = (slice(None),) * axes.index(dimension) + (slice(0, 0),)
            call.arguments[name] = argument.sub(lambda a, empty=empty: a[empty])
    if operation == "slot_mapping":
        call.arguments["out"] = call.arguments["out"].sub(lambda a: a[:0])
    call.run()
    kv.check_faults(device)
    call.check_bytes()


# Arrays ------------------------------------------------------------------------------------------


@some_cases(4)
def test_tensors_of_torch(device, case):
    torch = pytest.importorskip("torch")
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    from kvcupy.interop.torch import as_tensor

    call = ValidCall(device, case)
    call.run(wrap=lambda x: x if view(x).format in FOUR_BIT else as_tensor(x))
    call.check()


@pytest.mark.parametrize(
    "operation",
    [n for n in FIRST if OPERATIONS[n].caller_outputs and not OPERATIONS[n].returns_several],
)
def test_outputs_that_the_call_allocates(device, operation):
    """They hold what the call would have written to the caller's."""
    names = [each.name for each in OPERATIONS[operation].caller_outputs]
    chosen = [case for case in CASES if case.operation == operation and case.name != "past the end"]
    for case in chosen if helpers.full else chosen[::4]:
        call = ValidCall(device, case)
        outputs = {n: call.arguments.pop(n) for n in names if n in call.arguments}
        options = {}
        if "dtype" in OPERATIONS[operation].parameters:
            options["dtype"] = outputs[names[0]].fmt
        if "lse_out" in outputs and "return_lse" in OPERATIONS[operation].parameters:
            options["return_lse"] = True
        made = call.run(**options)
        call.run(**options | outputs)
        device.synchronize()
        arrays = made if isinstance(made, tuple) else (made,)
        for (name, output), array in zip(outputs.items(), arrays, strict=True):
            got, want = (
                np.ascontiguousarray(each).view(np.uint8).reshape(len(each), -1)
                for each in (device.to_numpy(device.carrier(view(array))), output.live())
            )
            skipped = case.name == "padding" and operation == "gather_kv"
            rows = got.any(axis=1) if skipped else slice(None)
            assert np.array_equal(got[rows], want[rows]), name


# Streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [row for row in cases(3) if ", no " not in row.id])
def test_what_is_announced(device, case):
    """All that is read and written, and nothing else as written; where an observer refuses the
    operation, nothing runs."""
    call, on = ValidCall(device, case), streams(device, case.operation)
    before = {buffer: buffer.read().copy() for buffer in call.arrays.buffers}
    with observe.attached(Log(refuse=case.operation)), pytest.raises(kv.KvcupyError, match="refus"):
        call.run(**on)
    device.synchronize()
    assert all(np.array_equal(buffer.read(), old) for buffer, old in before.items())
    with observe.attached(Log()) as log:
        call.run(**on)
    call.check()
    operations = [op for op in log.operations if op.name == case.operation]
    assert operations and {op.stream for op in operations} <= set(on.values())
    reads, writes = ([a.view for op in operations for a in getattr(op, side)]
                     for side in ("reads", "writes"))  # fmt: skip
    for buffer, old in before.items():
        changed = np.flatnonzero(buffer.read() != old) + address(buffer.raw)
        ends = [v.byte_range() for v in writes]
        assert all(any(low <= at < high for low, high in ends) for at in changed), buffer.name
    written = set(OPERATIONS[case.operation].written(call.arguments))
    for name, argument in call.placed():
        array = view(argument.array)
        if array.size:
            assert any(overlap(array, v) for v in (*reads, *writes)), name
            assert name in written or not any(overlap(array, v) for v in writes), name


def streams(device, operation):
    """Return the streams of a call; of some operations, two."""
    names = [name for name in STREAMS if name in OPERATIONS[operation].parameters]
    return {name: device.stream() for name in names}


@some_cases(4)
def test_arrays_that_a_stream_writes_late(device, case):
    call, on = ValidCall(device, case), streams(device, case.operation)
    call.take_away()
    gate = Gate(on["stream"])
    call.give_back(on["stream"])
    call.run(**on)
    gate.open()
    on["stream"].synchronize()
    call.check()


@pytest.mark.races
@every_operation
def test_on_another_stream_they_come_too_late(device, operation):
    """The control of the test above."""
    call, stream, other = ValidCall(device, FIRST[operation]), device.stream(), device.stream()
    call.take_away()
    gate = Gate(stream)
    call.give_back(stream)
    call.run(stream=other)
    other.synchronize()
    gate.open()
    stream.synchronize()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        call.check()


@some_cases(4)
def test_a_captured_call_runs_at_replay(device, case):
    """It reads its arrays then; captured, nothing runs, and a refused call leaves nothing."""
    call, on = ValidCall(device, case), streams(device, case.operation)
    stream = on["stream"]
    call.take_away()
    with stream.capture() as graph:
        with pytest.raises((TypeError, ValueError)):
            call.run(**{next(iter(call.arguments)): 1.5}, **on)
        call.run(**on)
    device.synchronize()
    assert not call.has_written()
    for _ in range(2):
        call.give_back(stream)
        graph.launch(stream)
        stream.synchronize()
        call.check()
