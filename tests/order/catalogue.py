"""The waits that order the streams of kvcupy, and for each a program that races without it.

A wait is a place in the source of kvcupy where a stream or the host waits, an event is recorded, or
work is found done, such as

    cache/engine.py TransferQueue._issue: stream.wait(event)

Devices are not looked into: waits and records are made of them. The programs pass in every order of
their streams that is tried, and the order checker is silent. With a wait left out, it reports a
race in one of the orders.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import order_cases
import protocols

import kvcupy as kv
from kvcupy import streams
from kvcupy.cache.engine import Batch, Transfer
from kvcupy.cache.hazards import AccessOrder, Completion, StreamCompletion
from kvcupy.cache.paged.states import StateLoad
from kvcupy.cache.paged.step import GroupStep
from kvcupy.cache.pages import PageAllocator
from kvcupy.cache.tiered.in_flight import BlockCompletion
from kvcupy.cache.tiered.leases import Lease, LeaseCompletion
from kvcupy.devices import cuda_streams, host_streams
from kvcupy.order.explore import SimulatedStream

PACKAGE = Path(kv.__file__).parent
WITHIN = ("arrays/", "cache/", "ops/", "remote/", "scratch.py", "streams.py")
"""What issues work for users. The rest observes, measures, or is a device."""
WHEELS = ("remote/migration/agent", "remote/stores/mooncake")
"""What waits for other projects' engines, not for streams."""

_COMPLETION = ("wait", "wait_layer", "synchronize", "done")
_STREAM = ("wait", "record", "synchronize", "done")
PRIMITIVES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (host_streams.HostStream, _STREAM),
    (host_streams.InlineStream, _STREAM),
    (host_streams.HostEvent, ("synchronize", "done")),
    (SimulatedStream, ("synchronize", "done")),
    (cuda_streams.Stream, _STREAM),
    (cuda_streams.Event, ("synchronize", "done")),
    (streams, ("fork", "join")),
    *((kind, _COMPLETION) for kind in (Batch, BlockCompletion, LeaseCompletion)),
    (Completion, ("wait_layer",)),
    (StreamCompletion, ("wait", "synchronize", "done")),
    (StateLoad, ("wait", "synchronize", "done")),
    (Batch, ("join",)),
    (Transfer, _COMPLETION),
    (Lease, ("wait", "wait_layer")),
    (AccessOrder, ("begin", "end", "take_over")),
    (GroupStep, ("wait_layer",)),
    (PageAllocator, ("_mark_busy",)),
)


def _is_within(path: Path) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return name.startswith(WITHIN) and not name.startswith(WHEELS)


