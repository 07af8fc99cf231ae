"""NVIDIA's disassembler, and the SASS of each kernel in its listings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvcupy.errors import CompileError

_SASS_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)", re.MULTILINE)


def find() -> Path | None:
    """Return NVIDIA's disassembler from its wheel or from PATH, or None."""
    for entry in dict.fromkeys(sys.path):
        for found in sorted(Path(entry or ".").glob("nvidia/*/bin/nvdisasm"), reverse=True):
            return found
    on_path = shutil.which("nvdisasm")
    return Path(on_path) if on_path else None


def disassemble(nvdisasm: Path, cubin: bytes) -> str:
    """Return the SASS of a cubin; CompileError if nvdisasm refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(nvdisasm), "-c", str(file)], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise CompileError("nvdisasm failed", done.stderr)
    return done.stdout


def sections_of(sass: str) -> dict[str, str]:
    """Return the SASS of each kernel of a listing, by name."""
    return divide(sass, _SASS_SECTION)


def divide(text: str, head: re.Pattern[str]) -> dict[str, str]:
    """Return what stands from each head to the next, by the name in the head."""
    heads = list(head.finditer(text))
    ends = [found.start() for found in heads[1:]] + [len(text)]
    return {found[1]: text[found.start() : end] for found, end in zip(heads, ends, strict=True)}
