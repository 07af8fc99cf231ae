"""scripts/disaggregated_demo.py: two processes give the tokens of one; what it reports adds up."""

from __future__ import annotations

import importlib.util
import json

import pytest
from helpers import full_only

from kvcupy.remote.migration import nixl_agents
from kvcupy.timelines.timeline import Span

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")

HAS_NIXL = any(importlib.util.find_spec(name) for name in nixl_agents.WHEELS)


def run(device_name, *arguments):
    import disaggregated_demo

    return disaggregated_demo.main(["--device", device_name, "--quick", *map(str, arguments)])


@pytest.mark.parametrize("engine", ["socket", full_only("nixl")])
def test_two_processes_give_the_tokens_of_one(device_name, tmp_path, capfd, engine):
    if engine == "nixl" and not HAS_NIXL:
        pytest.skip("needs NIXL")
    if engine == "socket":
        pytest.importorskip("matplotlib")
    drawn = ["--out", tmp_path] if engine == "socket" else []
    assert run(device_name, "--engine", engine, "--json", tmp_path / "r.json", *drawn) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    # Two prompts, each way and each round: all of their answers.
    assert report["tokens_checked"] == 2 * 2 * 2 * 8
    assert report["bytes_per_sequence"] == 3 * 2 * 8 * 8 * 48 * 4
    assert report["receiver"]["failed"] == report["receiver"]["quarantined_pages"] == 0
    hidden = 1 - report["exposed_ms"] / report["migration_ms"]
    assert report["hidden"] == pytest.approx(min(1, hidden))
    for name in ("compute_ms", "exposed_ms", "migration_ms"):
        assert report[f"least_{name}"] <= report[name] <= report[f"most_{name}"]
    assert "those of one process" in capfd.readouterr().out
    if not drawn:
        return
    for suffix in ("html", "png"):
        assert (tmp_path / f"timeline.{suffix}").stat().st_size > 1000
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"1 prefill", "2 pages", "3 decode"}
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert {"layer 0", "layer 1", "layer 2", "paged_attention", "mlp", "logits"} <= spans


def test_other_tokens_are_noticed(device_name, monkeypatch):
    import disaggregated_demo
    from disaggregated_demo import PairedNode

    generate = PairedNode.generate

    def generate_others(self, prompts, count):
        outputs = generate(self, prompts, count)
        outputs[1][-1] ^= 1
        return outputs

    monkeypatch.setattr(PairedNode, "generate", generate_others)
    with pytest.raises(disaggregated_demo.WrongTokens, match="layer by layer"):
        run(device_name)


def test_what_is_hidden():
    """Of medians: 4 ms of migration, of which 1 is waited for when the computation has ended."""
    from disaggregated_demo import LAYERS, NO_EXPORT, WHOLE, Prefilled, times_of

    samples = {
        LAYERS: [Prefilled(1, 0.0, 0.010, 0.0, 0.010 + s) for s in (0.0005, 0.001, 0.009)],
        WHOLE: [Prefilled(1, 0.0, 0.010, 0.011, 0.015, num_bytes=8_000_000)],
        NO_EXPORT: [Prefilled(1, 0.0, 0.008)],
    }
    report = times_of(samples)
    assert report["hidden"] == pytest.approx(0.75)
    assert report["most_exposed_ms"] == pytest.approx(9.0)
    assert report["gb_per_s"] == pytest.approx(2.0)
    assert report["compute_ms"] == pytest.approx(8.0)
    samples[LAYERS] = [Prefilled(1, 0.0, 0.010, 0.0, 0.009)]  # before the computation has ended
    assert times_of(samples)["hidden"] == 1.0


def test_spans_of_pages_begin_when_their_layer_is_written():
    from disaggregated_demo import Prefilled, on_their_way

    spans = tuple(
        Span(name, "compute", us, 5.0)
        for us, name in ((0.0, "paged_attention"), (5.0, "mlp"), (10.0, "paged_attention"))
    )
    prefilled = Prefilled(1, 0.0, 1.0, layers_s=(9e-6, 14e-6), num_bytes=64, spans=spans)
    assert [(s.name, s.start_us, s.duration_us, s.num_bytes) for s in on_their_way(prefilled)] == [
        ("layer 0", 5.0, pytest.approx(4.0), 32), ("layer 1", 15.0, 0.0, 32),
    ]  # fmt: skip
    prefilled.layers_s = (1e-6,)
    with pytest.raises(ValueError, match="1 layers"):
        on_their_way(prefilled)
