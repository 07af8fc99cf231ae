"""Prefixes that requests wait for: looked up, fetched to host memory in threads, and held there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ...cache.tiered.cache import TieredCache
from ...cache.tiered.holds import HeldBlocks
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError, ProcessLocal
from .groups import BlockKey, Groups, Keys
from .steps import Found

NUM_FETCHERS = 4
MAX_HELD_SHARE = 0.5  # of the host pages
_LATE_FETCH_BACKOFF_S = 10.0
_FETCH_TIMEOUT_S, _FETCH_TIMEOUT_S_PER_TOKEN = 1.0, 0.25 / 1024
_QUEUE_TIMEOUT_FACTOR = 10  # of the timeout of the fetch


class Threads:
    """Daemon threads that call functions in order; one that hangs does not keep the process."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name="kvcupy fetch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class HeldPrefix:
    """A usable prefix in host memory, until the release of its blocks."""

    def __init__(
        self, groups: Groups, num_units: int, wanted: Sequence[BlockKey], held: HeldBlocks
    ) -> None:
        self.held = held
        self.numbers = {block: number for number, block in enumerate(wanted)}
        tiers: dict[int, str] = {}
        for (group, index), source in zip(wanted, held.sources, strict=False):
            tiers.setdefault(index // groups.groups[group].per_unit, source)
        sources: list[str] = []
        for unit in reversed(range(num_units)):  # where no group needs a block, as the next one
            sources.append(tiers.get(unit, sources[-1] if sources else "host"))
        self.found = Found(tuple(reversed(sources)))


class Lookup:
    """A request whose blocks are to be fetched to host memory, or are held there."""

    def __init__(self, first: int, keys: Keys, num_units: int, seconds: float) -> None:
        self.first = first  # unit
        self.keys = keys  # of the units from the first on
        self.num_units = num_units
        self.seconds = seconds  # for the fetch
        self.deadline = time.monotonic() + _QUEUE_TIMEOUT_FACTOR * seconds
        self.num_held = 0  # blocks that count as held, also while they are being fetched
        self.is_started = False
        self.prefix: HeldPrefix | None = None  # once fetched
        self.is_dropped = False  # no request waits for it any more

    @property
    def end(self) -> int:
        """The unit after the last one that was requested."""
        return self.first + self.num_units

    def numbers(self, groups: Groups, blocks: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Return the number of each block of the request among those held, where it is held."""
        if self.prefix is None:
            return {}
        firsts = [self.first * group.per_unit for group in groups.groups]
        held = self.prefix.numbers
        found = {(g, i): held.get((g, i - firsts[g])) for g, i in blocks}
        return {block: number for block, number in found.items() if number is not None}


class Lookups(ProcessLocal):
    """The lookups of one worker. Called by the scheduler in the same process, or for it."""

    def __init__(self, cache: TieredCache, groups: Groups, *, has_stores: bool) -> None:
        self._cache, self._groups, self._has_stores = cache, groups, has_stores
        self._lock = threading.Lock()
        self._generation = 0
        self._lookups: dict[str, Lookup] = {}
        self._claimed: dict[int, Lookup] = {}  # lookups whose load is in a step, by number
        self._num_claims = 0  # so far
        self._num_held = 0  # blocks, including those being fetched
        self._skip_until = 0.0
        self._lost: set[str] = set()  # requests whose lookup has failed
        self._fetchers = Threads(NUM_FETCHERS)
        self._log = BoundedLog(cache_logger)

    def find(self, request: str, first: int, keys: Keys) -> Found | None:
        """Hold the longest usable prefix in host memory; None while blocks are being fetched."""
        num_units = min(
            len(own) // group.per_unit
            for own, group in zip(keys, self._groups.groups, strict=True)
        )  # fmt: skip
        with self._lock:
            lookup = self._lookups.get(request)
            if lookup is not None and (lookup.first > first or lookup.end > first + num_units):
                self._drop(request)
                lookup = None
            if lookup is not None:
                if lookup.prefix is not None:
                    skipped = first - lookup.first
                    return Found(lookup.prefix.found.sources[skipped : skipped + num_units])
                if self._has_time(lookup):
                    self._submit(request, lookup)
                    return None
                self._drop(request)
        if not num_units or request in self._lost:
            return Found()
        try:
            in_host = self._longest(keys, num_units, in_stores=False)
            is_all = in_host == num_units or not self._has_stores
            if is_all or lookup is not None or self._skips:
                return self._hold_now(request, Lookup(first, keys, num_units, 0.0), in_host)
        except KvcupyError as error:
            self._log.warning("blocks could not be looked up: %s", error)
            return Found()
        num_tokens = num_units * self._groups.unit_tokens
        seconds = _FETCH_TIMEOUT_S + _FETCH_TIMEOUT_S_PER_TOKEN * num_tokens
        with self._lock:
            self._lookups[request] = lookup = Lookup(first, keys, num_units, seconds)
            self._submit(request, lookup)
        return None

    @property
    def _skips(self) -> bool:
        """Whether to do without stores, after a fetch that was late."""
        return time.monotonic() < self._skip_until

    def _has_time(self, lookup: Lookup) -> bool:
        """Return whether to wait longer for a lookup. The caller holds the lock."""
        if time.monotonic() < lookup.deadline:
            return lookup.is_started or not self._skips
        if lookup.is_started:
            self._note_late()
        return False

    def _note_late(self) -> None:
        self._skip_until = time.monotonic() + _LATE_FETCH_BACKOFF_S
        self._log.warning(
            "blocks were not fetched in time; the next %d s do without", _LATE_FETCH_BACKOFF_S
        )

    def _submit(self, request: str, lookup: Lookup) -> None:
        """Queue a fetch, unless too many blocks are held. The caller holds the lock."""
        count = len(self._groups.needed(lookup.num_units))
        max_held = int(MAX_HELD_SHARE * self._cache.host_pool.num_pages)
        if lookup.num_held or (self._num_held and self._num_held + count > max_held):
            return
        lookup.num_held = count
        self._num_held += count
        self._fetchers.submit(partial(self._fetch, request, lookup))

    # --- Holding ---

    def _longest(self, keys: Keys, length: int, *, in_stores: bool) -> int:
        """Return how many units of a prefix are usable, with blocks of stores or without."""

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            hashes = [keys[number][index] for index in indices]
            cache = self._cache
            count = cache.match(hashes).stores if in_stores else cache._num_here(hashes)
            return None if count == len(hashes) else indices[count]

        return self._groups.longest(length, first_missing)

    def _hold(self, keys: Keys, length: int, *, seconds: float) -> HeldPrefix | None:
        """Hold the longest usable prefix of up to `length` units; None if no prefix is usable."""
        ends = time.monotonic() + seconds
        missing: set[BlockKey] = set()
        while length:
            wanted = self._groups.needed(length)
            held = self._cache.hold(
                [keys[number][index] for number, index in wanted],
                deadline_s=max(0.0, ends - time.monotonic()),
            )  # fmt: skip
            num_units = length
            if held.num_blocks < len(wanted):
                missing.add(wanted[held.num_blocks])
                wanted = wanted[: held.num_blocks]
                num_units = self._groups.longest(length, _first_not(set(wanted).__contains__))
            if num_units:
                return HeldPrefix(self._groups, num_units, wanted, held)
            held.release()
            length = self._groups.longest(length, _first_not(lambda block: block not in missing))
        return None

    def _hold_now(self, request: str, lookup: Lookup, in_host: int) -> Found:
        """Hold a prefix that is in host memory."""
        prefix = self._hold(lookup.keys, in_host, seconds=0.0)
        if prefix is None:
            return Found()
        with self._lock:
            self._lookups[request] = lookup
            self._keep(lookup, prefix)
        return prefix.found

    def _keep(self, lookup: Lookup, prefix: HeldPrefix) -> None:
        """Note what is held for a request. The caller holds the lock."""
        self._num_held += prefix.held.num_blocks - lookup.num_held
        lookup.prefix, lookup.num_held = prefix, prefix.held.num_blocks

    def _fetch(self, request: str, lookup: Lookup) -> None:
        """Fetch blocks to host memory, in a thread."""
        started = time.monotonic()
        with self._lock:
            is_wanted = not lookup.is_dropped
            if not is_wanted:
                return
            lookup.is_started, lookup.deadline = True, started + 2 * lookup.seconds
        keys, length = lookup.keys, lookup.num_units
        try:
            if len(self._groups) > 1:  # each length needs other blocks
                length = self._longest(keys, length, in_stores=True)
            prefix = self._hold(keys, length, seconds=lookup.seconds)
        except Exception as error:  # the engine computes the blocks
            self._log.warning("blocks could not be fetched: %s: %s", type(error).__name__, error)
            with self._lock:
                if self._lookups.get(request) is lookup:
                    self._lost.add(request)
                    self._drop(request)
            return
        with self._lock:
            is_wanted = not lookup.is_dropped
            if not is_wanted:
                if prefix is not None:
                    prefix.held.release()
                return
            num_found = 0 if prefix is None else prefix.found.num_units
            if num_found < lookup.num_units and time.monotonic() - started >= lookup.seconds:
                self._note_late()
            if prefix is None:
                self._lost.add(request)
                self._drop(request)
            else:
                self._keep(lookup, prefix)

    # --- The end of a lookup ---

    def claim(self, request: str) -> int:
        """Reserve the blocks held for a request for its load; return a number for the step.

        The scheduler may be a step ahead, and look up the same request again before the load.
        """
        with self._lock:
            self._num_claims += 1
            if (lookup := self._lookups.pop(request, None)) is not None:
                self._claimed[self._num_claims] = lookup
            return self._num_claims

    def take(self, request: str, claim: int | None) -> Lookup | None:
        """Return the lookup of a load, which `release` ends."""
        with self._lock:
            if claim is None:
                return self._lookups.pop(request, None)
            return self._claimed.pop(claim, None)

    def release(self, lookup: Lookup) -> None:
        """Let the blocks of a lookup be evicted."""
        with self._lock:
            self._release(lookup)

    def drop(self, request: str) -> None:
        """Let blocks be evicted that were held for a request."""
        with self._lock:
            self._drop(request)
            self._lost.discard(request)

    def begin(self, generation: int) -> None:
        """Drop the lookups of earlier generations; those in a step are loaded with it."""
        with self._lock:
            if generation > self._generation:
                self._generation = generation
                for request in list(self._lookups):
                    self._drop(request)
                self._lost.clear()

    def stop(self) -> None:
        self._fetchers.stop()

    def _drop(self, request: str) -> None:
        """Forget the lookup of a request. The caller holds the lock."""
        if (lookup := self._lookups.pop(request, None)) is not None:
            self._release(lookup)

    def _release(self, lookup: Lookup) -> None:
        lookup.is_dropped = True
        self._num_held -= lookup.num_held
        if lookup.prefix is not None:
            lookup.prefix.held.release()


def _first_not(
    has: Callable[[BlockKey], bool],
) -> Callable[[int, Sequence[int]], int | None]:
    """Return a function that finds the first block of which `has` is false."""
    return lambda number, indices: next((i for i in indices if not has((number, i))), None)
