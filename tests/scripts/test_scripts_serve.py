"""scripts/serve_demo.py and the Llama under it: the right tokens, however they are served."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import full_only

import kvcupy as kv
from kvcupy.timelines.timeline import Span

pytestmark = pytest.mark.usefixtures("scripts_on_path", "quick_host")

VOCAB = 199


def small_model(device, *, seed: int = 0, context: int = 256, **changes):
    """Return a random model of two layers."""
    from serving.llama import Llama, LlamaConfig, random_weights

    settings = {
        "vocab": VOCAB, "hidden": 48, "intermediate": 96, "layers": 2, "q_heads": 4, "kv_heads": 2,
        "head_dim": 16,
    }  # fmt: skip
    config = LlamaConfig(**{**settings, **changes})
    return Llama(device, config, random_weights(device, config, seed=seed), context=context)


def plain_greedy(model, prompt, length: int, *, cache_dtype: str = "fp32") -> list[int]:
    """Decode greedily by a whole uncached pass for each token."""
    tokens = list(map(int, prompt))
    for _ in range(length):
        logits = model.forward_plain(np.array(tokens), cache_dtype=cache_dtype)
        tokens.append(int(model.device.to_numpy(logits[-1]).argmax()))
    return tokens[len(prompt) :]


def prompts_of(*pairs, gap_ms=0.0, vocab=VOCAB, seed=3):
    """Prompts of (shared, own, output) lengths; the shared tokens are the same for all."""
    from serving.requests import Prompt

    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab, 200)
    return [
        Prompt(n, n * gap_ms, np.concatenate([prefix[:shared], rng.integers(0, vocab, own)]), out)
        for n, (shared, own, out) in enumerate(pairs)
    ]


def serve(model, prompts, *, pages=64, page_size=8, dtype="fp32", server=None, **policy):
    """Serve prompts; return what came out."""
    from serving.engine import CacheSettings, Server
    from serving.schedule import Policy

    settings = CacheSettings(pages, page_size, dtype)
    small = Policy(budget=24, max_running=4)
    running = Server(model, settings, replace(small, **policy), **(server or {}))
    outcome, _ = running.serve(prompts)
    assert_nothing_is_held(running, prompts)
    return outcome


def assert_nothing_is_held(server, prompts):
    """What is left in the cache is what was kept for its prefix; after that every page is free."""
    for prompt in prompts:
        if prompt.number in server.cache:
            server.cache.remove_sequence(prompt.number)
    assert server.cache.num_available_pages == server.settings.num_pages


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of the plain pass, a request at a time, remembered by model and prompt."""
    known: dict = {}

    def tokens(model, prompts):
        for prompt in prompts:
            key = (id(model), prompt.tokens.tobytes(), prompt.output_length)
            if key not in known:
                known[key] = plain_greedy(model, prompt.tokens, prompt.output_length)
        return [known[id(model), p.tokens.tobytes(), p.output_length] for p in prompts]

    return tokens


@pytest.fixture(scope="module")
def models(device):
    """The small random model, made once."""
    known: dict = {}

    def model(**changes):
        key = json.dumps(changes)
        if key not in known:
            known[key] = small_model(device, **changes)
        return known[key]

    return model


# The model against transformers --------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"num_key_value_heads": 2}, {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    {"head_dim": 32, "num_key_value_heads": 1},
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
    got = device.to_numpy(ours.forward_plain(tokens))
    np.testing.assert_allclose(got, want, atol=2e-5)
    with pytest.raises(ValueError, match=r"k_proj\.weight: expected shape \(.*, 48\), got"):
        assemble(device, replace(config, kv_heads=3), weights.get, np.float32)


# Serving -------------------------------------------------------------------------------------

