"""Whether the kernels are right on the machine at hand: `kvcupy.verify`, and before a first use.

`verify` runs the conformance cases, and one for each kernel that they do not reach. `is_verified`
runs the one case of a specialisation, which `cases.case_of` derives from its template arguments,
and keeps the result beside the compiled kernels.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import kvcupy as kv

from .. import devices, ops
from ..bench.report import describe, write_json
from ..config import config, logger
from ..devices import cache
from ..devices.protocol import Device
from ..errors import CaptureError, DeviceError, KvcupyError
from ..kernels import Specialisation
from ..ops import call
from ..ops.attention import LayerArrays, StepAttention, check_options
from .arrays import Argument, Arguments
from .cases import OPERATIONS, Case, case_of, cases
from .conformance import Outcome, run_case
from .implementations import load

# --- kvcupy.verify --------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyReport:
    """What came of `kvcupy.verify`.

    Attributes
    ----------
    device : the device's name
    outcomes : of all cases, in order
    seconds : how long it took, compilation included
    """

    device: str
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every kernel did what its reference says."""
        return not self.failures

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The outcomes that differ from the reference, or that raised."""
        return tuple(outcome for outcome in self.outcomes if outcome.failed)

    def __str__(self) -> str:
        count, failed = len(self.outcomes), len(self.failures)
        families = len({_FAMILIES[outcome.operation] for outcome in self.outcomes})
        text = f"{count} cases of {families} kernel families"
        if not failed:
            return f"verified on {self.device}: {text}, in {self.seconds:.1f} s"
        by_detail: dict[str, list[Outcome]] = {}
        for outcome in self.failures:
            by_detail.setdefault(outcome.detail, []).append(outcome)
        lines = [f"NOT verified on {self.device}: {failed} of {text} failed"]
        for first, *others in by_detail.values():
            more = f"\n  (and {len(others)} other cases likewise)" if others else ""
            lines.append(f"  {first}{more}".replace("\n    ", "\n      "))
        return "\n".join(lines)


def verify(device: Any = None, *, families: Iterable[str] | None = None) -> VerifyReport:
    """Run every kernel family on small hard cases, and compare with the float64 references.

    Parameters
    ----------
    device : `Device` or its name; None: a GPU if there is one, else the host
    families : some of "store", "rope", "attention", "merge", "transfer", "pages" and "indexing";
        None: all

    Returns
    -------
    VerifyReport : `ok`, and `failures`, each with the operation, the case and how it differs

    Raises
    ------
    ValueError : a family has another name
    TypeError, ValueError, DeviceError : there is no such device
    IndexFault : one that the device had recorded before

    Notes
    -----
    Kernels are compiled where they are not in the disk cache. The reference never stands in here:
    a kernel that does not compile is a failure. Waits for all work on the device. Capture: illegal.

    Examples
    --------
    >>> import kvcupy as kv
    >>> kv.verify("host", families=["pages"]).ok
    True
    """
    chosen = tuple(dict.fromkeys(_FAMILIES.values())) if families is None else tuple(families)
    for name in chosen:
        if name not in _FAMILIES.values():
            known = ", ".join(dict.fromkeys(_FAMILIES.values()))
            raise ValueError(f"families: expected some of {known}, got {name!r}")
    target = devices.get(device)
    kv.check_faults(target)
    start = time.perf_counter()
    implementation = load("kvcupy", target)
    implementation.functions = {**implementation.functions, **_FUNCTIONS}
    fallback, config.fallback = config.fallback, "error"
    call.forget()  # plans in which a plainer kernel may serve
    try:
        with call.unverified():
            outcomes = [
                run_case(case, implementation, device=target)
                for case in [*cases(), *_further_cases(target.arch)]
                if _FAMILIES[case.operation] in chosen
            ]
    finally:
        config.fallback = fallback
    return VerifyReport(target.name, tuple(outcomes), time.perf_counter() - start)


def _further_cases(arch: str) -> list[Case]:
    """Return a case for each kernel that a GPU takes where it can, and format of an attention."""
    chosen: dict[tuple[str, ...], Case] = {}
    for specialisation in ops.specialisations():
        case = case_of(specialisation)
        if case is not None and ops.is_reachable(specialisation, arch):
            kernel, arguments = specialisation.kernel.name, specialisation.arguments
            format = arguments[:1] if case.operation == "paged_attention" else ()
            chosen.setdefault((kernel, *format), case)
    return list(chosen.values())


def _attend(
    query: Any, k_cache: Any, v_cache: Any, *, out: Any, layout: str = "NHD",
    sm_scale: float | None = None, causal: bool = True, window: int | None = None,
    sinks: Any = None, logits_soft_cap: float | None = None, k_scale: Any = None,
    v_scale: Any = None, lse_out: Any = None, stream: Any = None, **tables: Any,
) -> None:  # fmt: skip
    """Attend as `kv.paged_attention` does, and with keys that are rotated on their way."""
    options = check_options(layout, sm_scale, causal, window, sinks, logits_soft_cap)
    layer = LayerArrays(k_cache, v_cache, k_scale, v_scale)
    learned = None if isinstance(sinks, int) else sinks
    StepAttention(**tables).run(
        layer, query, out, options, lse_out=lse_out, sinks=learned, stream=stream
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "paged_attention": _attend,
    "transfer_pages": kv.transfer_pages,
}
_FAMILIES = {
    operation: getattr(kv, operation).__module__.rpartition(".")[2]
    for operation in (*OPERATIONS, *_FUNCTIONS)
}
"""The family of each operation: the module of `kvcupy.ops` that it is in."""


# --- Before a first use ---------------------------------------------------------------------------

_REPORT = "bash scripts/gpu_report.sh"

_verdicts: WeakKeyDictionary[Device, dict[Specialisation, bool | None]] = WeakKeyDictionary()
_lock = threading.Lock()


def is_verified(device: Device, specialisation: Specialisation) -> bool | None:
    """Return whether a kernel is right on a device; None while a capture prevents the check.

    A kernel that has no plainer one is taken to be. Others run the case of `case_of` once for each
    processor, driver and program; the result is kept in the disk cache. A kernel that is not right,
    or whose check failed or must wait, is logged once per process.
    """
    with _lock:
        verdicts = _verdicts.setdefault(device, {})
    verdict = verdicts.get(specialisation)
    if verdict is None:
        case = case_of(specialisation)
        difference: str | None = ""
        if case is not None:
            difference = _recorded_difference(device, specialisation, case)
        if difference is None:
            if specialisation not in verdicts:
                logger.warning(
                    "%s has not been checked on %s, so that a plainer kernel is captured: make the "
                    "call once before the capture", specialisation, device.name,
                )  # fmt: skip
            return verdicts.setdefault(specialisation, None)
        verdict = verdicts[specialisation] = not difference
        if difference:
            logger.warning(
                "%s is not used on %s (%s), where a plainer kernel serves in its place: %s. "
                "Please report it with what `%s` writes",
                specialisation, device.name, device.model, difference, _REPORT,
            )  # fmt: skip
    return verdict


def _recorded_difference(device: Device, specialisation: Specialisation, case: Case) -> str | None:
    """Return how a kernel differs from its reference, "" for not at all; None in a capture."""
    key = cache.key("verified", *device.fingerprint(specialisation))
    record = cache.load(key)
    if record is None and device.capturing:
        return None
    if record is None:
        with cache.locked(key):
            record = cache.load(key)
            if record is None:
                try:
                    record = _difference(device, specialisation, case).encode()
                except CaptureError:  # of a stream that the device does not know
                    return None
                except Exception as error:  # whatever it is, the call itself can be served
                    # No record: it may have been want of memory. The next process tries again.
                    text = "\n".join(str(error).splitlines()[:1])
                    return f"its check failed: {type(error).__name__}: {text}"
                cache.store(key, record)
    return record.decode()


def _difference(device: Device, specialisation: Specialisation, case: Case) -> str:
    """Run the case of a kernel, and return how it differs from its reference."""
    texts: list[str] = []
    # A stream of its own waits for no work, and is in no capture. Of the host, this thread is.
    stream = device.stream() if device.kind == "cuda" else device.as_stream(None)

    def run() -> None:
        # Room for a rounding of weights: a kernel that is wrong is off by more, and a false alarm
        # would slow down every call.
        arguments = Arguments(device, seed=0, rounded_weights=True)
        made = case.build(arguments)
        function = _FUNCTIONS.get(case.operation) or getattr(kv, case.operation)
        function(**{
            name: value.array if isinstance(value, Argument) else value
            for name, value in made.arguments.items()
        })  # fmt: skip
        made.compare()
        texts.extend(map(str, arguments.all_differences()))

    with call.unverified() as taken:
        device.run(run, stream)
    stream.synchronize()  # nothing of the check is left when the caller goes on
    if specialisation not in taken:
        raise KvcupyError("no case takes the kernel")
    return "; ".join(texts)


# --- The command ----------------------------------------------------------------------------------


def main(device_name: str | None = None, *, json_file: Path | None = None) -> int:
    """Print whether the kernels are right on a device; return the exit status, 1 if not."""
    try:
        device = devices.get(device_name)
    except (ValueError, DeviceError) as error:
        print(f"verify: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    about = describe(device)
    report = verify(device)
    print(report)
    if json_file is not None:
        outcomes = [asdict(outcome) for outcome in report.outcomes]
        result = {"benchmark": "verify", **about, "ok": report.ok, "seconds": report.seconds}
        write_json(json_file, {**result, "outcomes": outcomes})
    return int(not report.ok)
