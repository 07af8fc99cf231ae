"""The host device: this processor, running the same kernels that a GPU runs."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import platform
import shutil
import struct
import subprocess
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays, formats, observe, sources
from ..config import SHARED_BYTES, config, shared_bytes
from ..errors import (
    CaptureError,
    CompileError,
    DeviceError,
    IndexFault,
    Unpicklable,
    in_child,
    process_lock,
)
from ..kernels import Specialisation
from ..observe import Access
from . import cxx, host_memory
from .host_streams import HostContext, HostEvent, HostStream, InlineStream
from .protocol import Dim3, byte_pairs, copy_views, stream_priority

# Config of kernels_src/host/runner.h: grid, block, smem_bytes, max_workers, seed, run_together.
_CONFIG = struct.Struct("@3I3IIIQP")

_STATUS = {
    1: "a thread trapped",
    2: "the barriers of a block diverge: some threads wait where others never come",
    3: "the kernel is declared without barriers but reached one",
    4: "no memory for its block",
}

_REFUSED = 5  # the status of a strict launch that says why itself

_MAX_SMEM_BYTES = 227 * 1024
_ALIGNMENT = 256  # of allocations, as on a GPU

Geometry = tuple[Dim3, Dim3, int]
"""Grid, block and bytes of shared memory of a launch."""


class Report(ctypes.Structure):
    """Why a strict launch was refused; mirrors `Report` in kernels_src/host/watch.h."""

    _fields_ = (("code", ctypes.c_ulonglong), ("text", ctypes.c_char * 1016))


class HostFunction:
    """A specialisation compiled for this processor and loaded: plain, strict or both.

    Each build is made at its first use: `config.strict` may change between launches. The plain one
    takes Params and configuration, and returns a status.
    """

    entry: Callable[[bytes, bytes], int]
    strict: StrictBuild

    def __init__(self, specialisation: Specialisation, extra_flags: tuple[str, ...]) -> None:
        self.specialisation = specialisation
        self._extra_flags = extra_flags

    def __getattr__(self, name: str) -> Any:
        """Make a build. Until Python 3.12 `cached_property` holds a lock, which a fork may copy."""
        if name == "entry":
            self.entry = self._function(self._library(cxx.build), "kvcupy_launch")
        elif name == "strict":
            library = self._library(cxx.build_strict)
            entry = self._function(library, "kvcupy_launch_strict")
            entry.argtypes = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p
            max_threads = ctypes.c_int.in_dll(library, "kvcupy_most_threads").value
            self.strict = StrictBuild(entry, max_threads, library._name)
        return self.__getattribute__(name)

    def build(self, strict: bool) -> None:
        _ = self.strict if strict else self.entry

    def _library(self, build: Callable[..., Path]) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(str(build(self.specialisation, self._extra_flags)))
        except OSError as error:  # the disk is full, or the library cannot be loaded
            message = f"{self.specialisation} cannot be loaded: {error}"
            raise CompileError(message, transient=True) from error

    def _function(self, library: ctypes.CDLL, name: str) -> Any:
        try:
            return getattr(library, name)  # bytes become pointers, and the status an int
        except AttributeError as error:
            raise CompileError(f"{self.specialisation} cannot be loaded: {error}") from error


@dataclass(frozen=True)
class StrictBuild:
    """A strict build: takes Params, configuration and a `Report`, returns a status."""

    entry: Callable[[bytes, bytes, Any], int]
    max_threads: int  # per block, by the kernel's launch bounds
    path: str


class HostDevice(Unpicklable):
    """The host device. There is one object, `kvcupy.device("host")`."""

    _instead = "name it in each process, kvcupy.device(name)"

    name = "host"
    kind = "host"
    arch = "host"
    shared_bytes = shared_bytes("sm_86")  # the least of what kernels are written for
    torch_name = "cpu"
    has_copy_engine = False

    def __init__(self) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        self.num_workers: int = len(affinity(0)) if affinity else os.cpu_count() or 1
        self.sm_count = self.num_workers
        self.warp_lanes = 1
        self.thread_order_seed = 0
        self.extra_flags: tuple[str, ...] = ()
        self.context = HostContext(self)
        self._inline = InlineStream(self.context)
        self._streams: weakref.WeakValueDictionary[Any, HostStream] = weakref.WeakValueDictionary()
        in_child(self._streams.clear)
        in_child(self.context.dropped.clear)
        self._functions: dict[tuple[Specialisation, tuple[str, ...]], HostFunction] = {}
        self._lock = process_lock()
        self.fault_pointer = self.context.faults.ctypes.data

    def __repr__(self) -> str:
        return "<kvcupy device host>"

    @cached_property
    def model(self) -> str:
        """What the processor is called."""
        return processor_name()

    # --- Memory ---

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialised array, aligned to 256 bytes; `dtype` may be a format name.

        Four-bit formats come as ArrayView.
        """
        if encoding := arrays.four_bit_encoding(dtype):
            return arrays.four_bit_array(self.empty, shape, encoding)
        return _allocate(np.empty, _layout(shape, dtype))

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return an array of zeros; `dtype` may be a format name, as for `empty`."""
        if encoding := arrays.four_bit_encoding(dtype):
            return arrays.four_bit_array(self.zeros, shape, encoding)
        return _allocate(np.zeros, _layout(shape, dtype))

    def allocate(self, shape: Any, dtype: Any, stream: Any, *, zeroed: bool) -> Any:
        """Return an array for work on a stream: new memory, which nothing else uses."""
        if encoding := arrays.four_bit_encoding(dtype):
            make = partial(self.allocate, stream=stream, zeroed=zeroed)
            return arrays.four_bit_array(make, shape, encoding)
        array = _allocate(np.zeros if zeroed else np.empty, _layout_of_output(shape, dtype))
        if zeroed and stream.capturing:
            stream.enqueue(lambda: array.fill(0))
        return array

    def release(self, owners: list[Any]) -> None:
        """Drop owners."""
        owners.clear()

    def empty_pinned(self, shape: Any, dtype: Any) -> Any:
        """Return uninitialised memory of exact size that `ArrayView.pinned` recognises."""
        if encoding := arrays.four_bit_encoding(dtype):
            return arrays.four_bit_array(self.empty_pinned, shape, encoding)
        array = self.empty(shape, dtype)
        return arrays.pinned_at(array, array.ctypes.data, array.shape, array.dtype)

    def asarray(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy of a NumPy array on this device."""
        try:
            source = np.asarray(array)
        except (TypeError, RuntimeError, ValueError) as error:  # another library's, or ragged lists
            raise TypeError(f"array: expected a NumPy array, {error}") from None
        if source.dtype.hasobject or not source.dtype.itemsize:
            raise TypeError(f"array: expected an array of numbers, got {source.dtype}")
        copy: np.ndarray[Any, Any] = self.empty(source.shape, source.dtype)
        copy[...] = source
        return copy

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy of an array of this device as NumPy array (bf16, fp8: ml_dtypes).

        Four-bit formats give their bytes, uint8 (..., row_bytes).
        """
        view = arrays.bytes_of(arrays.view(array))
        _require_here(view, "array")
        if observe.order_observers:
            observe.touched_by_host("to_numpy", (Access(view, name="array"),))
        return self.carrier(view).view(formats.numpy_dtype(view.format)).copy()

    def carrier(self, view: arrays.ArrayView) -> np.ndarray[Any, Any]:
        """Return the bytes of a view as NumPy array of the carrier dtype, without a copy.

        The bytes of a four-bit format are (..., row_bytes).
        """
        if view.scales is not None:
            view = arrays.bytes_of(view)
        return arrays.array_at(
            view.owner, view.pointer, view.shape, formats.carrier_dtype(view.format), view.strides,
            readonly=view.readonly,
        )  # fmt: skip

    def copy(self, dst: Any, src: Any, *, stream: Any = None) -> None:
        """Copy `src` to `dst`, of equal shape and format, in the order of `stream`."""
        target, source = copy_views(dst, src)
        if not target.device == source.device == "host":
            for v, name in ((target, "dst"), (source, "src")):
                _require_here(v, name)
        queue = self.as_stream(stream)
        is_plain = target.scales is None and source.scales is None
        pairs = [(target, source)] if is_plain else byte_pairs(target, source)

        def enqueue() -> None:
            for pair in pairs:
                queue.enqueue(partial(host_memory.copy_array, *map(self.carrier, pair)))

        observe.issue(lambda: observe.copy_of(queue, source, target), enqueue)
        if target.library == "torch":
            arrays.note_written([target])

    def copy_runs(
        self, dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any],
        stream: Any, keep: Sequence[object] = (), pageable: bool = False,
    ) -> None:  # fmt: skip
        """Copy contiguous runs one by one in the order of `stream`; `keep` lives until done."""
        self.run(host_memory.copy_of_runs(dst, src, sizes), stream, keep)

    def address(self, view: arrays.ArrayView) -> int | None:
        """Return where kernels find a view; None for memory of a GPU."""
        return view.pointer if view.device == "host" else None

    def fall_back(self, operation: str, cause: CompileError) -> None:
        """Raise, or warn that the reference does an operation, as `config.fallback` says."""
        config.fall_back(operation, cause)

    # --- Streams ---

    def stream(self, priority: int = 0) -> HostStream:
        """Return a new stream. Lower priorities go first; negative ones need CAP_SYS_NICE."""
        stream = HostStream(self.context, stream_priority(priority))
        self._streams[stream.identity] = stream
        return stream

    def event(self, timing: bool = False) -> HostEvent:
        """Return an event, not yet recorded."""
        return HostEvent(timing)

    def as_stream(
        self, stream: Any, library: str = "numpy", name: str = "stream"
    ) -> InlineStream | HostStream:
        """Return `stream` as a stream of this device; None is the calling thread."""
        if stream is None:
            return self._inline
        if isinstance(stream, (HostStream, InlineStream)):
            return stream
        raise TypeError(f"{name}: expected None or a stream of the host device, got {stream!r}")

    def synchronize(self) -> None:
        """Wait for all streams; raise the first failure among them.

        Work on streams that nobody holds any more is waited for too; its failures are lost.
        """
        # Copied at once: other threads, and finalizers of any, add to both.
        streams = [s for s in [r() for r in self._streams.valuerefs()] if s is not None]
        for stream in streams:
            if stream.capturing:
                raise CaptureError(f"{stream.name} is being captured: synchronising is illegal")
        failures: list[DeviceError | IndexFault] = []
        for stream in streams:
            try:
                stream.synchronize()
            except (DeviceError, IndexFault) as error:
                failures.append(error)
        for state in tuple(self.context.dropped):
            try:
                state.drain()
            except DeviceError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @property
    def capturing(self) -> bool:
        """Whether a stream of the device is being captured."""
        streams = [reference() for reference in self._streams.valuerefs()]
        return any(stream is not None and stream.capturing for stream in streams)

    # --- Kernels ---

    def fingerprint(self, specialisation: Specialisation) -> tuple[str, ...]:
        """Return what decides whether a kernel is right: the processor and the sources."""
        return self.model, sources.digest(), str(specialisation)

    def load(self, specialisation: Specialisation) -> HostFunction:
        """Return a specialisation, compiled and loaded at the first call."""
        key = (specialisation, self.extra_flags)
        function = self._functions.get(key)
        if function is None:
            with self._lock:
                function = self._functions.setdefault(key, HostFunction(*key))
        function.build(config.strict)
        return function

    def launch(
        self, function: HostFunction, grid: Dim3, block: Dim3, smem_bytes: int, params: bytes,
        stream: Any, keep: Sequence[object] = (),
    ) -> None:  # fmt: skip
        """Run a grid in the order of `stream`; `keep` lives until it is done."""
        if config._strict:  # a property would cost each call a frame
            self._launch_strictly(function, (grid, block, smem_bytes), params, stream, keep)
            return
        try:
            packed = _config(grid, block, smem_bytes, self.num_workers, self.thread_order_seed)
        except ValueError as error:
            raise DeviceError(f"{function.specialisation} cannot be launched: {error}") from None
        if stream is self._inline:
            if status := function.entry(params, packed):
                raise _failure(function, (grid, block, smem_bytes), status)
            return

        def run(_keep: Sequence[object] = keep) -> None:
            if status := function.entry(params, packed):
                raise _failure(function, (grid, block, smem_bytes), status)

        stream.enqueue(run)

    def _launch_strictly(
        self, function: HostFunction, geometry: Geometry, params: bytes, stream: Any,
        keep: Sequence[object],
    ) -> None:  # fmt: skip
        build = function.strict
        try:
            _require_strict_limits(geometry, build.max_threads)
            _config(*geometry, self.num_workers, 0)
        except ValueError as error:
            raise DeviceError(f"{function.specialisation} cannot be launched: {error}") from None

        def run(_keep: Sequence[object] = keep) -> None:
            seed = self.thread_order_seed or config.launch_seed()
            report = Report()
            packed = _pack_config(*geometry, self.num_workers, seed)
            status = build.entry(params, packed, ctypes.addressof(report))
            if status == _REFUSED:
                raise _refusal(function, geometry, report, seed)
            if status:
                raise _failure(function, geometry, status)

        self._enqueue(run, stream)

    def run(self, function: Callable[[], object], stream: Any, keep: Sequence[object] = ()) -> None:
        """Run a function on NumPy arrays in the order of `stream`."""

        def run(_keep: Sequence[object] = keep) -> None:
            function()

        self._enqueue(run, stream)

    def keep(self, owners: Sequence[object], stream: Any) -> None:
        """Keep owners alive until `stream` has passed this point."""
        if stream is not self._inline:
            stream.enqueue(lambda _keep=tuple(owners): None)

    def copy_bytes(self, dst: int, src: int, num_bytes: int, stream: Any) -> None:
        """Copy between addresses in the order of `stream`."""
        stream.enqueue(partial(ctypes.memmove, dst, src, num_bytes))

    def _enqueue(self, function: Callable[[], None], stream: Any) -> None:
        """Enqueue work; in strict mode raise the faults that it records on the calling thread."""
        faults = self.context.faults
        num_faults = int(faults[0])
        stream.enqueue(function)
        raises = stream is self._inline and config.raises_index_faults
        if raises and int(faults[0]) != num_faults:
            self.context.raise_fault()

    def fault_array(self) -> np.ndarray[Any, Any]:
        """Return the fault record."""
        return self.context.faults


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor, or else its architecture."""
    with suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _require_here(view: arrays.ArrayView, name: str) -> None:
    if view.device != "host":
        raise ValueError(f"{name}: expected an array on host, got one on {view.device}")


