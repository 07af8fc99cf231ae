"""Where a fault can be put, and runs of programs in which one call fails, for every call in turn.

program    step 1 | step 2 | ...                 each step: state before, call
fault               call 7 of `launch` raises    state after == state before, the error names
                                                 the cause, and the same step then succeeds
end        result as in a run without fault; nothing is held, no file is left open

A `Point` names functions of the device, the compiler or the system, and what they raise or do
instead. While one is armed, its calls are counted, and the one of a number fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
from programs import Program

import kvcupy as kv
from kvcupy import scratch
from kvcupy.cache.pages import PageAllocator
from kvcupy.devices import cxx, host, host_streams
from kvcupy.ops import call as op_call

MARK = "injected fault"
"""Stands in the text of every error that is injected."""


class Trigger:
    """Counts the calls that a point meets, of which the one of a number fails; 0: none."""

    def __init__(self, number: int = 0) -> None:
        self.number, self.count, self.fired = number, 0, False
        self._asleep = 0
        self._lock = threading.Lock()

    def pull(self) -> bool:
        """Count a call; return whether it is to fail."""
        with self._lock:
            if self._asleep:
                return False
            self.count += 1
            if self.count != self.number:
                return False
            self.fired = True
            return True

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """Neither count nor fail within a block, which looks at what a call has left."""
        with self._lock:
            self._asleep += 1
        try:
            yield
        finally:
            with self._lock:
                self._asleep -= 1


@dataclass(frozen=True)
class Point:
    """Functions that fail in one way.

    Attributes
    ----------
    name : as in the table
    targets : object and attribute of each function
    error : makes the exception; None: `instead` does without one
    instead : takes the real function, the error, and the arguments of the call that fails
    counts : takes the arguments; whether a call counts
    later : the failure is of work in flight, and surfaces where that is waited for
    before_launch : what it fails comes before the first launch of a call, which then has changed
        nothing at all
    needs_kernels_unloaded : it is met only before kernels are loaded
    """

    name: str
    targets: tuple[tuple[Any, str], ...]
    error: Callable[[], BaseException] | None
    instead: Callable[..., Any] | None = None
    counts: Callable[..., bool] = lambda *_, **__: True
    later: bool = False
    before_launch: bool = False
    needs_kernels_unloaded: bool = False

    @contextlib.contextmanager
    def armed(self, trigger: Trigger) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name in self.targets:
                wrapped = self._wrapped(getattr(owner, name), trigger)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
            yield

    def _wrapped(self, real: Callable[..., Any], trigger: Trigger) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.counts(*arguments, **options) or not trigger.pull():
                return real(*arguments, **options)
            error = None if self.error is None else self.error()
            if self.instead is not None:
                return self.instead(real, error, *arguments, **options)
            assert error is not None
            raise error

        return call


# --- What fails -----------------------------------------------------------------------------------


def raising(kind: type[Exception], text: str, **options: Any) -> Callable[[], Exception]:
    """Return what makes an injected error."""
    return lambda: kind(f"{MARK}: {text}", **options)


device_error = raising(kv.DeviceError, "cudaErrorLaunchFailure")
out_of_memory = raising(MemoryError, "cudaErrorMemoryAllocation")
no_pinned_memory = raising(kv.DeviceError, "cudaErrorMemoryAllocation of pinned memory")
no_page = raising(kv.CacheFull, "another thread took the last page")
compiler_crashed = raising(kv.CompileError, "the compiler was killed", transient=True)
no_thread = raising(RuntimeError, "can't start new thread")
no_space_for_tensors = raising(safetensors.SafetensorError, "No space left on device (os error 28)")


def failing(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, f"{MARK}: {os.strerror(number)}")


def _raise(error: BaseException) -> None:
    raise error


def _launch_later(real: Any, error: Any, device: Any, *arguments: Any, **options: Any) -> None:
    """Let a stream fail where the kernel would have run."""
    stream = arguments[5] if len(arguments) > 5 else options["stream"]
    stream.enqueue(lambda: _raise(error))


def _copy_later(
    real: Any, error: Any, device: Any, dst: Any, src: Any, *, stream: Any = None
) -> None:
    device.as_stream(stream).enqueue(lambda: _raise(error))


def _runs_later(
    real: Any, error: Any, device: Any, dst: Any, src: Any, sizes: Any, stream: Any, *_: Any
) -> None:
    stream.enqueue(lambda: _raise(error))


def _call_later(real: Any, error: Any, stream: Any, function: Any) -> None:
    real(stream, lambda: _raise(error))


class _Ctypes:
    """ctypes as a module sees it, whose CDLL a point may replace for that module alone."""

    def __init__(self) -> None:
        self.CDLL = ctypes.CDLL

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)


_CTYPES = _Ctypes()


def _of_files(path: Any, *_: Any, **__: Any) -> bool:
    """Whether a path is one of a program's files, rather than the interpreter's."""
    return "kvcupy-faults" in str(path)


_Host, _Streams = host.HostDevice, (host_streams.HostStream, host_streams.InlineStream)

POINTS = (
    Point("allocation", ((host, "_allocate"),), out_of_memory, before_launch=True),
    Point("pinning", ((_Host, "empty_pinned"),), no_pinned_memory, before_launch=True),
    Point("allocation of pages", ((PageAllocator, "alloc"),), no_page),
    Point("compilation", ((cxx, "build"),), compiler_crashed, before_launch=True,
          needs_kernels_unloaded=True),
    Point("module load", ((_CTYPES, "CDLL"),), failing(errno.ENOMEM), before_launch=True,
          needs_kernels_unloaded=True),
    Point("launch", ((_Host, "launch"),), device_error),
    Point("launch, in flight", ((_Host, "launch"),), device_error, _launch_later, later=True),
    Point("copy", ((_Host, "copy"), (_Host, "copy_runs")), device_error),
    Point("copy, in flight", ((_Host, "copy"),), device_error, _copy_later, later=True),
    Point("copy of runs, in flight", ((_Host, "copy_runs"),), device_error, _runs_later,
          later=True),
    Point("run on the host", ((_Host, "run"),), device_error),
    Point("stream", ((_Host, "stream"),), device_error),
    Point("event", ((_Host, "event"),), device_error),
    Point("record", tuple((kind, "record") for kind in _Streams), device_error),
    Point("wait", tuple((kind, "wait") for kind in _Streams), device_error),
    Point("host function", tuple((kind, "call") for kind in _Streams), device_error),
    Point("host function, in flight", tuple((kind, "call") for kind in _Streams), device_error,
          _call_later, later=True),
    Point("thread", ((threading.Thread, "start"),), no_thread),
    Point("fsync", ((os, "fsync"),), failing(errno.EIO)),
    Point("file write", ((safetensors, "serialize_file"),), no_space_for_tensors),
    Point("file open", ((os, "open"), (Path, "open")), failing(errno.EMFILE), counts=_of_files),
    Point("rename", ((Path, "replace"), (Path, "hardlink_to"), (os, "rename")), failing(errno.EIO),
          counts=_of_files),
    Point("permissions", ((Path, "chmod"),), failing(errno.EPERM), counts=_of_files),
)  # fmt: skip


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Let points replace what a module calls of another one, for that module alone."""
    with mock.patch.object(host, "ctypes", _CTYPES):
        yield


