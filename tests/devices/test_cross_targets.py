"""Kernels compile for other processors and systems through zig, and run on arm64 under qemu."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_host_numbers import (
    FORMATS,
    all_codes,
    codes_type,
    numbers_for,
    require_same_codes,
    rounded,
)

from kvcupy import sources
from kvcupy.devices import cxx
from kvcupy.ops import attention_kernels, specialisations, store

pytestmark = pytest.mark.skipif(find_spec("ziglang") is None, reason="needs the ziglang wheel")

HERE = Path(__file__).parent
ZIG = (sys.executable, "-m", "ziglang")
TARGETS = ("aarch64-linux-gnu", "aarch64-macos", "x86_64-macos")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
MUSL = "aarch64-linux-musl"  # of which zig has all that a program is linked with

# Two without barriers, one of fibers, one of matrices, and attention by one thread per tile.
FEW = (
    attention_kernels.DECODE[1].specialise("bfloat16", 8, 16, "false"),
    store.CONVERT.specialise("bfloat16", "fp8_e4m3", 8),
    store.DYNAMIC.specialise("half", "int8", 8),
    store.GATHER_CONVERT.specialise("fp8_e5m2", "half", 8),
    next(s for s in specialisations() if s.kernel is attention_kernels.PREFILL),
)


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, **options)
    assert done.returncode == 0, (done.returncode, done.stderr.decode())
    return done.stdout


def compile_for(target, source, built, *flags):
    kernels = sources.kernels_dir()
    run(
        *ZIG, "c++", "-target", target, *cxx._FLAGS, "-Werror", f"-I{kernels}",
        f"-I{kernels / 'host'}", *flags, "-c", source, "-o", built,
    )  # fmt: skip


def compile_program(target, folder, specialisation, *flags):
    source = folder / "kernel.cpp"
    source.write_text(cxx._program(specialisation))
    compile_for(target, source, folder / "kernel.o", *flags)
    return folder / "kernel.o"


@pytest.mark.covering
@pytest.mark.parametrize("specialisation", FEW, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_compiles_for_another_target(tmp_path, target, specialisation):
    built = compile_program(target, tmp_path, specialisation, "-O1")
    magic = built.read_bytes()[:4]
    assert magic == (b"\xcf\xfa\xed\xfe" if "macos" in target else b"\x7fELF")


@pytest.mark.parametrize("target", TARGETS)
def test_the_pool_of_threads_compiles_for_another_target(tmp_path, target):
    compile_for(target, sources.kernels_dir() / "host" / "pool.cpp", tmp_path / "pool.o")


def test_assembly_that_macos_lacks_is_noticed(tmp_path):
    """The control of the tests above: a directive of ELF."""
    (tmp_path / "elf.cpp").write_text('asm(".type name,@function");\n')
    with pytest.raises(AssertionError, match="directive"):
        compile_for("aarch64-macos", tmp_path / "elf.cpp", tmp_path / "elf.o")


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted({s.kernel.source for s in specialisations()}))
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_another_target(tmp_path, target, source):
    lines = ['#include "host/runner.h"', f'#include "{source}"']
    for i, one in enumerate(s for s in specialisations() if s.kernel.source == source):
        runner = "run_fiber_block" if one.kernel.barriers else "run_plain_block"
        struct = one.kernel.struct
        lines.append(f"auto* kernel_{i} = &kvcupy_host::{runner}<{struct}, {one.expression}>;")
    (tmp_path / "all.cpp").write_text("\n".join(lines))
    compile_for(target, tmp_path / "all.cpp", tmp_path / "all.o", "-O0")


# Under qemu ---------------------------------------------------------------------------------------
# Slow: zig first builds a C library for the target.


def program_for_arm64(folder, source, *flags):
    if QEMU is None:
        pytest.skip("needs qemu-aarch64 (Debian: qemu-user-static)")
    compile_for(MUSL, HERE / source, folder / "program.o", "-fno-exceptions", "-fno-rtti", *flags)
    run(*ZIG, "cc", "-target", MUSL, "-static", folder / "program.o", "-o", folder / "program")
    return folder / "program"


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm64")
    program = program_for_arm64(folder, "conversions.cpp", "-DKVCUPY_MAIN")

    def convert(name, source, target_type):
        target = np.dtype(target_type)
        count = (source.size, source.itemsize, target.itemsize)
        out = run(QEMU, program, name, *count, input=source.tobytes())
        return np.frombuffer(out, target)

    return convert


@pytest.mark.slow
@pytest.mark.parametrize("path", ("one", "eight"))
@pytest.mark.parametrize("fmt", [*FORMATS, "int8"])
def test_conversions_on_arm64_are_those_of_ml_dtypes(conversions, fmt, path):
    numbers = numbers_for(fmt)
    got = conversions(f"{path}_{fmt}_encode", numbers, codes_type(fmt))
    require_same_codes(fmt, numbers, got, rounded(numbers, fmt))

    codes = all_codes(fmt)
    got = conversions(f"{path}_{fmt}_decode", codes, np.float32)
    kind = np.int8 if fmt == "int8" else FORMATS[fmt][0]
    np.testing.assert_array_equal(got, codes.view(kind).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", (False, True), ids=("plain", "fibers"))
def test_a_store_runs_on_arm64(tmp_path, dynamic):
    name, runner = ("dynamic", "fiber") if dynamic else ("convert", "plain")
    program = program_for_arm64(
        tmp_path, "cross_store.cpp", f"-DRUNNER=run_{runner}_block",
        f"-DKERNEL=store_{name}<bfloat16, fp8_e4m3, 8>",
    )  # fmt: skip
    tokens, heads, width, num_slots, slots = 6, 2, 64, 8, (3, -1, 0, 7, 8, 5)
    rows = np.random.default_rng(3).normal(0, 40, (tokens, heads, width))
    rows = rows.astype(ml_dtypes.bfloat16)
    out = run(QEMU, program, input=rows.tobytes())
    got = np.frombuffer(out, np.uint8, num_slots * heads * width).reshape(num_slots, heads, width)
    got_scales = np.frombuffer(out, np.float32, offset=got.size).reshape(num_slots, heads)

    want, scales = np.zeros_like(got), np.zeros_like(got_scales)
    for token, slot in enumerate(slots):
        if 0 <= slot < num_slots:
            values = rows[token].astype(np.float32)
            scale = np.float32(0.3)
            if dynamic:
                scale = scales[slot] = np.abs(values).max(-1) / np.float32(448)
            codes = rounded((values / np.reshape(scale, (-1, 1))).ravel(), "fp8_e4m3")
            want[slot] = codes.reshape(heads, width)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got, want)
