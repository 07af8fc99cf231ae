"""The house stays small: how many modules there are, and what the specification imports.

What may import what, circles included, is checked by import-linter (`[tool.importlinter]` in
pyproject.toml, `lint-imports` in CI).
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

# Lower a bound when a change takes fewer.
MODULES = 164
PER_FOLDER = 21

PACKAGE = Path(__file__).resolve().parents[1] / "kvcupy"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_are_few_modules():
    assert 0 < len(FILES) <= MODULES


def test_no_folder_is_crowded():
    folders = Counter(str(file.parent.relative_to(PACKAGE)) for file in FILES)
    assert {name: count for name, count in folders.items() if count > PER_FOLDER} == {}


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level or node.module.partition(".")[0]


def test_the_package_imports_nothing_that_only_tests_have():
    tests = {"greenlet", "hatchling", "hypothesis", "pytest", "simulated_tiers", "support"}
    for file in FILES:
        assert not set(imported(file)) & tests, file.name


def test_the_specification_imports_numpy_alone():
    allowed = {"numpy", "ml_dtypes", ".", *sys.stdlib_module_names}
    for file in FILES:
        if file.parent.name == "reference":
            assert set(imported(file)) <= allowed, file.name
