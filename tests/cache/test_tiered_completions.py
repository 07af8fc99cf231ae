"""What fills pages in the background: when it is over, and what fails with it."""

from __future__ import annotations

import pytest

import kvcupy as kv
from kvcupy.cache.tiered.tiers import BlockCompletion, CompletionQueue


class FakeTransfer:
    """A transfer that is done, or fails, when the test says so."""

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


def pending(*sources, kind="load"):
    transfer = FakeTransfer()
    return transfer, BlockCompletion(kind, transfer, ["a copy"], sources)


FAILURE = kv.DeviceError("broken")


def test_a_completion_that_arrives():
    transfer, completion = pending()
    assert not completion.done() and not completion.over
    completion.wait_layer(2, "stream")
    completion.wait("stream")
    assert transfer.calls == [(2, "stream"), ("wait", "stream")]
    transfer.over = True
    assert completion.done() and completion.over and completion.failure is None
    assert (completion.num_bytes, completion.seconds, completion.copies) == (7, 2.0, ())
    transfer.error = FAILURE
    completion.wait_layer(0, "stream")
    assert completion.done() and completion.failure is None, "what happens later is none of its"


def test_a_completion_that_fails():
    transfer, completion = pending()
    transfer.error = FAILURE
    assert completion.done() and completion.failure is FAILURE
    assert completion.copies == ["a copy"], "for the cache to forget"
    for wait in (lambda: completion.wait_layer(0), completion.wait):
        with pytest.raises(kv.DeviceError, match="broken"):
            wait()
    completion.synchronize()
    assert transfer.calls == ["synchronize"], "it may still touch pages"


def test_a_completion_fails_with_what_fills_its_pages():
    """However far back, and whatever becomes of the transfer itself."""
    first, origin = pending(kind="save")
    second, between = pending(origin)
    third, completion = pending(None, between, between)
    second.over = third.over = True
    assert not completion.done(), "its pages may not have arrived"
    first.error = FAILURE
    with pytest.raises(kv.DeviceError, match="broken"):
        completion.wait()
    assert completion.failure is None, "noted by who holds the lock"
    assert completion.done() and between.done() and origin.done()
    for blocks in (completion, between, origin):
        assert blocks.failure is not None and blocks.copies == ["a copy"]


def test_a_failure_of_pages_that_is_noticed_later():
    first, origin = pending()
    _, completion = pending(origin)
    first.error = FAILURE
    assert origin.done()
    with pytest.raises(kv.DeviceError, match="broken"):
        completion.wait_layer(1)


def test_capturing_is_no_failure():
    transfer, completion = pending()
    transfer.error = kv.CaptureError("capturing")
    assert not completion.done()
    transfer.error, transfer.over = None, True
    assert completion.done() and completion.failure is None


def test_the_queue_returns_all_that_is_over():
    queue = CompletionQueue()
    filled = [(k, *pending(kind=k)) for k in ("load", "load", "save", "save", "insert", "insert")]
    for _, _, completion in filled:
        queue.add(completion)
    assert queue.settle() == []
    assert queue.oldest() is filled[2][2], "a transfer rather than a stream of others"
    assert queue.saves() == [filled[2][2], filled[3][2]]
    for i in (0, 3, 5):
        filled[i][1].over = True
    assert set(map(id, queue.settle())) == {id(filled[i][2]) for i in (0, 5)}
    for i in (1, 2, 4):
        filled[i][1].over = True
    assert set(map(id, queue.settle())) == {id(filled[i][2]) for i in (1, 2, 3, 4)}
    assert queue.oldest() is None
    queue.add_failed(filled[0][2])
    assert queue.oldest() is filled[0][2]
    assert queue.oldest() is None
