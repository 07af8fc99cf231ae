"""Run implementations through the conformance cases: what conforms, what differs, and how.

`python -m kvcupy conformance` prints it as a table.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from .. import devices
from ..bench.report import describe, write_json
from ..config import config
from ..errors import DeviceError
from ..progress import tracked
from .arrays import Argument, Arguments, Mismatch
from .cases import OPERATIONS, Case, cases
from .implementations import NAMES, Implementation, NotSupported, load
from .tolerances import REASONS

CONFORMS, DIFFERS, RAISED, NOT_SUPPORTED = "conforms", "differs", "raised", "not supported"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes
    ----------
    operation, case : which case
    verdict : "conforms", "differs", "raised" (an exception, where none is due) or "not supported"
    detail : how it differs, a line per array; the exception; or why it is not supported
    compared : how its results are compared: a key of `tolerances.REASONS`
    """

    operation: str
    case: str
    verdict: str
    detail: str = ""
    compared: str = "bits"

    @property
    def failed(self) -> bool:
        return self.verdict in (DIFFERS, RAISED)

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        detail = detail.replace("\n", "\n    ")
        return f"{self.operation}, {self.case}: {self.verdict}{detail}"


def run_case(
    case: Case, implementation: Implementation, *, device: Any = None, seed: int = 0
) -> Outcome:
    """Run one case, and return its outcome.

    Parameters
    ----------
    case : of `cases()`
    implementation : see `Implementation`
    device : `Device` or its name; None: a GPU if there is one, else the host
    seed : of the arguments
    """
    verdict, detail = CONFORMS, ""
    try:
        _compare(case, implementation, devices.get(device), seed)
    except NotSupported as reason:
        verdict, detail = NOT_SUPPORTED, str(reason)
    except Mismatch as difference:
        verdict, detail = DIFFERS, str(difference)
    except Exception as error:  # whatever the implementation under test raises is its result
        text = str(error).splitlines() or [""]
        verdict, detail = RAISED, f"{type(error).__name__}: {text[0]}"
    return Outcome(case.operation, case.name, verdict, detail, case.compared)


def _compare(case: Case, implementation: Implementation, device: Any, seed: int) -> None:
    """Call an implementation with the arguments of a case, and compare all that it left."""
    function = implementation.functions.get(case.operation)
    if function is None:
        raise NotSupported("it has no such operation")
    for feature in case.features & implementation.lacks.keys():
        raise NotSupported(implementation.lacks[feature])
    arguments = Arguments(device, seed, rounded_weights=implementation.rounded_weights)
    call = case.build(arguments)
    _require_signature(function, call.arguments)

    def wrap(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(wrap, value))
        return implementation.wrap(value) if isinstance(value, Argument) else value

    device.synchronize()  # arguments were uploaded on the device's own stream
    function(**{name: wrap(value) for name, value in call.arguments.items()})
    device.synchronize()
    recorded = implementation.has_fault(device)
    expected = call.compare()
    texts = [
        f"wrote outside its arrays: {each}" if each.kind == "outside" else str(each)
        for each in arguments.all_differences()
    ]
    if recorded is not None and recorded != expected:
        what = "one, though all are inside" if recorded else "none, though one is past the end"
        texts.append(f"indices past the end: recorded {what}")
    if texts:
        raise Mismatch("\n".join(texts))


