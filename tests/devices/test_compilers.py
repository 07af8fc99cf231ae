"""What the host device does with the compilers of a machine: which it takes, and what it says."""

from __future__ import annotations

import logging
import shutil
import stat
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import Case, fresh_host
from test_host_numbers import (
    FORMATS,
    all_codes,
    codes_type,
    numbers_for,
    require_same_codes,
    rounded,
)

import kvcupy as kv
from kvcupy import sources
from kvcupy.commands.precompile import ARCHS
from kvcupy.devices import cxx, nvrtc
from kvcupy.errors import CompileError
from kvcupy.kernels import Kernel
from kvcupy.ops import attention_kernels, specialisations, store
from kvcupy.ops.store import COPY


@pytest.fixture
def host(monkeypatch, tmp_path):
    return fresh_host(monkeypatch, tmp_path)


@pytest.fixture
def no_compiler(monkeypatch, host):
    """The host device on a machine without a C++ compiler; a warning of NumPy's is an error."""
    monkeypatch.setattr(cxx, "find_compiler", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield host


@pytest.fixture
def warned(caplog):
    """The messages logged so far."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("kvcupy")]


def small(case, pair=("fp32", "fp16"), tokens=6):
    """K, V and their caches of eight slots."""
    return (
        case.input(pair[0], (tokens, 2, 8), name="key"),
        case.input(pair[0], (tokens, 2, 6), name="value"),
        case.output(pair[1], (8, 2, 8), name="k_cache"),
        case.output(pair[1], (8, 2, 6), name="v_cache"),
    )


def arrays_of(args):
    return [arg.array for arg in args]


# What is said ---------------------------------------------------------------------------------


def test_the_host_device_needs_no_cuda_headers(host, monkeypatch, tmp_path, warned):
    monkeypatch.setattr(sources, "header_places", lambda: pytest.fail("looked for headers"))
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))  # where nothing is compiled yet
    monkeypatch.setattr(kv.config, "fallback", "error")
    case = Case(host, 16)
    case.store_kv(*small(case), range(6))
    assert warned() == []
    assert list(tmp_path.glob("*.so"))


def test_the_setting_counts_at_the_call(no_compiler, monkeypatch):
    """A signature planned under one setting obeys the other one later."""
    case = Case(no_compiler, 18)
    args, slots = small(case), case.slots(range(6))
    case.store_kv(*args, slots)
    kv.config.fallback = "error"
    with pytest.raises(kv.CompileError):
        kv.store_kv(*arrays_of(args), slots.array)
    kv.config.fallback = "warn"
    case.store_kv(*args, slots)


# Compilers that fail --------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Make an executable that plays a compiler, and let $CXX name it."""

    def make(script: str, *, executable: bool = True):
        path = tmp_path / "my c++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | (stat.S_IXUSR if executable else 0))
        monkeypatch.setenv("CXX", f"'{path}' --flag")
        return path

    cxx.find_compiler.cache_clear()
    yield make
    cxx.find_compiler.cache_clear()


def test_cxx_comes_first_with_its_flags(compiler):
    path = compiler("echo 'my compiler 1.0'; echo more")
    assert cxx.find_compiler() == cxx.Compiler((str(path), "--flag"), "my compiler 1.0")


@pytest.mark.parametrize("script", ["exit 1", "kill $$"])
def test_a_compiler_that_does_not_answer_is_passed_over(compiler, warned, script):
    path = compiler(script)
    for _ in range(2):
        found = cxx.find_compiler()
        assert found is None or found.command[0] != str(path)
    (message,) = warned()
    assert message.startswith("CXX=") and str(path) in message and "is ignored" in message


@pytest.mark.parametrize("value", ["/no/such/compiler", "g++ 'unclosed", " "])
def test_a_useless_cxx_is_passed_over(compiler, monkeypatch, warned, value):
    monkeypatch.setenv("CXX", value)
    found = cxx.find_compiler()
    assert ["is ignored" in message for message in warned()] == [True] * bool(value.strip())
    assert found is None or not value.startswith(found.command[0] + " ")


def test_a_compiler_that_fails_is_reported_with_its_log(host, compiler, warned):
    compiler(
        '[ "$2" = --version ] && echo 1.0 && exit; echo "kernel.cpp: no space left" >&2; exit 3'
    )
    case = Case(host, 19)
    case.store_kv(*small(case), range(6))
    (message,) = warned()
    assert "my c++ failed on KVCUPY_HOST_KERNEL" in message
    assert "kernel.cpp: no space left" in message
    kv.config.fallback = "error"
    with pytest.raises(kv.CompileError) as caught:
        kv.store_kv(*arrays_of(small(case)), np.arange(6))
    assert caught.value.log == "kernel.cpp: no space left\n"


@pytest.mark.parametrize("script", ["", 'while [ "$1" != -o ]; do shift; done; echo text > "$2"'])
def test_a_compiler_that_makes_nothing_loadable(host, compiler, warned, script):
    compiler(f'[ "$2" = --version ] && echo 1.0 && exit; {script or "true"}')
    case = Case(host, 20)
    case.store_kv(*small(case), range(6))
    (message,) = warned()
    assert "store_kv runs in NumPy" in message


# What a compiler includes ------------------------------------------------------------------------


def test_a_c_compiler_takes_no_source_from_the_working_directory(tmp_path, monkeypatch):
    folder = sources.kernels_dir()
    for file in folder.rglob("*.*"):
        hostile = tmp_path / file.relative_to(folder)
        hostile.parent.mkdir(exist_ok=True)
        hostile.write_text("#error from the working directory\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    cxx.check('#include "host/runner.h"\n#include "pages.cu"\n')
    assert cxx.build(COPY.specialise(16)).is_file()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The commands that compile, with an empty cache."""
    if "clang" in cxx.find_compiler().version or cxx.find_compiler().is_zig:
        pytest.skip("only GCC finds precompiled headers by itself")
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    commands, really = [], cxx._run
    monkeypatch.setattr(cxx, "_run", lambda *a: (commands.append(a[0]), really(*a)))
    return commands


def test_headers_are_parsed_once_for_all_kernels(programs):
    for word in (16, 8, 4):
        assert cxx.build(COPY.specialise(word)).is_file()
    assert sum("c++-header" in command for command in programs) == 1


def test_a_kernel_whose_headers_do_not_compile_says_so(kernel_sources, programs):
    kernel_sources.replace("host/runner.h", "#pragma once", "#error on purpose")
    with pytest.raises(CompileError, match="on purpose"):
        cxx.build(COPY.specialise(16))


# NVRTC -------------------------------------------------------------------------------------------

WITH_NVRTC = pytest.mark.skipif(find_spec("cupy") is None, reason="NVRTC is reached through CuPy")
PARAMS = np.dtype(
    [("in", np.uint64), ("out", np.uint64), ("count", np.int32), ("factor", np.float32)], align=True
)
SCALE = Kernel("scale.cu", "scale", PARAMS, "ScaleParams").specialise(128)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the test kernels in place of the package's, and an empty cache."""
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(Path(__file__).parent.parent / "kernels", tmp_path / "kernels"))
    monkeypatch.setattr(sources, "kernels_dir", lambda: folder)
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """What NVRTC is really asked for: the architectures."""
    compiled = []
    really = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *a: compiled.append(a[1]) or really(*a))
    return compiled


