"""Run implementations through the conformance cases: what conforms, what differs, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kvcupy as kv

from .. import devices
from .arrays import Argument, Arguments, Mismatch
from .cases import OPERATIONS, Case, cases

CONFORMS, DIFFERS, RAISED, NOT_SUPPORTED = "conforms", "differs", "raised", "not supported"


class NotSupported(Exception):
    """An implementation has no way to do what a case asks for; the message says why."""


@dataclass
class Implementation:
    """Functions with kvcupy's signatures, by the names of the operations.

    Attributes
    ----------
    name : of the implementation
    functions : by operation. Outputs are written in place, and what is returned is ignored
    wrap : makes the array that a function takes of an `Argument`
    lacks : reasons by key of `cases.FEATURES`; cases that need one are not run
    rounded_weights : whether its attention rounds softmax weights to the query's format in decode
        too, for tensor cores; prefill always may
    has_fault : whether an index past the end was recorded since it was asked last; None: indices
        are not recorded
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    wrap: Callable[[Argument], Any] = field(default=lambda argument: argument.array)
    lacks: Mapping[str, str] = field(default_factory=dict)
    rounded_weights: bool = False
    has_fault: Callable[[Any], bool | None] = field(default=lambda device: None)


def own_kernels() -> Implementation:
    """Return kvcupy's operations."""
    functions = {operation: getattr(kv, operation) for operation in OPERATIONS}
    return Implementation("kvcupy", functions, has_fault=_fault_of_kvcupy)


def _fault_of_kvcupy(device: Any) -> bool:
    try:
        kv.check_faults(device)
    except kv.IndexFault:
        return True
    return False


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
