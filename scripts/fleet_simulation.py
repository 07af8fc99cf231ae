r"""Simulate a trace on 1 to 1,000 nodes over one shared store, and say what breaks first.

Hit rates by tier, bytes over the network for each token, and metadata queries per second, as the
fleet grows; with a node that dies in the middle, a store that is full, and requests routed by turns
or to the node that knows their prefix. Simulation only: nothing is moved. What one node can do is
read from the results of this repository's benchmarks, measured on one machine; with it follows how
much faster than the trace requests may come before the first resource is used up.

    python scripts/fleet_simulation.py --trace trace.jsonl --json build/fleet.json \
        --plot build/fleet.png
    python scripts/fleet_simulation.py --nodes 1 10 --limit 2000

Every number of nodes serves the same trace. Equal arguments give equal numbers.

    router     sends each request to a node
    node       a `TierSimulation`: with its own device and host memory
    store      the blocks of all nodes, on a hash ring of its parts; least recently used leave first

A request's leading blocks are found in the node's tiers, then in the store, as many of them as
`TieredCache(shared_prefetch=)` lets through; the others are computed, and put. A fetched block
becomes a block of the node like a computed one. Requests come one after another, so that a
block is in the store when the next one asks for it: a real store is never better.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import charts
from replay.requests import BLOCK_TOKENS, add_trace_arguments, facts_of, requests_of
from replay.simulation import TIERS, Sizes, TierSimulation, hit_rates

from kvcupy.bench import frame
from kvcupy.bench.frame import count
from kvcupy.bench.models import MODELS
from kvcupy.bench.report import format_table

RESULTS = Path(__file__).resolve().parent / "results"
NODES = (1, 4, 16, 64, 256, 1000)
NETWORK_GB_PER_S = 10.0  # of a node, by default: 100 Gbit/s less the overhead of protocols
QUERY_US = 20.0  # of a metadata server, for each request, by default


WRITES = ("through", "second_use")
ROUTES = ("turns", "prefix")
CROWDED = 1.5  # times the mean load, from which a node gets no request for its prefix alone


@dataclass(frozen=True)
class Fleet:
    """A fleet of nodes, and its store.

    Attributes
    ----------
    nodes : how many
    sizes : blocks of each node
    store : blocks that the shared store holds; 0: no store; None: all
    route : "turns", or "prefix": to the node that last served the longest part of it, unless that
        has had half as many requests again as the others
    write : "through": what is computed is put; "second_use": what a node uses a second time
    share : of a node's host memory, which blocks that are fetched for one request may take
    dead : the request at which the first node and its part of the store die, or None
    mourning_s : how long puts into that part fail, and lookups find nothing there, before its place
        on the ring is given to others
    """

    nodes: int
    sizes: Sizes
    store: int | None = None
    route: str = "turns"
    write: str = "through"
    share: float = 0.25
    dead: int | None = None
    mourning_s: float = 10.0


@dataclass
class FleetResult:
    """The result of a simulation.

    Attributes
    ----------
    counts : blocks: hit.device, hit.host, hit.disk, hit.shared, missed; fetched, put, known (puts
        of what the store has), refused (no part was available), evicted (from the store); requests;
        queries (of metadata: one for a request whose blocks are not all in the node's tiers, and
        one for its puts)
    served : requests of each node
    windows : of each tenth of the requests, blocks asked for and found
    """

    counts: Counter[str] = field(default_factory=Counter)
    served: list[int] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)


class Store:
    """Blocks by id on the parts of a store, one for each node."""

    def __init__(self, capacity: int | None, parts: int) -> None:
        self.capacity, self.parts = capacity, parts
        self.blocks: OrderedDict[int, int] = OrderedDict()  # the part of each, latest use last
        self.dead: int | None = None
        self.mourned = False  # its place has been given to others
        self.evicted = 0

    def part_of(self, block: int) -> int:
        digest = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        part = number % self.parts
        if part == self.dead and self.mourned and self.parts > 1:
            others = [other for other in range(self.parts) if other != self.dead]
            part = others[(number >> 20) % len(others)]
        return part

    def leading(self, ids: Sequence[int]) -> int:
        """Return how many leading blocks it has, and count them as used."""
        for number, block in enumerate(ids):
            if block not in self.blocks:
                return number
            self.blocks.move_to_end(block)
        return len(ids)

    def put(self, block: int) -> str:
        if block in self.blocks:
            self.blocks.move_to_end(block)
            return "known"
        part = self.part_of(block)
        if self.capacity == 0 or part == self.dead:
            return "refused"
        self.blocks[block] = part
        if self.capacity is not None and len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
            self.evicted += 1
        return "put"

    def lose(self, part: int) -> None:
        """Lose a part, and a part of the capacity with it."""
        self.dead = part
        for block in [block for block, of in self.blocks.items() if of == part]:
            del self.blocks[block]
        if self.capacity is not None:
            self.capacity -= self.capacity // self.parts


class Router:
    """Sends requests to nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self.route, self.alive = fleet.route, list(range(fleet.nodes))
        self.served = [0] * fleet.nodes
        self._turn = 0
        self._last: dict[int, int] = {}  # by block, the node that has served it last

    def node_for(self, ids: Sequence[int]) -> int:
        node = None
        if self.route == "prefix":
            node = self._nearest(ids)
        if node is None:
            node = self.alive[self._turn % len(self.alive)]
            self._turn += 1
        self.served[node] += 1
        if self.route == "prefix":
            self._last.update(dict.fromkeys(ids, node))
        return node

    def _nearest(self, ids: Sequence[int]) -> int | None:
        mean = sum(self.served) / len(self.served)
        for block in reversed(ids):
            if (node := self._last.get(block)) is not None and node in self.alive:
                return node if self.served[node] <= CROWDED * mean + 1 else None
        return None

    def bury(self, node: int) -> None:
        if len(self.alive) > 1:
            self.alive.remove(node)