def _require_signature(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise NotSupported unless a function takes all arguments by name."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        unknown = [name for name in arguments if name not in parameters]
        if unknown:
            raise NotSupported(f"it takes no {', '.join(unknown)}")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise NotSupported(f"its signature: {error}") from None


def conform(
    operation: str,
    function: Callable[..., Any],
    *,
    device: Any = None,
    wrap: Callable[[Argument], Any] | None = None,
    lacks: Mapping[str, str] | None = None,
    rounded_weights: bool = False,
    seed: int = 0,
) -> list[Outcome]:
    """Run a function through the cases of one operation.

    Parameters
    ----------
    operation : of `cases.OPERATIONS`
    function : called with the names of kvcupy's parameters; what its signature lacks is not
        supported. Outputs are written in place, and what it returns is ignored
    device : `Device` or its name, which arrays lie on; None: a GPU if there is one, else the host
    wrap : makes the function's array of an `Argument`; None: `argument.array`, of NumPy or CuPy
    lacks : reasons by key of `cases.FEATURES`: cases that need one are not run
    rounded_weights : of `paged_attention`: whether decode, too, rounds softmax weights to the
        query's format, for tensor cores
    seed : of the arguments

    Returns
    -------
    list of Outcome : one per case, in order

    Examples
    --------
    >>> def copy_pages(cache, src_pages, dst_pages):
    ...     cache[dst_pages] = cache[src_pages]
    >>> for outcome in conform("copy_pages", copy_pages, device="host"):
    ...     print(outcome.case, "-", outcome.verdict)
    pages - conforms
    no pages - conforms
    K and V - raised
    padding - differs
    past the end - raised
    views - conforms
    """
    own = Implementation(
        "own", {operation: function}, lacks=lacks or {}, rounded_weights=rounded_weights
    )
    if wrap is not None:
        own.wrap = wrap
    return [run_case(case, own, device=device, seed=seed) for case in cases([operation])]


def require(operation: str, function: Callable[..., Any], **options: Any) -> None:
    """Run a function through the cases of one operation, and raise if one fails.

    Parameters are as for `conform`.

    Raises
    ------
    Mismatch : it lists all cases that differ or raised, and how
    """
    failures = [outcome for outcome in conform(operation, function, **options) if outcome.failed]
    if failures:
        raise Mismatch("\n".join(map(str, failures)))


# The command ----------------------------------------------------------------------------------


def main(
    names: Sequence[str] | None = None, *, operations: Sequence[str] | None = None,
    device_name: str | None = None, verbose: bool = False, json_file: Path | None = None,
    seed: int = 0, lines: bool = False,
) -> int:  # fmt: skip
    """Print what conforms, what differs and how; return the exit status.

    1: kvcupy, or a module of the caller's, differs from a reference. 2: an option was wrong.

    Parameters
    ----------
    names : of `implementations.NAMES`, or modules whose functions have kvcupy's names; None:
        kvcupy, and the others where they can be imported
    operations : None: all
    device_name : None: a GPU if there is one
    verbose : print what conforms and what is not supported too
    json_file : written
    lines : print progress lines where stderr is no terminal
    """
    try:
        device = devices.get(device_name)
        chosen = cases(operations)
    except (ValueError, DeviceError) as error:
        print(f"conformance: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    loaded: list[Implementation] = []
    missing: dict[str, str] = {}
    for name in NAMES if names is None else names:
        try:
            loaded.append(load(name, device))
        except ImportError as error:
            missing[name] = str(error)
    for name in names or ():
        if name in missing and name not in NAMES:
            print(f"conformance: --impl {name}: {missing[name]}", file=sys.stderr)
            return 2
    about = describe(device)  # now: the tree may change while this runs
    fallback, config.fallback = config.fallback, "error"  # what conforms is the kernels
    try:
        outcomes = {
            each.name: [
                run_case(case, each, device=device, seed=seed)
                for case in tracked(chosen, f"conformance {each.name}", "cases", lines=lines)
            ]
            for each in loaded
        }
    finally:
        config.fallback = fallback
    print(render(outcomes, missing, device.name, verbose=verbose))
    if json_file is not None:
        records = {name: [asdict(each) for each in results] for name, results in outcomes.items()}
        report = {"benchmark": "conformance", **about, "seed": seed, "missing": missing}
        write_json(json_file, {**report, "outcomes": records})
    peers = set(NAMES) - {"kvcupy"}
    judged = (results for name, results in outcomes.items() if name not in peers)
    return int(any(outcome.failed for results in judged for outcome in results))


def render(
    outcomes: Mapping[str, Sequence[Outcome]], missing: Mapping[str, str], device_name: str, *,
    verbose: bool = False,
) -> str:  # fmt: skip
    """Return the table of all implementations, and below it how each of them differs."""
    everything = [outcome for results in outcomes.values() for outcome in results]
    rows = [["operation", *outcomes]]
    rows += [
        [operation, *(_tally(results, operation) for results in outcomes.values())]
        for operation in OPERATIONS if any(each.operation == operation for each in everything)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"On {device_name}: cases that conform, of those supported (-n: n are not)", ""]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    for name, results in outcomes.items():
        shown = [outcome for outcome in results if verbose or outcome.failed]
        lines += ["", f"{name}: {'all that is supported conforms' if not shown else ''}".rstrip()]
        lines += [indent(str(outcome), "  ") for outcome in shown]
    lines += [f"\n{name}: not here: {why}" for name, why in missing.items()]
    kinds = dict.fromkeys(outcome.compared for outcome in everything)
    lines += ["", "Compared:", *(f"  {kind}: {REASONS[kind]}" for kind in kinds)]
    return "\n".join(lines)


def _tally(outcomes: Iterable[Outcome], operation: str) -> str:
    verdicts = [outcome.verdict for outcome in outcomes if outcome.operation == operation]
    supported = [verdict for verdict in verdicts if verdict != NOT_SUPPORTED]
    if not supported:
        return "-"
    text = f"{supported.count(CONFORMS)} of {len(supported)}"
    skipped = len(verdicts) - len(supported)
    return f"{text} (-{skipped})" if skipped else text
