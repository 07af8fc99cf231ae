"""The report of a replay, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcupy.bench.report import format_table

from .run import DIRECTIONS, Outcome
from .settings import Settings
from .simulation import TIERS, Simulated, Sizes

# Counts that the simulation has too, which must agree, and their names in the cache's statistics.
COMPARED = {f"hit.{tier}": "" for tier in TIERS} | {"missed": "misses", "inserted": "inserted"}
COMPARED |= {f"evicted.{tier}": f"{tier}_evicted" for tier in TIERS} | {"lost": "lost"}
# Blocks that the simulation moves, and bytes in the cache's statistics.
MOVED = {"loaded": "load", "saved": "save", "disk_read": "disk_read", "disk_written": "disk_write"}


def hit_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the hit rate of each tier, and of all."""
    hits = {tier: counts.get(f"hit.{tier}", 0) for tier in TIERS}
    asked = max(1, sum(hits.values()) + counts.get("missed", 0))
    return {tier: n / asked for tier, n in hits.items()} | {"total": sum(hits.values()) / asked}


def counted(outcome: Outcome, page_bytes: int) -> dict[str, int]:
    """Return the counts of a replay: its own, and those of the cache."""
    own = dict(outcome.counts)
    own |= {name: outcome.stats[key] for name, key in COMPARED.items() if name not in own}
    return own | {name: outcome.stats[f"{key}_bytes"] // page_bytes for name, key in MOVED.items()}


def point_of(settings: Settings, outcome: Outcome, simulated: Simulated | None) -> dict[str, Any]:
    """Return the report of one replay, with the counts of its simulation."""
    moved = {}
    for direction, key in DIRECTIONS.items():
        num_bytes, seconds = (outcome.stats[f"{key}_{unit}"] for unit in ("bytes", "s"))
        gb_per_s = num_bytes / seconds / 1e9 if seconds > 0 else None
        moved[direction] = {"bytes": num_bytes, "seconds": seconds, "gb_per_s": gb_per_s}
    counts = counted(outcome, settings.shape.page_bytes)
    point = {
        "policy": settings.policy,
        "write": settings.write,
        **sizes_of(settings.sizes),
        "replayed": True,
        "counts": counts,
        "hit_rate": hit_rates(counts),
        "moved": moved,
        "compute_waited_s": outcome.waited_us / 1e6,
        "wall_s": outcome.wall_s,
        "wrong": outcome.wrong,
        "series": outcome.series,
        "stats": outcome.stats,
    }
    if simulated is not None:
        expected = {name: simulated.counts[name] for name in (*COMPARED, *MOVED)}
        point["simulated"] = {"counts": expected, "hit_rate": hit_rates(expected)}
        point["different"] = [name for name in expected if counts[name] != expected[name]]
        point["requests_as_simulated"] = sum(
            a == b for a, b in zip(outcome.hits, simulated.hits, strict=True)
        )
    return point


def simulated_point(sizes: Sizes, policy: str, write: str, simulated: Simulated) -> dict[str, Any]:
    """Return the report of a point that was only simulated."""
    counts = {name: simulated.counts[name] for name in COMPARED}
    return {
        "policy": policy, "write": write, **sizes_of(sizes), "replayed": False,
        "counts": counts, "hit_rate": hit_rates(counts),
    }  # fmt: skip


def sizes_of(sizes: Sizes) -> dict[str, int]:
    return {f"{tier}_blocks": n for tier, n in zip(TIERS, sizes.all, strict=True)}


def render_point(point: dict[str, Any]) -> str:
    """Return one replay as tables: blocks by tier, bytes by direction, and what was checked."""
    counts, rates = point["counts"], point["hit_rate"]
    simulated = point.get("simulated")
    rows = []
    for tier in TIERS:
        rows.append((
            tier, point[f"{tier}_blocks"], counts[f"hit.{tier}"], f"{rates[tier]:.2%}",
            f"{simulated['hit_rate'][tier]:.2%}" if simulated else None,
            counts[f"evicted.{tier}"],
            simulated["counts"][f"evicted.{tier}"] if simulated else None,
        ))  # fmt: skip
    total = sum(counts[f"hit.{tier}"] for tier in TIERS)
    rows.append((
        "any", None, total, f"{rates['total']:.2%}",
        f"{simulated['hit_rate']['total']:.2%}" if simulated else None, None, None,
    ))  # fmt: skip
    columns = ("tier", "holds", "hits", "hit rate", "simulated", "evicted", "simulated")
    tables = [format_table(columns, rows)]
    rows = [
        (name, f"{moved['bytes'] / 1e6:,.1f}", moved["seconds"], moved["gb_per_s"])
        for name, moved in point["moved"].items()
    ]
    tables.append(format_table(("direction", "MB", "seconds", "GB/s"), rows))
    lines = [
        f"{counts['requests']} requests of {total + counts['missed']} blocks in "
        f"{point['wall_s']:.1f} s; the compute stream waited {point['compute_waited_s']:.2f} s",
        f"{counts['checked_bytes'] / 1e6:,.1f} MB of hits were compared byte by byte: "
        f"{counts['wrong_bytes']} wrong",
        *point["wrong"],
    ]
    if counts["cut"]:
        lines.append(f"{counts['cut']} blocks of requests longer than a tier were not requested")
    if simulated:
        same = f"{point['requests_as_simulated']} of {counts['requests']} requests"
        lines.append(f"simulation: {same} found the same blocks in the same tiers")
        for name in point["different"]:
            lines.append(f"  {name}: {counts[name]}, simulated {simulated['counts'][name]}")
    return "\n\n".join([*tables, "\n".join(lines)])


def render_comparison(points: Sequence[dict[str, Any]]) -> str:
    """Return several points as one table."""
    rows = []
    for point in points:
        rates, counts = point["hit_rate"], point["counts"]
        rows.append((
            point["policy"], *(point[f"{tier}_blocks"] for tier in TIERS),
            *(f"{rates[tier]:.2%}" for tier in (*TIERS, "total")),
            *(counts[f"evicted.{tier}"] for tier in TIERS), counts["lost"],
            "replay" if point["replayed"] else "simulation",
        ))  # fmt: skip
    columns = ("policy", *TIERS, "hit device", "host", "disk", "any")
    columns += ("evicted device", "host", "disk", "lost", "by")
    return format_table(columns, rows)
