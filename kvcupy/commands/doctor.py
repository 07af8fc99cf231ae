"""`python -m kvcupy doctor`: one page on what this machine has, what works, and what is missing.

A part that is broken costs its own lines of the page only: versions come from package metadata,
sections import what they need, and each device is tried in a separate process, for a driver may
crash or hang.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__, extras
from ..errors import CompileError, DeviceError

_PACKAGE = Path(__file__).resolve().parents[1]
_DEVICES = ("host", "cuda")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_PROBE_TIMEOUT_S = 300
_MARK = "kvcupy-probe "


@dataclass(frozen=True)
class Row:
    """One line of the page; `remedy` is the command that installs what it says is missing."""

    label: str
    text: str
    remedy: str | None = None


def main() -> int:
    """Print the page; return 0 if at least one device works, else 1."""
    text, works = page()
    print(text)
    return 0 if works else 1


def page() -> tuple[str, bool]:
    """Return the page, and whether at least one device works."""
    with ThreadPoolExecutor(len(_DEVICES) + 1) as pool:
        loaded = pool.submit(libraries_apart)
        probes = dict(zip(_DEVICES, pool.map(probe_apart, _DEVICES), strict=True))
    sections = {
        "Versions": _guarded(versions),
        "GPU": _guarded(lambda: gpu(probes["cuda"])),
        "CUDA libraries that are loaded": _guarded(loaded.result),
        "Host compiler": _guarded(compiler),
        "CUDA headers": _guarded(headers),
        "Cache of compiled kernels": _guarded(cache),
        "What works": [Row(name, probe.verdict()) for name, probe in probes.items()],
    }
    lines: list[str] = []
    for title, rows in sections.items():
        lines += [title, *(f"  {row.label:<12}{row.text}".rstrip() for row in rows), ""]
    remedies = {row.remedy: row for rows in sections.values() for row in rows if row.remedy}
    if remedies:
        lines.append("How to get what is missing")
        lines += [f"  {row.label:<12}{remedy}" for remedy, row in remedies.items()]
    return "\n".join(lines).rstrip(), any(probe.works for probe in probes.values())


def _guarded(section: Callable[[], list[Row]]) -> list[Row]:
    try:
        return section()
    except Exception as error:
        return [Row("broken", f"{type(error).__name__}: {error}".splitlines()[0])]


def versions() -> list[Row]:
    """Return the versions of kvcupy and its dependencies, and what the missing ones are for."""
    system = f"{platform.system()} {platform.machine()}"
    rows = [
        Row("Python", f"{platform.python_version()} on {system}, {sys.executable}"),
        Row("kvcupy", f"{__version__} from {_PACKAGE}"),
        *_guarded(_kernels),
    ]
    driver = _driver_cuda()
    for label, distributions, command, purpose in (
        ("numpy", ("numpy",), "pip install numpy", ""),
        ("ml_dtypes", ("ml_dtypes",), "pip install ml_dtypes", ""),
        ("CuPy", _CUPY, extras.install(_cuda_extra()), "runs kernels on GPUs"),
        ("torch", ("torch",), _install_torch(driver), "optional: its tensors are arrays"),
        ("matplotlib", ("matplotlib",), extras.install("plot"), "optional: draws timelines"),
    ):
        installed = next(((d, v) for d in distributions if (v := _version(d))), None)
        if installed is None:
            text = f"not installed ({purpose})" if purpose else "not installed"
            rows.append(Row(label, text, _pip(command)))
            continue
        distribution, version = installed
        text = version if distribution == label else f"{version} ({distribution})"
        misfit = _torch_misfit(driver) if label == "torch" else None
        if misfit is None:
            rows.append(Row(label, text))
        else:
            rows.append(Row(label, f"{text}, {misfit[0]}", _pip(misfit[1])))
    return rows


def _install_torch(driver: int) -> str:
    """Return the command that installs torch for a driver; 0: for none."""
    if driver == 12:  # the wheels on PyPI need a driver for CUDA 13
        return "pip install torch --index-url https://download.pytorch.org/whl/cu126"
    return extras.install("torch")


def _torch_misfit(driver: int) -> tuple[str, str] | None:
    """Return why the installed torch cannot use the driver's GPUs, and the remedy."""
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if driver < 12 or file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", text, re.MULTILINE)
    if cuda is None or int(cuda[1]) <= driver:
        return None
    command = f"pip uninstall -y torch && {_install_torch(driver)}"
    return f"built for CUDA {cuda[1]}, which the driver does not support", command


