"""Scripts that multiply matrices on the device say so where CuPy cannot."""

from __future__ import annotations

import argparse
import ast
import importlib
from pathlib import Path

import numpy as np
import pytest

from kvcupy.cuda_api import install_cublas

pytestmark = pytest.mark.usefixtures("scripts_on_path")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MULTIPLY = {"overlap.products", "serving.llama", "common.measure"}
NUMPY_ALONE = {"quantisation_study"}  # on no device
ON_THE_HOST = {"quantisation_study"}  # whose arrays are NumPy's
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


def multiplies(tree):
    return any(
        (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Attribute) and node.attr in ("dot", "matmul", "einsum"))
        for node in ast.walk(tree)
    )


def test_no_other_script_multiplies():
    """What multiplies is reached from the demos above alone."""
    trees = {
        ".".join(path.relative_to(SCRIPTS).with_suffix("").parts): ast.parse(path.read_text())
        for path in SCRIPTS.rglob("*.py")
    }
    found = {name for name, tree in trees.items() if multiplies(tree)}
    assert found - NUMPY_ALONE == MULTIPLY
    for name, tree in trees.items():
        imports = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        if imports & (MULTIPLY - {"common.measure"}) and "main" in {
            n.name for n in tree.body if isinstance(n, ast.FunctionDef)
        }:
            source = (SCRIPTS / f"{name}.py").read_text()
            assert name in ON_THE_HOST or "require_products(device)" in source, name
