"""scripts/shared_demo.py: several processes over one store, one of them killed, no byte wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tiered_store_cases import MemoryStore
from trace_cases import small_settings, small_trace

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("scripts_on_path")

SMALL = ("--limit", 40, "--scale", 16, "--device-blocks", 60, "--host-blocks", 150)


@pytest.fixture
def demo(device_name, tmp_path, monkeypatch):
    """Run the script, and return its exit status, its report, and what is left of the store."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    name = f"kvcupy-test-{os.getpid()}"

    def run(*arguments):
        import shared_demo

        path = tmp_path / "report.json"
        status = shared_demo.main(
            ["--device", device_name, "--url", f"shm:{name}", "--json", str(path)]
            + [str(argument) for argument in (*SMALL, *arguments)]
        )
        left = [file for file in Path("/dev/shm").iterdir() if name in file.name]
        return status, json.loads(path.read_text()) if path.exists() else None, left

    return run


def test_processes_find_each_others_blocks(demo, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "shared.png"
    status, report, left = demo("--plot", picture)
    assert (status, left) == (0, [])
    assert picture.stat().st_size > 10_000
    alone, over = report["points"]
    for point in (alone, over):
        counts = point["counts"]
        assert point["served"] == [20, 20] and counts["requests"] == 40
        hits = sum(counts.get(f"hit.{tier}", 0) for tier in ("device", "host", "store"))
        assert hits + counts["missed"] == report["blocks"]
        assert counts["checked_bytes"] == hits * report["page_bytes"]
        assert counts["wrong_bytes"] == 0 and not (point["killed"] or point["failed"])
    assert alone["counts"]["hit.store"] == 0 < over["counts"]["hit.store"]
    assert over["hit_rate"]["total"] > alone["hit_rate"]["total"]
    assert over["counts"]["missed"] >= report["distinct_blocks"], "each has to be computed once"
    assert 0 < over["store"]["shared_stored"] <= report["distinct_blocks"]
    assert over["store"]["shared_errors"] == 0
    assert "over" not in capsys.readouterr().err


def test_one_that_is_killed_does_not_disturb_the_other(demo, capsys):
    status, report, left = demo("--kill")
    assert (status, left) == (0, [])
    for point in report["points"]:
        assert (point["killed"], point["failed"]) == ([0], [])
        assert point["served"] == [10, 20]
        assert point["counts"]["wrong_bytes"] == 0
    assert "killed: process 0" in capsys.readouterr().out


def test_a_run_that_is_interrupted_leaves_no_memory(demo, monkeypatch):
    import shared_demo

    def interrupt(arguments, *, shared):
        made.append(Path(f"/dev/shm/kvcupy-{arguments.url.removeprefix('shm:')}"))
        shape = shared_demo.settings_of(arguments).shape
        page = (shape.tokens, shape.layers, shape.heads, shape.width)
        pool = kv.KVPool(1, *page, layout="page_first_direct", device="host")
        with shared_demo.open_store(arguments, pool):
            assert made[-1].exists()
        raise KeyboardInterrupt

    made = []
    monkeypatch.setattr(shared_demo, "run_processes", interrupt)
    assert demo() == (130, None, [])
    assert len(made) == 1 and not made[0].exists()


def test_a_wrong_byte_of_a_store_is_noticed(device):
    """Control: this one, which does not verify, hands out blocks that have changed."""
    from workloads.trace import Replay

    class Spoiling(MemoryStore):
        """Pools of any shape."""

        def _put(self, hash, page):
            content = [np.array(part[page]) for part in self._parts()]
            content[-1].view(np.uint8).reshape(-1)[3] ^= 1
            self.blocks[hash] = content
            return "stored"

        def _get(self, hash, page):
            if hash not in self.blocks:
                return False
            for part, values in zip(self._parts(), self.blocks[hash], strict=True):
                part[page] = values
            return True

        def _parts(self):
            return [v(n) for v in (self.pool.k, self.pool.v) for n in range(self.pool.num_layers)]

    blocks = {}
    wrong = []
    for _ in range(2):
        settings = small_settings((60, 150), host_layout="page_first_direct")
        lower = lambda pool: {"shared": Spoiling(pool, blocks)}  # noqa: E731
        replay = Replay(device, settings, small_trace(30), lower)
        try:
            for _ in range(30):
                replay.step()
            replay.finish()
        finally:
            replay.close()
        wrong.append(replay.counts["wrong_bytes"])
    assert wrong[0] == 0 < wrong[1]
    assert wrong[1] >= replay.counts["hit.store"] > 0
