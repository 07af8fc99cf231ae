"""Lets griffe read this project's docstrings, for the API reference.

A parameter is described on the line of its name (`key : (T, H, D), any number format`), where griffe
expects a type and, indented below, the text. Types come from the signature.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.MULTILINE)
_ENTRIES = {"Parameters", "Attributes", "Returns", "Yields", "Raises"}
_ENTRY = re.compile(r"^(\S.*?) : (.+)$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Moves each description below its name, and drops `Any` from signatures, which says nothing."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = below_names(obj.docstring.value)
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                if str(parameter.annotation) == "Any":
                    parameter.annotation = None


def below_names(text: str) -> str:
    """Return a docstring with the descriptions of its entries on lines of their own.

    >>> print(below_names("Add.\\n\\nParameters\\n----------\\nx, y : numbers,\\n    of any kind"))
    Add.
    <BLANKLINE>
    Parameters
    ----------
    x, y
        numbers,
        of any kind
    """
    first, *parts = _SECTION.split(text)  # then name, body, name, body ...
    sections = [first]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in _ENTRIES:
            body = _ENTRY.sub(r"\1\n    \2", body)
        sections.append(f"{name}\n{'-' * len(name)}{body}")
    return "".join(sections)