def names_cause(error: BaseException) -> bool:
    """Return whether an error says, or its causes do, which fault was injected."""
    seen: BaseException | None = error
    while seen is not None:
        if MARK in str(seen):
            return True
        seen = seen.__cause__
    return False


# --- Runs -----------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """A fault has left something behind that it may not."""


def renew(device: Any, *, kernels: bool) -> None:
    """Forget plans and idle buffers and, with `kernels`, loaded kernels."""
    scratch._stores.pop(device, None)
    op_call.forget()
    if kernels:
        device._functions.clear()


@contextmanager
def running(kind: type[Program], device: Any, *, kernels: bool) -> Iterator[Program]:
    """Prepare a program in a new folder, and release what it holds."""
    renew(device, kernels=kernels)
    folder = Path(tempfile.mkdtemp(prefix="kvcupy-faults-"))
    program = None
    try:
        program = kind(device, folder)
        renew(device, kernels=kernels)  # what it took to prepare
        yield program
    finally:
        if program is not None:
            program.close()
        shutil.rmtree(folder)


def calls_met(kind: type[Program], device: Any) -> tuple[dict[str, int], Any]:
    """Return how often a run without faults meets each point, and its result."""
    with (
        running(kind, device, kernels=True) as program,
        prepared(),
        ExitStack() as armed,
    ):
        triggers = {}
        for point in POINTS:
            triggers[point.name] = trigger = Trigger()
            armed.enter_context(point.armed(trigger))
        for _, function in program.steps():
            function()
        met = {name: trigger.count for name, trigger in triggers.items()}
        result = program.result()
        if leaks := [*program.leaks(), *program.losses()]:
            raise Wrong(f"{kind.__name__} without a fault: {leaks}")
    return met, result


