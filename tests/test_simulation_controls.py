"""Faults put back, and guards taken away: simulated worlds find each of them."""

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulation import PROTOCOLS
from support.world import search

from kvcupy.cache import threads
from kvcupy.cache.tiered import cache, disk_blocks, leases

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


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("disk", read_errors_taken_for_damage),
        ("disk", torn_blocks_taken_for_whole),
        ("disk", disk_reads_that_stop_other_calls),
    ],
)  # fmt: skip
def test_it_is_found(name, fault, monkeypatch, record_property):
    fault(monkeypatch)
    failure = search(PROTOCOLS[name], range(MAX_SEEDS))
    assert failure is not None, f"{MAX_SEEDS} seeds of {name} did not notice it"
    print(f"{fault.__name__}: seed {failure.seed}: {str(failure.error)[:120]}")
