"""What each protocol between streams needs, and what becomes of it without.

An edge is something that orders: a place in kvcupy where a stream or the host waits, an event is
recorded, or work is found done (`sites`), or one such wait among several of its place. A protocol
passes if, in every order that is tried, its bytes are the same and the order checker is silent. An
edge is needed if the checker reports its absence, in one of the orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import access_order_cases
import graph_order_cases
import mixed_order_cases
import order_case
import page_order_cases
import protocols
import pytest
import sites
import table_order_cases

import kvcupy as kv
from kvcupy import scratch
from kvcupy.order.explore import _key

Program = Callable[[Any], Any]


@dataclass(frozen=True)
class Edge:
    """What is left out, and how.

    Attributes
    ----------
    programs : which of the protocol's show it; None: all
    """

    name: str
    left_out: Callable[[], AbstractContextManager[object]]
    programs: tuple[Program, ...] | None = None


@dataclass(frozen=True)
class Protocol:
    """Programs that rely on the same edges."""

    name: str
    programs: tuple[Program, ...]
    edges: tuple[Edge, ...] = field(repr=False)

    @classmethod
    def of(cls, *programs: Program, name: str, edges: tuple[Edge, ...]) -> Protocol:
        return cls(name, programs, edges)


@dataclass
class Row:
    """A line of the table.

    Attributes
    ----------
    edges, reported, corrupted : how many; without those that corrupt, an order comes out wrong
    schedules : with all edges
    problems : what should not be, in words
    """

    protocol: str
    edges: int = 0
    reported: int = 0
    corrupted: int = 0
    programs: int = 0
    schedules: int = 0
    problems: list[str] = field(default_factory=list)
    edge_names: list[str] = field(default_factory=list)


# --- Runs -----------------------------------------------------------------------------------------


def run_all(program: Program, schedules: int, seed: int) -> tuple[Any, list[str]]:
    """Run a program under many orders; return what it gives, and what should not be."""
    problems = []

    def checked(device: Any) -> Any:
        with kv.order_checker("record") as checker:
            outcome = program(device)
        problems.extend(str(report) for report in checker.reports[:1])
        if checker.unresolved:
            problems.append(f"{checker.unresolved} accesses could not be resolved")
        return outcome

    result = kv.explore(checked, schedules=schedules, seed=seed)
    problems += map(str, result.failures)
    return _key(result.outcomes[0][0]), problems


def run_without(
    edge: Edge, program: Program, expected: Any, schedules: int, seed: int
) -> tuple[bool, bool]:
    """Return whether the checker reports that an edge is missing, and whether it comes out wrong.

    That is with other bytes, or an exception. It stops as soon as both have happened.
    """
    reported, corrupted = [], []

    def checked(device: Any) -> None:
        if reported and corrupted:
            return
        with edge.left_out(), kv.order_checker("record") as checker:
            try:
                outcome = _key(program(device))
            except Exception as error:
                outcome = type(error), str(error)
        reported.extend(checker.reports)
        if outcome != expected:
            corrupted.append(outcome)

    kv.explore(checked, schedules=schedules, seed=seed)
    return bool(reported), bool(corrupted)


def survey(protocol: Protocol, schedules: int, tries: int, seed: int = 0) -> Row:
    """Run a protocol whole, then without each of its edges.

    Parameters
    ----------
    schedules : at least so many with all edges, shared by its programs
    tries : at most so many with an edge left out, of each program
    """
    row = Row(protocol.name, len(protocol.edges), programs=len(protocol.programs))
    row.edge_names = [edge.name for edge in protocol.edges]
    each = -(-schedules // row.programs)
    row.schedules = each * row.programs
    expected = {}
    for program in protocol.programs:
        expected[program], problems = run_all(program, each, seed)
        row.problems += problems
    seen = {program: passed(program, 10, seed) for program in protocol.programs}
    for edge in protocol.edges:
        reported = corrupted = False
        passing = [program for program in protocol.programs if edge.name in seen[program]]
        for program in edge.programs or passing or protocol.programs:
            outcome = run_without(edge, program, expected[program], tries, seed)
            reported, corrupted = reported or outcome[0], corrupted or outcome[1]
            if reported and corrupted:
                break
        row.reported += reported
        row.corrupted += corrupted
        if not reported:
            row.problems.append(f"without {edge.name}: not reported")
        if not corrupted:
            row.problems.append(f"without {edge.name}: no wrong bytes in {tries} schedules")
    return row


# --- Edges ----------------------------------------------------------------------------------------


def case_of(name: str, case: order_case.OrderCase) -> tuple[Program, Edge]:
    """Return the program of an order case, and the edge that it is about."""

    def run(drop: tuple[int, ...], device: Any) -> Any:
        world = protocols.World(device, **case.options)
        rest = case.program(world)
        next(rest)
        with pytest.MonkeyPatch.context() as patches, ExitStack() as stack:
            if drop:  # else sites see who waits
                without = order_case.without(patches, world, case.who, drop)
                stack.enter_context(without)
            next(rest, None)
        return world.results("abc")

    dropped = []

    def program(device: Any) -> Any:
        return run(case.drop if dropped else (), device)

    @contextmanager
    def left_out() -> Iterator[None]:
        dropped.append(True)
        try:
            yield
        finally:
            dropped.clear()

    return program, Edge(name, left_out, (program,))


def from_cases(
    name: str, cases: dict[str, order_case.OrderCase], more: tuple[Edge, ...]
) -> Protocol:
    programs, edges = zip(*[case_of(n, case) for n, case in cases.items()], strict=True)
    return Protocol(name, programs, edges + more)


@contextmanager
def lent_twice() -> Iterator[None]:
    """Give borrowed buffers back at once, while work still uses them."""
    genuine = scratch._Loan.__init__

    def lend(
        loan: Any, device: Any, key: Any, array: Any, idle: list[Any], captured: Any = None
    ) -> None:
        genuine(loan, device, key, array, idle, captured)
        idle.append(array)

    with (
        patch.object(scratch._Loan, "__init__", lend),
        patch.object(scratch, "_stores", type(scratch._stores)()),
    ):
        yield


def not_kept() -> AbstractContextManager[object]:
    return patch.object(kv, "keep_alive", lambda arrays, stream: None)


def sites_of(file: str, *names: str) -> tuple[Edge, ...]:
    """Return edges that are all the calls of their places, in one file of kvcupy."""
    full = [f"{file} {name}" for name in names]
    return tuple([Edge(name, partial(sites.watched, name)) for name in full])


ENGINE, HAZARDS, PAGES = (f"cache/{name}.py" for name in ("engine", "hazards", "pages"))
TIERED, TIERS, IN_FLIGHT, LEASES, STORE_TIER = (
    f"cache/tiered/{name}.py" for name in ("cache", "tiers", "in_flight", "leases", "store_tier")
)
TABLES, EXCHANGE, PAGED_TIERS, STEP, STEPS, STATES = (
    f"cache/paged/{name}.py" for name in ("tables", "exchange", "tiers", "step", "steps", "states")
)

_FORK = sites_of("streams.py", "fork: first.record()", "fork: other.wait(event)")
_JOIN = sites_of("streams.py", "join: first.wait(other.record())", "join: other.record()")
_AFTER = sites_of(
    ENGINE, "TransferEngine._submit: compute.record()", "TransferQueue._issue: stream.wait(event)"
)
_JOINED = "Batch.join: (self.stream if self.end is None else self.end).synchronize()"
_END = "TransferQueue._close: self.stream.record(self._device.event(timing=True))"
_OTHER = "TransferQueue._issue: stream.wait(other.stream if earlier.end is None else earlier.end)"
_HELD = "TransferEngine._submit: self.device_pool.allocator._mark_busy(device_list, batch)"
_IS_OVER = "Batch.done: (self.stream if self.end is None else self.end).done()"
_WRITTEN = sites_of(
    HAZARDS,
    "StreamCompletion.__init__: stream.record()",
    "StreamCompletion.done: self._event.done()",
) + sites_of(TIERS, "GroupTiers.insert: written.done()")
_RECORDED = "AccessOrder._record: stream.record(self._spare.pop() if self._spare else None)"
_READ = "AccessOrder.take_over: stream.wait(access.event or self._record_late(access))"
_ACCESS = sites_of(
    HAZARDS, "AccessOrder.begin: stream.wait(access.event or self._record_late(access))",
    _RECORDED,
)  # fmt: skip


PROTOCOLS = [
    Protocol.of(protocols.fork_and_join, name="fork and join", edges=_FORK + _JOIN),
    Protocol.of(
        protocols.alt_stream, name="alt_stream", edges=_FORK + _JOIN + sites_of(
            "ops/rope.py", "TwoStreamPlan.run: streams.fork(main, other)",
            "TwoStreamPlan.run: streams.join(main, other)",
        ),
    ),
    Protocol.of(
        protocols.load_by_layer, protocols.load, name="load, by layer", edges=_AFTER + sites_of(
            ENGINE, "Batch.block: stream.wait(event)", "TransferQueue.send: self.stream.record()",
            _JOINED, _END, "Transfer.synchronize: batch.join()",
        ),
    ),
    Protocol.of(
        protocols.save, name="save", edges=_AFTER + sites_of(
            ENGINE, "Batch.block: stream.wait(event)", _JOINED, _END,
        ),
    ),
    Protocol.of(
        protocols.save_and_load_the_same_pages, protocols.batches_that_are_over_are_forgotten,
        name="transfers of the same pages",
        edges=sites_of(ENGINE, _OTHER, _END, "TransferQueue._reap: batch.done()"),
    ),
    Protocol.of(
        protocols.pages_freed_in_flight, name="pages freed in flight",
        edges=_AFTER + sites_of(
            ENGINE, _HELD, _IS_OVER, _JOINED, _END, "Batch.synchronize: self.join()",
            "TransferEngine._submit: self.host_pool.allocator._mark_busy(host_list, batch)",
        ) + sites_of(PAGES, "PageAllocator._wait: transfer.synchronize()",
                     "_is_done: transfer.done()"),
    ),
    Protocol.of(
        protocols.inserted_and_cleared, name="tiers, cleared", edges=_WRITTEN + sites_of(
            HAZARDS, "StreamCompletion._behind: relay.wait(self._event)",
            "StreamCompletion.synchronize: self._behind().synchronize()",
        ) + sites_of(PAGES, "PageAllocator._wait: transfer.synchronize()") + sites_of(
            TIERS,
            "GroupTiers._wait_for_writes: self.device.pool.allocator._mark_busy(pages, written)",
        ),
    ),
    Protocol.of(
        protocols.tiered_eviction, protocols.tiered_write_through, name="tiers, eviction",
        edges=_WRITTEN + sites_of(
            ENGINE, _HELD, _IS_OVER, _JOINED, _END, "Batch.block: stream.wait(event)",
            "TransferQueue.send: self.stream.record()",
        ) + sites_of(
            PAGES, "PageAllocator._wait: transfer.synchronize()", "_is_done: transfer.done()",
        ) + sites_of(
            HAZARDS, "StreamCompletion.wait: self._event.done()",
            "Completion.wait_layer: self.wait(stream)",
        ) + sites_of(
            LEASES, "Lease.wait: self.completion.wait(self._waiting(stream))",
            "Lease.wait_layer: self.completion.wait_layer(layer, self._waiting(stream))",
            "LeaseCompletion.wait: blocks.wait(stream)",
            "LeaseCompletion.wait_layer: blocks.wait_layer(layer, stream)",
        ) + sites_of(
            IN_FLIGHT, "BlockCompletion.done: completion.done()",
            "BlockCompletion.wait: completion.wait(stream)",
            "BlockCompletion.wait_layer: completion.wait_layer(layer, stream)",
        ) + sites_of(TIERS, "GroupTiers.after_writers: writer.wait(relay)"),
    ),
    Protocol.of(
        protocols.acquire_while_evicting, protocols.acquire_behind_readers,
        name="tiers, acquire while evicting", edges=_WRITTEN + sites_of(
            ENGINE, _HELD, _OTHER, _END, "TransferQueue.send: self.stream.record()",
        ) + sites_of(
            HAZARDS, "StreamCompletion._behind: relay.wait(self._event)",
            "StreamCompletion.wait: self._behind().record()",
            "StreamCompletion.wait: waiting.wait(self._behind().record())",
        ) + sites_of(
            TIERS, "GroupTiers.after_writers: relay.wait(device.as_stream(after))",
            "GroupTiers.after_writers: writer.wait(relay)",
        ),
    ),
    Protocol.of(
        protocols.leased_by_the_host, name="tiers, host waits", edges=sites_of(
            LEASES, "LeaseCompletion.done: blocks.done()",
            "LeaseCompletion.synchronize: blocks.synchronize()",
        ) + sites_of(
            IN_FLIGHT, "BlockCompletion.done: completion.done()",
            "BlockCompletion.synchronize: completion.synchronize()",
        ),
    ),
    Protocol.of(
        protocols.tiered_stores, name="tiers, stores",
        edges=sites_of(
            ENGINE, _END, "Batch.block: stream.wait(event)",
            "TransferQueue.send: self.stream.record()",
        ) + sites_of(
            LEASES, "Lease.wait: self.completion.wait(self._waiting(stream))",
            "Lease.wait_layer: self.completion.wait_layer(layer, self._waiting(stream))",
        ) + sites_of(
            IN_FLIGHT, "BlockCompletion.wait: completion.wait(stream)",
            "BlockCompletion.wait_layer: completion.wait_layer(layer, stream)",
        ),
    ),
    Protocol.of(
        protocols.offload_and_onboard, protocols.offload_a_fork, protocols.onboard_and_launch,
        protocols.offload_demoted, name="offload and onboard", edges=_AFTER + _ACCESS + sites_of(
            ENGINE, _HELD, _END,
        ) + sites_of(
            HAZARDS, "PageAccess.on: load.wait(stream)", "PageAccess.on: self.order.begin(stream)",
        ) + sites_of(
            PAGED_TIERS, "Tiers.offload: self._access.order.end(engine.save_stream)",
        ) + sites_of(
            "cache/paged/cache.py", "PagedKVCache._attend: part.wait_layer(index, stream)",
        ) + sites_of(
            STEP, "GroupStep.before_launch: load.wait(stream)",
            "GroupStep.wait_layer: load.wait_layer(layer, stream)",
        ),
    ),
    Protocol.of(
        protocols.prefix_from_tiers, name="prefixes from tiers", edges=_AFTER + _ACCESS + sites_of(
            HAZARDS, "PageAccess.on: self.order.begin(stream)",
        ) + sites_of(STEP, "GroupStep.wait_layer: load.wait_layer(layer, stream)"),
    ),
    Protocol.of(
        protocols.prefix_of_groups, protocols.prefix_of_groups_used_at_once,
        name="prefixes of groups from tiers", edges=sites_of(
            ENGINE, "TransferQueue.sending: self.stream.record()",
        ) + sites_of(
            STATES, "States._copy: load.wait(stream)", "StateLoad.wait: self._load.wait(stream)",
        ) + sites_of("cache/paged/cache.py", "PagedKVCache.state_slots: load.wait(stream)"),
    ),
    Protocol.of(
        protocols.offload_groups, protocols.offload_forks_of_groups,
        name="offload and onboard of groups", edges=_AFTER + _ACCESS + sites_of(
            ENGINE, _HELD, _END, "TransferQueue.sending: self.stream.record()",
        ) + sites_of(HAZARDS, "PageAccess.on: self.order.begin(stream)") + sites_of(
            PAGED_TIERS, "Tiers.offload: self._access.order.end(engine.save_stream)",
        ) + sites_of(
            STATES, "States._copy: load.wait(stream)", "StateLoad.wait: self._load.wait(stream)",
        ) + sites_of(
            "cache/paged/cache.py", "PagedKVCache._attend: part.wait_layer(index, stream)",
            "PagedKVCache.state_slots: load.wait(stream)",
        ) + sites_of(STEP, "GroupStep.wait_layer: load.wait_layer(layer, stream)"),
    ),
    Protocol.of(
        protocols.saved_to_a_file, name="sequences in files", edges=_ACCESS + sites_of(
            HAZARDS, "PageAccess.on: self.order.begin(stream)",
        ) + sites_of(STEPS, "Steps._close: self._order.end(stream)"),
    ),
    Protocol.of(
        protocols.kept_alive, name="keep_alive",
        edges=(Edge("keep_alive(array, stream)", not_kept),),
    ),
    Protocol.of(
        protocols.scratch_reuse, name="scratch",
        edges=(Edge("a buffer is lent until the work is over", lent_twice),),
    ),
    Protocol.of(protocols.replayed, name="capture and replay", edges=_FORK + _JOIN),
]  # fmt: skip


def cases_of(cases: dict[str, order_case.OrderCase], *words: str) -> dict[str, Any]:
    """Return the cases that have one of some words in their names."""
    return {name: case for name, case in cases.items() if any(word in name for word in words)}


_PAGE_CASES, _ACCESS_CASES = page_order_cases.ORDER_CASES, access_order_cases.ORDER_CASES
_TABLE_SITES = sites_of(
    HAZARDS, "CopyStream.record: self.stream.record(self._recorded if event is None else event)"
) + sites_of(
    TABLES, "StepTables.on: stream.wait(self._slot.copied)",
)  # fmt: skip
PROTOCOLS += [
    from_cases(name, cases, edges)
    for name, cases, edges in (
        (
            "ring of tables", table_order_cases.ORDER_CASES, _TABLE_SITES + sites_of(
                TABLES, "TableBuffer.upload: self.readers.take_over(stream)",
                "StepTables.close: self._slot.readers.end(stream)",
            ) + sites_of(
                HAZARDS, _READ, _RECORDED, "CopyStream.synchronize: copied.synchronize()",
            ),
        ),
        ("fork of a sequence", cases_of(_PAGE_CASES, "fork"), _ACCESS),
        ("copy on write", cases_of(_PAGE_CASES, "begin", "own page"), _ACCESS),
        ("tree commit", cases_of(_PAGE_CASES, "commit"), _ACCESS),
        ("demotion of old pages", mixed_order_cases.ORDER_CASES, _ACCESS),
        ("sliding window", cases_of(_ACCESS_CASES, "slid"), _ACCESS),
        (
            "pages between streams",
            {name: case for name, case in _ACCESS_CASES.items() if "slid" not in name},
            _ACCESS + sites_of(
                HAZARDS, "PageAccess.on: self.order.begin(stream)",
                "PageAccess.on: self.order.end(stream)", "PageAccess.on: self.order.end(user)",
            ) + sites_of(
                STEPS, "Steps._close: self._order.end(stream)",
            ) + sites_of(TABLES, "StepTables.use_on: self._ring.before_use(stream)"),
        ),
        (
            "captured steps", graph_order_cases.ORDER_CASES, _ACCESS + sites_of(
                TABLES, "CapturedTables.before: stream.wait(self.buffer.copied)",
                "CapturedTables.after: self.buffer.readers.end(stream)",
            ) + sites_of(HAZARDS, _READ),
        ),
    )
]  # fmt: skip
"""Every protocol; edges that are sites stand for all calls from there."""


# --- What orders nothing --------------------------------------------------------------------------

_TIMING = "times a batch; `Batch.note` asks whether what came before it has failed"
_FAILURES = "surfaces a failure of what is over, or tells whether there was one"
_ANOTHER = "calls a method of another class that has such a name"
_STATISTICS = "for statistics: whoever uses a page asks for what fills or reads that page"
_ASKS_AGAIN = "spares asking in a loop: nothing goes on before the block has arrived"
_DONE_AT_RETURN = "the call promises to be over; to_numpy and later work wait by themselves"
_TORCH_FILLS = "torch fills zeros on its current stream of a GPU; a device's are there at return"
_NO_STREAM = "between threads and servers, with no work on a stream; tests stop servers instead"
_PROCESSES = "between processes, which are not simulated: test_migration_controls.py has it"
_READS = "of a READ of NIXL: tests/remote/test_migration.py has the controls"
_SAVED = "raises where the save has failed; the engine orders the load behind it"
_THREADS = "of one thread of the host for another, not for a stream"
ON_A_GPU = "of the library's current stream: on the host device that is the calling thread"

NOT_NEEDED = {
    f"{file} {name}": why
    for file, names in {
        "arrays/probes.py": {
            "wait_for_producers: stream.wait(cuda_api.StreamAddress(int(pointer)))": ON_A_GPU,
        },
        ENGINE: {
            "Batch.note: event.synchronize()": _FAILURES,
            "Transfer.__repr__: batch.done()": "says what it is found to be",
            "Transfer.done: batch.done()": "if it lies, the join behind it waits",
            "Transfer.done: batch.join()": _FAILURES,
            "Transfer.elapsed_us: self.synchronize()": "for the times of a batch that is over",
            "TransferQueue._issue: stream.record(self._device.event(timing=True))": _TIMING,
            "TransferQueue._reap: batch.join()": _FAILURES,
        },
        "remote/migration/endpoint.py": {
            "Endpoint._finish_close: thread.join(_CLOSE_TIMEOUT_S)": _THREADS,
        },
        "remote/migration/receiver.py": {
            "Landing.synchronize: self._over.wait(min(left_s, _ABANDONED_POLL_S))": _THREADS,
            "Landing.synchronize: self.done()": _THREADS,
            "Landing.wait: self.synchronize()": _THREADS,
            "PageReceiver._end: reading.done()": _READS,
            "PageReceiver._pull: "
            "target.memory.pool.allocator._mark_busy(target.pages, pull._landing)": _PROCESSES,
            "PageReceiver._run.read: each.done()": _READS,
            "PageReceiver._run: landing.done()": _READS,
            "PageReceiver._run: pull._after.done()": _PROCESSES,
            "Pull._event_of: self._after.wait(self._stream)":
                "for checkers alone: the receiver's thread waits for it by itself",
            "Pull._event_of: stream.record()": _PROCESSES,
            "Pull._settle: self._landing.end()": _ANOTHER,
            "Pull._settle: self._stream.synchronize()": _FAILURES,
            "Pull._wait: waiting.wait(event)": _PROCESSES,
            "Pull.done: self._landing.done()": _THREADS,
            "Pull.synchronize: self._landing.synchronize()": _THREADS,
            "PullPart.done: self._pull.done()": _THREADS,
            "PullPart.synchronize: self._pull.synchronize()": _THREADS,
            "_is_over: reading.done()": _READS,
        },
        "remote/migration/sender.py": {
            "PageSender._advance: completion.done()": _PROCESSES,
            "PageSender._hold_back: completion.done()":
                "spares announcing what is over to the allocator",
            "PageSender._hold_back: "
            "self.pools[part.pool].allocator._mark_busy(part.pages, completion)": _PROCESSES,
            "PageSender._written: event.done()": "refuses an event of a capture",
            "PageSender._written: stream.wait(event)": _PROCESSES,
        },
        HAZARDS: {
            "StreamCompletion.failure: self._relay.synchronize()": _FAILURES,
            "CopiedPages.succeeded: self._event.done()": _FAILURES,
            "CopyStream.recover: self.synchronize(self._last)": _FAILURES,
            "PageAccess.on: self._copies.record()": _FAILURES,
        },
        "cache/paged/cache.py": {
            "PagedKVCache.begin_forward: self._steps.begin(seqs, append_lens, token_tree)":
                _ANOTHER,
            "PagedKVCache.end_forward: self._steps.end(keep_step)": _ANOTHER,
            "PagedKVCache.fork_sequence: self._steps.fork(parent, child, at)":
                _ANOTHER,
        },
        "cache/paged/contents.py": {
            "Contents.fill: stream.synchronize()": _DONE_AT_RETURN,
            "Contents.tensors: stream.synchronize()": _DONE_AT_RETURN,
        },
        EXCHANGE: {
            "Exchange.export: self._tiers.fork(seq, held)": _ANOTHER,
        },
        PAGED_TIERS: {
            "Tiers.onboard: part.save.synchronize()": _SAVED,
            "stream_after_loads: copy.done()": _PROCESSES,
        },
        "cache/paged/page_group.py": {
            "PageGroup.fork: self.sequences.fork(parent, child, at)": _ANOTHER,
        },
        STATES: {
            "KeptState.is_usable: self.copied.done()": _PROCESSES,
            "KeptState.is_usable: self.copied.synchronize()": _PROCESSES,
            "StateLoad.done: self._load.done()": _ANOTHER,
            "StateLoad.synchronize: self._load.synchronize()": _ANOTHER,
            "States._write: stream.synchronize()": _DONE_AT_RETURN,
            "States.tensors: access.copy_stream.synchronize()": _DONE_AT_RETURN,
        },
        STEPS: {
            f"Steps.{call}": _ANOTHER
            for call in (
                "end: part.end(keep_step)",
                "begin: states.begin(self.access, names, found[0], in_tree)",
                "end: self._states.end(self.access, step.names, step.sequences, "
                "self._is_useless)",
                "fork: group.fork(self.access, shared, child, kept)",
                "fork: self._states.fork(self.access, parent, child, kept, source.length, "
                "sequence, load)",
                "fork: self.tiers.fork(parent, child)",
            )
        },
        "cache/tiered/group_prefixes.py": {"GroupedLease.wait: lease.wait(stream)": _ANOTHER},
        TABLES: {
            "TableBuffer.upload: self._copies.record(pinned.copied)": _ANOTHER,
            "TableBuffer.upload: self._copies.synchronize(pinned.copied)": _ANOTHER,
        },
        TIERED: {
            "_flush: completion.synchronize()": _ASKS_AGAIN,
        },
        STORE_TIER: {
            "StoreTier.stop: thread.join(join_s)": _THREADS,
            "StoreTier.fetch: arrivals.over.wait(min(left, _STORE_TIMEOUT_S / 10))": _THREADS,
        },
        IN_FLIGHT: {
            "BlockCompletion._raise_failure_of_sources: completion.done()": _FAILURES,
            "BlockCompletion.done: source.done()":
                "the engine orders a transfer behind what fills its pages; this notes failures",
            "BlockCompletion.synchronize: source.synchronize()":
                "the engine orders a transfer behind what fills its pages",
            "CompletionQueue.take_ended: completion.done()": _STATISTICS,
            "CompletionQueue.take_ended: queue[0].done()": _STATISTICS,
        },
        "cache/threads.py": {"Helpers.each: job.wait()": _THREADS},
        "ops/call.py": {
            "_allocator.allocate_for: stream.wait(current)": _TORCH_FILLS,
        },
    }.items()
    for name, why in names.items()
}  # fmt: skip
"""Sites that no protocol needs, and why they are there."""


def listed() -> set[str]:
    """Return the names of all edges."""
    return {edge.name for protocol in PROTOCOLS for edge in protocol.edges}


def passed(program: Program, schedules: int = 3, seed: int = 1) -> set[str]:
    """Return the sites that a program passes."""
    with sites.watched() as seen:
        kv.explore(program, schedules=schedules, seed=seed)
    return set(seen)
