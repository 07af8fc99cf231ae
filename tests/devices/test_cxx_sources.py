"""What a C++ compiler includes is the package's own, wherever the process happens to be."""

from __future__ import annotations

import pytest

from kvcupy import sources
from kvcupy.devices import cxx


def test_the_working_directory_supplies_no_source(tmp_path, monkeypatch):
    if cxx.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    folder = sources.kernels_dir()
    for file in folder.rglob("*.*"):
        hostile = tmp_path / file.relative_to(folder)
        hostile.parent.mkdir(exist_ok=True)
        hostile.write_text("#error from the working directory\n")
    monkeypatch.chdir(tmp_path)
    cxx.check('#include "host/runner.h"\n#include "pages.cu"\n')
