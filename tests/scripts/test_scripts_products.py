"""Scripts that multiply matrices on the device say so where CuPy cannot."""

from __future__ import annotations

import argparse
import importlib

import numpy as np
import pytest

from kvcupy.cuda_api import install_cublas

pytestmark = pytest.mark.usefixtures("scripts_on_path")

DEMOS = ("overlap.steps", "overlap.offload", "serve_demo")


class NoProducts:
    """A device whose arrays are multiplied by a library that is not installed."""

    name = "cuda:0"

    def asarray(self, array):
        class Array(np.ndarray):
            def dot(self, other, out=None):
                raise ImportError("libcublas.so.12: cannot open shared object file")

            __matmul__ = dot

        return array.view(Array)


@pytest.mark.parametrize("script", DEMOS)
def test_cublas_is_asked_for_before_anything_is_measured(script):
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(script).run(NoProducts(), argparse.Namespace())
    text = str(caught.value)
    assert text.startswith("cuda:0: ") and "libcublas.so.12" in text
    assert text.endswith(f"{install_cublas()}, or run it with --device host")
