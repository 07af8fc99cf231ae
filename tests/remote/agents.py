"""A stand-in for NIXL agents, whose READs a test delivers when and how it likes.

A READ copies its source (`fetch`), in pieces of eight bytes at different times if that is wanted,
and writes it to its target later (`land`). Until then it is not done, as with NIXL.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

from kvcupy.remote.migration import agent

_WORD = 8


class Network:
    """The agents of a test.

    Parameters
    ----------
    immediate : READs are delivered when they are posted

    Attributes
    ----------
    reads : READs in flight
    """

    def __init__(self, *, immediate=False):
        self.immediate = immediate
        self.agents, self.reads, self.names = {}, [], itertools.count()
        self.lock = threading.Lock()

    def open_agent(self, ranges):
        made = StandIn(self, ranges, b"agent %d" % next(self.names))
        self.agents[made.metadata] = made
        return made

    def install(self, monkeypatch):
        monkeypatch.setattr(agent, "NixlAgent", self.open_agent)
        return self


class StandIn:
    def __init__(self, network, ranges, metadata):
        self.network, self.ranges, self.metadata = network, ranges, metadata
        self.messages, self.peers, self.is_closed, self.is_dead = [], {}, False, False

    def holds(self, address, size):
        return any(p <= address and address + size <= p + n for p, n in self.ranges)

    def connect(self, metadata):
        if metadata not in self.network.agents:
            raise ValueError("no such agent")
        self.peers[metadata] = self.peers.get(metadata, 0) + 1
        return metadata

    def disconnect(self, metadata, *, failed):
        self.peers[metadata] -= 1
        assert self.peers[metadata] >= 0

    def read(self, peer, process, local, remote, sizes):
        source = self.network.agents[peer]
        pieces = list(zip(local.tolist(), remote.tolist(), sizes.tolist(), strict=True))
        assert all(self.holds(mine, n) for mine, _, n in pieces), "not its own memory"
        assert self.peers.get(peer), "not connected"
        reading = Reading(self, source, pieces)
        if not all(source.holds(theirs, n) for _, theirs, n in pieces) or source.is_closed:
            reading.fail("no such memory")
        elif self.network.immediate:
            reading.land()
        else:
            self.network.reads.append(reading)
        return reading

    def notify(self, peer, message):
        self.network.agents[peer].messages.append(message)

    def poll(self):
        messages, self.messages = self.messages, []
        return messages

    def close(self):
        self.was_in_use = any(reading.reader is self for reading in self.network.reads)
        self.is_closed = True


class Reading:
    """A READ: its bytes are fetched once each, at any time, and land at any later time."""

    def __init__(self, reader, source, pieces):
        self.reader, self.source, self.pieces = reader, source, pieces
        self.words = [
            (local + i, remote + i, min(_WORD, size - i))
            for local, remote, size in pieces for i in range(0, size, _WORD)
        ]  # fmt: skip
        self.fetched, self.failure, self.is_over = {}, None, False

    def done(self):
        return self.is_over

    def fetch(self, words=None):
        """Fetch some words, or all that are missing."""
        for local, remote, size in self.words if words is None else words:
            if local not in self.fetched:
                self.fetched[local] = ctypes.string_at(remote, size)

    def land(self, share=1.0):
        """Write what was fetched to the target, all of it or the first share."""
        if share == 1.0:
            if len(self.words) * _WORD > 1 << 16 and not self.fetched:  # quickly
                for local, remote, size in self.pieces:
                    ctypes.memmove(local, remote, size)
            else:
                self.fetch()
                self._write(len(self.words))
            self.end()
        else:
            self._write(int(share * len(self.words)))

    def _write(self, count):
        for local, _, _ in self.words[:count]:
            if local in self.fetched:
                ctypes.memmove(local, self.fetched[local], len(self.fetched[local]))

    def fail(self, why="lost"):
        self.failure = RuntimeError(why)
        self.end()

    def end(self):
        self.is_over = True
        if self in self.reader.network.reads:
            self.reader.network.reads.remove(self)
