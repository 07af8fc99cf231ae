"""What type checkers see of `kvcupy.interop.torch`: a small program with planted mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcupy as kv

PROGRAM = """
import torch

import kvcupy.interop.torch as kvt

x = torch.zeros(1)
kvt.store_kv(x, x, x, x, slot_mapping=x, k_scale=0.5, format="fp8_e4m3")
kvt.store_kv(x, x, x, x, slots=x)  # mistake
kvt.store_kv(x, x, x, x)  # mistake
kvt.store_mla(x, x, x, 5)  # mistake
k, v = kvt.gather_kv(x, x, x, dtype=torch.float32)
k.no_such_attribute  # mistake
kvt.gather_kv(x, x, x, layout="NDH")  # mistake
kvt.apply_rope(None, x, x, x, sections=(1, 1, 2))
kvt.apply_rope(None, x, x, x, eps="small")  # mistake
kvt.rope_store_kv(x, x, x, x, x, x, x, x, write_key=False)
kvt.rope_store_kv(x, x, x, x, x, x, x, x, write_keys=False)  # mistake
kvt.rope_store_mla(x, x, x, x, x, x, [1])  # mistake
kvt.paged_attention(x, x, x, x, x).numel()
out, lse = kvt.paged_attention(x, x, x, x, x, return_lse=True)
kvt.paged_attention(x, x, x, x, x, return_lse=True).numel()  # mistake
kvt.merge_states(x, x, None, None, lse_base="10")  # mistake
kvt.copy_pages((x, x), x, x)
kvt.shift_pages(x, x, 0.5, x)  # mistake
kvt.store_state((x, x), (x, x), x)
kvt.gather_state(x, x).numel()
kvt.gather_state((x, x), x).numel()  # mistake
kvt.update_conv_state(x, x, x)  # mistake
kvt.slot_mapping(x, x, x, "16")  # mistake
kvt.page_table_csr(x, x, 16)[2].numel()
kvt.find_duplicate_slots(x).numel()
kvt.rope_table(16, 8).numel()
"""

TORCH = """
from typing import Any

class dtype: ...
class Tensor:
    def numel(self) -> int: ...

float32: dtype

def zeros(*size: int) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
"""

SETTINGS = """
[mypy]
follow_imports = silent
ignore_missing_imports = True
"""


def test_a_type_checker_sees_mistakes(tmp_path):
    """With a stub of torch: reading all of torch takes half a minute."""
    pytest.importorskip("mypy")
    stubs = tmp_path / "stubs"
    (stubs / "torch").mkdir(parents=True)
    (stubs / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(kv.__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".",
         "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(stubs), str(root)])},
    )  # fmt: skip
    found = {int(n) for n in re.findall(r"^program\.py:(\d+).*error", run.stdout, re.MULTILINE)}
    mistakes = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if "# mistake" in line}
    assert found == mistakes, run.stdout + run.stderr
