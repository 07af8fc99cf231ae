"""The one argument of every kernel: its struct in C++ and its mirror in NumPy are the same."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import compile_for_gpu

from kvcupy.devices import cxx
from kvcupy.errors import CompileError
from kvcupy.kernels import Kernel, Specialisation, layout_asserts, pointer_fields
from kvcupy.ops import specialisations
from kvcupy.ops.store import CONVERT, COPY, PARAMS

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
    "two pointers swapped": [FIELDS[1], FIELDS[0], *FIELDS[2:]],
    "two fields of a nested struct swapped": with_inner(INNER[0], INNER[2], INNER[1]),
    "the first field missing": FIELDS[1:],
    "the last field missing, its place taken by padding": FIELDS[:-1],
    "a field missing, its place taken by padding": replaced("small"),
    "a field of a nested struct missing": with_inner(*INNER[:2]),
    "a field too many": [*FIELDS, ("more", np.int64)],
    "a field too many, where padding was": replaced(
        "small", ("small", np.int16), ("more", np.int16)
    ),
    "another name": replaced("factor", ("Factor", np.float32)),
    "another size": replaced("seed", ("seed", np.uint32)),
    "another size in a nested struct": with_inner(("stride", np.int32), *INNER[1:]),
    "int for float": replaced("factor", ("factor", np.int32)),
    "float for int": with_inner(*INNER[:2], ("width", np.float32)),
    "signed for unsigned": replaced("seed", ("seed", np.int64)),
    "a number for an address": replaced("in", ("in", np.int64)),
    "another length of an array": replaced("shape", ("shape", np.int32, (2,))),
    "another type of an array": replaced("shape", ("shape", np.float32, (3,))),
}


def small(fields) -> str:
    return STRUCTS + layout_asserts(Kernel("", "", mirror(fields), "Params"))


def test_an_exact_mirror_compiles(compile_text):
    compile_text(small(FIELDS))


@pytest.mark.parametrize("difference", WRONG)
def test_any_difference_does_not_compile(compile_text, difference):
    with pytest.raises(CompileError):
        compile_text(small(WRONG[difference]))


def test_a_packed_mirror_does_not_compile(compile_text):
    packed = np.dtype([("a", np.int32), ("b", np.int64)])
    text = "struct Params { int a; long long b; };\n"
    with pytest.raises(CompileError):
        compile_text(text + layout_asserts(Kernel("", "", packed, "Params")))


def test_the_log_names_the_field():
    with pytest.raises(CompileError) as caught:
        cxx.check(small(WRONG["float for int"]))
    assert "kind of k.width" in caught.value.log


# Kernels and specialisations ------------------------------------------------------------------


def test_expressions_name_the_template_arguments():
    assert COPY.specialise(16).expression == "store_copy<16>"
    assert CONVERT.specialise("half", "int8", 8).expression == "store_convert<half, int8, 8>"
    assert str(COPY.specialise(4)) == "store.cu:store_copy<4>"


def test_equal_arguments_are_one_specialisation():
    first, second = COPY.specialise(16), COPY.specialise("16")
    assert first == second
    assert hash(first) == hash(second)
    assert {first: "found"}[second] == "found"


def test_other_arguments_and_kernels_are_other_specialisations():
    twin = Kernel(COPY.source, COPY.name, COPY.params, COPY.struct)
    others = [COPY.specialise(8), COPY.specialise(16, 16), COPY.specialise(), twin.specialise(16)]
    assert COPY.specialise(16) not in others
    assert len({COPY.specialise(16), *others}) == 5


def test_a_specialisation_cannot_be_changed():
    with pytest.raises(AttributeError):
        COPY.specialise(16).arguments = ("8",)


def test_all_specialisations_differ():
    every = specialisations()
    assert all(isinstance(s, Specialisation) for s in every)
    assert len(set(every)) == len({str(s) for s in every}) == len(every)


def test_pointers_come_first():
    assert pointer_fields(PARAMS) == PARAMS.names.index("faults") + 1
    assert pointer_fields(mirror(FIELDS)) == 2
    assert pointer_fields(np.dtype(np.int64)) == 0
