"""A simulated scheduler: the same program under many orders of its streams.

    host       put | put | put | synchronise ........
    stream 1         run |           | run |
    stream 2                   | run |     | run |       the scheduler picks the next task

Streams of the simulated device are queues without a thread. Whenever the host enqueues work, polls
or waits, the scheduler may run the first task of any stream that does not wait for another. It
records which task it chose, and among how many. These choices are the schedule. A schedule of zeros
is program order: each task runs when it is enqueued.
"""

from __future__ import annotations

import numbers
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import devices
from ..checks import require_int
from ..devices.host import HostDevice
from ..devices.host_streams import HostContext, HostStream, InlineStream, Marker, Task
from ..errors import DeviceError

Schedule = tuple[int, ...]
"""The choices in order, without the zeros at the end."""

_MAX_ATTEMPTS = 120  # to shorten a failing schedule
_MAX_IDLE_POLLS = 4  # in a row
_MAX_CHANGES = 3  # of priorities, per schedule


@dataclass(frozen=True)
class Failure:
    """A schedule whose outcome differs from program order, or is an exception.

    Attributes
    ----------
    schedule : with the fewest deviations from program order that were found; for `replay`
    seed : of the run that found it
    outcome : the return value of the program, or the exception
    expected : the outcome in program order
    """

    schedule: Schedule
    seed: int
    outcome: Any
    expected: Any

    def __str__(self) -> str:
        deviations = [f"{i}: {choice}" for i, choice in enumerate(self.schedule) if choice]
        return (
            f"seed {self.seed}, choices other than program order {{{', '.join(deviations)}}}: "
            f"got {self.outcome!r}, in program order {self.expected!r}; "
            f"explore(program, replay={self.schedule})"
        )


