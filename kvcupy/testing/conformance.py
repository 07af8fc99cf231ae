"""Run functions through the conformance cases: what conforms, what differs, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import kvcupy as kv

from .. import devices
from .arrays import Argument, Arguments, Mismatch
from .cases import Call, Case, cases

CONFORMS, DIFFERS, RAISED, NOT_SUPPORTED = "conforms", "differs", "raised", "not supported"
Wrap = Callable[[Argument], Any]
"""Makes the array that a function takes of an argument."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case: one of the four verdicts above, and why."""

    operation: str
    case: str
    verdict: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict in (DIFFERS, RAISED)

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        detail = detail.replace("\n", "\n    ")
        return f"{self.operation}, {self.case}: {self.verdict}{detail}"


def run_case(
    case: Case, function: Callable[..., Any] | None = None, *, device: Any = None,
    wrap: Wrap | None = None, rounded_weights: bool = False, records_faults: bool = False,
    seed: int = 0,
) -> Outcome:  # fmt: skip
    """Run a function through one case; None: kvcupy's own, which also records indices past the end.

    The rest is as for `conform`.
    """
    if function is None:
        function, records_faults = getattr(kv, case.operation), True
    verdict, detail = CONFORMS, ""
    try:
        target = devices.get(device)
        arguments = Arguments(target, seed, rounded_weights=rounded_weights)
        call = case.build(arguments)
        if lacks := _missing_parameter(function, call.arguments):
            return Outcome(case.operation, case.name, NOT_SUPPORTED, lacks)
        detail = _compare(call, arguments, function, wrap or _array_of, records_faults)
        verdict = DIFFERS if detail else CONFORMS
    except Exception as error:  # whatever the function under test raises is its result
        text = str(error).splitlines() or [""]
        verdict, detail = RAISED, f"{type(error).__name__}: {text[0]}"
    return Outcome(case.operation, case.name, verdict, detail)


def _array_of(argument: Argument) -> Any:
    return argument.array


def _missing_parameter(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return why a function cannot be called with all arguments by name, or ""."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        unknown = [name for name in arguments if name not in parameters]
        if unknown:
            return f"it takes no {', '.join(unknown)}"
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return f"its signature: {error}"
    return ""


def _compare(
    call: Call, arguments: Arguments, function: Callable[..., Any], wrap: Wrap,
    records_faults: bool,
) -> str:  # fmt: skip
    """Call a function with the arguments of a case; return how what it left differs, or ""."""
    device = arguments.device

    def wrapped(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(wrapped, value))
        return wrap(value) if isinstance(value, Argument) else value

    device.synchronize()  # arguments were uploaded on the device's own stream
    function(**{name: wrapped(value) for name, value in call.arguments.items()})
    device.synchronize()
    recorded = records_faults and _fault_of(device)
    expected = call.compare()
    texts = list(map(str, arguments.all_differences()))
    if records_faults and recorded != expected:
        what = "one, though all are inside" if recorded else "none, though one is past the end"
        texts.append(f"indices past the end: recorded {what}")
    return "\n".join(texts)


def _fault_of(device: Any) -> bool:
    try:
        kv.check_faults(device)
    except kv.IndexFault:
        return True
    return False


def conform(
    operation: str, function: Callable[..., Any], *, device: Any = None, wrap: Wrap | None = None,
    rounded_weights: bool = False, seed: int = 0,
) -> list[Outcome]:  # fmt: skip
    """Run a function through the cases of one operation.

    Parameters
    ----------
    operation : of `cases.OPERATIONS`
    function : called with the names of kvcupy's parameters; what its signature lacks is not
        supported. Outputs are written in place, and what it returns is ignored
    device : `Device` or its name, which arrays are on; None: a GPU if there is one, else the host
    wrap : makes the function's array of an `Argument`; None: `argument.array`, of NumPy or CuPy
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
    return [
        run_case(
            case, function, device=device, wrap=wrap, rounded_weights=rounded_weights, seed=seed
        )
        for case in cases([operation])
    ]  # fmt: skip


def require(operation: str, function: Callable[..., Any], **options: Any) -> None:
    """Run `conform`, and raise `Mismatch` with all cases that differ or raised, and how."""
    failures = [outcome for outcome in conform(operation, function, **options) if outcome.failed]
    if failures:
        raise Mismatch("\n".join(map(str, failures)))
