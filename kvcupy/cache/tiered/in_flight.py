"""Transfers of a tiered cache that are in flight, and pages that a compute stream still writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import CaptureError, DeviceError, KvcupyError, device_failure
from ...waiting import Latch
from ..hazards import StreamCompletion

if TYPE_CHECKING:
    from ..engine import Transfer


class BlockCompletion:
    """The `Completion` of pages that a transfer fills, or that a compute stream still writes."""

    def __init__(
        self, kind: str, completion: Transfer | StreamCompletion, pages: Sequence[int],
        sources: Iterable[BlockCompletion | None], host_pages: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.kind = kind  # "load", "save" or "insert"
        self.pages = pages  # which it fills
        self.host_pages = host_pages  # that a transfer accesses
        self.over = False  # known to be done or to have failed
        self.failure: BaseException | None = None
        self.num_bytes, self.seconds = 0, 0.0  # bytes moved and duration, once done
        # Dropped at the end, because it holds events.
        self._completion: Transfer | StreamCompletion | None = completion
        # Completions of the pages that this one reads.
        self._sources = tuple({id(s): s for s in sources if s is not None}.values())

    def done(self) -> bool:
        """Return whether it has ended, including after a failure, which is recorded."""
        completion = self._completion
        if self.over or completion is None:
            return True
        try:
            arrived = completion.done() and all([source.done() for source in self._sources])
            if (failure := completion.failure) is not None:
                raise failure
            self._raise_failure_of_sources()
            if arrived:
                if not isinstance(completion, StreamCompletion):
                    self.num_bytes = completion.num_bytes
                    self.seconds = completion.elapsed_us / 1e6
                self.over, self._completion, self._sources = True, None, ()
        except CaptureError:  # the caller may be capturing
            return False
        except KvcupyError as error:
            self.fail(error)
        return self.over

    @property
    def broken(self) -> bool:
        """Whether a failure is known, of this completion or of one that fills its sources."""
        completions = (self, self._completion, *self._sources)
        return any(c is not None and c.failure is not None for c in completions)

    def fail(self, error: BaseException) -> None:
        """Record a failure, unless the completion has ended."""
        if not self.over:
            self.failure, self.over, self._sources = error, True, ()

    def synchronize(self) -> None:
        """Wait until no page is accessed; `done` records failures."""
        completion, sources = self._completion, self._sources
        if completion is not None:
            with suppress(DeviceError):
                completion.synchronize()
        for source in sources:
            source.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for all layers; DeviceError after a failure, which is not recorded."""
        if (completion := self._pending()) is not None:
            completion.wait(stream)
            self._raise_failure_of_sources()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make a stream wait for one layer; otherwise like `wait`."""
        if (completion := self._pending()) is not None:
            completion.wait_layer(layer, stream)
            self._raise_failure_of_sources()

    def _pending(self) -> Transfer | StreamCompletion | None:
        """Return the completion that a stream has to wait for, or None."""
        self._raise_known_failure()
        completion = self._completion  # another thread may note meanwhile that it is over
        if completion is not None:
            self._raise_failure_of_sources()
        return completion

    def _raise_known_failure(self) -> None:
        if self.failure is not None:
            raise device_failure(f"the blocks have not arrived: {self.failure}", self.failure)

    def _raise_failure_of_sources(self) -> None:
        """Raise DeviceError if source pages are known not to hold their blocks."""
        for source in self._sources:
            source._raise_known_failure()
            if (completion := source._completion) is not None:
                completion.done()  # a transfer checks for a failure, and raises it
                if (failure := completion.failure) is not None:
                    raise failure
                source._raise_failure_of_sources()


class CompletionQueue:
    """Pending completions, oldest first for each kind."""

    def __init__(self) -> None:
        kinds = ("insert", "load", "save")
        self._queues: dict[str, deque[BlockCompletion]] = {kind: deque() for kind in kinds}
        self._failed: deque[BlockCompletion] = deque(maxlen=16)  # may still access pages

    def add(self, completion: BlockCompletion) -> BlockCompletion:
        self._queues[completion.kind].append(completion)
        return completion

    def take_ended(self) -> list[BlockCompletion]:
        """Remove and return completions that have ended, in time proportional to their number."""
        over = []
        for kind, queue in self._queues.items():
            while queue and queue[0].done():
                over.append(queue.popleft())
            if kind == "insert" and queue:  # streams are independent: a later one may end first
                pending = [completion for completion in queue if not completion.done()]
                over += [completion for completion in queue if completion.over]
                queue.clear()
                queue.extend(pending)
        return over

    def oldest(self) -> BlockCompletion | None:
        """Return a completion to wait for, preferably a transfer; a failed one is returned once."""
        if self._failed:
            return self._failed.popleft()
        return next((queue[0] for queue in reversed(self._queues.values()) if queue), None)

    def add_failed(self, completion: BlockCompletion) -> None:
        self._failed.append(completion)

    def saves(self) -> list[BlockCompletion]:
        return list(self._queues["save"])


class Arrivals:
    """Missing blocks of a prefix that a call waits for, held in host memory as they arrive."""

    def __init__(self, hashes: list[int]) -> None:
        self.hashes, self.num_passed = hashes, 0  # leading ones that are in a tier now
        self.held: list[int] = []  # host pages
        self.over = Latch()  # set when all have arrived, or one is known not to arrive
        self.lacks_room = False  # the next block has not arrived for lack of host pages

    @property
    def missing(self) -> list[int]:
        """The blocks that have not arrived, in order."""
        return self.hashes[self.num_passed :]
