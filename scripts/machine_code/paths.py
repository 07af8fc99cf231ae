"""Control flow of a kernel: basic blocks, loops, and what a warp issues on a way through them.

A branch that constants decide is followed one way only. The remaining branches depend on
data; of the ways through them, `Code.path` takes the one that does all of the work most cheaply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from heapq import heappop, heappush
from types import MappingProxyType

from kvcupy.errors import CompileError

from .constants import ConstantPropagation, FirstThread, Values, in_common, join_truths
from .sass import PREDICATE, REGISTER, Instruction, parse, products_of, span

_MAX_TRIPS = 64


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Attributes
    ----------
    header : the block that every pass begins with
    latches : blocks that go back to it
    blocks : all of them
    trips : passes that the Params decide, None where they do not
    """

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]
    trips: int | None = None


@dataclass(frozen=True)
class Path:
    """The instructions that a warp issues on one way through a loop or a kernel.

    Attributes
    ----------
    code : instructions in order; an inner loop's as often as it is passed
    inactive : addresses of those whose guard is known to be false: they are issued, and no more
    uncounted : inner loops whose number of passes is not known, counted once
    """

    code: tuple[Instruction, ...]
    inactive: frozenset[int] = frozenset()
    uncounted: int = 0

    def active(self) -> Iterator[Instruction]:
        return (
            instruction for instruction in self.code if instruction.address not in self.inactive
        )

    def bytes_loaded(self, word_bytes: int) -> int:
        """Bytes that a lane loads from global memory in words of at least `word_bytes`."""
        return sum([i.access_bytes for i in self.active()
                    if i.loads_global and i.access_bytes >= word_bytes])  # fmt: skip

    def bytes_stored(self, word_bytes: int) -> int:
        """Bytes that a lane stores to global memory in words of at least `word_bytes`."""
        return sum([i.access_bytes for i in self.active()
                    if i.stores_global and i.access_bytes >= word_bytes])  # fmt: skip


_Work = tuple[int, ...]


@dataclass(frozen=True)
class _Node:
    """A block of a region, or an inner loop of it as one node.

    Attributes
    ----------
    header : its number
    inner : the loop, None for a block
    path : what is issued on a visit
    work : of a visit, to be maximal; `cost` among equal ways, to be minimal
    before : nodes that it may follow
    ends : whether a pass may end behind it
    """

    header: int
    inner: Loop | None
    path: Path
    work: _Work
    cost: int
    before: tuple[int, ...]
    ends: bool


