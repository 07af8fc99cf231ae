"""Check the kernels on the machine at hand: `kvcupy.verify`, and before a kernel's first use.

`verify` runs the conformance cases, and one more for each kernel that these do not reach.
`is_verified` runs the case that `cases.case_of` derives from a specialisation's template arguments,
and stores the result beside the compiled kernels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import kvcupy as kv

from .. import devices, ops
from ..config import config, logger
from ..devices import cache
from ..devices.protocol import Device
from ..errors import CaptureError, DeviceError, KvcupyError, process_lock
from ..kernels import Specialisation
from ..ops import call, launch
from ..ops.attention import LayerArrays, StepAttention, check_options
from ..progress import tracked
from .arrays import Argument, Arguments
from .cases import OPERATIONS, Case, case_of, cases, own_cases
from .conformance import Outcome, run_case
from .report import describe, write_json

# --- kvcupy.verify --------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyReport:
    """The result of `kvcupy.verify`.

    Attributes
    ----------
    device : the device's name
    outcomes : one for each case, in order
    seconds : the total time, including compilation
    """

    device: str
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every kernel matches its reference."""
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
    families : some of "store", "rope", "attention", "merge", "transfer", "pages", "states" and
        "indexing"; None: all

    Returns
    -------
    VerifyReport : `ok`, and `failures`, each with the operation, the case and how it differs

    Raises
    ------
    ValueError : a family has another name
    TypeError, ValueError, DeviceError : there is no such device
    IndexFault : the device had recorded a fault before the call

    Notes
    -----
    Kernels that are not in the disk cache are compiled. The reference never stands in here: a
    kernel that does not compile is a failure. Waits for all work on the device. Capture: illegal.

    Examples
    --------
    >>> import kvcupy as kv
    >>> kv.verify("host", families=["pages"]).ok
    True
    """
    return _verify(device, families, lambda cases: cases)


def _verify(
    device: Any, families: Iterable[str] | None,
    track: Callable[[Sequence[Case]], Iterable[Case]],
) -> VerifyReport:  # fmt: skip
    known = tuple(dict.fromkeys(_FAMILIES.values()))
    if families is not None and (isinstance(families, str) or not isinstance(families, Iterable)):
        raise TypeError(f"families: expected names, got {families!r}")
    chosen = known if families is None else tuple(families)
    unknown = [repr(name) for name in chosen if name not in known]
    if unknown or not chosen:
        got = unknown[0] if unknown else "none"
        raise ValueError(f"families: expected some of {', '.join(known)}, got {got}")
    target = devices.get(device)
    kv.check_faults(target)
    start = time.perf_counter()
    fallback, config.fallback = config.fallback, "error"
    call.forget()  # plans may use a plainer kernel
    try:
        with launch.unverified():
            outcomes = [
                run_case(case, function_of(case), device=target, records_faults=True)
                for case in track([
                    case for case in [*cases(), *own_cases(), *_further_cases(target.arch)]
                    if _FAMILIES[case.operation] in chosen
                ])
            ]  # fmt: skip
    finally:
        config.fallback = fallback
    return VerifyReport(target.name, tuple(outcomes), time.perf_counter() - start)


def _further_cases(arch: str) -> list[Case]:
    """Return a case for each kernel that has a plainer one; of attention, for each format.

    Each value of a bool among the template arguments counts as a kernel.
    """
    chosen: dict[tuple[str, ...], Case] = {}
    for specialisation in ops.specialisations():
        case = case_of(specialisation)
        if case is not None and ops.is_reachable(specialisation, arch):
            kernel, arguments = specialisation.kernel.name, specialisation.arguments
            format = arguments[:1] if case.operation == "paged_attention" else ()
            flags = (each for each in arguments if each in ("true", "false"))
            chosen.setdefault((kernel, *format, *flags), case)
    return list(chosen.values())


def _attend(
    query: Any, k_cache: Any, v_cache: Any, *, out: Any, layout: str = "NHD",
    sm_scale: float | None = None, causal: bool = True, window: int | None = None,
    sink_tokens: int | None = None, sinks: Any = None, logits_soft_cap: float | None = None,
    k_scale: Any = None, v_scale: Any = None, k_scale_cache: Any = None,
    v_scale_cache: Any = None, batch_invariant: bool | None = None, interleaved: bool = False,
    rotary_start: int = 0, lse_out: Any = None, stream: Any = None, **tables: Any,
) -> None:  # fmt: skip
    """Attend as `kv.paged_attention`, also with keys that are rotated on read."""
    options = check_options(
        layout, sm_scale, causal, window, sink_tokens, logits_soft_cap,
        batch_invariant=batch_invariant, interleaved=interleaved, rotary_start=rotary_start,
    )  # fmt: skip
    layer = LayerArrays(k_cache, v_cache, k_scale, v_scale, k_scale_cache, v_scale_cache)
    StepAttention(**tables).run(
        layer, query, out, options, lse_out=lse_out, sinks=sinks, stream=stream
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "paged_attention": _attend,
    "transfer_pages": kv.transfer_pages,
}


def function_of(case: Case) -> Callable[..., Any]:
    """Return what a case calls: its operation, or more of it than is public."""
    return _FUNCTIONS.get(case.operation) or getattr(kv, case.operation)


_FAMILIES = {
    operation: getattr(kv, operation).__module__.rpartition(".")[2]
    for operation in (*OPERATIONS, *_FUNCTIONS)
}
"""The family of each operation: the module of `kvcupy.ops` that it is in."""


# --- Before a first use ---------------------------------------------------------------------------

_REPORT = "bash scripts/gpu_report.sh"

_verdicts: WeakKeyDictionary[Device, dict[Specialisation, bool | None]] = WeakKeyDictionary()
_lock = process_lock()


def is_verified(device: Device, specialisation: Specialisation) -> bool | None:
    """Return whether a kernel matches its reference; None while a capture prevents the check.

    A kernel without a plainer one is not checked, and True is returned. Otherwise the case of
    `case_of` runs once for each GPU model, driver and program, and the result is stored in the disk
    cache. A kernel that is wrong, or whose check failed or was postponed, is logged once a process.
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
                    "%s has not been checked on %s, so a plainer kernel is captured: make the call "
                    "once before the capture", specialisation, device.name,
                )  # fmt: skip
            return verdicts.setdefault(specialisation, None)
        verdict = verdicts[specialisation] = not difference
        if difference:
            logger.warning(
                "%s is not used on %s (%s), and a plainer kernel replaces it: %s. Please report "
                "this with the output of `%s`",
                specialisation, device.name, device.model, difference, _REPORT,
            )  # fmt: skip
    return verdict


