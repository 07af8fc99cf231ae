"""The way up: blocks of a prefix are pinned on the device, those of lower tiers in one load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import CacheFull, DeviceError, KvcupyError
from ...pickling import ProcessLocal
from ..completion import waiting_stream
from .tiers import Copy, Flight, Room, SharedTiers, Tiers, evict

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from ..pages import Pages


class Match(NamedTuple):
    """How many leading blocks of a prefix are known.

    Attributes
    ----------
    device : on the device
    host : on the device or in host memory
    disk : in any tier
    """

    device: int
    host: int
    disk: int


class Lease(ProcessLocal):
    """Blocks on the device, pinned until they are released. Made by `TieredCache.acquire`.

    What reads the pages waits by `wait_layer` or `wait` first. Threads may share a lease.

    Attributes
    ----------
    pages : int64 (num_blocks,), the device page of each block, read-only
    num_blocks : leading blocks of the hashes that were asked for
    released : whether `release` was called
    completion : `Completion` of the transfers that bring the blocks, for as long as it is held
    """

    def __init__(self, shared: SharedTiers, copies: list[Copy]) -> None:
        self.pages: Pages = np.array([copy.page for copy in copies], np.int64)
        self.pages.flags.writeable = False
        self.num_blocks = len(copies)
        self.released = False
        # Each brings some of the blocks, for this lease or for others that came before it.
        arriving = {id(f): f for c in copies if (f := c.filled) is not None and not f.over}
        self.completion = LeaseCompletion(shared, tuple(arriving.values()))
        self._shared = shared
        self._copies = copies

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<Lease of {self.num_blocks} block{'s' * (self.num_blocks != 1)}, {state}>"

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a compute stream wait until one layer of all blocks is in place.

        Parameters
        ----------
        layer : 0 to num_layers - 1
        stream : Stream, or a CuPy or torch stream; None: the current one. The host does not
            wait, except where the stream is the calling thread itself

        Raises
        ------
        TypeError, ValueError : an argument does not fit
        CaptureError : the stream is being captured
        KvcupyError : the lease has been released
        DeviceError : a transfer that brings blocks has failed, now or earlier. The cache has
            forgotten those blocks on the device; the pages are the lease's until it is released
        """
        layer = self._shared.engine.layer_number(layer)
        self.completion.wait_layer(layer, self._waiting(stream))

    def wait(self, stream: Any = None) -> None:
        """Let later work of a compute stream wait for all layers; otherwise like `wait_layer`."""
        self.completion.wait(self._waiting(stream))

    def release(self) -> None:
        """Unpin the blocks, which nobody reads any more by way of this lease. Again: a no-op."""
        with self._shared.locked() as tiers:  # of a closed cache too
            if not self.released:
                self.released = True
                tiers.unpin(self._copies)
        self.completion.release()

    def _waiting(self, stream: Any) -> Stream:
        waiting = waiting_stream(self._shared.engine.device, stream, "blocks")
        if self.released:
            raise KvcupyError("the lease has been released: its pages may be others' by now")
        return waiting


class LeaseCompletion:
    """All that brings the blocks of a lease; nothing more once the lease is released."""

    def __init__(self, shared: SharedTiers, flights: tuple[Flight, ...]) -> None:
        self._shared = shared
        self._flights = flights

    @property
    def failure(self) -> BaseException | None:
        return next((f.failure for f in self._flights if f.failure is not None), None)

    def done(self) -> bool:
        with self._shared.locked():
            return all([flight.done() for flight in self._flights])

    def synchronize(self) -> None:
        for flight in self._flights:
            flight.synchronize()

    def wait(self, stream: Any = None) -> None:
        self._wait(lambda flight: flight.wait(stream))

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self._wait(lambda flight: flight.wait_layer(layer, stream))

    def release(self) -> None:
        """Forget the transfers: the pages may be others' from now on."""
        self._flights = ()

    def _wait(self, wait: Callable[[Flight], None]) -> None:
        for flight in self._flights:
            try:
                wait(flight)
            except DeviceError as error:
                with self._shared.locked() as tiers:
                    flight.fail(error)
                    tiers.drop(flight)
                raise


# --- Acquiring ---


@dataclass
class Plan:
    """What an acquire will do.

    Attributes
    ----------
    found : leading hashes that are known
    loads : those of them that are not on the device, each once
    reads : those of the loads that are on disk alone
    num_free : device pages that are free for the loads
    victims : device copies that go for the others
    saves : those of them that are saved, as far as `room` has pages behind those of the reads
    room : the host pages for both
    """

    found: list[int]
    loads: list[int]
    reads: list[int]
    num_free: int
    victims: list[Copy]
    saves: list[Copy]
    room: Room


