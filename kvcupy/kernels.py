"""Kernels as objects: a source file, a template, and the mirror of its `Params` struct.

A `Kernel` names what `kernels_src/` holds; a `Specialisation` is one instantiation of it. Both
are plain data. Compiling and loading belong to the devices, which key their caches on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Kernel:
    """One `__global__` function template."""

    source: str  # file name in `kernels_src/`
    name: str
    params: np.dtype[Any]  # mirror (`align=True`) of the struct that is its only argument
    struct: str  # the struct's name in the source
    barriers: bool = False  # whether threads of a block wait for one another or exchange values
    text: str | None = None  # the program, where that is no file; `source` is then its name in logs

    @cached_property
    def num_pointers(self) -> int:
        """The number of leading fields of the Params that are addresses."""
        return pointer_fields(self.params)

    def specialise(self, *arguments: str | int | bool) -> Specialisation:
        texts = [str(a).lower() if isinstance(a, bool) else str(a) for a in arguments]
        return Specialisation(self, tuple(texts))


def by_lanes(source: str, name: str, params: np.dtype[Any], struct: str) -> dict[int, Kernel]:
    """Return a kernel for threads that exchange values in a warp of 32, and for single threads."""
    return {n: Kernel(source, name, params, struct, barriers=n > 1) for n in (32, 1)}


@dataclass(frozen=True)
class Specialisation:
    """A kernel with its template arguments, e.g. `store_copy<16>`."""

    kernel: Kernel
    arguments: tuple[str, ...]

    @cached_property
    def expression(self) -> str:
        """The name expression that a compiler instantiates and looks up."""
        arguments = f"<{', '.join(self.arguments)}>" if self.arguments else ""
        return f"{self.kernel.name}{arguments}"

    def __str__(self) -> str:
        return f"{self.kernel.source}:{self.expression}"


def zeroed(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return one record of a Params dtype, all zero, as an array of no dimensions.

    `numpy.zeros` would clear it field by field, which takes longer than filling it.
    """
    return np.frombuffer(bytearray(dtype.itemsize), dtype).reshape(())


def pointer_fields(dtype: np.dtype[Any]) -> int:
    """Return the number of leading fields of a Params dtype that are addresses (uint64)."""
    is_address = [dtype[name] == np.uint64 for name in dtype.names or ()]
    return [*is_address, False].index(False)


_LAYOUT_NAMES = """\
#ifdef __CUDACC_RTC__  // which has no offsetof
#define OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif
// What a field is: 'f' floating, 'i' signed, 'u' unsigned or an address.
template <typename T>
constexpr char kFieldKind = T(0.5f) != T(0) ? 'f' : T(-1) < T(0) ? 'i' : 'u';
template <typename T>
constexpr char kFieldKind<T*> = 'u';
template <typename T, int kCount>
constexpr char kFieldKind<T[kCount]> = kFieldKind<T>;
"""


def layout_asserts(kernel: Kernel) -> str:
    """Return C++ that compiles only where `kernel.params` mirrors the struct exactly.

    Append it to the kernel's source. It compares size and alignment of each struct, the
    number of its fields (padding can hide a missing one), and name, offset, size and kind of each
    field, in nested structs too.
    """
    name, lines = kernel.struct, [_LAYOUT_NAMES]
    _assert_struct(lines, kernel.params, name, "", 0)
    lines.append(f"inline void count_fields(const {name}& params) {{")
    _count_fields(lines, kernel.params, "params")
    return "\n".join([*lines, "}", ""])


def own_text(kernel: Kernel, text: str) -> Kernel:
    """Return a kernel whose program is a text, which compiles only if the mirror is exact."""
    asserts = layout_asserts(kernel)
    program = f'#line 1 "{kernel.source}"\n{text}\n#line 1 "layout of {kernel.struct}"\n{asserts}'
    return replace(kernel, text=program)


def _assert_struct(
    lines: list[str], dtype: np.dtype[Any], struct: str, path: str, start: int
) -> None:
    of = f"decltype({struct}::{path})" if path else struct
    what = path or struct
    lines.append(f'static_assert(sizeof({of}) == {dtype.itemsize}, "bytes of {what}");')
    lines.append(f'static_assert(alignof({of}) == {dtype.alignment}, "alignment of {what}");')
    for name, (field, offset, *_) in (dtype.fields or {}).items():
        inner = f"{path}.{name}" if path else name
        at, kind = start + offset, field.base.kind
        lines.append(f'static_assert(OFFSET_OF({struct}, {inner}) == {at}, "offset of {inner}");')
        if field.names:
            _assert_struct(lines, field, struct, inner, at)
            continue
        of = f"decltype({struct}::{inner})"
        lines.append(f'static_assert(sizeof({of}) == {field.itemsize}, "bytes of {inner}");')
        lines.append(f"static_assert(kFieldKind<{of}> == '{kind}', \"kind of {inner}\");")


def _count_fields(lines: list[str], dtype: np.dtype[Any], value: str) -> None:
    names = dtype.names or ()
    bindings = ", ".join(f"f{i}" for i in range(len(names)))
    lines.append(f"  {{ [[maybe_unused]] const auto& [{bindings}] = {value}; }}")
    for name in names:
        if dtype[name].names:
            _count_fields(lines, dtype[name], f"{value}.{name}")
