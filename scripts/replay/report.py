"""The report of a replay: its counts, tables and charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import charts
from common.report import format_table

from .run import DIRECTIONS, Outcome, Settings
from .simulation import TIERS, Simulated, Sizes, hit_rates

# Counts that the simulation has too, which must agree, and their names in the cache's statistics.
COMPARED = {f"hit.{tier}": "" for tier in TIERS} | {"missed": "misses", "inserted": "inserted"}
COMPARED |= {f"evicted.{tier}": f"{tier}_evicted" for tier in TIERS} | {"lost": "lost"}
# Blocks that the simulation moves, and bytes in the cache's statistics.
MOVED = {"loaded": "load", "saved": "save", "disk_read": "disk_read", "disk_written": "disk_write"}


def counted(outcome: Outcome, page_bytes: int) -> dict[str, int]:
    """Return the counts of a replay: its own, and the cache's."""
    own = dict(outcome.counts)
    own |= {name: outcome.stats[key] for name, key in COMPARED.items() if name not in own}
    return own | {name: outcome.stats[f"{key}_bytes"] // page_bytes for name, key in MOVED.items()}


def point_of(settings: Settings, outcome: Outcome, simulated: Simulated) -> dict[str, Any]:
    """Return the report of one replay, with the counts of its simulation."""
    moved = {}
    for direction, key in DIRECTIONS.items():
        num_bytes, seconds = (outcome.stats[f"{key}_{unit}"] for unit in ("bytes", "s"))
        gb_per_s = num_bytes / seconds / 1e9 if seconds > 0 else None
        moved[direction] = {"bytes": num_bytes, "seconds": seconds, "gb_per_s": gb_per_s}
    counts = counted(outcome, settings.shape.page_bytes)
    point = {
        "write": settings.write,
        **sizes_of(settings.sizes),
        "counts": counts,
        "hit_rate": hit_rates(counts),
        "moved": moved,
        "compute_waited_s": outcome.waited_us / 1e6,
        "wall_s": outcome.wall_s,
        "wrong": outcome.wrong,
        "series": outcome.series,
        "stats": outcome.stats,
    }
    expected = {name: simulated.counts[name] for name in (*COMPARED, *MOVED)}
    point["simulated"] = {"counts": expected, "hit_rate": hit_rates(expected)}
    point["different"] = [name for name in expected if counts[name] != expected[name]]
    point["requests_as_simulated"] = sum(
        a == b for a, b in zip(outcome.hits, simulated.hits, strict=True)
    )
    return point


def sizes_of(sizes: Sizes) -> dict[str, int]:
    return {f"{tier}_blocks": n for tier, n in zip(TIERS, sizes.all, strict=True)}


def render_point(point: dict[str, Any]) -> str:
    """Return one replay as tables: blocks by tier, bytes by direction, and what was checked."""
    counts, rates = point["counts"], point["hit_rate"]
    simulated = point["simulated"]
    rows = []
    for tier in TIERS:
        rows.append((
            tier, point[f"{tier}_blocks"], counts[f"hit.{tier}"], f"{rates[tier]:.2%}",
            f"{simulated['hit_rate'][tier]:.2%}",
            counts[f"evicted.{tier}"],
            simulated["counts"][f"evicted.{tier}"],
        ))  # fmt: skip
    total = sum(counts[f"hit.{tier}"] for tier in TIERS)
    rows.append((
        "any", None, total, f"{rates['total']:.2%}",
        f"{simulated['hit_rate']['total']:.2%}", None, None,
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
    same = f"{point['requests_as_simulated']} of {counts['requests']} requests"
    lines.append(f"simulation: {same} found the same blocks in the same tiers")
    for name in point["different"]:
        lines.append(f"  {name}: {counts[name]}, simulated {simulated['counts'][name]}")
    return "\n\n".join([*tables, "\n".join(lines)])


# Charts -------------------------------------------------------------------------------------------

COLOURS = {"device": "#1F6F8B", "host": "#E2A33B", "disk": "#8C8C8C"}
LINES = ("#1F6F8B", "#E2A33B", "#B4436C", "#5B8E55", "#6B5CA5")


def draw_over_time(point: dict[str, Any], path: Path, title: str) -> None:
    """Draw one replay: cumulative hit rates, blocks in each tier, bytes in each direction."""
    series = point["series"]
    minutes = [row["minutes"] for row in series]
    figure, (rates, filled, moved) = charts.panels_of(3, 1, (10, 9), sharex=True)
    tiers = [tier for tier in TIERS if point[f"{tier}_blocks"]]
    asked = [max(1, sum(row[f"hit.{t}"] for t in TIERS) + row["missed"]) for row in series]
    shares = [
        [100 * row[f"hit.{tier}"] / n for row, n in zip(series, asked, strict=True)]
        for tier in tiers
    ]
    rates.stackplot(minutes, *shares, labels=tiers, colors=[COLOURS[tier] for tier in tiers])
    rates.set_ylabel("hits so far, % of blocks")
    for tier in tiers:
        size = point[f"{tier}_blocks"]
        share = [100 * row[f"blocks.{tier}"] / size for row in series]
        filled.plot(minutes, share, color=COLOURS[tier], label=f"{tier}, of {size:,}")
    filled.set(ylabel="occupied, %", ylim=(0, 105))
    for direction, colour in zip(DIRECTIONS, LINES, strict=False):
        sums = [row[f"bytes.{direction}"] / 1e9 for row in series]
        if sums[-1]:
            moved.plot(minutes, sums, color=colour, label=direction)
    moved.set(ylabel="GB moved so far", xlabel="minutes of the trace")
    for axes in (rates, filled, moved):
        charts.tidy(axes)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    charts.save(figure, path, title)