def plan(tiers: Tiers, hashes: list[int]) -> Plan:
    """Find the leading blocks, and room for them; nothing changes.

    Raises
    ------
    CacheFull : there is no room for them
    Blocked : to wait for a transfer
    """
    device, host = tiers.device, tiers.host
    found = hashes
    missing: dict[int, None] = {}
    reads: dict[int, None] = {}
    for i, hash in enumerate(hashes):
        if hash in device.copies:
            continue
        if hash not in host.copies:
            if not tiers.on_disk(hash):
                found = hashes[:i]
                break
            reads[hash] = None
        missing[hash] = None
    loads = list(missing)
    num_free = min(len(loads), device.num_free) if loads else 0
    short = len(loads) - num_free
    victims = device.choose(short, set(found)) if short else []
    if len(victims) < short:
        tiers.wait_for_pages(device, num_free)
        raise CacheFull(
            f"hashes: expected at most {num_free + len(victims)} blocks to load, for which the "
            f"device pool has pages, got {len(loads)}"
        )
    saves = tiers.alone(victims)
    wanted = len(reads) + len(saves)
    room = Room()
    if wanted:
        leaving = {copy.hash for copy in victims}
        room = tiers.plan_host(wanted, must=len(reads), keep=missing, leaving=leaving)
    return Plan(found, loads, list(reads), num_free, victims, saves, room)


def make_way(tiers: Tiers, plan: Plan) -> bool:
    """Let some victims leave first, if there are too few host pages to save all of them at once.

    They go through the host tier to the disk, as long as that takes nothing away that is asked for.

    Returns
    -------
    whether some have left, so that another plan is needed
    """
    disk, to_spare = tiers.disk, plan.room.num_pages - len(plan.reads)
    if disk is None or to_spare >= len(plan.saves):
        return False
    if to_spare > 0:
        return evict(tiers, plan.victims, plan.loads) > 0
    # All host pages are taken by what is asked for: it can go to the disk, if that loses nothing.
    saves = plan.saves[: disk.num_free]
    return bool(saves) and evict(tiers, plan.victims[: plan.victims.index(saves[-1]) + 1]) > 0


def carry_out(tiers: Tiers, plan: Plan, hashes: list[int], after: Any) -> list[Copy]:
    """Bring the blocks of a plan to the device; return their copies, pinned.

    They are fewer than planned if blocks on disk turn out to be damaged.
    """
    device, host, counts = tiers.device, tiers.host, tiers.counts
    free = device.take(plan.num_free)
    try:
        pages = tiers.make_host(plan.room)
        try:
            read = _read(tiers, plan, pages.tolist())
            num_saves = min(len(plan.saves), len(pages) - len(plan.reads))
            saves = plan.saves[len(plan.saves) - num_saves :] if num_saves > 0 else []
            wanted = _cut(plan, len(read))
            victims = plan.victims[: max(0, wanted - len(free))]
            leaving = set(map(id, victims))
            saves = [copy for copy in saves if id(copy) in leaving]
            used = len(plan.reads) + len(saves)
            saved = tiers.save(saves, pages[len(plan.reads) : used], after)
        except BaseException:
            host.give_back(pages)
            raise
    except BaseException:
        device.give_back(free)
        raise
    host.give_back(np.concatenate((pages[len(read) : len(plan.reads)], pages[used:])))
    host.add(saved.values())
    host.use(plan.found, read)
    if tiers.disk is not None:
        tiers.disk.use(plan.found)
    behind = tiers.behind(victims, after)
    targets = np.concatenate((free[:wanted], tiers.leave(victims)))
    device.give_back(free[wanted:])
    loaded = _load(tiers, plan.loads, targets, behind) if wanted else {}
    device.use(plan.found, loaded)
    copies = [device.copies[hash] for hash in plan.found]
    tiers.pin(copies)
    counts.disk_hits += len(read)
    counts.host_hits += len(loaded) - len(read)
    counts.device_hits += len(copies) - len(loaded)
    counts.misses += len(hashes) - len(copies)
    return copies


def _read(tiers: Tiers, plan: Plan, pages: list[int]) -> dict[int, Copy]:
    """Read blocks from disk into the first host pages; return those before one that is damaged."""
    if not plan.reads or tiers.disk is None:
        return {}
    whole = tiers.disk.read(plan.reads, pages[: len(plan.reads)])
    return {hash: Copy(hash, page) for hash, page in zip(plan.reads[:whole], pages, strict=False)}


def _cut(plan: Plan, num_read: int) -> int:
    """Leave out what follows a block that could not be read; return how many are to be loaded."""
    if num_read < len(plan.reads):
        bad = plan.reads[num_read]
        plan.found = plan.found[: plan.found.index(bad)]
        plan.loads = plan.loads[: plan.loads.index(bad)]
    return len(plan.loads)


def _load(tiers: Tiers, hashes: list[int], targets: Any, after: Any) -> dict[int, Copy]:
    """Queue the load of blocks from the host tier; return their device copies."""
    sources = [tiers.host.copies[hash] for hash in hashes]
    try:
        transfer = tiers.engine.load([c.page for c in sources], targets, after=after)
    except BaseException:
        tiers.device.give_back(targets)
        raise
    made = [Copy(hash, page) for hash, page in zip(hashes, targets.tolist(), strict=True)]
    flight = Flight("load", transfer, made, [copy.arriving for copy in sources])
    tiers.flights.add(flight)
    for copy in made:
        copy.filled = copy.used = flight
    for copy in sources:
        copy.used = flight
    return {copy.hash: copy for copy in made}
