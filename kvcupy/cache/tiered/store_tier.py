"""The stores below the tiers of a cache: one thread puts blocks into all of them, and gets them.

    host page --put--> each store
    store --get--> host page (then loaded like any block of the host tier)

The thread calls one store at a time, and never with the lock of the tiers. Between calls it takes
the next job: puts that a call waits for, then blocks that an acquire waits for, then prefetches and
puts in alternation. No put is dropped: `PageTier.unwritten` has the stores that a block in host
memory is still to be put into, and such a block is not evicted.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...config import cache_logger
from ...errors import CacheFull, InterruptGuard, OrderError, finalize, in_child
from ...waiting import Waiters
from ..identity import PoolIdentity
from .changes import Described
from .in_flight import Arrivals
from .page_tier import PageTier

if TYPE_CHECKING:
    from ..pages import Pages
    from ..pool import Pool

_MAX_CALL_BYTES = 2**25  # per store call of more than one block
_MAX_BLOCKS_PER_CALL = 64
PATIENCE_S = 5.0  # for writes to stores, by calls that need room
JOIN_TIMEOUT_S = 0.5
_STORE_TIMEOUT_S = 10.0  # of a call, after which nothing waits for the store
_MAX_FAILURES = 3  # calls in a row, after which a store is skipped for a while
_RETRY_AFTER_S = 10.0
_FETCHES_PER_PUT = 4  # fetch steps between two puts, if both are queued
_FETCHED_SHARE = 0.5  # of the host pool, for blocks that are being fetched
_POLL_S, _MAX_POLL_S = 0.001, 0.05  # pauses while saves of queued puts are in flight
_OUTCOMES = ("stored", "known", "full", "failed")
_Answer = TypeVar("_Answer")

# Set by `kvcupy`: opens a store by URL, as `opener(url, host_pool, *, model, heads)`.
opener: Callable[..., Any] | None = None


class Store(Protocol):
    """Interface of `TieredCache` to a store, such as `BlockStore`.

    An exception counts as no answer. After `get` returns or raises, either nothing writes to the
    pages, or the allocator of the host pool holds them back (`PageAllocator._mark_busy`). Any
    thread may call `match`; one thread of the cache calls the others.
    """

    def match(self, hashes: Sequence[int]) -> int: ...  # number of leading blocks in the store
    def put(self, hashes: Sequence[int], pages: Sequence[int]) -> list[str]: ...
    def get(
        self, hashes: Sequence[int], pages: Sequence[int], *, deadline_s: float | None
    ) -> list[bool]: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class TiersProtocol(Protocol):
    """The part of `GroupTiers` that the stores use."""

    device: PageTier
    host: PageTier
    closed: bool

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def guard(self) -> InterruptGuard: ...
    def __contains__(self, hash: Any) -> bool: ...
    def require_open(self) -> None: ...
    def process_ended(self) -> None: ...
    def run(self, step: Callable[[], Any], *, may_be_closed: bool) -> Any: ...
    def describe(self, blocks: Described, hashes: Iterable[int]) -> None: ...
    def plan_host_eviction(self, count: int, *, keep: Collection[int]) -> Any: ...
    def evict_from_host(self, plan: Any) -> Pages: ...


def open_stores(
    items: Any, pool: Pool, model: str, heads: tuple[int, int] | None, identity: PoolIdentity
) -> list[StoreState]:
    """Open the argument `stores` of a TieredCache."""
    if isinstance(items, str) or not isinstance(items, Sequence):
        kind = type(items).__name__  # a URL may contain a password
        raise TypeError(f"stores: expected a sequence of stores, got {kind}")
    states: list[StoreState] = []
    try:
        for item in items:
            is_opened = callable(getattr(item, "match", None))
            if is_opened:
                store = item
            elif isinstance(item, str):
                assert opener is not None
                store = opener(item, pool, model=model, heads=heads)
            elif callable(item):
                store = item(pool, model)
            else:
                kind = type(item).__name__
                raise TypeError(f"stores: expected URLs, functions and BlockStores, got {kind}")
            states.append(StoreState(store, len(states), is_owned=not is_opened))
            _check_store(store, pool, identity, is_opened and model == "" and heads is None)
    except BaseException:
        for state in states:
            state.close()
        raise
    return states


def _check_store(store: Any, pool: Pool, identity: PoolIdentity, any_model: bool) -> None:
    """Raise unless a store has blocks of a pool. With `any_model`, of whatever model."""
    for name in ("match", "put", "get", "clear", "close"):
        if not callable(getattr(store, name, None)):
            raise TypeError(f"stores: expected a store with {name}(), got {store!r}")
    if getattr(store, "pool", pool) is not pool:
        raise ValueError("stores: expected a store of host_pool, got one of another pool")
    stored = getattr(store, "identity", None)
    if not isinstance(stored, PoolIdentity):
        return
    if any_model:
        identity = replace(
            identity, model=stored.model, head_start=stored.head_start,
            total_kv_heads=stored.total_kv_heads,
        )  # fmt: skip
    if difference := identity.difference(stored):
        raise ValueError(f"stores: expected a store of the same blocks; {difference}")


class StoreState:
    """A store, the blocks to put into it, and whether it answers."""

    def __init__(self, store: Any, number: int, *, is_owned: bool) -> None:
        self.store, self.bit, self.is_owned = store, 1 << number, is_owned
        self.puts: OrderedDict[int, None] = OrderedDict()  # hashes, the next first
        self.retried: set[int] = set()  # hashes whose first put has failed
        self.call_began: float | None = None  # by the thread
        self._num_failures = 0  # since the last success
        self._retry_at = 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether a call of the thread takes too long."""
        began = self.call_began
        return began is not None and time.monotonic() - began > _STORE_TIMEOUT_S

    @property
    def is_usable(self) -> bool:
        """Whether to call the store."""
        is_failing = self._num_failures >= _MAX_FAILURES and time.monotonic() < self._retry_at
        return not is_failing and not self.is_stuck

    def note(self, failure: str | None) -> None:
        """Note the outcome of a call; only the first of several failures is logged."""
        if failure is None:
            self._num_failures = 0
            return
        if not self._num_failures:
            cache_logger.warning("a store of a cache fails: %s", failure)
        self._num_failures += 1
        self._retry_at = time.monotonic() + _RETRY_AFTER_S

    def try_again(self) -> None:
        self._retry_at = 0.0

    def close(self) -> None:
        """Close the store, if the cache has opened it."""
        if not self.is_owned:
            return
        self.is_owned = False
        try:
            self.store.close()
        except Exception as error:
            cache_logger.warning("a store of a cache fails to close: %s", error)


