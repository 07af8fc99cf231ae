"""scripts/disaggregated_demo.py: two processes give the tokens of one."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")

pytest.importorskip("nixl_cu12", reason="pip install --no-deps nixl-cu12")


def run(*arguments):
    import disaggregated_demo

    return disaggregated_demo.main(["--device", "host", "--quick", *map(str, arguments)])


def test_two_processes_give_the_tokens_of_one(tmp_path):
    assert run("--json", tmp_path / "r.json") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["tokens_checked"] == 2 * 2 * 8  # two prompts, in each round
    assert report["bytes_per_sequence"] == 3 * 2 * 8 * 8 * 48 * 4
    assert report["receiver"]["failed"] == report["receiver"]["quarantined_pages"] == 0
    assert report["least_exposed_ms"] <= report["exposed_ms"] <= report["most_exposed_ms"]


def test_other_tokens_are_noticed(monkeypatch, capsys):
    from disaggregated_demo import PairedNode

    generate = PairedNode.generate

    def generate_others(self, prompts, count):
        outputs = generate(self, prompts, count)
        outputs[1][-1] ^= 1
        return outputs

    monkeypatch.setattr(PairedNode, "generate", generate_others)
    assert run() == 1
    assert "wrong result: expected tokens" in capsys.readouterr().err
