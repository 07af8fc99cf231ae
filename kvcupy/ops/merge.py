"""Merge states of attention: outputs over different keys, by their log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import devices
from ..arrays import ArrayView, describe, view
from ..errors import CompileError
from ..formats import FORMATS
from ..kernels import zeroed
from . import checks, expressions, outputs, plan
from .merge_launch import MERGED, PARAMS, launch, merge_launch, specialisations

__all__ = ["merge_launch", "merge_states", "specialisations"]

_NAMES = ("out_a", "out_b", "out", "lse_a", "lse_b", "lse_out")
_NUM_ROWS = 3  # the first arrays are moved in whole words
_IN_PLACE = ((2, 0), (2, 1), (5, 3), (5, 4))  # outputs, and the inputs that they may be


def merge_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    out: Any = None,
    lse_out: Any = None,
    lse_base: str = "e",
    stream: Any = None,
) -> tuple[Any, Any]:
    """Combine the attention of the same queries over different keys into that over all of them.

    Parameters
    ----------
    out_a, out_b : outputs of attention, (T, Hq, Dv) fp32, fp16 or bf16
    lse_a, lse_b : float32 (T, Hq), logarithms of the sums of exp(score); of any strides. Minus
        infinity: that state saw no key, and its output, which may hold anything, is not read
    out : (T, Hq, Dv) of out_a's format, written in place; it may be out_a or out_b itself. float32
        states also merge into fp16 or bf16. None: allocated, like out_a
    lse_out : float32 (T, Hq), likewise, and may be lse_a or lse_b itself
    lse_base : "e" or "2", of the logarithms in and out
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    To merge N states at once give out_a (N, T, Hq, Dv), lse_a (N, T, Hq) and None for out_b, lse_b.

    Returns
    -------
    (out, lse) : the outputs; allocated ones are of out_a's library. Where no state saw a key, 0 and
    minus infinity

    Raises
    ------
    TypeError, ValueError : an argument does not fit, or an output is part of an input without being
        the same memory; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Weights are exp(lse - largest lse) over their sum, in float32; each output is rounded once.
    Cascade: attend a prefix that sequences share once, with all their queries as one sequence over
    its pages and `causal=False`, and merge that with the attention of each over its own rest.
    Stream: one kernel, in order. Capture: legal with both outputs given. Bytes: each row of a state
    read once, each row of out written once. Source: FlashInfer `merge_state` (base 2), vLLM
    `merge_attn_states` (base e); Milakov and Gimelshein 2018, online normaliser of softmax.

    Examples
    --------
    >>> out_a, out_b = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 5, np.float32)
    >>> lse_a, lse_b = np.zeros((1, 1), np.float32), np.full((1, 1), np.log(3), np.float32)
    >>> out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    >>> out.round(4).tolist(), np.exp(lse).round(4).tolist()
    ([[[4.0, 4.0]]], [[4.0]])
    """
    if out is None or lse_out is None:
        like = view(out_a, "out_a")
        shape = _shape_of_result(like, several=out_b is None and lse_b is None)
        if out is None:
            out = outputs.zeros(like, shape, like.format, stream)
        if lse_out is None:
            lse_out = outputs.zeros(like, shape[:2], "fp32", stream)
    arrays = (out_a, out_b, out, lse_a, lse_b, lse_out)
    pointers, made = plan.obtain(
        "merge_states", _NAMES, arrays, _NUM_ROWS, (lse_base,),
        lambda given, alignment: _plan(given, lse_base, alignment),
    )  # fmt: skip
    made.run(pointers, arrays, stream)
    return out, lse_out


@dataclass
class MergePlan(plan.Plan):
    """A merge of two states, or of several on the first axis of one array."""

    given: dict[str, ArrayView]
    lse_base: str
    alignment: int

    def __post_init__(self) -> None:
        super().__post_init__()
        views = [self.given.get(name) for name in _NAMES]
        self.in_place = tuple(pair for pair in _IN_PLACE if _same_layout(*(views[i] for i in pair)))
        if self.given["lse_out"].size == 0:
            return
        try:
            self.launches.append(self._launch())
        except CompileError as cause:
            self.cause = cause

    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe the arrays."""
        return [None if array is None else view(array) for array in arrays]

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Merge as array expressions."""
        device = self.device
        carriers: list[Any] = [None if a is None else device.carrier(view(a)) for a in arrays]
        out_a, out_b, out, lse_a, lse_b, lse_out = carriers
        merged, lse = _merged(
            list(out_a) if out_b is None else [out_a, out_b],
            lse_a if lse_b is None else expressions.module_of(lse_a).stack([lse_a, lse_b]),
            (self.given["out_a"].format, self.given["out"].format),
            self.lse_base,
        )
        out[...], lse_out[...] = merged, lse

    def _launch(self) -> plan.Launch:
        given = self.given
        params = zeroed(PARAMS)
        params["num_states"] = 2
        if "out_b" not in given:
            params["num_states"] = given["out_a"].shape[0]
            params["out_state_bytes"] = given["out_a"].strides[0]
            params["lse_state_bytes"] = given["lse_a"].strides[0]
        params["base_two"] = self.lse_base == "2"
        for name, v in given.items():
            strides = v.strides[-3:-1] if name.startswith("out") else v.strides[-2:]
            params[f"{'lse' if name == 'lse_out' else name}_rows"] = strides
        second = "out_b" in given
        pointers = (0, 3, 1 if second else None, 4 if second else None, None, None, 2, 5)
        source, target = FORMATS[given["out_a"].format], FORMATS[given["out"].format]
        return launch(
            self.device, params, source, target, given["out"].shape, self.alignment, pointers
        )


def _plan(given: dict[str, ArrayView], lse_base: Any, alignment: int) -> MergePlan:
    checks.require_given(given, ("out_a", "lse_a", "out", "lse_out"))
    if "out_b" in given or "lse_b" in given:
        checks.require_given(given, ("out_b", "lse_b"))
    checks.require_same_device(given)
    if lse_base not in ("e", "2"):
        raise ValueError(f'lse_base: expected "e" or "2", got {lse_base!r}')
    first = given["out_a"]
    shape = _shape_of_result(first, several="out_b" not in given)
    for name, lse_name in (("out_a", "lse_a"), ("out_b", "lse_b"), ("out", "lse_out")):
        if name not in given:
            continue
        wanted = first.shape if name == "out_a" else shape
        widens = name == "out" and first.format == "fp32" and given["out"].format in MERGED
        _require(given[name], name, wanted, given["out"].format if widens else first.format)
        if given[name].size:
            checks.require_contiguous(given[name], name)
        _require(given[lse_name], lse_name, wanted[:-1], "fp32")
    for name in ("out", "lse_out"):
        checks.require_output(given[name], name)
    return MergePlan(
        "merge_states", _NAMES, (2, 5), devices.get(first.device), first.library,
        given, str(lse_base), alignment,
    )  # fmt: skip


def _shape_of_result(out_a: ArrayView, *, several: bool) -> tuple[int, ...]:
    """Check format and shape of the first array; return the shape of the output."""
    if checks.number_format(out_a, "out_a").name not in MERGED:
        raise TypeError(f"out_a: expected {', '.join(MERGED)}, got {describe(out_a)}")
    if out_a.ndim != (4 if several else 3):
        wanted = "(states, tokens, heads, width)" if several else "(tokens, heads, width)"
        raise ValueError(f"out_a: expected {wanted}, got {describe(out_a)}")
    if several and out_a.shape[0] == 0:
        raise ValueError(f"out_a: expected at least one state, got {describe(out_a)}")
    return out_a.shape[-3:]


def _require(v: ArrayView, name: str, shape: tuple[int, ...], format: str) -> None:
    if v.format != format:
        raise TypeError(f"{name}: expected {format}, got {describe(v)}")
    if v.shape != shape:
        raise ValueError(f"{name}: expected {shape} {format}, got {describe(v)}")


def _same_layout(a: ArrayView | None, b: ArrayView | None) -> bool:
    """Return whether two views have each element at the same distance from their addresses."""
    if a is None or b is None or a.shape != b.shape:
        return False
    steps = zip(a.shape, a.strides, b.strides, strict=True)
    return all(n == 1 or s == t for n, s, t in steps)


@expressions.QUIET
def _merged(outs: list[Any], lse: Any, formats: tuple[str, str], lse_base: str) -> tuple[Any, Any]:
    """Merge bits of outputs (T, Hq, Dv) and float32 lse (N, T, Hq); return both merged.

    `formats` are those of the outputs, and of what they become.
    """
    xp = expressions.module_of(lse)
    power, logarithm = (xp.exp2, xp.log2) if lse_base == "2" else (xp.exp, xp.log)
    counts = lse != -np.inf
    largest = lse.max(axis=0)
    origin = xp.where(largest == -np.inf, np.float32(0), largest)
    factors = xp.where(counts, power(lse - origin), np.float32(0))
    total = factors.sum(axis=0)
    unseen = total == 0
    total = xp.where(unseen, np.float32(1), total)
    merged = xp.zeros(outs[0].shape, xp.float32)
    for out, seen, weight in zip(outs, counts, factors / total, strict=True):
        values = expressions.decode(out, formats[0])
        merged += xp.where(seen[..., None], weight[..., None] * values, np.float32(0))
    merged_lse = xp.where(unseen, np.float32(-np.inf), origin + logarithm(total))
    return expressions.encode(merged, formats[1]), merged_lse
