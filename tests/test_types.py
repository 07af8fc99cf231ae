"""What type checkers see of the public calls: a small program with planted mistakes."""

from __future__ import annotations

import inspect
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


def test_a_type_checker_sees_mistakes(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(kv.__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), str(program)],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = {int(n) for n in re.findall(r"program\.py:(\d+).*error", run.stdout)}
    mistakes = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if "# mistake" in line}
    assert lines == mistakes, run.stdout + run.stderr


def test_the_options_of_a_tiered_cache_are_shown():
    shown = inspect.signature(kv.TieredCache).parameters
    assert [*shown][:3] == ["device_pool", "host_pool", "stores"]
    assert {"write", "model", "groups", "host_bytes"} <= set(shown)


def test_an_unknown_setting_is_refused():
    with pytest.raises(AttributeError, match="nosuch"):
        kv.config.nosuch = True
