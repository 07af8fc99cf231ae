"""The parts of a GPU report, in the order in which they tell most."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from . import verdicts
from .verdicts import Judge

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 720.0  # of each part
PYTHON = (sys.executable, "-X", "faulthandler")
DECIDING = ("split_decode", "verify", "operations", "gpu")
"""Groups of parts that say whether kvcupy works on a machine."""
SMOKE = ("doctor", *DECIDING[:-1])
SANITIZERS = {
    "memcheck": ("--padding", "64", "--report-api-errors", "no"),
    "racecheck": (), "synccheck": (), "initcheck": (),
}  # fmt: skip
_SIZES_MB = (1, 32, 1000)  # of transfers
# Part: script and arguments.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    **{f"transfer-{size}mb": ("bench.py", "transfer", "--case-mb", str(size),
                              "--sections", "layouts") for size in _SIZES_MB},
    "calls": ("bench.py", "calls"),
    "frames": ("bench.py", "frames"),
    "scale": ("bench.py", "scale"),
    "models": ("bench.py", "models"),
    "transfer": ("bench.py", "transfer", "--sections", "scattered", "rows"),
    "order": ("bench.py", "order"),
    "generate": ("bench.py", "generate", "--dtype", "bfloat16"),
    "overlap_demo": ("overlap_demo.py",),
    "offload": ("overlap_demo.py", "offload"),
    "serve_demo": ("serve_demo.py",),
    "soak": ("stress.py", "soak", "--seconds", "180"),
    "replay": ("stress.py", "replay"),
}  # fmt: skip
_HOST_TIMES = ("calls", "frames", "scale")


@dataclass(frozen=True)
class Part:
    """One command of the report, with its own log, limit and verdict.

    Attributes
    ----------
    name, group : both are accepted by `--only`
    command : program and arguments; "{result}" stands for the file of results
    limit_s : seconds after which it is stopped
    variables : environment variables for this part alone
    judge : makes a verdict from the output of the process
    missing : why it cannot run here and is skipped
    """

    name: str
    group: str
    command: tuple[str, ...]
    judge: Judge
    missing: str = ""
    limit_s: float = LIMIT_S
    variables: dict[str, str] = field(default_factory=dict)


def parts(
    device: str, *, no_device: str = "", sanitizer: str | None = None, before: Sequence[str] = ()
) -> list[Part]:
    """Return all parts of a report.

    Parameters
    ----------
    no_device : why the device cannot be used; then only the doctor runs
    sanitizer : path of compute-sanitizer, None where it is not installed
    before : tests that failed in an earlier report
    """
    on_device = ("--device", device)
    doctor = Part("doctor", "doctor", (sys.executable, "-m", "kvcupy", "doctor"), verdicts.of_page)
    program = (*PYTHON, str(ROOT / "scripts" / "gpu" / "every_operation.py"), *on_device)
    repeats = ("--repeats", "100000" if device != "host" else "20")
    benchmarks = [_benchmark(name, device) for name in BENCHMARKS]
    first = [part for part in benchmarks if part.group in ("transfer", "host times")]
    selected = [
        Part("split_decode", "split_decode",
             (*PYTHON, "-m", "gpu.split_decode", *on_device, *repeats), verdicts.of_status),
        Part("verify", "verify",
             (*PYTHON, "-m", "kvcupy", "verify", *on_device, "--json", "{result}"),
             verdicts.of_result),
        *([_pytest("failed-before", "gpu", device, *before)] if before else []),
        *_gpu_tests(device, before),
        Part("calibrate", "transfer", (*PYTHON, "-m", "kvcupy", "calibrate", *on_device),
             verdicts.of_status),
        *first,
        Part("operations", "operations", program, verdicts.of_status),
        *(_sanitizer(name, program, device, sanitizer) for name in SANITIZERS),
        *_suite(device),
        *(part for part in benchmarks if part not in first),
    ]  # fmt: skip
    if no_device:
        selected = [replace(part, missing=f"{device} cannot be used") for part in selected]
    return [doctor, *selected]


def _pytest(name: str, group: str, device: str, *arguments: str) -> Part:
    command = (
        sys.executable, "-m", "pytest", "-v", "-rfEs", "--tb=short", "--color=no",
        "--continue-on-collection-errors", "-p", "no:cacheprovider",
        "-o", "faulthandler_timeout=300", "--device", device, *arguments,
    )  # fmt: skip
    # A kernel that is loaded while a stream waits must not queue up after it.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    judge = verdicts.of_tests(may_skip_all=device == "host")
    return Part(name, group, command, judge, variables=variables)


def _gpu_tests(device: str, before: Sequence[str]) -> list[Part]:
    """Return the tests of GPUs file by file, so that a crash or a hang leaves out little; files
    with tests that failed before come first."""
    tests = ROOT / "tests"
    marked = [path for path in tests.rglob("test_*.py")
              if path.stem != "test_gpu_report" and "mark.gpu" in path.read_text()]  # fmt: skip
    failed = {ROOT / test.partition("::")[0] for test in before}
    ordered = sorted(marked, key=lambda path: (path not in failed, path))
    return [
        replace(_pytest(f"gpu-{_name(path)}", "gpu", device, "-m", "gpu", str(path)), limit_s=300)
        for path in ordered
    ]


def _suite(device: str) -> list[Part]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [_pytest(f"suite-{_name(path)}", "suite", device, str(path)) for path in files]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT / "tests").with_suffix("").parts
    return "-".join((*parts[:-1], parts[-1].removeprefix("test_")))


def _sanitizer(name: str, program: Sequence[str], device: str, path: str | None) -> Part:
    command = (
        path or "compute-sanitizer", "--tool", name, *SANITIZERS[name], "--error-exitcode", "86",
        "--target-processes", "application-only", "--launch-timeout", "120", *program,
    )  # fmt: skip
    missing = "" if path else (
        "compute-sanitizer is not installed (the CUDA toolkit has it, and for CUDA 13 the wheel "
        "nvidia-cuda-sanitizer-api)"
    )  # fmt: skip
    judge = verdicts.of_sanitizer(may_go_unused=device == "host")
    return Part(name, "sanitizer", command, judge, missing)


def _benchmark(name: str, device: str) -> Part:
    script, *arguments = BENCHMARKS[name]
    command = (*PYTHON, str(ROOT / "scripts" / script), *arguments, "--device", device,
               "--json", "{result}")  # fmt: skip
    group = "transfer" if name.endswith("mb") else "bench"
    group = "host times" if name in _HOST_TIMES else group
    needs_models = name == "generate" and find_spec("transformers") is None
    missing = "transformers is missing: pip install transformers" if needs_models else ""
    return Part(name, group, command, verdicts.of_result, missing)
