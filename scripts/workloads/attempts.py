"""One call with some wrong arguments, and what must hold after it.

An error must be of a type that the docstring lists, or IndexFault in strict mode, and name an
argument; nothing may have changed then. Without one, only that may have changed which the call is
there to write.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import kvcupy as kv

from . import mistakes
from .memory import Arena

PACKAGE = Path(kv.__file__).parent
# What the contract says of every call: the arguments' own errors, where a docstring lists none.
BY_CONTRACT = frozenset({"TypeError", "ValueError"})
OF_STREAMS = BY_CONTRACT | {"DeviceError", "CaptureError"}
NO_GPU = "no NVIDIA driver is installed"

MEANINGS: dict[str, mistakes.Breaker] = {}
"""What makes wrong values of a parameter, by its name."""


def _meaning(breaker: mistakes.Breaker, names: str) -> None:
    MEANINGS.update(dict.fromkeys(names.split(), breaker))


_meaning(
    mistakes.array,
    """
    key value k_cache v_cache latent rope_key cache query rope_table query_out key_out query_norm
    key_norm k_out v_out out lse_out out_a lse_a out_b lse_b k_scale_cache v_scale_cache qkv array
    arrays dst src tree_mask k v rope reads writes x pointer
    states caches
""",
)
_meaning(
    mistakes.indices,
    """
    slot_mapping slots positions block_table seq_lens append_lens query_lens cu_query_lens
""",
)
_meaning(
    mistakes.listed,
    """
    src_pages dst_pages pages out_pages delta device_pages host_pages hashes token_ids append_lens
    leaves token_tree layers sections seqs shape strides replay families
""",
)
_meaning(
    mistakes.real,
    """
    k_scale v_scale scale sm_scale logits_soft_cap eps base sinks
    lease_s deadline_s ttl_s
""",
)
_meaning(
    mistakes.integer,
    """
    page_size skip_slot window num_pages num_layers num_kv_heads num_q_heads head_dim v_head_dim
    latent_dim rope_dim layer n at start stop max_blocks max_seq_len max_batch_tokens block_tokens
    parent num_blocks max_positions rotary_dim priority bits recent first
    sink_tokens memory_bytes num_tokens checkpoint_tokens
""",
)
_meaning(
    mistakes.small_integer,
    "schedules seed slots_in_flight host_bytes",
)
_meaning(
    mistakes.text,
    """
    layout placement method write action lse_base rope_mode format library source struct
    reports model engine scale_rule
""",
)
_meaning(
    mistakes.flag,
    """
    interleaved sections_interleaved write_key causal convert scales timing readonly
    barriers return_lse hadamard batch_invariant keep_step
""",
)
_meaning(mistakes.dtype, "dtype encoding")
_meaning(
    mistakes.stream, "stream alt_stream after load_stream save_stream copy_stream main others other"
)
_meaning(mistakes.device, "device name")
_meaning(mistakes.path, "path")
_meaning(mistakes.sequence, "seq child")
_meaning(
    mistakes.anything,
    """
    src_pool dst_pool device_pool host_pool pool tiers scaling event since function program
    before operation index owner params stores heads ticket sender receiver
    spans demotion attention encryption_key groups state
""",
)
_meaning(mistakes.no_function, "release")


class Finding(Exception):
    """What must not happen, and did; equal keys are one finding."""

    def __init__(self, text: str, key: str = "") -> None:
        super().__init__(text)
        self.key = key or text.splitlines()[0].partition(":")[0]


class Case:
    """The random choices of one case, its memory, and what has been tried."""

    def __init__(self, name: str, number: int, folder: Path, *, verbose: bool = False) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.rng = Random(f"{name} {number}")
        self.device: Any = kv.device("host")
        self.arena = Arena(self.rng)
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.raised: list[str] = []
        self.accepted: list[str] = []
        self.verbose = verbose
        self.exits = ExitStack()

    def place(self, content: Any, shift: int = 0) -> np.ndarray[Any, Any]:
        """Return a copy of an array in separate memory."""
        return self.arena.place(content, shift)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def capturing(self) -> Any:
        """Return a stream that is being captured until the case ends."""
        stream = self.device.stream()
        self.exits.enter_context(stream.capture())
        return stream

    def say(self, line: str) -> None:
        if self.verbose:
            print(line, flush=True)

    # --- Calls ---

    def break_some(
        self, arguments: dict[str, Any], names: Iterable[str], count: int
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the arguments with up to `count` wrong ones, and their names."""
        self.arrays = [a for a in arguments.values() if isinstance(a, np.ndarray)]
        broken = self.rng.sample(list(names), min(count, len(list(names))))
        changed = dict(arguments)
        for name in broken:
            try:
                changed[name] = MEANINGS[name](self, arguments.get(name))
            except (MemoryError, OverflowError):  # of the breaker, which tried too much
                continue
        return changed, broken

    def attempt(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], *,
        names: Iterable[str] = (), writes: Callable[[], Iterable[np.ndarray[Any, Any]]] = tuple,
        state: Callable[[], Any] = lambda: None, valid: bool = False, label: str = "",
        described: Callable[..., Any] | None = None, settle: bool = True, owner: Any = None,
    ) -> Any:  # fmt: skip
        """Call a function, look at what happened, and return its result or its exception.

        Parameters
        ----------
        names : that errors may name, besides the parameters
        writes : returns what the call may have written, if it does not raise
        state : returns what must be the same after an error
        valid : no argument is wrong, so that the call must not raise
        described : whose docstring lists the errors; by default the function itself
        owner : the class whose method it is
        settle : whether to wait for all streams, so that failures there are the call's
        """
        label = label or getattr(function, "__qualname__", str(function))
        self.say(f"  {label}({', '.join(f'{n}={show(v)}' for n, v in arguments.items())})")
        before = state()
        self.arena.remember()
        error: BaseException | None = None
        result = None
        try:
            result = function(**arguments)
            if settle:
                self.settle()
        except Exception as caught:
            error = caught
        in_strict = isinstance(error, kv.IndexFault) and kv.config.raises_index_faults
        if error is None or in_strict:
            if wrong := self.arena.changed(writes()):
                raise Finding(
                    f"{label}: wrote what it must not: {wrong}", f"{label} wrote"
                ) from error
            self.accepted += [label] if error is None else []
            self.raised += [] if error is None else ["IndexFault"]
            return result if error is None else error
        self.say(f"    {type(error).__name__}: {str(error)[:300]}")
        kind = type(error).__name__
        where = origin(error)
        if valid:
            raise Finding(
                f"{label}: refused a valid call, {kind} {where}: {error}", f"valid {kind} {where}"
            ) from error
        documented = described or function
        require_documented(label, documented, owner, error, where)
        require_named(label, documented, names, error, where)
        with suppress(kv.KvcupyError):  # a failure of earlier work
            self.settle()
        if wrong := self.arena.changed():
            raise Finding(
                f"{label}: raised {kind} and changed {wrong}: {error}", f"changed {kind} {where}"
            ) from error
        after = state()
        if not same(before, after):
            raise Finding(
                f"{label}: raised {kind} and changed its object: {error}\n"
                f"  before {show(before)}\n  after  {show(after)}",
                f"object {kind} {where}",
            ) from error
        self.raised.append(kind)
        return error

    def settle(self) -> None:
        """Wait for all streams, and drop the faults that were recorded."""
        for stream in list(self.device._streams.values()):
            if not stream.capturing:
                stream.synchronize()
        self.device.context.faults[...] = 0