MIXED = [(0, 50, 12), (0, 5, 20), (0, 30, 9), (0, 1, 15), (0, 77, 6), (0, 13, 1)]
SHARED = [(60, 5, 10), (60, 9, 14), (60, 1, 8), (37, 11, 9), (60, 30, 12), (60, 5, 6)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_chunks_beside_decoding(models, expected, ahead):
    prompts = prompts_of(*MIXED, gap_ms=45.0)
    outcome = serve(models(), prompts, server={"ahead": ahead})
    assert outcome.tokens == expected(models(), prompts)
    assert outcome.counts.mixed_steps > 3 and outcome.counts.forks == 0
    assert max(map(sum, outcome.step_tokens)) == 24  # the budget, and never more
    assert outcome.counts.most_running == 4
    assert outcome.counts.computed_tokens == sum(p.goal - 1 for p in prompts)


@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_forks_bring_prefixes(models, expected, page_size):
    prompts = prompts_of(*SHARED, gap_ms=20.0)
    want = expected(models(), prompts)
    shared = serve(models(), prompts, pages=640 // page_size, page_size=page_size)
    assert shared.tokens == want
    assert shared.counts.forks == 5 and 240 <= shared.counts.shared_tokens <= 4 * 60 + 37
    apart = serve(models(), prompts, pages=640 // page_size, page_size=page_size, share=False)
    assert apart.tokens == want
    assert apart.counts.forks == apart.counts.shared_tokens == 0
    fewer = apart.counts.computed_tokens - shared.counts.computed_tokens
    assert fewer == shared.counts.shared_tokens


def test_a_finished_request_lends_its_prefix(models, expected):
    first, second = prompts_of((60, 4, 5), (60, 3, 5))
    late = replace(second, arrival_ms=1e6)
    outcome = serve(models(), [first, late])
    assert outcome.counts.forks == 1 and outcome.counts.shared_tokens == 60
    assert outcome.tokens == expected(models(), [first, late])


@pytest.mark.parametrize("share", [True, False])
def test_too_few_pages_for_all(models, expected, share):
    """Pages for two requests' ends: the young ones wait, or come again from the beginning."""
    prompts = prompts_of(*[(24, 4, 40)] * 5)
    outcome = serve(models(), prompts, pages=18, share=share)
    assert outcome.tokens == expected(models(), prompts)
    assert outcome.counts.preemptions > 0 and outcome.counts.least_pages_free == 0
    assert outcome.counts.evictions > 0 or not share


def test_requests_wait_for_pages(models, expected):
    prompts = prompts_of(*[(0, 60, 3)] * 4)
    outcome = serve(models(), prompts, pages=20, share=False)
    assert outcome.counts.most_running == 2 and outcome.counts.preemptions == 0
    assert outcome.tokens == expected(models(), prompts)


def test_what_cannot_be_served_is_refused(models):
    prompts = prompts_of((0, 60, 5))
    with pytest.raises(ValueError, match="request 0: its 65 tokens need 9 pages, expected at most"):
        serve(models(), prompts, pages=8)
    with pytest.raises(ValueError, match="max_running: expected 1 to the budget of 3 tokens"):
        serve(models(), prompts, budget=3)


@pytest.mark.parametrize("seed", [0, 1, 2, *map(full_only, range(3, 8))])
def test_whatever_the_policy(models, expected, seed):
    rng = np.random.default_rng(100 + seed)
    lengths = [(int(rng.choice([0, 20, 45])), *rng.integers(1, 40, 2)) for _ in range(7)]
    prompts = prompts_of(*lengths, gap_ms=float(rng.choice([0, 30, 90])), seed=seed)
    page_size = int(rng.choice([1, 4, 16]))
    longest = max(-(-p.goal // page_size) for p in prompts)
    budget = int(rng.integers(4, 40))
    outcome = serve(
        models(), prompts, pages=longest + int(rng.integers(0, longest)), page_size=page_size,
        budget=budget, max_running=int(rng.integers(1, min(budget, 7))),
        share=bool(rng.integers(2)),
        server={"ahead": int(rng.integers(2)), "own_copy_stream": bool(rng.integers(2))},
    )  # fmt: skip
    assert outcome.tokens == expected(models(), prompts)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3", "int8"])
def test_other_caches_against_a_pass_that_rounds_alike(models, dtype):
    from serving.report import check_tokens

    prompts = prompts_of(*SHARED)
    outcome = serve(models(), prompts, dtype=dtype)
    checked = check_tokens(models(), prompts, outcome.tokens, dtype)
    assert checked.tokens == sum(p.output_length for p in prompts)
    assert checked.ties < 0.1 * checked.tokens


def test_matrices_in_float16(device):
    """Close to float32, and its own plain pass gives the tokens."""
    from serving.llama import Llama, random_weights
    from serving.report import check_tokens

    full = small_model(device)
    half = Llama(
        device, full.config, random_weights(device, full.config, dtype=np.float16), context=256
    )
    tokens = np.arange(50)
    near, want = (device.to_numpy(m.forward_plain(tokens)) for m in (half, full))
    assert 0 < np.abs(near - want).max() < 0.05
    prompts = prompts_of(*MIXED)
    assert check_tokens(half, prompts, serve(half, prompts).tokens, "fp16").tokens == 63


# What is reported ----------------------------------------------------------------------------


def test_a_wrong_token_is_noticed(models, expected):
    from serving.report import WrongTokens, check_tokens

    prompts = prompts_of((0, 9, 6), (0, 12, 5))
    outputs = [list(tokens) for tokens in expected(models(), prompts)]
    assert check_tokens(models(), prompts, outputs, "fp32").ties == 0
    outputs[1][3] = (outputs[1][3] + 1) % VOCAB
    with pytest.raises(WrongTokens, match="request 1, output 3 of 5: expected"):
        check_tokens(models(), prompts, outputs, "fp32")
    with pytest.raises(WrongTokens, match="request 0: expected 6 tokens, got 5"):
        check_tokens(models(), prompts, [outputs[0][:5], outputs[1]], "fp32")


def test_hidden_share_is_what_overlaps():
    from serving.report import hidden_share

    spans = [
        Span("copy", "tables", 10, 10),  # the compute stream is busy until 15
        Span("copy", "tables", 40, 10),  # and idle from 30 on
        Span("copy_pages", "tables", 0, 9),  # no table
        Span("qkv", "compute", 0, 12),
        Span("mlp", "compute", 8, 7),
        Span("mlp", "compute", 18, 12),
        Span("copy", "compute", 60, 5),
    ]
    found = hidden_share(spans)
    assert found == {"copies": 2, "copy_us": 20, "hidden_us": 7, "hidden": 0.35}
    assert hidden_share(spans[3:])["hidden"] == 0.0


def test_step_times_and_the_steps_to_draw():
    from serving.report import drawn_steps, step_times

    assert step_times([[5, 1, 9], [4, 2, 30]]) == {"median_us": 4.5, "least_us": 4}
    steps = [(0, 9), (1, 9), (1, 0), (1, 0), (2, 7), (3, 0)]
    assert drawn_steps(steps, 4) == (4, 6)
    assert drawn_steps(steps[:4], 2) == (1, 3)


# The command ---------------------------------------------------------------------------------


def demo(device_name, *arguments):
    import serve_demo

    run = ["--device", device_name, "--requests", "8", "--rounds", "1", "--budget", "48"]
    run += ["--output-tokens", "8"]
    model = ["--layers", "2", "--hidden", "64", "--vocab", str(VOCAB)]
    return serve_demo.main([*run, *model, *map(str, arguments)])


@pytest.mark.usefixtures("lenient_host")
def test_demo_reports(device_name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, path = tmp_path / "out", tmp_path / "new" / "report.json"
    assert (
        demo(device_name, "--json", path, "--out", out, "--pages", 40, "--output-tokens", 16) == 0
    )
    report = json.loads(path.read_text())
    for key in ("device", "processor", "versions", "date", "commit", "config"):
        assert key in report
    assert report["requests"] == 8 and report["num_pages"] == 40 and report["ahead"] == 1
    assert set(report["tables"]) == {"on a stream of their own", "on the compute stream"}
    for row in report["tables"].values():
        assert row["median_us"] >= row["least_us"] > 0 and row["tokens_per_s"] > 0
    copied = report["tables_copied"]
    assert copied["copies"] >= report["steps"] > 0 and copied["copy_us"] > 0
    assert 0 <= copied["hidden"] <= 1
    assert copied["hidden"] == pytest.approx(copied["hidden_us"] / copied["copy_us"])
    assert report["counts"]["forks"] > 0 and report["counts"]["shared_tokens"] >= 72
    assert report["checked"] == {"tokens": report["output_tokens"], "ties": 0}
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"tables", "compute"} <= lanes
    assert {"embed", "qkv", "mlp", "logits", "copy"} <= {e["name"] for e in events}
    assert (out / "timeline.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert f"{report['output_tokens']} tokens are those of a plain uncached pass" in printed


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