@cache
def _calls(path: Path) -> list[tuple[str, str, ast.Call]]:
    """Return all calls in a module: the function that they are in, the name called, the call."""
    calls = []

    def visit(node: ast.AST, where: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                name = child.func.attr if isinstance(child.func, ast.Attribute) else ""
                calls.append((".".join(where), name, child))
            is_scope = isinstance(child, (ast.ClassDef, ast.FunctionDef))
            visit(child, (*where, child.name) if is_scope else where)

    visit(ast.parse(path.read_text()), ())
    return calls


def _text(path: Path, where: str, call: ast.Call) -> str:
    return f"{path.relative_to(PACKAGE).as_posix()} {where}: {ast.unparse(call)}"


@cache
def site_at(filename: str, line: int, name: str) -> str | None:
    """Return the site of a call of `name` in a line; None outside of what is looked into."""
    path = Path(filename)
    if not path.is_relative_to(PACKAGE):
        return None
    if not _is_within(path):
        return None
    around = [
        (own == name, call.lineno - call.end_lineno, where, call)
        for where, own, call in _calls(path)
        if call.lineno <= line <= call.end_lineno
    ]
    _, _, where, call = max(around, key=lambda entry: entry[:2])
    return _text(path, where, call)


# --- In a run -------------------------------------------------------------------------------------


@contextmanager
def watched(leave_out: str | None = None) -> Iterator[Counter[str]]:
    """Count the sites that are passed in a block, and let what one of them calls not happen."""
    seen: Counter[str] = Counter()
    with ExitStack() as stack:
        for owner, names in PRIMITIVES:
            for name in names:
                replaced = _watched(owner.__dict__[name], name, seen, leave_out)
                stack.enter_context(patch.object(owner, name, replaced))
        yield seen


def _watched(genuine: Any, name: str, seen: Counter[str], leave_out: str | None) -> Any:
    @wraps(genuine)
    def method(*arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        site = site_at(caller.f_code.co_filename, caller.f_lineno, name)
        if site is not None:
            seen[site] += 1
            if site == leave_out:
                return _instead(name, *arguments, **options)
        return genuine(*arguments, **options)

    return method


def _instead(name: str, target: Any, *arguments: Any, **_: Any) -> Any:
    """Return what a call returns that does nothing: found done, or an event that has passed."""
    if name == "done":
        return True
    if name != "record":
        return None
    event = arguments[0] if arguments and arguments[0] is not None else target.device.event()
    if isinstance(event, host_streams.HostEvent) and not target.capturing:
        event._captured, event._marker = None, host_streams.Marker()
        event._marker.finish(None)
    return event


# --- The catalogue --------------------------------------------------------------------------------

Program = Callable[[Any], Any]

CASES = {
    **order_cases.ACCESS_CASES, **order_cases.GRAPH_CASES, **order_cases.TABLE_CASES,
}  # fmt: skip
NEEDED = {
    f"{file} {call}": program
    for file, calls in {
        "cache/engine.py": {
            "Batch.block: stream.wait(event)": "load_by_layer",
            "Batch.done: (self.stream if self.end is None else self.end).done()":
                "batches_that_are_over_are_forgotten",
            "Batch.join: (self.stream if self.end is None else self.end).synchronize()": "load",
            "Batch.synchronize: self.join()": "pages_freed_in_flight",
            "Transfer.synchronize: batch.join()": "load",
            "TransferEngine._submit: compute.record()": "load_by_layer",
            "TransferEngine._submit: self.device_pool.allocator._mark_busy(device_list, batch)":
                "pages_freed_in_flight",
            "TransferEngine._submit: self.host_pool.allocator._mark_busy(host_list, batch)":
                "pages_freed_in_flight",
            "TransferQueue._close: self.stream.record(self._device.event(timing=True))": "load",
            "TransferQueue._issue: stream.wait(event)": "load_by_layer",
            "TransferQueue._issue: "
            "stream.wait(other.stream if earlier.end is None else earlier.end)":
                "save_and_load_the_same_pages",
            "TransferQueue._reap: batch.done()": "batches_that_are_over_are_forgotten",
            "TransferQueue.send: self.stream.record()": "load_by_layer",
            "TransferQueue.sending: self.stream.record()": "offload_and_onboard",
        },
        "cache/hazards.py": {
            "AccessOrder._record: stream.record(self._spare.pop() if self._spare else None)":
                "offload_and_onboard",
            "AccessOrder.begin: stream.wait(access.event or self._record_late(access))":
                "offload_and_onboard",
            "AccessOrder.take_over: stream.wait(access.event or self._record_late(access))":
                "tables, one slot",
            "Completion.wait_layer: self.wait(stream)": "acquire_behind_readers",
            "CopyStream.record: self.stream.record(self._recorded if event is None else event)":
                "offload_and_onboard",
            "CopyStream.synchronize: copied.synchronize()": "prefix_of_groups",
            "PageAccess.on: load.wait(stream)": "offload_a_fork",
            "PageAccess.on: self.order.begin(stream)": "offload_and_onboard",
            "PageAccess.on: self.order.end(stream)": "offload_a_fork",
            "PageAccess.on: self.order.end(user)": "get_kv, running step",
            "StreamCompletion.__init__: stream.record()": "inserted_and_cleared",
            "StreamCompletion._behind: relay.wait(self._event)": "inserted_and_cleared",
            "StreamCompletion.done: self._event.done()": "inserted_and_cleared",
            "StreamCompletion.synchronize: self._behind().synchronize()": "inserted_and_cleared",
            "StreamCompletion.wait: self._behind().record()": "tiered_eviction",
            "StreamCompletion.wait: self._event.done()": "tiered_eviction",
            "StreamCompletion.wait: waiting.wait(self._behind().record())": "tiered_eviction",
        },
        "cache/paged/cache.py": {
            "PagedKVCache._attend: part.wait_layer(index, stream)": "offload_and_onboard",
            "PagedKVCache.state_slots: load.wait(stream)": "prefix_of_groups_used_at_once",
        },
        "cache/paged/states.py": {
            "StateLoad.wait: self._load.wait(stream)": "prefix_of_groups",
            "States._copy: load.wait(stream)": "prefix_of_groups",
        },
        "cache/paged/step.py": {
            "GroupStep.before_launch: load.wait(stream)": "onboard_and_launch",
            "GroupStep.wait_layer: load.wait_layer(layer, stream)": "offload_and_onboard",
        },
        "cache/paged/steps.py": {
            "Steps._close: self._order.end(stream)": "saved_to_a_file",
        },
        "cache/paged/tables.py": {
            "CapturedTables.after: self.buffer.readers.end(stream)": "launch, tables",
            "CapturedTables.before: stream.wait(self.buffer.copied)": "launch, tables",
            "StepTables.close: self._slot.readers.end(stream)": "tables, one slot",
            "StepTables.on: stream.wait(self._slot.copied)": "tables, one slot",
            "StepTables.use_on: self._ring.before_use(stream)": "freed pages",
            "TableBuffer.upload: self.readers.take_over(stream)": "tables, one slot",
        },
        "cache/paged/tiers.py": {
            "Tiers.offload: self._access.order.end(engine.save_stream)": "offload_a_fork",
        },
        "cache/pages.py": {
            "PageAllocator._wait: transfer.synchronize()": "pages_freed_in_flight",
            "_is_done: transfer.done()": "pages_freed_in_flight",
        },
        "cache/tiered/in_flight.py": {
            "BlockCompletion.done: completion.done()": "tiered_eviction",
            "BlockCompletion.synchronize: completion.synchronize()": "leased_by_the_host",
            "BlockCompletion.wait: completion.wait(stream)": "tiered_eviction",
            "BlockCompletion.wait_layer: completion.wait_layer(layer, stream)": "tiered_eviction",
        },
        "cache/tiered/leases.py": {
            "Lease.wait: self.completion.wait(self._waiting(stream))": "tiered_write_through",
            "Lease.wait_layer: self.completion.wait_layer(layer, self._waiting(stream))":
                "tiered_eviction",
            "LeaseCompletion.done: blocks.done()": "leased_by_the_host",
            "LeaseCompletion.synchronize: blocks.synchronize()": "leased_by_the_host",
            "LeaseCompletion.wait: blocks.wait(stream)": "tiered_write_through",
            "LeaseCompletion.wait_layer: blocks.wait_layer(layer, stream)": "tiered_eviction",
        },
        "cache/tiered/tiers.py": {
            "GroupTiers._wait_for_writes: self.device.pool.allocator._mark_busy(pages, written)":
                "inserted_and_cleared",
            "GroupTiers.after_writers: relay.wait(device.as_stream(after))":
                "acquire_behind_readers",
            "GroupTiers.after_writers: writer.wait(relay)": "tiered_eviction",
            "GroupTiers.insert: written.done()": "inserted_and_cleared",
        },
        "ops/rope.py": {
            "TwoStreamPlan.run: streams.fork(main, other)": "alt_stream",
            "TwoStreamPlan.run: streams.join(main, other)": "alt_stream",
        },
        "streams.py": {
            "fork: first.record()": "fork_and_join",
            "fork: other.wait(event)": "fork_and_join",
            "join: first.wait(other.record())": "fork_and_join",
            "join: other.record()": "fork_and_join",
        },
    }.items()
    for call, program in calls.items()
}  # fmt: skip
"""Each wait, and the program that shows it: of `protocols`, or a case of tests/cache."""

_FAILURES = "surfaces a failure of work that has ended"
_STATISTICS = "for statistics: each use of a page asks for the work that fills or reads that page"
_DONE_AT_RETURN = "the call promises to be over; to_numpy and later work wait by themselves"

NOT_NEEDED = {
    "cache/engine.py Transfer.done: batch.done()": "the join that follows waits",
    "cache/engine.py Transfer.done: batch.join()": _FAILURES,
    "cache/engine.py Transfer.elapsed_us: self.synchronize()": "times a batch that is over",
    "cache/engine.py TransferQueue._issue: stream.record(self._device.event(timing=True))":
        "times a batch",
    "cache/engine.py TransferQueue._reap: batch.join()": _FAILURES,
    "cache/hazards.py CopiedPages.succeeded: self._event.done()": _FAILURES,
    "cache/paged/contents.py Contents.fill: stream.synchronize()": _DONE_AT_RETURN,
    "cache/paged/contents.py Contents.tensors: stream.synchronize()": _DONE_AT_RETURN,
    "cache/paged/tiers.py Tiers.onboard: part.save.synchronize()":
        "raises where the save has failed; the engine orders the load after it",
    "cache/tiered/in_flight.py BlockCompletion._raise_failure_of_sources: completion.done()":
        _FAILURES,
    "cache/tiered/in_flight.py BlockCompletion.synchronize: source.synchronize()":
        "the engine orders a transfer after the work that fills its pages",
    "cache/tiered/in_flight.py CompletionQueue.take_ended: completion.done()": _STATISTICS,
    "cache/tiered/in_flight.py CompletionQueue.take_ended: queue[0].done()": _STATISTICS,
}  # fmt: skip
"""Waits that programs pass and that order nothing, and what they are there for."""


def program_of(name: str) -> Program:
    """Return a program by its name."""
    if name not in CASES:
        return getattr(protocols, name)  # type: ignore[no-any-return]
    case = CASES[name]

    def program(device: Any) -> Any:
        world = protocols.World(device, **case.options)
        for _ in case.program(world):
            pass
        return world.results("abc")

    return program


def problems_of(program: Program, schedules: int, *, without: str | None = None) -> list[str]:
    """Return the races that are reported in many orders, and the wrong outcomes.

    With a wait left out, it stops at the first report.
    """
    problems: list[str] = []

    def checked(device: Any) -> Any:
        if without is not None and problems:
            return None
        left_out = nullcontext() if without is None else watched(leave_out=without)
        with left_out, kv.order_checker("record") as checker:
            try:
                outcome = program(device)
            except Exception:
                if without is None:
                    raise
        problems.extend(str(report) for report in checker.reports[:1])
        if without is None and checker.unresolved:
            problems.append(f"{checker.unresolved} accesses could not be resolved")
        return None if without else outcome

    result = kv.explore(checked, schedules=schedules)
    return problems if without is not None else problems + [str(f) for f in result.failures]


def passed(program: Program, schedules: int) -> set[str]:
    """Return the sites that a program passes."""
    with watched() as seen:
        kv.explore(program, schedules=schedules, seed=1)
    return set(seen)
