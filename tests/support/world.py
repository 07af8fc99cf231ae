"""A simulated world: the production code on simulated time and threads.

    with simulated(seed) as world:      # time, threading, ... of kvcupy's modules
        writer = world.process("writer")
        writer.start(program)
        world.run()

    task A   run . . . . run . . run          one greenlet for each thread; all in one OS thread
    task B   . . run run . . . . .
    clock    0.0 ........ 0.5 ..... 30.0      moves when a task runs, and jumps when all tasks wait

Production code uses Python's own modules, and needs no other interface. Within `simulated`, the
names of these modules in the globals of kvcupy's modules refer to simulated ones. Calls that are
not simulated raise AttributeError, so none reaches the real system unnoticed. Every call of a
simulated module is a point where another task may run. The seed decides which.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import itertools
import logging
import pkgutil
import queue
import random
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import greenlet

from kvcupy import devices, streams
from kvcupy.devices.host import HostDevice
from kvcupy.devices.host_streams import HostContext, InlineStream

_STEP_S = 2e-6  # virtual time of one step
_START_S = 1000.0
_MAX_LATE_CALLS = 300  # of a task at the end of the run

_abandoned: list[Any] = []
"""Tasks that catch every exception, kept since destroying them would raise another."""


class Stuck(AssertionError):
    """A run has not ended: its tasks wait for one another, or its virtual time is over."""


class Process:
    """A simulated process, with which its tasks end."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.is_alive = True
        self._world = world

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    def start(self, function: Callable[..., object], *arguments: Any, name: str = "") -> Task:
        """Run a function as a thread of this process."""
        return self._world.start(self, lambda: function(*arguments), name or function.__name__)

    def kill(self) -> None:
        """End the process at once, as SIGKILL does."""
        if not self.is_alive:
            return
        self._world.note(f"kill {self.name}")
        self.is_alive = False
        self._world.end_tasks(self)


class Task:
    """A simulated thread."""

    def __init__(
        self, world: World, process: Process, function: Callable[[], object], name: str
    ) -> None:
        self.process, self.name = process, name
        self.number = next(world.numbers)
        self.ident = 10_000 + self.number
        self.priority = world.random.random()
        self.is_daemon = False
        self.is_over = False
        self.error: BaseException | None = None
        self.until: Callable[[], bool] | None = None  # None: can run
        self.deadline = float("inf")
        self.locals: dict[Any, Any] = {}  # of `threading.local`, and the thread object
        self.greenlet = greenlet.greenlet(lambda: self._run(world, function), world.hub)

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"

    def _run(self, world: World, function: Callable[[], object]) -> None:
        try:
            function()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self.error = error
            world.note(f"{self} raised {type(error).__name__}")
            if not world.is_over:
                world.errors.append((self, error))
        self.is_over = True

    def is_runnable(self, now: float) -> bool:
        return self.until is None or self.deadline <= now or self.until()


