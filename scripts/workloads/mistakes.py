"""Wrong arguments, by what a valid one is: an array, indices, a number, a stream, a path.

Each function accepts the `Case` and the valid value, and returns another, which most calls refuse
and which must do no harm where it is accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

import kvcupy as kv
from kvcupy import formats
from kvcupy.ops.spec import OPERATIONS

Array = np.ndarray[Any, Any]


class Case(Protocol):
    """What the values of a case are drawn with: see `attempts.Case`."""

    rng: Random
    device: Any
    folder: Path
    arrays: list[Array]

    def place(self, content: Any, shift: int = 0) -> Array: ...
    def capturing(self) -> Any: ...


Breaker = Callable[[Case, Any], Any]

FAR = (2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1)
GARBAGE = sorted({sign * far for far in FAR for sign in (1, -1)} | {-(2**31), -(2**63), -1, -5})
HUGE = 2**40
SMALL = frozenset(
    {"schedules", "seed", "host_bytes", "max_positions", "rotary_dim", "slots_in_flight"}
)
"""Integers of which a large one is work, and no mistake."""
ARRAYS = frozenset(n for each in OPERATIONS.values() for n in each.public_arguments)


def breaker_of(name: str, value: Any, annotation: str = "") -> Breaker:
    """Return what makes wrong values of a parameter, by its valid value, or by its annotation."""
    if name in ("dtype", "device", "stream", "path"):
        return scalar(name)
    if isinstance(value, np.ndarray):
        return indices if value.dtype.kind in "iu" else array
    if isinstance(value, kv.ArrayView) or (value is None and name in ARRAYS):
        return array
    if hasattr(value, "capture"):
        return scalar("stream")
    own = type(value).__name__ if value is not None else annotation.partition(" ")[0]
    if own in ("list", "tuple"):
        return listed
    if own == "int" and name in SMALL:
        return small_integer
    if own in ("bool", "int", "float", "str"):
        return scalar(own)
    return uncallable if callable(value) else anything


class Index:
    """What counts as an integer by its `__index__` alone."""

    def __index__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "Index()"


class Subclass(np.ndarray[Any, Any]):
    """An array of an unknown type."""


class Named:
    """An object with the `name` of a device and nothing else of it."""

    name = "host"


class Elsewhere:
    """A stream of a missing GPU, or an invalid one."""

    def __init__(self, version: Any, address: Any) -> None:
        self._answer = version, address

    def __cuda_stream__(self) -> Any:
        return self._answer


ODD = (
    None, True, False, 0, 1, -1, 2, 2**63, 2**64, -(2**64), 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308,
    float("nan"), float("inf"), -float("inf"), 1j, "", "1", "x", "\ud800", "\0", "n" * 10000, b"",
    b"host", (), (1,), [], [1], {}, {1}, range(3), slice(1), Ellipsis, NotImplemented, object,
    Index, Index(), Named(), Fraction(1, 3), Decimal("NaN"), Decimal("1e500"), np.bool_(True),
    np.int8(1), np.uint64(2**63), np.float16(2), np.float64("nan"), np.longdouble(1.5),
    np.str_("x"), np.dtype("f4"), np.array(1), np.array([1, 2]), np.array(0.5), np.float64,
    lambda: 1,
)  # fmt: skip
"""What few parameters accept."""


def near(case: Case, kind: str, value: Any) -> list[Any]:
    """Return values that are almost of a kind."""
    if kind == "int":
        return [
            *([value - 1, value + 1, -value, 2 * value] if type(value) is int else []),
            *GARBAGE,
        ]
    if kind == "str":
        return [value, str(value).upper(), f"{value} ", str(value).encode(), type(value)]
    if kind == "dtype":
        return ["fp64", "int4", "nvfp4", "mxfp4", "float64", ">f4", "bf16 ", "FP16", complex, bool,
                np.dtype([("a", "f4")]), np.dtype("M8[s]"), ("f4", (2,)), "f4,f4", ("f4", 2**40),
                "nvfp4+hadamard", "int4+x", "+", kv.KVPool]  # fmt: skip
    if kind == "device":
        return ["cuda", "cuda:0", "cuda:99", "cuda:-1", "cuda:", "cuda:x", "cpu", "Host", "host:0",
                "cuda:1:2", "cuda:²", "cuda:" + "9" * 5000, case.device.stream()]  # fmt: skip
    if kind == "stream":
        return [Elsewhere(0, case.rng.choice([0, 1, -1, 2**70, "s", None])),
                Elsewhere(case.rng.choice([1, -1, "0", None]), 0), case.device.event(),
                case.device, type(case.device.stream()), case.capturing()]  # fmt: skip
    if kind == "path":
        junk = case.folder / "junk"
        junk.write_bytes(case.rng.randbytes(case.rng.choice([0, 1, 7, 8, 9, 100, 5000])))
        return [case.folder, case.folder / "no" / "file", junk, str(junk), bytes(junk), "a\0b",
                case.folder / ("n" * 300), "/dev/null/x", "/dev/full"]  # fmt: skip
    return [np.array([True, False]), np.full(2, 0.5, np.float32), "yes"]


def scalar(kind: str) -> Breaker:
    """Return what makes wrong values of a kind that is no array."""

    def broken(case: Case, value: Any = None) -> Any:
        return case.rng.choice(near(case, kind, value) if case.rng.random() < 0.5 else ODD)

    return broken


def small_integer(case: Case, value: Any = 1) -> Any:
    """Return no large numbers."""
    broken = scalar("int")(case, value)
    try:
        return -abs(int(broken)) if abs(int(broken)) > 64 else broken
    except (TypeError, ValueError, ArithmeticError):
        return broken


# --- Arrays ---------------------------------------------------------------------------------------


def array(case: Case, value: Any) -> Any:
    """Return an array of another dtype, shape, place or library; or no array."""
    if isinstance(value, kv.ArrayView) and value.scales is not None:
        return _other_rows(case, value)
    if not isinstance(value, np.ndarray):
        value = case.place(np.ones((2, 2), np.float32))
    change = case.rng.choice([
        _of_dtype, _of_shape, _of_shape, _of_shape, _strided, _strided, _misplaced, _read_only,
        _overlapping, _huge, _as_view, _of_torch, _no_array, garbage, garbage,
    ])  # fmt: skip
    return change(case, value)


def _other_rows(case: Case, rows: kv.ArrayView) -> Any:
    """Return other rows of four bits: fewer, wider, elsewhere, of another format or of none."""
    *before, width = rows.shape
    four_bit = formats.FOUR_BIT[rows.format]
    other = case.rng.choice(list(formats.FOUR_BIT))

    def placed(width: int, format: str, shift: int = 0) -> kv.ArrayView:
        num_bytes = formats.FOUR_BIT[format].row_bytes(width)
        return kv.view_as(case.place(np.zeros((*before, num_bytes), np.uint8), shift), format)

    return case.rng.choice([
        lambda: rows[:-1], lambda: rows[:0], lambda: rows[:, :1], lambda: rows[::-1],
        lambda: rows[:, ::2], lambda: rows[0], lambda: rows[None], lambda: rows.codes,
        lambda: rows.packed, lambda: rows.scales, lambda: rows.without_owner(),
        lambda: placed(width + four_bit.group, rows.format), lambda: placed(128, other),
        lambda: placed(width, rows.format, shift=max(2, four_bit.scale_bytes)),
        lambda: case.place(np.zeros(rows.shape, np.uint8)), lambda: _no_array(case, rows.codes),
    ])()  # fmt: skip


def _of_dtype(case: Case, a: Array) -> Any:
    kind = case.rng.choice([
        "f8", "f2", "f4", ">f4", "?", "i1", "u1", "u2", "i2", "i4", "i8", ">i8", "u4", "u8", "c8",
        "S4", "U2", "M8[s]", "m8[s]", "V3", "f4,i4", "O",
    ])  # fmt: skip
    with np.errstate(all="ignore"):
        try:
            return case.place(np.nan_to_num(np.asarray(a, np.float64)).astype(kind))
        except (TypeError, ValueError):
            return np.full(a.shape, None, object)


def _of_shape(case: Case, a: Array) -> Any:
    axis = case.rng.randrange(max(1, a.ndim))
    if a.ndim == 0:
        return case.place(np.repeat(a, 2))
    longer = np.concatenate([a, np.take(a, [0] if a.shape[axis] else [], axis)], axis)
    return case.rng.choice([
        lambda: np.take(a, range(a.shape[axis] - 1), axis) if a.shape[axis] else a[None],
        lambda: case.place(longer), lambda: a[(slice(None),) * axis + (slice(0, 0),)],
        lambda: a[None], lambda: a[..., None], lambda: a[0] if len(a) else a[None],
        lambda: case.place(a.reshape(-1)), lambda: a.swapaxes(0, -1), lambda: case.place(a.T),
        lambda: case.place(a.reshape(-1)[:1].reshape(()) if a.size else np.float32(0)),
        lambda: a[(None,) * 20], lambda: case.place(np.concatenate([a, a], -1)),
    ])()  # fmt: skip


def _strided(case: Case, a: Array) -> Any:
    if a.ndim == 0:
        return a
    axis = case.rng.randrange(a.ndim)
    index = (slice(None),) * axis
    windows = np.lib.stride_tricks.as_strided
    return case.rng.choice([
        lambda: a[(*index, slice(None, None, -1))],
        lambda: case.place(np.repeat(a, 2, axis))[(*index, slice(None, None, 2))],
        lambda: windows(a, a.shape, [0 if i == axis else s for i, s in enumerate(a.strides)]),
        lambda: np.broadcast_to(a.reshape(-1)[:1].reshape(()), a.shape) if a.size else a,
        lambda: windows(a, a.shape, [a.itemsize] * a.ndim),
        lambda: case.place(np.asfortranarray(a).T).T,
    ])()  # fmt: skip


def _misplaced(case: Case, a: Array) -> Any:
    return case.place(a, shift=case.rng.choice([1, 2, 3, 4, 8]))


def _read_only(case: Case, a: Array) -> Any:
    locked = a.view()
    locked.flags.writeable = False
    return locked


def _overlapping(case: Case, a: Array) -> Any:
    """Return the memory of another argument, or part of it, in the shape that is expected."""
    others = [b for b in case.arrays
              if b.nbytes >= a.nbytes and b is not a and b.flags.c_contiguous]  # fmt: skip
    if not others or a.dtype.hasobject:
        return a
    other = case.rng.choice(others)
    start = case.rng.choice([0, other.nbytes - a.nbytes])
    start -= start % a.itemsize
    part = other.reshape(-1).view(np.uint8)[start : start + a.nbytes]
    return part.view(a.dtype).reshape(a.shape)


def _huge(case: Case, a: Array) -> Any:
    """Return more elements than there is memory, all of them the same one."""
    if a.ndim == 0 or a.size == 0:
        return a
    shape = list(a.shape)
    axis = case.rng.randrange(a.ndim)
    shape[axis] = case.rng.choice([HUGE, 2**33])
    return np.broadcast_to(np.take(a, [0], axis), shape)


def _as_view(case: Case, a: Array) -> Any:
    """Return a view by address: unchanged, of another format, or on a missing GPU."""
    names = ["fp32", "fp16", "bf16", "fp8_e4m3", "int8", "int64", "int32", "uint8", "bool"]
    own = str(a.dtype) if a.dtype.kind in "iub" else {4: "fp32", 2: "bf16"}.get(a.itemsize, "int8")
    name = own if case.rng.random() < 0.5 else case.rng.choice(names)
    if np.dtype(formats.numpy_dtype(name)).itemsize > a.itemsize:
        name = own
    place = case.rng.choice(["host", "host", "cuda:0", "cuda:7"])
    return kv.ArrayView(a.ctypes.data, a.shape, a.strides, name, place, owner=a)


def _of_torch(case: Case, a: Array) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or a.dtype.kind not in "fiu" or not a.flags.writeable:
        return a
    try:
        tensor = torch.from_numpy(a)
    except (TypeError, ValueError, RuntimeError):  # negative strides, another byte order
        return a
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch can do little with them
        return tensor
    floats = tensor.is_floating_point()
    return case.rng.choice([
        lambda: tensor, lambda: tensor.to("meta"), lambda: tensor.to_sparse(),
        lambda: tensor.detach().requires_grad_() if floats else tensor,
        lambda: torch.nn.Parameter(tensor) if floats else tensor,
        lambda: tensor.to(torch.complex64).conj(), lambda: tensor.double(),
        lambda: torch.quantize_per_tensor(tensor.float(), 1.0, 0, torch.qint8),
        lambda: tensor[..., 1:], lambda: torch._neg_view(tensor),
    ])()  # fmt: skip


def _no_array(case: Case, a: Any) -> Any:
    return case.rng.choice([
        lambda: None, lambda: 3, lambda: 0.5, lambda: "array", lambda: {}, lambda: (), lambda: [],
        lambda: memoryview(b"abcd"), lambda: b"abcdefgh", lambda: [a, a], lambda: (a,),
        lambda: np.ma.masked_array(a), lambda: np.asarray(a).view(Subclass), lambda: np,
        lambda: np.random.default_rng(0), lambda: float("nan"), lambda: type(a),
        lambda: Interface({}),
        lambda: Interface({"version": 3, "shape": (2,), "typestr": "<f4", "data": (0, False)}),
        lambda: Interface({"version": 9, "shape": "x", "typestr": 3, "data": None}),
    ])()  # fmt: skip


class Interface:
    """A GPU array of another library, whose interface is incomplete or wrong."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def garbage(case: Case, value: Any) -> Any:
    """Return the same array with other numbers: NaN and infinities, or indices from anywhere."""
    a = np.asarray(value)
    if a.dtype.kind == "f" and a.size:
        choices = [float("nan"), float("inf"), -float("inf"), 0, -1, 1e-30]
        return case.place(np.reshape(case.rng.choices(choices, k=a.size), a.shape).astype(a.dtype))
    if a.dtype.kind not in "iu" or a.itemsize < 4:
        return value
    info = np.iinfo(a.dtype)
    numbers = [
        min(max(case.rng.choice(GARBAGE), int(info.min)), int(info.max))
        if case.rng.random() < 0.5 else old for old in a.reshape(-1).tolist()
    ]  # fmt: skip
    return case.place(np.array(numbers, a.dtype).reshape(a.shape))


