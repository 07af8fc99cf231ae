"""Compiling with NVRTC, which needs no GPU, and finding again what was compiled."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

from kvcupy.commands.precompile import ARCHS
from kvcupy.devices import cache, nvrtc
from kvcupy.errors import CompileError
from kvcupy.kernels import Kernel

PARAMS = np.dtype(
    [("in", np.uint64), ("out", np.uint64), ("count", np.int32), ("factor", np.float32)], align=True
)
SCALE = Kernel("scale.cu", "scale", PARAMS, "ScaleParams").specialise(128)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the test kernels, and an empty cache."""
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    return Path(shutil.copytree(Path(__file__).parent.parent / "kernels", tmp_path / "kernels"))


def compile_in(folder, specialisation=SCALE, arch="sm_90", **options):
    digest = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(folder.iterdir()))).hexdigest()
    return nvrtc.compile_cubin(specialisation, arch, kernels_dir=folder, digest=digest, **options)


@pytest.fixture
def compilations(monkeypatch):
    """Count what NVRTC is really asked for."""
    compiled = []
    really = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *a: compiled.append(a[1]) or really(*a))
    return compiled


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles(kernels, arch):
    compiled = compile_in(kernels, arch=arch)
    assert compiled.target == arch
    assert compiled.image.startswith(b"\x7fELF")
    assert compiled.lowered_name.encode() in compiled.image
    assert compiled.lowered_name != SCALE.expression


def test_the_second_time_it_is_found(kernels, compilations):
    first = compile_in(kernels)
    second = compile_in(kernels)
    assert (second.image, second.lowered_name, second.target) == (
        first.image, first.lowered_name, first.target,
    )  # fmt: skip
    assert compilations == ["sm_90"]


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_80"},
        {"options": ("-DX=1",)},
        {"specialisation": SCALE.kernel.specialise(64)},
        {"include_dirs": ()},
    ],
)
def test_whatever_changes_the_result_changes_the_key(kernels, compilations, change):
    compile_in(kernels)
    compile_in(kernels, **change)
    assert len(compilations) == 2


def test_a_changed_header_is_compiled_again(kernels):
    first = compile_in(kernels)
    header = kernels / "factor.cuh"
    header.write_text(header.read_text().replace("1.0f", "3.0f"))
    assert compile_in(kernels).image != first.image


@pytest.mark.parametrize("name", ["scale.cu", "factor.cuh"])
def test_the_working_directory_supplies_no_source(kernels, tmp_path, monkeypatch, name):
    """Whatever lies where a user happens to be is neither compiled nor cached."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / name).write_text("#error from the working directory\n")
    before = compile_in(kernels).image
    shutil.rmtree(cache.directory())
    monkeypatch.chdir(elsewhere)
    assert compile_in(kernels).image == before


def test_a_damaged_entry_is_compiled_again(kernels, compilations):
    first = compile_in(kernels)
    (entry,) = cache.directory().glob("cubin-*")
    entry.write_bytes(entry.read_bytes()[:-100])
    assert compile_in(kernels).image == first.image
    assert len(compilations) == 2
    compile_in(kernels)
    assert len(compilations) == 2


def test_another_folder_without_a_digest_is_not_cached(kernels, compilations):
    for _ in range(2):
        nvrtc.compile_cubin(SCALE, "sm_90", kernels_dir=kernels)
    assert len(compilations) == 2


def test_verbose_always_has_a_log_and_leaves_the_same_entry(kernels, compilations):
    for _ in range(2):
        assert "registers" in compile_in(kernels, verbose=True).log
    assert compile_in(kernels).log == ""
    assert len(compilations) == 2


def test_an_error_holds_the_log_the_expression_and_the_architecture(kernels):
    broken = Kernel("faulty.cu", "broken", PARAMS, "FaultyParams").specialise(128)
    with pytest.raises(CompileError) as caught:
        compile_in(kernels, broken)
    message = str(caught.value)
    assert "faulty.cu:broken<128>" in message
    assert "sm_90" in message
    assert "NoSuchType" in caught.value.log
    assert caught.value.log in message


@pytest.mark.parametrize(
    ("specialisation", "word"),
    [
        (Kernel("missing.cu", "scale", PARAMS, "ScaleParams").specialise(1), "missing.cu"),
        (Kernel("scale.cu", "no_such_kernel", PARAMS, "ScaleParams").specialise(1), "no_such"),
    ],
)
def test_a_missing_file_and_a_missing_kernel_are_compile_errors(kernels, specialisation, word):
    with pytest.raises(CompileError, match=word):
        compile_in(kernels, specialisation)


def test_missing_headers_are_named_with_the_remedy(kernels):
    (kernels / "scale.cu").write_text("#include <cuda_fp16.h>\n")
    with pytest.raises(CompileError, match="pip install nvidia-cuda-runtime"):
        compile_in(kernels, include_dirs=())


def test_an_architecture_of_the_future_gets_ptx_that_keeps_subnormals(kernels):
    compiled = compile_in(kernels, arch="sm_990")
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


def test_an_architecture_too_old_for_nvrtc_is_a_compile_error():
    with pytest.raises(CompileError, match="sm_75 and newer"):
        nvrtc.target_for("sm_70", (75, 80))


def test_a_name_that_is_no_architecture_is_refused():
    with pytest.raises(ValueError, match="arch: expected sm_NN, got 'gfx90a'"):
        nvrtc.target_for("gfx90a", (80,))
