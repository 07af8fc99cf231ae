"""Plans: everything that the signature of a call decides, kept for the next such call.

An operation obtains its plan, made after checking the arguments the first time, and runs it.
Running packs addresses and launches; nothing is checked twice.
"""

from __future__ import annotations

import abc
import operator
import struct
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import observe
from ..arrays import ArrayView
from ..config import config
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from ..exporters import is_tensor, note_written, probe_argument, view, wait_for_producers
from ..kernels import Specialisation, pointer_fields
from . import checks

_MAX_PLANS = 4096


class Remembered(Protocol):
    """What is kept by signature: a plan, or several that are run together."""

    def drop_traceback(self) -> None:
        """Let go of the frames, and so of the arrays, of the call for which nothing compiled."""


_plans: dict[Any, Remembered] = {}


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
        count = pointer_fields(params.dtype)
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
        self._checked: set[tuple[int, ...]] = set()
        self._writes_tensors: bool | None = None

    @property
    def is_empty(self) -> bool:
        return not self.launches and self.cause is None

    def drop_traceback(self) -> None:
        """Let go of the frames, and so of the arrays, of the call for which nothing compiled."""
        self.cause = copy(self.cause)

    @abc.abstractmethod
    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe what is really touched of each array; None for what is no array."""

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
        if self.is_empty:
            return
        if self.offsets is not None:
            pointers = tuple(map(operator.add, pointers, self.offsets))
        self.check(pointers, arrays)
        if self.cause is not None:
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
        if pointers in self._checked:
            return
        views = self.views(pointers, arrays)
        outputs = [(self.label(i, views), views[i]) for i in self.outputs]
        inputs = [(self.names[i], v) for i, v in enumerate(views) if i not in self.outputs]
        checks.require_aligned([*inputs, *outputs])
        checks.require_disjoint(outputs, inputs)
        if len(self._checked) >= _MAX_PLANS:
            self._checked.clear()
        self._checked.add(pointers)

    def _declare(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Stream
    ) -> observe.Operation:
        views = self.views(pointers, arrays)
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
            return pointers, known
    except TypeError:  # no array, or an option that cannot be hashed: the checks say which
        signature = None
    given: dict[str, Any] = {}
    for name, array in zip(names, arrays, strict=True):
        if name.endswith("scale") and not checks.is_array(array):
            given[name] = array
        elif array is not None:
            given[name] = view(array, name).without_owner()
    pointers = tuple(probe_argument(a)[0] for a in arrays)
    made = make(given, alignment(pointers, num_rows))
    made.drop_traceback()  # what is remembered keeps no array of this call alive
    if signature is not None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[signature] = made
    return pointers, made


def alignment(pointers: tuple[int, ...], num_rows: int) -> int:
    """Return a number that the words divide which divide each of the first addresses."""
    together = 0
    for pointer in pointers[:num_rows]:
        together |= pointer
    return together & 15


def forget() -> None:
    """Drop all plans, for a change of devices or kernels."""
    _plans.clear()
