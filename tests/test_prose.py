"""The check of prose: it finds the phrases that it knows, in prose alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[1] / "scripts" / "check_prose.py"


def check(path, text):
    """Return the exit status of the check on a file, and what it prints behind the path."""
    path.write_text(text)
    done = subprocess.run([sys.executable, CHECK, path], capture_output=True, text=True)
    return done.returncode, done.stdout.replace(str(path), "")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.md", "# A\n\nA pool has a lock of\nits own.\n", ":3: of its own -> "),
        ("a.md", "Whoever reads it waits.\n", ":1: Whoever -> "),
        ("a.py", '"""A pool.\n\nWho has it frees it.\n"""\n', ":3: Who has -> "),
        ("a.py", "x = 1\n# The lock is that\n# of the pool.\n", ":2: that # of -> "),
        ("a.py", "def f():\n    pass  # for who waits\n", ":2: for who -> "),
        ("a.cu", "int x;\n// As they are, in order.\n", ":2: As they are -> "),
        ("a.cuh", "/* The size is\n   that of a page. */\n", ":2: that of -> "),
    ],
)
def test_a_phrase_is_found_with_its_line(tmp_path, name, text, line):
    status, printed = check(tmp_path / name, text)
    assert status == 1 and printed.startswith(line) and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "The pool has its own lock, so that callers do not wait.\n"),
        ("a.md", 'Write `that of`.\n\n```python\nx = "whoever"\n```\n'),
        ("a.md", "The page is used as it is written, and the cache holds many pages.\n"),
        ("a.py", 'whoever = "that of"\n\n\ndef goes():\n    """Return the pages in order."""\n'),
        ("a.cu", 'const char* text = "that of // whoever";  // Load\n'),
    ],
)
def test_other_text_passes(tmp_path, name, text):
    assert check(tmp_path / name, text) == (0, "")
