"""`python -m kvcupy`: the doctor's page, whatever is missing or broken, and the other commands."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvcupy import sources
from kvcupy.commands import doctor
from kvcupy.commands.doctor import Probe, Row

ROOT = Path(__file__).resolve().parents[1]
WORKS = Probe("kernel", seconds=0.2)
NO_GPU = Probe("absent", "no NVIDIA driver\nmore")


class Machine:
    """What the doctor is made to find."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.probes = {"host": WORKS, "cuda": NO_GPU}
        self.absent: set[str] = set()
        self.libraries = [Row("NVRTC", "12.9.86, /wheel/libnvrtc.so.12")]

    def smi(self, listed: str, banner: str) -> None:
        """Put an nvidia-smi on the path."""
        file = self.folder / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n[ $# = 0 ] && echo '{banner}' || echo '{listed}'\n")
        file.chmod(0o755)

    def page(self) -> str:
        """Return the page, and note whether anything works."""
        text, self.works = doctor.page()
        return text


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine where everything is installed, and no GPU; a test takes away what it is about."""
    state = Machine(tmp_path)
    monkeypatch.setattr(doctor, "probe_apart", lambda name: state.probes[name])
    monkeypatch.setattr(doctor, "libraries_apart", lambda: state.libraries)
    versions = {"numpy": "2.0", "ml_dtypes": "0.5", "cupy-cuda12x": "14.2.0", "kvcupy": "0.1.0"}
    versions |= {"torch": "2.13.0", "matplotlib": "3.9"}

    def version(name: str) -> str:
        if name in state.absent or name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    return state


def section(page: str, title: str) -> list[str]:
    """Return the lines under a title."""
    lines = page.splitlines()
    start = lines.index(title) + 1
    stop = lines.index("", start) if "" in lines[start:] else len(lines)
    return [line.strip() for line in lines[start:stop]]


def test_page_of_this_machine_tells_the_truth(capsys):
    status = doctor.main()
    page = capsys.readouterr().out
    works = section(page, "What works")
    assert works[0].split()[0] == "host" and works[1].split()[0] == "cuda"
    assert (status == 0) == any(re.search(r"yes:|in NumPy only", line) for line in works)
    assert str(ROOT / "kernels_src") in page and sources.digest()[:12] in page


def test_all_there_needs_no_remedy_but_for_what_is_absent(machine):
    page = machine.page()
    assert machine.works
    assert "host        yes: rows stored by its kernel are right (0.2 s)" in page
    assert "unusable    no NVIDIA driver" in page and "more" not in page
    assert "CuPy        14.2.0 (cupy-cuda12x)" in page
    assert "numpy       2.0\n" in page
    assert "CuPy" not in page.partition("How to get")[2]


@pytest.mark.parametrize(
    ("absent", "label", "extra"),
    [
        ("cupy-cuda12x", "CuPy", "cuda12"),
        ("torch", "torch", "torch"),
        ("matplotlib", "matplotlib", "plot"),
    ],
)
def test_a_missing_package_comes_with_the_command_that_brings_it(machine, absent, label, extra):
    machine.absent.add(absent)
    page = machine.page()
    assert any(
        line.startswith(f"{label} ") and "not installed" in line
        for line in section(page, "Versions")
    )
    remedies = section(page, "How to get what is missing")
    assert any(
        line.startswith(label) and line.endswith(f"-m pip install '{ROOT}[{extra}]'")
        for line in remedies
    )
    assert machine.works


def test_no_compiler(machine, monkeypatch):
    from kvcupy.devices import cxx

    monkeypatch.setattr(cxx, "find_compiler", lambda: None)
    machine.probes["host"] = Probe("fallback", "no C++ compiler was found\nlog")
    page = machine.page()
    assert "in NumPy only, slowly: no C++ compiler was found" in page
    assert "log" not in page
    assert f"pip install '{ROOT}[host]'" in page
    assert machine.works


@pytest.mark.parametrize("place", ["/proc/x", "/sys/x", "/dev/null/kvcupy"])
def test_a_cache_folder_in_which_nothing_can_be_made(machine, monkeypatch, place):
    """Not even by root, who may write to any file."""
    monkeypatch.setenv("KVCUPY_CACHE_DIR", place)
    page = machine.page()
    (line, _) = section(page, "Cache of compiled kernels")
    assert f"{place}: 0.0 MB in 0 files, not used ({Path(place).parent}: " in line
    assert "export KVCUPY_CACHE_DIR=/a/folder" in page


def test_gpu_that_can_be_used(machine):
    machine.smi("NVIDIA H200, 9.0, 143771 MiB, 580.65", "CUDA Version: 13.0")
    machine.probes["cuda"] = WORKS
    machine.absent.add("torch")
    page = machine.page()
    assert "cuda:0      NVIDIA H200, sm_90, 143771 MiB, driver 580.65" in page
    assert "unusable" not in page


@pytest.mark.parametrize(("banner", "extra"), [("12.4", "cuda12"), ("13.1", "cuda13")])
def test_gpu_without_cupy_names_the_one_that_the_driver_takes(machine, banner, extra):
    machine.smi("NVIDIA L4, 8.9, 23034 MiB, 550.54", f"CUDA Version: {banner}")
    machine.absent.add("cupy-cuda12x")
    machine.probes["cuda"] = Probe("absent", "CuPy is not installed")
    page = machine.page()
    assert "unusable    CuPy is not installed" in page
    assert f"pip install '{ROOT}[{extra}]'" in page


def test_nothing_works(machine, monkeypatch, capsys):
    machine.probes.update(host=Probe("failed", ""), cuda=Probe("failed", "CUDA error 999"))
    assert doctor.main() == 1
    page = capsys.readouterr().out
    assert "no: no reason given" in page and "no: CUDA error 999" in page


BREAKABLE = ("versions", "gpu", "compiler", "headers", "cache")


@pytest.mark.parametrize("name", BREAKABLE)
def test_a_broken_section_costs_its_own_lines(machine, monkeypatch, name):
    def broken(*args: object) -> None:
        raise RuntimeError("everything\nis wrong")

    monkeypatch.setattr(doctor, name, broken)
    page = machine.page()
    assert page.count("broken      RuntimeError: everything\n") == 1
    assert "is wrong" not in page
    assert "host        yes" in page


# Probes ------------------------------------------------------------------------------------------


def pretend(monkeypatch, tmp_path, script: str) -> Probe:
    """Probe with an interpreter that is only this shell script."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    return doctor.probe_apart("cuda")


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("kill -SEGV $$", "its process died of signal 11"),
        ("echo 'ImportError: broken' >&2; exit 1", "ImportError: broken"),
        ("exit 0", "no output"),
        ("printf '\\377\\n'; exit 1", "no output"),
    ],
)
def test_a_device_that_takes_its_process_down_is_reported(monkeypatch, tmp_path, script, detail):
    assert pretend(monkeypatch, tmp_path, script) == Probe("failed", detail)


def test_a_wrong_store_fails_the_probe(monkeypatch):
    import kvcupy as kv

    monkeypatch.setattr(kv, "store_kv", lambda *args, **options: None)
    monkeypatch.setattr(kv.config, "fallback", "warn")
    with pytest.raises(AssertionError, match="differs"):
        doctor.probe("host")
