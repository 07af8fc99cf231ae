"""Lent buffers: each has one holder at a time, and is returned when it is dropped."""

from __future__ import annotations

import gc
import threading

import pytest

from kvcupy import scratch
from kvcupy.devices.host import HostDevice
from kvcupy.devices.host_streams import InlineStream


@pytest.fixture
def fresh():
    return HostDevice()


def pointers(*views):
    return [v.pointer for v in views]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_buffer_is_returned_when_its_last_reference_is_dropped(fresh, pinned):
    on = fresh.as_stream(None)
    first = scratch.borrow(fresh, 5000, on, pinned=pinned)
    second = scratch.borrow(fresh, 5000, on, pinned=pinned)
    assert first.shape == (5000,) and len(set(pointers(first, second))) == 2
    back = first.pointer
    del first
    gc.collect()
    again = scratch.borrow(fresh, 4097, on, pinned=pinned)  # of the same power of two
    assert again.pointer == back != second.pointer
    assert scratch.borrow(fresh, 9000, on, pinned=pinned).pointer not in (back, second.pointer)


def test_work_in_flight_holds_its_buffer(fresh):
    stream = fresh.stream()
    buffer = scratch.borrow(fresh, 100, stream)
    kept = buffer.pointer
    gate = threading.Event()
    fresh.run(gate.wait, stream, (buffer,))
    del buffer
    gc.collect()
    assert scratch.borrow(fresh, 100, stream).pointer != kept
    gate.set()
    stream.synchronize()


def test_calls_on_a_stream_share_a_workspace_while_it_is_in_use(fresh):
    stream, other = fresh.stream(), fresh.stream()
    gate = threading.Event()
    first = scratch.workspace(fresh, 5000, stream)
    kept = first.pointer
    fresh.run(gate.wait, stream, (first,))
    del first
    gc.collect()
    assert scratch.workspace(fresh, 100, stream).pointer == kept
    assert scratch.workspace(fresh, 8192, stream).pointer == kept, "all of the buffer"
    assert scratch.borrow(fresh, 5000, stream).pointer != kept
    assert scratch.workspace(fresh, 5000, other).pointer != kept
    in_thread = []
    thread = threading.Thread(
        target=lambda: in_thread.append(scratch.workspace(fresh, 5000, stream).pointer)
    )
    thread.start()
    thread.join()
    assert in_thread != [kept], "calls of threads are issued by turns"
    larger = scratch.workspace(fresh, 8193, stream)
    assert larger.pointer != kept
    assert scratch.workspace(fresh, 100, stream).pointer == larger.pointer
    gate.set()
    stream.synchronize()
    del larger
    gc.collect()
    lent = [scratch.borrow(fresh, 5000, other) for _ in range(4)]
    assert kept in pointers(*lent), "returned when work has ended"


def capture_by_others(monkeypatch):
    """Let the calling thread pass for a stream that another library captures."""
    monkeypatch.setattr(InlineStream, "capturing", True)
    monkeypatch.setattr(InlineStream, "retains_owners", False)


def test_what_goes_into_a_capture_of_others_never_comes_back(fresh, monkeypatch):
    monkeypatch.setattr(scratch, "_captured", [])
    capture_by_others(monkeypatch)
    on = fresh.as_stream(None)
    taken = [scratch.borrow(fresh, 64, on).pointer for _ in range(4)]
    gc.collect()
    assert len(set(taken)) == 4
