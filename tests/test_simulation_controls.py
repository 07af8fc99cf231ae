"""Faults put back, and guards taken away: simulated worlds find each of them."""

import math

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')
pytest.importorskip("redis", reason='pip install "kvcupy[redis]"')

from simulation import PROTOCOLS
from support.world import search

from kvcupy.cache import threads
from kvcupy.cache.tiered import cache, disk_blocks, leases
from kvcupy.remote.stores import mooncake, shm, store

MAX_SEEDS = 1500


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


def conditions_in_with_statements(patch):
    """An exception of a signal handler leaves a lock held for good."""

    class Users:
        def __init__(self, limit=math.inf):
            self._changed = threads.threading.Condition()
            self._count = 0

        def enter(self, timeout_s=0.0):
            with self._changed:
                self._count += 1
            return object()

        def leave(self, call):
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

        def close(self):
            with self._changed:
                self._changed.wait_for(lambda: self._count <= 0)
            return True

    patch.setattr(store, "Users", Users)


def stores_without_the_lock(patch):
    """Two writers change the file at once."""
    patch.setattr(shm.ShmBackend, "_lock", lambda self, deadline: True)
    patch.setattr(shm.ShmBackend, "_unlock", lambda self: None)


def stores_without_repair(patch):
    """The slots that a killed writer was filling are lost."""
    patch.setattr(shm.ShmBackend, "_recover", lambda self: self._words.__setitem__(0, 0))


def blocks_neither_confirmed_nor_verified(patch):
    """A block that is overwritten during its copy is served."""
    patch.setattr(shm.ShmBackend, "_confirmed", lambda self, read: read.header)
    patch.setattr(store.SharedStore, "_verify", lambda self, *arguments: True)


def pages_of_failed_transfers_reused(patch):
    """Bytes of a failed transfer land in pages that have a new owner."""
    patch.setattr(mooncake.MooncakeBackend, "busy", lambda self, keys: None)


def failed_transfers_taken_for_finished(patch):
    patch.setattr(mooncake, "_is_unsafe", lambda code: False)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("disk", read_errors_taken_for_damage),
        ("disk", torn_blocks_taken_for_whole),
        ("disk", disk_reads_that_stop_other_calls),
        ("interrupts", conditions_in_with_statements),
        ("shared_memory", stores_without_the_lock),
        ("shared_memory", stores_without_repair),
        ("shared_memory", blocks_neither_confirmed_nor_verified),
        ("mooncake", pages_of_failed_transfers_reused),
        ("mooncake", failed_transfers_taken_for_finished),
    ],
)  # fmt: skip
def test_it_is_found(name, fault, monkeypatch, record_property):
    fault(monkeypatch)
    failure = search(PROTOCOLS[name], range(MAX_SEEDS))
    assert failure is not None, f"{MAX_SEEDS} seeds of {name} did not notice it"
    print(f"{fault.__name__}: seed {failure.seed}: {str(failure.error)[:120]}")