class World:
    """A simulated machine: processes, a clock, and all that a seed decides in one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = _START_S  # virtual time in seconds
        self.numbers = itertools.count()
        self.errors: list[tuple[Task, BaseException]] = []
        self.log: list[str] = []  # the last notes
        self.digest = 0  # of all notes
        self.is_over = False
        self._tasks: list[Task] = []
        self._ended: list[Task] = []  # kept, so that no `finally` runs before the end of the run
        self._by_priority = self.random.random() < 0.5
        self._draw = self.random.random
        self._switch_probability = self.random.choice([0.05, 0.3, 0.9])
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self._late_calls = 0

    # --- For scenarios ---

    def process(self, name: str) -> Process:
        return Process(self, name)

    def step(self, text: str) -> bool:
        """Note a step of the scenario."""
        self.note(f"step: {text}")
        return True

    def note(self, text: str) -> None:
        """Append to the log of the run."""
        line = f"{self.now - _START_S:.6f} {self.current or 'world'}: {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.log.append(line)
        if len(self.log) > 4000:
            del self.log[:2000]

    # --- For simulated modules ---

    @property
    def task(self) -> Task:
        assert self.current is not None, "only tasks may call simulated modules"
        return self.current

    def start(self, process: Process, function: Callable[[], object], name: str) -> Task:
        task = Task(self, process, function, name)
        self._tasks.append(task)
        return task

    def pause(self) -> None:
        """Let other tasks run."""
        task = self.current
        if task is None or self.is_over:
            self._note_late_call()
            return
        self.now += _STEP_S
        if self._draw() < self._switch_probability:
            self.hub.switch()

    def wait(self, until: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Wait until a condition holds or the deadline has passed; return whether it holds."""
        task = self.current
        if task is None or self.is_over:
            self._note_late_call()
            return True
        task.until, task.deadline = until, deadline
        self.hub.switch()
        task.until, task.deadline = None, float("inf")
        return until()

    def end_tasks(self, process: Process) -> None:
        """Stop the tasks of a killed process for good."""
        ended = [task for task in self._tasks if task.process is process]
        self._tasks = [task for task in self._tasks if task.process is not process]
        self._ended += ended
        if self.current in ended:
            self.hub.switch()

    # --- Running ---

    def run(self, limit_s: float = 3600.0) -> None:
        """Run until all tasks except daemons have ended; Stuck if they do not."""
        limit = self.now + limit_s
        while any(not task.is_daemon for task in self._tasks):
            if (task := self._choose()) is not None:
                self.now += _STEP_S
                self.current = task
                task.greenlet.switch()
                self.current = None
                if task.is_over and task in self._tasks:
                    self._tasks.remove(task)
                continue
            following = min([task.deadline for task in self._tasks])
            if following == float("inf") or following > limit:
                raise Stuck(self._state_of_tasks(following > limit))
            self.now = max(self.now, following)

    def close(self) -> None:
        """End all tasks; their `finally` blocks run while simulated modules do nothing."""
        self.is_over = True
        for task in (*self._tasks, *self._ended):
            if task.greenlet:
                self.current, self._late_calls = task, 0
                task.greenlet.throw(greenlet.GreenletExit)
        self.current = None
        self._tasks, self._ended = [], []

    def _choose(self) -> Task | None:
        """Choose a task that can run. Tests of other tasks cost most of a run, so few are made."""
        now, rest, chosen = self.now, self._tasks, None
        if self._by_priority:
            if self._draw() < 0.05:
                self.random.choice(rest).priority = self._draw()
            for task in rest:
                if (chosen is None or task.priority > chosen.priority) and task.is_runnable(now):
                    chosen = task
            return chosen
        rest = rest.copy()
        while rest:
            number = int(self._draw() * len(rest))
            if rest[number].is_runnable(now):
                return rest[number]
            rest[number] = rest[-1]
            del rest[-1]
        return None

    def _note_late_call(self) -> None:
        """End a task that does not stop after the run, when simulated calls do nothing."""
        if not self.is_over:
            return
        self.now += 1.0  # ends what waits with a deadline
        try:
            is_in_task = greenlet.getcurrent() is not self.hub
        except RuntimeError:  # at the exit of the interpreter
            return
        if is_in_task:
            self._late_calls += 1
            if self._late_calls > 2 * _MAX_LATE_CALLS:  # a loop that catches every exception
                _abandoned.append(greenlet.getcurrent())
                self.hub.switch()
            if self._late_calls > _MAX_LATE_CALLS:  # a loop in a `finally` block
                raise greenlet.GreenletExit

    def _state_of_tasks(self, is_late: bool) -> str:
        lines = ["the virtual time is over" if is_late else "no task can run"]
        for task in self._tasks:
            frames = traceback.extract_stack(task.greenlet.gr_frame)
            where = [f for f in frames if "/support/world.py" not in f.filename][-1:]
            lines.append(f"  {task} waits at {where[0].filename}:{where[0].lineno}" if where
                         else f"  {task}")  # fmt: skip
        return "\n".join(lines)


@contextmanager
def collected_later() -> Iterator[None]:
    """Keep the garbage collector, whose timing no seed decides, out of a run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- Modules --------------------------------------------------------------------------------------


class Time:
    """The module `time` of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        self._world.pause()
        return self._world.now

    perf_counter = time = monotonic

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    perf_counter_ns = time_ns = monotonic_ns

    def sleep(self, seconds: float) -> None:
        self._world.wait(lambda: False, self._world.now + max(0.0, seconds))


def threading_of(world: World) -> Any:
    """Make the module `threading` of a world."""

    class Lock:
        def __init__(self) -> None:
            self._owner: Task | None = None

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            world.pause()
            return self._take(blocking, timeout)

        def _take(self, blocking: bool, timeout: float) -> bool:
            if world.is_over or world.current is None:
                return True
            if self._owner is not None:
                if not blocking:
                    return False
                deadline = world.now + timeout if timeout >= 0 else float("inf")
                if not world.wait(lambda: self._owner is None, deadline):
                    return False
            self._owner = world.task
            return True

        def release(self) -> None:
            if world.is_over or world.current is None:
                return
            if self._owner is None:
                raise RuntimeError("release unlocked lock")
            self._owner = None

        def locked(self) -> bool:
            return self._owner is not None

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *exception: object) -> None:
            self.release()

    class RLock(Lock):
        def __init__(self) -> None:
            super().__init__()
            self._depth = 0

        def _take(self, blocking: bool, timeout: float) -> bool:
            if self._owner is not world.current and not super()._take(blocking, timeout):
                return False
            self._depth += 1
            return True

        def release(self) -> None:
            if world.is_over or world.current is None:
                return
            if self._owner is not world.current:
                raise RuntimeError("cannot release un-acquired lock")
            self._depth -= 1
            if not self._depth:
                self._owner = None

    class Thread:
        def __init__(
            self, group: None = None, target: Callable[..., object] | None = None,
            name: str | None = None, args: Any = (), kwargs: Any = None, *,
            daemon: bool | None = None,
        ) -> None:  # fmt: skip
            self._target, self._args, self._kwargs = target, args, kwargs or {}
            self.name, self.daemon = name or "thread", bool(daemon)
            self._task: Task | None = None

        def run(self) -> None:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)

        def start(self) -> None:
            world.pause()
            self._task = world.start(world.task.process, self.run, self.name)
            self._task.is_daemon = self.daemon
            self._task.locals["thread"] = self

        def is_alive(self) -> bool:
            return self._task is not None and not self._task.is_over

        @property
        def ident(self) -> int | None:
            return None if self._task is None else self._task.ident

        def join(self, timeout: float | None = None) -> None:
            deadline = float("inf") if timeout is None else world.now + max(0.0, timeout)
            world.wait(lambda: self._task is None or self._task.is_over, deadline)

    def current_thread() -> Any:
        task = world.task
        if "thread" not in task.locals:
            task.locals["thread"] = thread = Thread(name=task.name)
            thread._task = task
        return task.locals["thread"]

    class Threading:
        TIMEOUT_MAX = threading.TIMEOUT_MAX

        def get_ident(self) -> int:
            return world.task.ident

    Threading.Lock, Threading.RLock, Threading.Thread = Lock, RLock, Thread  # type: ignore[attr-defined]
    Threading.current_thread = staticmethod(current_thread)  # type: ignore[attr-defined]
    return Threading()


