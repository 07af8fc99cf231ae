"""The one argument of every kernel: its struct in C++ and its mirror in NumPy are the same."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import compile_for_gpu

from kvcupy.devices import cxx
from kvcupy.errors import CompileError
from kvcupy.kernels import Kernel, Specialisation, layout_asserts
from kvcupy.ops import specialisations
from kvcupy.ops.store import PARAMS

KERNELS = list(dict.fromkeys(s.kernel for s in specialisations()))


def compile_for_host(program: str) -> None:
    cxx.check(program)


@pytest.fixture(params=[compile_for_host, compile_for_gpu])
def compile_text(request):
    return request.param


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_the_mirror_of_every_kernel_is_exact(compile_text, kernel):
    compile_text(f'#include "{kernel.source}"\n{layout_asserts(kernel)}')


def test_a_mirror_that_differs_from_the_source_does_not_compile(compile_text):
    """The control of the test above: one pair of pointers changes places."""
    fields = [(name, PARAMS[name]) for name in PARAMS.names]
    fields[2:4] = fields[3:1:-1]
    swapped = Kernel("store.cu", "store_copy", np.dtype(fields, align=True), "CacheRowsParams")
    with pytest.raises(CompileError, match="offset of k_cache"):
        compile_text(f'#include "store.cu"\n{layout_asserts(swapped)}')


# Each kind of difference, on a struct small enough to compile in no time ----------------------

STRUCTS = """
struct Inner {
  long long stride;
  float scale;
  int width;
};
struct Params {
  const char* in;
  float* out;
  Inner k;
  unsigned long long seed;
  int shape[3];
  float factor;
  short small;
  int last;
};
"""
INNER = [("stride", np.int64), ("scale", np.float32), ("width", np.int32)]
FIELDS = [
    ("in", np.uint64), ("out", np.uint64), ("k", INNER), ("seed", np.uint64),
    ("shape", np.int32, (3,)), ("factor", np.float32), ("small", np.int16), ("last", np.int32),
]  # fmt: skip


def mirror(fields) -> np.dtype:
    mirrored = [
        (name, np.dtype(kind, align=True) if isinstance(kind, list) else kind, *shape)
        for name, kind, *shape in fields
    ]
    return np.dtype(mirrored, align=True)


def replaced(name, *field):
    """The fields with another one, or none, in the place of `name`."""
    return [f for old in FIELDS for f in (field if old[0] == name else (old,))]


def with_inner(*inner):
    return replaced("k", ("k", list(inner)))


WRONG = {
    "two fields of a nested struct swapped": with_inner(INNER[0], INNER[2], INNER[1]),
    "the last field missing, its place taken by padding": FIELDS[:-1],
    "a field too many": [*FIELDS, ("more", np.int64)],
    "another name": replaced("factor", ("Factor", np.float32)),
    "another size": replaced("seed", ("seed", np.uint32)),
    "int for float": replaced("factor", ("factor", np.int32)),
    "a number for an address": replaced("in", ("in", np.int64)),
    "another length of an array": replaced("shape", ("shape", np.int32, (2,))),
}


def small(fields) -> str:
    return STRUCTS + layout_asserts(Kernel("", "", mirror(fields), "Params"))


@pytest.mark.parametrize("difference", WRONG)
def test_any_difference_does_not_compile(compile_text, difference):
    compile_text(small(FIELDS))
    with pytest.raises(CompileError):
        compile_text(small(WRONG[difference]))


# Kernels and specialisations ------------------------------------------------------------------


def test_all_specialisations_differ():
    every = specialisations()
    assert all(isinstance(s, Specialisation) for s in every)
    assert len(set(every)) == len({str(s) for s in every}) == len(every)
