"""What a device is: the only interface of devices that `ops`, `cache` and `scripts` use.

Two classes implement it, `devices.cuda.CudaDevice` and `devices.host.HostDevice`. Nothing outside
this package asks which of the two it has: what a choice needs is an attribute here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np

from ..arrays import ArrayView, describe, view
from ..checks import require_int
from ..errors import CaptureError, CompileError
from ..kernels import Specialisation

Hook = Callable[[Any], object]
"""Takes the stream that the graph is launched on."""


Dim3 = tuple[int, int, int]
"""Of a grid in blocks, or of a block in threads."""


class Event(Protocol):
    """A point in a stream. An event never recorded counts as done, and waiting for it is free."""

    @property
    def timing(self) -> bool: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_us(self, since: Any) -> float: ...
    def error(self) -> BaseException | None:
        """Return the failure of work before this point, even one that has surfaced already; None
        while the point has not passed, and always on a GPU. Never waits."""


class Graph(Protocol):
    """A captured sequence of operations, replayed with one call."""

    def launch(self, stream: Any = None) -> None: ...


class Stream(Protocol):
    """A queue of work that runs in order. Lower `priority` numbers go first."""

    name: str

    @property
    def device(self) -> Device: ...
    @property
    def priority(self) -> int: ...
    @property
    def capturing(self) -> bool: ...
    @property
    def retains_owners(self) -> bool: ...  # whether `keep` of a launch lives until it has run
    @property
    def identity(self) -> tuple[str, int] | None:
        """The device's name and a number: equal for what is one queue of work. None for the calling
        thread."""

    @property
    def capture_id(self) -> int | None:
        """The number of the capture that the stream is part of, where its graph does not hold the
        buffers of each operation by itself, so that later ones in this stream may reuse them."""

    def wait(self, other: Any) -> None: ...
    def record(self, event: Any = None) -> Event: ...
    def synchronize(self) -> None: ...
    def done(self) -> bool: ...
    def call(self, function: Callable[[], object]) -> None: ...
    def capture(self) -> AbstractContextManager[Graph]: ...
    def on_launch(self, before: Callable[[Any], object], after: Callable[[Any], object]) -> None:
        """While this stream is captured by `capture`: let the graph call `before(stream)` and
        `after(stream)` around each launch on `stream`. An exception in `before` prevents the
        launch; `after` is called even if the launch fails. A pair that is added twice is called
        once. CaptureError: the stream is not captured, or by another library."""


class Device(Protocol):
    """Memory, streams and kernel launches of one processor."""

    @property
    def name(self) -> str: ...  # "host", "cuda:0"
    @property
    def kind(self) -> str: ...  # "host" or "cuda"
    @property
    def model(self) -> str: ...  # "NVIDIA H200", or the processor's name: the key of measurements
    @property
    def arch(self) -> str: ...  # what kernels are compiled for: "sm_90", "host"
    @property
    def torch_name(self) -> str: ...  # the device as torch calls it: "cuda:0", "cpu"
    @property
    def sm_count(self) -> int: ...  # multiprocessors; cores, on the host: blocks that fill it
    @property
    def shared_bytes(self) -> int: ...  # the most shared memory of a block
    @property
    def warp_lanes(self) -> int: ...  # threads that run in lockstep and can share a row
    @property
    def has_copy_engine(self) -> bool: ...  # whether copies run beside kernels

    # What users call.
    # `dtype` is a format name, an Encoding or its string, or a dtype.
    def empty(self, shape: Any, dtype: Any) -> Any: ...
    def zeros(self, shape: Any, dtype: Any) -> Any: ...
    def empty_pinned(self, shape: Any, dtype: Any) -> Any: ...
    def asarray(self, array: np.ndarray[Any, Any]) -> Any: ...
    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]: ...
    def stream(self, priority: int = 0) -> Stream: ...
    def event(self, timing: bool = False) -> Event: ...
    def copy(self, dst: Any, src: Any, *, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    @property
    def capturing(self) -> bool:
        """Whether a stream is being captured, as far as the device knows."""

    # What operations call.
    def allocate(self, shape: Any, dtype: Any, stream: Stream, *, zeroed: bool) -> Any:
        """Return an array for work that is put on `stream` from now on, of zeros or uninitialised.
        Neither the host nor any stream waits, and in a capture each replay zeroes it again. Work on
        other streams must wait for `stream`, and keep the array alive as `keep_alive` does."""

    def as_stream(self, stream: Any, library: str = "", name: str = "stream") -> Stream:
        """Return `stream` as this device's Stream; None is the current one of `library`
        ("numpy", "cupy", "torch"); an empty `library`, for calls whose arrays do not decide, means
        whichever has made a stream current. TypeError and ValueError name the argument
        `stream`."""

    def fingerprint(self, specialisation: Specialisation) -> tuple[str, ...]:
        """Return what decides whether a kernel is right: processor, driver and program."""

    def load(self, specialisation: Specialisation) -> Any:
        """Compile, or take from the cache, and load; CompileError if that fails."""

    def launch(
        self,
        function: Any,  # what load() returned
        grid: Dim3,
        block: Dim3,
        smem_bytes: int,
        params: bytes,  # the packed Params struct, copied before the call returns
        stream: Stream,
        keep: Sequence[object] = (),  # owners that must outlive the launch
    ) -> None: ...

    def run(
        self, function: Callable[[], object], stream: Stream, keep: Sequence[object] = ()
    ) -> None:
        """Run array code in the order of `stream`."""

    def keep(self, owners: Sequence[object], stream: Stream) -> None:
        """Keep owners alive until `stream` has passed this point, or its graph is gone."""

    def copy_bytes(self, dst: int, src: int, num_bytes: int, stream: Stream) -> None:
        """Copy between addresses of device or pinned memory in the order of `stream`. The caller
        keeps both alive, and announces the copy."""

    def fall_back(self, operation: str, cause: CompileError) -> None:
        """Raise `cause`, why a kernel cannot be used, unless the reference can stand in here."""

    def release(self, owners: list[Any]) -> None:
        """Drop the owners in a list, and owners of `keep` that work has passed. Never waits; legal
        beside captures of other libraries, which may not allow memory to be freed."""

    def copy_runs(
        self,
        dst: np.ndarray[Any, Any],  # uint64, (runs,), addresses as in ArrayView.pointer
        src: np.ndarray[Any, Any],  # likewise
        sizes: np.ndarray[Any, Any],  # uint64, (runs,), bytes; zero is allowed
        stream: Stream,
        keep: Sequence[object] = (),  # owners that must outlive the copies
        pageable: bool = False,  # whether some of the memory is not page-locked
    ) -> None:
        """Copy contiguous runs in the order of `stream`. They must not overlap. The three arrays
        are read before the call returns, which may block if memory is pageable."""

    def address(self, view: ArrayView) -> int | None:
        """Return where kernels of this device find the first element of `view`; None if they
        cannot reach it."""

    def carrier(self, view: ArrayView) -> Any:
        """Return the bytes of `view` as this device's own array (NumPy or CuPy), same shape and
        strides, in the carrier dtype of its format. No copy."""

    @property
    def fault_pointer(self) -> int:
        """Address of the device's 32-byte fault record (`kvcupy.faults`)."""

    def fault_array(self) -> Any:
        """Return the fault record as this device's own array, int64 (4,)."""


