"""Where an operation was called from: file and line, and the variable names of its streams."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from .history import Work

_MAX_NAMING_FRAMES = 8
_MAX_ITEMS = 64  # of a list or dict of the caller's
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARY = (_PACKAGE, inspect.getfile(contextmanager), str(Path(np.__file__).parent))


def is_users(frame: FrameType) -> bool:
    """Return whether a frame is neither kvcupy's nor torch's, whose dispatcher calls operators."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module != "torch" and not frame.f_code.co_filename.startswith(_LIBRARY)


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the user's frames of a call, innermost first."""
    while frame is not None:
        if is_users(frame):
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a function by name.

    Before Python 3.13 a frame keeps the dict that it was asked for, and with it every array.
    """
    local = frame.f_locals
    variables = dict(local)
    if type(local) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        local.clear()
    return variables


def site(frame: FrameType) -> str:
    """Return file and line of the user's innermost call."""
    user = next(users_frames(frame), frame)
    return f"{user.f_code.co_filename}:{user.f_lineno}"


def stack_level(frame: FrameType | None) -> int:
    """Return the stack level of the user's innermost frame, for a warning issued in `frame`."""
    depth = 1
    while frame is not None and not is_users(frame):
        depth, frame = depth + 1, frame.f_back
    return depth


def names_of_streams(*works: Work) -> list[str]:
    """Return the names of the streams in the innermost function that has all, else their own."""
    names: list[list[str]] = []
    streams = [stream for work in works if (stream := work.stream()) is not None]
    for frame in islice(users_frames(sys._getframe()), _MAX_NAMING_FRAMES):
        names.append([_name_in(frame, stream) for stream in streams])
    best = max(names, key=lambda own: sum(map(bool, own)), default=[])
    chosen = dict(zip(map(id, streams), best, strict=False))
    return [
        chosen.get(id(work.stream())) or re.sub(r"\W+", "_", work.stream_name) for work in works
    ]


def transfers_of(frame: FrameType) -> Iterator[tuple[str, Any, Any]]:
    """Yield what the caller can wait for: its name, the object, and each transfer in it."""
    for user in islice(users_frames(frame), _MAX_NAMING_FRAMES):
        for name, value in _named_values(variables_of(user)):
            for transfer in _transfers_in(value, set()) if _is_ours(value) else ():
                yield name, value, transfer


def caches_of(frame: FrameType) -> Iterator[str]:
    """Yield what the caller calls its tiered caches, which save blocks in the background."""
    for user in islice(users_frames(frame), _MAX_NAMING_FRAMES):
        for name, value in _named_values(variables_of(user)):
            if _is_ours(value) and hasattr(type(value), "flush") and hasattr(value, "acquire"):
                yield name


def _named_values(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, their items and their attributes, as the caller would write them."""
    for name, value in variables.items():
        yield name, value
        if isinstance(value, (list, tuple)):
            yield from [(f"{name}[{i}]", value[i]) for i in range(min(len(value), _MAX_ITEMS))]
        elif isinstance(value, dict):
            yield from [
                (f"{name}[{key!r}]", held) for key, held in islice(value.items(), _MAX_ITEMS)
            ]
        elif not isinstance(value, ModuleType) and not _is_ours(value):
            for attribute, held in list(getattr(value, "__dict__", {}).items()):
                yield f"{name}.{attribute}", held


def _transfers_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the transfers that an object of kvcupy's waits for: those with a start and an end."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _transfers_in(each, seen)
    elif _is_ours(value) and hasattr(type(value), "wait") and not hasattr(type(value), "record"):
        held = vars(value)
        if "layer_events" in held or hasattr(type(value), "layer_events"):
            yield value
        for each in list(held.values()):
            yield from _transfers_in(each, seen)


def _is_ours(value: Any) -> bool:
    return str(type(value).__module__).startswith("kvcupy.")


def _name_in(frame: FrameType, stream: Any) -> str:
    """Return what a function calls a stream; empty if it has no name for it."""
    variables = variables_of(frame)
    for name, value in (*variables.items(), *frame.f_globals.items(), *_named_values(variables)):
        if _is_stream(value, stream):
            return str(name)
    return ""


def _is_stream(value: Any, stream: Any) -> bool:
    """Return whether a variable holds a stream, as kvcupy's or another library's object."""
    if value is stream:
        return True
    kind = type(value)
    if hasattr(kind, "identity") and hasattr(kind, "record"):
        return bool(value.identity == stream.identity)
    for pointer in ("cuda_stream", "ptr"):  # of torch, of CuPy
        if hasattr(kind, pointer) and hasattr(kind, "wait_event"):
            return bool(getattr(value, pointer) == getattr(stream, "pointer", None))
    return False
