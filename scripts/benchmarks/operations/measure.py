"""Check and measure the candidates of a case: kvcupy, torch, other projects.

Candidates are measured round by round, so that noise affects all of them:

eager   on the host device: calls from Python, wall clock around many of them
graph   on a GPU: calls captured over rotated sets of arguments, replayed between two timing events

Arguments are rotated over more memory than the caches hold, but for the smallest cases, of which
`MAX_SETS` hold less.
GB/s counts the bytes that have to be read and written. Ratios are of the least times: other
programs disturb those least, and threaded baselines most. On the host device, torch's time is the
better of one thread and all. Copies are checked byte by byte, arithmetic against float64, each
candidate before it is measured. A baseline that is missing, fails or is wrong is reported as not
measured, with the cause; that kvcupy is wrong raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from common.checks import WrongBytes
from common.report import format_table
from common.timers import (
    Call,
    copy_gb_per_s,
    eager,
    interleave,
    medians,
    minima,
    named_stream,
    replayed,
    replayed_by_torch,
)

from .baselines import Builder, NotMeasured, TorchArrays, own_arrays
from .cases import Case, Shape

TIMES = ("us (median)", "us (min)", "GB/s", "% of copy")  # columns of whatever moves bytes
MAX_SETS = 64
SECONDS = 1.5  # for all candidates of a case, after which three rounds suffice
OF_TORCH = ("torch", "torch, one thread")
_COPY_BYTES = 64 << 20  # of the copies that are the peaks, at least
_RATIOS = ("torch", "flashinfer", "vllm")  # columns


def check(case: Case, name: str, calls: list[Call]) -> None:
    """Make each call once, on fresh arguments, and compare what it leaves or returns."""
    case.wipe()
    results = [call(None) for call in calls]
    case.device.synchronize()
    case.check(name, results)


@contextmanager
def one_thread(torch: Any) -> Iterator[None]:
    """Let torch compute on one core, which is fastest for small work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Bench:
    """One device, its copy bandwidth, and how long to measure.

    Parameters
    ----------
    quick : fewer and shorter measurements
    rotate_bytes : of the arguments that calls rotate over; more than the last-level cache
    """

    def __init__(
        self, device: Any, *, quick: bool = False, rotate_bytes: int | None = None
    ) -> None:
        self.device = device
        self.rounds = 5 if quick else 25
        self.target_us = 2_000.0 if quick else 5_000.0
        self.rotate_bytes = rotate_bytes or (64 if quick else 256) * 1_000_000
        self.stream = named_stream(device, "bench")
        self.torch = TorchArrays(device)

    @cached_property
    def copy_gb_per_s(self) -> float:
        """Bytes read and written by the device's own copy."""
        return copy_gb_per_s(self.device, max(self.rotate_bytes, _COPY_BYTES), self.rounds)

    def report(
        self, shapes: Sequence[Shape], notify: Callable[[int, str], object] = lambda *_: None
    ) -> dict[str, Any]:
        """Measure the cases; return the rows and what else a report says of them.

        `notify` is called with the number of cases that are done, and the name of the next.
        """
        rows: list[dict[str, Any]] = []
        skipped = []
        for number, shape in enumerate(shapes):
            notify(number, shape.name)
            try:
                rows.append(self.measure(shape))
            except MemoryError as error:
                skipped.append(f"{shape.name}: not measured: {reason(error)}")
        return {
            "copy_gb_per_s": self.copy_gb_per_s,
            "rotate_bytes": self.rotate_bytes,
            "rows": rows,
            "notes": [*skipped, *notes(rows)],
        }

    def measure(self, shape: Shape) -> dict[str, Any]:
        """Check and measure every candidate of one case; return its row."""
        sets = min(-(-self.rotate_bytes // shape.bytes_moved), MAX_SETS)
        case = shape.build(self.device, sets)
        calls = {"kvcupy": case.kvcupy(own_arrays)}
        check(case, "kvcupy", calls["kvcupy"])
        missing: dict[str, str] = {}
        for name, build in self._baselines(case).items():
            try:
                if built := build():
                    check(case, name, built)
                    calls[name] = built
            except WrongBytes as error:
                if name.startswith("kvcupy"):
                    raise
                missing[name] = f"wrong result: {error}"
            except Exception as error:  # of another project: the other baselines are still measured
                missing[name] = reason(error)
        is_eager = self.device.kind == "host"
        timers = self._eager(calls) if is_eager else self._graphs(calls, missing)
        samples = interleave(timers, self.rounds, seconds=SECONDS)
        us, least = medians(samples), minima(samples)
        gb_per_s = shape.bytes_moved / us["kvcupy"] / 1e3
        return {
            "case": shape.name, "operation": shape.operation, "model": shape.model_name,
            "format": shape.format, "mode": "eager" if is_eager else "graph", "sets": sets,
            "bytes": shape.bytes_moved, "us": us, "least_us": least, "gb_per_s": gb_per_s,
            "copy_gb_per_s": self.copy_gb_per_s,
            "percent_of_copy": 100 * gb_per_s / self.copy_gb_per_s,
            "tflops": shape.flops / us["kvcupy"] / 1e6 if shape.flops else None,
            "ratios": ratios(least), "not_measured": missing,
        }  # fmt: skip

    def _baselines(self, case: Case) -> dict[str, Builder]:
        """Return what builds the calls of each candidate other than kvcupy on its own arrays."""
        torch, wrap = self.torch.torch, self.torch.wrap
        if torch is None:

            def absent() -> list[Call]:
                raise ImportError(self.torch.missing)

            return {"torch": absent}
        builders: dict[str, Builder] = {
            "kvcupy, torch tensors": partial(case.kvcupy, wrap),
            "torch": partial(case.torch, torch, wrap),
        }
        return builders | case.others(torch, wrap)

    def _eager(self, calls: dict[str, list[Call]]) -> dict[str, Callable[[], float]]:
        timers = {name: eager(self.device, c, self.target_us) for name, c in calls.items()}
        if "torch" in calls:
            with one_thread(self.torch.torch):
                alone = eager(self.device, calls["torch"], self.target_us)
            timers["torch, one thread"] = partial(self._alone, alone)
        return timers

    def _alone(self, measure: Callable[[], float]) -> float:
        with one_thread(self.torch.torch):
            return measure()

    def _graphs(
        self, calls: dict[str, list[Call]], missing: dict[str, str]
    ) -> dict[str, Callable[[], float]]:
        """Capture what can be captured; say why for what cannot."""
        timers: dict[str, Callable[[], float]] = {}
        for name, one_per_set in calls.items():
            if name == "kvcupy, torch tensors":  # the same launches
                continue
            try:
                if name == "kvcupy":
                    timers[name] = replayed(self.device, self.stream, one_per_set, self.target_us)
                elif self.torch.torch.cuda.is_available():
                    timers[name] = replayed_by_torch(self.torch.torch, one_per_set)
            except Exception as error:  # a baseline that fails is reported
                if name == "kvcupy":
                    raise
                missing[name] = f"cannot be captured: {reason(error)}"
        return timers


def ratios(least_us: dict[str, float]) -> dict[str, float]:
    """Return the least time of each baseline over kvcupy's.

    Where both were measured on torch tensors, like is compared with like.

    Examples
    --------
    >>> us = {"kvcupy": 2.0, "kvcupy, torch tensors": 4.0, "vllm": 6.0}
    >>> ratios({**us, "torch": 12.0, "torch, one thread": 8.0})
    {'vllm': 1.5, 'torch': 2.0}
    """
    own = least_us.get("kvcupy, torch tensors", least_us["kvcupy"])
    values = {}
    for name, us in least_us.items():
        if name == "torch":
            values[name] = min(us, least_us.get("torch, one thread", us)) / own
        elif not name.startswith("kvcupy") and name not in OF_TORCH:
            values[name] = us / own
    return values


def reason(error: BaseException) -> str:
    """Return an error in one line, without its type where the message says enough."""
    first = (str(error).strip().splitlines() or [""])[0]
    return (
        first
        if isinstance(error, (ImportError, NotMeasured)) and first
        else f"{type(error).__name__}: {first}"
    )


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each baseline that was not measured and each cause.

    Examples
    --------
    >>> notes([{"case": name, "not_measured": {"vllm": "none here"}} for name in "ab"])
    ['vllm: not measured: none here (a and 1 more)']
    """
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row["not_measured"].items():
            known = cases.setdefault((name, why), [])
            if row["case"] not in known:
                known.append(row["case"])
    return [
        f"{name}: not measured: {why} ({' and '.join([known[0], *more])})"
        for (name, why), known in cases.items()
        for more in [[f"{len(known) - 1} more"] if len(known) > 1 else []]
    ]


def render(report: dict[str, Any]) -> str:
    """Return a report as a table, with notes below."""
    lines = [table(report["rows"]), ""] if report["rows"] else []
    about = f"copy {report['copy_gb_per_s']:.1f} GB/s; every candidate checked; times are medians "
    rotated = [row["sets"] * row["bytes"] for row in report["rows"]]
    if small := sum(size < report["rotate_bytes"] for size in rotated):
        lines.append(
            f"{small} rows rotate over less than {report['rotate_bytes'] / 1e6:.0f} MB, which "
            "caches may hold"
        )
    return "\n".join([*lines, about + "but for (min); ratios (x) are of the least times",
                      *report["notes"]])  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of `Bench.measure` as a table, with a column for each baseline."""
    times = ("kvcupy, torch tensors", *OF_TORCH)
    titles = dict(zip(times, ("us, torch in", "torch us", "one thread"), strict=True))
    shown = [name for name in times if any(name in row["us"] for row in rows)]
    present = dict.fromkeys(name for row in rows for name in row["ratios"])
    baselines = [name for name in dict.fromkeys([*_RATIOS, *present]) if name in present]
    with_flops = any(row["tflops"] for row in rows)
    columns = ("case", "run", *TIMES, *["TFLOP/s"] * with_flops)
    columns += (*(titles[name] for name in shown), *(f"x {name}" for name in baselines))
    cells = []
    for row in rows:
        us, least = row["us"], row["least_us"]["kvcupy"]
        measured = [us["kvcupy"], least, row["gb_per_s"], row["percent_of_copy"]]
        measured += [row["tflops"]] * with_flops
        measured += [us.get(name) for name in shown]
        cells.append((row["case"], row["mode"], *measured, *map(row["ratios"].get, baselines)))
    return format_table(columns, cells)