class Code:
    """The control flow of one kernel.

    Parameters
    ----------
    listing : of nvdisasm, of this kernel alone
    constants : words of constant bank 0, as `constant_bank` returns them; without them no branch
        is decided
    thread : follow this one, else any thread of any block

    Attributes
    ----------
    code, labels : as `parse` returns them
    starts : the first instruction of each block, in order
    edges : successors by block, those that the constants exclude left out

    Raises
    ------
    CompileError : the listing has no instructions
    """

    def __init__(
        self, listing: str, constants: Mapping[int, int] | None = None,
        thread: FirstThread | None = None,
    ) -> None:  # fmt: skip
        self.code, self.labels = parse(listing)
        if not self.code:
            raise CompileError("no instructions in the listing", listing[:1000])
        starts = {0, *(i for i in self.labels.values() if i < len(self.code))}
        starts |= {
            i + 1 for i, instruction in enumerate(self.code[:-1]) if instruction.name in _ENDS
        }
        self.starts = sorted(starts)
        self._block_at = {start: number for number, start in enumerate(self.starts)}
        ends = [*self.starts[1:], len(self.code)]
        self._blocks = [self.code[i:j] for i, j in zip(self.starts, ends, strict=True)]
        self.edges: dict[int, tuple[int, ...]] = {}
        self._machine = ConstantPropagation(constants or {}, thread)
        self._known: dict[int, Values] = {0: {}}  # at the beginning of each block
        self._inactive: set[int] = set()
        self._trips: dict[int, int] = {}
        self._resolve()

    def block(self, number: int) -> list[Instruction]:
        return self._blocks[number]

    def _successors(
        self, number: int, values: Values, machine: ConstantPropagation
    ) -> tuple[int, ...]:
        last = self.block(number)[-1]
        following = (number + 1,) if number + 1 < len(self.starts) else ()
        if last.name not in _ENDS or last.calls:
            return following
        taken = machine.truth(last.guard, values) if last.guard else True
        for operand in last.operands:
            if PREDICATE.match(operand):
                taken = join_truths(taken, machine.truth(operand, values), either=False)
        if "DIV" in last.modifiers:  # warps are taken to be converged
            taken = False
        away: tuple[int, ...] = ()
        if last.name in ("BRA", "BRX", "JMP", "CALL"):
            away = tuple([self._block_at[self.labels[t]] for t in last.targets if t in self.labels])
        if taken is None:
            return tuple(dict.fromkeys((*away, *following)))
        return away if taken else following

    def _resolve(self) -> None:
        """Find the blocks that can be reached, with what is known at their beginning."""
        machine, known = self._machine, self._known
        leaving: dict[tuple[int, int], Values] = {}
        waiting = [0]
        while waiting:
            number = heappop(waiting)  # roughly in the order of the code
            values = machine.run(self.block(number), known[number])
            self.edges[number] = self._successors(number, values, machine)
            for target in self.edges[number]:
                leaving[number, target] = values
                merged = values if target not in known else in_common(known[target], values)
                if target not in known or merged != known[target]:
                    known[target] = merged
                    if target not in waiting:
                        heappush(waiting, target)
        for number in self.edges:
            values = dict(known[number])
            for instruction in self.block(number):
                if instruction.guard and machine.truth(instruction.guard, values) is False:
                    self._inactive.add(instruction.address)
                machine.step(instruction, values)
        for loop in self.loops():
            entering = [
                values for (source, target), values in leaving.items()
                if target == loop.header and source not in loop.blocks
            ]  # fmt: skip
            trips = self._count_trips(loop, reduce(in_common, entering)) if entering else None
            if trips is not None:
                self._trips[loop.header] = trips
        self.__dict__.pop("_loops", None)  # which did not have the trips

    def _count_trips(self, loop: Loop, values: Values) -> int | None:
        """Return how often a loop is passed where that is decided, else None."""
        inner: dict[int, Loop] = {}  # by block, the largest loop around it within this one
        for instruction in self.loops():
            if instruction.blocks < loop.blocks:
                inner.update(dict.fromkeys(instruction.blocks, instruction))
        order = [
            n for n in self.order
            if n in loop.blocks and (n not in inner or inner[n].header == n)
        ]  # fmt: skip
        for trips in range(1, _MAX_TRIPS + 1):
            entering = {loop.header: values}
            again: list[Values] = []
            leaves = False
            for number in order:
                if number not in entering:
                    continue
                behind, targets = self._behind(number, inner.get(number), entering[number])
                leaves = leaves or not targets
                for target in targets:
                    if target == loop.header:
                        again.append(behind)
                    elif target not in loop.blocks:
                        leaves = True
                    else:
                        before = entering.get(target)
                        entering[target] = behind if before is None else in_common(before, behind)
            if leaves:
                return None if again else trips
            values = reduce(in_common, again)
        return None

    def _behind(
        self, number: int, inner: Loop | None, values: Values
    ) -> tuple[Values, tuple[int, ...]]:
        """Return what is known behind a block, or a loop that it begins, and what follows."""
        if inner is None:
            values = self._machine.run(self.block(number), values)
            return values, self._successors(number, values, self._machine)
        exits = {t for b in inner.blocks for t in self.edges[b] if t not in inner.blocks}
        written = {
            name
            for b in inner.blocks
            for instruction in self.block(b)
            for name in instruction.writes
        }
        kept = {name: value for name, value in values.items() if name not in written}
        return kept, tuple(exits)

    # Loops

    @cached_property
    def predecessors(self) -> dict[int, set[int]]:
        before: dict[int, set[int]] = {number: set() for number in self.edges}
        for number, targets in self.edges.items():
            for target in targets:
                before[target].add(number)
        return before

    @cached_property
    def order(self) -> list[int]:
        """The reachable blocks, each before those that follow it but for back edges."""
        order: list[int] = []
        seen = {0}
        stack = [(0, iter(self.edges[0]))]
        while stack:
            number, targets = stack[-1]
            target = next((t for t in targets if t not in seen), None)
            if target is None:
                order.append(number)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(self.edges[target])))
        return order[::-1]

    @cached_property
    def dominators(self) -> dict[int, set[int]]:
        """By block, those that every way to it passes, itself included."""
        every = set(self.order)
        dominators = {number: set(every) for number in self.order}
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for number in self.order[1:]:
                sets = [dominators[p] for p in self.predecessors[number] if p in every]
                now = set.intersection(*sets) | {number} if sets else {number}
                if now != dominators[number]:
                    dominators[number], changed = now, True
        return dominators

    def loops(self) -> list[Loop]:
        """Return the natural loops, inner ones before those around them."""
        return self._loops

    @cached_property
    def _loops(self) -> list[Loop]:
        latches: dict[int, set[int]] = {}
        for number in self.order:
            for target in self.edges[number]:
                if target in self.dominators[number]:
                    latches.setdefault(target, set()).add(number)
        loops = []
        for header, sources in latches.items():
            blocks, waiting = {header}, list(sources)
            while waiting:
                number = waiting.pop()
                if number not in blocks:
                    blocks.add(number)
                    waiting += self.predecessors[number]
            loops.append(Loop(header, frozenset(sources), frozenset(blocks),
                              self._trips.get(header)))  # fmt: skip
        return sorted(loops, key=lambda loop: len(loop.blocks))

    # Paths

    def path(
        self, loop: Loop | None, word_bytes: int, *, dearest: bool = False,
        passes: Mapping[int, int] = MappingProxyType({}),
    ) -> Path | None:  # fmt: skip
        """Return the way through a loop, or the whole kernel for None, that does all of the work.

        Of all ways, those count that move most bytes in words of at least `word_bytes`; of those,
        the ones with most products and multiply-adds, and most loads of anything, such as page
        numbers; and of those, the one with the fewest instructions, or for `dearest` the most. Ways
        that call a function (for the slow cases of a division) or update memory atomically (to
        report a fault) count only where there are no others. An inner loop is passed as often as
        the Params say; where they do not, as often as `passes` says of its header, or once.

        Each branch that the constants do not decide goes either way, whatever the others do, so
        that the cheapest and the dearest way may be ones that no input takes.
        """
        nodes = self._nodes(loop, word_bytes, dearest, passes)
        for number in [n for n, node in nodes.items() if any(map(_is_rare, node.path.code))]:
            others = {n: node for n, node in nodes.items() if n != number}
            if _best_way(others) is not None:
                nodes = others
        way = _best_way(nodes)
        if way is None:
            return None
        paths = [nodes[n].path for n in way]
        return Path(
            tuple([instruction for path in paths for instruction in path.code]),
            frozenset(self._inactive),
            sum(path.uncounted for path in paths),
        )

    def _nodes(
        self, loop: Loop | None, word_bytes: int, dearest: bool, passes: Mapping[int, int]
    ) -> dict[int, _Node]:
        """Return the blocks of a loop or of the kernel, inner loops as one node, in order."""
        inside = frozenset(self.order) if loop is None else loop.blocks
        whole: dict[int, Loop] = {}  # by block, the largest inner loop around it
        for instruction in self.loops():
            if loop is None or instruction.blocks < loop.blocks:
                whole.update(dict.fromkeys(instruction.blocks, instruction))
        nodes: dict[int, _Node] = {}
        for number in self.order:
            inner = whole.get(number)
            if number not in inside or (inner is not None and number != inner.header):
                continue
            before = {
                whole[p].header if p in whole else p
                for p in self.predecessors[number]
                if p in inside and (inner is None or p not in inner.blocks)
            }  # fmt: skip
            if inner is None:
                path: Path | None = Path(
                    tuple(self._with_callee(number)), frozenset(self._inactive)
                )
                ends = self.block(number)[-1].name == "EXIT"
            else:
                path = self._passes(inner, word_bytes, dearest, passes)
                ends = any(self.block(b)[-1].name == "EXIT" for b in inner.blocks)
            if path is None or self._reads_null(number):
                continue
            if loop is not None:
                ends = bool(loop.latches & (inner.blocks if inner else {number}))
                before = set() if number == loop.header else before
            active = list(path.active())
            work = (
                path.bytes_loaded(word_bytes) + path.bytes_stored(word_bytes),
                sum(map(products_of, active)),
                sum(instruction.name in _MULTIPLY_ADDS for instruction in active),
                sum(i.loads_global for i in active),
            )
            cost = -len(path.code) if dearest else len(path.code)
            nodes[number] = _Node(number, inner, path, work, cost, tuple(before), ends)
        return nodes

    def _reads_null(self, number: int) -> bool:
        """Return whether a block reads an array that the launch does not have."""
        values = dict(self._known[number])
        for instruction in self.block(number):
            if instruction.name in ("LDG", "LD"):
                address = instruction.operands[-1].rpartition("[")[2]
                register = REGISTER.match(address)
                if register and not instruction.guard and register[2] != "Z":
                    words = [values.get(r) for r in span(register[0], 2)]
                    if None not in words and words[1] == 0:
                        return True
            self._machine.step(instruction, values)
        return False

    def _passes(
        self, loop: Loop, word_bytes: int, dearest: bool, passes: Mapping[int, int]
    ) -> Path | None:
        """Return what is issued in all passes of an inner loop."""
        once = self.path(loop, word_bytes, dearest=dearest, passes=passes)
        if once is None:
            return None
        trips = loop.trips or passes.get(loop.header)
        unknown = once.uncounted + (trips is None)
        return replace(once, code=once.code * (trips or 1), uncounted=unknown)

    def _with_callee(self, number: int) -> Iterator[Instruction]:
        """Yield a block's instructions, and the fewest of a function that it calls."""
        block = self.block(number)
        yield from block
        if block[-1].calls and block[-1].targets[0] in self.labels:
            yield from self._shortest_call(self._block_at[self.labels[block[-1].targets[0]]])

    def _shortest_call(self, entry: int) -> list[Instruction]:
        """Return the fewest instructions from a function's entry to its return."""
        free = ConstantPropagation({})
        best: dict[int, list[Instruction]] = {entry: self.block(entry)}
        waiting = [entry]
        returned: list[Instruction] = []
        while waiting:
            number = waiting.pop()
            way = best[number]
            if self.block(number)[-1].name == "RET":
                if not returned or len(way) < len(returned):
                    returned = way
                continue
            for target in self._successors(number, {}, free):
                longer = way + self.block(target)
                if target not in best or len(longer) < len(best[target]):
                    best[target] = longer
                    waiting.append(target)
        return returned


