r"""Replay a trace of requests through a tiered cache, and compare every byte that it loads.

Each request's prefix blocks are looked up on the device, in host memory and on disk. Hits are
loaded layer by layer, and a stream that stands for the model compares each layer with the contents
that the block's hash determines. Misses are written and inserted. A simulation of hash ids alone
says which blocks each tier should have held.

    python scripts/replay_trace.py --plot build/replay.png
    python scripts/replay_trace.py --trace trace.jsonl --device-blocks 1000 --host-blocks 5000 \
        --disk-blocks 30000 --json build/replay.json

Pages have a model's shape, each size divided by --scale; one page is one block of 512 tokens of the
trace. Equal arguments give equal counts, except with --eager; times differ. The exit status is 1 if
a byte was wrong, and 130 after Ctrl-C, which closes the cache and prints the progress so far.

--mix serves the trace by a small model of mixed layers, twice: with the blocks and states of its
groups in tiers, and without tiers. Tokens must be equal, and what the tiers restore is compared
with what the other service computes.

    python scripts/replay_trace.py --mix window,state,window,full --scale 128 --disk-blocks 1000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common.one_core  # noqa: F401
from common import frame
from common.measure import log_compilation, one_core_per_stream, require_products
from common.models import MODELS
from replay.mixed import CHUNK_BLOCKS, MixedReplay, MixedSettings, mixed_point, render_mixed
from replay.report import (
    draw_over_time,
    point_of,
    render_point,
    sizes_of,
)
from replay.requests import (
    BLOCK_TOKENS,
    Request,
    add_trace_arguments,
    facts_of,
    requests_of,
)
from replay.run import Replay, Settings, scaled_shape
from replay.simulation import Sizes, simulate
from serving.llama import KINDS, STATE

from kvcupy.progress import Progress, count

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def serve(running: Replay | MixedReplay, what: str, requests: Sequence[Request]) -> Any:
    """Serve requests, close what serves them, and return the outcome."""
    with Progress(what, len(requests), "requests", lines=True) as progress:
        try:
            return running.run(requests, each=progress.to)
        except KeyboardInterrupt:
            print(stopped(running, progress.done, len(requests)), file=sys.stderr)
            raise
        finally:
            running.close()


def replay(device: Any, settings: Settings, requests: Sequence[Request]) -> dict[str, Any]:
    """Replay once and return the report of that."""
    ids = [request.hash_ids for request in requests]
    simulated = simulate(ids, settings.sizes, settings.write, running=settings.running)
    with tempfile.TemporaryDirectory(prefix="kvcupy-replay-") as folder:
        running = Replay(device, replace(settings, disk=Path(folder) / "blocks"))
        outcome = serve(running, f"written {settings.write}", requests)
    return point_of(settings, outcome, simulated)


def replay_mixed(
    device: Any, settings: MixedSettings, requests: Sequence[Request]
) -> dict[str, Any]:
    """Serve requests by a model of mixed layers and return the report of that."""
    with tempfile.TemporaryDirectory(prefix="kvcupy-replay-") as folder:
        running = MixedReplay(device, replace(settings, disk=Path(folder) / "blocks"))
        serve(running, f"written {settings.write}", requests)
    return mixed_point(running)


def stopped(interrupted: Replay | MixedReplay, done: int, total: int) -> str:
    """Return a line on a replay that was interrupted."""
    counts = interrupted.outcome.counts
    return (
        f"stopped after {done} of {total} requests: {counts['checked_bytes']} bytes compared, "
        f"{counts['wrong_bytes']} wrong; there is no report"
    )


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Replay a trace; return the report."""
    requests = requests_of(arguments.trace, arguments.limit, arguments.seed)
    sizes = Sizes(arguments.device_blocks, arguments.host_blocks, arguments.disk_blocks)
    if arguments.mix:
        return run_mixed(device, arguments, requests, sizes)
    shape = scaled_shape(MODELS[arguments.model], BLOCK_TOKENS, arguments.scale)
    settings = Settings(
        sizes, shape, write=arguments.write, running=arguments.running,
        eager=arguments.eager, host_layout=arguments.host_layout,
    )  # fmt: skip
    with one_core_per_stream(device):
        point = replay(device, settings, requests)
    return {
        **facts_of(requests, arguments),
        "model": arguments.model,
        "scale": arguments.scale,
        "page_bytes": shape.page_bytes,
        "layers": shape.layers,
        "page_tokens": shape.tokens,
        "host_layout": settings.host_layout,
        "running": settings.running,
        "eager": settings.eager,
        "write": settings.write,
        **sizes_of(sizes),
        "point": point,
    }