@dataclass
class StoreCounts:
    """Counts of blocks, calls, bytes and seconds, listed by `TieredCache.stats`."""

    store_hits: int = 0
    store_misses: int = 0
    store_late: int = 0
    store_skipped: int = 0
    store_stored: int = 0
    store_known: int = 0
    store_full: int = 0
    store_failed: int = 0
    store_errors: int = 0
    store_get_bytes: int = 0
    store_get_s: float = 0.0
    store_put_bytes: int = 0
    store_put_s: float = 0.0


class Fetch:
    """Blocks to fetch from the stores, in prefix order; one job of the worker."""

    def __init__(self, hashes: list[int], prefix: Described, *, urgent: bool) -> None:
        self.hashes = hashes
        self.prefix = prefix  # is not evicted for it, but the rest of it if nothing else can go
        self.urgent = urgent  # whether an acquire waits for it
        self.lacks_room_since: float | None = None
        self.steps: Iterator[None] | None = None  # set when begun


class StoreTier:
    """Queues of puts and fetches, guarded by the lock of the tiers, and their thread."""

    def __init__(self, states: Sequence[StoreState], pool: Pool, *, write_through: bool) -> None:
        self.states = states
        self.counts = StoreCounts()
        self.pending: dict[int, Fetch] = {}  # queued and running fetches, by hash
        self.max_pages = max(1, int(_FETCHED_SHARE * pool.num_pages))
        self._pool = pool
        self._through = write_through
        self._all_bits = sum(state.bit for state in states)
        blocks = max(1, _MAX_CALL_BYTES // pool.page_bytes)
        self.blocks_per_call = min(_MAX_BLOCKS_PER_CALL, blocks, max(1, pool.num_pages // 8))
        self._fetches: list[Fetch] = []
        self._arrivals: list[Arrivals] = []
        self._held: Counter[int] = Counter()  # number of holds of a fetched block, by page
        self._num_getting = 0  # pages that a get may write now
        self._num_putting = 0  # pages that a put may read now
        self._epoch = 0  # incremented when the tiers are emptied
        self._num_urgent = 0  # puts to do before anything else
        self._num_moves = 0  # completed gets and puts of the worker
        self._lock = threading.Lock()  # of the number of moves and the count of errors
        self._moved = Waiters(self._lock)
        self._num_fetched = 0  # fetch steps since the last put
        self._next_store = 0  # whose puts are next
        self._is_stopped = False
        self._lacks_thread = False  # none could be started
        self._order_error: OrderError | None = None  # of the worker, not raised yet
        # Weak, since the thread and finalizers refer to this object: the failure of a transfer has
        # a traceback, whose frames refer to the cache.
        self._attached: weakref.ref[TiersProtocol] | None = None
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is safe in finalizers

    def attach(self, owner: object, tiers: TiersProtocol) -> None:
        """Serve tiers until they are closed, or `owner` is garbage collected."""
        self._attached = weakref.ref(tiers)
        finalize(owner, self.stop)
        _open_stores.add(self)

    @property
    def _tiers(self) -> TiersProtocol:
        """The tiers; a step of the thread refers to them meanwhile."""
        tiers = None if self._attached is None else self._attached()
        assert tiers is not None
        return tiers

    # --- Called with the lock of the tiers ---

    def raise_order_error(self) -> None:
        """Raise, once, the OrderError of a call of a store or a step of the worker."""
        error, self._order_error = self._order_error, None
        if error is not None:
            raise OrderError(error.report)

    def stats(self) -> dict[str, float]:
        return {**vars(self.counts), "store_queued": sum(len(s.puts) for s in self.states)}

    @property
    def usable_bits(self) -> int:
        """The stores that answer: blocks that are not put into them are not evicted."""
        if not self._is_working:
            return 0
        return sum(state.bit for state in self.states if state.is_usable)

    def request(self, tiers: TiersProtocol, prefix: Described, *, urgent: bool) -> list[int]:
        """Queue fetches of the blocks that no tier has; return their hashes."""
        missing = [hash for hash in dict.fromkeys(prefix.hashes) if hash not in tiers]
        fresh = [hash for hash in missing if hash not in self.pending]
        space = 0 if self._is_stopped else max(0, 4 * self._pool.num_pages - len(self.pending))
        self.counts.store_skipped += len(fresh[space:])
        if fresh := fresh[:space]:
            fetch = Fetch(fresh, prefix, urgent=urgent)
            self.pending.update(dict.fromkeys(fresh, fetch))
            self._fetches.append(fetch)
            self._work()
        if urgent:
            for hash in missing:
                if (fetch_of := self.pending.get(hash)) is not None:
                    fetch_of.urgent = True
        return missing

    def _advance_arrivals(self, tiers: TiersProtocol, arrivals: Arrivals) -> bool:
        """Hold blocks that have arrived; return whether the wait for them is over."""
        for hash in arrivals.missing:
            page = tiers.host.pages.get(hash)
            if page is not None:
                tiers.host.hold(page)
                self._held[page] += 1
                arrivals.held.append(page)
            elif hash not in tiers:
                if hash in self.pending:
                    return False
                break
            arrivals.num_passed += 1
        arrivals.over.set()
        return True

    def _stop_waiting(self, arrivals: Arrivals) -> None:
        """End a wait. Late blocks count as misses but stay in flight."""
        if arrivals in self._arrivals:
            self._arrivals.remove(arrivals)
            self.counts.store_late += sum(hash in self.pending for hash in arrivals.missing)

    def release(self, tiers: TiersProtocol, arrivals: Arrivals) -> None:
        """End a wait, and release the holds on blocks that have arrived."""
        self._stop_waiting(arrivals)
        for page in arrivals.held:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
            tiers.host.release(page)
        arrivals.held = []

    def note_saved(self, tiers: TiersProtocol, saved: Mapping[int, int]) -> None:
        """Note blocks that are being saved to the host tier, and lack in the stores."""
        tiers.host.unwritten.update(dict.fromkeys(saved.values(), self._all_bits))
        if self._through:
            for state in self.states:
                state.puts.update(dict.fromkeys(saved))
            self._prune(tiers)
            self._work()

    def put_first(self, tiers: TiersProtocol, hashes: Sequence[int]) -> None:
        """Put blocks that are to be evicted before any others."""
        for state in self.states:
            for hash in reversed(hashes):
                state.puts[hash] = None
                state.puts.move_to_end(hash, last=False)
        self._prune(tiers)
        self._num_urgent = len(hashes) * len(self.states)
        self._work()

    def _prune(self, tiers: TiersProtocol) -> None:
        """Drop queued puts of blocks that have left the host tier: a store may be down for long."""
        for state in self.states:
            if len(state.puts) > 2 * self._pool.num_pages:
                state.puts = OrderedDict.fromkeys(h for h in state.puts if h in tiers.host.pages)
                state.retried &= state.puts.keys()

    def write_all(self, tiers: TiersProtocol) -> None:
        """Put all blocks of the host tier into the stores that lack them, also if they refused."""
        host = tiers.host
        for page, bits in host.refused.items():
            host.unwritten[page] = host.unwritten.get(page, 0) | bits
        host.refused.clear()
        for state in self.states:
            state.try_again()
            for page in host.order:
                if host.unwritten.get(page, 0) & state.bit:
                    state.puts[host.hashes[page]] = None
        self._work()

    @property
    def _is_working(self) -> bool:
        """Whether puts can be expected to end."""
        return not (self._is_stopped or self._lacks_thread or self._is_stuck)

    @property
    def _is_stuck(self) -> bool:
        return any(state.is_stuck for state in self.states)

    @property
    def is_writing(self) -> bool:
        """Whether a put is running, or waits for a store that answers."""
        if not self._is_working:
            return False
        return self._num_putting > 0 or any(s.puts and s.is_usable for s in self.states)

    @property
    def holding(self) -> bool:
        """Whether a call of a store that answers accesses host pages."""
        is_calling = self._num_getting > 0 or self._num_putting > 0
        return is_calling and not self._is_stuck

    def next_move(self) -> Callable[[float], object]:
        """Return a function that waits up to some seconds until a get or put is over, or stuck."""
        number = self._num_moves

        def wait(seconds: float) -> None:
            seconds = min(seconds, _STORE_TIMEOUT_S)
            self._moved.wait_for(lambda: self._num_moves != number, seconds)

        return wait

    def forget(self) -> None:
        """Drop all queued and running work, when the tiers are emptied."""
        self._epoch += 1
        self.pending, self._fetches = {}, []
        for state in self.states:
            state.puts.clear()
            state.retried.clear()
        for arrivals in self._arrivals:
            arrivals.over.set()
        self._arrivals = []

    def wake(self) -> None:
        """Wake the worker after a save has ended."""
        if any(state.puts for state in self.states):
            self._wake_up()

    def _work(self) -> None:
        """Wake the worker, or start it."""
        if self._thread is None and not self._is_stopped:
            thread = threading.Thread(target=self._run, name="kvcupy stores", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # thread limit of the system: continue without stores
                self.counts.store_errors += 1
                cache_logger.warning("cannot use the stores of a cache: %s", error)
                self._lacks_thread = True
                self.forget()
                return
            self._thread, self._lacks_thread = thread, False
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake.empty():  # else a wakeup is pending
            self._wake.put(None)

    # --- Called without the lock ---

    def count_known(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks in any of the stores."""
        count, lacking = 0, 0
        while count < len(hashes):
            state, num_known = self._find(hashes[count:], lacking)
            if state is None:
                break
            count, lacking = count + num_known, state.bit
        return count

    def clear_stores(self, seconds: float) -> None:
        """Remove the blocks of this cache from the stores, after a put that is running."""
        self._moved.wait_for(lambda: not self._num_putting, seconds)
        for state in self.states:
            self._ask(state, state.store.clear)

    def stop(self, join_s: float = 0.0) -> None:
        """Stop the worker after its current store call; wait up to `join_s` for its end."""
        self._is_stopped = True
        self._wake.put(None)
        thread = self._thread
        if join_s > 0 and thread is not None and thread is not threading.current_thread():
            thread.join(join_s)

    def close_stores(self) -> None:
        """Close the stores that the cache has opened; a running worker does so at its end."""
        if self._thread is None or not self._thread.is_alive():
            for state in self.states:
                state.close()

    def fetch(self, tiers: TiersProtocol, prefix: Described) -> Arrivals | None:
        """Start to fetch missing blocks; None if no block is missing. The caller releases them."""
        with tiers.lock, tiers.guard:
            tiers.require_open()
            arrivals = Arrivals(self.request(tiers, prefix, urgent=True))
            if not arrivals.hashes:
                return None
            if not self._advance_arrivals(tiers, arrivals):
                self._arrivals.append(arrivals)
        return arrivals

    def await_arrivals(self, tiers: TiersProtocol, arrivals: Arrivals, seconds: float) -> None:
        """Wait for blocks, as long as no call of a store takes too long."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0 and not self._is_stuck:
            if arrivals.over.wait(min(left, _STORE_TIMEOUT_S / 10)):
                break
        with tiers.lock, tiers.guard:
            self._stop_waiting(arrivals)

    def _find(self, hashes: Sequence[int], lacking: int) -> tuple[StoreState | None, int]:
        """Return the nearest store, but those in `lacking`, with the first blocks, and how many."""
        for state in self.states:
            if lacking & state.bit or not state.is_usable:
                continue
            known: Any = self._ask(state, partial(state.store.match, list(hashes)))
            if isinstance(known, int) and 0 <= known <= len(hashes):
                state.note(None)
                if known:
                    return state, known
            elif known is not None:
                self._note_error(state, f"match: expected at most {len(hashes)}, got {known!r}")
        return None, 0

    def _ask(self, state: StoreState, call: Callable[[], _Answer]) -> _Answer | None:
        """Call a store; return None if the call raises."""
        try:
            return call()
        except Exception as error:
            if isinstance(error, OrderError):
                self._order_error = self._order_error or error
            self._note_error(state, f"{type(error).__name__}: {error}")
            return None

    def _note_error(self, state: StoreState, failure: str) -> None:
        with self._lock:
            self.counts.store_errors += 1
        state.note(failure)

    # --- The worker ---

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._is_stopped:
            worked = False
            if self._attached is None or (tiers := self._attached()) is None:
                break
            try:
                if (step := self._next(tiers)) is not None:
                    worked = True
                    step()
            except OrderError as error:
                self._order_error = error
            except BaseException:  # unexpected: the job is lost, and the worker continues
                if not tiers.guard.is_broken:
                    cache_logger.exception("the stores of a cache: a step failed")
            step = tiers = None  # drops references to pages
            lacks_room = any(fetch.lacks_room_since for fetch in self._fetches)
            if worked and not lacks_room:
                pause_s = _POLL_S
                continue
            is_waiting = lacks_room or any(state.puts for state in self.states)
            try:
                self._wake.get(timeout=pause_s if is_waiting else None)
                pause_s = _POLL_S
            except queue.Empty:  # saves are still in flight, or a store does not answer
                pause_s = min(2 * pause_s, _MAX_POLL_S)
        for state in self.states:
            state.close()

    def _next(self, tiers: TiersProtocol) -> Callable[[], None] | None:
        """Return the next job, or None."""
        if tiers.guard.is_broken:
            return None
        with tiers.lock, tiers.guard:
            if tiers.closed:
                return None
            tiers.process_ended()
            is_turn_of_puts = not self._fetches or self._num_fetched >= _FETCHES_PER_PUT
            if (is_turn_of_puts or self._num_urgent > 0) and (put := self._next_put(tiers)):
                self._num_fetched = 0
                return put
            self._num_urgent = 0
            if not self._fetches:
                return None
            self._num_fetched += 1
            fetch = next((f for f in self._fetches if f.urgent), self._fetches[0])
            return partial(self._advance, fetch)

    def _next_put(self, tiers: TiersProtocol) -> Callable[[], None] | None:
        """Return the next put, of one store after the other; None if none is ready."""
        for i in range(len(self.states)):
            number = (self._next_store + i) % len(self.states)
            state = self.states[number]
            if state.puts and state.is_usable and (pages := self._take_queued(tiers, state)):
                self._next_store = (number + 1) % len(self.states)
                return partial(self._put, state, pages)
        return None

    def _take_queued(self, tiers: TiersProtocol, state: StoreState) -> list[int]:
        """Take the first queued blocks whose saves have ended, and hold their pages."""
        host, taken = tiers.host, list[int]()
        for hash in list(islice(state.puts, 4 * self.blocks_per_call)):
            page = host.pages.get(hash)
            if page is not None and host.arriving(page) is not None:
                continue
            del state.puts[hash]
            if page is not None and host.unwritten.get(page, 0) & state.bit:
                taken.append(page)
                host.hold(page)
                if len(taken) == self.blocks_per_call:
                    break
        self._num_putting += len(taken)
        return taken

    def _put(self, state: StoreState, pages: list[int]) -> None:
        """Put the blocks of held pages, and release them."""
        tiers, counts = self._tiers, self.counts
        hashes = [tiers.host.hashes[page] for page in pages]
        outcomes = ["failed"] * len(pages)
        started = time.perf_counter()
        state.call_began = time.monotonic()
        try:
            answer: Any = self._ask(state, lambda: state.store.put(hashes, pages))
            if isinstance(answer, list) and len(answer) == len(pages):
                outcomes = [each if each in _OUTCOMES else "failed" for each in answer]
                is_bad = outcomes.count("failed") == len(outcomes)
                state.note("put: all blocks failed" if is_bad else None)
            elif answer is not None:
                self._note_error(state, f"put: expected {len(pages)} outcomes, got {answer!r}")
        finally:
            state.call_began = None
            with tiers.lock, tiers.guard:
                for page, outcome in zip(pages, outcomes, strict=True):
                    if tiers.host.has_block(page):
                        self._note_put(tiers, state, page, outcome)
                    setattr(counts, f"store_{outcome}", getattr(counts, f"store_{outcome}") + 1)
                    counts.store_put_bytes += self._pool.page_bytes * (outcome == "stored")
                    tiers.host.release(page)
                counts.store_put_s += time.perf_counter() - started
                self._num_putting -= len(pages)
                self._num_urgent -= len(pages)
            self._note_moved()

    def _note_put(self, tiers: TiersProtocol, state: StoreState, page: int, outcome: str) -> None:
        """Note what a store has answered: a failed put is repeated once."""
        host = tiers.host
        hash = host.hashes[page]
        if outcome == "failed" and hash not in state.retried:
            state.retried.add(hash)
            state.puts[hash] = None
            return
        state.retried.discard(hash)
        if outcome in ("stored", "known"):
            host.stored.add(page)
        else:
            host.refused[page] = host.refused.get(page, 0) | state.bit
        left = host.unwritten.get(page, 0) & ~state.bit
        if left:
            host.unwritten[page] = left
        else:
            host.unwritten.pop(page, None)

    def _advance(self, fetch: Fetch) -> None:
        """Run the next step of a fetch; drop the fetch after its last step or a failure."""
        tiers = self._tiers
        if fetch.steps is None:
            fetch.steps = self._fetch(fetch)
        over = True
        try:
            over = next(fetch.steps, self) is self
        finally:
            with tiers.lock, tiers.guard:
                if over:
                    if fetch in self._fetches:
                        self._fetches.remove(fetch)
                    self._resolve(tiers, fetch, fetch.hashes)

    def _fetch(self, fetch: Fetch) -> Iterator[None]:
        """Get blocks, from the nearest store that has the next one, until no store has it."""
        with self._tiers.lock, self._tiers.guard:
            hashes = [hash for hash in fetch.hashes if hash not in self._tiers]
        lacking = 0  # stores that do not have the first of the blocks
        while hashes:
            state, num_known = self._find(hashes, lacking)
            if state is None:
                break
            known, hashes = hashes[:num_known], hashes[num_known:]
            lacked, lacking = lacking, state.bit
            while known:
                yield
                taken = self._take_piece(known, fetch)
                if taken is None:  # puts come first, which make room
                    continue
                epoch, known, pages = taken
                if not known:
                    break
                if not pages:
                    with self._tiers.lock, self._tiers.guard:
                        self.counts.store_skipped += len(known)
                        for arrivals in self._arrivals:
                            arrivals.lacks_room = arrivals.missing[0] in known
                        self._resolve(self._tiers, fetch, fetch.hashes)
                    return
                piece, known = known[: len(pages)], known[len(pages) :]
                num_arrived = self._get(fetch, state, piece, pages, epoch)
                if num_arrived < len(piece):
                    hashes = piece[num_arrived:] + known + hashes
                    lacking = state.bit | (0 if num_arrived else lacked)
                    break
                lacked = 0
        with self._tiers.lock, self._tiers.guard:
            self.counts.store_misses += len(hashes)

    def _get(
        self, fetch: Fetch, state: StoreState, hashes: list[int], pages: list[int], epoch: int
    ) -> int:
        """Get blocks from a store to host pages; return the number of leading ones that arrived."""
        tiers = self._tiers
        arrived = [False] * len(hashes)
        started = time.perf_counter()
        state.call_began = time.monotonic()
        try:
            call = partial(state.store.get, hashes, pages, deadline_s=None)
            answer: Any = self._ask(state, call)
            if isinstance(answer, list) and len(answer) == len(hashes):
                arrived = [each is True for each in answer]
                state.note(None)
                self._pool.note_written()
            elif answer is not None:
                self._note_error(state, f"get: expected {len(hashes)} answers, got {answer!r}")
        finally:
            state.call_began = None
            with tiers.lock, tiers.guard:
                self._add_fetched(tiers, state, hashes, pages, arrived, epoch, fetch.prefix)
                whole = [h for h, is_whole in zip(hashes, arrived, strict=True) if is_whole]
                self._resolve(tiers, fetch, whole)
                self.counts.store_get_s += time.perf_counter() - started
            self._note_moved()
        return arrived.index(False) if False in arrived else len(arrived)

    def _take_piece(
        self, hashes: list[int], fetch: Fetch
    ) -> tuple[int, list[int], list[int]] | None:
        """Return the epoch, blocks to get, and their pages; None if pages are to become free."""
        tiers = self._tiers

        def take() -> tuple[int, list[int], list[int]] | None:
            if fetch not in self._fetches:  # the tiers were emptied after this step was chosen
                return self._epoch, [], []
            missing = [hash for hash in hashes if hash not in tiers]
            pages, can_grow = self._take_pages(tiers, missing[: self.blocks_per_call], fetch)
            if pages or not can_grow:
                fetch.lacks_room_since = None
            elif (put := self._next_put(tiers)) is not None:
                puts.append(put)
                return None
            else:  # transfers are in flight
                now = time.monotonic()
                began = fetch.lacks_room_since = fetch.lacks_room_since or now
                if now - began < PATIENCE_S:
                    return None
            return self._epoch, missing, pages

        puts: list[Callable[[], None]] = []
        taken: tuple[int, list[int], list[int]] | None = tiers.run(take, may_be_closed=True)
        for put in puts:
            put()
        return taken

    def _take_pages(
        self, tiers: TiersProtocol, hashes: Sequence[int], fetch: Fetch
    ) -> tuple[list[int], bool]:
        """Take host pages for the first blocks; return them, and whether puts can free more."""
        if tiers.closed or not hashes:
            return [], False
        count = min(len(hashes), self.max_pages - self._num_getting - len(self._held))
        if count <= 0:
            return [], False
        device, prefix = tiers.device.pages, fetch.prefix.hashes
        plan = tiers.plan_host_eviction(count, keep={h for h in prefix if h not in device})
        if not plan.num_pages and not plan.can_grow:
            before = prefix[: prefix.index(hashes[0])]
            plan = tiers.plan_host_eviction(1, keep={h for h in before if h not in device})
        try:
            pages: list[int] = tiers.evict_from_host(plan).tolist()
        except CacheFull:  # another user of the pool took the pages
            return [], False
        self._num_getting += len(pages)
        return pages, plan.can_grow

    def _add_fetched(
        self, tiers: TiersProtocol, state: StoreState, hashes: list[int], pages: list[int],
        arrived: list[bool], epoch: int, prefix: Described,
    ) -> None:  # fmt: skip
        """Add arrived blocks to the host tier, for the nearer stores too; free other pages."""
        host = tiers.host
        self._num_getting -= len(pages)
        is_current = epoch == self._epoch and not tiers.closed
        new: dict[int, int] = {}
        unused = []
        for hash, page, is_whole in zip(hashes, pages, arrived, strict=True):
            self.counts.store_get_bytes += self._pool.page_bytes * is_whole
            if is_whole and is_current and hash not in host.pages:
                new[hash] = page
                host.stored.add(page)
                host.fetched.add(page)
                if nearer := state.bit - 1:
                    host.unwritten[page] = nearer
                    for other in self.states:
                        if other.bit & nearer:
                            other.puts[hash] = None
            else:
                unused.append(page)
        tiers.describe(prefix, new)
        host.use(hashes, new)
        host.give_back(unused)

    def _resolve(self, tiers: TiersProtocol, fetch: Fetch, hashes: Sequence[int]) -> None:
        """Record that blocks are no longer pending, and advance waiting acquires."""
        for hash in hashes:
            if self.pending.get(hash) is fetch:
                del self.pending[hash]
        self._arrivals = [a for a in self._arrivals if not self._advance_arrivals(tiers, a)]

    def _note_moved(self) -> None:
        with self._lock:
            self._num_moves += 1
            self._moved.notify()


_open_stores: weakref.WeakSet[StoreTier] = weakref.WeakSet()
in_child(_open_stores.clear)


@atexit.register
def _stop_at_exit() -> None:
    """Stop the workers before the interpreter unloads their modules."""
    for tier in list(_open_stores):
        tier.stop(join_s=JOIN_TIMEOUT_S)
