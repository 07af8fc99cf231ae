"""Find phrases that have a plainer form, in Markdown and in docstrings and comments of code.

    python scripts/check_prose.py [PATH ...]

Without paths, `CHECKED` is checked. Prints `file:line: phrase -> instead`, and exits with status 1
if there is any. Code blocks and inline code are skipped.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs",
    "examples",
    "kernels_src",
    "kvcupy",
    "scripts",
    "tests",
)

PHRASES = {
    r"that of|those of": "repeat the noun",
    r"of (?:its|their|one's|an|a) own": "its own ..., a separate ...",
    r"as (?:it is|they are)(?=[.,;:)]| and\b)": "unchanged, directly",
    r"(?:is|are|was|were|unless|been|be) told": "is notified, unless set",
    r"tell(?:s|ing)? apart": "distinguish",
    r"(?:be|is|are) had|come (?:what|from where) (?:they )?may": "is available",
    r"(?:is|are|be) at it|(?:go|goes|going|went) on": "is running, continues",
    r"(?:for|by|to|from|of|and|so that|than) who|whoever|somebody": "callers that, the thread that",
    r"(?-i:Who) (?:asks|has|waits|needs|wants|calls|uses|reads|writes|holds|is)": "a caller that",
    r"(?-i:What) [^.?|\n]{1,60} (?:is|are) [^?\n]*\.$": "make a named thing the subject",
    r"(?-i:is none)|nothing of": "is missing, is invalid, no part of",
    r"be it (?:that|by|a)": "including when",
    r"f[ae]ll(?:s|ing)? apart": "is decomposed",
    r"for want of|of before|c[oa]mes? of (?:it|them|this|that)": "for lack of, previous, result",
    r"the other way (?:a)?round": "in the opposite order",
    r"there(?:in|of|upon)|where(?:in|of|upon)|hereof|whence|lest|albeit|anew": "in it, again, ...",
    r"h(?:eld|olds?) against": "compared with",
    r"(?:and|or) (?:its|their|the) like|(?:works?|behaves?) alike": "and similar, the same way",
    r"st(?:ep|eps|epped|epping) aside|beneath all|st[ao]nds? for itself": "offload, base, name it",
    r"affair|patience|owing|a wish": "responsibility, timeout, outstanding, best effort",
    r"not here|no longer there": "unavailable, gone",
    r"nothing but|none but|in (?:its|their) stead": "only, instead",
}  # fmt: skip
# A space also matches a line break with the comment mark and indentation after it.
PATTERNS = [
    (re.compile(rf"\b(?:{phrase})(?!\w)".replace(" ", r"\s+(?:(?:#|//)\s*)?"), re.I | re.M), to)
    for phrase, to in PHRASES.items()
]
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
CPP_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(//[^\n]*|/\*.*?\*/)', re.DOTALL)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_prose(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of comments and docstrings."""
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield starts[token.start[0] - 1] + token.start[1], starts[token.end[0]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False):
            yield starts[node.body[0].lineno - 1], starts[node.body[0].end_lineno or 0]


def prose(path: Path) -> str:
    """Return a file with everything but prose blanked, so that lines keep their numbers."""
    text, spans = path.read_text(), []
    if path.suffix == ".py":
        spans = sorted(python_prose(text))
    elif path.suffix != ".md":
        spans = [match.span(1) for match in CPP_COMMENT.finditer(text) if match[1]]
    kept, end = "", 0
    for start, stop in [*spans, (len(text) * (path.suffix != ".md"), len(text))]:
        kept += re.sub(r"[^\n]", " ", text[end:start]) + text[start:stop]
        end = stop
    return CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), kept)


def findings(path: Path) -> list[str]:
    """Return a line of report for each finding in a file."""
    text = prose(path)
    found = [(match.start(), match[0], to) for pat, to in PATTERNS for match in pat.finditer(text)]
    return [
        f"{path}:{text.count(chr(10), 0, at) + 1}: {' '.join(phrase.split())} -> {instead}"
        for at, phrase, instead in sorted(found)
    ]


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]] or [ROOT / name for name in CHECKED]
    files = {file for path in paths for file in (path, *path.rglob("*"))}
    suffixes = (".md", ".py", ".cu", ".cuh", ".h")
    reports = [line for file in sorted(files) if file.suffix in suffixes for line in findings(file)]
    print("\n".join(reports), end="\n" * bool(reports))
    sys.exit(bool(reports))
