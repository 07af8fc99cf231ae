"""A cache of blocks by content hash, on the device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import CacheFull, CaptureError, KvcupyError
from ...ops import checks
from ...pickling import ProcessLocal
from ..completion import StreamCompletion
from ..engine import TransferEngine
from ..pages import Pages, page_array
from . import leases, policies
from .disk import DiskBlocks
from .leases import Lease, Match
from .prefix import hash_list
from .tiers import Copy, Flight, PageTier, SharedTiers, Tiers, evict, save_into

if TYPE_CHECKING:
    from ...devices.protocol import Stream

_PIECE_BYTES = 2**26  # written under one hold of the lock


class TieredCache(ProcessLocal):
    """Keeps blocks, each a page of every layer, by hashes that stand for all up to their end.

    Parameters
    ----------
    device_pool, host_pool : pools as for `TransferEngine`. Others may use pages of both
    disk : path of a file, or None. One that is there already is opened with the blocks that it has
    disk_bytes : size of the file
    policy : which block of a tier goes first: "lru", "fifo", "lfu", "2q" (scan resistant), or a
        class, of which each tier gets an instance (see `policies.Policy`)
    write : when a block gets its copy in the next tier. "through": in host memory when it is
        inserted, as far as room can be made, and on disk when it is flushed or leaves host memory.
        "back": when it leaves the tier that it is in

    Attributes
    ----------
    engine : the TransferEngine between the pools
    device_pool, host_pool

    Raises
    ------
    TypeError, ValueError, OSError : an argument does not fit, or the file cannot be had

    Notes
    -----
    Blocks: a block stays where it is when a copy goes up, so the lower tiers have what is hot too,
    until their policy lets it go. No block is lost while the tiers below have room.

    Stream: pages are complete on the stream `after` when they are inserted, and not read by others
    than that of `after` when one acquires. A released lease's pages are read no more.

    Failure: a transfer that fails takes the copies along that it was to make, and nothing else.

    Threads may share a cache. One lock is held for bookkeeping, and while blocks go to disk or come
    from there, but not while a transfer is waited for. Capture: `acquire` and `insert` refuse.

    Examples
    --------
    >>> import kvcupy as kv
    >>> pools = [kv.KVPool(n, 2, 3, 1, 8, dtype="fp16", device="host") for n in (4, 16)]
    >>> cache = TieredCache(*pools)
    >>> pages = pools[0].allocator.alloc(2)
    >>> for layer in range(3):
    ...     pools[0].k(layer)[pages] = 5
    >>> cache.insert([0xA, 0xB], pages)
    []
    >>> cache.evict(2)
    >>> cache.match([0xA, 0xB, 0xC])
    Match(device=0, host=2, disk=2)
    >>> with cache.acquire([0xA, 0xB, 0xC]) as lease:
    ...     lease.wait_layer(0)
    ...     float(pools[0].k(0)[lease.pages[1], 0, 0, 0]), lease.num_blocks
    (5.0, 2)
    """

    def __init__(
        self,
        device_pool: Any,
        host_pool: Any,
        *,
        disk: Any = None,
        disk_bytes: int = 0,
        policy: Any = "lru",
        write: str = "through",
    ) -> None:
        if write not in ("through", "back"):
            raise ValueError(f'write: expected "through" or "back", got {write!r}')
        checks.require_int(disk_bytes, "disk_bytes")
        if disk is None and disk_bytes:
            raise ValueError(f"disk_bytes: expected 0 where there is no disk, got {disk_bytes}")
        orders = [policies.make(policy) for _ in range(3)]
        self._policy = policy
        self._through = write == "through"
        self.engine = TransferEngine(device_pool, host_pool)
        self.device_pool, self.host_pool = device_pool, host_pool
        blocks = None
        if disk is not None:
            try:
                blocks = DiskBlocks(disk, int(disk_bytes), host_pool, orders[2])
            except ValueError as error:
                if not str(error).startswith("num_bytes:"):
                    raise
                raise ValueError(f"disk_bytes:{str(error).removeprefix('num_bytes:')}") from None
        device = PageTier("device", device_pool, orders[0])
        host = PageTier("host", host_pool, orders[1])
        self._shared = SharedTiers(Tiers(self.engine, device, host, blocks))

    def __repr__(self) -> str:
        counts = self.stats()
        tiers = [f"{counts[f'{name}_blocks']} {name}" for name in ("device", "host", "disk")]
        return f"<TieredCache of {', '.join(tiers)} blocks>"

    # --- Looking blocks up ---

    def match(self, hashes: Any) -> Match:
        """Return how many leading blocks are on the device, in host memory too, and in any tier.

        Parameters
        ----------
        hashes : list or array of ints of 64 bits, from the first block of a prefix on

        Raises
        ------
        TypeError, ValueError : `hashes` are none
        """
        keys = hash_list(hashes)
        with self._shared.opened() as tiers:
            device, host = tiers.device.copies, tiers.host.copies
            counts, i = [], 0
            for known in (
                device.__contains__,
                lambda hash: hash in device or hash in host,
                tiers.__contains__,
            ):
                while i < len(keys) and known(keys[i]):
                    i += 1
                counts.append(i)
        return Match(*counts)

    def acquire(self, hashes: Any, *, after: Any = None) -> Lease:
        """Pin the leading blocks that are known, and start to load those not on the device.

        Parameters
        ----------
        hashes : as in `match`
        after : the compute stream that has read the pages of evicted blocks for the last time;
            None: the current one

        Returns
        -------
        Lease : of no block, if none is known

        Raises
        ------
        TypeError, ValueError, CaptureError : an argument does not fit
        CacheFull : too few pages are free or have blocks that may go; nothing has changed. With
            blocks from disk, all that is to be loaded needs pages of the host pool at once

        Notes
        -----
        All loads go out as one, layer by layer. The call reads blocks from disk before it returns;
        one that is damaged there is unknown from then on, and ends the lease.
        """
        keys = hash_list(hashes)
        on = self._stream(after)

        def change(tiers: Tiers) -> Lease | None:
            plan = leases.plan(tiers, keys)
            if leases.make_way(tiers, plan):
                return None
            return Lease(self._shared, leases.carry_out(tiers, plan, keys, on))

        while (lease := self._shared.attempt(change)) is None:
            pass
        return lease

    # --- Taking blocks in and letting them go ---

    def insert(self, hashes: Any, pages: Any, *, after: Any = None) -> list[int]:
        """Let the cache own pages, each with the block of a hash.

        Parameters
        ----------
        hashes : as in `match`; the blocks before them need not be known
        pages : list or integer array (n,) of pages that were allocated from the device pool, each
            once
        after : the compute stream that has written them; None: the current one

        Returns
        -------
        list of int : the pages whose blocks are on the device already; they stay the caller's

        Raises
        ------
        TypeError, ValueError, CaptureError : an argument does not fit; nothing has changed
        """
        keys, given = hash_list(hashes), page_array(pages)
        if len(keys) != len(given):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(given)}")
        on = self._stream(after)

        def change(tiers: Tiers) -> list[int]:
            _require_ownable(tiers.device, given)
            return _insert(tiers, keys, given, on, through=self._through)

        return self._shared.attempt(change)

    def evict(self, num_blocks: int) -> None:
        """Let blocks leave the device, and give their pages back to its allocator.

        Parameters
        ----------
        num_blocks : how many, of those that are not leased

        Raises
        ------
        TypeError, ValueError : `num_blocks` is no number of blocks
        CacheFull : fewer may go; nothing has changed

        Notes
        -----
        A block that no lower tier has is saved first, in the background: its page is free when
        that is done, and `alloc` waits for it.
        """
        checks.require_int(num_blocks, "num_blocks")
        if num_blocks < 0:
            raise ValueError(f"num_blocks: expected a number of blocks, got {num_blocks}")

        def change(tiers: Tiers) -> int:
            victims = tiers.device.choose(left)
            if len(victims) < left:
                raise CacheFull(
                    f"num_blocks: expected at most {len(victims)}, which are on the device and "
                    f"not leased, got {left}"
                )
            return evict(tiers, victims)

        left = int(num_blocks)
        while (left := left - self._shared.attempt(change)) > 0:
            pass

    def take_host_pages(self, n: int) -> Any:
        """Let blocks leave host memory, as far as must be, and give pages of its pool away.

        Returns
        -------
        int64 (n,) : the pages, which are the caller's until freed to `host_pool.allocator`

        Raises
        ------
        TypeError, ValueError : `n` is no number of pages
        CacheFull : there is no room for so many; nothing has changed
        """
        checks.require_int(n, "n")
        if n < 0:
            raise ValueError(f"n: expected a number of pages, got {n}")
        try:
            return self._shared.attempt(lambda t: t.make_host(t.plan_host(int(n), must=int(n))))
        except CacheFull:
            raise CacheFull(f"n: expected room for {n} pages in host memory, got less") from None

    def clear(self) -> None:
        """Forget all blocks in every tier.

        Raises
        ------
        KvcupyError : a block is leased; nothing has changed
        """
        orders = [policies.make(self._policy) for _ in range(3)]
        self._shared.clear(orders)

    # --- The file, and figures ---

    def flush(self) -> None:
        """Wait until saves are done, and until the disk has what it is to have.

        With write="through" that is what the host tier has, for which others go from a full disk,
        and what goes last from the host tier if there is not room for all. With "back" it is what
        has left the host tier.

        Raises
        ------
        OSError : the disk failed; blocks that could not be written stay in host memory
        """
        _flush(self._shared, through=self._through)

    def close(self) -> None:
        """Flush, close the file, and give the pages back; those of leases when they are released.

        Again it is a no-op. Only leases are of use after that.

        Raises
        ------
        OSError : as for `flush`; the cache is closed all the same
        """
        if self._shared.closed:
            return
        try:
            self.flush()
        except KvcupyError:
            if not self._shared.closed:  # else another thread has been quicker
                raise
        finally:
            self._shared.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._shared.closed

    def stats(self) -> dict[str, float]:
        """Return figures since the cache was made.

        Returns
        -------
        dict of numbers. `device_blocks`, `host_blocks`, `disk_blocks`: in each tier now.
        `device_hits`, `host_hits`, `disk_hits`, `misses`: blocks asked of `acquire`, by the
        highest tier that had them. `inserted`; `device_evicted`, `host_evicted`, `disk_evicted`;
        `lost`: blocks that left the last tier that had them, for want of room or by a failure.
        `failed_loads`, `failed_saves`: blocks. `load_bytes`, `load_s`, `save_bytes`, `save_s`,
        `disk_read_bytes`, `disk_read_s`, `disk_write_bytes`, `disk_write_s`: bytes and seconds of
        what is done. `disk_errors`: blocks that could not be written, or were damaged
        """
        return self._shared.stats()

    def _stream(self, after: Any) -> Stream:
        """Return a stream argument as a stream that is not being captured."""
        try:
            on = self.engine.device.as_stream(after)
        except (TypeError, ValueError) as error:
            raise type(error)(f"after{str(error).removeprefix('stream')}") from None
        if on.capturing:
            raise CaptureError("after: blocks cannot be moved as part of a capture")
        return on


# --- Blocks that come in ---


def _require_ownable(tier: PageTier, pages: Pages) -> None:
    """Refuse pages that are not allocated, given twice, or the cache's already."""
    ordered = tier.pool.allocator.require_allocated(pages)
    if len(owned := ordered[tier.owned[ordered]]):
        raise ValueError(f"pages: expected the caller's, got {owned[0]}, which is the cache's")


