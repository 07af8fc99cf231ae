"""What fills pages in the background: when it is over, and what fails with it."""

from __future__ import annotations

import pytest

import kvcupy as kv
from kvcupy.cache.tiered.flights import Flight, Flights


class Moving:
    """A transfer that is done, or fails, when told to."""

    num_bytes, elapsed_us = 7, 2e6

    def __init__(self):
        self.over, self.error, self.calls = False, None, []

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
    moving = Moving()
    return moving, Flight(kind, moving, ["a copy"], sources)


FAILURE = kv.DeviceError("broken")


def test_a_flight_that_arrives():
    moving, flight = flight_of()
    assert not flight.poll() and not flight.over
    flight.wait(2, "stream")
    flight.wait(None, "stream")
    assert moving.calls == [(2, "stream"), ("wait", "stream")]
    moving.over = True
    assert flight.poll() and flight.over and flight.error is None
    assert (flight.num_bytes, flight.seconds, flight.copies) == (7, 2.0, ())
    moving.error = FAILURE
    flight.wait(0, "stream")
    assert flight.poll() and flight.error is None, "what happens later is none of its"


def test_a_flight_that_fails():
    moving, flight = flight_of()
    moving.error = FAILURE
    assert flight.poll() and flight.error is FAILURE
    assert flight.copies == ["a copy"], "for the cache to forget"
    for layer in (0, None):
        with pytest.raises(kv.DeviceError, match="broken"):
            flight.wait(layer, None)
    flight.join()
    assert moving.calls == ["synchronize"], "it may still touch pages"


def test_a_flight_fails_with_what_fills_its_pages():
    """However far back, and whatever becomes of the flight itself."""
    first, origin = flight_of(kind="save")
    second, between = flight_of(origin)
    third, flight = flight_of(None, between, between)
    second.over = third.over = True
    assert not flight.poll(), "its pages may not have arrived"
    first.error = FAILURE
    with pytest.raises(kv.DeviceError, match="broken"):
        flight.wait(None, None)
    assert flight.error is None, "noted by who holds the lock"
    assert flight.poll() and between.poll() and origin.poll()
    for one in (flight, between, origin):
        assert one.error is not None and one.copies == ["a copy"]


def test_a_failure_of_pages_that_is_noticed_later():
    first, origin = flight_of()
    _, flight = flight_of(origin)
    first.error = FAILURE
    assert origin.poll()
    with pytest.raises(kv.DeviceError, match="broken"):
        flight.wait(1, None)


def test_capturing_is_no_failure():
    moving, flight = flight_of()
    moving.error = kv.CaptureError("capturing")
    assert not flight.poll()
    moving.error, moving.over = None, True
    assert flight.poll() and flight.error is None


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
