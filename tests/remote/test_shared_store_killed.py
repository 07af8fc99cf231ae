"""Processes that are killed or stopped while they use a shared store leave whole blocks only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import helpers

HERE = Path(__file__).resolve().parent


def survey(folder, mode, times=0):
    """Run processes in one mode of `shared_killed.py`, and return what was seen."""
    process = subprocess.Popen(
        [sys.executable, HERE / "shared_killed.py", folder, mode, str(times)],
        # One thread before each fork.
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output)


def test_killed_at_every_step_a_writer_leaves_whole_blocks(tmp_path):
    report = survey(tmp_path, "steps")
    assert len(report) == 9 * 5 - 1
    for seen in report:
        killed, in_repair = seen["killed"][0], seen["killed"][1:]
        # The second block has no separate step if the first took the last space.
        assert killed == -signal.SIGKILL, seen
        assert seen["found"] == seen["read"] == seen["blocks"], "what is found can be read"
        assert seen["read_before"] <= seen["found_before"]
        clean = seen["step"] == "clean"
        if seen["repair"] is not None:
            assert in_repair == ([0] if clean else [-signal.SIGKILL]), seen
        assert seen["recovered"] == (0 if clean else 1 + (seen["repair"] == "rebuilt")), seen
        # Six slots: blocks being written are there, or as many were lost to them at most, of which
        # the last writer has filled one.
        assert seen["blocks"] >= 6 - seen["per_lock"] + 1, seen
        whole = seen["step"] in ("even", "inserted")
        complete = int(seen["number"]) - 1 + whole
        if clean:
            complete = seen["number"] * seen["per_lock"]
        assert sum(seen["new"]) >= complete - 1 and sum(seen["new"]) <= complete, seen


def test_no_block_is_wrong_whenever_users_are_killed(tmp_path):
    seen = survey(tmp_path, "rounds", helpers.examples(100))
    assert seen["kills"] == 2 * helpers.examples(100)
    assert seen["wrong"] == 0, seen
    sweeps = 40 * helpers.examples(100)  # each round ends with a look at all blocks
    assert seen["right"] > sweeps / 4 and seen["missed"] > sweeps / 4, "or it shows nothing"
    assert seen["recovered"] > helpers.examples(100) / 3, "too few died with the lock"
    assert seen["found"] == seen["read"] == seen["blocks"]


def test_control_written_before_they_are_marked_blocks_are_wrong(tmp_path):
    assert survey(tmp_path, "control", 15)["wrong"] > 0


def test_a_stopped_writer_holds_up_writers_until_their_deadline_and_no_reader(tmp_path):
    seen = survey(tmp_path, "stopped")
    assert seen["stopped"]
    assert seen["read"] == [True, True] and seen["exists"] == 2
    assert seen["being_written"] == [False]
    assert seen["put"] == ["failed"] and seen["known"] == ["known"]
    assert seen["waited_s"] >= 0.2
    assert seen["put_again"] == [["failed"] * 2] * 3 and seen["read_again"] == [True, True]
    assert seen["waited_again_s"] < 30, "it has waited for the lock again, for 60 s at most"
    assert seen["stats"]["lock_timeouts"] == 4 and seen["stats"]["failed"] == 7
    assert seen["stats"]["skipped"] == 0
    assert "lock" in seen["remove"]
    assert seen["writer"] == 0 and seen["after"] == [True, True]
    assert seen["put_after"] == ["stored"] and seen["recovered"] == 0


def test_children_neither_use_a_store_nor_keep_its_lock(tmp_path):
    seen = survey(tmp_path, "forked")
    assert seen["writer"] == -signal.SIGKILL
    *refused, own = seen["answers"]
    for answer in refused:
        assert answer.startswith("SharedStore: expected the process that made it"), refused
    assert own == 1
    assert seen["put"] == ["stored"] and seen["recovered"] == 1