def run(kind: type[Program], device: Any, point_name: str, number: int, expected: Any) -> bool:
    """Let one call fail, and check everything; return whether the run came to that call."""
    open_before = open_files()
    what = f"{kind.__name__}, {point_name} {number}"
    point = next(point for point in POINTS if point.name == point_name)
    trigger = Trigger(number)
    with running(kind, device, kernels=point.needs_kernels_unloaded) as program:
        program.launches = not point.before_launch
        with prepared(), point.armed(trigger):
            _repeat(program, point, trigger, expected, what)
        del program
    gc.collect(0)
    if open_files() > open_before:
        gc.collect()
        if open_files() > open_before:
            raise Wrong(f"{what}: {open_files() - open_before} files are left open")
    return trigger.fired


def _repeat(program: Program, point: Point, trigger: Trigger, expected: Any, what: str) -> None:
    """Run the steps of a program, each again if it raises, and check what is left."""
    retries = 0
    steps = program.steps()
    repeat = [*steps]
    while repeat:
        name, function = repeat.pop(0)
        before = None
        if not point.later:  # looking would let the failure surface
            with trigger.asleep():
                before = program.state(name)
        try:
            function()
        except Exception as error:
            if not trigger.fired:
                raise Wrong(f"{what}: {name} raised without a fault: {error!r}") from error
            if not names_cause(error):
                raise Wrong(f"{what}: {name} does not name the cause: {error!r}") from error
            retries += 1
            if retries > (3 if point.later else 1):
                raise Wrong(f"{what}: {name} raised again: {error!r}") from error
            if point.later:
                program.reset()
                repeat = [*steps]
                continue
            with trigger.asleep():
                after = program.state(name)
                if after != before:
                    raise Wrong(f"{what}: {name} changed {difference(before, after)}") from error
                program.repair(name)
            repeat.insert(0, (name, function))
    if not trigger.fired:  # some threads are started, and waited for, only if work is late
        return
    with trigger.asleep():
        try:
            result = program.result()
        except Exception as error:
            # In flight, it surfaces at the next call that looks.
            if not point.later or not names_cause(error):
                raise
            result = expected
        if result != expected:
            raise Wrong(f"{what}: result differs in {difference(expected, result)}")
        if leaks := program.leaks():
            raise Wrong(f"{what}: leaks {leaks}")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def difference(before: Any, after: Any, path: str = "") -> str:
    """Say where two states differ first."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if before.get(key) != after.get(key):
                return difference(before.get(key), after.get(key), f"{path}[{key!r}]")
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        for i, (a, b) in enumerate(zip(before, after, strict=False)):
            if a != b:
                return difference(a, b, f"{path}[{i}]")
    shown = (f"{x!r:.100}" if not isinstance(x, bytes) else f"{len(x)} bytes"
             for x in (before, after))  # fmt: skip
    return f"{path}: {' -> '.join(shown)}"