@dataclass
class ExploreResult:
    """The outcomes of the schedules of a program.

    Attributes
    ----------
    outcomes : each distinct outcome, and the number of schedules with it
    failures : one for each outcome that differs from program order, or is an exception
    seed : of the first random schedule; each further one has the next number
    schedules : how many were run, without the search for shorter ones
    """

    seed: int
    outcomes: list[tuple[Any, int]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    schedules: int = 0

    @property
    def ok(self) -> bool:
        return not self.failures


# --- Strategies -----------------------------------------------------------------------------------


class _Chooser:
    """Makes and records the choices of one schedule: first `prefix`, then by `strategy`."""

    def __init__(self, prefix: Sequence[int], strategy: Callable[[list[int]], int]) -> None:
        self._prefix, self._strategy = prefix, strategy
        self.choices: list[int] = []
        self.counts: list[int] = []

    def choose(self, candidates: list[int]) -> int:
        """Return an index into `candidates`: numbers of streams, or -1 for the host."""
        at = len(self.choices)
        if at < len(self._prefix):
            choice = min(self._prefix[at], len(candidates) - 1)
        else:
            choice = self._strategy(candidates)
        self.choices.append(choice)
        self.counts.append(len(candidates))
        return choice

    @property
    def schedule(self) -> Schedule:
        return _trimmed(self.choices)


def _trimmed(choices: Sequence[int]) -> Schedule:
    end = max((i + 1 for i, choice in enumerate(choices) if choice), default=0)
    return tuple(choices[:end])


def _program_order(candidates: list[int]) -> int:
    return 0


class _Priorities:
    """Runs the stream with the highest priority. Priorities are random, and drop a few times.

    Source: Burckhardt et al. 2010, probabilistic concurrency testing.
    """

    def __init__(self, draw: random.Random, steps: int) -> None:
        self._draw = draw
        self._priorities: dict[int, float] = {-1: draw.choice([0.0, 0.5, 1.0])}
        self._changes = [draw.randrange(steps) for _ in range(draw.randrange(_MAX_CHANGES + 1))]
        self._step = 0

    def __call__(self, candidates: list[int]) -> int:
        priorities = self._priorities
        for number in candidates:
            if number not in priorities:
                priorities[number] = self._draw.random()
        best = max(range(len(candidates)), key=lambda i: priorities[candidates[i]])
        self._step += 1
        if self._step in self._changes:
            priorities[candidates[best]] = -self._step
        return best


def _strategy(seed: int, steps: int) -> Callable[[list[int]], int]:
    """Return random priorities for two of three seeds, and uniform choices for the third."""
    draw = random.Random(seed)
    if seed % 3:
        return _Priorities(draw, max(1, steps))
    return lambda candidates: draw.randrange(len(candidates))


# --- The device -----------------------------------------------------------------------------------


class _Scheduler:
    """Runs the tasks of simulated streams, on the thread of the program that calls."""

    def __init__(self, chooser: _Chooser) -> None:
        self._chooser = chooser
        self._streams: list[SimulatedStream] = []
        self._puts = 0
        self._busy = False
        self._idle_polls = 0  # since a task ran
        self._lock = threading.RLock()

    def add(self, stream: SimulatedStream) -> int:
        self._streams.append(stream)
        return len(self._streams) - 1

    def marker(self) -> Marker:
        """Return a marker. Waiting for it runs streams."""
        marker = Marker()
        marker.passed = _Flag(self)  # type: ignore[assignment]
        return marker

    def next_put(self) -> int:
        self._puts += 1
        return self._puts

    def _runnable(self) -> list[SimulatedStream]:
        ready = [s for s in self._streams if s.tasks and s.tasks[0].is_ready()]
        return sorted(ready, key=lambda stream: stream.tasks[0].put)

    def pause(self) -> None:
        """Run streams until the scheduler chooses the host."""
        with self._lock:
            while not self._busy and (ready := self._runnable()):
                choice = self._chooser.choose([*(s.number for s in ready), -1])
                if choice == len(ready):
                    return
                self._run(ready[choice])

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Run streams until a condition holds; DeviceError if they wait for one another."""
        with self._lock:
            while not reached():
                if self._busy:
                    raise DeviceError("a function on a simulated stream cannot wait for a stream")
                ready = self._runnable()
                if not ready:
                    waiting = ", ".join(s.name for s in self._streams if s.tasks) or "no stream"
                    raise DeviceError(f"deadlock: the host waits, and so does {waiting}")
                numbers = [s.number for s in ready]
                index = self._chooser.choose(numbers) if len(ready) > 1 else 0
                self._run(ready[index])

    def poll(self) -> None:
        """Run at most one task; after `_MAX_IDLE_POLLS` polls without one, run one."""
        with self._lock:
            if self._busy or not (ready := self._runnable()):
                return
            candidates = [s.number for s in ready]
            if self._idle_polls < _MAX_IDLE_POLLS:
                candidates.append(-1)
            choice = self._chooser.choose(candidates) if len(candidates) > 1 else 0
            if choice == len(ready):
                self._idle_polls += 1
            else:
                self._run(ready[choice])

    def _run(self, stream: SimulatedStream) -> None:
        self._busy, self._idle_polls = True, 0
        try:
            stream.run_first()
        finally:
            self._busy = False


class _Flag:
    """Replaces the `Latch` of a marker. Waiting for it runs streams."""

    def __init__(self, scheduler: _Scheduler) -> None:
        self._scheduler = scheduler
        self.value = False

    def set(self) -> None:
        self.value = True

    def is_set(self) -> bool:
        if not self.value:
            self._scheduler.poll()
        return self.value

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.run_until(lambda: self.value)
        return True


@dataclass
class _Queued:
    """A task in a simulated stream; `awaits` is the marker that must have passed before it runs."""

    put: int
    epoch: int
    task: Task
    awaits: Marker | None

    def is_ready(self) -> bool:
        return self.awaits is None or self.awaits.time_ns > 0


class SimulatedStream(HostStream):
    """A queue whose tasks the scheduler runs."""

    def __init__(self, context: HostContext, scheduler: _Scheduler, priority: int = 0) -> None:
        super().__init__(context, priority)
        self._scheduler = scheduler
        self.tasks: deque[_Queued] = deque()
        self.number = scheduler.add(self)
        self._make_marker = scheduler.marker

    def synchronize(self) -> None:
        self._refuse_captured()
        target = self._submitted
        self._scheduler.run_until(lambda: self._state.finished >= target)
        super().synchronize()

    def done(self) -> bool:
        self._scheduler.poll()
        return super().done()

    def _put(self, task: Task, awaits: Marker | None = None) -> None:
        self._submitted += 1
        number = self._scheduler.next_put()
        self.tasks.append(_Queued(number, self._state.epoch, task, awaits))
        self._scheduler.pause()

    def run_first(self) -> None:
        """Run the first task, as the worker thread of a stream does."""
        queued = self.tasks.popleft()
        state = self._state
        marker = queued.task(state, queued.epoch)
        with state.lock:
            state.finished += 1
            if marker is not None:
                marker.finish(state.failure_in(queued.epoch))


class _SimulatedContext(HostContext):
    def __init__(self, device: SimulatedDevice, scheduler: _Scheduler) -> None:
        super().__init__(device)
        self._scheduler = scheduler

    def new_stream(self) -> HostStream:
        return SimulatedStream(self, self._scheduler)


class SimulatedDevice(HostDevice):
    """The host device with simulated streams. The calling thread, for `stream=None`, is real."""

    def __init__(self, scheduler: _Scheduler) -> None:
        host: Any = devices.get("host")
        self.__dict__.update(host.__dict__)  # kernels that are loaded, and how they are run
        self.context = _SimulatedContext(self, scheduler)
        self.context.faults = host.context.faults
        self._inline = InlineStream(self.context)
        self._streams = weakref.WeakValueDictionary()

    def stream(self, priority: int = 0) -> HostStream:
        stream = self.context.new_stream()
        stream.priority = priority
        self._streams[stream.identity] = stream
        return stream


# --- Exploring ------------------------------------------------------------------------------------


def explore(
    program: Callable[[Any], Any], *, schedules: int | None = 200, seed: int = 0,
    replay: Any = None,
) -> ExploreResult:  # fmt: skip
    """Run a program under many orders of its streams, and compare the return values.

    Parameters
    ----------
    program : called as `program(device)` for each schedule, with a simulated host device, whose
        streams it uses. The return value must not depend on the schedule: arrays, numbers, strings,
        bytes, None, and lists, tuples and dicts of them. An exception is an outcome too
    schedules : number of schedules: program order, then random ones; None: every possible one
    seed : of the first random schedule; each further one has the next number
    replay : a `Failure` of an earlier run, or its `.schedule`: run only that one, after program
        order

    Returns
    -------
    ExploreResult : `.ok` if every outcome equals the one of program order; `.outcomes`; and
        `.failures`, one for each other outcome, with as few deviations as were found

    Raises
    ------
    ValueError : `schedules` is less than 1
    TypeError : the program is not a function, or its return value cannot be compared

    Notes
    -----
    Work runs when its stream is chosen: an asynchronous copy reads its source then, not during the
    call. Between two calls of the host any number of tasks may run, and a poll may return False a
    few times in a row. Work with `stream=None` runs at once, as do the host's own accesses.
    Programs must be deterministic except for the order of streams, and start no threads. Two thirds
    of the schedules use random priorities (late producers, early consumers), the others choose
    uniformly. Stream: simulated; the device's real streams are not used. Capture: legal.

    Examples
    --------
    >>> import numpy as np
    >>> def program(device, waits=False):
    ...     x, y = np.zeros(4), np.zeros(4)
    ...     main, copy = device.stream(), device.stream()
    ...     device.copy(x, np.ones(4), stream=copy)
    ...     if waits:
    ...         main.wait(copy)
    ...     device.copy(y, x, stream=main)
    ...     device.synchronize()
    ...     return y
    >>> explore(lambda device: program(device, waits=True), schedules=None).ok
    True
    >>> result = explore(program)
    >>> result.ok, len(result.outcomes)
    (False, 2)
    >>> explore(program, replay=result.failures[0]).ok
    False
    """
    if not callable(program):
        raise TypeError(f"program: expected a function of a device, got {program!r}")
    if schedules is not None:
        require_int(schedules, "schedules")
        if schedules < 1:
            raise ValueError(f"schedules: expected None or at least 1, got {schedules}")
        schedules = int(schedules)  # NumPy's integers would wrap
    require_int(seed, "seed")
    seed = int(seed)
    prefix: Any = getattr(replay, "schedule", replay)
    if replay is not None:
        try:
            prefix = tuple(prefix)
        except TypeError:
            raise TypeError(f"replay: expected a schedule or a Failure, got {replay!r}") from None
        for choice in prefix:
            require_int(choice, "replay")
        prefix = tuple(map(int, prefix))
    result = ExploreResult(seed)
    chooser, expected = _run(program, (), _program_order)
    outcomes: dict[Any, Any] = {}
    counts: Counter[Any] = Counter()
    expected_key, steps = _key(expected), 2 * len(chooser.choices)

    def note(chooser: _Chooser, outcome: Any, number: int) -> None:
        key = _key(outcome)
        result.schedules += 1
        counts[key] += 1
        if key in outcomes:
            return
        outcomes[key] = outcome
        if key != expected_key or isinstance(outcome, BaseException):
            schedule = _minimized(program, chooser.schedule, key)
            result.failures.append(Failure(schedule, number, outcome, expected))

    note(chooser, expected, seed)
    if replay is not None:
        note(*_run(program, prefix, _program_order), getattr(replay, "seed", seed))
    elif schedules is None:
        while (prefix := _next_prefix(chooser)) is not None:
            chooser, outcome = _run(program, prefix, _program_order)
            note(chooser, outcome, seed)
    else:
        for number in range(seed, seed + schedules - 1):
            note(*_run(program, (), _strategy(number, steps)), number)
    result.outcomes = [(outcomes[key], counts[key]) for key in outcomes]
    return result


def _run(
    program: Callable[[Any], Any], prefix: Sequence[int], strategy: Callable[[list[int]], int]
) -> tuple[_Chooser, Any]:
    chooser = _Chooser(prefix, strategy)
    device = SimulatedDevice(_Scheduler(chooser))
    try:
        return chooser, program(device)
    except Exception as error:
        error.__traceback__ = None  # whose frames hold the program's arrays
        return chooser, error


def _next_prefix(chooser: _Chooser) -> list[int] | None:
    """Return the choices that follow a run in lexical order; None after the last."""
    choices, counts = chooser.choices, chooser.counts
    for at in reversed(range(len(choices))):
        if choices[at] + 1 < counts[at]:
            return [*choices[:at], choices[at] + 1]
    return None


def _minimized(program: Callable[[Any], Any], schedule: Schedule, key: Any) -> Schedule:
    """Return a schedule with the same outcome and few deviations from program order.

    Try all schedules with one deviation, then with two, and so on, late deviations first, up to
    `_MAX_ATTEMPTS`. If none has the outcome, remove deviations from `schedule`.
    """
    attempts = 0
    candidates: list[Schedule] = [()]
    while candidates and attempts < _MAX_ATTEMPTS:
        longer: list[Schedule] = []
        for prefix in candidates[: _MAX_ATTEMPTS - attempts]:
            chooser, outcome = _run(program, prefix, _program_order)
            attempts += 1
            if _key(outcome) == key:
                return prefix
            for at in range(len(prefix), len(chooser.counts)):
                zeros = (0,) * (at - len(prefix))
                longer += [(*prefix, *zeros, choice) for choice in range(1, chooser.counts[at])]
        candidates = sorted(longer, key=lambda s: (_first(s), len(s)), reverse=True)
    deviations = [i for i, choice in enumerate(schedule) if choice]
    size = max(1, len(deviations) // 2)
    while True:  # remove fewer and fewer at a time
        for start in range(0, len(deviations), size):
            dropped = set(deviations[start : start + size])
            candidate = _trimmed([0 if i in dropped else c for i, c in enumerate(schedule)])
            if dropped and _key(_run(program, candidate, _program_order)[1]) == key:
                schedule = candidate
        deviations = [i for i, choice in enumerate(schedule) if choice]
        if size == 1:
            return schedule
        size //= 2


def _first(schedule: Schedule) -> int:
    """Return the position of the first deviation from program order."""
    return next(i for i, choice in enumerate(schedule) if choice)


def _key(outcome: Any) -> Any:
    """Return a hashable key, equal for outcomes that are equal bit for bit."""
    if isinstance(outcome, BaseException):
        return type(outcome), str(outcome)
    if isinstance(outcome, dict):
        return frozenset([(_key(key), _key(value)) for key, value in outcome.items()])
    if isinstance(outcome, (list, tuple)):
        return tuple([_key(x) for x in outcome])
    if isinstance(outcome, (float, np.generic)):
        return type(outcome), repr(outcome)  # NaN too
    if hasattr(outcome, "__array__") or hasattr(outcome, "pointer"):
        array = devices.get("host").to_numpy(outcome)
        return array.shape, str(array.dtype), np.ascontiguousarray(array).tobytes()
    # Any other object may be equal to itself alone, and each run makes a new one.
    if outcome is not None and not isinstance(outcome, (numbers.Number, str, bytes)):
        kind = type(outcome).__name__
        raise TypeError(f"program: expected arrays, numbers or strings, got {kind}")
    return outcome
