"""Runs of programs in which one call fails, for every call in turn.

program    step 1 | step 2 | ...                 each step: state before, call
fault               call 7 of `launch` raises    state after == state before, the error names
                                                 the cause, and the same step then succeeds
end        result as in a run without fault; nothing is held, no file is left open
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fault_points
from fault_points import Point, Trigger
from fault_programs import Program

from kvcupy import scratch
from kvcupy.ops import call as op_call


class Wrong(AssertionError):
    """A fault has left something behind that it may not."""


class World:
    """Where programs run: a device, and the points that it has.

    Attributes
    ----------
    device : of the next run
    """

    kind = "host"

    def __init__(self, device: Any) -> None:
        self.device = device

    def renew(self, *, kernels: bool) -> None:
        """Forget plans and idle buffers and, with `kernels`, loaded kernels."""
        scratch._stores.pop(self.device, None)
        op_call.forget()
        if kernels:
            self.device._functions.clear()

    def points(self) -> tuple[Point, ...]:
        return (*fault_points.HOST_POINTS, *fault_points.FILE_POINTS)

    def leaks(self) -> list[str]:
        """Return what the device still holds once a program is gone."""
        return []


@contextmanager
def running(kind: type[Program], world: World, *, kernels: bool) -> Iterator[Program]:
    """Prepare a program in a new folder, and release what it holds."""
    world.renew(kernels=kernels)
    folder = Path(tempfile.mkdtemp(prefix="kvcupy-faults-"))
    program = None
    try:
        program = kind(world.device, folder)
        if world.kind == "host":
            world.renew(kernels=kernels)  # what it took to prepare
        yield program
    finally:
        if program is not None:
            program.close()
        shutil.rmtree(folder)


def calls_met(
    kind: type[Program], world: World, *, kernels: bool = False
) -> tuple[dict[str, int], Any]:
    """Return how often a run without faults meets each point, and its result."""
    with (
        running(kind, world, kernels=kernels) as program,
        fault_points.prepared(),
        ExitStack() as armed,
    ):
        triggers = {}
        for point in world.points():
            triggers[point.name] = trigger = Trigger()
            armed.enter_context(point.armed(trigger))
        for _, function in program.steps():
            function()
        met = {name: trigger.count for name, trigger in triggers.items()}
        result = program.result()
        if leaks := [*program.leaks(), *program.losses()]:
            raise Wrong(f"{kind.__name__} without a fault: {leaks}")
    return met, result


def run(kind: type[Program], world: World, point_name: str, number: int, expected: Any) -> bool:
    """Let one call fail, and check everything; return whether the run came to that call."""
    open_before = open_files()
    what = f"{kind.__name__}, {point_name} {number}"
    point = next(point for point in world.points() if point.name == point_name)
    trigger = Trigger(number)
    with running(kind, world, kernels=point.needs_kernels_unloaded) as program:
        point = next(point for point in world.points() if point.name == point_name)
        program.launches = not point.before_launch
        with fault_points.prepared(), point.armed(trigger):
            _repeat(program, point, trigger, expected, what)
        del program, point
    gc.collect(0)
    if leaks := world.leaks():
        raise Wrong(f"{what}: the device holds {leaks}")
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
            if not fault_points.names_cause(error):
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
            if not point.later or not fault_points.names_cause(error):
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