def run_mixed(
    device: Any, arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:  # fmt: skip
    """Serve a trace by a model of mixed layers; return the report."""
    require_products(device)
    settings = MixedSettings(arguments.mix, arguments.scale, sizes, write=arguments.write)
    with one_core_per_stream(device):
        point = replay_mixed(device, settings, requests)
    return {
        **facts_of(requests, arguments),
        "mix": settings.kinds,
        "scale": arguments.scale,
        "page_tokens": settings.page_tokens,
        "window": settings.window,
        "checkpoint_tokens": settings.interval * settings.page_tokens,
        "chunk_tokens": CHUNK_BLOCKS * settings.page_tokens,
        "longest_blocks": sizes.device,
        "point": point,
    }


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without what is drawn over time."""
    return {**report, "point": {k: v for k, v in report["point"].items() if k != "series"}}


def render(report: dict[str, Any]) -> str:
    trace = (
        f"{report['trace']}: {report['requests']} requests, {report['blocks']} blocks, "
        f"{report['distinct_blocks']} of them distinct\n"
    )
    if "mix" in report:
        lines = [
            f"{trace}layers: {', '.join(report['mix'])}; pages of {report['page_tokens']} tokens, "
            f"windows of {report['window']}, states kept every {report['checkpoint_tokens']}; "
            f"written {report['point']['write']}",
            render_mixed(report["point"]),
        ]
        return "\n\n".join(lines)
    lines = [
        f"{trace}{report['model']} / {report['scale']}: pages of {report['page_tokens']} tokens, "
        f"{report['layers']} layers, {report['page_bytes']} bytes; written {report['write']}",
        render_point(report["point"]),
    ]
    return "\n\n".join(lines)


def problems(report: dict[str, Any]) -> list[str]:
    """Return a line for wrong bytes, and one, of mixed layers, for other hits."""
    point = report["point"]
    lines = ["wrong bytes"] if point.get("wrong") else []
    if "mix" in report and point["requests_as_simulated"] < point["counts"]["requests"]:
        lines.append("other hits than simulated")
    return lines


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a replay over time."""
    what = f"{report['trace']}, {report['requests']} requests"
    draw_over_time(report["point"], path, f"{what}: written {report['write']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace_arguments(parser, device_blocks=128, host_blocks=512)
    add("--disk-blocks", type=int, default=0, help="in a temporary file; default: no disk")
    add("--host-layout", choices=LAYOUTS, default="page_first")
    add("--write", choices=("through", "back"), default="through")
    add("--running", type=count, default=1, help="requests whose leases are held at a time")
    add("--eager", action="store_true", help="insert without waiting; hits then vary a little")
    add("--plot", type=Path, help="draw a chart (PNG)")
    add("--mix", type=kinds_of, metavar="KINDS",
        help="serve by a model whose layers are of these kinds, such as window,state,full; "
        "--device-blocks are the most of a request then")  # fmt: skip


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with an error where options do not fit each other."""
    for name in ("eager", "plot"):
        if arguments.mix and getattr(arguments, name):
            parser.error(f"--{name}: not with --mix")


def kinds_of(text: str) -> tuple[str, ...]:
    """Read the kinds of layers."""
    kinds = tuple(text.split(","))
    if not set(kinds) <= set(KINDS) or set(kinds) <= {STATE}:
        raise argparse.ArgumentTypeError(
            f"expected kinds out of {', '.join(KINDS)}, not {STATE} alone, got {text}"
        )
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_quick=False)


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
