"""What fills pages in the background: when it is over, and what fails with it."""

from __future__ import annotations

import pytest

import kvcupy as kv
from kvcupy.cache.tiered.tiers import Flight, Flights


class FakeTransfer:
    """A transfer that is done, or fails, when told to."""

    num_bytes, elapsed_us = 7, 2e6

    def __init__(self):
        self.over, self.error, self.calls = False, None, []

    @property
    def failure(self):
        return None if isinstance(self.error, kv.CaptureError) else self.error

    def done(self):
        if self.error is not None:
            raise self.error
        return self.over

    def synchronize(self):
        self.calls.append("synchronize")
        self.done()

    def wait(self, stream=None):
        self.calls.append(("wait", stream))
        self.done()

    def wait_layer(self, layer, stream=None):
        self.calls.append((layer, stream))
        self.done()


def flight_of(*sources, kind="load"):
    transfer = FakeTransfer()
    return transfer, Flight(kind, transfer, ["a copy"], sources)


FAILURE = kv.DeviceError("broken")


def test_a_flight_that_arrives():
    transfer, flight = flight_of()
    assert not flight.done() and not flight.over
    flight.wait_layer(2, "stream")
    flight.wait("stream")
    assert transfer.calls == [(2, "stream"), ("wait", "stream")]
    transfer.over = True
    assert flight.done() and flight.over and flight.failure is None
    assert (flight.num_bytes, flight.seconds, flight.copies) == (7, 2.0, ())
    transfer.error = FAILURE
    flight.wait_layer(0, "stream")
    assert flight.done() and flight.failure is None, "what happens later is none of its"


def test_a_flight_that_fails():
    transfer, flight = flight_of()
    transfer.error = FAILURE
    assert flight.done() and flight.failure is FAILURE
    assert flight.copies == ["a copy"], "for the cache to forget"
    for wait in (lambda: flight.wait_layer(0), flight.wait):
        with pytest.raises(kv.DeviceError, match="broken"):
            wait()
    flight.synchronize()
    assert transfer.calls == ["synchronize"], "it may still touch pages"


def test_a_flight_fails_with_what_fills_its_pages():
    """However far back, and whatever becomes of the flight itself."""
    first, origin = flight_of(kind="save")
    second, between = flight_of(origin)
    third, flight = flight_of(None, between, between)
    second.over = third.over = True
    assert not flight.done(), "its pages may not have arrived"
    first.error = FAILURE
    with pytest.raises(kv.DeviceError, match="broken"):
        flight.wait()
    assert flight.failure is None, "noted by who holds the lock"
    assert flight.done() and between.done() and origin.done()
    for one in (flight, between, origin):
        assert one.failure is not None and one.copies == ["a copy"]


def test_a_failure_of_pages_that_is_noticed_later():
    first, origin = flight_of()
    _, flight = flight_of(origin)
    first.error = FAILURE
    assert origin.done()
    with pytest.raises(kv.DeviceError, match="broken"):
        flight.wait_layer(1)


def test_capturing_is_no_failure():
    transfer, flight = flight_of()
    transfer.error = kv.CaptureError("capturing")
    assert not flight.done()
    transfer.error, transfer.over = None, True
    assert flight.done() and flight.failure is None


def test_all_that_is_over_is_found():
    flights = Flights()
    made = [(k, *flight_of(kind=k)) for k in ("load", "load", "save", "save", "insert", "insert")]
    for _, _, flight in made:
        flights.add(flight)
    assert flights.settle() == []
    assert flights.oldest() is made[2][2], "a transfer rather than a stream of others"
    assert flights.saves() == [made[2][2], made[3][2]]
    for i in (0, 3, 5):
        made[i][1].over = True
    assert set(map(id, flights.settle())) == {id(made[i][2]) for i in (0, 5)}
    for i in (1, 2, 4):
        made[i][1].over = True
    assert set(map(id, flights.settle())) == {id(made[i][2]) for i in (1, 2, 3, 4)}
    assert flights.oldest() is None
    flights.failed(made[0][2])
    assert flights.oldest() is made[0][2]
    assert flights.oldest() is None
