"""Small Llama models: random ones, and those that transformers makes and saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

VOCAB = 199
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# What differs from a small Llama: hidden 48, 4 query heads, 2 layers, plain rotation.
SAVED = {
    "plain": {},
    "GQA": {"num_key_value_heads": 2},
    "one KV head, biases": {
        "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2,
    },
    "llama3 rope": {
        "num_key_value_heads": 2,
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
        "max_position_embeddings": 512,
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
        "max_position_embeddings": 256,
    },
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32, "num_key_value_heads": 2},
}  # fmt: skip


def save_model(folder, case: str, *, dtype: str = "float32", changes: Any = (), **options: Any):
    """Save a random model of transformers' own, and return it as float32.

    `changes` are those of its config, `options` go to `save_pretrained`. What is saved is of
    `dtype`; the model returned has the very same weights.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    settings = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256,
    }  # fmt: skip
    config = transformers.LlamaConfig(**{**settings, **SAVED[case], **dict(changes)})
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # large enough that scores and biases matter
        for name, parameter in model.named_parameters():
            wide = "embed" in name and not config.tie_word_embeddings
            parameter.normal_(0.0, 1.0 if wide else parameter.shape[-1] ** -0.5)
            if "norm" in name:
                parameter.add_(1.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    # Read again, for `to` has rounded more than the weights: the frequencies of the rotation too.
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(device, folder, **options: Any):
    """Load what `save_model` has saved, by the scripts' own loader."""
    from serving.llama import Llama
    from serving.llama_files import load_weights, read_config

    config = read_config(folder)
    return Llama(device, config, load_weights(device, folder, config), **options)


def small_model(device, *, seed: int = 0, context: int = 256, **changes: Any):
    """Return a random model of two layers."""
    from serving.llama import Llama, LlamaConfig
    from serving.llama_files import random_weights

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


def transformers_greedy(model, prompt, length: int) -> list[int]:
    """Decode greedily with transformers, likewise."""
    tokens = list(map(int, prompt))
    for _ in range(length):
        tokens.append(int(transformers_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def transformers_logits(model, tokens) -> np.ndarray:
    """Return transformers' logits (T, vocab) of a sequence."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for one another longer than a small model computes
    try:
        with torch.no_grad():
            return model(torch.tensor([list(map(int, tokens))]), use_cache=False).logits[0].numpy()
    finally:
        torch.set_num_threads(threads)
