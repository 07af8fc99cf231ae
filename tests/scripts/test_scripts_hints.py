"""scripts/hint_study.py: sessions of agents, and what hints change."""

from __future__ import annotations

import json
import time
import types

import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path")


def small_workload(count=4):
    from hint_study import OF_AGENTS, Workload
    from replay.agents import BLOCK_TOKENS, sessions
    from replay.simulation import Sizes

    return Workload("agents", sessions(count, 3), Sizes(2500, 4000), BLOCK_TOKENS, OF_AGENTS)


def test_turns_extend_prefixes_and_share_them():
    from replay.agents import FIRST_BLOCKS, PROMPT_BLOCKS, sessions

    turns = sessions(6, 1)
    assert turns == sessions(6, 1) != sessions(6, 2)
    assert [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
    by_ids = {turn.ids: turn for turn in turns}
    for turn in turns:
        assert len(turn.ids) > PROMPT_BLOCKS + FIRST_BLOCKS[0]
        assert PROMPT_BLOCKS == turn.num_prompt <= turn.num_shared <= len(turn.ids)
        if turn.resumes_s is None:
            assert turn.pause is None and turn.expected_s is None
            continue
        assert min(turn.resumes_s, turn.expected_s) > turn.at_s
        (following,) = [
            other
            for other in by_ids.values()
            if other.at_s == turn.resumes_s and other.ids[: len(turn.ids)] == turn.ids
        ]
        assert len(following.ids) > len(turn.ids)
    assert any(turn.pause == "sub-agents" for turn in turns)


def test_hints_lose_no_hit_where_there_is_space():
    from hint_study import HINTS, replay

    from kvcupy.cache.tiered import cache, tiers

    workload = small_workload()
    without = replay(workload, "lru", None)
    found = replay(workload, "lru", HINTS["resume_at, expected"])
    assert found["requested"] == without["requested"]
    assert found["computed_again"] < without["computed_again"]
    assert found["hints"]["accepted"] and not found["hints"]["refused"]
    assert cache.time is tiers.time is time


def test_the_report(tmp_path, monkeypatch, capsys):
    import hint_study

    path = tmp_path / "hints.json"
    trace = tmp_path / "trace.jsonl"
    requests = [(0, [0, 1, 2]), (5000, [0, 1, 3, 4]), (9000, [0, 1, 3, 4, 5]), (9500, [6, 7])]
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": 1, "output_length": 1, "hash_ids": ids})
            for t, ids in requests
        )
    )
    arguments = ["--trace", str(trace), "--json", str(path)]
    assert hint_study.main(arguments) == 0
    chat = json.loads(path.read_text())
    assert chat["requests"] == 4 and chat["blocks"] == 14 and chat["distinct_blocks"] == 8
    assert [row["hint"] for row in chat["rows"]] == ["none", "none", *hint_study.OF_TRACE]
    assert {row["total"] for row in chat["rows"]} == {6 / 14}
    assert "as simulated: True" in capsys.readouterr().out
    assert hint_study.main(["--sessions", "1", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["as_simulated"]
    counts = {f"hit.{tier}": 0 for tier in hint_study.TIERS}
    wrong = types.SimpleNamespace(counts=counts)
    monkeypatch.setattr(hint_study, "simulate", lambda ids, sizes: wrong)
    assert hint_study.main(arguments) == 1
