"""Run cases in this process, one line of output for each; `fuzz` watches it."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kvcupy as kv

from .attempts import Case, Finding
from .audit import sample
from .calls import TARGETS

KEPT: list[int] = []
CONTROLS: dict[str, Callable[[Case], None]] = {
    "crash": lambda case: os.abort(), "hang": lambda case: time.sleep(1000),
    "leak": lambda case: KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(9)),
}  # fmt: skip
"""What a test asks for, to see that it is seen."""

MEMORY_BYTES = 4 << 30
"""What a process may allocate beyond what it has after its imports."""


def limit_memory() -> None:
    """Let huge sizes raise MemoryError, rather than take the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_case(name: str, number: int, *, verbose: bool = False) -> dict[str, Any]:
    """Run one case, and return its result."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    case = Case(name, number, folder, verbose=verbose)
    device: Any = kv.device("host")
    strict = case.chance(0.4)
    kv.config.strict = strict
    kv.config.strict_index_faults = case.rng.choice(["raise", "record"])
    kv.config.strict_seed = case.rng.randrange(2**31)
    kv.config.fallback = "error"
    if case.chance(0.15):
        case.exits.enter_context(without_compiler(device))
    device.warp_lanes = 32 if strict else 1
    kv.ops.call.forget()
    device.context.faults[...] = 0
    settle_streams(device)
    finding = key = ""
    try:
        with case.exits:
            (TARGETS | CONTROLS)[name](case)
    except Finding as error:
        finding, key = str(error), error.key
    except kv.CaptureError as error:  # streams that were left captured, at the end
        finding = "" if "captur" in str(error) else repr(error)
    except (MemoryError, OSError) as error:  # of the case's own arrays, after a huge one
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
    except Exception as error:
        lines = traceback.format_exception(error)
        finding = f"{name}: the case failed: {error!r}\n{''.join(lines[-4:])}"
    if verbose and finding:
        traceback.print_exc()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.rmtree(folder, ignore_errors=True)
    raised, accepted = case.raised, case.accepted
    del case
    if number % 8 == 0:
        gc.collect()  # huge arrays in cycles would count against the next case
    return {
        "case": f"{name} {number}", "finding": finding, "key": key, "raised": raised,
        "accepted": accepted, "strict": strict,
    }  # fmt: skip


@contextmanager
def without_compiler(device: Any) -> Iterator[None]:
    """Let operations run by their reference, as where no kernel can be compiled."""

    def refuse(specialisation: Any) -> None:
        raise kv.CompileError(f"{specialisation}: there is no compiler")

    kv.config.fallback, device.load = "warn", refuse
    try:
        yield
    finally:
        del device.load
        kv.ops.call.forget()


def settle_streams(device: Any) -> None:
    """Wait for the streams that earlier cases left, whose failures are not this one's."""
    for stream in list(device._streams.values()):
        if not stream.capturing:
            with suppress(kv.KvcupyError):
                stream.synchronize()
                stream.synchronize()


def serve() -> None:
    """Read the names and numbers of cases from stdin, and write what came of each to stdout.

    A first line says that all is imported.
    """
    out = sys.stdout
    sys.stdout = sys.stderr
    limit_memory()
    gc.freeze()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        name, number = line.split()
        result = run_case(name, int(number)) | {"held": sample()}
        print(json.dumps(result), file=out, flush=True)