def simulate_fleet(requests: Sequence[tuple[float, Sequence[int]]], fleet: Fleet) -> FleetResult:
    """Serve requests, (seconds, hash ids) of each, one after another."""
    nodes = [TierSimulation(fleet.sizes) for _ in range(fleet.nodes)]
    used: list[set[int]] = [set() for _ in nodes]  # by node, what it has served before
    store, router = Store(fleet.store, fleet.nodes), Router(fleet)
    result, counts = FleetResult(), Counter[str]()
    died_s: float | None = None
    most_fetched = max(1, int(fleet.share * fleet.sizes.host))
    window = max(1, -(-len(requests) // 10))
    asked = found = 0
    for number, (now_s, all_ids) in enumerate(requests):
        if number == fleet.dead:
            died_s = now_s
            store.lose(0)
            router.bury(0)
            nodes[0], used[0] = TierSimulation(fleet.sizes), set()
        if died_s is not None and now_s > died_s + fleet.mourning_s:
            store.mourned = True
        ids = all_ids[: fleet.sizes.longest]
        place = router.node_for(ids)
        node = nodes[place]
        in_tiers = node.match(ids)
        known = node.acquire(ids)
        if known is None:
            raise AssertionError("a request is longer than a node's memory")
        rest = list(ids[len(known) :])
        in_store = 0
        if rest and fleet.store != 0:
            counts["queries"] += 1
            in_store = min(store.leading(rest), most_fetched)
        if not node.make_room(len(rest)):
            raise AssertionError("a request is longer than a node's memory")
        node.insert(rest)
        node.release([*known])
        computed = rest[in_store:]
        new = computed
        if fleet.write == "second_use":
            new = [block for block in ids if block in used[place] and block not in store.blocks]
            used[place].update(ids)
        if new and fleet.store != 0:
            counts["queries"] += 1
            counts.update(store.put(block) for block in new)
        for tier, hits, above in zip(TIERS, in_tiers, (0, *in_tiers), strict=False):
            counts[f"hit.{tier}"] += hits - above
        counts["hit.shared"] += in_store
        counts["fetched"] += in_store
        counts["missed"] += len(computed)
        counts["requests"] += 1
        asked += len(ids)
        found += len(ids) - len(computed)
        if (number + 1) % window == 0 or number + 1 == len(requests):
            result.windows.append((asked, found))
            asked = found = 0
    counts["evicted"] = store.evicted
    result.counts, result.served = counts, router.served
    return result


# The report ---------------------------------------------------------------------------------------


def measured_costs(folder: Path) -> dict[str, Any]:
    """Read what one node can do from the results of benchmarks; None where it was not measured."""
    costs: dict[str, Any] = dict.fromkeys(
        ("load_gb_per_s", "save_gb_per_s", "store_get_gb_per_s", "store_put_gb_per_s")
    )
    try:
        peaks = json.loads((folder / "bench_transfer_host.json").read_text())["peak_gb_per_s"]
        costs["load_gb_per_s"], costs["save_gb_per_s"] = peaks["to device"], peaks["to host"]
    except (OSError, KeyError):
        pass
    try:
        rows = json.loads((folder / "bench_shared_host.json").read_text())["rows"]
        case = {"candidate": "shm", "block_kib": 2048, "batch": 32, "layout": "page_first_direct"}
        (row,) = [row for row in rows if case.items() <= row.items()]
        costs |= {f"store_{call}_gb_per_s": row[f"{call}_gb_per_s"] for call in ("get", "put")}
    except (OSError, KeyError, ValueError):
        pass
    return costs


def point_of(
    fleet: Fleet, result: FleetResult, arguments: argparse.Namespace, *,
    seconds: float, tokens: int, costs: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the report of one simulated fleet."""
    counts = result.counts
    block_bytes = block_bytes_of(arguments.model)
    fetched, put = counts["fetched"] * block_bytes, counts["put"] * block_bytes
    loaded = (counts["hit.host"] + counts["fetched"]) * block_bytes
    busiest = max(result.served) / max(1, counts["requests"])  # of all requests
    rates = {  # share of what there is that the trace takes at its own speed
        "network of the busiest node": (fetched + put) * busiest / seconds
        / (arguments.network_gb_per_s * 1e9),
        "metadata server": counts["queries"] / seconds * arguments.query_us / 1e6,
    }  # fmt: skip
    if costs["store_get_gb_per_s"] and costs["store_put_gb_per_s"]:
        rates["the store's thread of the busiest node"] = (
            busiest
            / seconds
            / 1e9
            * (fetched / costs["store_get_gb_per_s"] + put / costs["store_put_gb_per_s"])
        )
    if costs["load_gb_per_s"]:
        rates["host to device of the busiest node"] = (
            loaded * busiest / seconds / (costs["load_gb_per_s"] * 1e9)
        )
    first = max(rates, key=lambda name: rates[name])
    used = rates[first]  # 0 where nothing is moved or asked
    return {
        "nodes": fleet.nodes, "route": fleet.route, "write": fleet.write,
        "store_blocks": fleet.store, "dead_at": fleet.dead,
        "counts": dict(sorted(counts.items())), "hit_rate": hit_rates(counts, (*TIERS, "shared")),
        "windows": [found / max(1, asked) for asked, found in result.windows],
        "busiest_share": busiest,
        "network_bytes_per_token": (fetched + put) / max(1, tokens),
        "fetched_bytes_per_token": fetched / max(1, tokens),
        "put_bytes_per_token": put / max(1, tokens),
        "queries_per_s": counts["queries"] / seconds,
        "used": rates, "breaks_first": first if used else None,
        "speed_at_break": 1 / used if used else None,
    }  # fmt: skip


def block_bytes_of(model: str) -> int:
    of = MODELS[model]
    return 2 * 2 * of.layers * of.kv_heads * of.head_dim * BLOCK_TOKENS


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    requests = requests_of(arguments.trace, arguments.limit, arguments.seed)
    timed = [(request.timestamp / 1e3, request.hash_ids) for request in requests]
    seconds = max(1e-3, timed[-1][0] - timed[0][0])
    tokens = sum(request.input_length for request in requests)
    sizes = Sizes(arguments.device_blocks, arguments.host_blocks)
    costs = measured_costs(arguments.costs)
    points: dict[str, list[dict[str, Any]]] = {}

    def add(group: str, fleet: Fleet) -> None:
        result = simulate_fleet(timed, fleet)
        report = point_of(fleet, result, arguments, seconds=seconds, tokens=tokens, costs=costs)
        points.setdefault(group, []).append(report)
        print(f"{group}, {fleet.nodes} nodes: {report['hit_rate']['total']:.2%}", file=sys.stderr)

    whole = Fleet(1, sizes, arguments.store_blocks)
    for nodes in arguments.nodes:
        for route in ROUTES:
            add("no store", replace(whole, nodes=nodes, store=0, route=route))
            add("store", replace(whole, nodes=nodes, route=route))
    some = replace(whole, nodes=sorted(arguments.nodes)[len(arguments.nodes) // 2])
    for store in (arguments.store_blocks // 16, arguments.store_blocks // 4, None):
        add("size of the store", replace(some, store=store))
    for write in WRITES:
        for route in ROUTES:
            add("when blocks are put", replace(some, write=write, route=route))
    add("a node dies", some)
    add("a node dies", replace(some, dead=len(timed) // 2))
    facts = facts_of(requests, arguments)
    return {
        **facts, "seconds": seconds, "tokens": tokens,
        "bound": 1 - facts["distinct_blocks"] / max(1, facts["blocks"]),
        "model": arguments.model, "block_bytes": block_bytes_of(arguments.model),
        "device_blocks": sizes.device, "host_blocks": sizes.host,
        "assumed": {
            "network_gb_per_s": arguments.network_gb_per_s, "query_us": arguments.query_us,
        },
        "measured": costs, "points": points,
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    lines = [
        f"{report['trace']}: {report['requests']} requests in {report['seconds']:.0f} s, "
        f"{report['blocks']} blocks, {report['distinct_blocks']} distinct: at most "
        f"{report['bound']:.2%} can be hits. Each node: {report['device_blocks']} blocks on the "
        f"device, {report['host_blocks']} in host memory. Simulated.",
    ]
    for group, points in report["points"].items():
        rows = []
        for point in points:
            rates = point["hit_rate"]
            store = point["store_blocks"]
            rows.append((
                point["nodes"], point["route"], point["write"],
                "all" if store is None else store, point["dead_at"],
                *(f"{rates[tier]:.2%}" for tier in (*TIERS[:2], "shared", "total")),
                f"{point['network_bytes_per_token'] / 1e3:,.1f}",
                f"{point['queries_per_s']:.2f}",
                point["breaks_first"],
                None if point["speed_at_break"] is None else f"{point['speed_at_break']:,.1f}",
            ))  # fmt: skip
        columns = ("nodes", "route", "write", "store", "dies at", *TIERS[:2], "shared", "any",
                   "network kB per token", "queries/s", "breaks first", "at speed")  # fmt: skip
        lines += ["", group, "", format_table(columns, rows)]
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw hit rates and network bytes over the number of nodes."""
    figure, (rates, network) = charts.panels_of(1, 2, (11, 4.6))
    colours = {"no store": "#8C8C8C", "store": "#B4436C"}
    for group, colour in colours.items():
        for route, style in zip(ROUTES, ("-", "--"), strict=True):
            points = [p for p in report["points"][group] if p["route"] == route]
            nodes = [p["nodes"] for p in points]
            totals = [100 * p["hit_rate"]["total"] for p in points]
            label = f"{group}, by {route}"
            rates.plot(nodes, totals, style, color=colour, marker=".", label=label)
            if group == "store":
                moved = [p["network_bytes_per_token"] / 1e3 for p in points]
                network.plot(nodes, moved, style, color=colour, marker=".", label=label)
    rates.axhline(100 * report["bound"], color="#444444", linewidth=0.8)
    rates.set(ylabel="hits, % of blocks; line: bound", ylim=(0, None))
    network.set(ylabel="kB over the network per token", ylim=(0, None))
    for axes in (rates, network):
        axes.set(xlabel="nodes", xscale="log")
        axes.legend(frameon=False)
        charts.tidy(axes)
    title = f"{report['trace']}, simulated: {report['requests']} requests on 1 to 1,000 nodes"
    charts.save(figure, path, title)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace_arguments(parser, device_blocks=1000, host_blocks=5000, scaled=False)
    add("--nodes", type=count, nargs="+", default=list(NODES))
    add("--store-blocks", type=count, default=100_000, help="of the store, of all nodes")
    add("--network-gb-per-s", type=float, default=NETWORK_GB_PER_S, help="of a node, assumed")
    add("--query-us", type=float, default=QUERY_US, help="of the metadata server, assumed")
    add("--costs", type=Path, default=RESULTS, help="folder of measured results of one node")
    add("--plot", type=Path, help="draw a chart (PNG)")


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False, has_quick=False)


if __name__ == "__main__":
    sys.exit(main())
