"""What a C++ compiler includes is the package's own, wherever the process happens to be."""

from __future__ import annotations

import pytest

from kvcupy import sources
from kvcupy.devices import cache, cxx
from kvcupy.errors import CompileError
from kvcupy.ops.store import COPY

pytestmark = pytest.mark.skipif(cxx.find_compiler() is None, reason="there is no C++ compiler")


def test_the_working_directory_supplies_no_source(tmp_path, monkeypatch):
    folder = sources.kernels_dir()
    for file in folder.rglob("*.*"):
        hostile = tmp_path / file.relative_to(folder)
        hostile.parent.mkdir(exist_ok=True)
        hostile.write_text("#error from the working directory\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    cxx.check('#include "host/runner.h"\n#include "pages.cu"\n')
    assert cxx.build(COPY.specialise(16)).is_file()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The commands that compile, with an empty cache."""
    if "clang" in cxx.find_compiler().version or cxx.find_compiler().is_zig:
        pytest.skip("only GCC finds precompiled headers by itself")
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    commands, really = [], cxx._run
    monkeypatch.setattr(cxx, "_run", lambda *a: (commands.append(a[0]), really(*a)))
    return commands


def test_headers_are_parsed_once_for_all_kernels(programs):
    for word in (16, 8, 4):
        assert cxx.build(COPY.specialise(word)).is_file()
    assert sum("c++-header" in command for command in programs) == 1


def test_headers_that_gcc_cannot_use_are_read_instead(programs):
    """Such as headers of another compiler with the same version text."""
    cxx.build(COPY.specialise(16))
    (entry,) = cache.directory().glob("headers-*/host/*.gch")
    key, suffix = entry.parents[1].name, f"/host/{entry.name}"
    assert cache.store(key, b"gpch.013 of another make", suffix) == entry
    assert cxx.build(COPY.specialise(8)).is_file()


def test_a_kernel_whose_headers_do_not_compile_says_so(kernel_sources, programs):
    kernel_sources.replace("host/runner.h", "#pragma once", "#error on purpose")
    with pytest.raises(CompileError, match="on purpose"):
        cxx.build(COPY.specialise(16))