Layout = tuple[tuple[int, ...], np.dtype[Any], int]
"""Sizes, dtype and bytes of an array."""


def _allocate(make: Callable[..., Any], layout: Layout) -> np.ndarray[Any, Any]:
    sizes, element, num_bytes = layout
    raw: np.ndarray[Any, Any] = make(num_bytes + _ALIGNMENT, np.uint8)
    return np.ndarray(sizes, element, raw, -arrays.address_of(raw) % _ALIGNMENT)


def _layout(shape: Any, dtype: Any) -> Layout:
    """Return the layout of an array to allocate; TypeError or ValueError name what is wrong."""
    element = formats.numpy_dtype(dtype)
    if element.hasobject or element.subdtype or not element.itemsize:
        raise TypeError(f"dtype: expected elements of a size of their own, got {dtype!r}")
    try:
        axes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        sizes = tuple([operator.index(n) for n in axes])
    except (TypeError, RuntimeError):  # tensors without numbers, say
        raise TypeError(f"shape: expected an int or several, got {shape!r}") from None
    num_bytes = math.prod(sizes) * element.itemsize
    if min(sizes, default=0) < 0 or max(*sizes, num_bytes, 0) >= 2**62:
        raise ValueError(f"shape: expected sizes from 0 on of less than 2**62 bytes, got {shape!r}")
    return sizes, element, num_bytes


