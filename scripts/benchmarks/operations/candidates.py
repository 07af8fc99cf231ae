"""Check and measure the candidates of a case: kvcupy, torch, other projects.

Candidates are measured round by round, so that noise affects all of them. Two modes:

eager   calls from Python, wall clock around many of them and one synchronisation: what a call costs
graph   calls captured over rotated sets of arguments, replayed between two timing events: what the
        device needs

Arguments are rotated over more memory than the caches hold, but for the smallest cases, of which
`MAX_SETS` hold less.
GB/s counts the bytes that have to be read and written. Ratios are of the least times: other
programs disturb those least, and threaded baselines most. On the host device, torch's time is the
better of one thread and all. Copies are checked byte by byte, arithmetic against float64, each
candidate before it is measured. A baseline that is missing, fails or is wrong is reported as not
measured, with the cause; that kvcupy is wrong raises.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
from common.checks import WrongBytes, require_equal
from common.models import Model
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

import kvcupy as kv
from kvcupy.formats import carrier_dtype
from kvcupy.ops.spec import OPERATIONS

from .baselines import (
    Builder,
    NotMeasured,
    TorchArrays,
    Wrap,
    ignoring_stream,
    on_stream,
    own_arrays,
    upload,
)

TIMES = ("us (median)", "us (min)", "GB/s", "% of copy")  # columns of whatever moves bytes
MODES = ("eager", "graph")
MAX_SETS = 64
SECONDS = 1.5  # for all candidates of a case, after which three rounds suffice
OF_TORCH = ("torch", "torch, one thread")
_COPY_BYTES = 64 << 20  # of the copies that are the peaks, at least
_RATIOS = ("torch", "flashinfer", "sglang", "vllm")  # columns


class Shape(abc.ABC):
    """What a case does, and how much.

    Attributes
    ----------
    operation, format : of kvcupy, and of the cache
    """

    operation: str
    format: str
    model: Model

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Which no other case has."""

    @property
    @abc.abstractmethod
    def bytes_moved(self) -> int:
        """Bytes that a call has to read and write."""

    @abc.abstractmethod
    def build(self, device: Any, sets: int) -> Case:
        """Return `sets` sets of arguments on a device."""

    @property
    def model_name(self) -> str:
        """The model whose shapes these are, "any" if that does not matter."""
        return self.model.name

    @property
    def series(self) -> str:
        """Which cases of the operation, model and format differ in size alone."""
        return ""

    @property
    def flops(self) -> int:
        """Multiplications and additions of a call, 0 if bytes are all that counts."""
        return 0


class Bits:
    """An argument of a case: its bits on the host and on the device, and what format they have.

    Parameters
    ----------
    values : in the dtype of the format, or its bits
    """

    def __init__(self, device: Any, values: np.ndarray[Any, Any], format: str) -> None:
        self.format = format
        self.host = values.view(carrier_dtype(format))
        self.array = upload(device, self.host)


def wrapped(arguments: Mapping[str, Any], wrap: Wrap) -> dict[str, Any]:
    """Return arguments in the dtypes of their formats, in arrays of the library of `wrap`."""
    return {
        name: [wrap(each.array, each.format) for each in bits] if isinstance(bits, list)
        else wrap(bits.array, bits.format)
        for name, bits in arguments.items()
    }  # fmt: skip


