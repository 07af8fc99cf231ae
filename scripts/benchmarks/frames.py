"""Count the Python frames of warm calls: what a call costs before its kernel is launched.

A frame is a call of a Python function in the calling thread, as `sys.setprofile` reports it. Times
of calls this short depend on the machine; the number of frames does not, so that a test can bound
it (`tests/test_frames.py`). Of several warm calls the least count is taken: now and then a call
also releases what earlier ones have left.

    python scripts/bench.py frames --names
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from common.report import format_table

import kvcupy as kv

PACKAGE = Path(kv.__file__).parent
REPEAT = 5


def frames_of(work: Callable[[], object]) -> list[str]:
    """Run `work`; return every Python function that was called, as "file:function"."""
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called[1:]  # without `work` itself


def own(called: list[str]) -> list[str]:
    """Return the frames of kvcupy's own functions, with paths relative to the package.

    Frames of `waiting.py` are left out, as are frames of `threading`, whose classes it replaces.
    """
    prefix, waiting = f"{PACKAGE}/", f"{PACKAGE}/waiting.py:"
    return [
        name.removeprefix(prefix) for name in called
        if name.startswith(prefix) and not name.startswith(waiting)
    ]  # fmt: skip


def store_kv(device: Any) -> Iterator[list[str]]:
    """Store four tokens, with the same arrays each time."""
    key, value = (device.zeros((4, 8, 128), "bf16") for _ in "kv")
    k_cache, v_cache = (device.zeros((64, 16, 8, 128), "bf16") for _ in "kv")
    slots = device.asarray(np.arange(4))
    while True:
        yield frames_of(lambda: kv.store_kv(key, value, k_cache, v_cache, slots))


def attention(device: Any) -> Iterator[list[str]]:
    """Attend in the first layer of a step of one token, which uploads the tables of the step."""
    table = kv.rope_table(4096, 64, device=device)
    cache = kv.PagedKVCache(
        num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64, num_pages=64, rope=table,
        device=device,
    )  # fmt: skip
    cache.add_sequence("sequence")
    with cache.forward(["sequence"], [40]):
        pass
    rows = [device.zeros((1, heads, 64), "bf16") for heads in (8, 2, 2)]
    while True:
        with cache.forward(["sequence"], [1]):
            called = frames_of(lambda: cache.attention(0, *rows))
            cache.attention(1, *rows)
        yield called


def load(device: Any) -> Iterator[list[str]]:
    """Load two pages of four layers, from the host's layout to the device's."""
    sizes = (16, 4, 8, 128)  # page_size, layers, heads, head_dim
    on_device = kv.KVPool(64, *sizes, device=device)
    on_host = kv.KVPool(64, *sizes, layout="page_first", placement="pinned", device=device)
    engine, stream = kv.TransferEngine(on_device, on_host), device.stream()
    src, dst = on_host.allocator.alloc(2), on_device.allocator.alloc(2)
    while True:
        yield frames_of(lambda: engine.load(src, dst, after=stream))


CALLS: dict[str, Callable[[Any], Iterator[list[str]]]] = {
    "store_kv": store_kv,
    "PagedKVCache.attention, first layer of a step": attention,
    "TransferEngine.load, 2 pages of 4 layers": load,
}


def count(device: Any, call: str) -> list[str]:
    """Return the frames of a warm call; where their number varies, of the call with the fewest."""
    calls, samples = CALLS[call](device), []
    for _ in range(2 + REPEAT):  # the first two compile, plan and fill what is kept
        samples.append(next(calls))
        device.synchronize()
    return min(samples[2:], key=lambda called: len(own(called)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", action="store_true", help="which functions, and how often")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for call in CALLS:
        called = count(device, call)
        row = {"call": call, "frames": len(own(called)), "all_frames": len(called)}
        if options.names:
            row["names"] = dict(Counter(own(called)).most_common())
        rows.append(row)
    return {"rows": rows}


def render(report: dict[str, Any]) -> str:
    rows = report["rows"]
    columns = ("warm call", "frames of kvcupy", "all")
    text = format_table(columns, [(row["call"], row["frames"], row["all_frames"]) for row in rows])
    for row in rows:
        if "names" in row:
            text += f"\n\n{row['call']}\n\n"
            text += format_table(("function", "calls"), list(row["names"].items()))
    return text
