"""What the README shows runs, and what it and CONTRIBUTING.md name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvcupy as kv

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_run(code, request):
    for library in re.findall(r"^(?:from|import) (torch|transformers)", code, re.MULTILINE):
        pytest.importorskip(library)
        request.getfixturevalue("plain_inductor")
    exec(compile(code, "README.md", "exec"), {})


def test_the_race_is_found(capsys, tmp_path):
    """As the guide says, but for the numbers of streams and lines."""
    text = (ROOT / "docs/finding_a_race.md").read_text()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "race.py", "exec"), names)
    (shown,) = re.findall(r"```\n(RAW.*?)```", text, re.DOTALL)
    printed = re.sub(r"(stream) \d+|(race.py):\d+", r"\1\2", capsys.readouterr().out)
    assert printed.strip() == re.sub(r"(stream) \d+|(race.py):\d+", r"\1\2", shown).strip()


def test_the_guide_to_testing_prints_what_it_shows(capsys):
    pytest.importorskip("torch")
    text = (ROOT / "docs/testing_your_own_kernel.md").read_text()
    names, shown = {}, ""
    for block in text.split("```")[1::2]:
        language, _, content = block.partition("\n")
        if language == "python":
            exec(compile(content, "guide.py", "exec"), names)
        shown += content if not language else ""
    assert capsys.readouterr().out == shown != ""
    assert set(re.findall(r'^\| `"(.*)"`', text, re.MULTILINE)) == set(names["testing"].FEATURES)


def test_named_functions_exist():
    named = set(re.findall(r"\bkv\.(\w+)", README)) | set(re.findall(r"^\| `(\w+)\(", README, re.M))
    missing = sorted(name for name in named if not hasattr(kv, name))
    assert named and not missing


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/finding_a_race.md",
        "docs/running.md",
    ],
)
def test_named_files_exist(name):
    text = (ROOT / name).read_text()
    paths = re.findall(r"(?:scripts|kernels_src|kvcupy|tests)/[\w/.]+\.\w+", text)
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert paths and not missing