def _kernels() -> list[Row]:
    from .. import sources

    return [Row("kernels", f"{sources.kernels_dir()}, digest {sources.digest()[:12]}")]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except Exception:  # not installed, or its metadata is damaged
        return None


def _install(extra: str) -> str:
    """Return the command that installs an extra's requirements into this environment."""
    return _pip(extras.install(extra))


def _pip(command: str) -> str:
    """Return `pip` commands for this environment."""
    on_path = shutil.which("python")
    is_this = on_path is not None and Path(on_path) == Path(sys.executable)
    python = "python" if is_this else shlex.quote(sys.executable)
    return re.sub(r"\bpip (?=install|uninstall)", lambda _: f"{python} -m pip ", command)


def _nvidia_smi(*arguments: str) -> str | None:
    """Return what `nvidia-smi` prints; None if it is missing or fails."""
    try:
        completed = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout


def _driver_cuda() -> int:
    """Return the CUDA version of the driver, 0 without a driver."""
    version = re.search(r"CUDA[^\d\n]*Version\s*:\s*(\d+)\.", _nvidia_smi() or "")
    return int(version[1]) if version else 0


def _cuda_extra() -> str:
    """Return the extra of the CuPy that is installed, else the one for the driver."""
    for distribution, extra in zip(_CUPY, ("cuda12", "cuda13"), strict=False):
        if _version(distribution):
            return extra
    return "cuda13" if _driver_cuda() >= 13 else "cuda12"


def gpu(probe: Probe) -> list[Row]:
    """Return the GPUs that the driver lists, and why they cannot be used, if so."""
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    listed = _nvidia_smi(query, "--format=csv,noheader")
    rows = []
    for number, line in enumerate((listed or "").strip().splitlines()):
        name, capability, memory, driver = (part.strip() for part in line.split(","))
        text = f"{name}, sm_{capability.replace('.', '')}, {memory}, driver {driver}"
        rows.append(Row(f"cuda:{number}", text))
    if not rows:
        rows.append(Row("none", "nvidia-smi, which comes with NVIDIA's driver, lists no GPU"))
    if not probe.works:
        rows.append(Row("unusable", probe.cause()))
    return rows


def libraries() -> list[Row]:
    """Load NVIDIA's libraries as kvcupy and CuPy do, and return which files they are."""
    from .. import cuda_api
    from ..cuda_api import CudaApi

    driver = cuda_api.driver_version()
    path = cuda_api.loaded_library("cuda")
    version = f"CUDA {cuda_api.cuda_version(driver)}, {path}" if driver else "none"
    rows = [Row("driver", version)]
    try:
        api = CudaApi()
    except DeviceError as error:
        return [*rows, Row("CuPy", str(error).removeprefix("cuda: "))]
    cupy = api.runtime.runtimeGetVersion()
    rows.append(Row("CuPy", f"{api.cupy.__version__}, for CUDA {cuda_api.cuda_version(cupy)}"))
    rows += _guarded(_nvrtc)
    return rows


def _nvrtc() -> list[Row]:
    from .. import cuda_api
    from ..devices import nvrtc

    try:
        major, _ = nvrtc.nvrtc_version()
    except CompileError as error:
        return [Row("NVRTC", str(error), _install(cuda_api.cuda_extra()))]
    version = nvrtc.compiler().partition(",")[0].removeprefix("NVRTC ")
    return [Row("NVRTC", f"{version}, {cuda_api.loaded_library('nvrtc', major)}")]


def libraries_apart() -> list[Row]:
    """Run `libraries` in a separate process, which a broken library may take down."""
    answer, failure = _apart("libraries")
    return [Row(**row) for row in answer] if failure is None else [Row("broken", failure)]


def compiler() -> list[Row]:
    """Return the C++ compiler that the host device would use."""
    cxx = import_module("kvcupy.devices.cxx")
    used, complaint = cxx.find_compiler(), cxx.complaint_about_cxx()
    ignored = [Row("ignored", complaint)] if complaint else []
    if used is None:
        text = "none of $CXX, c++, g++, clang++, zig: the host device falls back to NumPy"
        return [*ignored, Row("none", text, _install("host"))]
    return [*ignored, Row("found", f"{' '.join(used.command)}, {used.version}")]


def headers() -> list[Row]:
    """Return where CUDA's headers are searched, and what is there."""
    from .. import sources

    used = sources.cuda_include_dirs()
    rows = []
    for place in sources.header_places():
        state = "none"
        if place.major is not None:
            state = f"CUDA {place.major}" + (", used by default" if place.path in used else "")
        rows.append(Row(place.origin, f"{place.path}: {state}"))
    if not used:
        text = "needed to compile for GPUs; the host device needs none"
        rows.append(Row("missing", text, _install(_cuda_extra())))
    return rows


