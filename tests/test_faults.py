"""The fault record: counted on the device, raised once, cleared by raising."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import check_faults, names_number

import kvcupy as kv


@pytest.fixture
def store(device):
    """Store rows of ones at some slots of a cache of eight, or of an MLA cache of eight."""

    def run(slots, *, operation="store_kv", stream=None, dtype=np.int64):
        slots = device.asarray(np.array(slots, dtype))
        rows = device.zeros((len(slots), 4), "fp16")
        if operation == "store_mla":
            cache = device.zeros((8, 8), "fp16")
            kv.store_mla(rows, rows, cache, slots, stream=stream)
        else:
            caches = [device.zeros((8, 4), "fp16") for _ in range(2)]
            kv.store_kv(rows, rows, *caches, slots, stream=stream)

    yield run
    device.synchronize()
    device.fault_array().fill(0)


def raised(device) -> str:
    with pytest.raises(kv.IndexFault) as caught:
        kv.check_faults(device)
    return str(caught.value)


def test_one_fault_is_named_in_full(device, store):
    store([0, 7, -1])
    kv.check_faults(device)
    store([3, 8, 0])
    assert raised(device) == "store_kv: slot_mapping[1]: expected 0 to 7, got 8; it was skipped"
    kv.check_faults(device)


def test_the_first_of_two_operations_is_named(device, store):
    store([0, 21])
    store([22, 23], operation="store_mla")
    text = raised(device)
    assert text.startswith("store_kv: slot_mapping[1]: expected 0 to 7, got 21")
    assert "as were 2 more accesses" in text
    store([22, 1], operation="store_mla")
    assert raised(device).startswith("store_mla: slot_mapping[0]: expected 0 to 7, got 22")


@pytest.mark.parametrize("value", [8, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1])
def test_values_of_64_bits_are_told(device, store, value):
    store([1, 2, value])
    text = raised(device)
    assert names_number(text, value)
    assert names_number(text, 2)


def test_work_in_flight_is_waited_for(device, store):
    if device.kind != "host":
        pytest.skip("the gate of this test is a function on a host stream")
    stream, gate = device.stream(), threading.Event()
    stream.call(gate.wait)
    store([5, 77], stream=stream)
    threading.Timer(0.05, gate.set).start()
    check_faults(device, "store_kv", {"slot_mapping": [(1, 77)]})


def test_an_unregistered_number_is_an_unknown_operation(device):
    device.fault_array()[...] = device.asarray(np.array([1, 10**6, 4, 5]))
    text = raised(device)
    assert "unknown operation" in text
    assert names_number(text, 4)
    assert names_number(text, 5)
