"""The documentation: its examples run and print what it says, and its links lead somewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import kvcupy as kv

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
# Python, and the output that may follow.
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
# In these each continues the one before: test_readme.py and test_metrics.py run them.
ELSEWHERE = (
    "finding_a_race.md", "running.md", "testing_your_own_kernel.md",
)  # fmt: skip
EXAMPLES = [
    pytest.param(*example.groups(), id=f"{name}-{number}")
    for name, text in PAGES.items() if name not in ELSEWHERE
    for number, example in enumerate(EXAMPLE.finditer(text))
]  # fmt: skip
NEEDED = (
    ("torch", "torch|interop import (?:flashinfer|vllm|sglang)"),
    ("transformers", "transformers"), ("zmq", "zmq"), ("msgspec", "msgspec"),
    ("nixl_cu12", "PageSender"),
)  # fmt: skip


@pytest.fixture
def stores():
    """Remove the store that an example leaves, as it says, before and after it."""
    left = Path("/tmp/kvcupy-documentation")
    shutil.rmtree(left, ignore_errors=True)
    yield
    shutil.rmtree(left, ignore_errors=True)


@pytest.mark.usefixtures("lenient_host", "stores")
@pytest.mark.parametrize("code, output", EXAMPLES)
def test_example(code, output, capsys):
    for library, words in NEEDED:
        if re.search(words, code):
            pytest.importorskip(library)
    exec(compile(code, "example.py", "exec"), {})
    printed = capsys.readouterr().out
    assert printed == (output or "")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    prose = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", prose)
    links += re.findall(r'(?:src|href)="([^"#:]+)', prose)
    assert [link for link in links if not (DOCS / name).parent.joinpath(link).exists()] == []


def test_everything_public_is_in_the_reference():
    named = re.findall(r"^::: kvcupy\.(\w+)$", "\n".join(PAGES.values()), re.MULTILINE)
    assert sorted([*named, "config"]) == sorted(kv.__all__)
    assert "::: kvcupy.config.Config" in PAGES["reference/errors_and_settings.md"]


# Figures ---
