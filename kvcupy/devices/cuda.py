"""A GPU through CuPy: compiled kernels, streams, memory, and what is in flight on it.

Imported only by who wants a GPU; importing it loads nothing of CuPy. The parts: `cuda_api` (what is
called of CuPy), `cuda_launch`, `cuda_streams`, `cuda_events`, `cuda_graph`, `cuda_context` (host
functions), `cuda_adopt` (other libraries' streams), `cuda_memory`, `cuda_pinned`, `cuda_copy`,
`cuda_batch` (copies of runs), `cuda_driver` (what CuPy lacks), `cuda_retire`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import cuda_api
from ..cuda_api import ATTRIBUTE_SM_COUNT, SUCCESS, CudaApi
from ..errors import CaptureError, DeviceError
from . import cuda_adopt, cuda_graph, cuda_memory, cuda_pinned
from .cuda_batch import RunCopies
from .cuda_context import HostCalls
from .cuda_events import Event, create_handle
from .cuda_graph import FOREIGN, Graph
from .cuda_launch import CudaFunction, Launcher, launch_failure
from .cuda_retire import EventPool, RetireList
from .cuda_streams import Stream

if TYPE_CHECKING:
    from ..arrays import ArrayView
    from ..kernels import Specialisation

_AS_IS: AbstractContextManager[None] = nullcontext()


class CudaDevice:
    """One GPU. Made once each by `kvcupy.device("cuda:0")`.

    Attributes
    ----------
    arch : what kernels are compiled for, such as "sm_90"
    model : what the GPU is called, such as "NVIDIA H200"
    captures : the kvcupy capture that each stream takes part in, by address
    events, retired : handles for reuse, and owners in flight
    calls : host functions

    Raises
    ------
    DeviceError : there is no such GPU, or it cannot be used
    """

    kind = "cuda"
    has_copy_engine = True
    warp_lanes = 32

    def __init__(self, index: int = 0, api: CudaApi | None = None) -> None:
        self.index = index
        self.name = self.torch_name = f"cuda:{index}"
        self.api = api = CudaApi() if api is None else api
        self.sm_count, self.arch, self.model = properties(api, index)
        self.captures: dict[int, Graph] = {}
        self.events = EventPool(lambda timing: create_handle(self, timing))
        runtime = api.runtime
        self.retired = RetireList(
            self.events,
            api.record,
            lambda event: runtime.eventQuery(event) == SUCCESS,
            api.relaxed,
        )
        self.calls = HostCalls(self)
        self._launcher = Launcher(api, index, self.arch)
        self._run_copies = RunCopies(self)
        self._faults: Any = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<kvcupy device {self.name}>"

    def current(self) -> AbstractContextManager[Any]:
        """Make this the thread's current CUDA device for the length of a with block."""
        if self.api.runtime.getDevice() == self.index:
            return _AS_IS
        device: AbstractContextManager[Any] = self.api.cupy.cuda.Device(self.index)
        return device

    # --- Memory ---

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialised array; `dtype` may be a format name. fp8 comes as ArrayView."""
        return cuda_memory.empty(self, shape, dtype)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return an array of zeros, there when the call returns; `dtype` may be a format name."""
        return cuda_memory.zeros(self, shape, dtype)

    def empty_pinned(self, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
        """Return pinned memory of exact size, near the GPU where known, as a NumPy array."""
        with self.api.relaxed():
            return cuda_pinned.empty_pinned(self, shape, dtype)

    def asarray(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a copy of a NumPy array on this device, there when the call returns."""
        return cuda_memory.asarray(self, array)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy of an array as NumPy array (bf16, fp8: ml_dtypes).

        Notes
        -----
        Stream: the current one of the array's library; it is waited for. Capture: illegal.
        """
        return cuda_memory.to_numpy(self, array)

    def copy(self, dst: Any, src: Any, *, stream: Any = None) -> None:
        """Copy `src` to `dst`, of equal shape and format, in the order of `stream`.

        Raises
        ------
        ValueError : shapes or formats differ, or `dst` cannot be written

        Notes
        -----
        Stream: asynchronous between GPU and pinned memory; with pageable memory on either side the
        call may block. Both arrays are kept alive until it is done. Capture: legal.
        """
        cuda_memory.copy(self, dst, src, stream)

    def copy_runs(
        self,
        dst: np.ndarray[Any, Any],
        src: np.ndarray[Any, Any],
        sizes: np.ndarray[Any, Any],
        stream: Any,
        keep: Sequence[object] = (),
    ) -> None:
        """Copy contiguous runs in the order of `stream`; owners in `keep` live until it is done.

        Raises
        ------
        DeviceError, CaptureError : a copy was refused; with the run, its addresses and its bytes

        Notes
        -----
        Capture: legal; one node a run.
        """
        self._run_copies.enqueue(dst, src, sizes, stream, keep)

    def carrier(self, view: ArrayView) -> Any:
        """Return the bytes of a view as a CuPy array of the carrier dtype, without a copy."""
        return cuda_memory.carrier(self, view)

    def address(self, view: ArrayView) -> int | None:
        """Return where kernels find a view; None in pageable memory and on another GPU."""
        return cuda_memory.address(self, view)

    # --- Streams ---

    def stream(self, priority: int = 0) -> Stream:
        """Return a new stream, which does not synchronise with the default stream."""
        self.retired.reap()
        return Stream.create(self, priority)

    def event(self, timing: bool = False) -> Event:
        """Return an event, not yet recorded."""
        return Event(self, timing)

    def as_stream(self, stream: Any, library: str = "") -> Stream:
        """Return `stream` as a stream of this device; None is the current one of `library`.

        Without a library None is the stream that is current in CuPy or torch, whichever has made
        one of its own current.

        Raises
        ------
        TypeError : it is no stream
        ValueError : it belongs to another device; or it is None without a library, and CuPy and
            torch have made different streams current
        """
        if stream is None:
            return cuda_adopt.current_stream(self, library)
        if not isinstance(stream, Stream):
            return cuda_adopt.adopt(self, stream)
        if stream.device is not self:
            raise ValueError(f"stream: expected one of {self.name}, got {stream!r}")
        return stream

    def synchronize(self) -> None:
        """Wait for all work on the device.

        Raises
        ------
        DeviceError : the GPU, or a host function in one of its streams, has failed
        CaptureError : a capture is under way
        """
        if self.captures or cuda_adopt.is_current_captured(self):
            raise CaptureError("synchronising the device is illegal while a stream is captured")
        try:
            with self.current():
                self.api.runtime.deviceSynchronize()
        except self.api.errors as error:
            raise self.api.failure(f"synchronize, {self.name}", error) from error
        self.retired.reap()
        self.calls.raise_failures()

    def capture_of(self, pointer: int) -> Graph | None:
        """Return the capture that a CUDA stream is part of, FOREIGN if kvcupy did not begin it."""
        return cuda_graph.capture_of(self, pointer)

    def retain(self, stream: Stream, keep: Sequence[object]) -> None:
        """Keep owners alive until `stream` has passed this point, or the captured graph is gone.

        Torch tensors on torch's current stream need no help: their allocator reuses memory in the
        order of that stream. CuPy's reuses it in the order of the stream that was current when an
        array was made, which may be another.
        """
        graph = self.capture_of(stream.pointer) if self.captures else None
        if graph is not None:
            if graph is not FOREIGN:
                graph.keep(keep)
            return
        held = tuple(owner for owner in keep if not cuda_adopt.is_ordered(owner, stream))
        if not held:
            return
        try:
            with self.current():
                if self.api.is_capturing(stream.pointer):
                    return  # whoever captures without kvcupy keeps the arrays alive too
                self.retired.hold(stream.pointer, held)
        except self.api.errors as error:
            raise self.api.failure(f"record in {stream!r}", error) from error

    # --- Kernels ---

    def load(self, specialisation: Specialisation) -> CudaFunction:
        """Return a specialisation, compiled and loaded at the first call.

        Raises
        ------
        CompileError : with the log of the compiler; the next call raises the same at once
        """
        known = self._launcher.known(specialisation)
        if known is not None:
            return known
        self.fault_array()  # allocated here, where it cannot meet a capture
        with self.current(), self.api.relaxed():
            return self._launcher.load(specialisation)

    def launch(
        self,
        function: CudaFunction,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        params: bytes,
        stream: Any,
        keep: Sequence[object] = (),
    ) -> None:
        """Launch a grid on `stream`; owners in `keep` live until it is done.

        Raises
        ------
        DeviceError : the launch was refused; with the kernel, the grid and the arguments
        """
        if len(params) != function.params_bytes:
            wanted = function.params_bytes
            raise ValueError(f"params: expected {wanted} bytes, got {len(params)}")
        api = self.api
        try:
            if api.runtime.getDevice() == self.index:
                self._launcher.launch(function, grid, block, smem_bytes, params, stream)
            else:
                with api.cupy.cuda.Device(self.index):
                    self._launcher.launch(function, grid, block, smem_bytes, params, stream)
        except api.errors as error:
            raise launch_failure(
                api, self.name, function, grid, block, smem_bytes, params, stream, error
            ) from error
        if keep:
            self.retain(stream, keep)

    def run(self, function: Callable[[], object], stream: Any, keep: Sequence[object] = ()) -> None:
        """Run array expressions with `stream` as CuPy's current one."""
        try:
            with self.current(), self.api.relaxed(), stream.cupy:
                function()
        except self.api.errors as error:
            raise self.api.failure(f"array expressions on {stream!r}", error) from error
        if keep:
            self.retain(stream, keep)

    def check_fallback(self, operation: str, stream: Any) -> None:
        """Raise if array expressions cannot be captured into what `stream` is captured into.

        What they allocate goes back to CuPy's pool when they return, while replays still write it.

        Raises
        ------
        CaptureError : `stream` is being captured, by anybody
        """
        if stream.capturing:
            raise CaptureError(
                f"{operation}: {stream.name} is being captured, and without a compiled kernel the "
                "operation is array expressions, which cannot be replayed"
            )

    @property
    def fault_pointer(self) -> int:
        """Address of the fault record."""
        return int(self.fault_array().data.ptr)

    def fault_array(self) -> Any:
        """Return the fault record, a CuPy array of four int64, zero at first."""
        if self._faults is None:
            with self._lock:
                if self._faults is None:
                    self._faults = cuda_memory.fault_record(self)
        return self._faults


def why_not() -> str:
    """Return why no GPU is usable, or an empty string if one is. Never raises.

    >>> isinstance(why_not(), str)
    True
    """
    try:
        api = cuda_api.CudaApi()
        count = api.runtime.getDeviceCount()
    except DeviceError as error:
        return str(error)
    except Exception as error:  # a broken driver shows itself in many ways
        return f"cuda: the driver does not work: {error}"
    return "" if count > 0 else "cuda: the driver works but lists no GPU"


def cuda_available() -> bool:
    """Return whether a GPU is usable. Never raises."""
    return not why_not()


def properties(api: CudaApi, index: int) -> tuple[int, str, str]:
    """Return the number of SMs of a GPU, its architecture ("sm_90") and its name.

    Raises
    ------
    DeviceError : there is no such GPU, or it cannot be used
    """
    name = f"cuda:{index}"
    try:
        count = api.runtime.getDeviceCount()
        if index >= count:
            raise DeviceError(f"{name}: there are {count} GPUs")
        sm_count = int(api.runtime.deviceGetAttribute(ATTRIBUTE_SM_COUNT, index))
        arch = f"sm_{api.cupy.cuda.Device(index).compute_capability}"
        model = api.runtime.getDeviceProperties(index)["name"]
    except api.errors as error:
        raise api.failure(name, error) from error
    return sm_count, arch, model.decode() if isinstance(model, bytes) else str(model)