def _recorded_difference(device: Device, specialisation: Specialisation, case: Case) -> str | None:
    """Return how a kernel differs from its reference, "" if it does not; None in a capture."""
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
                except CaptureError:  # a stream that the device does not know of
                    return None
                except Exception as error:  # a plainer kernel can serve the call
                    # Not stored: memory may have run out. The next process tries again.
                    text = "\n".join(str(error).splitlines()[:1])
                    return f"its check failed: {type(error).__name__}: {text}"
                cache.store(key, record)
    return record.decode()


def _difference(device: Device, specialisation: Specialisation, case: Case) -> str:
    """Run a kernel's case, and return how the result differs from the reference."""
    texts: list[str] = []
    # A new stream has no earlier work and is not captured. The host device uses this thread.
    stream = device.stream() if device.kind == "cuda" else device.as_stream(None)

    def run() -> None:
        # The tolerance allows for rounded weights: a wrong kernel is off by more, and a false alarm
        # would slow down every call.
        arguments = Arguments(device, seed=0, rounded_weights=True)
        built = case.build(arguments)
        function_of(case)(**{
            name: value.array if isinstance(value, Argument) else value
            for name, value in built.arguments.items()
        })  # fmt: skip
        built.compare()
        texts.extend(map(str, arguments.all_differences()))

    with launch.unverified() as taken:
        device.run(run, stream)
    stream.synchronize()  # the check ends before the caller's work starts
    if specialisation not in taken:
        raise KvcupyError("the case does not run the kernel")
    return "; ".join(texts)


# --- The command ----------------------------------------------------------------------------------


def main(
    device_name: str | None = None, *, json_file: Path | None = None, lines: bool = False
) -> int:
    """Print whether all kernels match on a device; return the exit status, 1 if one does not."""
    try:
        device = devices.get(device_name)
    except (ValueError, DeviceError) as error:
        print(f"verify: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    about = describe(device)
    report = _verify(device, None, partial(tracked, what="verify", unit="cases", lines=lines))
    print(report)
    if json_file is not None:
        outcomes = [asdict(outcome) for outcome in report.outcomes]
        result = {"benchmark": "verify", **about, "ok": report.ok, "seconds": report.seconds}
        write_json(json_file, {**result, "outcomes": outcomes})
    return int(not report.ok)
