"""scripts/serve_demo.py and the Llama under it: the right tokens, however they are served."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers import full_only
from llama_cases import (
    SAVED,
    VOCAB,
    load,
    plain_greedy,
    save_model,
    small_model,
    transformers_greedy,
    transformers_logits,
)

import kvcupy as kv
from kvcupy.ops import call
from kvcupy.timelines.timeline import Span

pytestmark = pytest.mark.usefixtures("scripts_on_path", "quick_host")


def prompts_of(*pairs, gap_ms=0.0, vocab=VOCAB, seed=3):
    """Prompts of (shared, own, output) lengths; the shared tokens are the same for all."""
    from serving.requests import Prompt

    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab, 200)
    return [
        Prompt(n, n * gap_ms, np.concatenate([prefix[:shared], rng.integers(0, vocab, own)]), out)
        for n, (shared, own, out) in enumerate(pairs)
    ]


def serve(
    model, prompts, *, pages=64, page_size=8, dtype="fp32", server=None, settings=None, **policy
):
    """Serve prompts; return what came out."""
    from serving.engine import CacheSettings, Server
    from serving.schedule import Policy

    settings = CacheSettings(pages, page_size, dtype, **(settings or {}))
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


# Old tokens in a narrower format


@pytest.mark.parametrize("speculate", [0, 2])
def test_a_past_that_nobody_reaches_changes_nothing(device, models, expected, speculate):
    """And with one that is reached every request still gets its tokens, and every page is free."""
    model = models()
    prompts = prompts_of((0, 60, 20), (30, 9, 30), (30, 41, 5))
    past = {"past": "fp8_e4m3", "recent": 200, "num_past_pages": 40}
    outcome = serve(model, prompts, settings=past, branches=speculate)
    assert outcome.tokens == expected(model, prompts)
    outcome = serve(model, prompts, settings={**past, "recent": 16, "sinks": 4}, branches=speculate)
    assert [len(tokens) for tokens in outcome.tokens] == [20, 30, 5]


@pytest.mark.full
def test_the_report_on_a_past(capsys, tmp_path):
    import serve_demo

    file = tmp_path / "serve.json"
    small = ["--device", "host", "--layers", "1", "--hidden", "128", "--requests", "2"]
    arguments = [
        *small,
        "--rounds",
        "1",
        "--past",
        "fp8_e4m3",
        "--recent",
        "24",
        "--json",
        str(file),
    ]
    assert serve_demo.main(arguments) == 0
    past = json.loads(file.read_text())["past"]
    assert past["page_bytes"] / past["past_page_bytes"] == past["at_most"] > 3
    assert 1 < past["tokens_in_the_bytes"] < past["at_most"]
    assert 0 < past["same_tokens"] <= past["tokens"]
    assert "cache of fp32 alone" in capsys.readouterr().out


LONG = {"dtype": "bf16", "past": "nvfp4", "recent": 16, "sinks": 4}


@pytest.fixture
def as_users_run(lenient_host, monkeypatch):
    """The builds and the geometry of kernels that users have: these prompts are long."""
    call.forget()
    monkeypatch.setattr(kv.device("host"), "warp_lanes", 1)
    yield
    call.forget()


def compared(device, tokens=150, count=4, **changes):
    """Two caches of the same bytes, with a model that looks its answers up."""
    from serving.capacity import compare
    from serving.llama import Llama
    from serving.lookup import lookup_config, lookup_prompts, lookup_weights
    from serving.schedule import CacheSettings, Policy

    config = lookup_config(512)
    model = Llama(device, config, lookup_weights(device, config), context=tokens + 8)
    prompts, answers = lookup_prompts(count, config.vocab, tokens, 8)
    overflow = [replace(prompt, number=100 + n) for n, prompt in enumerate(2 * prompts)]
    settings = CacheSettings(1, 4, **{**LONG, **changes})
    return compare(model, settings, Policy(budget=16, max_running=4), prompts, overflow, answers)


@pytest.mark.usefixtures("as_users_run")
def test_what_two_caches_of_the_same_bytes_hold(device_name, tmp_path, capsys):
    """Three times the tokens, the same answers from them, and nothing is held at the end."""
    import serve_demo

    file = tmp_path / "long.json"
    arguments = [
        *("--device", device_name, "--dtype", "bf16", "--past", "nvfp4", "--recent", "16"),
        *("--sinks", "4", "--prompt-tokens", "400", "--page-size", "4", "--requests", "4"),
        *("--budget", "24", "--output-tokens", "8", "--layers", "1", "--hidden", "128"),
    ]
    assert serve_demo.main([*arguments, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert set(report["models"]) == {"lookup", "random"}
    for model in report["models"].values():
        plain, mixed = model["plain"], model["mixed"]
        assert mixed["bytes"] <= plain["bytes"] < mixed["bytes"] + model["page_bytes"]
        for row in (plain, mixed):
            assert row["bytes"] == (
                row["pages"] * model["page_bytes"] + row["past_pages"] * model["past_page_bytes"]
            )
            assert row["pages_held"] == row["pages"]  # full
            assert row["pages_held_when_empty"] == 0
        assert model["times_the_tokens"] == mixed["tokens"] / plain["tokens"] >= 3.0
        assert mixed["most_running"] > plain["most_running"]
        assert model["tokens"] == 4 * 8
    lookup = report["models"]["lookup"]
    assert lookup["same_tokens"] == lookup["tokens"] and lookup["same_requests"] == 4
    assert lookup["right_tokens"] == {"plain": 32, "mixed": 32}
    printed = capsys.readouterr().out
    assert "times the tokens in no more bytes" in printed and "32 and 32 are what the" in printed
    from serving.capacity import TooFewTokens

    short = [*arguments, "--prompt-tokens", "60", "--json", str(tmp_path / "none.json")]
    with pytest.raises(TooFewTokens, match=r"expected at least 3\.0: are the prompts too short"):
        serve_demo.main(short)
    assert not (tmp_path / "none.json").exists()
    with pytest.raises(SystemExit):
        serve_demo.main(["--prompt-tokens", "400"])


@pytest.mark.usefixtures("as_users_run")
def test_answers_come_from_the_past(device, monkeypatch):
    """Without what is demoted, the model cannot know them; and pages that are lost are noticed."""
    from serving.capacity import TooFewTokens

    from kvcupy.cache.paged import past
    from kvcupy.cache.pages import PageAllocator

    assert compared(device)["right_tokens"] == {"plain": 32, "mixed": 32}
    with monkeypatch.context() as patch:
        patch.setattr(past, "store_kv", lambda *arguments, **options: None)
        wrong = compared(device)
    assert wrong["right_tokens"]["plain"] == 32 > wrong["right_tokens"]["mixed"]
    assert wrong["same_tokens"] < 32 and wrong["margins"]["where_they_part"]
    free = PageAllocator.free
    with monkeypatch.context() as patch:
        patch.setattr(PageAllocator, "free", lambda self, pages: free(self, np.asarray(pages)[1:]))
        with pytest.raises(TooFewTokens, match="held by an empty cache"):
            compared(device, past="fp8_e4m3", tokens=60)


@pytest.mark.usefixtures("as_users_run")
def test_a_past_lets_more_requests_run(models):
    """A request may be longer than the pages of 16 bits, and several share them."""
    prompts = prompts_of(*[(0, 150, 6)] * 3)
    past = {"past": "fp8_e4m3", "recent": 16, "num_past_pages": 70}
    outcome = serve(models(), prompts, pages=16, settings=past, dtype="bf16", share=False)
    assert [len(tokens) for tokens in outcome.tokens] == [6, 6, 6]
    assert outcome.counts.most_running > 1
    message = "its 156 tokens need 7 pages and 17 of fp8_e4m3, expected at most 16 and 16"
    with pytest.raises(ValueError, match=message):
        serve(models(), prompts, pages=16, settings={**past, "num_past_pages": 16})


# The model against transformers --------------------------------------------------------------


@pytest.mark.parametrize("case", SAVED)
def test_tokens_are_those_of_transformers(device, case, tmp_path):
    hf_model = save_model(tmp_path, case)
    ours = load(device, tmp_path)
    prompts = prompts_of((0, 70, 7), (0, 3, 9), (0, 41, 5))
    want = [transformers_greedy(hf_model, p.tokens, p.output_length) for p in prompts]
    assert [plain_greedy(ours, p.tokens, p.output_length) for p in prompts] == want
    assert serve(ours, prompts).tokens == want


@pytest.mark.parametrize("case", ["GQA", "tied", "one KV head, biases"])
def test_logits_of_bf16_files_in_shards(device, case, tmp_path):
    hf_model = save_model(tmp_path, case, dtype="bfloat16", max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ours = load(device, tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 90)
    want = transformers_logits(hf_model, tokens)
    got = device.to_numpy(ours.forward_plain(tokens))
    assert got.shape == want.shape and got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_longrope_goes_by_the_context(device, tmp_path):
    """Within the original context the short factors hold, though the config allows more."""
    from serving.llama_files import read_config

    rope = {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0], "rope_theta": 10000.0,
        "original_max_position_embeddings": 64, "factor": 4.0,
    }  # fmt: skip
    changes = {"rope_parameters": rope, "max_position_embeddings": 256}
    hf_model = save_model(tmp_path, "plain", changes=changes)
    assert read_config(tmp_path).rope_scaling["factor"] == 4.0
    tokens = np.random.default_rng(0).integers(0, VOCAB, 128)
    for context in (64, 128):
        want = transformers_logits(hf_model, tokens[:context])
        ours = load(device, tmp_path, context=context)
        got = device.to_numpy(ours.forward_plain(tokens[:context]))
        np.testing.assert_allclose(got, want, atol=5e-5)


def test_a_config_of_old_files(tmp_path):
    from serving.llama_files import read_config

    entries = {
        "model_type": "llama", "vocab_size": 11, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128,
        "rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = read_config(tmp_path)
    assert (config.kv_heads, config.head_dim, config.rope_base) == (4, 8, 5e5)
    assert config.rope_scaling == {
        "type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128
    }  # fmt: skip
    for name, value, message in (
        ("model_type", "gpt2", "expected a llama with silu, got 'gpt2'"),
        ("hidden_act", "gelu", "with 'gelu'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**entries, name: value}))
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)
    del entries["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"config\.json: expected an entry 'vocab_size'"):
        read_config(tmp_path)


def test_a_tensor_that_does_not_fit_is_named(device, tmp_path):
    from serving.llama_files import load_weights, read_config

    save_model(tmp_path, "plain")
    config = read_config(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.2\.\S*: expected shape .*, got None"):
        load_weights(device, tmp_path, replace(config, layers=3))
    with pytest.raises(ValueError, match=r"k_proj\.weight: expected shape \(24, 48\), got"):
        load_weights(device, tmp_path, replace(config, kv_heads=2))


def test_random_weights_are_of_their_seed(device):
    tokens = np.arange(20)
    first, again, other = (
        device.to_numpy(small_model(device, seed=seed).forward_plain(tokens)) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again) and not np.allclose(first, other)
    assert 0.3 < first.std() < 3  # neither flat nor one-sided


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


def repetitive(count=5, vocab=VOCAB):
    """Prompts that say the same over and over, so that guesses come true now and then."""
    from serving.requests import Prompt

    rng = np.random.default_rng(0)
    return [
        Prompt(n, 30.0 * n, np.tile(rng.integers(0, vocab, 6), 5)[: 22 + n], 30)
        for n in range(count)
    ]


@pytest.mark.parametrize(("branches", "depth"), [(1, 1), (1, 6), (3, 4), (8, 2)])
def test_guesses_change_no_token(models, expected, branches, depth):
    prompts = repetitive()
    outcome = serve(models(), prompts, branches=branches, depth=depth)
    assert outcome.tokens == expected(models(), prompts)
    counts = outcome.counts
    assert 0 < counts.accepted < counts.guesses
    assert counts.accepted <= depth * counts.tree_steps
    plain = serve(models(), prompts)
    assert len(outcome.step_us) < len(plain.step_us)  # which is what they are for
    assert plain.counts.guesses == plain.counts.tree_steps == 0


def test_trees_forks_and_preemption_together(models, expected):
    prompts = [*repetitive(4), *prompts_of(*SHARED, gap_ms=25.0)]
    prompts = [replace(p, number=n) for n, p in enumerate(prompts)]
    outcome = serve(models(), prompts, pages=24, branches=3, max_running=6)
    assert outcome.tokens == expected(models(), prompts)
    assert outcome.counts.preemptions and outcome.counts.accepted and outcome.counts.forks


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
        share=bool(rng.integers(2)), branches=int(rng.integers(3)), depth=int(rng.integers(1, 5)),
        server={"ahead": int(rng.integers(2)), "own_copy_stream": bool(rng.integers(2))},
    )  # fmt: skip
    assert outcome.tokens == expected(models(), prompts)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3", "int8"])
def test_other_caches_against_a_pass_that_rounds_alike(models, dtype):
    from serving.report import check_tokens

    prompts = prompts_of(*SHARED)
    outcome = serve(models(), prompts, dtype=dtype, branches=2)
    checked = check_tokens(models(), prompts, outcome.tokens, dtype)
    assert checked.tokens == sum(p.output_length for p in prompts)
    assert checked.ties < 0.1 * checked.tokens


def test_matrices_in_float16(device):
    """Close to float32, and its own plain pass gives the tokens."""
    from serving.llama import Llama
    from serving.llama_files import random_weights
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


@dataclass
class Said:
    """A model that says, after any node, the next of a fixed text."""

    text: list

    def after(self, tree, start):
        depth = [0]
        for parent in tree.parents[1:]:
            depth.append(depth[parent] + 1)
        return [self.text[start + d] for d in depth]


def test_guesses_are_what_followed_before():
    from serving.drafts import Tree, draft_tree, longest_match

    history = np.array([1, 2, 3, 8, 9, 1, 2, 3, 7, 5, 1, 2, 3])
    tree = draft_tree(history, branches=2, depth=2, nodes=9)
    assert tree == Tree(tokens=(3, 7, 5, 8, 9), parents=(-1, 0, 1, 0, 3))
    assert draft_tree(history, branches=2, depth=2, nodes=3).tokens == (3, 7, 5)
    assert draft_tree(history, branches=1, depth=1, nodes=9).tokens == (3, 7)
    assert draft_tree(history, branches=2, depth=0, nodes=9) is None
    assert draft_tree(history, branches=2, depth=2, nodes=1) is None
    assert draft_tree(np.array([4, 5, 6]), branches=2, depth=2, nodes=9) is None
    assert draft_tree(np.array([4]), branches=2, depth=2, nodes=9) is None
    for text, path in (([7, 5, 0], [0, 1, 2]), ([8, 0, 0], [0, 3]), ([5, 5, 5], [0])):
        assert longest_match(tree, Said(text).after(tree, 0)) == path


def test_continuations_that_begin_alike_share_nodes():
    from serving.drafts import draft_tree

    history = np.array([1, 6, 2, 4, 1, 6, 3, 4, 1])
    tree = draft_tree(history, branches=2, depth=2, nodes=9)
    assert tree.tokens == (1, 6, 3, 2) and tree.parents == (-1, 0, 1, 1)


def test_prompts_of_a_trace_share_what_its_blocks_share(tmp_path):
    from serving.requests import trace_prompts

    requests = [
        {"timestamp": 0, "input_length": 1500, "output_length": 64, "hash_ids": [5, 6, 7]},
        {"timestamp": 640, "input_length": 1024, "output_length": 1, "hash_ids": [5, 6]},
        {"timestamp": 650, "input_length": 2000, "output_length": 9, "hash_ids": [5, 8]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in requests))
    first, second, third = trace_prompts(path, 9, 1000, scale=32)
    assert [len(p.tokens) for p in (first, second, third)] == [47, 32, 62]
    assert [p.output_length for p in (first, second, third)] == [2, 1, 1]
    assert [p.arrival_ms for p in (first, second, third)] == [0, 20, 650 / 32]
    assert np.array_equal(first.tokens[:32], second.tokens)
    assert np.array_equal(first.tokens[:16], third.tokens[:16])
    assert not np.array_equal(first.tokens[16:32], third.tokens[16:32])
    assert len(trace_prompts(path, 2, 1000)) == 2
    path.write_text("\n")
    with pytest.raises(ValueError, match="at least one request"):
        trace_prompts(path, 2, 1000)


def test_synthetic_prompts_share_system_prompts():
    from serving.requests import synthetic_prompts

    prompts, again = (synthetic_prompts(40, 1000) for _ in range(2))
    assert len({tuple(p.tokens[:72]) for p in prompts}) == 3
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(prompts, again, strict=True))
    assert all(p.output_length >= 1 and len(p.tokens) > 72 for p in prompts)
    assert len({tuple(p.tokens) for p in prompts}) == 40


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
    assert report["acceptance_rate"] is None and report["speculate"] is False
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"tables", "compute"} <= lanes
    assert {"embed", "qkv", "mlp", "logits", "copy"} <= {e["name"] for e in events}
    assert (out / "timeline.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert f"{report['output_tokens']} tokens are those of a plain uncached pass" in printed


@pytest.mark.usefixtures("lenient_host")
def test_demo_speculates_on_a_trace(device_name, tmp_path, capsys):
    lengths = ((2000, 900, [1, 2, 3, 4]), (1500, 1200, [1, 2, 9]), (900, 800, [1, 5]))
    trace, path = tmp_path / "trace.jsonl", tmp_path / "report.json"
    keys = ("input_length", "output_length", "hash_ids")
    requests = [
        {"timestamp": 3200 * i, **dict(zip(keys, r, strict=True))} for i, r in enumerate(lengths)
    ]
    trace.write_text("".join(json.dumps(r) + "\n" for r in requests))
    assert demo(device_name, "--trace", trace, "--speculate", "--json", path) == 0
    report = json.loads(path.read_text())
    assert report["trace"] == "trace.jsonl" and report["requests"] == 3 and report["ahead"] == 0
    counts = report["counts"]
    assert report["acceptance_rate"] == counts["accepted"] / counts["guesses"]
    assert report["tokens_per_tree"] == 1 + counts["accepted"] / counts["tree_steps"]
    assert report["checked"]["tokens"] == report["output_tokens"]
    assert "% accepted" in capsys.readouterr().out


@pytest.mark.usefixtures("lenient_host")
def test_demo_serves_a_saved_model(device_name, tmp_path, capsys):
    save_model(tmp_path, "llama3 rope")
    path = tmp_path / "report.json"
    options = ("--model", tmp_path, "--dtype", "bf16", "--no-sharing", "--json", path)
    assert demo(device_name, *options) == 0
    report = json.loads(path.read_text())
    assert report["config"]["kv_heads"] == 2 and report["checked"] is None
    assert report["counts"]["forks"] == 0
    assert demo(device_name, *options, "--check") == 0
    assert json.loads(path.read_text())["checked"]["tokens"] == report["output_tokens"]


@pytest.mark.usefixtures("lenient_host")
def test_demo_notices_a_wrong_result(device, device_name, monkeypatch):
    if device.name != "host":
        pytest.skip("the wrong result is put there by the host")
    from serving.report import WrongTokens

    attention = kv.PagedKVCache.attention_qkv

    def wrong(self, layer, qkv, *, out, stream, **options):
        attention(self, layer, qkv, out=out, stream=stream, **options)
        device.run(lambda: out.__imul__(np.float32(0.8)), stream)

    monkeypatch.setattr(kv.PagedKVCache, "attention_qkv", wrong)
    with pytest.raises(WrongTokens, match="request 0, output"):
        demo(device_name)


# How often caches give the same tokens ---


def looked_up(device, tokens=120, count=2):
    """A model whose answers stand in its prompts, and settings of a cache with a past."""
    from serving.llama import Llama
    from serving.lookup import lookup_config, lookup_prompts, lookup_weights
    from serving.schedule import CacheSettings, Policy

    config = lookup_config(256)
    model = Llama(device, config, lookup_weights(device, config), context=tokens + 8)
    prompts, answers = lookup_prompts(count, config.vocab, tokens, 6)
    return model, CacheSettings(1, 4, **LONG), Policy(budget=16, max_running=4), prompts, answers


@pytest.mark.usefixtures("as_users_run")
def test_what_caches_agree_about(device, monkeypatch):
    """All of it with a cache of the same format, and nothing of what a cache has lost."""
    from serving.agreement import agreement, parse_settings, read
    from serving.engine import Server

    from kvcupy.cache.paged import past

    model, settings, policy, prompts, answers = looked_up(device)
    rows = agreement(model, settings, policy, prompts, ["=bf16", "nvfp4+hadamard"])
    for part, tokens in (("on_text", 2 * 59), ("own", 2 * 6), ("forced", 2 * 6)):
        assert rows["=bf16"][part]["same_tokens"] == rows["=bf16"][part]["tokens"] == tokens
    assert rows["nvfp4+hadamard"]["own"]["same_requests"] == 2
    assert rows["=bf16"]["page_bytes"] > 3 * rows["nvfp4+hadamard"]["page_bytes"]

    server = Server(model, replace(parse_settings(settings, "=bf16"), num_pages=200), policy)
    plain = read(server, prompts)
    assert plain.own == answers and plain.forced == []
    # Along other tokens it gives what follows those in the text, not what follows its own.
    server.cache.clear()
    text = prompts[0].tokens.tolist()
    others = [text[n] for n in (90, 7, 60, 33, 110, 20)]
    forced = read(server, prompts, [others, answers[1]])
    assert forced.own == answers
    after = [text[n + 1] for n in (90, 7, 60, 33, 110)]
    assert forced.forced == [[answers[0][0], *after], answers[1]]

    monkeypatch.setattr(past, "store_kv", lambda *arguments, **options: None)
    rows = agreement(model, settings, policy, prompts, ["nvfp4+hadamard"])["nvfp4+hadamard"]
    assert rows["own"]["same_requests"] < 2
    assert rows["on_text"]["same_tokens"] < rows["on_text"]["tokens"]


def test_settings_of_a_past_by_name(device):
    from serving.agreement import parse_settings
    from serving.engine import Server

    model, settings, policy, *_ = looked_up(device)
    settings = replace(settings, num_pages=40)
    whole = parse_settings(settings, "=fp8_e4m3")
    assert Server(model, whole, policy).cache.past_pool is None
    named = parse_settings(settings, "nvfp4+hadamard+four_over_six@32")
    assert (named.recent, named.sinks) == (32, 4)
    pool = Server(model, named, policy).cache.past_pool
    assert str(pool.encoding) == "nvfp4+hadamard+four_over_six"
    plain = parse_settings(settings, "int4")
    assert (plain.past, plain.recent) == ("int4", 16)
    with pytest.raises(ValueError, match=r"name: expected an encoding such as .*, got .int4\+dct"):
        parse_settings(settings, "int4+dct")


@pytest.mark.usefixtures("as_users_run")
def test_the_report_of_what_caches_agree_about(device_name, tmp_path, capsys):
    import serve_demo

    file = tmp_path / "agreement.json"
    arguments = [
        *("--device", device_name, "--dtype", "bf16", "--recent", "16", "--sinks", "4"),
        *("--prompt-tokens", "80", "--page-size", "4", "--requests", "2", "--budget", "24"),
        *("--output-tokens", "4", "--layers", "1", "--hidden", "128", "--json", str(file)),
    ]
    assert serve_demo.main([*arguments, "--agreement", "=fp32", "nvfp4+hadamard"]) == 0
    report = json.loads(file.read_text())
    assert {name: list(rows) for name, rows in report["models"].items()} == {
        name: ["=fp32", "nvfp4+hadamard"] for name in ("lookup", "random")
    }
    assert "same along bf16's" in capsys.readouterr().out