def indices(case: Case, value: Any) -> Any:
    """Return indices that hold garbage, or another array than is expected."""
    return garbage(case, value) if case.rng.random() < 0.5 else array(case, value)


def listed(case: Case, value: Any) -> Any:
    """Return lists of other numbers, or of none."""
    numbers, rng = list(value), case.rng
    if all(isinstance(n, (int, np.integer)) for n in numbers) and rng.random() < 0.2:
        changes = [garbage, _of_dtype, _of_shape, _strided, _as_view, _of_torch]
        return rng.choice(changes)(case, case.place(np.array(numbers, np.int64)))
    swapped = list(numbers)
    if swapped:
        swapped[rng.randrange(len(swapped))] = rng.choice([
            -1, 10**6, 2**31, 2**63, 2**64, -(2**64), 2**70, 2**128, 10**400, 0.5, 1.0, True, None,
            "1", b"", float("nan"), np.int8(1), np.float32(1), Index(), [], numbers, object(),
            np.array(1), np.array([1]), np.uint64(2**64 - 1), "\ud800",
        ])  # fmt: skip
    return rng.choice([
        lambda: swapped, lambda: swapped, lambda: swapped, lambda: swapped,
        lambda: numbers + numbers[:1], lambda: numbers[1:], lambda: [*numbers, 0], lambda: [],
        lambda: tuple(numbers), lambda: dict.fromkeys(map(str, numbers)), lambda: iter(numbers),
        lambda: range(2), lambda: [numbers], lambda: np.array([*numbers, None], object),
        lambda: np.array([0.5, 1.0]), lambda: set(range(3)), lambda: "01", lambda: b"\0\1",
        lambda: None, lambda: 3, lambda: np.arange(3)[::-1], lambda: np.arange(3, dtype=np.uint8),
        lambda: np.array(0), lambda: np.arange(2)[None], lambda: object(),
    ])()  # fmt: skip


def uncallable(case: Case, value: Any = None) -> Any:
    """Return what cannot be called: a function may raise anything."""
    while callable(chosen := anything(case, value)):
        pass
    return chosen


def anything(case: Case, value: Any = None) -> Any:
    """Return any of the above."""
    kind = case.rng.choice(["int", "str", "device", "path", "array", "list"])
    if kind == "array":
        return array(case, value)
    return listed(case, [0, 1]) if kind == "list" else scalar(kind)(case, value)
