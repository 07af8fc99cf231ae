"""Orders that must hold in a paged cache, each run with and without the wait that ensures it.

A program leads up to that wait, which comes after its `yield`. Run on streams it must give, bit for
bit, what the calls give one after another; run without that one wait it must not.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from paged_world import World, same
from table_cases import dropped_host_wait


@dataclass
class OrderCase:
    """A program that a world runs, and the waits that it depends on.

    Attributes
    ----------
    program : a generator that gets the world, and yields once, before the wait in question
    who : the stream that waits, or "host"
    drop : of the waits after the `yield`, those that the control leaves out
    waits : how many these are
    options : of the world
    """

    program: Any
    who: str
    drop: tuple[int, ...]
    waits: int
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, device, monkeypatch, drop=(), **options):
        """Return the results on streams, and how many waits there were."""
        world = World(device, **self.options, **options)
        rest = self.program(world)
        next(rest)
        with without(monkeypatch, world, self.who, drop) as seen:
            assert next(rest, "ended") == "ended"
        return world.results("abc"), len(seen)

    def inline(self, device):
        """Return the results if every call is done when it returns."""
        world = World(device, live=False, **self.options)
        assert len([*self.program(world)]) == 1
        return world.results("abc")

    def check(self, device, monkeypatch, **options):
        """On streams it gives the same bits."""
        want = self.inline(device)  # first, so that kernels are loaded before a stream is held up
        got, waits = self.run(device, monkeypatch, **options)
        same(got, want)
        return waits

    def check_control(self, device, monkeypatch):
        """Without its wait it gives others."""
        want = self.inline(device)
        got, _ = self.run(device, monkeypatch, self.drop, control=True)
        with pytest.raises(AssertionError, match="got"):
            same(got, want)


@contextmanager
def without(monkeypatch, world, who, indices):
    """Leave out some waits of a stream, or of the host. Yields all that were called.

    They are counted from 0, over the length of the block.
    """
    if who == "host":
        assert len(indices) <= 1
        with dropped_host_wait(monkeypatch, world.device, *indices or (None,)) as seen:
            yield seen
        return
    stream, seen, number = world.device.as_stream(world.streams[who]), [], itertools.count()
    genuine = type(stream).wait

    def wait(self, other):
        if self == stream:
            seen.append(other)
            if next(number) in indices:
                return
        genuine(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "wait", wait)
        yield seen