def stream_priority(priority: Any) -> int:
    """Check the argument of `Device.stream`."""
    require_int(priority, "priority")
    if not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority: expected an int of 32 bits, got {priority}")
    return int(priority)


def is_device(x: Any) -> bool:
    """Return whether an object is a `Device`, rather than a name or another library's device.

    On a GPU this allocates the fault record, unless it exists: best before anything is captured.
    """
    return hasattr(x, "fault_pointer")


# --- Shared by both devices -----------------------------------------------------------------------


class LaunchHooks:
    """What a graph calls around each launch: pairs of functions, each called once per launch."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Hook, Hook]] = []

    def add(self, before: Hook, after: Hook) -> None:
        """Add a pair, unless it was added before; TypeError if one is not callable."""
        for name, hook in (("before", before), ("after", after)):
            if not callable(hook):
                raise TypeError(f"{name}: expected a function, got {hook!r}")
        if (before, after) not in self._pairs:
            self._pairs.append((before, after))

    @contextmanager
    def around(self, stream: Any) -> Iterator[None]:
        """Call every `before`, run the block, and call the `after` of each that did not raise."""
        if stream.capturing:
            raise CaptureError(
                f"{stream.name} is being captured: a graph cannot be launched into a capture; "
                "capture its work there instead"
            )
        with ExitStack() as exits:
            for before, after in self._pairs:
                before(stream)
                exits.callback(after, stream)
            yield


def copy_views(dst: Any, src: Any) -> tuple[ArrayView, ArrayView]:
    """Describe the arrays of `Device.copy`; ValueError unless one can be copied to the other."""
    target, source = view(dst, "dst"), view(src, "src")
    expected = source.shape, source.format, source.rotated_width
    if (target.shape, target.format, target.rotated_width) != expected:
        raise ValueError(f"dst: expected {describe(source)}, got {describe(target)}")
    if target.readonly:
        raise ValueError("dst: expected a writable array, got a read-only one")
    return target, source


def byte_pairs(target: ArrayView, source: ArrayView) -> list[tuple[ArrayView, ArrayView]]:
    """Return what a copy moves in whole bytes, target and source: all at once, or the codes and the
    scales of a four-bit format, where one of the two has them in separate arrays."""
    targets, sources = target.memory, source.memory
    if len(targets) != len(sources):
        assert target.scales is not None
        assert source.scales is not None
        return [(target.codes, source.codes), (target.scales, source.scales)]
    return list(zip(targets, sources, strict=True))


def require_runs(dst: Any, src: Any, sizes: Any) -> None:
    """Raise unless three arrays describe runs, for `Device.copy_runs`."""
    for name, array in (("dst", dst), ("src", src), ("sizes", sizes)):
        if not isinstance(array, np.ndarray) or array.dtype != np.uint64:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name}: expected a NumPy array of uint64, got {kind}")
        if array.ndim != 1 or len(array) != len(dst):
            expected = f"({len(dst)},)" if dst.ndim == 1 else "(runs,)"
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
