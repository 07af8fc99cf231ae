"""The documentation: its examples run and print what it says, and its links lead somewhere."""

from __future__ import annotations

import json
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


def table_rows(text, header):
    """The cells of the tables of a page that begin with a header, without code marks."""
    tables = re.findall(rf"^\| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert tables, header
    rows = "".join(tables).replace("`", "").splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def scheme_of(label):
    """The study's name of what a row of the page is about."""
    words = {
        ", scale per token and head": "", ", rotated": ", hadamard",
        ", four over six": ", 4 over 6", ", values alone": " values", ", keys alone": " keys",
        " and the first ": ", sinks ", ", the last ": ", recent ",
    }  # fmt: skip
    for word, name in words.items():
        label = label.replace(word, name)
    return label


def test_figures_of_the_quantisation_study():
    """Each row of the page has the figures of the JSON, and each divergence in its text too."""
    text = PAGES["quantised_caches.md"].partition("## What it costs in quality")[2]
    study = json.loads((ROOT / "scripts/results/quantisation_study.json").read_text())
    model = {row["scheme"]: row for row in study["model"]["results"]}
    for label, *cells in table_rows(text, "past, and tokens in 16 bits"):
        row = model[scheme_of(label)]
        assert cells == [
            f"{row['bits']:g}", f"{row['loss_change']:+.3f} ± {row['standard_error']:.3f}",
            f"{row['divergence']:.4f}", f"{100 * row['same_token']:.1f} %",
        ], label  # fmt: skip
    drawn = {(row["rows"], row["scheme"]): row["output_error"] for row in study["rows"]}
    for label, *cells in table_rows(text, "past | plain"):
        errors = [drawn[kind, scheme_of(label)] for kind in ("plain", "llama", "qwen")]
        assert cells == [f"{100 * error:.1f} %" for error in errors], label
    divergences = {f"{row['divergence']:.4f}" for row in model.values()}
    assert set(re.findall(r"0\.\d{4}", text)) <= divergences


def test_figures_of_the_demo_of_vllm():
    report = json.loads((ROOT / "scripts/results/vllm_demo_host.json").read_text())
    rows = table_rows(PAGES["engines.md"], "time to first token")
    for (_, *cells), row in zip(rows, report["rows"], strict=True):
        share = row["cached_tokens"] / row["prompt_tokens"]
        assert cells == [
            f"{row['first_question_ms']:.0f} ms", f"{row['second_question_ms']:.0f} ms",
            f"{100 * share:.0f} %",
        ], row["case"]  # fmt: skip


def test_figures_of_mixed_layers():
    page, results = PAGES["mixed_layers.md"], ROOT / "scripts/results"
    memory = json.loads((results / "bench_memory_host.json").read_text())
    rows = table_rows(page, "layers | needed")
    for (label, *cells), row in zip(rows, memory["rows"], strict=True):
        assert label.startswith(row["model"])
        sizes = [row[f"{name}_bytes"] / 1e6 for name in ("needed", "groups", "without_groups")]
        assert cells == [f"{size:,.1f} MB" for size in sizes]
        assert row["times_needed"] <= 1.1