@WITH_NVRTC
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles_and_is_found_again(kernels, compilations, arch):
    first, second = (nvrtc.compile_cubin(SCALE, arch) for _ in range(2))
    assert (first.target, first.image[:4], compilations) == (arch, b"\x7fELF", [arch])
    assert first.lowered_name.encode() in first.image
    assert (second.image, second.lowered_name, second.target) == (
        first.image, first.lowered_name, first.target,
    )  # fmt: skip


def other_header(kernels, monkeypatch):
    header = kernels / "factor.cuh"
    header.write_text(header.read_text().replace("1.0f", "3.0f"))


CHANGES = {
    "an included file": other_header,
    "CUDA's headers": lambda kernels, patch: patch.setattr(
        sources, "cuda_include_dirs", lambda major: []
    ),
    "NVRTC": lambda kernels, patch: patch.setattr(nvrtc, "nvrtc_version", lambda: (12, 99)),
}


@WITH_NVRTC
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_the_result_changes_the_key(kernels, compilations, monkeypatch, what):
    nvrtc.compile_cubin(SCALE, "sm_90")
    nvrtc.compile_cubin(SCALE.kernel.specialise(64), "sm_90")
    CHANGES[what](kernels, monkeypatch)
    nvrtc.compile_cubin(SCALE, "sm_90")
    assert len(compilations) == 3


