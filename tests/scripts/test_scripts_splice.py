"""scripts/splice_study.py: that documents are spliced as it says, with a random model."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("scripts_on_path")


@pytest.fixture
def model(scripts_on_path):
    from serving.llama import Llama, LlamaConfig, random_weights

    config = LlamaConfig(
        vocab=61, hidden=64, intermediate=96, layers=3, q_heads=4, kv_heads=2, head_dim=32
    )
    device = kv.device("host")
    return Llama(device, config, random_weights(device, config, seed=3), context=256)


def prompt_of(seed, *, prefix=9, documents=(20, 13), following=11):
    from splice_study import Prompt

    draw = np.random.default_rng(seed).integers
    first, *others, last = (draw(0, 61, n) for n in (prefix, *documents, following))
    return Prompt(first, tuple(others), last)


def test_a_full_prefill_is_the_models_own_pass(model):
    """A prompt of which nothing is spliced: prefix, documents and what follows, in this order."""
    from splice_study import Reader, Way

    prompt = prompt_of(1)
    got = Reader(model, "fp32", prompt.tokens).read(prompt, Way(recomputed=None))
    tokens = np.concatenate([prompt.prefix, *prompt.documents, prompt.following])
    logits = np.asarray(model.forward_plain(tokens), np.float64)[-len(prompt.following) :]
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_document_without_a_prefix_loses_nothing(model):
    """It saw all there was to see; and behind a prefix it differs, less with its keys moved."""
    from splice_study import Reader, Way, study

    alone = prompt_of(2, prefix=0, documents=(20,))
    reader = Reader(model, "fp32", alone.tokens)
    np.testing.assert_allclose(
        reader.read(alone, Way(recomputed=0)), reader.read(alone, Way(recomputed=None)), atol=1e-4
    )
    ways = [Way(recomputed=None), Way(recomputed=99), Way(recomputed=0), Way(left_out=True)]
    full, same, spliced, left_out = study(model, [prompt_of(s) for s in range(4)], ways)
    assert full["divergence"] == 0 and full["same_token"] == 1
    assert same["divergence"] < 1e-6 < spliced["divergence"] < left_out["divergence"]


def test_keys_that_are_not_moved(model, monkeypatch):
    """The control writes the keys of the document as they were."""
    from splice_study import Reader, Way

    prompt = prompt_of(5, documents=(8,))
    seen = []
    reader = Reader(model, "fp32", prompt.tokens)
    remove = reader.cache.remove_sequence

    def note(name):
        if name == "document":
            seen.append([reader.cache.get_kv(n, *span)[0].copy()
                         for n, span in (("prompt", (9, 17)), ("document", (0, 8)))])  # fmt: skip
        remove(name)

    monkeypatch.setattr(reader.cache, "remove_sequence", note)
    reader.read(prompt, Way(shifted=False))
    reader.read(prompt, Way())
    (unmoved, own), (moved, _) = seen
    assert (unmoved == own).all() and np.abs(moved - own).max() > 0.1


def test_prompts_are_cut_out_of_a_text():
    import argparse

    from splice_study import prompts_of

    options = argparse.Namespace(prompts=3, prefix=7, documents=2, document=10, following=5)
    prompts = prompts_of(range(400), options)
    assert len(prompts) == 3
    for prompt in prompts:
        text = np.concatenate([*prompt.documents, prompt.following])
        assert (np.diff(text) == 1).all() and prompt.tokens == 7 + 25
        assert prompt.prefix[0] == 200 + text[0]


def test_without_a_model(capsys, monkeypatch):
    import splice_study

    monkeypatch.setattr(splice_study, "find_model", lambda path: None)
    assert splice_study.main(["--quick"]) == 2
    assert "--model: expected a GGUF file" in capsys.readouterr().err
