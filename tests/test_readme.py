"""What the README shows runs and fits on a screen, what it and other pages name exists, and each
figure comes with the file that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import Case
from stream_cases import Gate, run_ahead

import kvcupy as kv

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()


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


def test_readme_is_one_screen():
    assert len(README.splitlines()) <= 80


def test_named_functions_exist():
    rows = re.findall(r"^\| `(\w+)\(", OPERATIONS, re.MULTILINE)
    named = {*re.findall(r"\bkv\.(\w+)", README + OPERATIONS), *rows}
    missing = sorted(name for name in named if not hasattr(kv, name))
    assert rows and not missing


@pytest.mark.parametrize("name", ["README.md", "docs/measurements.md", "docs/how_it_is_tested.md"])
def test_figures_come_with_their_file(name):
    """Sections with a share, a ratio, a time or a count of thousands link a file of results."""
    for section in re.split(r"^## ", (ROOT / name).read_text(), flags=re.MULTILINE):
        prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
        figures = re.findall(
            r"\d+ %|\d+(?:\.\d+)?x |\d+ (?:ms|us|MB|MiB|times)\b|\d,\d{3}\b", prose
        )
        linked = re.findall(r"\]\(\S*(scripts/results/\w+\.json)\)", prose)
        assert linked or not figures, section.partition("\n")[0]
        assert [path for path in linked if not (ROOT / path).exists()] == []


def test_every_result_is_shown():
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    results = (path.name for path in (ROOT / "scripts/results").iterdir())
    assert [name for name in results if name not in pages] == []


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/finding_a_race.md",
        "docs/measurements.md",
        "docs/how_it_is_tested.md",
    ],
)
def test_named_files_exist(name):
    text = (ROOT / name).read_text()
    paths = re.findall(r"(?:scripts|kernels_src|kvcupy|tests)/[\w/.]+\.\w+", text)
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert paths and not missing


@pytest.mark.parametrize("name", ["test_rows_are_stored", "test_main_waits"])
def test_the_examples_of_the_words_of_tests_run(device, name):
    text = (ROOT / "tests/support/README.md").read_text()
    code = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ") or not line)
    x, y, ones = (device.asarray(np.full(4, value, np.float32)) for value in (0, 0, 1))
    names = {"Case": Case, "Gate": Gate, "run_ahead": run_ahead, "x": x, "y": y, "ones": ones}
    exec(compile(code, "README.md", "exec"), names)
    names[name](device)
    assert name != "test_main_waits" or (device.to_numpy(y) == 1).all()
