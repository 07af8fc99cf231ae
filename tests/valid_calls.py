"""Valid calls of every operation, from the conformance cases, their arrays laid out in many ways.

A call holds each of its arrays twice: on the device between canaries, where the operation reads
and writes it, and as a NumPy mirror for the reference. `check` compares all of it:

    call = ValidCall(device, case, layout="gaps", index="int32")
    call.run()
    call.check()

An `example` is a smaller one, made from the declaration of an operation alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from helpers import INDEX_DTYPE, POISON_SLOT, Arg, Buffer, Case, from_values

import kvcupy as kv
from kvcupy import reference, testing
from kvcupy.formats import FOUR_BIT
from kvcupy.ops.call import Operation
from kvcupy.ops.spec import OPERATIONS, Argument, Declaration
from kvcupy.testing.cases import (
    PAGE_SIZE,
    PAGES,
    SLOTS,
    _compare_rotated,
    _positions,
    _slots,
    _table,
    own_cases,
)
from kvcupy.testing.cases import Call as Comparison


def _rope_store_mla(
    case: testing.Arguments, *, fmt: str = "bf16", cache_fmt: str = "", rank: int = 64,
    width: int = 16, rotary_dim: int | None = None, interleaved: bool = False, kind: str = "",
    paged: bool = True, scale: float | None = None,
) -> Comparison:  # fmt: skip
    """`rope_store_mla`, of which the conformance cases have nothing: no other library has it."""
    slots = case.slots(_slots(case, kind))
    count, cache_fmt = len(slots.view), cache_fmt or fmt
    positions, _ = _positions(case, "", count)
    table = _table(case, rotary_dim or width, positions)
    query = case.rows(fmt, (count, 3, width), name="query")
    latent = case.rows(fmt, (count, rank), name="latent")
    rope_key = case.rows(fmt, (count, width), name="rope_key")
    pages = (PAGES, PAGE_SIZE) if paged else (SLOTS,)
    cache = case.output(cache_fmt, (*pages, rank + width), name="cache")
    cache.buffer.exact = fmt == cache_fmt
    options = {} if scale is None else {"scale": scale}

    def compare() -> bool:
        for name, rows in (("query", query), ("rope_key", rope_key)):
            _compare_rotated(
                name, rows.view.copy(), rows, table, positions, np.arange(count), interleaved
            )
        stored = (latent, rope_key, cache, slots)
        return bool(reference.store_mla(*(each.view for each in stored), **options))

    return Comparison(
        {
            "query": query, "latent": latent, "rope_key": rope_key, "rope_table": table,
            "positions": positions, "cache": cache, "slot_mapping": slots,
            "interleaved": interleaved, **options,
        },
        compare,
    )  # fmt: skip


LATENTS = {
    "bf16": {},
    "slots, not pages": {"paged": False},
    "fp16, interleaved": {"fmt": "fp16", "interleaved": True},
    "a part of each head": {"rotary_dim": 8},
    "odd widths": {"fmt": "fp32", "rank": 7, "width": 6},
    "padding": {"kind": "padding"},
    "past the end": {"kind": "past the end"},
    "bf16 to fp8_e4m3, a scale": {"cache_fmt": "fp8_e4m3", "scale": 0.3},
    "bf16 to nvfp4": {"cache_fmt": "nvfp4"},
}  # fmt: skip
STEP_OPTIONS = {"rotates", "evicted", "key_starts", "depths", "apart"}
"""Options of cases with arguments that only a step of a cache has, or with codes apart."""

CASES = [
    *testing.cases(),
    *(
        testing.Case("rope_store_mla", name, partial(_rope_store_mla, **options))
        for name, options in LATENTS.items()
    ),
    *(
        case for case in own_cases()
        if case.operation not in ("transfer_pages", "shift_pages")
        and STEP_OPTIONS.isdisjoint(case.build.keywords)
    ),
]  # fmt: skip
"""The conformance cases, those that only kvcupy can run, and those of `rope_store_mla`."""


def case_of(operation: str, name: str) -> testing.Case:
    """Return the conformance case of this name."""
    return next(case for case in CASES if (case.operation, case.name) == (operation, name))


# Layouts: the same elements elsewhere in memory --------------------------------------------------

Stored = tuple[np.ndarray, Callable[[Any], Any]]
"""What is stored, and how to view the elements in it."""


def poison(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Return an array of NaN, or of indices past the end."""
    if dtype in INDEX_DTYPE.values():
        return np.full(shape, POISON_SLOT, dtype)
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype).reshape(shape)


