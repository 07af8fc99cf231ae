"""Pictures drawn with matplotlib, saved as small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = 64  # of a picture's palette, which keep lines and text legible


def save(figure: Any, path: str | Path) -> None:
    """Save a figure of matplotlib; a PNG gets a palette.

    A palette makes the file of a chart about a third as large.
    """
    path = Path(path)
    figure.savefig(path)
    if path.suffix != ".png":
        return
    from PIL import Image  # a requirement of matplotlib's

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
