"""Host threads: what each is behind, and the locks, queues and joins that order them.

    thread A   copy on stream 1 | synchronize | event.set() |
    thread B                                                 event.wait() | copy on stream 2

Setting the event hands over the clock of thread A, and waiting for it joins that to the clock of
thread B, whose copy is therefore ordered behind A's.

While a checker is on, classes of the standard library are patched to announce this: threads,
conditions (and with them semaphores, barriers, queues and futures), events and executors. Locks and
simple queues are C types, which cannot be patched: `threading.Lock`, `threading.RLock` and
`queue.SimpleQueue` create announcing ones instead. Earlier ones stay silent. A thread whose
functions can reach a silent lock counts as ordered with all others.
"""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from .. import observe
from .callers import is_users, users_frames, variables_of
from .history import HOST, Actor, Clock, join

_GenuineRLock: Any = type(threading.RLock())
_SILENT = (type(threading.Lock()), _GenuineRLock, queue.SimpleQueue)
_new_lock = threading.Lock
new_rlock = threading.RLock
_MAX_FRAMES = 8  # of a thread in which silent locks are looked for
_MAX_VALUES = 1000  # in one frame
_MAX_ITEMS = 32  # of a list or dict
_OPAQUE = (
    "_pytest", "asyncio", "concurrent", "cupy", "kvcupy", "logging", "numpy", "pluggy", "queue",
    "threading", "torch",
)  # fmt: skip
"""Packages whose objects are not searched for silent locks."""


# --- Clocks ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class HostThread:
    """A host thread: which work comes before the calls that it makes next.

    Attributes
    ----------
    actor : of what the thread itself reads and writes
    behind : the work that has ended, as far as the thread knows
    streams : what each stream is behind, of the calls that the thread knows
    searched : code in which no silent lock was found
    """

    actor: Actor = HOST
    behind: Clock = field(default_factory=dict)
    streams: dict[Actor, Clock] = field(default_factory=dict)
    searched: set[CodeType] = field(default_factory=set)

    def learn(self, other: HostThread) -> None:
        """Put this thread behind all that another knows."""
        join(self.behind, other.behind)
        for actor, clock in other.streams.items():
            self.put_on(actor, clock)

    def put_on(self, actor: Actor, clock: Clock) -> None:
        """Note that later work on a stream is behind a clock, which must not change afterwards."""
        known = self.streams.get(actor)
        if known is None:
            self.streams[actor] = clock
        elif known is not clock:
            self.streams[actor] = joined = dict(known)
            join(joined, clock)

    def copy(self, actor: Actor) -> HostThread:
        return HostThread(actor, dict(self.behind), dict(self.streams))


class HostThreads:
    """The host threads that a checker distinguishes, and what they hand over.

    Until the block starts a thread, all threads count as one. From then on, the thread that entered
    the block and those that the user's code starts are distinct. Threads from before the block and
    kvcupy's own count as ordered with all others.

    Attributes
    ----------
    main : the thread that entered the block; while `several` is false, all threads
    several : whether threads are distinguished
    """

    def __init__(self) -> None:
        self.main = HostThread()
        self.several = False
        self._others = HostThread(("", 0))
        self._count = 0
        self._started: WeakKeyDictionary[threading.Thread, HostThread] = WeakKeyDictionary()
        self._local = threading.local()  # .thread: the calling one
        self._local.thread = self.main
        self._handed: dict[Any, tuple[Any, HostThread]] = {}

    def calling(self) -> HostThread:
        """Return the calling thread."""
        if not self.several:
            return self.main
        thread = self._distinct()
        if thread is None:
            thread = self._others
            for other in self._all():
                thread.learn(other)
        else:
            thread.learn(self._others)
        return thread

    def _distinct(self) -> HostThread | None:
        """Return the calling thread; None if it counts as ordered with all others."""
        thread: HostThread | None = getattr(self._local, "thread", None)
        if thread is not None and _holds_silent_lock(sys._getframe(1), thread.searched):
            thread = self._local.thread = None
        return thread

    def behind(self) -> Clock:
        """Return a copy of what the calling thread is behind. Takes no lock."""
        thread = getattr(self._local, "thread", None) if self.several else self.main
        return {} if thread is None else dict(thread.behind)

    def behind_all(self) -> Clock:
        """Return what every thread is behind."""
        if not self.several:
            return self.main.behind
        first, *rest = [thread.behind for thread in (*self._all(), self._others)]
        return {a: min(n, *[clock.get(a, 0) for clock in rest]) for a, n in first.items()}

    def starts(
        self, thread: threading.Thread, starter: HostThread, streams: dict[Actor, Clock]
    ) -> None:
        """Note that the user's code starts a thread.

        Parameters
        ----------
        streams : the clock of each stream, which all threads know until the first one starts
        """
        if not self.several:
            self.main.streams = {actor: dict(clock) for actor, clock in streams.items()}
            self.several = True
        self._count += 1
        self._started[thread] = starter.copy(("", self._count))

    def runs(self, thread: threading.Thread) -> None:
        """Note that the calling thread is one that was started."""
        self._local.thread = self._started.get(thread)

    def ended(self, thread: threading.Thread) -> None:
        """Note that the calling thread knows that another has ended."""
        self._learn(self._started.get(thread))

    def hand_over(self, thing: Any, giver: HostThread | None = None) -> None:
        """Note that the calling thread, or a host function, hands something over."""
        if (giver := giver or self._distinct()) is not None:
            self._slot(thing).learn(giver)

    def take_over(self, thing: Any) -> None:
        """Note that the calling thread takes what was handed over."""
        if (known := self._handed.get(_key(thing))) is not None:
            self._learn(known[1])

    def _learn(self, other: HostThread | None) -> None:
        thread = self._distinct() if self.several else self.main
        if thread is not None and other is not None:
            thread.learn(other)

    def _all(self) -> list[HostThread]:
        threads = list(self._started.items())
        return [self.main, *[each for thread, each in threads if _is_alive(thread)]]

    def _slot(self, thing: Any) -> HostThread:
        """Return what was handed over by a lock, a queue or an object that the user names."""
        key = _key(thing)
        handed, known = self._handed, self._handed.get(key)
        if known is None:
            try:
                held: Any = ref(thing, lambda _: handed.pop(key, None))
            except TypeError:  # has no weak references: the identity must not be given again
                held = thing
            known = handed[key] = held, HostThread()
        return known[1]