def cache() -> list[Row]:
    """Return the folder of compiled kernels, what it holds, and whether more can be added."""
    module = import_module("kvcupy.devices.cache")
    folder: Path = module.directory()
    sizes = [f.stat().st_size for f in folder.glob("*") if f.is_file()]
    state, remedy = "writable", None
    if complaint := module.complaint():
        state, remedy = f"not used ({complaint})", "export KVCUPY_CACHE_DIR=/a/folder"
    text = f"{folder}: {sum(sizes) / 1e6:.1f} MB in {len(sizes)} files, {state}"
    return [Row("folder", text, remedy), *_calibrations()]


def _calibrations() -> list[Row]:
    """Return which devices have been calibrated for transfers, and when."""
    stored = import_module("kvcupy.commands.calibrate").stored()
    if not stored:
        return [Row("calibration", "none: transfers go by defaults (python -m kvcupy calibrate)")]
    return [Row("calibration", f"{own.get('device')}, {own.get('date')}") for own in stored]


# --- Trying a device ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """The outcome of trying a device: `state` is "kernel", "fallback", "absent" or "failed"."""

    state: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        return self.state in ("kernel", "fallback")

    def cause(self) -> str:
        """Return the first line of what went wrong."""
        return next(iter(self.detail.strip().splitlines()), "no reason given")

    def verdict(self) -> str:
        """Return one line on what the outcome means."""
        if self.state == "kernel":
            return f"yes: rows stored by its kernel are right ({self.seconds:.1f} s)"
        if self.state == "fallback":
            return f"in NumPy only, slowly: {self.cause()}"
        return f"no: {self.cause()}"


def probe(name: str) -> Probe:
    """Store two rows on the device `name` and read them back, in this process."""
    start = time.perf_counter()
    if name == "cuda":
        from ..devices import cuda

        reason = cuda.why_not()
        if reason:
            return Probe("absent", reason.removeprefix("cuda: "))
    import kvcupy as kv

    kv.config.fallback = "error"
    try:
        _store(name)
        return Probe("kernel", seconds=time.perf_counter() - start)
    except kv.CompileError as error:
        cause = str(error)
    if name != "host":
        return Probe("failed", cause, time.perf_counter() - start)
    kv.config.fallback = "warn"
    _store(name)
    return Probe("fallback", cause, time.perf_counter() - start)


def _store(name: str) -> None:
    """Store two rows on a device; AssertionError unless they are there, and nothing else is."""
    import numpy as np

    import kvcupy as kv

    device = kv.device(name)
    rows, slots = np.arange(1, 33, dtype=np.float16).reshape(2, 2, 8), np.array([3, 1])
    expected = np.zeros((4, 2, 8), np.float16)
    expected[slots] = rows
    k_cache, v_cache = device.zeros((4, 2, 8), "fp16"), device.zeros((4, 2, 8), "fp16")
    kv.store_kv(
        device.asarray(rows), device.asarray(-rows), k_cache, v_cache, device.asarray(slots)
    )
    device.synchronize()
    for cache, contents in ((k_cache, expected), (v_cache, -expected)):
        if not np.array_equal(device.to_numpy(cache), contents):
            raise AssertionError("the cache differs from the rows stored in it")


def environment() -> dict[str, str]:
    """Return the environment of a subprocess that imports this package."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), home) if p)
    return {**os.environ, "PYTHONPATH": path}


def probe_apart(name: str) -> Probe:
    """Run `probe` in a separate process and return its outcome, even if that crashes or hangs."""
    answer, failure = _apart(name)
    return Probe(**answer) if failure is None else Probe("failed", failure)


def _apart(name: str) -> tuple[Any, str | None]:
    """Return what another process answers for a device or "libraries", or how it failed."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "kvcupy.commands.doctor", name], env=environment(),
            capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_PROBE_TIMEOUT_S} s"
    except OSError as error:
        return None, f"{sys.executable} could not be started: {error}"
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK)), None
    if process.returncode < 0:
        return None, f"its process died of signal {-process.returncode}"
    return None, (process.stderr.strip().splitlines() or ["no output"])[-1]


def _answer(name: str) -> None:
    """Print what `_apart` reads, as one line."""
    answer: Any
    if name == "libraries":
        answer = [asdict(row) for row in _guarded(libraries)]
    else:
        try:
            answer = asdict(probe(name))
        except Exception as error:
            answer = asdict(Probe("failed", f"{type(error).__name__}: {error}"))
    print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _answer(sys.argv[1])  # for `_apart`
