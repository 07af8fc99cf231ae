"""The kernels under the sanitizers for addresses and undefined behaviour, on the host device."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvcupy.devices import cxx

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def runtime():
    """The shared library that must be loaded before Python, for its allocations to be guarded."""
    compiler = cxx.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    for name in ("libasan.so", f"libclang_rt.asan-{platform.machine()}.so"):
        answer = subprocess.run(
            [*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True
        )
        found = Path(answer.stdout.strip())
        if answer.returncode == 0 and found.is_absolute() and found.is_file():
            return found
    pytest.skip(f"{compiler.version} has no shared runtime of the address sanitizer")


@pytest.fixture
def sanitized(runtime, kernel_sources):
    """Run `sanitized.py` on the kernels of the test; returns exit status and all output."""
    kernel_sources.add("host_threads.cu")

    def run(what: str) -> tuple[int, str]:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(runtime),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0:exitcode=77",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "sanitized.py"), what, str(kernel_sources.folder)],
            env=environment, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("what", ["stores", "rotations", "moves", "traps"])
def test_nothing_is_reported(sanitized, what):
    status, output = sanitized(what)
    assert status == 0 and "all done" in output, output[-6000:]


@pytest.mark.parametrize(("old", "new", "report"), [
    ("if (word < k_words) k[i] = k_in[word];", "if (word <= k_words) k[i] = k_in[word];",
     "heap-buffer-overflow"),
    ("if (word < v_words) v_out[word] = v[i];", "if (word <= v_words) v_out[word] = v[i];",
     "heap-buffer-overflow"),
    ("  const int k_words = k_bytes / kWordBytes;",
     "  const int k_words = k_bytes / kWordBytes + (0 << (lanes + 32));",
     "shift exponent"),
], ids=["reads a word past a row", "writes a word past a row", "shifts too far"])  # fmt: skip
def test_what_is_wrong_is_reported(sanitized, kernel_sources, old, new, report):
    """The control of the tests above."""
    kernel_sources.replace("cache_rows.cuh", old, new)
    status, output = sanitized("stores")
    assert status != 0, "nothing was reported"
    assert report in output, output[-6000:]
    assert "store_copy" in output, output[-6000:]
