"""The parts of a GPU report: commands, expected times, and judges."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from . import verdicts
from .private import ROOT
from .verdicts import METRICS, Judge

PYTHON = (sys.executable, "-X", "faulthandler")
TOOLS = ("compute-sanitizer", "ncu")
SANITIZERS = {
    "memcheck": ("out-of-bounds and misaligned accesses",
                 ("--padding", "64", "--report-api-errors", "no")),
    "racecheck": ("races in shared memory", ()),
    "synccheck": ("barriers and warp operations that some threads miss", ()),
    "initcheck": ("reads of uninitialised global memory", ()),
}  # fmt: skip
DECIDING = ("doctor", "verify", "operations", "gpu")
"""Groups of parts that say whether kvcupy works on a machine."""
# A kernel that is loaded while a stream waits must not queue up behind it.
_TEST_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
QUICK_TESTS = ("ops/test_store.py", "ops/test_rope_store.py", "ops/test_gather.py",
               "ops/test_copy_pages.py", "ops/test_indexing.py", "ops/test_merge.py",
               "cache/test_pool.py")  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One command of the report, with its own log, limit and verdict.

    Attributes
    ----------
    name, group : both are accepted by `--only`
    title : one line on what it does
    command : program and arguments; "{result}" stands for the file of results, "{folder}" for a
        separate folder
    minutes : expected time
    limit_s : seconds after which it is stopped
    judge : turns what the process leaves behind into a verdict
    result : name of the file of results
    missing : why it cannot run here and is skipped
    keep_apart : whether standard output and standard error are separate files
    variables : environment variables for this part alone
    """

    name: str
    group: str
    title: str
    command: tuple[str, ...]
    minutes: float
    limit_s: float
    judge: Judge
    result: str = ""
    missing: str = ""
    keep_apart: bool = False
    variables: dict[str, str] = field(default_factory=dict)


def parts(
    device: str, *, extent: str = "full", no_device: str = "", tools: dict[str, str | None]
) -> list[Part]:
    """Return all parts of a report, in order.

    Parameters
    ----------
    device : the name of the device
    extent : "full"; "quick": all that decides whether kvcupy works, and small benchmarks; "smoke":
        the least that does
    no_device : why the device cannot be used; then only the doctor runs
    tools : path of each of `TOOLS`, None where it is not installed
    """
    doctor = Part(
        "doctor", "doctor", "what is installed, and whether the device works",
        (sys.executable, "-m", "kvcupy", "doctor"), 0.5, 660,
        verdicts.of_doctor(device.partition(":")[0]), keep_apart=True,
    )  # fmt: skip
    verify = Part(
        "verify", "verify", "every kernel family against the reference",
        (*PYTHON, "-m", "kvcupy", "verify", "--device", device, "--json", "{result}"), 1, 600,
        verdicts.of_benchmark, "verify.json", keep_apart=True,
    )  # fmt: skip
    program = (*PYTHON, str(ROOT / "scripts" / "gpu" / "every_operation.py"), "--device", device)
    operations = Part(
        "operations", "operations", "every operation once", program, 1, 600, verdicts.of_status
    )
    selected = [verify, operations]
    if extent != "smoke":
        sanitizers = SANITIZERS if extent == "full" else ("memcheck",)
        selected += [
            _driver_facts(device),
            *_tests(device, extent == "quick"),
            *(_sanitizer(name, program, device, tools["compute-sanitizer"]) for name in sanitizers),
        ]
    if extent == "full":
        selected.append(_ncu(program, device, tools["ncu"]))
    selected += _benchmarks(device, _BENCHMARKS[extent])
    if no_device:
        selected = [replace(part, missing=f"{device} cannot be used") for part in selected]
    return [doctor, *selected]


def _driver_facts(device: str) -> Part:
    command = (sys.executable, "-m", "gpu.driver_facts", "--json", "{result}")
    return Part(
        "driver_facts", "driver_facts", "what the driver does where its documentation is silent",
        command, 1, 600, verdicts.of_benchmark, "driver_facts.json",
        missing="" if device != "host" else "it asks a GPU's driver", keep_apart=True,
    )  # fmt: skip


# Tests ---------------------------------------------------------------------------------------


def _pytest(
    name: str, group: str, title: str, device: str, minutes: float, *arguments: str
) -> Part:
    command = (
        sys.executable, "-m", "pytest", "-v", "-rfEsp" if group == "gpu" else "-rfEs", "--tb=short",
        "--color=no", "--continue-on-collection-errors", "-p", "no:cacheprovider",
        "-o", "faulthandler_timeout=300", "--durations-min", "600", "--device", device, *arguments,
    )  # fmt: skip
    limit_s = 60 * max(15.0, 4 * minutes)
    judge = verdicts.of_tests(may_skip_all=device == "host")
    return Part(name, group, title, command, minutes, limit_s, judge, variables=_TEST_VARIABLES)