_ENDS = frozenset(("BRA", "BRX", "JMP", "JMX", "EXIT", "RET", "CALL", "KILL"))


_MULTIPLY_ADDS = ("FFMA", "FFMA2", "HFMA2")


def _is_rare(instruction: Instruction) -> bool:
    return instruction.calls or instruction.name in ("ATOM", "ATOMG", "RED", "REDG")


def _best_way(nodes: Mapping[int, _Node]) -> list[int] | None:
    """Return the way with most work, and least cost among those; None if no way exists.

    Parameters
    ----------
    nodes : of a loop or a kernel, in an order in which each follows all that it may come after
    """
    best: dict[int, tuple[_Work, int, int | None]] = {}
    end: int | None = None
    for number, node in nodes.items():
        work, cost, previous = node.work, -node.cost, None
        if node.before:
            ways = [(best[p][:2], p) for p in node.before if p in best]
            if not ways:
                continue
            (before, gone), previous = max(ways)
            work = tuple([a + b for a, b in zip(before, work, strict=True)])
            cost += gone
        best[number] = work, cost, previous
        if node.ends and (end is None or best[number][:2] > best[end][:2]):
            end = number
    if end is None:
        return None
    way = []
    step: int | None = end
    while step is not None:
        way.append(step)
        step = best[step][2]
    return way[::-1]
