"""The base of senders and receivers: pools, an agent of NIXL, and a thread that polls it."""

from __future__ import annotations

import abc
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ... import metrics
from ...cache.paged.cache import PagedKVCache
from ...cache.pages import Pages
from ...cache.pool import Pool
from ...errors import KvcupyError, ProcessLocal, finalize
from ...observe import Access
from ...waiting import Waiters
from . import agent
from .memory import PoolMemory
from .ticket import STATUS_BYTES, checked_secret

Sample = tuple[str, metrics.Labels, float]

_CLOSE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5e-5, 1e-3  # between steps while something is in use

_Self = TypeVar("_Self", bound="Endpoint")

monotonic = time.monotonic


class Endpoint(ProcessLocal, abc.ABC):
    """Base of senders and receivers, with registered memory for `num_slots` statuses."""

    _in_use: Collection[Any]  # offers or pulls that need the agent
    _idle_pause_s: float  # between steps while nothing is in use,
    _idle_s: float  # for so long; then the thread waits

    def __init__(self, pool: Any, secret: Any, num_slots: int) -> None:
        self.pools = _pools_of(pool)
        self._key = checked_secret(secret)
        self._memories = [PoolMemory(each) for each in self.pools]
        self._slots = _aligned_slots(num_slots)
        ranges = [each for memory in self._memories for each in memory.ranges]
        self._agent = agent.NixlAgent([*ranges, (self._slots.ctypes.data, self._slots.nbytes)])
        self._lock = threading.RLock()  # guards the fields below, and the fields of the subclass
        self._changed = Waiters(self._lock)
        self._thread: threading.Thread | None = None
        self._counts: Counter[Any] = Counter()
        self._closed = False
        self._finalize = finalize(self, self._agent.close, at_exit=True)
        metrics.follow(self, _samples_of, partial(self._totals, self._counts))

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _step(self) -> bool:
        """Do what is due; return whether there was anything."""

    @abc.abstractmethod
    def _samples(self) -> Iterator[Sample]: ...

    @staticmethod
    @abc.abstractmethod
    def _totals(counts: Counter[Any]) -> Iterator[Sample]:
        """Return the samples that stay once the object is gone."""

    # --- For the subclass ---

    def _require_open(self) -> None:
        if self._closed:
            raise KvcupyError(f"{type(self).__name__}: closed")

    def _begin_close(self) -> None:
        with self._lock:
            self._changed.notify()
            self._closed = True

    def _finish_close(self) -> None:
        """Wait for the thread, which closes the agent; without a thread, do both here."""
        thread = self._thread
        if thread is None or thread.ident is None:
            self._step()
            if not self._in_use:
                self._finalize()
        elif thread is not threading.current_thread():  # in a function that it calls
            thread.join(_CLOSE_TIMEOUT_S)

    def _start_thread(self) -> None:
        if self._thread is None or self._thread.ident is None:  # an interrupt kept it from starting
            name = f"kvcupy {type(self).__name__}"
            thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError as error:
                self._thread = None
                raise KvcupyError(
                    f"{type(self).__name__}: cannot start a thread: {error}"
                ) from error

    def _run_thread(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():  # as after an interrupted start
                return
        pause_s, polls_until = _FIRST_PAUSE_S, 0.0
        while self._in_use or not self._closed:
            if self._in_use:
                polls_until = monotonic() + self._idle_s
            if self._step():
                pause_s = _FIRST_PAUSE_S
            elif self._in_use:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:  # NIXL may have a message left to send, or a late receiver may read
                is_idle = monotonic() > polls_until
                self._changed.wait_for(
                    lambda: self._in_use or self._closed, None if is_idle else self._idle_pause_s
                )
        self._finalize()  # closes the agent


def _samples_of(end: Endpoint) -> Iterator[Sample]:
    with suppress(KvcupyError):
        yield from end._samples()


def _pools_of(pool: Any) -> tuple[Pool, ...]:
    if isinstance(pool, PagedKVCache):
        return pool.sequence_pools
    if not isinstance(pool, Pool):
        kind = type(pool).__name__
        raise TypeError(f"pool: expected a KVPool, an MLAPool or a PagedKVCache, got {kind}")
    return (pool,)


def _aligned_slots(count: int) -> np.ndarray[Any, Any]:
    """Return places for statuses, uint8 (count, STATUS_BYTES), each in one cache line."""
    memory = np.zeros((count + 1) * STATUS_BYTES, np.uint8)
    start = -memory.ctypes.data % STATUS_BYTES
    return memory[start : start + count * STATUS_BYTES].reshape(count, STATUS_BYTES)


def accesses(pool: Pool, pages: Pages, layer: int) -> list[Access]:
    """Describe accesses to a layer of some pages, for observers."""
    return [
        Access(part[page, layer - group.layers.start], name="pages")
        for group in pool.groups if layer in group.layers
        for part in (*group.parts, *group.scale_parts)
        for page in pages.tolist()
    ]  # fmt: skip
