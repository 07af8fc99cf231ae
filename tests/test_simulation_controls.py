"""Faults put back, and guards taken away: simulated worlds find each of them."""

from contextlib import contextmanager

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulation import PROTOCOLS
from support.world import search

from kvcupy.cache import threads
from kvcupy.cache.paged import exchange, states
from kvcupy.cache.tiered import cache, disk_blocks, leases
from kvcupy.remote.migration import protocol, receiver, sender

MAX_SEEDS = 1500


def handshakes_with_timeouts_of_the_socket_option(patch):
    """A silent TLS peer hangs both ends: Python retries without end after such a timeout."""

    def encrypt(connection, tls, deadline, entered, **options):
        protocol.set_timeout(connection, deadline)
        encrypted = tls.wrap_socket(connection, **options)
        entered(encrypted)
        return encrypted

    patch.setattr(protocol, "encrypt", encrypt)


def crowds_dropped(patch):
    """More than 16 handshakes at once are dropped instead of queued, and nobody tries again."""
    make_space = sender.PageSender._make_space

    def drop(self):
        if (retry_at := make_space(self)) > 0:
            self._server.accept()[0].close()
        return retry_at

    patch.setattr(sender.PageSender, "_make_space", drop)
    patch.setattr(receiver, "_MAX_ATTEMPTS", 1)


def sequences_with_a_part_that_has_not_come(patch):
    """A sequence is taken for whole when the pages of one pool have arrived."""

    def synchronize(self):
        self._pulls[0].synchronize()

    patch.setattr(exchange.SequencePull, "synchronize", synchronize)


def states_that_leave_before_they_are_written(patch):
    """The state goes out without the copy at the end of its step."""
    hold = states.States.hold
    patch.setattr(states.States, "hold", lambda *own: (hold(*own)[0], lambda: None))


def read_errors_taken_for_damage(patch):
    """A momentary read error erases good blocks."""
    run = disk_blocks.DiskBlocks.run

    def forgetful(self, move):
        run(self, move)
        if move.is_read:
            move.failed.clear()

    patch.setattr(disk_blocks.DiskBlocks, "run", forgetful)


def torn_blocks_taken_for_whole(patch):
    """A block that a power failure has torn stands in for the write of a newer copy."""

    class Nothing(set):
        def update(self, hashes):
            pass

    make = disk_blocks.DiskBlocks.__init__

    def unsuspecting(self, *arguments, **options):
        make(self, *arguments, **options)
        self.unverified = Nothing()

    patch.setattr(disk_blocks.DiskBlocks, "__init__", unsuspecting)


def disk_reads_that_stop_other_calls(patch):
    """A slow disk stops every call, as if its reads held the lock of the cache."""
    carry_out, match = leases.DiskReads.carry_out, cache.TieredCache.match
    reading = []

    def read(self):
        reading.append(self._shared)
        try:
            carry_out(self)
        finally:
            reading.remove(self._shared)

    def wait_and_match(self, hashes):
        while self._shared in reading:
            threads.time.sleep(1e-3)
        return match(self, hashes)

    patch.setattr(leases.DiskReads, "carry_out", read)
    patch.setattr(cache.TieredCache, "match", wait_and_match)


def sockets_replaced_without_a_lock(patch):
    """Of two senders over one stale socket, the second unlinks the live socket of the first."""

    @contextmanager
    def unlocked(*arguments):
        yield

    patch.setattr(protocol, "_locked", unlocked)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("migration", handshakes_with_timeouts_of_the_socket_option),
        ("migration", crowds_dropped),
        ("sequences", sequences_with_a_part_that_has_not_come),
        ("sequences", states_that_leave_before_they_are_written),
        ("disk", read_errors_taken_for_damage),
        ("disk", torn_blocks_taken_for_whole),
        ("disk", disk_reads_that_stop_other_calls),
        ("stale_socket", sockets_replaced_without_a_lock),
    ],
)  # fmt: skip
def test_it_is_found(name, fault, monkeypatch, record_property):
    fault(monkeypatch)
    failure = search(PROTOCOLS[name], range(MAX_SEEDS))
    assert failure is not None, f"{MAX_SEEDS} seeds of {name} did not notice it"
    print(f"{fault.__name__}: seed {failure.seed}: {str(failure.error)[:120]}")
