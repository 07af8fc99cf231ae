"""Prepared calls: an operation with fixed arguments, but for a few arrays that each call passes.

`bind` learns what a call runs from the operation itself: it calls it with a `Recorder` as stream,
and with placeholders where arrays vary. The plan that is then made is the bound call's own. Its
addresses that never change have been checked, so each call checks those that vary, and launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any

from ..arrays import ArrayView, describe, probe_arguments, taking, tensor_matcher, view
from ..errors import DeviceError, Unpicklable
from . import attention, checks, merge, rope, states, store  # noqa: F401  # declare operations
from .call import Operation, Recorder, same_layout
from .indexing import slot_mapping
from .pages import copy_pages, shift_pages
from .spec import OPERATIONS, STREAMS, Declaration
from .transfer import transfer_pages


class Vary:
    """An argument that each call of a bound operation passes; `vary` makes it."""

    def __init__(self, example: Any) -> None:
        self.example = example

    def __repr__(self) -> str:
        return f"kv.vary({type(self.example).__name__})"


def vary(example: Any) -> Vary:
    """Mark an argument of `bind` as one that each call passes.

    Parameters
    ----------
    example : an array of the shape, format, strides and device that the calls have. Its memory is
        not kept. For `stream` a stream or None, for `alt_stream` a stream

    Examples
    --------
    >>> import numpy as np
    >>> vary(np.zeros(3))
    kv.vary(ndarray)
    """
    return Vary(example)


def bind(operation: Callable[..., Any], /, *arguments: Any, **options: Any) -> BoundCall:
    """Prepare calls of an operation that differ in a few arrays at most.

    Parameters
    ----------
    operation : `store_kv`, `gather_kv`, `rope_store_kv`, `paged_attention` or any other operation
        on arrays or pools. Operations of which the host reads an argument (`slot_mapping` without
        `out`, `page_table_csr`, `find_duplicate_slots`), `copy_pages` of several arrays,
        `shift_pages` of a pool and `transfer_pages` are called as usual; binding them only fixes
        their arguments
    arguments, options : as the operation takes them. Arrays wrapped as `vary(example)` are passed
        at each call, by name. So may `stream` and `alt_stream` be; a `stream` that is None is the
        current one at each call. Whatever is no array or stream is fixed

    Returns
    -------
    callable : it takes the varying arguments by name, and does and returns what the operation does.
        Fixed arrays are kept alive, and stay where they are: their memory must not be resized or
        replaced. It may be called from several threads

    Raises
    ------
    TypeError, ValueError : the operation cannot be bound, or an argument does not fit

    Notes
    -----
    A call checks only what varies: names, format, shape, strides and device are as in the
    example, addresses are aligned as the kernel needs, and outputs share no memory. With arrays of
    another library, or at addresses of another alignment, it is an ordinary call. Stream, Capture,
    Bytes: as the operation.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcupy as kv
    >>> k_cache, v_cache = np.zeros((2, 16, 8, 64), np.float16)
    >>> key, slots = np.ones((1, 8, 64), np.float16), np.array([3])
    >>> store = kv.bind(kv.store_kv, kv.vary(key), kv.vary(key), k_cache, v_cache, slots)
    >>> store(key=2 * key, value=3 * key)
    >>> float(k_cache[3, 0, 0]), float(v_cache[3, 0, 0])
    (2.0, 3.0)
    """
    if operation is not transfer_pages and _declaration(operation) is None:
        name = getattr(operation, "__qualname__", repr(operation))
        raise TypeError(f"operation: expected one of kvcupy's on arrays or pools, got {name}")
    parameters = inspect.signature(operation).bind(*arguments, **options).arguments
    examples = {n: value.example for n, value in parameters.items() if isinstance(value, Vary)}
    for name, example in examples.items():
        if name not in STREAMS and not checks.is_array(example):
            raise TypeError(f"{name}: expected an array to vary, got {example!r}, which is fixed")
    if examples.get("alt_stream", 0) is None:
        raise TypeError("alt_stream: expected a stream to vary, got None")
    views = {n: view(x, n) for n, x in examples.items() if n not in STREAMS}
    if _has_plan(operation, parameters):
        planned = _PlannedCall(operation, parameters, examples, views)
        if planned.lasting:
            return planned
    return BoundCall(operation, parameters, examples, views)


def _has_plan(operation: Callable[..., Any], parameters: Mapping[str, Any]) -> bool:
    """Return whether one plan serves a call: the host reads no argument, and there is one array."""
    if operation is slot_mapping:
        return parameters.get("out") is not None
    if operation is copy_pages:
        cache = parameters["cache"]
        cache = cache.example if isinstance(cache, Vary) else cache
        if isinstance(cache, ArrayView) and cache.scales is not None:
            return False  # codes and scales
        return not isinstance(cache, (list, tuple)) and not hasattr(cache, "parts")
    if operation is shift_pages:
        return not hasattr(parameters["pool"], "groups")
    return isinstance(_declaration(operation), Operation)


def _declaration(operation: Callable[..., Any]) -> Declaration | None:
    """Return the declaration of a public function; None: it is of no operation on arrays."""
    declarations = OPERATIONS.values()
    return next((each for each in declarations if each.function is operation), None)


class BoundCall(Unpicklable):
    """An operation with fixed arguments; `bind` makes it. Called with those that vary, by name."""

    def __init__(
        self, operation: Callable[..., Any], parameters: dict[str, Any],
        examples: dict[str, Any], views: dict[str, ArrayView],
    ) -> None:  # fmt: skip
        self._operation = operation
        self._names = frozenset(examples)
        self._views = {name: v.without_owner() for name, v in views.items()}
        self._fixed = {n: value for n, value in parameters.items() if n not in examples}

    def __repr__(self) -> str:
        varying = [f"{name} {describe(v)}" for name, v in self._views.items()]
        varying += sorted(self._names - self._views.keys())
        fixed = ", ".join(self._fixed) or "nothing"
        return (
            f"<{self._operation.__name__}, bound: {fixed} fixed; "
            f"{', '.join(varying) or 'nothing'} varies>"
        )

    def __call__(self, **varying: Any) -> Any:
        """Call the operation."""
        if varying.keys() != self._names:
            raise self._wrong_names(varying)
        self._require_alike(varying)
        return self._operation(**self._fixed, **varying)

    def _wrong_names(self, varying: Mapping[str, Any]) -> TypeError:
        problems = [f"missing {name}" for name in sorted(self._names - varying.keys())]
        for name in sorted(varying.keys() - self._names):
            is_fixed = name in inspect.signature(self._operation).parameters
            problems.append(f"{name} is fixed" if is_fixed else f"no argument {name}")
        names = ", ".join(sorted(self._names)) or "no arguments"
        return TypeError(
            f"{self._operation.__name__}, bound: expected {names}, got {'; '.join(problems)}"
        )

    def _require_alike(self, varying: Mapping[str, Any]) -> None:
        """Raise unless arrays are like the examples, but for their addresses and libraries."""
        for name, example in self._views.items():
            v = view(varying[name], name)
            if v.format != example.format:
                raise TypeError(f"{name}: expected {describe(example)}, got {describe(v)}")
            if v.device != example.device:
                raise ValueError(f"{name}: expected one on {example.device}, got one on {v.device}")
            if not same_layout(v, example):
                expected, got = (f"{describe(u)} of strides {u.strides}" for u in (example, v))
                raise ValueError(f"{name}: expected {expected}, got {got}")


class _PlannedCall(BoundCall):
    """A bound call with its own plan."""

    def __init__(
        self, operation: Callable[..., Any], parameters: dict[str, Any],
        examples: dict[str, Any], views: dict[str, ArrayView],
    ) -> None:  # fmt: skip
        super().__init__(operation, parameters, examples, views)
        placeholders = {name: Vary(example) for name, example in examples.items()}
        recorder = Recorder()
        operation(**{**parameters, **placeholders, "stream": recorder})
        self._family, arrays, self._options, self._make = recorder.call
        self._streams = {
            name: None if name in examples else parameters.get(name)
            for name in STREAMS[: recorder.num_streams]
        }
        self._streams_vary = len(examples) > len(views)

        # The arrays of a call are the fixed ones followed by those that vary, put in order.
        sources = list(range(len(arrays)))
        for number, name in enumerate(views):
            positions = [i for i, array in enumerate(arrays) if array is placeholders[name]]
            if not positions:
                raise TypeError(f"{name}: expected a fixed argument, got {placeholders[name]!r}")
            for i in positions:
                sources[i] = len(arrays) + number
        varying = [i for i, source in enumerate(sources) if source != i]
        self._values, self._in_order = taking(list(views)), taking(sources)
        arrays_at_first = tuple([a.example if isinstance(a, Vary) else a for a in arrays])
        pointers, self._plan = self._family.plan(arrays_at_first, self._options, self._make)
        checked = pointers, arrays_at_first
        if self._plan.allocated:
            plan = self._plan
            checked = plan.allocate(*checked, plan.device.as_stream(None, plan.library))
        self._plan.fix(*checked, varying)
        self._pointers, self._arrays = pointers, tuple([
            None if i in varying else array for i, array in enumerate(arrays)
        ])  # fmt: skip
        # Most calls only launch: they take the addresses that vary, and no other.
        numbers = {i: sources[i] - len(arrays) for i in varying}
        self._fixed_plan = None
        if views and len(self._streams) == 1:
            self._fixed_plan = self._plan.with_fixed(pointers, numbers)

        values = [examples[name] for name in views]
        self._signatures = probe_arguments(values)[1]
        self._matcher = tensor_matcher(values)

        self.lasting: bool = self._plan.lasting

        words = self._family.words
        self._alignment = _alignment(pointers, words)
        self._fixed_alignment = _alignment(pointers, [i for i in words if i not in varying])
        self._words = sorted({sources[i] - len(arrays) for i in words if i in varying})

    def __call__(self, **varying: Any) -> Any:
        plan, pointers, arrays, streams = self._plan, self._pointers, self._arrays, self._streams
        if varying or self._names:
            if self._streams_vary or len(varying) != len(self._views):
                if varying.keys() != self._names:
                    raise self._wrong_names(varying)
                streams = {name: varying.get(name, stream) for name, stream in streams.items()}
            try:
                values = self._values(varying)
            except KeyError:
                raise self._wrong_names(varying) from None
            addresses = self._matcher.addresses(values) if self._matcher is not None else None
            is_alike = addresses is not None
            if addresses is None:
                addresses, is_alike = self._probe(varying, values)
            arrays = self._in_order(arrays + values)
            alignment = self._fixed_alignment
            for i in self._words:
                alignment |= addresses[i]
            if not is_alike or alignment & 15 != self._alignment:
                self._require_alike(varying)
                return self._family.run(arrays, self._options, self._make, *streams.values())
            fixed_plan = self._fixed_plan
            if fixed_plan is not None and fixed_plan.run(addresses, streams["stream"], arrays):
                return None if self._family.returned is None else self._family.returned(arrays)
            pointers = self._in_order(pointers + addresses)
        stream = streams["stream"]
        if plan.allocated:
            stream = plan.device.as_stream(stream, plan.library)
            pointers, arrays = plan.allocate(pointers, arrays, stream)
        if len(streams) == 1:
            plan.run(pointers, arrays, stream)
        else:
            plan.run(pointers, arrays, *streams.values())
        return self._family.returned(arrays) if self._family.returned is not None else None

    def _probe(
        self, varying: Mapping[str, Any], values: tuple[Any, ...]
    ) -> tuple[tuple[int, ...], bool]:
        """Return addresses, and whether the arrays are like the examples."""
        try:
            addresses, signatures = probe_arguments(values)
        except (TypeError, DeviceError):
            self._require_alike(varying)  # which names what is no array
            raise
        is_alike = signatures == self._signatures
        if is_alike and self._matcher is not None:
            self._matcher = tensor_matcher(values)  # in another mode of torch's, say
        return addresses, is_alike


def _alignment(pointers: tuple[int, ...], positions: Iterable[int]) -> int:
    return reduce(or_, [pointers[i] for i in positions], 0) & 15
