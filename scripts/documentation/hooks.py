"""Lets pages link to files outside of docs/, as they do where the repository is browsed.

What a page links to with `../`, a picture of `scripts/results` say, becomes part of the site under
its path in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<=\]\()(?:\.\./)+(?=[\w.])([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files that pages link to."""
    for page in files.documentation_pages():
        for path in _outside(page):
            if (ROOT / path).is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point those links to where the files are in the site."""
    up = "../" * page.file.src_uri.count("/")
    paths = _outside(page.file)
    return _LINK.sub(lambda link: up + link[1] if link[1] in paths else link[0], markdown)


def _outside(page: File) -> set[str]:
    """Return the paths in the repository of what a page links to outside of docs/."""
    up = "../" * (page.src_uri.count("/") + 1)
    links = _LINK.finditer(page.content_string)
    return {link[1] for link in links if link[0].startswith(up)}
