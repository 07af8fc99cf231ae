"""How long warps take: an in-order model of one of the four schedulers of an SM.

A scheduler issues one instruction per clock, from a warp that is ready. The machine code says when
a warp is: the compiler encodes in each instruction how many clocks the warp stalls before the next
one, and which of its six scoreboards it waits for (`sass.Control`). So the latencies of arithmetic
are the compiler's own, and `LATENCIES` holds only those that scoreboards wait for. The model adds
the pipes with their published rates, groups of asynchronous copies, barriers, the scheduler's share
of the memory's bandwidth, and the instruction cache. A load is there after the latency of memory,
and not before that share has delivered it and all loads before it: bytes in flight per latency
bound the bandwidth (Little's law).

It has no bank conflicts and no TLB, and the other schedulers of the SM are taken to do the same at
the same time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import paths, sass
from .chips import LAUNCH_US, LOAD_CLOCK, READ_SHARE, SCHEDULE_US, START_US, WRITE_SHARE, Chip

SCHEDULERS = 4
LOCAL_BYTES_PER_CLOCK = 128  # of L1 and shared memory, per SM

LATENCIES = {
    "LDSM": 33.0, "LDS": 29.0, "SHFL": 24.0, "MUFU": 22.0, "HMMA": 33.0, "BAR": 30.0, "LDC": 30.0,
    "S2R": 24.0, "S2UR": 24.0, "R2UR": 12.0,
}  # fmt: skip
"""Clocks until a result is there, rounded, the same for all chips: Luo et al., arXiv:2402.13499 and
2501.12084 (shared memory, shuffles, `mma.sync`), Jia et al., arXiv:1804.06826 (the others)."""

_OTHER_LATENCY = 22.0  # conversions, and whatever else a scoreboard waits for
_OPERANDS_READ = 12.0  # until an instruction of the memory pipes has read its registers: assumed
_TAKEN_BRANCH = 10.0  # assumed
# Instructions next to each scheduler, 16 KiB: Jia et al., arXiv:1903.07486, of Turing. The line
# that is evicted is assumed to be a random one.
_NEAR_LINES = 16 * 1024 // 128

LINE_CLOCKS = 10.0
"""Clocks that it takes to fetch a line of eight instructions that is not there. Fitted."""

FITTED = {
    "clock under load": LOAD_CLOCK, "share of bandwidth that reads reach": READ_SHARE,
    "share that writes reach": WRITE_SHARE, "us per launch": LAUNCH_US, "us per kernel": START_US,
    "us of a schedule": SCHEDULE_US, "clocks to fetch instructions": LINE_CLOCKS,
}  # fmt: skip
"""What was fitted to measurements of an H100, the same for all rows."""


@dataclass(frozen=True)
class Traffic:
    """What loads and stores of a launch cost a scheduler.

    Attributes
    ----------
    memory_clocks, cache_clocks : latency of loads of the work, and of narrower ones
    read_clocks, write_clocks : per byte that a lane asks for, at the scheduler's share of bandwidth
    word_bytes : narrower accesses are not of the work
    """

    memory_clocks: float
    cache_clocks: float
    read_clocks: float
    write_clocks: float
    word_bytes: int


def clocks_of(instruction: sass.Instruction, chip: Chip) -> dict[str, float]:
    """Return for how many clocks of an SM an instruction occupies its resources.

    Examples
    --------
    >>> from .chips import CHIPS
    >>> (fma,), _ = sass.parse("  /*0000*/ FFMA R1, R2, R3, R1 ;")
    >>> clocks_of(fma, CHIPS["A100"])
    {'issue': 0.25, 'fma': 0.5}
    """
    lanes, pipe = chip.lanes_per_clock, sass.pipe_of(instruction)
    clocks = {"issue": 1 / SCHEDULERS}
    if pipe in ("fma", "fma2", "imad"):
        clocks["fma"] = (64 if pipe == "fma2" else 32) / lanes["fma"]
        if pipe == "imad":
            clocks["imad"] = 32 / lanes["imad"]
    elif pipe in ("alu", "add"):
        clocks["alu"] = 32 / lanes[pipe]
    elif pipe in ("half", "xu", "fp64"):
        clocks[pipe] = 32 / lanes[pipe]
    elif pipe == "tensor":
        clocks["tensor"] = sass.products_of(instruction) / chip.products_per_clock
    elif pipe in ("global", "shared"):
        clocks["lsu"] = max(1.0, 32 * instruction.access_bytes / LOCAL_BYTES_PER_CLOCK)
    elif pipe == "shuffle":
        clocks["lsu"] = 1.0
    return clocks


@dataclass(frozen=True)
class _Step:
    """An instruction of a way, as the scheduler sees it.

    Attributes
    ----------
    kind, amount : what the model does with it; bytes of the warp, or copy groups left in flight
    line : of eight instructions, in which it lies
    stall, waits, result, operands : as in `Control`
    reads, writes : registers of tensor cores, by number
    latency : clocks until the result is there
    pipes : that it occupies, by number, and for how many clocks
    """

    kind: str
    amount: int
    line: int
    stall: float
    waits: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    result: int
    operands: int
    latency: float
    pipes: tuple[tuple[int, float], ...]


_BRANCHES = ("BRA", "BRX", "JMP", "CALL", "RET")


class Way:
    """The instructions of a path, ready for `run`.

    Parameters
    ----------
    controls : what the compiler encoded, by address
    traffic : what its loads and stores cost
    """

    def __init__(
        self, path: paths.Path, controls: Mapping[int, sass.Control], chip: Chip, traffic: Traffic
    ) -> None:
        self._traffic = traffic
        self._pipes: dict[str, int] = {}
        self._results: dict[str, int] = {}
        following = [*path.code[1:], *path.code[:1]]
        self.steps = [
            self._step(one, behind, controls[one.address], chip, one.address in path.inactive)
            for one, behind in zip(path.code, following, strict=True)
        ]

    def _step(
        self, one: sass.Instruction, behind: sass.Instruction, control: sass.Control, chip: Chip,
        is_off: bool,
    ) -> _Step:  # fmt: skip
        kind, amount = _kind_of(one, self._traffic.word_bytes)
        if is_off:
            kind = ""
        stall = float(max(1, control.stall))
        if one.name in _BRANCHES and behind.address != one.address + 16:
            stall = max(stall, _TAKEN_BRANCH)
        # The hardware holds up products that add to others; the compiler, all other uses.
        is_tensor = sass.pipe_of(one) == "tensor" and not is_off
        numbered = self._results.setdefault
        read, written = (
            tuple([numbered(r, len(self._results)) for r in names]) if is_tensor else ()
            for names in (one.reads, one.writes)
        )
        busy = {} if is_off else clocks_of(one, chip)
        pipes = tuple([
            (self._pipes.setdefault(pipe, len(self._pipes)), SCHEDULERS * clocks)
            for pipe, clocks in busy.items() if pipe != "issue"
        ])  # fmt: skip
        return _Step(
            kind, amount, one.address >> 7, stall, control.waits, read, written,
            -1 if is_off or kind == "copy" else control.result, -1 if is_off else control.operands,
            LATENCIES.get(one.name, _OTHER_LATENCY), pipes,
        )  # fmt: skip

    def run(self, warps: int, passes: int, *, warps_per_block: int = 1) -> Run:
        """Simulate passes from a cold start.

        Parameters
        ----------
        warps : that the scheduler holds at once, which begin together
        passes : of all of them; a warp that has ended one begins the next that is left
        warps_per_block : of the warps, which wait for each other at barriers
        """
        return Run(self, warps, passes, warps_per_block)


class Run:
    """A simulation.

    Attributes
    ----------
    ends : the clocks at which passes end, in order
    drained : the clock at which the last has ended and the memory has taken all that it stored
    """

    def __init__(self, way: Way, warps: int, passes: int, warps_per_block: int) -> None:
        self._way, self._steps, self._traffic = way, way.steps, way._traffic
        self._boards = [[0.0] * 6 for _ in range(warps)]
        self._results = [[0.0] * len(way._results) for _ in range(warps)]
        self._groups: list[list[float]] = [[0.0] for _ in range(warps)]  # the last one is open
        self._may_issue = [0.0] * warps
        self._at = [0] * warps
        self._lines = [-1] * warps
        self._near: list[int] = []
        self._random = random.Random(0)
        self._fetch_free = self._memory_free = 0.0
        self.ends: list[float] = []
        self._run(passes, warps_per_block)
        self.drained = max(self.ends[-1], self._memory_free)

    def _run(self, passes: int, warps_per_block: int) -> None:
        steps, count = self._steps, len(self._steps)
        pipe_free = [0.0] * len(self._way._pipes)
        running = list(range(min(len(self._at), passes)))
        left = passes - len(running)
        arrived: dict[int, list[int]] = {}
        clock = 0.0
        for warp in running:
            self._prepare(warp)
        while running:
            best, when = -1, float("inf")
            for warp in running:
                start = max(self._may_issue[warp], clock)
                for pipe, _ in steps[self._at[warp]].pipes:
                    start = max(start, pipe_free[pipe])
                if start < when:
                    best, when = warp, start
            step = steps[self._at[best]]
            clock = when + 1.0
            for pipe, clocks in step.pipes:
                pipe_free[pipe] = when + clocks
            self._issue(best, step, when)
            running.remove(best)  # and behind the others: loose round robin
            self._at[best] += 1
            if self._at[best] == count:
                self.ends.append(self._may_issue[best])
                if left == 0:
                    continue
                left -= 1
                self._at[best] = 0
            if step.kind == "barrier":
                block = arrived.setdefault(best // warps_per_block, [])
                block.append(best)
                if len(block) < min(warps_per_block, passes):
                    continue
                for warp in block:
                    self._may_issue[warp] = when + LATENCIES["BAR"]
                    self._prepare(warp)
                running += block
                block.clear()
            else:
                self._prepare(best)
                running.append(best)

    def _prepare(self, warp: int) -> None:
        """Find out when a warp may issue its next instruction."""
        step = self._steps[self._at[warp]]
        start = self._may_issue[warp]
        if step.line != self._lines[warp]:
            start = self._fetch(step.line, start)
            self._lines[warp] = step.line
        for board in step.waits:
            start = max(start, self._boards[warp][board])
        for result in step.reads:
            start = max(start, self._results[warp][result])
        if step.kind == "wait":
            groups = self._groups[warp]
            arrived = max(0, len(groups) - 1 - step.amount)
            start = max([start, *groups[:arrived]])
            del groups[:arrived]
        self._may_issue[warp] = start

    def _fetch(self, line: int, start: float) -> float:
        if line not in self._near:
            start = self._fetch_free = max(self._fetch_free, start) + LINE_CLOCKS
            if len(self._near) < _NEAR_LINES:
                self._near.append(line)
            else:
                self._near[self._random.randrange(_NEAR_LINES)] = line
        return start

    def _issue(self, warp: int, step: _Step, when: float) -> None:
        traffic, kind = self._traffic, step.kind
        ready = when + step.latency
        if kind in ("load", "copy"):
            self._memory_free = max(self._memory_free, when) + step.amount * traffic.read_clocks
            ready = max(self._memory_free, when + traffic.memory_clocks)
        elif kind == "store":
            self._memory_free = max(self._memory_free, when) + step.amount * traffic.write_clocks
        elif kind == "look up":
            ready = when + traffic.cache_clocks
        elif kind == "group":
            self._groups[warp].append(0.0)
        if kind == "copy":
            self._groups[warp][-1] = max(self._groups[warp][-1], ready)
        boards = self._boards[warp]
        if step.result >= 0:
            boards[step.result] = max(boards[step.result], ready)
        if step.operands >= 0:
            boards[step.operands] = max(boards[step.operands], when + _OPERANDS_READ)
        for result in step.writes:
            self._results[warp][result] = ready
        self._may_issue[warp] = when + step.stall


def _kind_of(one: sass.Instruction, word_bytes: int) -> tuple[str, int]:
    """Return what the model does with an instruction, and an amount."""
    is_of_work = one.access_bytes >= word_bytes
    if one.name == "LDGSTS":  # words of the work pay for the bytes of narrow ones
        return "copy", 32 * one.access_bytes * is_of_work
    if one.loads_global or one.name in ("ATOM", "ATOMG"):
        return ("load" if is_of_work else "look up"), 32 * one.access_bytes
    if one.stores_global and is_of_work:
        return "store", 32 * one.access_bytes
    if one.name == "DEPBAR":
        return "wait", int(one.operands[-1], 16) if one.operands[-1][:2] == "0x" else 0
    return {"LDGDEPBAR": "group", "BAR": "barrier"}.get(one.name, ""), 0


_PASSES = 16  # of which the second half counts


def pass_clocks(way: Way, warps: int, warps_per_block: int = 1) -> float:
    """Return the clocks that the warps of a scheduler take for one pass each of a loop."""
    ends = way.run(warps, warps * _PASSES, warps_per_block=warps_per_block).ends
    half = _PASSES // 2
    return (ends[-1] - ends[warps * half - 1]) / (_PASSES - half)


def makespan(blocks: Sequence[float], places: int) -> float:
    """Return when the last of blocks ends, each of which takes the first place that is free.

    Examples
    --------
    >>> makespan([2, 1, 1], 2), makespan([1, 1, 2], 2)
    (2.0, 3.0)
    """
    ends = [0.0] * max(1, min(places, len(blocks)))
    for clocks in blocks:
        heapq.heapreplace(ends, ends[0] + clocks)
    return max(ends)