def queue_of(world: World) -> Any:
    """Make the module `queue` of a world."""

    class SimpleQueue:
        def __init__(self) -> None:
            self._items: deque[Any] = deque()

        def put(self, item: Any) -> None:
            self._items.append(item)
            world.pause()

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            deadline = float("inf") if timeout is None else world.now + timeout
            if not self._items and block:
                world.wait(lambda: bool(self._items), deadline)
            try:
                return self._items.popleft()
            except IndexError:
                raise queue.Empty from None

        def get_nowait(self) -> Any:
            return self.get(block=False)

        def empty(self) -> bool:
            return not self._items

        def qsize(self) -> int:
            return len(self._items)

    class Queue:
        Empty = queue.Empty

    Queue.SimpleQueue = SimpleQueue  # type: ignore[attr-defined]
    return Queue()


def futures_of(world: World, simulated_threading: Any) -> Any:
    """Make the part of `concurrent.futures` that `cache.threads` uses."""

    class ThreadPoolExecutor:
        def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
            self._count, self._name = max_workers, thread_name_prefix
            self._jobs: deque[Callable[[], object]] = deque()
            self._num_working = 0

        def submit(self, function: Callable[..., object], *arguments: Any) -> None:
            self._jobs.append(lambda: function(*arguments))
            if self._num_working < self._count:
                self._num_working += 1
                simulated_threading.Thread(target=self._work, name=self._name, daemon=True).start()

        def _work(self) -> None:
            while self._jobs:
                self._jobs.popleft()()
            self._num_working -= 1

        def shutdown(self, wait: bool = True) -> None:
            world.wait(lambda: not self._num_working)

    class Futures:
        pass

    Futures.ThreadPoolExecutor = ThreadPoolExecutor  # type: ignore[attr-defined]
    return Futures()


# --- Runs -----------------------------------------------------------------------------------------

_SCOPE = ("kvcupy.cache", "kvcupy.devices.host_streams", "kvcupy.errors", "kvcupy.waiting")
_REAL = (time, threading, queue, queue.SimpleQueue, concurrent.futures)
_REAL_IDS = frozenset(map(id, _REAL))


class Simulated(World):
    """A world with the modules that its code uses."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.threading = threading_of(self)
        self.time = Time(self)
        self.queue = queue_of(self)
        replacements = (
            self.time, self.threading, self.queue, self.queue.SimpleQueue,
            futures_of(self, self.threading),
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
def simulated(seed: int) -> Iterator[Simulated]:
    """Let the code of kvcupy run in a new world.

    Nothing outside the world may use `kvcupy.cache` meanwhile.
    """
    names = _globals_to_replace()
    world = Simulated(seed)
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
    """A failed run: its seed, the error and the log."""

    def __init__(self, seed: int, error: BaseException, log: list[str]) -> None:
        self.seed, self.error, self.log = seed, error, log
        text = "\n".join(log[-60:])
        super().__init__(f"seed {seed}: {type(error).__name__}: {error}\n{text}")


def run_once(scenario: Callable[[Any], object], seed: int) -> tuple[Failure | None, Simulated]:
    """Run a scenario in a new world; return its failure, if any, and the world.

    A scenario creates processes, starts their tasks, calls `world.run` and checks the results.
    """
    with simulated(seed) as world:
        failure = None
        error: BaseException | None = None
        try:
            scenario(world)
        except Exception as raised:
            error = raised
        if world.errors:  # the first error of a task is the cause of later ones
            error = world.errors[0][1]
        if error is not None:
            failure = Failure(seed, error, list(world.log))
    return failure, world


def search(scenario: Callable[[Any], object], seeds: range) -> Failure | None:
    """Run a scenario with each seed; return the first failure."""
    gc.freeze()  # modules: collections between runs would visit them again and again
    try:
        for seed in seeds:
            failure, _ = run_once(scenario, seed)
            if failure is not None:
                return failure
        return None
    finally:
        gc.unfreeze()
