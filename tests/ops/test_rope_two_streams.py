"""`alt_stream` of `rope_store_kv`: that its events are needed, and what is announced of it."""

from __future__ import annotations

import pytest
from stream_cases import Gate, Log, nothing, ranges, run_ahead
from valid_calls import EXAMPLES

import kvcupy as kv
from kvcupy import observe, streams
from kvcupy.arrays import view

WRITTEN = ("query", "key", "k_cache", "v_cache")


def in_place(device):
    call = EXAMPLES["rope_store_kv"](device)
    del call["query_out"]
    return call


class Step:
    """Late work on a stream writes the rows, they are stored, and the caches are read again.

    Names of the arrays of a call lead to what each should hold in the end.
    """

    def __init__(self, device):
        self.device, self.main, self.other = device, device.stream(), device.stream()
        if device.kind == "cuda":  # a first load waits for the device, and that for a gate
            kv.rope_store_kv(**in_place(device))
            kv.rope_store_kv(**in_place(device), alt_stream=self.other)
        self.call = in_place(device)
        self.rows = {name: self.call[name].copy() for name in ("query", "key", "value")}
        for name in self.rows:
            self.call[name][...] = 0
        self.read = {name: device.zeros(self.call[name].shape, self.call[name].dtype)
                     for name in (*WRITTEN, "v_scale_cache")}  # fmt: skip
        device.synchronize()

    def run(self, *, late, alternate=True, is_control=False):
        """Hold up the streams named, and return what was read of each array afterwards."""
        main, copy, gates = self.main, self.device.copy, []
        if "main" in late:
            gates.append(Gate(main))
        for name, rows in self.rows.items():
            copy(self.call[name], rows, stream=main)
        if "other" in late:
            gates.append(Gate(self.other))
        kv.rope_store_kv(
            **self.call, stream=main, **({"alt_stream": self.other} if alternate else {})
        )
        for name, target in self.read.items():
            copy(target, self.call[name], stream=main)
        if gates:
            ahead = [self.other] if "main" in late else [main]
            run_ahead(gates, *ahead, is_control=is_control)
        self.device.synchronize()
        return {name: self.device.to_numpy(target) for name, target in self.read.items()}


def differing(got, want):
    return {name for name in want if got[name].tobytes() != want[name].tobytes()}


LATE = [("main",), ("other",), ("main", "other"), ()]


@pytest.mark.parametrize("late", LATE, ids=str)
def test_no_stream_comes_too_early(device, late):
    want = Step(device).run(late=(), alternate=False)
    assert all(array.any() for array in want.values()), "the input tells nothing"
    assert differing(Step(device).run(late=late), want) == set()


@pytest.mark.races
@pytest.mark.parametrize(("left_out", "late"), [("fork", "main"), ("join", "other")])
def test_without_one_of_the_waits_the_value_is_wrong(device, monkeypatch, left_out, late):
    """The control of the test above: V too early, or read too early. K needs no wait."""
    want = Step(device).run(late=(), alternate=False)
    monkeypatch.setattr(streams, left_out, nothing)
    got = Step(device).run(late=(late,), is_control=True)
    assert differing(got, want) == {"v_cache", "v_scale_cache"}


# What is announced ----------------------------------------------------------------------------


def announced(call, **options):
    with observe.attached(Log()) as log:
        kv.rope_store_kv(**{**call, **options})
    return log


def ranges_of(call, *names):
    return sorted(view(call[name]).byte_range() for name in names)


def slots_named(accesses, call):
    """Whether each names its slots, by the array that it is in."""
    named = {}
    for access in accesses:
        (name,) = (n for n in call if hasattr(call[n], "shape")
                   and view(call[n]).byte_range() == access.view.byte_range())  # fmt: skip
        named[name] = access.slots is not None
        if access.slots is not None:
            assert access.slots.pointer == view(call["slot_mapping"]).pointer
            assert access.slots.shape == call["slot_mapping"].shape
    return named


ALTERNATE = {
    True: [  # reads and writes of the three
        (("rope_table", "positions", "query_norm", "key_norm"), ("query", "key")),
        (("key", "positions", "slot_mapping", "k_scale"), ("k_cache",)),
        (("value", "positions", "slot_mapping"), ("v_cache", "v_scale_cache")),
    ],
    False: [
        (("rope_table", "positions", "query_norm"), ("query",)),
        (("key", "rope_table", "positions", "slot_mapping", "key_norm", "k_scale"), ("k_cache",)),
        (("value", "positions", "slot_mapping"), ("v_cache", "v_scale_cache")),
    ],
}


@pytest.mark.parametrize("write_key", [True, False])
def test_order_reads_and_writes_on_two_streams(device, write_key):
    """The rotation, the fork, K here and V there, the join. Tables may be announced as read."""
    call = EXAMPLES["rope_store_kv"](device)
    del call["query_out"]
    main, other = device.stream(), device.stream()
    log = announced(call, write_key=write_key, stream=main, alt_stream=other)
    forked, joined = (line[1] for line in log.lines if line[0] == "recorded")
    assert log.lines == [
        ("before", "rope_store_kv", main), ("after", "rope_store_kv", main),
        ("recorded", forked, main), ("waited", forked, other),
        ("before", "rope_store_kv", main), ("after", "rope_store_kv", main),
        ("before", "rope_store_kv", other), ("after", "rope_store_kv", other),
        ("recorded", joined, other), ("waited", joined, main),
    ]  # fmt: skip
    harmless = ranges_of(call, "rope_table", "positions", "slot_mapping")
    for operation, (reads, writes) in zip(log.operations, ALTERNATE[write_key], strict=True):
        got, want = set(ranges(operation.reads)), set(ranges_of(call, *reads))
        assert want <= got and got - want <= set(harmless)
        assert slots_named(operation.writes, call) == {name: "cache" in name for name in writes}
    device.synchronize()
