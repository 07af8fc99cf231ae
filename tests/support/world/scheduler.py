"""A seeded scheduler: threads of simulated processes run one at a time, in virtual time.

    task A   run . . . . run . . run          one greenlet for each thread; all in one OS thread
    task B   . . run run . . . . .
    clock    0.0 ........ 0.5 ..... 30.0      moves when a task runs, and jumps when all tasks wait

Every call of a simulated module is a point where another task may run. The seed decides which, so
the same seed gives the same run.
"""

from __future__ import annotations

import gc
import itertools
import random
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import greenlet

_STEP_S = 2e-6  # virtual time of one step
_START_S = 1000.0
_MAX_LATE_CALLS = 300  # of a task at the end of the run

_abandoned: list[Any] = []
"""Tasks that catch every exception, kept since destroying them would raise another."""


class Stuck(AssertionError):
    """A run has not ended: its tasks wait for one another, or its virtual time is over."""


class Process:
    """A simulated process, with which its tasks end.

    Attributes
    ----------
    name : in the log
    is_alive : False once it was killed
    """

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
    """A simulated machine: processes, a clock, and everything that happens in one run.

    Parameters
    ----------
    seed : decides the order of tasks and every fault
    dropped : numbers of optional steps to skip (`World.step`), for shorter failing runs

    Attributes
    ----------
    random : draws of this run
    now : virtual time in seconds
    current, task : the task that runs, if any
    errors : tasks that raised, with their exceptions
    log : the last notes, for reports
    """

    def __init__(self, seed: int, dropped: frozenset[int] = frozenset()) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = _START_S
        self.numbers = itertools.count()
        self.errors: list[tuple[Task, BaseException]] = []
        self.log: list[str] = []
        self.digest = 0  # of all notes
        self.is_over = False
        self.steps_announced = 0
        self._dropped = dropped
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
        """Announce an optional step of the scenario; return False to skip it."""
        number = self.steps_announced
        self.steps_announced += 1
        if number in self._dropped:
            return False
        self.note(f"step {number}: {text}")
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
        """Run until all tasks except daemons have ended.

        Raises
        ------
        Stuck : no task can ever run again, or `limit_s` of virtual time has passed
        """
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
            where = [f for f in frames if "/support/world/" not in f.filename][-1:]
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
