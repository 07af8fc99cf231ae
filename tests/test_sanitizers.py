"""The kernels under the sanitizers for addresses and undefined behaviour, on the host device."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import full_only

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
            "KVCUPY_STRICT": "0",  # whose instrumentation excludes that of sanitizers
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


@pytest.mark.parametrize(
    "what", ["stores", "rotations", "moves", "transfers", "attention", "traps"]
)
def test_nothing_is_reported(sanitized, what):
    status, output = sanitized(what)
    assert status == 0 and "all done" in output, output[-6000:]


OVERFLOW = "heap-buffer-overflow"
WRONG = {
    "reads a word past a row": (
        "stores", "cache_rows.cuh", "if (word < k_words) k[i] = k_in[word];",
        "if (word <= k_words) k[i] = k_in[word];", OVERFLOW),
    "writes a word past a row": (
        "stores", "cache_rows.cuh", "if (word < v_words) v_out[word] = v[i];",
        "if (word <= v_words) v_out[word] = v[i];", OVERFLOW),
    "shifts too far": (
        "stores", "cache_rows.cuh", "  const int k_words = p.k.width / kWordBytes;",
        "  const int k_words = p.k.width / kWordBytes + (0 << (lanes + 32));", "shift exponent"),
    "reads a row past the table": (
        "rotations", "rope.cu", "position < p.max_positions", "position <= p.max_positions",
        OVERFLOW),
    "reads past the positions": (
        "rotations", "rope.cu", "row < p.num_rows", "row <= p.num_rows", OVERFLOW),
    "reads a slot too many": (
        "rotations", "rope.cu", "token >= p.num_stored", "token > p.num_stored", OVERFLOW),
    "reads a page past the pool": (
        "moves", "pages.cu", "page < p.num_pages", "page <= p.num_pages", OVERFLOW),
    "writes a slot past the output": (
        "moves", "indexing.cu", "min(append_len, p.num_out - before)",
        "min(append_len, p.num_out + 1 - before)", OVERFLOW),
    "reads the length of a sequence too many": (
        "moves", "indexing.cu", "other < sequence;", "other < sequence + 1 + lane;", OVERFLOW),
    "reads a word past a row of a transfer": (
        "transfers", "transfer.cu", "if (w < v_words[r]) v[i]", "if (w <= v_words[r]) v[i]",
        OVERFLOW),
    "writes the last piece of a row whole": (
        "transfers", "transfer.cu", "left < piece_words ? left : piece_words", "piece_words",
        OVERFLOW),
    "reads a row of a transfer too wide": (
        "transfers", "transfer.cu", "if (elements[i] < p.k_width)",
        "if (elements[i] <= p.k_width)", OVERFLOW),
    "reads keys past the length of a sequence": (
        "attention", "attention.cuh", "t.num_visible = t.sinks + end - t.first_key;",
        "t.num_visible = t.sinks + end - t.first_key + 64;", OVERFLOW),
    "reads a row of queries too wide": (
        "attention", "attention.cu", "exists ? p.k.width : 0, p.query_format",
        "exists ? p.k.width + 8 : 0, p.query_format", OVERFLOW),
}  # fmt: skip


TELLING = {what: wrong for wrong, (what, *_) in WRONG.items()}.values()  # one of each run


@pytest.mark.parametrize("wrong", [w if w in TELLING else full_only(w) for w in WRONG])
def test_what_is_wrong_is_reported(sanitized, kernel_sources, wrong):
    """The control of the test above."""
    what, file, old, new, report = WRONG[wrong]
    kernel_sources.replace(file, old, new)
    status, output = sanitized(what)
    assert status != 0, "nothing was reported"
    assert report in output, output[-6000:]
    assert f"kernels_src/{file}" in output, output[-6000:]


def test_misaligned_words_are_reported(sanitized, kernel_sources):
    """Which a GPU refuses, and this processor does not: pairs in one word, at any element."""
    kernel_sources.replace("rope.cu", "kCount > 1 && p.interleaved", "p.interleaved", count=2)
    status, output = sanitized("rotations")
    assert status != 0 and "misaligned address" in output, output[-6000:]