class Case(abc.ABC):
    """Arguments of a shape on a device, and the calls of every candidate: one for each set.

    Attributes
    ----------
    shared : arguments of all of kvcupy's calls by name: `Bits`, or a list of them
    own : the other arguments of each call
    options : what kvcupy's calls take besides arrays
    """

    def __init__(self, device: Any, shape: Any, sets: int) -> None:
        self.device, self.shape, self.sets = device, shape, sets
        self.shared: dict[str, Any] = {}
        self.own: list[dict[str, Any]] = [{} for _ in range(sets)]
        self.options: dict[str, Any] = {}
        self.draw(np.random.default_rng(0))
        device.synchronize()

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> None:
        """Draw the arguments."""

    def bits(self, values: np.ndarray[Any, Any], format: str) -> Bits:
        """Return an argument of values, or their bits."""
        return Bits(self.device, values, format)

    def zeros(self, shape: tuple[int, ...], format: str) -> Bits:
        """Return an argument that is written."""
        return Bits(self.device, np.zeros(shape, carrier_dtype(format)), format)

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return kvcupy's calls, on arrays that `wrap` makes from bits and a format."""
        operation = getattr(kv, self.shape.operation)
        shared = wrapped(self.shared, wrap)
        signature = inspect.signature(OPERATIONS[self.shape.operation].function)
        calls: list[Call] = []
        for own in self.own:
            bound = signature.bind(**shared, **wrapped(own, wrap), **self.options)
            calls.append(partial(on_stream, partial(operation, *bound.args, **bound.kwargs)))
        return calls

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
        """Return torch's calls; they go to torch's current stream.

        Raises
        ------
        NotMeasured : torch has nothing that does this
        """
        return self.calls_of(self.torch_work(torch, wrap), wrap)

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        """Return what torch does with the tensors of a set."""
        raise NotImplementedError

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return, by project, what builds the calls of its kernels; these use torch's stream."""
        return {}

    def calls_of(self, work: Callable[..., Any], wrap: Wrap) -> list[Call]:
        """Return calls of torch, or of what runs on its stream: with the tensors of each set."""
        sets = (wrapped(own, wrap).values() for own in self.own)
        return [partial(ignoring_stream, partial(work, *tensors)) for tensors in sets]

    def wipe(self) -> None:
        """Restore the arguments that an earlier candidate wrote."""
        every = {**self.shared, **self.own[0], **self.options}
        written = set(OPERATIONS[self.shape.operation].written(every))
        for arguments in (self.shared, *self.own):
            for name in written & arguments.keys():
                several = arguments[name]
                for bits in several if isinstance(several, list) else [several]:
                    self.device.copy(bits.array, self.device.asarray(bits.host))
        self.device.synchronize()

    @abc.abstractmethod
    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare what a candidate left or returned, a result for each set.

        Raises
        ------
        WrongBytes : it is wrong
        """

    def require(self, candidate: str, name: str, got: Any, expected: Any) -> None:
        """Compare an array of the device with NumPy's, byte by byte."""
        self.device.synchronize()
        case = f"{self.shape.name}, {candidate}, {name}"
        require_equal(case, self.device.to_numpy(got).view(expected.dtype), expected)


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
    modes : of `MODES`
    rotate_bytes : of the arguments that calls rotate over; more than the last-level cache
    """

    def __init__(
        self, device: Any, *, quick: bool = False, modes: Sequence[str] = MODES,
        rotate_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.device, self.modes = device, modes
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
                rows += self.measure(shape)
            except MemoryError as error:
                skipped.append(f"{shape.name}: not measured: {reason(error)}")
        return {
            "copy_gb_per_s": self.copy_gb_per_s,
            "rotate_bytes": self.rotate_bytes,
            "rows": rows,
            "notes": [*skipped, *notes(rows)],
        }

    def measure(self, shape: Shape) -> list[dict[str, Any]]:
        """Check and measure every candidate of one case; return a row per mode."""
        sets = min(-(-self.rotate_bytes // shape.bytes_moved), MAX_SETS)
        case = shape.build(self.device, sets)
        calls = {"kvcupy": case.kvcupy(own_arrays)}
        check(case, "kvcupy", calls["kvcupy"])
        missing: dict[str, str] = {}
        for name, build in self._baselines(shape, case).items():
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
        rows = []
        for mode in self.modes:
            absent = dict(missing)
            timers = self._eager(calls) if mode == "eager" else self._graphs(calls, absent)
            rows.append(self._row(shape, case, mode, interleave(
                timers, self.rounds, seconds=SECONDS), absent))  # fmt: skip
        return rows

    def _baselines(self, shape: Shape, case: Case) -> dict[str, Builder]:
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
        if "torch" in calls and self.device.kind == "host":
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

    def _row(
        self, shape: Shape, case: Case, mode: str, samples: dict[str, list[float]],
        missing: dict[str, str],
    ) -> dict[str, Any]:  # fmt: skip
        us, least = medians(samples), minima(samples)
        gb_per_s = shape.bytes_moved / us["kvcupy"] / 1e3
        peak = self.copy_gb_per_s
        return {
            "case": shape.name,
            "operation": shape.operation,
            "model": shape.model_name,
            "format": shape.format,
            "series": shape.series,
            "mode": mode,
            "sets": case.sets,
            "bytes": shape.bytes_moved,
            "us": us,
            "least_us": least,
            "gb_per_s": gb_per_s,
            "copy_gb_per_s": peak,
            "percent_of_copy": 100 * gb_per_s / peak,
            "tflops": shape.flops / us["kvcupy"] / 1e6 if shape.flops else None,
            "ratios": ratios(least),
            "not_measured": missing,
        }


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