_layout_of_output = lru_cache(maxsize=1024)(_layout)  # of shapes that operations have checked


@cache
def _run_together() -> int:
    """Return the address of the function that shares a launch among threads.

    A kernel has been loaded before, so there is a compiler. The library stays loaded.
    """
    pool = ctypes.CDLL(str(cxx.build_pool()))
    return ctypes.cast(pool.kvcupy_run_together, ctypes.c_void_p).value or 0


def _pack_config(grid: Dim3, block: Dim3, smem_bytes: int, num_workers: int, seed: int) -> bytes:
    """Pack a launch configuration; ValueError for one that exceeds the limits of a GPU."""
    limits = (("grid", grid, (2**31 - 1, 65535, 65535)), ("block", block, (1024, 1024, 64)))
    for name, sizes, most in limits:
        if any(not 1 <= n <= m for n, m in zip(sizes, most, strict=True)):
            raise ValueError(f"{name} {sizes}, expected 1 to {most} (grid {grid}, block {block})")
    if block[0] * block[1] * block[2] > 1024:
        raise ValueError(f"block {block} has more than 1024 threads (grid {grid})")
    if not 0 <= smem_bytes <= _MAX_SMEM_BYTES:
        raise ValueError(
            f"{smem_bytes} bytes of shared memory, expected at most {_MAX_SMEM_BYTES} "
            f"(grid {grid}, block {block})"
        )
    return _CONFIG.pack(*grid, *block, smem_bytes, num_workers, seed, _run_together())


