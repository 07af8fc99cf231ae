"""Compiling a kernel for this processor with whatever C++ compiler there is."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .. import sources
from ..config import compile_logger
from ..errors import CompileError
from ..extras import install
from ..kernels import Kernel, Specialisation
from . import cache

# Exactly the kernel's own arithmetic: no contraction into FMA, no fast-math.
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing",
    "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-psabi",
)  # fmt: skip

# Strict builds: instrumented as for sanitizers whose libraries are never linked, because
# kernels_src/host/strict.cpp defines what instrumented code calls. -g1 names the line of an access.
_STRICT_FLAGS = (
    *(flag for flag in _FLAGS if flag != "-O3"), "-O1", "-g1", "-fno-exceptions", "-DKVCUPY_STRICT",
)  # fmt: skip
_INSTRUMENTED = ("-fsanitize=thread", "-fsanitize=alignment")
_RUNNER = '#include "host/runner.h"'
_HEADERS = "host/precompiled.h"
_MAX_THREADS = 1024  # of a block, unless launch bounds say less


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that answered: the command that starts it, the first line of its version."""

    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return "ziglang" in self.command


def _candidates() -> list[list[str]]:
    commands = [[path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]
    if find_spec("ziglang") is not None:
        commands.append([sys.executable, "-m", "ziglang", "c++"])
    return commands


@lru_cache(maxsize=1)
def find_compiler() -> Compiler | None:
    """Return the first of $CXX, c++, g++, clang++ and the ziglang wheel that runs, or None."""
    chosen, complaint = _chosen()
    if complaint:
        compile_logger.warning("%s; looking for another compiler", complaint)
    elif chosen is not None:
        return chosen
    for command in _candidates():
        try:
            return _started(command)
        except (OSError, subprocess.SubprocessError):
            continue  # not usable; the next one may be
    return None


def complaint_about_cxx() -> str | None:
    """Return why the compiler that $CXX names is not used, if it names one that does not work."""
    return _chosen()[1]


def _chosen() -> tuple[Compiler | None, str | None]:
    """Return the compiler that $CXX names, or why it cannot be used."""
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
        return (_started(command) if command else None), None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, f"CXX={shlex.quote(named)} is ignored: {error}"


def _started(command: list[str]) -> Compiler:
    """Ask a compiler for its version; OSError or SubprocessError if it does not answer."""
    answer = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    return Compiler(tuple(command), (answer.stdout.splitlines() or [""])[0])


@lru_cache(maxsize=1)
def _processor() -> str:
    """Identify the instruction set: objects are built for the processor that they are built on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    flags = next((s for s in lines if s.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def _program(specialisation: Specialisation) -> str:
    kernel = specialisation.kernel
    runner = "run_fiber_block" if kernel.barriers else "run_plain_block"
    barriers = "" if kernel.barriers else "#define KVCUPY_NO_BARRIERS\n"
    return (
        f"{_RUNNER}\n"
        f"{barriers}"
        f"{_included(kernel)}"
        f"KVCUPY_HOST_KERNEL({runner}, {kernel.struct}, {specialisation.expression})\n"
    )


def _included(kernel: Kernel) -> str:
    return f'#include "{kernel.source}"\n' if kernel.text is None else kernel.text


def build(specialisation: Specialisation, extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the shared library of a specialisation, compiling it unless the cache has it."""
    return _build(specialisation, _program(specialisation), extra_flags)


def build_strict(specialisation: Specialisation, extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the shared library of a strict build of a specialisation; raise as `build` does."""
    kernel = specialisation.kernel
    program = (
        '#include "host/strict_kernel.h"\n'
        f"{_included(kernel)}"
        f"KVCUPY_HOST_KERNEL({int(kernel.barriers)}, ({_launch_bounds(kernel)}), "
        f"{kernel.struct}, {specialisation.expression})\n"
    )
    flags = (*_STRICT_FLAGS, *_INSTRUMENTED)
    return _build(
        f"{specialisation} (strict)", program, extra_flags, flags, (_build_strict_runner,)
    )


def _build_strict_runner() -> Path:
    return _build_object('#include "host/strict.cpp"\n', (*_STRICT_FLAGS, "-O2"))


def _launch_bounds(kernel: Kernel) -> str:
    """Return the C++ expression for the most threads of a block that a kernel is compiled for."""
    text = kernel.text
    if text is None:
        text = (sources.kernels_dir() / kernel.source).read_text(encoding="utf-8")
    name = kernel.name.partition("<")[0].strip()
    match = re.search(rf"__launch_bounds__\s*\(([^;{{]*?)\)\s*{name}\s*\(", text)
    if match is None:
        return str(_MAX_THREADS)
    depth, bounds = 0, match[1]
    for i, character in enumerate(bounds):
        depth += (character in "(<") - (character in ")>")
        if character == "," and depth == 0:
            return bounds[:i]
    return bounds


def build_pool() -> Path:
    """Return the shared library of the threads that help with launches; raise as `build` does."""
    return _build("host/pool.cpp", '#include "host/pool.cpp"\n', ())


def _build(
    what: object, program: str, extra_flags: tuple[str, ...],
    base_flags: tuple[str, ...] = _FLAGS, linked: tuple[Callable[[], Path], ...] = (),
) -> Path:  # fmt: skip
    compiler = _require_compiler()
    flags = (*base_flags, _native(), *extra_flags)
    key = _key(compiler, flags, "host", sources.digest(), program)

    def make(target: Path) -> None:
        with cache.announced(what, "host"):
            _compile(compiler, program, flags, target, linked)

    return cache.file(key, ".so", make)


def _build_object(program: str, flags: tuple[str, ...]) -> Path:
    """Return the object file of a program that includes files of `kernels_src/host` alone."""
    compiler = _require_compiler()
    flags = (*flags, _native())
    key = _key(compiler, flags, "object", sources.digest("host"), program)
    return cache.file(key, ".o", lambda target: _compile_object(compiler, program, flags, target))


def _key(compiler: Compiler, flags: tuple[str, ...], *parts: str) -> str:
    return cache.key(*parts, *flags, compiler.version, *compiler.command, _processor())


def _native() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def check(program: str) -> None:
    """Compile C++ text, which may include files of `kernels_src/`, and discard the result."""
    compiler = _require_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text(f'#include "host/cuda_names.h"\n{program}')
        # Zig must write an object file.
        kind = ["-c", "-o", f"{folder}/check.o"] if compiler.is_zig else ["-fsyntax-only"]
        _run([*compiler.command, *_FLAGS, *_search_paths(), *kind, str(source)], program)


def _require_compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"no C++ compiler was found ({install('host')} brings one)")
    return compiler


def _search_paths() -> list[str]:
    kernels = sources.kernels_dir()
    return [f"-I{kernels}", f"-I{kernels / 'host'}"]


def _compile(
    compiler: Compiler, program: str, flags: tuple[str, ...], target: Path,
    linked: tuple[Callable[[], Path], ...] = (),
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernel.o"
        _compile_object(compiler, program, flags, built)
        # zig c++ would first build a C++ library, which the kernels do not need.
        linker = (*compiler.command[:-1], "cc") if compiler.is_zig else compiler.command
        sanitizers = [f for f in flags if f.startswith("-fsanitize") and f not in _INSTRUMENTED]
        objects = [str(built), *(str(build()) for build in linked)]
        _run([*linker, *sanitizers, "-shared", "-pthread", *objects, "-o", str(target)], program)


def _compile_object(compiler: Compiler, program: str, flags: tuple[str, ...], target: Path) -> None:
    search = _search_paths()
    if program.startswith(f"{_RUNNER}\n"):
        folder_of_headers = _precompiled(compiler, flags)
        if folder_of_headers is not None:
            search = [f"-I{folder_of_headers}", *search]
            program = f"#include <{_HEADERS}>\n{program}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cpp"
        source.write_text(program)
        _run([*compiler.command, *flags, *search, "-c", str(source), "-o", str(target)], program)


def _precompiled(compiler: Compiler, flags: tuple[str, ...]) -> Path | None:
    """Return the folder in which GCC finds `_HEADERS` parsed already; None for other compilers.

    Parsing the headers takes as long as all the rest of most kernels. Where GCC cannot use the
    cached ones, it finds the header of that name in `kernels_src`.
    """
    if compiler.is_zig or "clang" in compiler.version:
        return None
    key = _key(compiler, flags, "headers", sources.digest("host"))

    def make(target: Path) -> None:
        source = sources.kernels_dir() / _HEADERS
        options = ["-x", "c++-header", *_search_paths(), str(source), "-o", str(target)]
        _run([*compiler.command, *flags, *options], _HEADERS)

    try:
        return cache.file(key, f"/{_HEADERS}.gch", make).parents[1]
    except CompileError:
        return None  # the kernel's own compilation says what is wrong


def _run(command: list[str], program: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        message = f"{command[0]} could not be started: {error}"
        raise CompileError(message, transient=True) from error
    if result.returncode != 0:
        message = f"{command[0]} failed on {program.splitlines()[-1]}"
        killed = result.returncode < 0  # by a signal, as where memory runs out
        raise CompileError(message, result.stderr or result.stdout, transient=killed)
