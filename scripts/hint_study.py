r"""Measure what hints change: hits of a tiered cache with and without them, on the same requests.

    python scripts/hint_study.py --json build/hints.json
    python scripts/hint_study.py --trace conversation_trace.jsonl --device-blocks 1000 \
        --host-blocks 5000 --json build/hints.json

The requests come from agents that a fixed seed makes up, or from a trace. Each goes through a real
`TieredCache` of small pages: it acquires its leading blocks and inserts the others, at the time of
the request. Without hints, the hits are compared with a simulation of block numbers alone; the exit
status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.one_core  # noqa: F401
from replay.agents import BLOCK_TOKENS, SUBAGENT_DELAY_S, Turn, sessions
from replay.content import hashes_of
from replay.requests import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from replay.requests import Request, requests_of
from replay.simulation import TIERS, Sizes, simulate

import kvcupy as kv
from kvcupy.bench import frame
from kvcupy.bench.frame import count
from kvcupy.bench.report import format_table
from kvcupy.cache.tiered import cache as cache_module
from kvcupy.cache.tiered import leases as leases_module
from kvcupy.cache.tiered import tiers as tiers_module

EPOCH_S = 1e9
PROMPT_SHARE = 20  # requests that begin with a block, at least, for it to be of a system prompt


class Clock:
    """The module `time` of a cache, at the time of the requests."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return EPOCH_S + self.now


@contextmanager
def clocked() -> Iterator[Clock]:
    """Let caches see the time of the requests."""
    clock, modules = Clock(), (cache_module, leases_module, tiers_module)
    for module in modules:
        module.time = clock  # type: ignore[attr-defined]
    try:
        yield clock
    finally:
        for module in modules:
            module.time = time


Hinter = Callable[[Any, Turn, list[int]], None]  # called after a turn, with its cache and hashes


def announce(
    cache: Any, turn: Turn, hashes: list[int], resume_s: float | None, parent_s: float | None
) -> None:
    """Announce when a session continues, and when others need blocks that it shares."""
    if turn.pause == "sub-agents":
        cache.retain(hashes, resume_at=EPOCH_S + turn.at_s + SUBAGENT_DELAY_S)
    if resume_s is not None:
        cache.retain(hashes, resume_at=EPOCH_S + resume_s)
        return
    cache.release(hashes[turn.num_shared :])
    if parent_s is not None:
        parent_s = max(parent_s, turn.at_s + 1.0)  # overdue
        cache.retain(hashes[: turn.num_shared], resume_at=EPOCH_S + parent_s)


def resume_expected(cache: Any, turn: Turn, hashes: list[int]) -> None:
    """Announce when a session is expected to continue, and release it at its end."""
    announce(cache, turn, hashes, turn.expected_s, turn.parent_expected_s)


def resume_known(cache: Any, turn: Turn, hashes: list[int]) -> None:
    """Announce when a session will continue, to the second."""
    announce(cache, turn, hashes, turn.resumes_s, turn.parent_resumes_s)


def ended_first(cache: Any, turn: Turn, hashes: list[int]) -> None:
    """Announce that a session or sub-agent has ended, and nothing else."""
    if turn.expected_s is None:
        cache.retain(hashes[turn.num_shared :], priority=-1)


def retained_for_minutes(cache: Any, turn: Turn, hashes: list[int]) -> None:
    """Retain every request for five minutes."""
    cache.retain(hashes, ttl_s=300.0)


def prompts_pinned(cache: Any, turn: Turn, hashes: list[int]) -> None:
    """Pin the system prompts."""
    cache.retain(hashes[: turn.num_prompt], pin=True)


def demoted_for_people(cache: Any, turn: Turn, hashes: list[int]) -> None:
    """Demote sessions that wait for a person, or have ended."""
    if turn.pause in (None, "person"):
        cache.demote(hashes[turn.num_shared :])


HINTS: dict[str, Hinter] = {
    "ended: priority -1": ended_first,
    "resume_at, expected": resume_expected,
    "resume_at, exact": resume_known,
    "ttl_s=300": retained_for_minutes,
    "prompts pinned": prompts_pinned,
    "demoted": demoted_for_people,
}
OF_AGENTS = tuple(HINTS)
OF_TRACE = ("ttl_s=300", "prompts pinned", "resume_at, exact")


@dataclass(frozen=True)
class Workload:
    """Requests, and the sizes of the tiers that serve them."""

    name: str
    turns: Sequence[Turn]
    sizes: Sizes
    block_tokens: int
    hints: Sequence[str]

    @property
    def num_distinct(self) -> int:
        """Number of blocks that have to be computed once, without those that no lease can hold."""
        longest = self.sizes.longest
        return len({block for turn in self.turns for block in turn.ids[:longest]})


