"""vLLM with the tier gives the tokens that it gives alone, after a restart, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
BLOCKS = 10  # of a prompt


def serve(folder, *tier):
    paths = os.pathsep.join((str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")))
    result = subprocess.run(
        [sys.executable, HERE / "vllm_tier_process.py", folder, *map(json.dumps, tier)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    [line] = (line for line in result.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a folder with the model, and what vLLM serves without a tier."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, serve(folder)


def test_tokens_do_not_change(alone, tmp_path):
    folder, expected = alone
    tier = {"type": "KvcupyTier", "module_path": "kvcupy.interop.vllm_tier"}
    tier["stores"] = [{"url": f"file:{tmp_path}/kv", "capacity_bytes": 2**27}]
    first, again = serve(folder, tier), serve(folder, tier)
    assert expected["tokens"] == first["tokens"] == again["tokens"]
    assert expected["cached"] == [0] * 12  # the device cache is too small for the second round
    assert first["cached"] == [0] * 6 + [BLOCKS * 32] * 6
    assert again["cached"] == [BLOCKS * 32] * 12
