"""The suite under the address and undefined-behaviour sanitizers: ``scripts/test.sh --sanitize``.

Kernels are compiled with both, and every array of the host device lies between redzones, of which
an access ends the process with a report. The runtime is loaded before Python, so that what NumPy
allocates, copies and fills is guarded too.

    raw of an array   |  to alignment  | array | rest of the alignment |    redzones: //////
                      |////////////////|       |///////////////////////|

    python tests/redzones.py FOLDER    the environment of such a run, whose reports go to FOLDER
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvcupy.devices import cxx, host

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer",
         "-g1", "-O0")  # fmt: skip
"""Programs so small take longer to be compiled than to run, so they are not optimised."""

ASAN, TSAN = (
    (f"lib{name}.so", f"libclang_rt.{name}-{platform.machine()}.so") for name in ("asan", "tsan")
)
"""Names of the shared runtimes, of GCC and of Clang."""

LEFT_OUT = {
    "test_sanitizers.py": "starts sanitizers of its own",
}
"""Modules that say nothing under sanitizers."""


# Folders where NVRTC finds its libraries: the runtime replaces the loader that would find them.
_NVRTC = sorted(
    str(path.parent) for entry in sys.path
    for path in Path(entry).glob("nvidia/*/lib/libnvrtc-builtins.so.*")
)  # fmt: skip


def runtime(names: tuple[str, ...] = ASAN) -> Path | str:
    """Return the shared runtime of a sanitizer of the compiler, or why it is missing."""
    compiler = cxx.find_compiler()
    if compiler is None:
        return "no C++ compiler"
    for name in names:
        if (library := _library(compiler, name)) is not None:
            return library
    return f"{compiler.version} has no shared runtime of the sanitizer, neither {names[0]}"


def _library(compiler: cxx.Compiler, name: str) -> Path | None:
    answer = subprocess.run(
        [*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True
    )
    path = Path(answer.stdout.strip())
    return path.resolve() if answer.returncode == 0 and path.is_absolute() else None


def environment(reports: Path | None = None) -> dict[str, str]:
    """Return what a process under the address sanitizer must be started with.

    Reports go to files of a folder, or to stderr. RuntimeError where there is no runtime.
    """
    library, compiler = runtime(), cxx.find_compiler()
    if isinstance(library, str) or compiler is None:
        raise RuntimeError(library)
    # Without the second, exceptions of C++ in libraries that are loaded later end the process.
    standard = _library(compiler, "libstdc++.so.6")
    to_files = "" if reports is None else f":log_path={reports / 'report'}"
    return {
        "LD_PRELOAD": ":".join(str(path) for path in (library, standard) if path),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1:"
        f"exitcode=77{to_files}",
        "LD_LIBRARY_PATH": os.pathsep.join([*_NVRTC, os.environ.get("LD_LIBRARY_PATH", "")]),
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1{to_files}",
        "KVCUPY_STRICT": "0",  # strict builds cannot be combined with sanitizers
    }


# --- In a process under the sanitizer ---


@cache
def _asan() -> ctypes.CDLL | None:
    process = ctypes.CDLL(None)
    if not hasattr(process, "__asan_poison_memory_region"):
        return None
    for name in ("__asan_poison_memory_region", "__asan_unpoison_memory_region"):
        getattr(process, name).argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        getattr(process, name).restype = None
    return process


def active() -> bool:
    """Return whether this process is under the address sanitizer."""
    return _asan() is not None


def poison(address: int, num_bytes: int) -> None:
    """Let no access touch some bytes. What begins within 8 bytes of them stays accessible."""
    if num_bytes > 0 and (process := _asan()) is not None:
        process.__asan_poison_memory_region(address, num_bytes)


def unpoison(address: int, num_bytes: int) -> None:
    """Let accesses touch some bytes again."""
    if num_bytes > 0 and (process := _asan()) is not None:
        process.__asan_unpoison_memory_region(address, num_bytes)


def surround(allocate: Any) -> Any:
    """Return `allocate` of devices/host.py, with redzones on both sides of what it returns."""

    def surrounded(make: Any, layout: Any) -> np.ndarray:
        whole: list[np.ndarray] = []

        def remember(num_bytes: int, element: Any) -> np.ndarray:
            whole.append(make(num_bytes, element))
            return whole[0]

        array = allocate(remember, layout)
        (raw,) = whole
        start, stop = raw.ctypes.data, raw.ctypes.data + raw.nbytes
        first = array.ctypes.data
        poison(start, first - start)
        poison(first + array.nbytes, stop - first - array.nbytes)
        weakref.finalize(raw, unpoison, start, raw.nbytes).atexit = False
        return array

    return surrounded


def use() -> None:
    """Surround the arrays of the host device, and compile its kernels for the sanitizers."""
    host._allocate = surround(host._allocate)
    compile_with(*FLAGS)


def compile_with(*flags: str) -> None:
    """Let every host device of this process give the compiler `flags` beside its own."""
    make = host.HostFunction.__init__

    def with_flags(self: Any, specialisation: Any, extra_flags: tuple[str, ...]) -> None:
        make(self, specialisation, (*extra_flags, *flags))

    host.HostFunction.__init__ = with_flags


@contextmanager
def opened(address: int, num_bytes: int, *, but: tuple[int, int]) -> Iterator[None]:
    """Let the process read all of a buffer that has redzones around the bytes of `but`."""
    unpoison(address, num_bytes)
    try:
        yield
    finally:
        close(address, num_bytes, but=but)


def close(address: int, num_bytes: int, *, but: tuple[int, int]) -> None:
    """Make redzones of a buffer's bytes before and after the offsets of `but`."""
    start, stop = but
    poison(address, start)
    poison(address + stop, num_bytes - stop)


if __name__ == "__main__":
    try:
        for name, value in environment(Path(sys.argv[1])).items():
            print(f"{name}={value}")
    except RuntimeError as error:
        print(f"--sanitize: {error}", file=sys.stderr)
        sys.exit(2)
