"""scripts/serve_demo.py and the Llama under it: the right tokens, however they are served."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import full_only

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("scripts_on_path", "quick_host")

VOCAB = 199


@pytest.fixture
def model(device):
    """A random model of two layers."""
    from serving.llama import Llama, LlamaConfig, random_weights

    config = LlamaConfig(
        vocab=VOCAB, hidden=48, intermediate=96, layers=2, q_heads=4, kv_heads=2, head_dim=16
    )
    return Llama(device, config, random_weights(device, config), context=256)


@pytest.mark.parametrize("changes", [
    {"num_key_value_heads": 2}, {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
], ids=str)  # fmt: skip
def test_logits_are_those_of_transformers(device, changes):
    from serving.llama import Llama, LlamaConfig, assemble

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256, **changes,
    }  # fmt: skip
    theirs = transformers.LlamaConfig(**sizes)
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(theirs).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, parameter.shape[-1] ** -0.5)
    config = LlamaConfig(
        VOCAB, 48, 80, 2, 4, theirs.num_key_value_heads, theirs.head_dim,
        norm_eps=theirs.rms_norm_eps, tied=theirs.tie_word_embeddings,
    )  # fmt: skip
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    ours = Llama(device, config, assemble(device, config, weights.get, np.float32), context=256)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 90)
    with torch.no_grad():
        want = model(torch.tensor(tokens[None]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(device.to_numpy(ours.forward_plain(tokens)), want, atol=2e-5)
    with pytest.raises(ValueError, match=r"k_proj\.weight: expected shape \(.*, 48\), got"):
        assemble(device, replace(config, kv_heads=3), weights.get, np.float32)


def served(model, *lengths, pages=64, page_size=8, dtype="fp32", seed=3, **policy):
    """Serve prompts of (shared, own, output) lengths; check their tokens, return the outcome."""
    from serve_demo import check_tokens
    from serving.server import CacheSettings, Prompt, Server

    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB, 200)
    prompts = [
        Prompt(n, np.concatenate([prefix[:shared], rng.integers(0, VOCAB, own)]), out)
        for n, (shared, own, out) in enumerate(lengths)
    ]
    settings = CacheSettings(pages, page_size, dtype)
    server = Server(model, settings, **{"budget": 24, "max_running": 4, **policy})
    outcome, _ = server.serve(prompts)
    assert [len(tokens) for tokens in outcome.tokens] == [p.output_length for p in prompts]
    checked = check_tokens(model, prompts, outcome.tokens, dtype)
    assert checked["ties"] <= (0 if dtype == "fp32" else 0.1 * checked["tokens"])
    server.tiers.clear()
    assert server.cache.num_available_pages == pages
    return outcome


def test_chunks_and_decoding(model):
    outcome = served(model, (0, 50, 12), (0, 5, 20), (0, 30, 9), (0, 1, 15), (0, 77, 6), (0, 13, 1))
    assert outcome.mixed_steps > 3 and outcome.most_running == 4 and outcome.prefix_hits == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_prefixes_are_not_computed_again(model, dtype):
    lengths = [(60, 5, 10), (60, 9, 14), (60, 1, 8), (37, 11, 9), (60, 30, 12), (60, 5, 6)]
    outcome = served(model, *lengths, dtype=dtype, max_running=2)
    assert outcome.prefix_hits == 4 and outcome.cached_tokens == 3 * 56 + 32
    total = sum(shared + own + output - 1 for shared, own, output in lengths)
    assert outcome.computed_tokens == total - outcome.cached_tokens


def test_too_few_pages_for_all(model):
    """Pages for two requests' ends: the young ones wait, or come again from the beginning."""
    outcome = served(model, *[(24, 4, 40)] * 5, pages=18)
    assert outcome.preemptions > 0
    with pytest.raises(kv.CacheFull):
        served(model, (0, 60, 5), pages=7)


@pytest.mark.parametrize("seed", [0, 1, *map(full_only, range(2, 8))])
def test_whatever_the_sizes(model, seed):
    rng = np.random.default_rng(100 + seed)
    lengths = [(int(rng.choice([0, 20, 45])), *rng.integers(1, 40, 2)) for _ in range(7)]
    page_size, budget = int(rng.choice([1, 4, 16])), int(rng.integers(4, 40))
    longest = max(-(-sum(each) // page_size) for each in lengths)
    served(
        model, *lengths, pages=longest + int(rng.integers(0, longest)), page_size=page_size,
        budget=budget, max_running=int(rng.integers(1, min(budget, 7))),
        own_copy_stream=bool(rng.integers(2)), seed=seed,
    )  # fmt: skip


def demo(device_name, *arguments):
    import serve_demo

    run = ["--device", device_name, "--requests", "6", "--rounds", "1", "--output-tokens", "8"]
    model = ["--layers", "2", "--hidden", "64", "--vocab", str(VOCAB), "--max-running", "2"]
    return serve_demo.main([*run, *model, *map(str, arguments)])


@pytest.mark.usefixtures("lenient_host")
def test_demo_reports(device_name, tmp_path):
    out, path = tmp_path / "timeline.json", tmp_path / "new" / "report.json"
    assert demo(device_name, "--json", path, "--out", out) == 0
    report = json.loads(path.read_text())
    assert set(report["tables"]) == {"on a stream of their own", "on the compute stream"}
    for row in report["tables"].values():
        assert row["median_us"] >= row["least_us"] > 0 and row["tokens_per_s"] > 0
    copied = report["tables_copied"]
    assert copied["copies"] >= report["steps"] > 0 and 0 <= copied["hidden"] <= 1
    assert report["counts"]["prefix_hits"] > 0
    assert report["checked"] == {"tokens": report["output_tokens"], "ties": 0}
    events = json.loads(out.read_text())["traceEvents"]
    assert {"embed", "qkv", "mlp", "logits"} <= {e["name"] for e in events}


@pytest.mark.usefixtures("lenient_host")
def test_demo_notices_a_wrong_result(device, device_name, monkeypatch, capsys):
    if device.name != "host":
        pytest.skip("the wrong result is put there by the host")
    attention = kv.PagedKVCache.attention_qkv

    def wrong(self, layer, qkv, *, out, stream, **options):
        attention(self, layer, qkv, out=out, stream=stream, **options)
        device.run(lambda: out.__imul__(np.float32(0.8)), stream)

    monkeypatch.setattr(kv.PagedKVCache, "attention_qkv", wrong)
    assert demo(device_name) == 1
    assert "serve_demo: wrong result: request 0, output" in capsys.readouterr().err