def _insert(
    tiers: Tiers, hashes: list[int], pages: Pages, on: Stream, *, through: bool
) -> list[int]:
    """Take blocks into the device tier; return the pages of those that are there already.

    Parameters
    ----------
    on : the stream that has written the pages
    through : copy them to the host tier, the first ones if there is not room for all
    """
    fresh: dict[int, int] = {}
    unneeded = []
    for hash, page in zip(hashes, pages.tolist(), strict=True):
        if hash in fresh or hash in tiers.device.copies:
            unneeded.append(page)
        else:
            fresh[hash] = page
    made = {hash: Copy(hash, page) for hash, page in fresh.items()}
    saved = _save_through(tiers, made, on) if through else {}
    _hold(tiers, list(made.values()), on)
    tiers.device.use(hashes, made)
    tiers.host.use(hashes, saved)
    if tiers.disk is not None:
        tiers.disk.use(hashes)
    tiers.counts.inserted += len(made)
    return unneeded


def _save_through(tiers: Tiers, made: dict[int, Copy], on: Stream) -> dict[int, Copy]:
    wanted = [copy for copy in made.values() if copy.hash not in tiers.host.copies]
    pages = tiers.make_host(tiers.plan_host(len(wanted), keep=made, wait=False))
    return save_into(tiers, wanted[: len(pages)], pages, on)


