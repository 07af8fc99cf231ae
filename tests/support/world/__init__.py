"""A simulated world: the production code on simulated time and threads.

    with simulated(seed) as world:      # time, threading, ... of kvcupy's modules
        writer = world.process("writer")
        writer.start(program)
        world.run()

Production code uses Python's own modules, and needs no other interface. Within `simulated`, the
names of these modules in the globals of kvcupy's modules refer to simulated ones. Calls that are
not simulated raise AttributeError, so none reaches the real system unnoticed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import logging
import pkgutil
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kvcupy import devices, streams
from kvcupy.devices.host import HostDevice
from kvcupy.devices.host_streams import HostContext, InlineStream

from . import threads as _threads
from .scheduler import Process, Stuck, Task, World, collected_later

__all__ = ["Failure", "Process", "Simulated", "Stuck", "Task", "search", "simulated"]

_SCOPE = ("kvcupy.cache", "kvcupy.devices.host_streams", "kvcupy.errors", "kvcupy.waiting")
_REAL = (time, threading, queue, queue.SimpleQueue, concurrent.futures)
_REAL_IDS = frozenset(map(id, _REAL))


class Simulated(World):
    """A world with the modules that its code uses."""

    def __init__(self, seed: int, dropped: frozenset[int] = frozenset()) -> None:
        super().__init__(seed, dropped)
        self.threading = _threads.threading_of(self)
        self.time = _threads.Time(self)
        self.queue = _threads.queue_of(self)
        replacements = (
            self.time, self.threading, self.queue, self.queue.SimpleQueue,
            _threads.futures_of(self, self.threading),
        )  # fmt: skip
        self.replacements = dict(zip(map(id, _REAL), replacements, strict=True))

    def device(self) -> HostDevice:
        """Return a host device for one process, since the threads of its streams end with it."""
        host: Any = devices.get("host")
        device = HostDevice.__new__(HostDevice)
        device.__dict__.update(host.__dict__)  # kernels that are loaded, and how they are run
        device.context = HostContext(device)
        device.context.faults = host.context.faults
        device._inline = InlineStream(device.context)
        device._streams = weakref.WeakValueDictionary()
        return device


@functools.cache
def _globals_to_replace() -> list[tuple[ModuleType, str]]:
    """Return the globals in scope that refer to real modules.

    All modules in scope are imported: one imported within a world would use the real modules.
    """
    for name in _SCOPE:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(found.name)
    prefixes = tuple(f"{name}." for name in _SCOPE)
    return [
        (module, key)
        for name, module in list(sys.modules.items()) if f"{name}.".startswith(prefixes)
        for key, value in vars(module).items() if id(value) in _REAL_IDS
    ]  # fmt: skip


@contextmanager
def simulated(seed: int, dropped: frozenset[int] = frozenset()) -> Iterator[Simulated]:
    """Let the code of kvcupy run in a new world.

    Nothing outside the world may use `kvcupy.cache` meanwhile.
    """
    names = _globals_to_replace()
    world = Simulated(seed, dropped)
    replaced: list[tuple[ModuleType, str, Any]] = []
    for module, key in names:
        value = vars(module)[key]
        if id(value) in _REAL_IDS:  # else a test has replaced it
            replaced.append((module, key, value))
            setattr(module, key, world.replacements[id(value)])
    replaced.append((streams, "_idle", streams._idle))  # streams end with their world
    streams._idle = weakref.WeakKeyDictionary()
    hook = sys.unraisablehook
    sys.unraisablehook = lambda raised: world.note(f"ignored {raised.exc_type.__name__}")
    was_disabled = logging.root.manager.disable
    logging.disable()
    with collected_later():
        try:
            yield world
        finally:
            world.close()
            logging.disable(was_disabled)
            sys.unraisablehook = hook
            for module, key, value in replaced:
                setattr(module, key, value)


class Failure(AssertionError):
    """A failed run: its seed, the omitted steps, the error and the log."""

    def __init__(
        self, seed: int, dropped: frozenset[int], error: BaseException, log: list[str]
    ) -> None:
        self.seed, self.dropped, self.error, self.log = seed, dropped, error, log
        steps = [line for line in log if ": step " in line]
        super().__init__(
            f"seed {seed}, {len(steps)} steps: {type(error).__name__}: {error}\n"
            + "\n".join(log[-60:])
        )


def run_once(
    scenario: Callable[[Any], object], seed: int, dropped: frozenset[int] = frozenset()
) -> tuple[Failure | None, Simulated]:
    """Run a scenario in a new world; return its failure, if any, and the world.

    A scenario creates processes, starts their tasks, calls `world.run` and checks the results.
    """
    with simulated(seed, dropped) as world:
        failure = None
        error: BaseException | None = None
        try:
            scenario(world)
        except Exception as raised:
            error = raised
        if world.errors:  # the first error of a task is the cause of later ones
            error = world.errors[0][1]
        if error is not None:
            failure = Failure(seed, dropped, error, list(world.log))
    return failure, world


def search(scenario: Callable[[Any], object], seeds: range) -> Failure | None:
    """Run a scenario with each seed; return the first failure, with as few steps as were found."""
    gc.freeze()  # modules: collections between runs would visit them again and again
    try:
        for seed in seeds:
            failure, world = run_once(scenario, seed)
            if failure is not None:
                return _shrunk(scenario, failure, world.steps_announced)
        return None
    finally:
        gc.unfreeze()


def _shrunk(scenario: Callable[[Any], object], failure: Failure, count: int) -> Failure:
    """Remove optional steps, in ever smaller groups, while the run fails with the same error."""
    kept = [n for n in range(count) if n not in failure.dropped]
    size = max(1, len(kept) // 2)
    while True:
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            dropped = frozenset(range(count)) - frozenset(rest)
            shorter, _ = run_once(scenario, failure.seed, dropped)
            if shorter is not None and type(shorter.error) is type(failure.error):
                failure, kept = shorter, rest
                break
        else:
            if size == 1:
                return failure
            size = max(1, size // 2)
