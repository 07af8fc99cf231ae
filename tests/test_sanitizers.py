"""Kernels under the sanitizers for addresses and undefined behaviour, the suite under the same, and
the host device's runtime under the one for threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import redzones
from helpers import full_only

from kvcupy.devices import cxx

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def asan() -> dict[str, str]:
    """What a process must be started with, for its allocations to be guarded."""
    try:
        return redzones.environment()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def sanitized(asan, kernel_sources):
    """Run `sanitized.py` on the kernels of the test; returns exit status and all output."""
    kernel_sources.add("host_threads.cu")

    def run(what: str, which: int = 1) -> tuple[int, str]:
        program = [sys.executable, str(HERE / "sanitized.py")]
        return finished([*program, what, str(kernel_sources.folder), str(which)], asan)

    return run


def finished(command: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Run a program in the root of the checkout; return its exit status and all output."""
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    done = subprocess.run(
        command, env={**os.environ, **variables, "PYTHONPATH": path}, cwd=HERE.parent,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


CALLS = ("store_kv,store_mla", "rope_store_kv,apply_rope", "copy_pages,slot_mapping,gather_kv",
         "shift_pages,store_state,gather_state,update_conv_state", "paged_attention,merge_states",
         "transfers", "traps", "redzones")  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_nothing_is_reported(sanitized, what):
    status, output = sanitized(what, 1 if helpers.full else 6)
    assert status == 0 and "all done" in output, output[-6000:]


WRONG = {
    "writes a word past a row": (
        "store_kv", "cache_rows.cuh", "if (word < v_words) v_out[word] = v[i];",
        "if (word <= v_words) v_out[word] = v[i];", "use-after-poison"),
    "shifts too far": (
        "redzones", "cache_rows.cuh", "  const int k_words = p.k.width / kWordBytes;",
        "  const int k_words = p.k.width / kWordBytes + (0 << (lanes + 32));", "shift exponent"),
    "reads a slot too many": (
        "redzones", "rope.cu", "token >= p.num_stored", "token > p.num_stored",
        "heap-buffer-overflow"),
    "reads the length of a sequence too many": (
        "slot_mapping", "indexing.cu", "other < sequence;", "other < sequence + 1 + lane;",
        "use-after-poison"),
    "reads a row of angles too many": (
        "shift_pages", "shift.cu", "if (distance >= static_cast<u64>(p.max_positions))",
        "if (distance > static_cast<u64>(p.max_positions))", "use-after-poison"),
    "moves a channel too many": (
        "update_conv_state", "conv_state.cu", "unit < end_unit; unit += lanes",
        "unit <= end_unit; unit += lanes", "use-after-poison"),
    "reads a row of a transfer too wide": (
        "transfers", "transfer.cu", "if (elements[i] < p.k_width)",
        "if (elements[i] <= p.k_width)", "use-after-poison"),
    "reads a row of queries too wide": (
        "paged_attention", "attention.cu", "exists ? p.k.width : 0, p.query_format",
        "exists ? p.k.width + 8 : 0, p.query_format", "use-after-poison"),
    "reads past an array's own bytes": (
        "redzones", "cache_rows.cuh", "if (word < k_words) k[i] = k_in[word];",
        "if (word <= k_words) k[i] = k_in[word];", "use-after-poison"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", [full_only(w) if "writes" in w else w for w in WRONG])
def test_what_is_wrong_is_reported(sanitized, kernel_sources, wrong):
    """The control of the test above."""
    what, file, old, new, report = WRONG[wrong]
    kernel_sources.replace(file, old, new)
    status, output = sanitized(what, 1 if what in ("store_kv", "transfers") else 5)
    assert status != 0, "nothing was reported"
    assert report in output, output[-6000:]
    assert f"kernels_src/{file}" in output, output[-6000:]


def test_misaligned_words_are_reported(sanitized, kernel_sources):
    """Which a GPU refuses, and this processor does not: pairs in one word, at any element."""
    kernel_sources.replace("rope.cu", "kCount > 1 && p.interleaved", "p.interleaved", count=3)
    status, output = sanitized("rope_store_kv")
    assert status != 0 and "misaligned address" in output, output[-6000:]


# --- The suite ------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_suite_runs_under_sanitizers(asan):
    """In a reduced form: an operation, and caches that move pages."""
    status, output = finished(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--sanitize", "-p", "no:cacheprovider",
         "tests/ops/test_copy_pages.py", "tests/cache/test_tiered.py"], asan,
    )  # fmt: skip
    assert status == 0 and " passed" in output, output[-6000:]


WRITES_A_CANARY = """
import ctypes
from helpers import Case

def test_it(device):
    case = Case(device, 1)
    argument = case.output("fp16", (3, 5))
    buffer = argument.buffer
    ctypes.memset(buffer.raw.ctypes.data + buffer.{where}, 0, 1)
"""


@pytest.mark.parametrize("where", ["stop", full_only("start - 8")])
def test_canaries_are_redzones(asan, tmp_path, where):
    (tmp_path / "test_canary.py").write_text(WRITES_A_CANARY.format(where=where))
    status, output = finished(
        [sys.executable, "-m", "pytest", "-n", "0", "--sanitize", "-p", "no:cacheprovider", "-s",
         "--rootdir", str(HERE.parent), "-c", str(HERE.parent / "pyproject.toml"),
         "--confcutdir", str(HERE.parent), "-p", "conftest", str(tmp_path / "test_canary.py")],
        asan,
    )  # fmt: skip
    assert status == 77 and "use-after-poison" in output, output[-6000:]


def test_without_the_runtime_it_says_so(tmp_path):
    status, output = finished([sys.executable, "-m", "pytest", "--sanitize", "-n", "0"], {})
    assert status == 4 and "use scripts/test.sh" in output, output[-2000:]


# --- Threads --------------------------------------------------------------------------------------

DRIVER = HERE / "kernels" / "host_races.cpp"
TSAN_FLAGS = ("-std=c++17", "-O1", "-g1", "-fno-strict-aliasing", "-ffp-contract=off",
              "-Wno-unknown-pragmas", "-fsanitize=thread", "-pthread")  # fmt: skip
# Fibers switch stacks in the middle of functions.
NO_FUNCTIONS = {
    True: ("-mllvm", "-tsan-instrument-func-entry-exit=0"),  # of Clang
    False: ("--param=tsan-instrument-func-entry-exit=0",),
}


@pytest.fixture
def races(kernel_sources, tmp_path):
    """Run launches of several threads under the thread sanitizer; returns status and output."""
    compiler = cxx.find_compiler()
    if isinstance(answer := redzones.runtime(redzones.TSAN), str):
        pytest.skip(answer)

    def run() -> tuple[int, str]:
        kernels, program = kernel_sources.folder, tmp_path / "races"
        is_clang = "clang" in compiler.version or compiler.is_zig
        folders = [f"-I{folder}" for folder in (kernels, kernels / "host", DRIVER.parent)]
        status, output = finished(
            [*compiler.command, *TSAN_FLAGS, *NO_FUNCTIONS[is_clang], *folders, str(DRIVER), "-o",
             str(program)], {},
        )  # fmt: skip
        assert status == 0, output[-6000:]
        status, output = finished([str(program)], {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66"})
        if "unexpected memory mapping" in output:
            pytest.skip(
                "the thread sanitizer cannot run: this kernel places memory where it may not"
            )
        return status, output

    return run


def test_launches_of_several_threads(races):
    status, output = races()
    assert status == 0 and "all done" in output, output[-6000:]


RACES = {
    "a block is counted without an atomic": (
        "runner.h", "__atomic_fetch_add(&grid.next, 1, __ATOMIC_RELAXED)", "grid.next++"),
    "helpers look for work without an atomic": (
        "pool.cpp", "__atomic_load_n(number, __ATOMIC_ACQUIRE)", "*number"),
    "a launch does not wait for its helpers": (
        "pool.cpp", "while (job.running > 0) pthread_cond_wait(&finished, &lock);", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", [n if i == 0 else full_only(n) for i, n in enumerate(RACES)])
def test_races_are_reported(races, kernel_sources, name):
    """The control of the test above."""
    file, old, new = RACES[name]
    kernel_sources.replace(f"host/{file}", old, new)
    status, output = races()
    assert status == 66 and "data race" in output, output[-6000:]
