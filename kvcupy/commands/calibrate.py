"""Measure which method of a transfer is the fastest on a device, for `method="auto"` to go by.

Measured are scattered pieces of one size, by kernel and by copy engine, over a grid of sizes and
counts; how few blocks of the kernel keep the link busy; and whether staging short pieces pays. Each
device model has a JSON file in the folder of the kernel cache: {"device", "date", "measured", and
for either direction the fields of `ops.transfer.Thresholds`}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from .. import devices
from ..cache.pool import KVPool
from ..devices import cache
from ..devices.protocol import Device, Stream
from ..errors import DeviceError
from ..formats import Method, Placement, PoolLayout
from ..ops import transfer
from ..ops.transfer import NEVER, PagePairs
from ..ops.transfer_kernels import link_blocks
from ..progress import Progress

PIECES = (8, 16, 64, 256, 1024, 4096)
PIECE_BYTES = (256, 1024, 4096, 16384, 28672, 65536, 262144, 1048576)
BLOCKS = (1, 2, 4, 8, 16)
_MAX_CASE_BYTES = 64 << 20
_ROUNDS = 5
_NEARLY = 0.95  # of the best bandwidth is as good


def main(device_name: str | None, *, quick: bool = False, lines: bool = False) -> int:
    """Measure, print the thresholds, and store them; return an exit status."""
    try:
        device = devices.get(device_name)
    except (ValueError, DeviceError) as error:
        print(f"calibrate: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    if complaint := cache.complaint():
        print(f"calibrate: {complaint} (KVCUPY_CACHE_DIR names another folder)", file=sys.stderr)
        return 2
    print(f"calibrating {device.name} ({device.model})", flush=True)
    with Progress("calibrate", 100, "percent", lines=lines) as bar:
        try:
            calibration = measure(
                device, quick=quick, progress=lambda share, now: bar.to(round(100 * share), now)
            )
        except KeyboardInterrupt:
            print("stopped: nothing is kept of this calibration", file=sys.stderr)
            raise
    file = save(device.model, calibration)
    transfer.forget_thresholds()
    print(describe(calibration))
    print(f"kept in {file}")
    return 0


def measure(
    device: Device, *, quick: bool = False, progress: Callable[[float, str], None] = lambda *_: None
) -> dict[str, Any]:
    """Return the calibration of a device; `progress` gets the fraction done and what is next."""
    pieces, sizes = (PIECES[1::3], PIECE_BYTES[1::3]) if quick else (PIECES, PIECE_BYTES)
    calibration: dict[str, Any] = {
        "device": device.model,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "measured": {},
    }
    stream = device.stream()
    for i, direction in enumerate(("to_device", "to_host")):
        times: list[dict[str, float]] = []
        cases = [(n, size) for n in pieces for size in sizes if n * size <= _MAX_CASE_BYTES]
        for j, (n, size) in enumerate(cases):
            progress((i + j / len(cases)) / 2, f"{direction}: {n} pieces of {size} bytes")
            times.append(_time_pieces(device, direction, n, size, stream))
        calibration[direction] = {
            "copy_from_bytes": crossovers(times),
            "staged": _staging_wins(device, direction, stream),
            "blocks": _fewest_blocks(device, direction, stream),
        }
        calibration["measured"][direction] = times
    progress(1.0, "done")
    return calibration


def crossovers(times: list[dict[str, float]]) -> list[tuple[int, int]]:
    """Return, by number of pieces, from how many bytes a piece the copy engine is better.

    It is the size with the least product of times over all sizes, so that one disturbed measurement
    does not move it far.
    """
    by_pieces = []
    for pieces in sorted({int(t["pieces"]) for t in times}):
        own = [t for t in times if t["pieces"] == pieces]

        def cost(from_bytes: int, own: list[dict[str, float]] = own) -> float:
            return sum(log(t["copy" if t["bytes"] >= from_bytes else "kernel"]) for t in own)

        sizes = sorted(int(t["bytes"]) for t in own)
        by_pieces.append((pieces, min([*sizes, NEVER], key=cost)))
    return by_pieces


def describe(calibration: dict[str, Any]) -> str:
    """Return the thresholds of a calibration as a table."""
    lines = [f"{'direction':10} {'pieces':>8}  copy engine from"]
    for direction in ("to_device", "to_host"):
        own = calibration[direction]
        for pieces, num_bytes in own["copy_from_bytes"]:
            text = "never" if num_bytes >= NEVER else f"{num_bytes} bytes a piece"
            lines.append(f"{direction:10} {pieces:8}  {text}")
        staged = "staged" if own["staged"] else "by the kernel"
        lines.append(f"{direction:10} {'':8}  short pieces {staged}, {own['blocks']} blocks")
    return "\n".join(lines)


def save(model: str, calibration: dict[str, Any]) -> Path:
    """Store a calibration, in place of an earlier one; return its file, or raise OSError."""
    file = transfer.calibration_file(model)
    cache.write_file(file, json.dumps(calibration, indent=1).encode())
    return file


def stored() -> list[dict[str, Any]]:
    """Return the calibrations of all devices."""
    files = sorted(cache.directory().glob("calibration-*.json"))
    return [content for file in files if (content := transfer.parse_calibration(file))]


def _time_pieces(
    device: Device, direction: str, pieces: int, size: int, stream: Stream
) -> dict[str, float]:
    """Return the time of scattered pieces by either method, in us."""
    num_pages = max(1, pieces // 2)  # K and V are separate pieces
    src, dst = _pools(direction, device, 2 * num_pages, 1, 1, size, "layer_first")
    pages = 2 * np.random.default_rng(0).permutation(num_pages)  # no two are neighbours
    times = {m: _time(src, dst, pages, stream, method=m) for m in ("kernel", "copy")}
    return {"pieces": float(pieces), "bytes": float(size), **times}


def _fewest_blocks(device: Device, direction: str, stream: Stream) -> int:
    """Return the fewest blocks that come near the best bandwidth."""
    src, dst = _pools(direction, device, 4096, 1, 1, 2048, "layer_first")
    pages = 2 * np.random.default_rng(0).permutation(2048)
    choices = [n for n in BLOCKS if n <= device.sm_count]
    times = [_time(src, dst, pages, stream, method="kernel", max_blocks=n) for n in choices]
    # A device of few SMs has none to spare, whatever is faster.
    most = max(link_blocks(device), device.sm_count // 8)
    return next(
        n for n, us in zip(choices, times, strict=True) if n >= most or us * _NEARLY <= min(times)
    )


def _staging_wins(device: Device, direction: str, stream: Stream) -> bool:
    """Return whether pages of a page-first pool are faster by way of the staging buffer."""
    src, dst = _pools(direction, device, 64, 16, 8, 1024, "page_first")
    pages = 2 * np.random.default_rng(0).permutation(32)
    times = [_time(src, dst, pages, stream, method=m) for m in ("kernel", "staged")]
    return times[1] < _NEARLY * times[0]


def _pools(
    direction: str, device: Device, num_pages: int, page_size: int, num_layers: int, width: int,
    host_layout: PoolLayout,
) -> tuple[KVPool, KVPool]:  # fmt: skip
    sides: list[tuple[PoolLayout, Placement]]
    sides = [("layer_first", "device"), (host_layout, "pinned")]
    near, far = (
        KVPool(num_pages, page_size, num_layers, 1, width, dtype="int8", layout=layout,
               placement=placement, device=device)
        for layout, placement in sides
    )  # fmt: skip
    return (far, near) if direction == "to_device" else (near, far)


def _time(
    src: KVPool, dst: KVPool, pages: np.ndarray[Any, Any], stream: Stream, *, method: Method,
    max_blocks: int | None = None,
) -> float:  # fmt: skip
    """Return the least time of several rounds, in us, by events on the stream."""
    prepared = transfer.prepare(src, dst, method=method, max_blocks=max_blocks)
    pairs = PagePairs(pages, pages)
    prepared.issue(pairs, stream)  # compiles, and borrows its buffers
    start, end = (src.device.event(timing=True) for _ in range(2))
    times = []
    for _ in range(_ROUNDS):
        stream.record(start)
        prepared.issue(pairs, stream)
        stream.record(end)
        times.append(end.elapsed_us(start))
    return min(times)