def _hold(tiers: Tiers, made: list[Copy], on: Stream) -> None:
    """Let nobody read the pages, or overwrite them, before the stream has written them."""
    written = StreamCompletion(on)
    if not made or (written.done() and written.failure is None):
        return
    flight = tiers.flights.add(Flight("insert", written, made, ()))
    for copy in made:
        copy.filled = flight
    tiers.device.pool.allocator.busy([copy.page for copy in made], written)


# --- To disk, so that they outlive the process ---


def _flush(shared: SharedTiers, *, through: bool) -> None:
    """Wait for saves; write what the host tier has to disk, if `through`; wait for the disk.

    Where the disk has not room for all of that, it gets what is to leave the host tier last.

    Raises
    ------
    OSError : the disk failed
    """
    with shared.opened() as tiers:
        saves = tiers.flights.saves()
    shared.engine.send()
    for flight in saves:
        flight.synchronize()
    with shared.opened() as tiers:
        disk = tiers.disk
        if disk is None:
            return
        wanted = list(tiers.host.order.victims())[-disk.num_slots :] if through else []
    keep = frozenset(wanted)
    size = max(1, _PIECE_BYTES // disk.page_bytes)
    failed: dict[int, OSError] = {}
    for start in range(0, len(wanted), size):
        piece = wanted[start : start + size]

        def change(tiers: Tiers, piece: Sequence[int] = piece) -> dict[int, OSError]:
            return _write(tiers, disk, piece, keep)

        failed |= shared.attempt(change)
    disk.flush()
    for error in failed.values():
        raise error


def _write(
    tiers: Tiers, disk: DiskBlocks, hashes: Sequence[int], keep: Collection[int]
) -> dict[int, OSError]:
    """Write those blocks that are in the host tier but not on disk; return what failed."""
    copies = [
        copy
        for hash in hashes
        if hash not in disk.slots and (copy := tiers.host.copies.get(hash)) is not None
    ]
    tiers.require_arrived(copies)
    slots = disk.choose(len(copies) - disk.num_free, keep)
    room = disk.num_free + len(slots)
    return tiers.write(disk, copies[:room], slots)