def turns_of(requests: Sequence[Request]) -> list[Turn]:
    """Return a trace's requests as turns; the next use of the last full block is the next turn."""
    next_use: dict[int, float] = {}
    uses: dict[int, int] = {}
    for request in requests:
        for block in request.hash_ids:
            uses[block] = uses.get(block, 0) + 1
    turns = []
    for request in reversed(requests):
        at_s, ids = request.timestamp / 1e3, request.hash_ids
        full = ids[max(0, len(ids) - 2)]  # the last one may be partial
        resumes = next_use.get(full)
        num_shared = next((i for i, b in enumerate(ids) if uses[b] < PROMPT_SHARE), len(ids))
        pause = None if resumes is None else "person"
        turns.append(Turn(at_s, ids, num_shared, num_shared, pause, resumes, resumes))
        next_use.update(dict.fromkeys(ids, at_s))
    return turns[::-1]


def replay(workload: Workload, policy: str, hint: Hinter | None) -> dict[str, Any]:
    """Send requests through a cache; return its hits by tier, and the hints by outcome."""
    sizes, outcomes = workload.sizes, dict.fromkeys(("accepted", "clipped", "refused"), 0)
    pools = [
        kv.KVPool(n, 1, 1, 1, 4, dtype="fp16", device="host") for n in (sizes.device, sizes.host)
    ]
    cache = kv.TieredCache(*pools, policy=policy)

    class Counted:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **options: Any) -> None:
                outcomes[getattr(cache, name)(*arguments, **options).outcome] += 1

            return call

    counted = Counted()
    with clocked() as clock:
        for turn in workload.turns:
            clock.now = turn.at_s
            hashes = hashes_of(turn.ids[: sizes.longest]).tolist()
            with cache.acquire(hashes, after=False) as lease:
                missing = hashes[lease.num_blocks :]
                if (short := len(missing) - pools[0].allocator.num_free) > 0:
                    cache.evict(short)
                cache.insert(missing, pools[0].allocator.alloc(len(missing)), after=False)
            for stream in (cache.engine.load_stream, cache.engine.save_stream):
                stream.synchronize()
            if hint is not None:
                hint(counted, turn, hashes)
        stats = cache.stats()
        cache.close()
    hits = {tier: int(stats[f"{tier}_hits"]) for tier in TIERS}
    requested = sum(hits.values()) + int(stats["misses"])
    return {
        "hits": hits,
        "requested": requested,
        "hit_rate": {tier: number / requested for tier, number in hits.items()},
        "total": sum(hits.values()) / requested,
        "computed_again": int(stats["misses"])
        - len({i for turn in workload.turns for i in turn.ids}),
        "loaded_blocks": int(stats["load_bytes"]) // pools[0].page_bytes,
        "hints": outcomes,
    }


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure each policy and each kind of hint; return the report."""
    sizes = Sizes(options.device_blocks, options.host_blocks)
    if options.trace is None:
        turns, name = sessions(options.sessions, options.seed), f"agents, seed {options.seed}"
        workload = Workload(name, turns, sizes, BLOCK_TOKENS, OF_AGENTS)
    else:
        turns, name = turns_of(requests_of(options.trace, options.limit)), options.trace.name
        workload = Workload(name, turns, sizes, TRACE_BLOCK_TOKENS, OF_TRACE)
    rows = [{"policy": p, "hint": "none", **replay(workload, p, None)} for p in ("lru", "2q")]
    for name in workload.hints:
        rows.append({"policy": "lru", "hint": name, **replay(workload, "lru", HINTS[name])})
    simulated = simulate([turn.ids for turn in turns], sizes).counts
    total = sum(len(turn.ids[: sizes.longest]) for turn in turns)
    return {
        "workload": workload.name,
        "requests": len(turns),
        "blocks": total,
        "distinct_blocks": workload.num_distinct,
        "unlimited": 1 - workload.num_distinct / total,
        "block_tokens": workload.block_tokens,
        "device_blocks": sizes.device,
        "host_blocks": sizes.host,
        "as_simulated": rows[0]["hits"] == {tier: simulated[f"hit.{tier}"] for tier in TIERS},
        "rows": rows,
    }


def render(report: dict[str, Any]) -> str:
    """Return a table of the hits."""
    rows = []
    for row in report["rows"]:
        rates = [f"{row['hit_rate'][tier]:.2%}" for tier in ("device", "host")]
        total = f"{row['total']:.2%}"
        rows.append((row["policy"], row["hint"], *rates, total, row["computed_again"]))
    columns = ("policy", "hint", "device", "host", "any", "computed again")
    return (
        f"{report['workload']}: {report['requests']} requests, {report['blocks']} blocks of "
        f"{report['block_tokens']} tokens, {report['distinct_blocks']} distinct; device "
        f"{report['device_blocks']}, host {report['host_blocks']}; without limits "
        f"{report['unlimited']:.2%}; as simulated: {report['as_simulated']}\n\n"
        + format_table(columns, rows)
    )


def problems(report: dict[str, Any]) -> list[str]:
    return [] if report["as_simulated"] else ["hits without hints differ from the simulation"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sessions", type=count, default=24, help="of agents")
    add("--seed", type=int, default=0, help="of the sessions")
    add("--device-blocks", type=count, default=8_000)
    add("--host-blocks", type=count, default=16_000)
    add("--trace", type=Path, help="JSON lines; default: sessions of agents")
    add("--limit", type=count, help="requests of the trace, at most")


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False, has_quick=False)


if __name__ == "__main__":
    sys.exit(main())
