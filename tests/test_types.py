"""What type checkers see of the public calls: a small program with planted mistakes."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcupy as kv

PROGRAM = """
from typing import Any

import kvcupy as kv

x: Any = 0
kv.config.strict = True
kv.config.fallback = "error"
kv.config.nosuch = True  # mistake
kv.config.strict = "yes"  # mistake
kv.config.fallback = "never"  # mistake
kv.config.verify = "always"  # mistake
kv.config.strict_index_faults = "print"  # mistake
kv.store_kv(x, x, x, x, x, layout="HND")
kv.store_kv(x, x, x, x, x, layout="NDH")  # mistake
kv.gather_kv(x, x, x, layout="NDH")  # mistake
kv.rope_store_kv(x, x, x, x, x, x, x, x, layout="NDH")  # mistake
kv.paged_attention(x, x, x, x, x, layout="NDH")  # mistake
kv.merge_states(x, x, x, x, lse_base="10")  # mistake
pool = kv.KVPool(4, 2, 1, 1, 8, layout="page_first", placement="pinned")
kv.KVPool(4, 2, 1, 1, 8, layout="page")  # mistake
kv.MLAPool(4, 2, 1, 8, placement="host")  # mistake
kv.KVPool.wrap(x, x, layout="first")  # mistake
kv.transfer_pages(pool, pool, [0], [1], method="dma")  # mistake
kv.TransferEngine(pool, pool, method="dma")  # mistake
kv.PagedKVCache(num_q_heads=1, rope_mode="rotated")  # mistake
kv.Encoding("nvfp4", scale_rule="max")  # mistake
tiers = kv.TieredCache(pool, pool, write="back")
tiers.match([1]).host.bit_length()
tiers.nosuch  # mistake
kv.TieredCache(pool, pool, write="both")  # mistake
kv.TieredCache(pool, pool, store=[])  # mistake
kv.TieredCache(groups=x, host_bytes=2**20, stores=["file:/x"])
with kv.order_checker(action="print"):  # mistake
    pass
"""

TORCH_PROGRAM = """
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
    programs = {"program.py": PROGRAM, "torch_program.py": TORCH_PROGRAM}
    stubs = tmp_path / "stubs"
    (stubs / "torch").mkdir(parents=True)
    for path, text in {
        **{tmp_path / name: text for name, text in programs.items()},
        stubs / "torch" / "__init__.pyi": TORCH, tmp_path / "mypy.ini": SETTINGS,
    }.items():  # fmt: skip
        path.write_text(text)
    root = Path(kv.__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".", *programs],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(stubs), str(root)])},
    )  # fmt: skip
    found = {(name, int(n)) for name, n in re.findall(r"^(\w+\.py):(\d+).*error", run.stdout, re.M)}
    mistakes = {
        (name, n)
        for name, text in programs.items()
        for n, line in enumerate(text.splitlines(), 1)
        if "# mistake" in line
    }
    assert found == mistakes, run.stdout + run.stderr


def test_the_options_of_a_tiered_cache_are_shown():
    shown = inspect.signature(kv.TieredCache).parameters
    assert [*shown][:3] == ["device_pool", "host_pool", "stores"]
    assert {"write", "model", "groups", "host_bytes"} <= set(shown)


def test_an_unknown_setting_is_refused():
    with pytest.raises(AttributeError, match="nosuch"):
        kv.config.nosuch = True