@WITH_NVRTC
@pytest.mark.parametrize("name", ["scale.cu", "factor.cuh"])
def test_the_working_directory_supplies_no_source(kernels, tmp_path, monkeypatch, name):
    """Whatever lies where a user happens to be is neither compiled nor cached."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / name).write_text("#error from the working directory\n")
    monkeypatch.chdir(elsewhere)
    nvrtc.compile_cubin(SCALE, "sm_90")


@WITH_NVRTC
def test_an_error_holds_the_log_the_expression_and_the_architecture(kernels):
    broken = Kernel("faulty.cu", "broken", PARAMS, "FaultyParams").specialise(128)
    with pytest.raises(CompileError, match=r"faulty.cu:broken<128> .* sm_90") as caught:
        nvrtc.compile_cubin(broken, "sm_90")
    assert "NoSuchType" in caught.value.log and caught.value.log in str(caught.value)


@WITH_NVRTC
def test_missing_headers_are_named_with_the_remedy(kernels, monkeypatch):
    (kernels / "scale.cu").write_text("#include <cuda_fp16.h>\n")
    monkeypatch.setattr(sources, "cuda_include_dirs", lambda major: [])
    with pytest.raises(CompileError, match="pip install nvidia-cuda-runtime"):
        nvrtc.compile_cubin(SCALE, "sm_90")


@WITH_NVRTC
def test_an_architecture_of_the_future_gets_ptx_that_keeps_subnormals(kernels):
    compiled = nvrtc.compile_cubin(SCALE, "sm_990")
    assert compiled.target == f"compute_{nvrtc.supported_archs()[-1]}"
    assert compiled.image.endswith(b"\0")
    text = compiled.image.decode()
    assert f".entry {compiled.lowered_name}" in text
    assert "mul" in text
    assert ".ftz" not in text


@pytest.mark.parametrize(
    ("arch", "supported", "expected"),
    [
        ("sm_90", (80, 90, 100), "sm_90"),
        ("sm_90a", (80, 90, 100), "sm_90a"),
        ("sm_103", (80, 90, 100), "compute_100"),
        ("sm_103", (90, 100, 101, 120), "compute_100"),  # 101 became 110, whose PTX is no use
        ("sm_101", (90, 100, 101, 120), "sm_101"),
        ("sm_110", (90, 100, 101, 120), "compute_100"),
        ("sm_89", (80, 90), "compute_80"),
    ],
)
def test_targets(arch, supported, expected):
    assert nvrtc.target_for(arch, supported) == expected


def test_an_architecture_that_is_too_old_is_named():
    with pytest.raises(CompileError, match="sm_75 and newer"):
        nvrtc.target_for("sm_70", (75, 80))


# Other processors and systems, by zig ------------------------------------------------------------

WITH_ZIG = pytest.mark.skipif(find_spec("ziglang") is None, reason="needs the ziglang wheel")

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


@WITH_ZIG
@pytest.mark.covering
@pytest.mark.parametrize("specialisation", FEW, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_compiles_for_another_target(tmp_path, target, specialisation):
    built = compile_program(target, tmp_path, specialisation, "-O1")
    magic = built.read_bytes()[:4]
    assert magic == (b"\xcf\xfa\xed\xfe" if "macos" in target else b"\x7fELF")


@WITH_ZIG
def test_assembly_that_macos_lacks_is_noticed(tmp_path):
    """The control of the tests above: a directive of ELF."""
    (tmp_path / "elf.cpp").write_text('asm(".type name,@function");\n')
    with pytest.raises(AssertionError, match="directive"):
        compile_for("aarch64-macos", tmp_path / "elf.cpp", tmp_path / "elf.o")


@WITH_ZIG
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


@WITH_ZIG
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


@WITH_ZIG
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