def padded(content: np.ndarray, axes: range) -> Stored:
    """Surround the elements along some axes with poison."""
    shape = [n + 3 * (axis in axes) for axis, n in enumerate(content.shape)]
    inside = tuple(
        slice(1, 1 + n) if axis in axes else slice(None) for axis, n in enumerate(content.shape)
    )
    base = poison(shape, content.dtype)
    base[inside] = content
    return base, lambda a: a[inside]


def gaps(content: np.ndarray, free: int) -> Stored:
    """Rows, heads and pages that do not follow one another; their last axis is contiguous."""
    return padded(content, range(min(free, content.ndim - 1)))


def wider_rows(content: np.ndarray, free: int) -> Stored:
    """Rows that begin at odd elements."""
    if free < content.ndim - 1:
        return gaps(content, free)
    return padded(content, range(content.ndim - 1, content.ndim))


def reversed_axes(content: np.ndarray, free: int) -> Stored:
    """Negative strides."""
    flip = (slice(None, None, -1),) * free
    return np.ascontiguousarray(content[flip]), lambda a: a[flip]


def other_order(content: np.ndarray, free: int) -> Stored:
    """The axes in another order: heads before tokens, the page before its cache."""
    axes = (*range(free)[::-1], *range(free, content.ndim))
    return np.ascontiguousarray(content.transpose(axes)), lambda a: a.transpose(axes)


def every_other(content: np.ndarray, free: int) -> Stored:
    """Every other element of each axis."""
    index = (slice(None, None, 2),) * free
    base = poison([2 * n for n in content.shape[:free]] + [*content.shape[free:]], content.dtype)
    base[index] = content
    return base, lambda a: a[index]


def repeated(content: np.ndarray, free: int) -> Stored:
    """The first row as all others: stride 0."""
    return content[:1].copy(), lambda a: np.broadcast_to(a, content.shape)


MEMORY: dict[str, Callable[[np.ndarray, int], Stored]] = {
    "plain": lambda content, free: (content, lambda a: a),
    "gaps": gaps, "wider rows": wider_rows, "reversed": reversed_axes,
    "other order": other_order, "every other": every_other, "repeated": repeated,
}  # fmt: skip

CONTIGUOUS = {
    "store_state": ("states", "caches"), "gather_state": ("caches", "out"),
}  # fmt: skip
"""By operation, the arguments whose rows along axis 0 have to be contiguous."""
STRIDED = ("k_scale", "v_scale", "lse_a", "lse_b", "lse_out", "sinks", "tree_mask", "x")
"""Arguments of numbers whose last axis may have any stride, as that of all indices may."""


REPEATED = {
    "store_kv": ("key", "value"), "store_mla": ("latent", "rope_key"),
    "gather_kv": ("k_cache", "v_cache"), "paged_attention": ("query",),
    "store_state": ("states",), "update_conv_state": ("x",),
}  # fmt: skip
"""By operation, the arguments that layout "repeated" is of: those that are only read."""


def is_index(fmt: str) -> bool:
    return fmt in INDEX_DTYPE