_config = lru_cache(maxsize=4096)(_pack_config)


def _require_strict_limits(geometry: Geometry, max_threads: int) -> None:
    """Raise ValueError beyond the kernel's launch bounds or the limits of `config.strict_arch`."""
    grid, block, smem_bytes = geometry
    threads = block[0] * block[1] * block[2]
    if threads > max_threads:
        raise ValueError(
            f"block {block} has {threads} threads, and the kernel's launch bounds allow "
            f"{max_threads} (grid {grid}, block {block})"
        )
    max_bytes = SHARED_BYTES[config.strict_arch]
    if smem_bytes > max_bytes:
        raise ValueError(
            f"{smem_bytes} bytes of shared memory, and {config.strict_arch} (config.strict_arch) "
            f"has {max_bytes} for a block (grid {grid}, block {block})"
        )


def _refusal(function: HostFunction, geometry: Geometry, report: Report, seed: int) -> DeviceError:
    grid, block, smem_bytes = geometry
    text = report.text.decode(errors="replace")
    place = source_line(function.strict.path, report.code) if report.code else ""
    return DeviceError(
        f"{function.specialisation} failed on the strict host device: {text}"
        f"{f' ({place})' if place else ''} (grid {grid}, block {block}, {smem_bytes} bytes of "
        f"shared memory; threads and blocks in the order of thread_order_seed = {seed})"
    )


def _failure(function: HostFunction, geometry: Geometry, status: int) -> DeviceError:
    grid, block, smem_bytes = geometry
    return DeviceError(
        f"{function.specialisation} failed on host: {_STATUS.get(status, status)} "
        f"(grid {grid}, block {block}, {smem_bytes} bytes of shared memory)"
    )


@lru_cache(maxsize=256)
def source_line(library: str, code: int) -> str:
    """Return the file and line that an address in a library was compiled from, "" if unknown.

    Inlined functions come first, then what called them, as `cache_rows.cuh:41 < store.cu:22`.
    """
    tool = shutil.which("addr2line")
    if tool is None:
        return ""
    command = [tool, "-i", "-e", library, hex(code - 1)]  # the call, which returns to `code`
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [Path(line.split(" ")[0]).name for line in answer.stdout.splitlines()]
    return " < ".join(line for line in dict.fromkeys(lines) if not line.startswith("??"))