def _key(thing: Any) -> Any:
    return thing if isinstance(thing, str) else id(thing)


def _holds_silent_lock(frame: FrameType, searched: set[CodeType]) -> bool:
    """Return whether one of the functions that called has a lock whose use is not announced."""
    for user in islice(users_frames(frame), _MAX_FRAMES):
        if user.f_code not in searched:
            if any(type(value) in _SILENT for value in _values(user)):
                return True
            searched.add(user.f_code)
    return False


def _values(frame: FrameType) -> Iterator[Any]:
    """Yield what a function can reach: variables, globals it names, and two attributes further."""
    names, scope = frame.f_code.co_names, frame.f_globals
    if str(scope.get("__name__", "")).partition(".")[0] in _OPAQUE:
        return
    layer: list[Any] = list(variables_of(frame).values())
    for name in names:
        value = scope.get(name)
        layer.append(value)
        if isinstance(value, ModuleType):
            layer += [vars(value).get(attribute) for attribute in names]
    seen: set[int] = set()
    for _ in range(3):
        inner: list[Any] = []
        for value in layer:
            if id(value) not in seen and len(seen) < _MAX_VALUES:
                seen.add(id(value))
                yield value
                inner += _inside(value)
        layer = inner


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(islice(value.values(), _MAX_ITEMS))
    if isinstance(value, (list, tuple)):
        return value[:_MAX_ITEMS]
    kind = type(value)
    if kind.__module__.partition(".")[0] in _OPAQUE or isinstance(value, (type, ModuleType)):
        return ()
    return list(getattr(value, "__dict__", {}).values())


# --- Announcements of the standard library --------------------------------------------------------


def _announce(method: str, thing: Any) -> None:
    for observer in observe.order_observers:
        getattr(observer, method)(thing)


