"""Lets griffe read this project's docstrings, for the API reference.

A parameter is described on the line of its name (`key : (T, H, D); any number format`), where
griffe expects a type, and the text indented below. Types come from the signature.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
_RESULTS = ("Returns", "Yields")
_ENTRIES = (*_RESULTS, "Parameters", "Attributes", "Raises")
_ENTRY = re.compile(r"(\S.*?) : (.+)")
_SEVERAL = re.compile(r"^(\w+), (\w+(?:, \w+)*) : (.+(?:\n .*)*)", re.MULTILINE)
_NAMES = re.compile(r"[*\w]+(, [*\w]+)*")


class Docstrings(griffe.Extension):
    """Moves descriptions below their names, and drops `Any`, which says nothing."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = below_names(obj.docstring.value)
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                if str(parameter.annotation) == "Any":
                    parameter.annotation = None


def below_names(text: str) -> str:
    """Return a docstring with the descriptions of its entries on separate lines.

    Sentences among the entries go before them.
    """
    first, *parts = _SECTION.split(text)  # then name, body, name, body ...
    sections = [first]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in _ENTRIES:
            prose, entries = _split(name, body)
            if prose:
                sections.append(f"**{name}:** {prose}\n\n" if name in _RESULTS else f"{prose}\n\n")
            body = entries
        if body.strip():
            sections.append(f"{name}\n{'-' * len(name)}\n{body}")
    return "".join(sections)


def _split(name: str, body: str) -> tuple[str, str]:
    """Return what of a section is prose, and its entries."""
    prose, entries = [], []
    if name in _RESULTS and re.search(r"^ ", body, re.MULTILINE) and not _ENTRY.search(body):
        return "", body  # a type, and its description below
    has_entries = name not in _RESULTS or _ENTRY.search(body)
    if name == "Parameters":
        body = _SEVERAL.sub(_described_once, body)
    for line in body.splitlines():
        if entry := _ENTRY.fullmatch(line):
            entries += [entry[1], f"    {entry[2]}"]
        elif line[:1].strip() and not (has_entries and _NAMES.fullmatch(line)):
            prose.append(line)
        else:
            entries.append(line)
    return "\n".join(prose), "\n".join(entries) + "\n"


def _described_once(entry: re.Match[str]) -> str:
    """Return the entry of the first of several parameters, to which the other entries refer."""
    first, others, description = entry.groups()
    same = [f"{name} : as `{first}`" for name in others.split(", ")]
    return "\n".join([f"{first} : {description}", *same])
