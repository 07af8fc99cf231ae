"""How the scripts measure, check and report: timing loops, bitwise checks, tables, JSON."""

from __future__ import annotations

import datetime
import json
import logging
import math
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

import kvcupy as kv
from kvcupy import observe, timeline

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
PACKAGES = ("kvcupy", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "torch")


class WrongBytes(Exception):
    """A measured case did not compute what NumPy computes."""


def chosen_device(name: str | None) -> Any:
    """Return the device that --device names, by default a GPU if there is one.

    Raises
    ------
    SystemExit : the name is invalid, or there is no such GPU; status 2, after a line that says so
    """
    try:
        return kv.device(name) if name else kv.default_device()
    except (ValueError, kv.DeviceError) as error:
        print(f"--device: {str(error).splitlines()[0]}", file=sys.stderr)
        raise SystemExit(2) from None


def device_for_products(name: str | None) -> Any:
    """Return the device of that name, or the default one, if it can multiply matrices.

    Raises
    ------
    SystemExit
        CuPy lacks cuBLAS; the message says how to install it.
    """
    device = chosen_device(name)
    square = device.asarray(np.ones((8, 8), np.float32))
    try:
        square.dot(square)
    except ImportError as error:
        raise SystemExit(
            f"{device.name}: this multiplies matrices, for which CuPy needs cuBLAS ({error}). "
            "pip install nvidia-cublas-cu12 beside cupy-cuda12x, or nvidia-cublas beside "
            "cupy-cuda13x; or run it with --device host"
        ) from None
    return device


def log_compilation() -> None:
    """Log on stderr which kernels are compiled, which makes a first run longer."""
    logger = logging.getLogger("kvcupy")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def require_equal(case: str, got: Any, want: Any) -> None:
    """Compare two arrays byte by byte.

    Raises
    ------
    WrongBytes
        They differ; the message names the first byte, both values and the number of bytes.
    """
    if got.shape != want.shape:
        raise WrongBytes(f"{case}: expected shape {want.shape}, got {got.shape}")
    got_bytes = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
    want_bytes = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    wrong = np.flatnonzero(got_bytes != want_bytes)
    if wrong.size:
        at = int(wrong[0])
        index = np.unravel_index(at // want.itemsize, want.shape)
        raise WrongBytes(
            f"{case}: {wrong.size} of {want_bytes.size} bytes differ, the first at byte {at} "
            f"(element {tuple(map(int, index))}): got {got_bytes[at]}, want {want_bytes[at]}"
        )


def wall_us(device: Any, work: Callable[[], object], repeat: int = 1) -> float:
    """Time `repeat` calls of `work` and what they enqueue on the device, in us per call."""
    device.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    device.synchronize()
    return (time.perf_counter() - start) * 1e6 / repeat


def event_us(device: Any, stream: Any, work: Callable[[], object]) -> float:
    """Time what `work` enqueues on `stream`, between two timing events."""
    start, stop = device.event(timing=True), device.event(timing=True)
    stream.record(start)
    work()
    stream.record(stop)
    stop.synchronize()
    return float(stop.elapsed_us(start))


def interleave(
    candidates: dict[str, Callable[[], T]], rounds: int, *, seconds: float = math.inf
) -> dict[str, list[T]]:
    """Measure all candidates round by round, for `rounds` rounds; return what each measured.

    Each candidate times itself. A first round warms up and is not counted. The order rotates from
    round to round, so that a disturbance affects all alike. After `seconds`, three rounds suffice.
    """
    end = time.perf_counter() + seconds
    for measure in candidates.values():
        measure()
    samples: dict[str, list[T]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds):
        if number >= 3 and time.perf_counter() > end:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(candidates[name]())
    return samples


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each candidate's measurements."""
    return {name: median(values) for name, values in samples.items()}


def minima(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return each candidate's least measurement, which other programs disturb least."""
    return {name: min(values) for name, values in samples.items()}


def repeats_for(device: Any, work: Callable[[], object], target_us: float) -> int:
    """Return how many calls of `work` take about `target_us`, at least one."""
    work()
    once_us = wall_us(device, work)
    if once_us < target_us / 4:
        once_us = wall_us(device, work, 4)
    return max(1, int(target_us / max(once_us, 0.1)))


def named_stream(device: Any, name: str) -> Any:
    """Return a new stream whose lane in a timeline is `name`."""
    stream = device.stream()
    stream.name = name
    return stream


@contextmanager
def one_core_per_stream(device: Any) -> Iterator[None]:
    """Limit launches on the host device to one core each, so that another stream has the other."""
    if device.kind != "host":
        yield
        return
    before, device.num_workers = device.num_workers, 1
    try:
        yield
    finally:
        device.num_workers = before


def run_named(
    device: Any,
    name: str,
    function: Callable[[], object],
    stream: Any,
    *,
    reads: tuple[observe.Access, ...] = (),
    writes: tuple[observe.Access, ...] = (),
) -> None:
    """Run array expressions on a stream as an operation that timelines and checkers see."""
    observe.issue(
        lambda: observe.Operation(name, stream, reads, writes),
        lambda: device.run(function, stream),
    )


def captured(stream: Any, work: Callable[[], object]) -> Callable[[], None]:
    """Capture what `work` enqueues on `stream`; return its replay."""
    with stream.capture() as graph:
        work()
    return partial(graph.launch, stream)


def save_timeline(
    device: Any, works: Sequence[Callable[[], None]], out: Path | None, stem: str, title: str
) -> None:
    """Run `works` one after another; save what ran when, as JSON and PNG, if there is a folder."""
    if out is None:
        return
    with timeline() as recorded:
        for work in works:
            work()
            device.synchronize()
    out.mkdir(parents=True, exist_ok=True)
    recorded.save(out / f"{stem}.json")
    recorded.plot(out / f"{stem}.png", title=title)


def length_us(recorded: Any) -> float:
    """Return the time from the first start to the last end in a timeline."""
    spans = recorded.spans
    return float(max(span.end_us for span in spans) - min(span.start_us for span in spans))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return uint16 of random bit patterns, NaNs included."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16)


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a table: the first column to the left, numbers to the right; None is `-`."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def describe(device: Any) -> dict[str, Any]:
    """Return where a result is measured: device, driver, versions, date and commit."""
    return {
        "device": device.name,
        "processor": _processor(),
        "gpu_and_driver": _output(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "dirty": bool(
            _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "*.py", "*.cu*")
        ),
    }


def write_json(path: str | Path, report: dict[str, Any]) -> None:
    """Write a report, and create its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def _output(*command: str) -> str | None:
    """Return what a program prints, None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
