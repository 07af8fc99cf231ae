"""Plans: everything that the signature of a call decides, kept for the next such call.

An operation obtains its plan, made after checking the arguments the first time, and runs it.
Running packs addresses and launches; nothing is checked twice.
"""

from __future__ import annotations

import abc
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import observe
from ..arrays import ArrayView, is_tensor, note_written, probe_argument, view, wait_for_producers
from ..config import config, logger
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from ..kernels import Specialisation
from . import checks
from .aliasing import Aliasing

_MAX_PLANS = 4096


class Remembered(Protocol):
    """What is kept by signature: a plan, or several that are run together.

    Attributes
    ----------
    used_at : how many plans had been made when this one was last used
    """

    used_at: int

    def settle(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Prepare the checks of addresses, and let go of the call for which this was made."""


_plans: dict[Any, Remembered] = {}  # from the one that was used the longest ago
_made = 0
_lock = threading.Lock()


class Launch:
    """A loaded specialisation, its geometry, and the constant part of its Params.

    Parameters
    ----------
    params : one record of the kernel's Params; its pointer fields are filled at each launch
    pointers : for each pointer field but the last, the index of the array whose address it takes,
        or None for a null pointer. The last field takes the device's fault record
    """

    def __init__(
        self,
        device: Device,
        specialisation: Specialisation,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        params: np.ndarray[Any, Any],
        pointers: Sequence[int | None],
    ) -> None:
        self.grid, self.block, self.smem_bytes = grid, block, smem_bytes
        count = specialisation.kernel.num_pointers
        assert count == len(pointers) + 1
        self._pack = struct.Struct(f"={count}Q")
        self._constants = params.tobytes()[self._pack.size :]
        # A null pointer is taken from behind the addresses.
        self._choose = operator.itemgetter(*(-1 if i is None else i for i in pointers))
        self.function = device.load(specialisation)

    def params(self, addresses: tuple[int, ...], faults: int) -> bytes:
        return self._pack.pack(*self._choose((*addresses, 0)), faults) + self._constants


@dataclass
class Plan(abc.ABC):
    """Base of the plans of all operations. A subclass says what its arrays are.

    Attributes
    ----------
    names : of the arguments, in the order of `arrays` in `run`
    outputs : which of them are written
    offsets : bytes to add to each address, where an argument is used from its middle on
    launches : in the order of issue; empty if there is nothing to do
    cause : why the kernel cannot be used, where array expressions must serve
    in_place : (output, input) that are written where they are read if they have one address
    """

    operation: str
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    device: Device
    library: str

    def __post_init__(self) -> None:
        self.launches: list[Launch] = []
        self.offsets: tuple[int, ...] | None = None
        self.cause: CompileError | None = None
        self.in_place: tuple[tuple[int, int], ...] = ()
        self.used_at = 0
        self._allowed: tuple[int, ...] | None = None  # the addresses of the last call
        self._writes_tensors: bool | None = None

    @property
    def is_empty(self) -> bool:
        return not self.launches and self.cause is None

    def settle(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Prepare `check`, and let go of the call for which this was made."""
        views = self.views(self._moved(pointers), arrays)
        self._aliasing = Aliasing(views, self.outputs, self.in_place)
        self.cause = copy(self.cause)  # without a traceback, whose frames hold arrays

    @abc.abstractmethod
    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe what is really touched of each array; None for what is no array."""

    def touched(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Return `views`, where what is written where it is read counts as written only."""
        views = self.views(pointers, arrays)
        for output, source in self.in_place:
            if pointers[output] == pointers[source]:
                views[source] = None
        return views

    def label(self, output: int, views: list[ArrayView | None]) -> str:
        """Return the name of an output for errors."""
        return self.names[output]

    def slots(self, views: list[ArrayView | None], output: int) -> ArrayView | None:
        """Return the index array that says which slots of an output are written, if one does."""
        return None

    @abc.abstractmethod
    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Do the work as array expressions."""

    def run(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Any) -> None:
        """Issue the operation on `stream`."""
        on = self.device.as_stream(stream, self.library)
        if not self.is_empty:
            pointers = self._moved(pointers)
            self.check(pointers, arrays)
            self.issue(pointers, arrays, on)

    def issue(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Stream) -> None:
        """Put the operation on a stream, its arguments checked."""
        if self.is_empty:
            return
        if self.cause is not None:
            self.device.check_fallback(self.operation, on)
            config.fall_back(self.operation, self.cause)
        wait_for_producers(arrays, on)
        if observe.watching():
            observe.issue(
                lambda: self._declare(pointers, arrays, on),
                lambda: self._enqueue(pointers, arrays, on),
            )
        else:
            self._enqueue(pointers, arrays, on)
        if self._writes_tensors is None:  # equal signatures are of arrays of one library
            self._writes_tensors = any(is_tensor(arrays[i]) for i in self.outputs)
        if self._writes_tensors:
            note_written([arrays[i] for i in self.outputs])

    def _enqueue(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Stream) -> None:
        device = self.device
        if self.cause is not None:
            device.run(lambda: self.express(pointers, arrays), on, arrays)
            return
        for one in self.launches:
            params = one.params(pointers, device.fault_pointer)
            device.launch(one.function, one.grid, one.block, one.smem_bytes, params, on, arrays)

    def check(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Refuse addresses that do not go together: misaligned, or outputs that share bytes."""
        if pointers == self._allowed:
            return
        if not self._aliasing.allows(pointers):
            views = self.touched(pointers, arrays)
            outputs = [(self.label(i, views), views[i]) for i in self.outputs]
            inputs = [(self.names[i], v) for i, v in enumerate(views) if i not in self.outputs]
            checks.require_aligned([*inputs, *outputs])
            checks.require_disjoint(outputs, inputs)
        self._allowed = pointers

    def _moved(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the addresses from which arguments are used."""
        if self.offsets is None:
            return pointers
        return tuple(map(operator.add, pointers, self.offsets))

    def _declare(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Stream
    ) -> observe.Operation:
        views = self.touched(pointers, arrays)
        reads, writes = [], []
        for i, v in enumerate(views):
            if v is not None and i in self.outputs:
                writes.append(observe.Access(v, self.slots(views, i)))
            elif v is not None:
                reads.append(observe.Access(v))
        return observe.Operation(self.operation, on, tuple(reads), tuple(writes))


def obtain(
    operation: str,
    names: tuple[str, ...],
    arrays: tuple[Any, ...],
    num_rows: int,
    options: tuple[Any, ...],
    make: Callable[[dict[str, Any], int], Remembered],
) -> tuple[tuple[int, ...], Any]:
    """Return the addresses of a call's arrays and its plan.

    Parameters
    ----------
    names : of the arguments, for errors
    arrays : arrays, numbers or None. The first `num_rows` are read or written in whole words, so
        their alignment belongs to the signature
    options : whatever else decides the plan
    make : checks the arguments and plans; called for the first call of a signature. It gets them by
        name, arrays as views that keep nothing alive and scales perhaps as numbers, without those
        that are None; and the alignment

    Raises
    ------
    TypeError : an argument is no array, or whatever `make` raises
    """
    signature = None
    try:
        pointers, signatures = zip(*map(probe_argument, arrays), strict=True)
        signature = (operation, options, alignment(pointers, num_rows), signatures)
        known = _plans.get(signature)
        if known is not None:
            if known.used_at != _made:
                _remember(signature, known)
            return pointers, known
    except TypeError:  # no array, or an option that cannot be hashed: the checks say which
        signature = None
    described = tuple(map(_describe, arrays, names))
    pointers = tuple([v.pointer if isinstance(v, ArrayView) else 0 for v in described])
    given = {name: v for name, v in zip(names, described, strict=True) if v is not None}
    made = make(given, alignment(pointers, num_rows))
    made.settle(pointers, described)
    logger.debug("%s: planned a call of new shapes, strides, formats or options", operation)
    if signature is not None:
        _remember(signature, made, is_new=True)
    return pointers, made


def _describe(argument: Any, name: str) -> Any:
    """Return a view that keeps nothing alive, or what is no array: None, or a scale's number."""
    if argument is None or (name.endswith("scale") and not checks.is_array(argument)):
        return argument
    found = view(argument, name)
    if found is argument:  # the caller's own view, which stays as it is
        return found.without_owner()
    found.owner = None
    return found


def alignment(pointers: tuple[int, ...], num_rows: int) -> int:
    """Return a number that the words divide which divide each of the first addresses."""
    together = 0
    for pointer in pointers[:num_rows]:
        together |= pointer
    return together & 15


def _remember(signature: Any, plan: Remembered, *, is_new: bool = False) -> None:
    """Put a plan behind all others; a new one takes the place of the first, if there are many.

    A plan that is used while none is made stays where it is: only what is made moves others out.
    """
    global _made
    with _lock:
        _made += is_new
        plan.used_at = _made
        if not is_new:
            _plans.pop(signature, None)
        _plans[signature] = plan
        if len(_plans) > _MAX_PLANS:
            del _plans[next(iter(_plans))]


def forget() -> None:
    """Drop all plans, for a change of devices or kernels."""
    with _lock:
        _plans.clear()
