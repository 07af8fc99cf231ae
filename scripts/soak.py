"""Soak the caches in random serving traffic, and compare what they hold with what they must hold.

Three servers take steps in turn: a bf16 cache, one of fp8 with a scale per token and head and keys
that are rotated in attention, and one of MLA's latents, each with a host tier and a disk tier, or
with --shared a shared store in its place. With --past there is one more, whose old tokens are in
nvfp4; its rows are such that this format holds them exactly. With --mixed there is one whose layers
differ: a window, full attention and a recurrent state, in tiers by groups. They admit requests on
cached prefixes, prefill in chunks, decode by calls and by captured graphs, fork, search with beams,
verify token trees, slide windows, fail in the middle of steps, preempt by offload and by
recomputation, cancel, evict, save, load and restart. After every step each page has the owners that
it must have; sampled sequences hold the bits that follow from their tokens, and sampled outputs of
attention are compared with float64.

    python scripts/soak.py --steps 3000
    python scripts/soak.py --seconds 600 --seed 7 --json build/soak.json --plot build/soak.png
    python scripts/soak.py --shared --past --mixed

A server of 25 ms per step takes 144,000 steps in an hour. The exit status is 1 if something was
wrong, or if memory, threads, files or Python's blocks have grown after the warm-up by more than
their slack. The warm-up ends when as many plans of calls are kept as ever are; a run of 3,000 steps
is too short for that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common.one_core  # noqa: F401
from common import frame
from common.measure import log_compilation
from common.report import format_table
from soaking.audit import Broken
from soaking.contents import PAST, VARIANTS
from soaking.mixed import MixedServer
from soaking.resources import SLACK, Sample, beyond_slack, draw, growth, sample, warm_up
from soaking.server import Server

from kvcupy.errors import KvcupyError
from kvcupy.progress import Progress

HOUR_STEPS, STEP_MS = 144_000, 25
SAMPLES = 400  # at most: their own memory is part of what is measured


def take_sample(servers: Sequence[Server], step: int, folder: Path) -> Sample:
    pages: Counter[str] = Counter()
    for server in servers:
        pages.update(server.pages())
    files = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    return {"step": step, **sample(), **pages, "disk_bytes": sum(files)}


def soak(
    device: Any, arguments: argparse.Namespace, folder: Path, after_step: Callable[[], object]
) -> dict[str, Any]:
    """Run the servers and return the report.

    Raises
    ------
    Broken : something is not as it must be; the message names server, step and seed
    """
    variants = (*VARIANTS, PAST) if arguments.past else VARIANTS
    start = time.perf_counter()
    common: dict[str, Any] = {"folder": folder, "shared": arguments.shared}
    servers = [Server(device, variant, arguments.seed, **common) for variant in variants]
    if arguments.mixed:
        servers.append(MixedServer(device, arguments.seed, **common))
    sizes: Counter[str] = Counter()
    for server in servers:
        sizes.update(server.sizes)
    opened_s = time.perf_counter() - start
    steps, samples = 0, [take_sample(servers, 0, folder)]
    per_mille = 1000 if arguments.seconds else arguments.steps
    every = max(1, (arguments.steps or 20_000) // SAMPLES)
    start = time.perf_counter()

    def share() -> int:
        if arguments.seconds:
            return int(1000 * (time.perf_counter() - start) / arguments.seconds)
        return steps

    with Progress("soak", per_mille, "steps" if arguments.steps else "per mille") as progress:
        while share() < per_mille:
            server = servers[steps % len(servers)]
            try:
                server.step()
            except (Broken, KvcupyError, ValueError) as error:
                raise Broken(
                    f"{server.variant.name}, step {steps}, seed {arguments.seed}: {error}"
                ) from error
            steps += 1
            after_step()
            if steps % every == 0:
                samples.append(take_sample(servers, steps, folder))
                if len(samples) > SAMPLES:
                    del samples[1::2]
                    every *= 2
                progress.to(min(share(), per_mille))
    seconds = time.perf_counter() - start
    for server in servers:
        server.close()
    grown = growth(samples)
    return {
        "seed": arguments.seed,
        "shared": arguments.shared,
        "past": arguments.past,
        "mixed": arguments.mixed,
        "steps": steps,
        "seconds": seconds,
        "opened_s": opened_s,
        "hours": {"ms_per_step": STEP_MS, "steps": HOUR_STEPS, "hours": steps / HOUR_STEPS},
        "servers": {
            server.variant.name: {
                "counts": dict(sorted(server.counts.items())),
                "blocks": {k: v for k, v in sorted(server.blocks.items()) if not k.endswith("_s")},
            }
            for server in servers
        },
        "sizes": dict(sizes),
        "warm_up_steps": warm_up(samples),
        "slack": SLACK,
        "grown": grown,
        "too_much": beyond_slack(grown),
        "at_first": samples[0],
        "most": {name: max(s[name] for s in samples) for name in samples[0]},
        "at_the_end": samples[-1],
        "samples": samples,
    }


def render(report: dict[str, Any]) -> str:
    """Return what was done and what is held, as tables."""
    servers = report["servers"]
    counts = sorted({name for server in servers.values() for name in server["counts"]})
    rows = [(name, *(server["counts"].get(name, 0) for server in servers.values()))
            for name in counts]  # fmt: skip
    blocks = [
        (name.replace("_", " "), *(server["blocks"].get(name, 0) for server in servers.values()))
        for name in (
            "device_hits",
            "host_hits",
            "disk_hits",
            "shared_hits",
            "misses",
            "inserted",
            "lost",
        )
    ]
    held = [
        (name.replace("_", " "), f"{report['at_first'][name]:,}", f"{report['most'][name]:,}",
         "-" if name not in report["grown"] else f"{report['grown'][name]:+,.0f}", f"{slack:,}")
        for name, slack in report["slack"].items()
    ]  # fmt: skip
    return "\n\n".join([
        f"{report['steps']:,} steps in {report['seconds']:.0f} s: "
        f"{report['hours']['hours']:.2f} hours at {STEP_MS} ms per step",
        format_table(("", *servers), rows),
        format_table(("blocks", *servers), blocks),
        format_table(("", "at first", "most", "after the warm-up", "slack"), held),
    ])  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="steps of all servers together; default: 3000")
    length.add_argument("--seconds", type=float, help="how long, instead")
    add("--seed", type=int, default=0, help="of the traffic")
    add("--shared", action="store_true", help="a shared store in place of each disk tier")
    add("--past", action="store_true", help="one more server, with old tokens in four bits")
    add("--mixed", action="store_true", help="one more server, of a cache with groups of layers")
    add("--plot", type=Path, help="draw memory and pools over steps here (needs matplotlib)")


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.seconds and not arguments.steps:
        arguments.steps = 3000
    with tempfile.TemporaryDirectory() as folder:
        return soak(device, arguments, Path(folder), arguments.after_step)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without what is drawn over steps."""
    return {name: value for name, value in report.items() if name != "samples"}


def plot(report: dict[str, Any], path: Path) -> None:
    title = f"{report['steps']:,} steps of random serving traffic, seed {report['seed']}"
    draw(report["samples"], report["sizes"], path, title)


def problems(report: dict[str, Any]) -> list[str]:
    """Return lines on what has grown too much."""
    return list(report["too_much"])


def main(argv: Sequence[str] | None = None, after_step: Callable[[], object] = lambda: None) -> int:
    """Read the command line and run; `after_step` is called after each step."""
    module = sys.modules[__name__]
    options = frame.parse(module, argv, has_quick=False)
    options.after_step = after_step
    return frame.run("soak", module, options, program="soak")


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
