"""Streams that are late, and observers of what is put on them."""

from __future__ import annotations

import gc
import threading
import time

from line_process import poll

import kvcupy as kv
from kvcupy import observe

DELAY_S = 0.03
PATIENCE_S = 60  # a test that waits for its own gate fails instead of hanging


def delay(stream):
    """Hold up a stream, so that work that does not wait for it comes too early."""
    stream.call(lambda: time.sleep(DELAY_S))


class Gate:
    """Holds up a stream until it is opened.

    A GPU releases pinned memory only when no stream is held up, so what earlier tests have left
    for the garbage collector is released before.
    """

    closed = 0  # how many are

    def __init__(self, stream):
        if stream.device.kind == "cuda" and not Gate.closed:
            gc.collect()
        self._open = threading.Event()
        Gate.closed += 1
        stream.call(self._wait)

    def _wait(self):
        assert self._open.wait(PATIENCE_S), "the test has not opened it"

    def open(self):
        if not self._open.is_set():
            Gate.closed -= 1
        self._open.set()


def run_ahead(gates, *streams, is_control):
    """Open gates: in a control after streams have run ahead, which nothing keeps from it."""
    poll(lambda: all(stream.done() for stream in streams), PATIENCE_S if is_control else DELAY_S)
    for gate in gates:
        gate.open()


def nothing(*streams):
    """Stand in for a fork or join that is left out."""


class Log(observe.Observer):
    """Writes down all that is announced."""

    def __init__(self, refuse=None):
        self.lines, self.operations, self.refuse = [], [], refuse

    def before(self, operation):
        self.lines.append(("before", operation.name, operation.stream))
        self.operations.append(operation)
        if operation.name == self.refuse:
            raise kv.KvcupyError("refused")

    def after(self, operation):
        self.lines.append(("after", operation.name, operation.stream))

    def recorded(self, event, stream):
        self.lines.append(("recorded", event, stream))

    def waited(self, stream, event):
        self.lines.append(("waited", event, stream))

    def take(self):
        lines, self.lines = self.lines, []
        return lines


def ranges(accesses):
    """The byte ranges of accesses, sorted."""
    return sorted(access.view.byte_range() for access in accesses)
