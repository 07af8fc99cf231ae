"""A process that is killed while it writes to a disk tier leaves whole blocks only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def killed(path, times, mode):
    """Kill a writer so many times, and return what the file had afterwards."""
    result = subprocess.run(
        [sys.executable, HERE / "disk_killed.py", path, str(times), mode],
        # One thread before each fork.
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(("mode", "times"), [("whole", 100), ("order", 50)])
def test_killed_writers_leave_whole_blocks_and_lose_none(tmp_path, mode, times):
    found = killed(tmp_path / "tier", times, mode)
    assert found["kills"] == times
    assert found["wrong"] == 0, found
    assert found["lost"] == 0, found
    assert found["served"] > times and found["unfinished"] > times / 4, found  # or it shows nothing


def test_control_without_order_and_checksums_killed_writers_leave_wrong_blocks(tmp_path):
    found = killed(tmp_path / "tier", 50, "control")
    assert found["wrong"] > 0, found