class _Lock:
    """A `threading.Lock` that announces hand-overs."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = _new_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired = self._lock.acquire(blocking, timeout)
        if acquired:
            _announce("taken_over", self)
        return acquired

    def release(self) -> None:
        try:
            _announce("handed_over", self)
        finally:
            self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock = _new_lock()


class _RLock(_GenuineRLock):  # type: ignore[misc]
    """A `threading.RLock` that announces hand-overs."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired: bool = super().acquire(blocking, timeout)
        if acquired:
            _announce("taken_over", self)
        return acquired

    def release(self) -> None:
        _announce("handed_over", self)
        super().release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _SimpleQueue(queue.SimpleQueue[Any]):
    """A `queue.SimpleQueue` that announces hand-overs."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        _announce("handed_over", self)
        super().put(item, block, timeout)

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        _announce("taken_over", self)
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)


def _announcing(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in place of a genuine one of a class of the standard library."""

    def start(thread: Any) -> None:
        if not _is_started_by_kvcupy(sys._getframe(1)):
            _announce("thread_starts", thread)
            thread.run = partial(_run, thread, thread.run)
        genuine(thread)

    def join(thread: Any, timeout: float | None = None) -> None:
        genuine(thread, timeout)
        if not _is_alive(thread):
            _announce("thread_ended", thread)

    def is_alive(thread: Any) -> bool:
        alive = bool(genuine(thread))
        if not alive:
            _announce("thread_ended", thread)
        return alive

    def __enter__(condition: Any) -> bool:
        entered = bool(genuine(condition))
        _announce("taken_over", condition._lock)
        return entered

    def __exit__(condition: Any, *error: object) -> None:
        _announce("handed_over", condition._lock)
        genuine(condition, *error)

    def wait(waited: Any, timeout: float | None = None) -> bool:
        if isinstance(waited, threading.Condition):
            _announce("handed_over", waited._lock)  # type: ignore[attr-defined]
            notified = bool(genuine(waited, timeout))
            _announce("taken_over", waited._lock)  # type: ignore[attr-defined]
            return notified
        return is_set(waited, timeout)

    def set(event: Any) -> None:
        _announce("handed_over", event)
        genuine(event)

    def is_set(event: Any, *timeout: float | None) -> bool:
        value = bool(genuine(event, *timeout))
        if value:
            _announce("taken_over", event)
        return value

    def submit(executor: Any, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return genuine(executor, _handing(function), *args, **options)

    def call_soon_threadsafe(loop: Any, function: Any, *args: Any, **options: Any) -> Any:
        return genuine(loop, _handing(function), *args, **options)

    methods: dict[str, Callable[..., Any]] = dict(locals())
    return methods[name]


def _run(thread: Any, genuine: Callable[[], object]) -> None:
    vars(thread).pop("run", None)  # with which the thread would refer to itself
    _announce("thread_runs", thread)
    genuine()


class _Token:
    """Stands for one call that is handed to another thread."""


def _handing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is behind what the calling thread has done so far."""
    token = _Token()
    _announce("handed_over", token)

    def called(*args: Any, **options: Any) -> Any:
        _announce("taken_over", token)
        return function(*args, **options)

    return called


def _is_started_by_kvcupy(frame: FrameType | None) -> bool:
    """Return whether kvcupy starts a thread, by an executor too, and not the user."""
    libraries = ("threading", "concurrent", __name__)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(libraries):
        frame = frame.f_back
    return frame is not None and not is_users(frame)


_is_alive = threading.Thread.is_alive
_lock = _new_lock()
_num_blocks = 0
_patched: list[tuple[Any, str, Any, Any]] = []  # owner, name, genuine, in its place


@contextmanager
def announced() -> Iterator[None]:
    """Let Python's threads announce what orders them, for the length of a with block."""
    global _num_blocks
    with _lock:
        _num_blocks += 1
        if _num_blocks == 1:
            _patch()
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                _restore()


def _patch() -> None:
    methods: list[tuple[Any, tuple[str, ...]]] = [
        (threading.Thread, ("start", "join", "is_alive")),
        (threading.Condition, ("__enter__", "__exit__", "wait")),
        (threading.Event, ("set", "is_set", "wait")),
        (concurrent.futures.ThreadPoolExecutor, ("submit",)),
    ]
    if (loops := sys.modules.get("asyncio.base_events")) is not None:
        methods.append((loops.BaseEventLoop, ("call_soon_threadsafe",)))
    for owner, names in methods:
        for name in names:
            genuine = _genuine(getattr(owner, name))
            instead = _announcing(name, genuine)
            instead.__wrapped__ = genuine  # type: ignore[attr-defined]
            _replace(owner, name, genuine, instead)
    _replace(threading, "Lock", _new_lock, _Lock)
    _replace(threading, "RLock", new_rlock, _RLock)
    _replace(queue, "SimpleQueue", _SILENT[2], _SimpleQueue)


def _genuine(method: Any) -> Any:
    """Return a method of the standard library, also where others have put one of ours back."""
    is_ours = getattr(method, "__module__", None) == __name__
    return method.__wrapped__ if is_ours else method


def _replace(owner: Any, name: str, genuine: Any, instead: Any) -> None:
    _patched.append((owner, name, genuine, instead))
    setattr(owner, name, instead)


def _restore() -> None:
    while _patched:
        owner, name, genuine, instead = _patched.pop()
        if getattr(owner, name) is instead:  # else another patch is on top, and calls it
            setattr(owner, name, genuine)
