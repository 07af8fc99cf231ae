"""Measure transfers of pages between the device and pinned memory against its copy bandwidth.

scattered  pages of one token whose rows are 1 KiB, K and V: one copy per page and layer, as without
           kvcupy, against every method of `transfer_pages`
rows       rows of 128 to 2,048 bytes of K and of V, and latents of 576 and 656, in pages of 1 to
           128 tokens, layer_first on both sides
layouts    between layer_first and the layouts of the host, and between those

Both directions. Pages are scattered in both pools, so that no two form a contiguous run. Times are
between two events of one stream, so that the time to issue the work in Python counts where the
stream runs dry; they are medians over rounds, each of which measures every candidate of a case.
GB/s counts every byte once. The peak is one large copy between the device and pinned memory, in
the same direction; a kernel of several blocks on the host device may exceed it, as that copy has
one thread. Every case's result is compared with NumPy's once, byte by byte.

    python scripts/bench.py transfer --json build/bench_transfer.json
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from common.report import format_table
from common.timers import (
    DIRECTIONS,
    event_us,
    interleave,
    link_gb_per_s,
    medians,
    minima,
    named_stream,
)

from benchmarks.operations.measure import TIMES
from benchmarks.pools import Pools, Shape
from kvcupy.ops import transfer

METHODS = ("kernel", "copy", "staged", "auto")
EACH_PAGE = "one copy per page and layer"
LAYERS = 8
SCATTERED_BYTES = 1024
ROWS = (128, 256, 512, 1024, 2048, 576, 656)
LATENTS = (576, 656)
PAGE_SIZES = (1, 16, 64, 128)
HOST_LAYOUTS = ("page_first", "page_first_direct", "page_head")
SECTIONS = ("scattered", "rows", "layouts")


class Bench:
    """One device, the peaks of its link, and how long to measure.

    Attributes
    ----------
    peaks : GB/s of one large copy, by direction
    case_bytes : approximate bytes per case
    """

    def __init__(self, device: Any, *, quick: bool, case_bytes: int | None = None) -> None:
        self.device, self.quick = device, quick
        self.rounds, self.seconds = (2, 0.0) if quick else (7, 1.0)
        self.stream = named_stream(device, "bench")
        self.peaks = link_gb_per_s(device, self.stream, (4 if quick else 64) << 20, self.rounds)
        # 2.5 ms at the peak: more than caches hold, and far longer than a launch.
        target_us = 50 if quick else 2_500
        self.case_bytes = case_bytes or int(min(self.peaks.values()) * target_us * 1e3)

    def _interleaved(self, works: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        self.device.synchronize()
        timers = {
            name: partial(event_us, self.device, self.stream, work) for name, work in works.items()
        }
        return interleave(timers, self.rounds, seconds=self.seconds)

    def shape(self, row_bytes: int, page_size: int, **options: Any) -> Shape:
        """Return the shape of a case of about `case_bytes`."""
        mla = row_bytes in LATENTS
        token_bytes = row_bytes * LAYERS * (1 if mla else 2)
        pages = max(2, self.case_bytes // (token_bytes * page_size))
        return Shape(row_bytes, page_size, LAYERS, pages, mla=mla, **options)

    def rows(
        self, section: str, shape: Shape, candidates: dict[str, dict[str, Any] | None]
    ) -> Iterator[dict[str, Any]]:
        """Check and measure candidates in both directions; yield a row for each direction.

        Parameters
        ----------
        candidates : options of `transfer_pages`; None is one copy per page and layer
        """
        case = Pools(self.device, shape)
        for direction in DIRECTIONS:
            works = {
                name: partial(self._work, case, direction, options)
                for name, options in candidates.items()
            }
            for name, work in works.items():
                case.scatter()
                work()
                self.device.synchronize()
                case.check(f"{shape}, {name}", direction)
            samples = self._interleaved(works)
            us, least = medians(samples), minima(samples)
            row = {
                "section": section,
                "direction": direction,
                "row_bytes": shape.row_bytes,
                "latent": shape.mla,
                "page_size": shape.page_size,
                "layers": shape.num_layers,
                "pages": shape.num_pages,
                "layouts": list(shape.layouts),
                "bytes": shape.bytes_moved,
                "us": us,
                "least_us": least,
                "gb_per_s": {name: shape.bytes_moved / us[name] / 1e3 for name in works},
            }
            if EACH_PAGE in us:
                row["ratios"] = {name: us[EACH_PAGE] / us[name] for name in works}
            yield row

    def _work(self, case: Pools, direction: str, options: dict[str, Any] | None) -> None:
        if options is None:
            case.copy_each_page(direction, self.stream)
        else:
            case.transfer(direction, self.stream, **options)


def cases(
    bench: Bench, sections: Sequence[str]
) -> Iterator[tuple[str, Shape, dict[str, dict[str, Any] | None]]]:
    """Yield section, shape and candidates of everything that is measured."""
    methods: dict[str, dict[str, Any] | None] = {m: {"method": m} for m in METHODS}
    quick = bench.quick
    if "scattered" in sections:
        for layout in ("layer_first", "page_first"):
            pages = 32 if quick else 1024
            shape = Shape(SCATTERED_BYTES, 1, LAYERS, pages, ("layer_first", layout))
            yield "scattered", shape, {EACH_PAGE: None, **methods}
    if "rows" in sections:
        for row_bytes in (128, 656) if quick else ROWS:
            for page_size in (1, 16) if quick else PAGE_SIZES:
                yield "rows", bench.shape(row_bytes, page_size), methods
    if "layouts" in sections:
        pairs = [("layer_first", host) for host in HOST_LAYOUTS]
        pairs += [(a, b) for a in HOST_LAYOUTS for b in HOST_LAYOUTS if a < b]
        for page_size in (16,) if quick else (1, 64):
            for layouts in pairs[:2] if quick else pairs:
                yield "layouts", bench.shape(1024, page_size, layouts=layouts), methods


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="default: all")
    parser.add_argument(
        "--case-mb", type=_size, metavar="MB", help="what a case moves; default: 2.5 ms at peak"
    )


def _size(text: str) -> float:
    """Read a size above zero."""
    size = float(text)
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return size


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    size = None if options.case_mb is None else int(options.case_mb * 1e6)
    bench = Bench(device, quick=options.quick, case_bytes=size)
    rows: list[dict[str, Any]] = []
    for section, shape, candidates in cases(bench, options.sections or SECTIONS):
        progress = f"{section}: rows of {shape.row_bytes}, pages of {shape.page_size}, "
        print(progress + " to ".join(shape.layouts), file=sys.stderr, flush=True)
        rows += bench.rows(section, shape, candidates)
    return {
        "calibrated": bool(transfer.read_calibration(device.model)),
        "peak_gb_per_s": bench.peaks,
        "case_bytes": bench.case_bytes,
        "rows": rows,
    }


def render(report: dict[str, Any]) -> str:
    """Return a table per section, a line per case and direction."""
    lines: list[str] = []
    for section in SECTIONS:
        rows = [row for row in report["rows"] if row["section"] == section]
        if not rows:
            continue
        columns = ("case", "direction", "candidate", *TIMES)
        if section == "scattered":
            columns += ("times as fast (median)",)
        cells = []
        for row in rows:
            case = f"{row['row_bytes']} B, {row['page_size']}"
            if section in ("scattered", "layouts"):
                case += ", " + " and ".join(row["layouts"])
            peak = report["peak_gb_per_s"][row["direction"]]
            for name, gb_per_s in row["gb_per_s"].items():
                measured = (row["us"][name], row["least_us"][name], gb_per_s, 100 * gb_per_s / peak)
                line = (case, row["direction"], name, *measured, row.get("ratios", {}).get(name))
                cells.append(line[: len(columns)])
        lines += [f"{section}: rows, tokens per page", "", format_table(columns, cells), ""]
    peaks = ", ".join(f"{name} {peak:.1f} GB/s" for name, peak in report["peak_gb_per_s"].items())
    lines.append(
        f"one large copy {peaks}; cases of {report['case_bytes'] / 1e6:.1f} MB or near it, "
        f"{LAYERS} layers; every candidate checked"
    )
    return "\n".join(lines)
