"""Faults put back, and guards taken away: simulated worlds find each of them."""

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulated_tiers import tiers
from support.world import search

from kvcupy.cache import threads
from kvcupy.cache.tiered import cache, page_tier, store_tier

MAX_SEEDS = 1500


def blocks_that_go_before_they_are_put(patch):
    """No store counts as usable, so that nothing waits for its puts."""
    patch.setattr(store_tier.StoreTier, "usable_bits", 0)


def flushes_that_put_only_what_the_host_has(patch):
    """Blocks that only the device has are not saved by a flush."""
    patch.setattr(cache, "_save_some", lambda tiers, hashes, incomplete: hashes.clear() or 0)


def pages_that_are_reused_during_a_put(patch):
    """A block counts as put, and its page as unused, as soon as the put begins."""
    take, release = store_tier.StoreTier._take_queued, page_tier.PageTier.release

    def take_unheld(self, on, state):
        pages = take(self, on, state)
        for page in pages:
            release(on.host, page)
            on.host.unwritten.pop(page)
        return pages

    def release_held(self, page):
        if page in self.held:
            release(self, page)

    patch.setattr(store_tier.StoreTier, "_take_queued", take_unheld)
    patch.setattr(page_tier.PageTier, "release", release_held)


def stores_that_stop_other_calls(patch):
    """A slow store stops every call, as if its calls held the lock of the cache."""
    ask, match = store_tier.StoreTier._ask, cache.TieredCache.match
    asking = []

    def ask_and_note(self, state, call):
        asking.append(self)
        try:
            return ask(self, state, call)
        finally:
            asking.remove(self)

    def wait_and_match(self, hashes):
        while self._tiers[0].store in asking:
            threads.time.sleep(1e-3)
        return match(self, hashes)

    patch.setattr(store_tier.StoreTier, "_ask", ask_and_note)
    patch.setattr(cache.TieredCache, "match", wait_and_match)


@pytest.mark.parametrize(
    "fault",
    [
        blocks_that_go_before_they_are_put, flushes_that_put_only_what_the_host_has,
        pages_that_are_reused_during_a_put, stores_that_stop_other_calls,
    ],
)  # fmt: skip
def test_it_is_found(fault, monkeypatch):
    fault(monkeypatch)
    failure = search(tiers, range(MAX_SEEDS))
    assert failure is not None, f"{MAX_SEEDS} seeds did not notice it"
    print(f"{fault.__name__}: seed {failure.seed}: {str(failure.error)[:120]}")