def same(a: Any, b: Any) -> bool:
    """Return whether two snapshots are equal, NaN to NaN."""
    return repr(a) == repr(b) if not isinstance(a, bytes) else a == b


def show(value: Any) -> str:
    """Describe an argument in a few words."""
    if isinstance(value, np.ndarray):
        few = f" {value.tolist()}" if value.size <= 6 and value.dtype.kind in "iufb" else ""
        strides = "" if value.flags.c_contiguous else f" strides {value.strides}"
        return f"<{value.dtype}{list(value.shape)}{strides}{few}>"
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) < 200 else text[:200] + "..."


# --- What errors must say -------------------------------------------------------------------------


@lru_cache(maxsize=512)
def documented_errors(function: Any, owner: Any = None) -> frozenset[str]:
    """Return the names of the exceptions that a docstring lists under Raises.

    A docstring that says "as `x`", or "like `x`", of another method of its class lists that
    method's errors, too.
    """
    doc = inspect.getdoc(function) or ""
    others = re.findall(r"\b(?:as|like|As|Like)\s+`(\w+)`", doc)
    section = re.search(r"Raises\n-+\n(.*?)(?=\n\n|\Z)", doc, re.S)
    lines = re.findall(r"^([A-Z][\w, ]*?)(?: :|$)", section[1], re.M) if section else []
    own = frozenset(name for line in lines for name in re.findall(r"\w+", line)) or BY_CONTRACT
    if owner is not None and owner.__module__.startswith("kvcupy.devices"):
        own |= OF_STREAMS
    named = [getattr(owner, name) for name in others if hasattr(owner, name)]
    return own.union(*(documented_errors(other) for other in named if other is not function))


def require_documented(
    label: str, function: Any, owner: Any, error: BaseException, where: str
) -> None:
    listed = documented_errors(function, owner)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if type(error) in (TypeError, ValueError) or isinstance(error, (kv.KvcupyError, OSError)):
        # Some arrays claim to be on a GPU, which this machine may lack. Calls that are illegal
        # in a capture are listed once, for all functions.
        by_contract = NO_GPU in str(error) or isinstance(error, kv.CaptureError)
        fine = bool(kinds & listed) or by_contract
    else:
        fine = isinstance(error, (MemoryError, ImportError)) or type(error).__name__ in listed
    if not fine:
        # One line that raises for many callers is one finding, a docstring that lacks it another.
        own = label if listed & kinds or "kvcupy" not in where else ""
        raise Finding(
            f"{label}: {type(error).__name__} {where} is not among the documented "
            f"{sorted(listed)}: {str(error)[:300]}",
            f"{own} {type(error).__name__} {where}",
        ) from error


def require_named(
    label: str, function: Any, names: Iterable[str], error: BaseException, where: str
) -> None:
    """Raise Finding unless an error of the arguments names one."""
    if type(error) not in (TypeError, ValueError):
        return
    try:
        names = {*names, *inspect.signature(function).parameters}
    except (TypeError, ValueError):
        names = set(names)
    words = set(re.findall(r"\w+", str(error)))
    if not words & names or "kvcupy" not in where:
        raise Finding(
            f"{label}: {type(error).__name__} {where} names no argument: {str(error)[:300]}",
            f"unnamed {where}",
        ) from error


def origin(error: BaseException) -> str:
    """Return the innermost line of kvcupy's that an error came through, and what raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)]
    if not own:
        called = len(frames) == 1  # Python itself refused the arguments
        return "(by the call itself, not kvcupy)" if not called else "(at the call, of kvcupy)"
    last = own[-1]
    beneath = "" if own[-1] is frames[-1] else f", beneath it {Path(frames[-1].filename).name}"
    return f"(kvcupy/{Path(last.filename).relative_to(PACKAGE)}:{last.lineno}{beneath})"
