"""Where kvcupy waits, records, and asks what is done: found in its source, seen in a run, left out.

A site is a call in the source of kvcupy, such as

    cache/engine.py TransferQueue._issue: stream.wait(event)

Devices are not looked into: they are what waits and records are made of.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
