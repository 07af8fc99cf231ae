"""Stories: something that happens to a paged cache, told with a wait that it hangs on and without.

A story leads up to the wait that it is about, which comes after its `yield`. Told with streams it
must give, bit for bit, what the calls give one after another; told without that one wait it must
not.
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
class Story:
    """Something that happens in a world, and which waits it hangs on.

    Attributes
    ----------
    tell : a generator that is given the world, and yields once, before the wait that it is about
    who : the stream that waits, or "host"
    drop : of the waits that it is asked for after the `yield`, those that a control leaves out
    waits : how many these are
    options : of the world
    """

    tell: Any
    who: str
    drop: tuple[int, ...]
    waits: int
    options: dict[str, Any] = field(default_factory=dict)

    def told(self, device, monkeypatch, drop=(), **options):
        """What comes out if it is told with streams, and the waits that it asked for."""
        world = World(device, **self.options, **options)
        rest = self.tell(world)
        next(rest)
        with without(monkeypatch, world, self.who, drop) as seen:
            assert next(rest, "ended") == "ended"
        return world.results("abc"), len(seen)

    def inline(self, device):
        """What comes out if every call is done when it returns."""
        world = World(device, live=False, **self.options)
        assert len([*self.tell(world)]) == 1
        return world.results("abc")

    def check(self, device, monkeypatch, **options):
        """Told with streams it gives the same bits."""
        got, waits = self.told(device, monkeypatch, **options)
        same(got, self.inline(device))
        return waits

    def check_control(self, device, monkeypatch):
        """Told without its wait it gives others."""
        got, _ = self.told(device, monkeypatch, self.drop, control=True)
        with pytest.raises(AssertionError, match="got"):
            same(got, self.inline(device))


@contextmanager
def without(monkeypatch, world, who, indices):
    """Let some waits of a stream, or of the host, not happen. Yields those that were asked for.

    They are counted from 0, over the length of the block.
    """
    if who == "host":
        assert len(indices) <= 1
        with dropped_host_wait(monkeypatch, world.device, *indices or (None,)) as seen:
            yield seen
        return
    stream, seen, number = world.streams[who], [], itertools.count()
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
