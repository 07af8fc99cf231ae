"""scripts/disaggregated_demo.py: two processes give the tokens of one; what it reports adds up."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")

pytest.importorskip("nixl_cu12", reason="pip install --no-deps nixl-cu12")


def run(*arguments):
    import disaggregated_demo

    return disaggregated_demo.main(["--device", "host", "--quick", *map(str, arguments)])


def test_two_processes_give_the_tokens_of_one(tmp_path, capfd):
    assert run("--json", tmp_path / "r.json") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    # Two prompts, each way and each round: all of their answers.
    assert report["tokens_checked"] == 2 * 2 * 2 * 8
    assert report["bytes_per_sequence"] == 3 * 2 * 8 * 8 * 48 * 4
    assert report["receiver"]["failed"] == report["receiver"]["quarantined_pages"] == 0
    hidden = 1 - report["exposed_ms"] / report["transfer_ms"]
    assert report["hidden"] == pytest.approx(min(1, hidden))
    for name in ("exposed_ms", "transfer_ms"):
        assert report[f"least_{name}"] <= report[name] <= report[f"most_{name}"]
    assert "those of one process" in capfd.readouterr().out


def test_other_tokens_are_noticed(monkeypatch):
    import disaggregated_demo
    from disaggregated_demo import PairedNode

    generate = PairedNode.generate

    def generate_others(self, prompts, count):
        outputs = generate(self, prompts, count)
        outputs[1][-1] ^= 1
        return outputs

    monkeypatch.setattr(PairedNode, "generate", generate_others)
    with pytest.raises(disaggregated_demo.WrongTokens, match="layer by layer"):
        run()


def test_what_is_hidden():
    """Of medians: 4 ms of transfer, of which 1 is waited for when the computation has ended."""
    from disaggregated_demo import LAYERS, WHOLE, Prefilled, times_of

    samples = {
        LAYERS: [Prefilled(1, 0.010, 0.0, 0.010 + s) for s in (0.0005, 0.001, 0.009)],
        WHOLE: [Prefilled(1, 0.010, 0.011, 0.015, num_bytes=8_000_000)],
    }
    report = times_of(samples)
    assert report["hidden"] == pytest.approx(0.75)
    assert report["most_exposed_ms"] == pytest.approx(9.0)
    assert report["gb_per_s"] == pytest.approx(2.0)
    samples[LAYERS] = [Prefilled(1, 0.010, 0.0, 0.009)]  # before the computation has ended
    assert times_of(samples)["hidden"] == 1.0
