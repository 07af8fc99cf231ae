"""The examples run, and say what their comments say."""

from __future__ import annotations

import json
import re
import runpy
import sys
import types
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
PRINTED = {
    "store_and_attend": "slots: [35 68]",
    "rope_and_store": "V in fp8: largest error",
    "two_streams": "transfer",
    "load_layer_by_layer": "2.1 MB in 4 layers",
    "captured_step": "{'a': 2, 'b': 3}",
    "prefix_cache": "prompt 2: 48 of 68 tokens were cached",
    "shared_prefix": "process 1: 10 of 10 blocks were there",
    "cached_document": "84 of 137 tokens were not computed again",
    "draft_tree": "tokens: 23",
    "mixed_layers": "b has 640 tokens, to be computed again: 0\nc has 0 tokens",
    "quantised_cache": "int8",
    "find_a_race": ".wait(",
    "torch_tensors": "True\nTrue True",
}

pytestmark = pytest.mark.usefixtures("quick_host")


def test_all_are_listed():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == set(PRINTED)
    linked = re.findall(r"\]\((\w+\.\w+)\)", (FOLDER / "README.md").read_text())
    assert sorted(linked) == sorted(
        p.name for p in FOLDER.iterdir() if p.suffix in (".py", ".ipynb")
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.races if n == "find_a_race" else ()) for n in PRINTED],
)
def test_example(name, capsys, monkeypatch, tmp_path):
    text = (FOLDER / f"{name}.py").read_text()
    if "import torch" in text:
        pytest.importorskip("torch")
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", [name, *([str(page)] if "sys.argv" in text else [])])
    runpy.run_path(str(FOLDER / f"{name}.py"))
    assert PRINTED[name] in capsys.readouterr().out
    assert page.exists() == ("sys.argv" in text)


def test_notebook(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    shown = []
    display = types.ModuleType("IPython.display")
    display.Image, display.display = (lambda path: path), shown.append
    package = types.ModuleType("IPython")
    package.version_info = (9, 0)  # matplotlib asks
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((FOLDER / "overlap.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec(compile(cell["source"], "overlap.ipynb", "exec"), names)
    assert shown == ["overlap.png"] * 2 and Path("overlap.png").stat().st_size > 0
    assert capsys.readouterr().out.count(" us\n") == 2
