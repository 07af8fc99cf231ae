"""A timeline as one HTML page that needs nothing else: a row per stream, details at the pointer."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --shared: #E8C96A55 }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1rem; }}
h1 {{ font-size: 1.2rem; margin: 0 0 .3rem }}
p {{ margin: .3rem 0 }}
label {{ display: block; margin: .6rem 0 }}
input {{ width: min(20rem, 60vw); vertical-align: middle }}
#view {{ overflow-x: auto; border: 1px solid var(--line); border-width: 1px 0 }}
#all {{ position: relative; min-width: 100%; padding-bottom: 1.5rem; overflow: hidden;
  isolation: isolate }}
.lane {{ position: relative; height: 3.4rem; border-top: 1px solid var(--line) }}
.lane:first-child {{ border-top: 0 }}
.name {{ position: sticky; left: 0; display: inline-block; font-size: .8rem; opacity: .8 }}
.span, .shared {{ position: absolute; box-sizing: border-box }}
.span {{ top: 1.3rem; height: 1.8rem; min-width: 2px; overflow: hidden; white-space: nowrap;
  padding: .2rem .3rem; border: 0; border-right: 1px solid #fff8; font: inherit; text-align: left;
  border-radius: 2px }}
.span:focus, .span:hover {{ outline: 2px solid currentcolor; outline-offset: -2px }}
.shared {{ top: 0; bottom: 1.5rem; background: var(--shared); z-index: -1 }}
.tick {{ position: absolute; bottom: 0; font-size: .75rem; padding-left: .2rem; opacity: .8;
  border-left: 1px solid var(--line); height: 1.4rem }}
#details {{ min-height: 4.5em; white-space: pre-line; font-variant-numeric: tabular-nums }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<label>Zoom <input id="zoom" type="range" min="0" max="8" step="0.25" value="0"></label>
<div id="view" tabindex="0" aria-label="Operations by stream"><div id="all">
{lanes}
{shared}
{ticks}
</div></div>
<p id="details" aria-live="polite">Point at an operation, or reach it with the Tab key.</p>
<script>
const all = document.getElementById("all"), details = document.getElementById("details");
const view = document.getElementById("view");
document.getElementById("zoom").addEventListener("input", event => {{
  const middle = (view.scrollLeft + view.clientWidth / 2) / all.scrollWidth;
  all.style.width = 100 * 2 ** event.target.value + "%";
  view.scrollLeft = middle * all.scrollWidth - view.clientWidth / 2;
}});
for (const kind of ["pointerover", "focusin", "click"])
  all.addEventListener(kind, event => {{
    const text = event.target.closest("[data-details]")?.dataset.details;
    if (text) details.textContent = text;
  }});
</script>
</html>
"""


def page(
    spans: Sequence[Any], lanes: Sequence[tuple[str, str]],
    shared: Sequence[tuple[float, float]], colours: Mapping[str, tuple[str, str]], title: str,
) -> str:  # fmt: skip
    """Return the page.

    Parameters
    ----------
    spans : of a timeline
    lanes : (device, lane), in the order of the rows
    shared : intervals in which several lanes are busy, in microseconds as of the spans
    colours : of each name of an operation, its fill and the ink on it
    """
    origin = min((span.start_us for span in spans), default=0.0)
    length = max((span.end_us for span in spans), default=origin + 1.0) - origin or 1.0
    several = len({device for device, _ in lanes}) > 1
    rows = []
    for device, lane in lanes:
        bars = [
            _bar(span, origin, length, *colours[span.name])
            for span in spans
            if (span.device, span.lane) == (device, lane)
        ]
        label = html.escape(f"{device} {lane}" if several else lane)
        rows.append(f'<div class="lane"><span class="name">{label}</span>{"".join(bars)}</div>')
    busy = [
        f'<div class="shared" style="{_place(start - origin, stop - start, length)}"></div>'
        for start, stop in shared
    ]
    step = _step(length / 5)
    ticks = [
        f'<div class="tick" style="left:{100 * step * i / length:.4f}%">{_time(step * i)}</div>'
        for i in range(int(length / step) + 1)
    ]
    shared_us = sum(stop - start for start, stop in shared)
    summary = f"{len(spans)} operations on {len(lanes)} streams in {_time(length)}"
    if shared:
        summary += f"; several streams are busy for {_time(shared_us)} of it (shaded)"
    return _TEMPLATE.format(
        title=html.escape(title), summary=html.escape(summary), lanes="\n".join(rows),
        shared="\n".join(busy), ticks="\n".join(ticks),
    )  # fmt: skip


def _bar(span: Any, origin: float, length: float, fill: str, ink: str) -> str:
    start = span.start_us - origin
    lines = [f"{span.name} on {span.lane}: {_time(span.duration_us)} from {_time(start)}"]
    if span.num_bytes is not None:
        rate = span.num_bytes / span.duration_us / 1e3 if span.duration_us else 0.0
        speed = f", {rate:,.3g} GB/s" if rate else ""
        lines.append(f"{span.num_bytes:,} bytes read and written{speed}")
    if span.waits:
        lines.append(f"waited for {', '.join(span.waits)}")
    text = html.escape("\n".join(lines)).replace("\n", "&#10;")
    place = _place(start, span.duration_us, length)
    return (
        f'<button class="span" style="{place};background:{fill};color:{ink}" title="{text}" '
        f'data-details="{text}">{html.escape(span.name)}</button>'
    )


def _step(least: float) -> float:
    """Return the first of 1, 2, 5, 10, ... times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _place(start: float, duration: float, length: float) -> str:
    return f"left:{100 * start / length:.4f}%;width:{100 * duration / length:.4f}%"


def _time(us: float) -> str:
    return f"{us / 1e3:,.4g} ms" if us >= 10_000 else f"{us:,.4g} µs"