class FarBuffer(Buffer):
    """Rows along the first axis so far apart that 32 bits do not count their elements or bytes.

    Only the rows themselves are touched, so that most of the memory is never there.
    """

    rows: Any = None

    def spread(self, shape: tuple[int, ...]) -> Any:
        """Return an array of this shape over the memory that the rows are in."""
        if self.rows is None:
            self._allocate(shape)
        return self.rows.view(self.dtype).reshape(shape)

    def _allocate(self, shape: tuple[int, ...]) -> None:
        elements = 2**31 if self.dtype.itemsize <= 2 else 2**30
        apart = self.dtype.itemsize * (elements // (shape[0] - 1) // 64 + 1) * 64
        row_bytes = (self.stop - self.start) // shape[0]
        self.rows = self.case.device.empty((shape[0], apart), np.uint8)[:, :row_bytes]
        self.restore()

    def restore(self) -> None:
        super().restore()
        if self.rows is not None:
            self.rows[...] = self.raw[self.start : self.stop].reshape(self.rows.shape)

    def read(self) -> Any:
        got = super().read()
        if self.rows is not None:
            got[self.start : self.stop] = self.case.device.to_numpy(self.rows).reshape(-1)
        return got


class FarArg(Arg):
    """An argument over a `FarBuffer`; so is what is cut from it."""

    def __init__(self, buffer: FarBuffer, cut: Any, shape: tuple[int, ...]) -> None:
        super().__init__(buffer, lambda a: cut(a.reshape(shape)))
        self._far_cut, self._shape = cut, shape
        self.array = cut(buffer.spread(shape))

    def sub(self, cut: Any) -> Arg:
        return FarArg(self.buffer, lambda a: cut(self._far_cut(a)), self._shape)


class Laid(Case):
    """The arrays of one call, each laid out in one way.

    Parameters
    ----------
    layout : one of `MEMORY`
    index : the dtype of all index arrays; "": as the case has them
    misalign : arrays begin by so many elements after 64 bytes, or two or three times as many
    far : whether rows are more than 2**31 elements apart
    """

    buffer_type = FarBuffer

    def __init__(
        self, device: Any, seed: Any, operation: str, *, layout: str = "plain", index: str = "",
        misalign: int = 0, far: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(device, seed)
        self.far = far
        self.operation, self.layout, self.index = operation, layout, index
        self.misaligned = (misalign * (i % 3 + 1) for i in count())

    def place(
        self, content: Any, fmt: str, cut: Any = None, *, misalign: int = 0,
        name: str = "argument",
    ) -> Arg:  # fmt: skip
        first = name.split()[0]
        indices = is_index(fmt) and first != "out"
        if indices and self.index:
            fmt, content = self.index, content.astype(INDEX_DTYPE[self.index])
        free = content.ndim - 1
        if indices or first in STRIDED:
            free = content.ndim
        if first in CONTIGUOUS.get(self.operation, ()):
            free = min(1, free)
        layout = MEMORY[self.layout]
        if self.layout == "repeated" and (
            not len(content) or first not in REPEATED.get(self.operation, ())
        ):
            layout = MEMORY["plain"]
        argument = OPERATIONS[self.operation].public_arguments.get(first)
        if self.layout in ("gaps", "reversed") and argument is not None and argument.fresh:
            layout = wider_rows  # strides that no input has
        base, view = layout(np.asarray(content), max(free, 0))
        whole = cut or (lambda a: a)
        misalign += next(self.misaligned)
        placed = super().place(
            base, fmt, lambda a: whole(view(a)), misalign=misalign, name=name
        )  # fmt: skip
        # A row far from others is in a large page of memory, of 2 MiB.
        is_rows = content.ndim > 1 and 1 < len(content) <= 64 and fmt not in FOUR_BIT
        if self.far and is_rows and not indices:
            return FarArg(placed.buffer, whole, content.shape)
        return placed


# Calls -------------------------------------------------------------------------------------------


class ValidCall:
    """One call of an operation, and the check of all that it leaves.

    Parameters
    ----------
    case : a conformance case
    options : other options of the case, such as its formats
    seed, layout, index, misalign : of its arrays: see `Laid`
    """

    def __init__(
        self, device: Any, case: testing.Case, options: dict[str, Any] | None = None, *,
        seed: Any = 0, **laid: Any,
    ) -> None:  # fmt: skip
        self.device, self.operation = device, case.operation
        self.arrays = Laid(device, seed, case.operation, **laid)
        self._call = case.build(self.arrays, **(options or {}))
        self.arguments = self._call.arguments
        self._faults: bool | None = None
        device.synchronize()

    def placed(self) -> Iterator[tuple[str, Arg]]:
        """Yield the name of each array argument, and the array."""
        for name, value in self.arguments.items():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Arg):
                    yield name, each

    def run(self, wrap: Callable[[Any], Any] = lambda array: array, **more: Any) -> Any:
        """Call the operation, with further or other arguments; `wrap` makes its arrays."""

        def given(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(given, value))
            return wrap(value.array) if isinstance(value, Arg) else value

        arguments = {name: given(value) for name, value in (self.arguments | more).items()}
        return getattr(kv, self.operation)(**arguments)

    def take_away(self) -> None:
        """Put zeros where the arrays are, but for scales, for which zero is invalid."""
        self._contents = {
            buffer: self.device.asarray(buffer.want.copy())
            for buffer in self.arrays.buffers if "scale" not in buffer.name
        }  # fmt: skip
        for buffer in self._contents:
            buffer.raw[buffer.start : buffer.stop] = 0
        self.device.synchronize()

    def give_back(self, stream: Any) -> None:
        """Let a stream write what the arrays held before the call."""
        for buffer, content in self._contents.items():
            self.device.copy(buffer.raw, content, stream=stream)

    def has_written(self) -> bool:
        """Return whether anything was written to the arrays that were taken away."""
        return any(buffer.read()[buffer.start : buffer.stop].any() for buffer in self._contents)

    def check(self) -> None:
        """Compare the fault record and every byte with what the reference says.

        After a second call on the same arrays it must have left the same bytes.
        """
        self.device.synchronize()
        try:
            kv.check_faults(self.device)
            fault = ""
        except kv.IndexFault as error:
            fault = str(error)
        if self._faults is None:
            self._faults = bool(self._call.compare())
        assert bool(fault) == self._faults, fault or "expected a fault, got none"
        if fault:
            self.check_fault(fault)
        self.check_bytes()

    def check_bytes(self) -> None:
        """Compare every byte of every array with its mirror."""
        differences = self.arrays.all_differences()
        assert not differences, "\n".join(map(str, differences))

    def check_fault(self, text: str) -> None:
        """Assert that a fault names an index that is where it says, and past the end."""
        number = r"(-?\d+)"
        pattern = rf"(\w+): (\w+)\[(\d+)\]: expected {number} to {number}(.*), got {number};"
        found = re.match(pattern, text)
        assert found is not None and found[1] == self.operation, text
        indices, place, got = self.arguments[found[2]].view, int(found[3]), int(found[7])
        # Of positions (3, T), a token is named by its own index.
        assert got in (indices[..., place % indices.shape[-1]], indices.reshape(-1)[place]), text
        assert found[6] or not int(found[4]) <= got <= int(found[5]), text


def check_case(device: Any, operation: str, name: str, **laid: Any) -> Laid:
    """Run a case, with arrays as `Laid` says, and check all that it leaves."""
    call = ValidCall(device, case_of(operation, name), **laid)
    call.run()
    call.check()
    return call.arrays


def checks_of(*operations: str, **laid: Any) -> tuple[Callable[[Any], Laid], ...]:
    """Return functions of a device that check the cases of some operations."""
    return tuple(
        partial(check_case, operation=case.operation, name=case.name, **laid)
        for case in CASES if case.operation in operations
    )  # fmt: skip


def name_check(check: Any) -> str:
    """Return the name of a check, with its options."""
    if isinstance(check, partial):
        return f"{check.func.__name__}, {', '.join(map(str, check.keywords.values()))}"
    return check.__name__


# Examples: one small call of each operation, from its declaration ---------------------------------

Call = dict[str, Any]
"""Arguments by name."""

SIZES = {
    "tokens": 3, "sequences": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 6,
    "pages": 2, "all_pages": 4, "page_size": 4, "slots": 8, "max_pages": 2, "positions": 16,
    "rotary_dim": 4, "latent_dim": 12, "rope_dim": 4, "latent_width": 16, "one": 1,
    "channels": 8, "conv_inputs": 3,
}  # fmt: skip


def array(device: Any, *shape: int, fmt: str = "fp32", seed: int = 0) -> Any:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return device.asarray(from_values(values, fmt))


def indices(device: Any, *values: int) -> Any:
    return device.asarray(np.array(values))


def example(
    declaration: Declaration, device: Any, cache_format: str = "int8", **sizes: int
) -> Call:
    """Return a call that has outputs and every kind of scale, but no optional index arrays.

    `sizes` replace some of `SIZES`.
    """
    call = {
        name: example_of(argument, device, cache_format, seed, SIZES | sizes)
        for seed, (name, argument) in enumerate(declaration.public_arguments.items())
        if argument.in_example and argument.shape
    }
    return call | {
        name: SIZES[name]
        for name, parameter in declaration.parameters.items()
        if parameter.default is parameter.empty and name not in declaration.public_arguments
    }


def example_of(
    argument: Argument, device: Any, cache_format: str = "int8", seed: int = 99,
    sizes: dict[str, int] = SIZES,
) -> Any:  # fmt: skip
    """Return an array for an argument, whether examples have it or not."""
    if argument.example is not None:
        return device.asarray(np.array(argument.example))
    shape = tuple(sizes[name] for name in argument.shape.split())
    if argument.cache:
        return device.zeros(shape, from_values(0.0, cache_format).dtype)
    if argument.fresh:
        return device.zeros(shape, np.float32)
    if "scale" in argument.name:
        return device.asarray(np.full(shape, 0.5, np.float32))
    return array(device, *shape, seed=seed)


def arrays_of(call: Call) -> Call:
    """Return the arguments that are arrays."""
    return {name: value for name, value in call.items() if hasattr(value, "shape")}


def _maker(declaration: Declaration) -> Callable[[Any], Call]:
    def make(device: Any) -> Call:
        return example(declaration, device)

    make.__name__ = declaration.name
    return make


EXAMPLES = {n: _maker(each) for n, each in OPERATIONS.items() if isinstance(each, Operation)}
"""Of every operation that launches kernels, a function from a device to a valid call."""