def _tests(device: str, quick: bool) -> list[Part]:
    """Return the tests of GPUs file by file, and the suite folder by folder: what a crash or a
    hang leaves out is small."""
    tests = ROOT / "tests"
    selected = []
    for path in sorted(p for p in tests.rglob("test_*.py") if "mark.gpu" in p.read_text()):
        name = f"gpu-{path.stem.removeprefix('test_')}"
        title = f"tests/{path.relative_to(tests)}, what needs a GPU"
        if path.stem == "test_gpu_report":  # names the marker only
            continue
        part = _pytest(name, "gpu", title, device, 0.2, "-m", "gpu", str(path))
        selected.append(replace(part, limit_s=300.0))
    if quick:
        chosen = [str(tests / name) for name in QUICK_TESTS]
        return [*selected, _pytest("suite", "suite", "some tests", device, 2, *chosen)]
    folders = sorted(path for path in tests.iterdir() if any(path.glob("test_*.py")))
    for folder in folders:
        title = f"tests/{folder.name} on the device"
        selected.append(_pytest(f"suite-{folder.name}", "suite", title, device, 10, str(folder)))
    ignored = [f"--ignore={folder}" for folder in folders]
    rest = (*ignored, str(tests), str(ROOT / "kvcupy"))
    return [*selected, _pytest("suite-rest", "suite", "all other tests", device, 15, *rest)]


# NVIDIA's tools ------------------------------------------------------------------------------


def _sanitizer(name: str, program: Sequence[str], device: str, path: str | None) -> Part:
    title, options = SANITIZERS[name]
    command = (
        path or "compute-sanitizer", "--tool", name, *options, "--error-exitcode", "86",
        "--target-processes", "application-only", "--launch-timeout", "120", *program,
    )  # fmt: skip
    missing = "" if path else (
        "compute-sanitizer is not installed (the CUDA toolkit has it, and for CUDA 13 the wheel "
        "nvidia-cuda-sanitizer-api)"
    )  # fmt: skip
    judge = verdicts.of_sanitizer(may_go_unused=device == "host")
    return Part(
        name, "sanitizer", f"compute-sanitizer: {title}", command, 1, 1200, judge, missing=missing
    )


def _ncu(program: Sequence[str], device: str, path: str | None) -> Part:
    from kvcupy.ops import specialisations

    kernels = sorted({s.kernel.name for s in specialisations()})
    command = (
        path or "ncu", "--csv", "--page", "raw", "--metrics", ",".join(METRICS),
        "--kernel-name", f"regex:^({'|'.join(kernels)})$", "--launch-count", "200",
        "--target-processes", "application-only", "--log-file", "{result}",
        *program, *(["--large"] if device != "host" else []),
    )  # fmt: skip
    missing = "" if path else (
        "ncu is not installed (the CUDA toolkit has it, and Nsight Compute)"
    )  # fmt: skip
    return Part("ncu", "ncu", "DRAM throughput, occupancy and registers of each kernel", command,
                3, 1200, verdicts.of_ncu, "ncu.csv", missing)  # fmt: skip


# Benchmarks ----------------------------------------------------------------------------------

_PICTURES = ("--out", "{folder}")  # timelines, which need matplotlib
# Part: minutes, arguments; then the same for a quick run.
_FULL: dict[str, tuple[float, tuple[str, ...]]] = {
    "bench_models": (25, ()),
    "bench_ops": (12, ()),
    "bench_calls": (1, ()),
    "bench_transfer": (10, ()),
    "bench_loading": (1, ()),
    "bench_scale": (1, ()),
    "bench_frames": (0.5, ()),
    "bench_order": (0.5, ()),
    "bench_generate": (1, ("--dtype", "bfloat16")),
    "overlap_demo": (3, _PICTURES),
    "overlap_demo_offload": (8, _PICTURES),
    "serve_demo": (3, _PICTURES),
    "replay_trace": (2, ()),
    "shared_demo": (2, ()),
    "soak": (3, ("--steps", "60000")),
}
_OVERLAP = ("--tokens", "256", "--steps", "4", "--rounds", "5")
_QUICK: dict[str, tuple[float, tuple[str, ...]]] = {
    "bench_models": (1, ("--quick",)),
    "bench_ops": (2, ("--quick", "--sections", "store", "rope", "pages")),
    "bench_transfer": (1, ("--quick",)),
    "overlap_demo": (0.5, _OVERLAP),
    "overlap_demo_offload": (0.5, ("--quick",)),
}
_BENCHMARKS = {"full": _FULL, "quick": _QUICK, "smoke": {"overlap_demo": (0.5, _OVERLAP)}}


def _benchmarks(device: str, chosen: dict[str, tuple[float, tuple[str, ...]]]) -> list[Part]:
    selected = []
    folder = ROOT / "scripts"
    for name, (minutes, arguments) in chosen.items():
        kind, _, benchmark = name.partition("_")
        if name == "bench_models":
            program = (str(folder / "bench.py"), benchmark)
            module = folder / "benchmarks" / "operations" / "__init__.py"
        elif kind == "bench":
            program = (str(folder / "bench.py"), benchmark)
            module = folder / "benchmarks" / f"{benchmark}.py"
        elif name == "overlap_demo_offload":
            program = (str(folder / "overlap_demo.py"), "offload")
            module = folder / "overlap" / "offload.py"
        else:
            module = folder / f"{name}.py"
            program = (str(module),)
        if arguments == _PICTURES and find_spec("matplotlib") is None:
            arguments = ()
        command = (*PYTHON, *program, "--device", device, "--json", "{result}", *arguments)
        missing = ""
        if name == "bench_generate" and find_spec("transformers") is None:
            missing = "transformers is missing: pip install transformers"
        selected.append(
            Part(name, "bench", _about(module), command, minutes, 60 * max(10.0, 4 * minutes),
                 verdicts.of_benchmark, f"{name}.json", missing, keep_apart=True)
        )  # fmt: skip
    return selected


def _about(module: Path) -> str:
    """Return the first sentence of a module's docstring."""
    first = module.read_text().split('"""')[1].strip().splitlines()[0]
    return first.rstrip(".:")
