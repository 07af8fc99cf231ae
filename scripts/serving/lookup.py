"""A Llama that looks tokens up: its weights are made so that it repeats what followed before.

    layer 0   attends to the token before        x = [token | token before |           ]
    layer 1   attends to where that token was    x = [token | token before | token then]
              the token before

So what it says stands in the cache, as far back as its text does, and is right or wrong. That takes
a text in which no token occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .llama import Array, LlamaConfig, assemble, tensor_shapes
from .requests import Prompt

WIDTH = 64  # of the head, and of a token's code
BASE = 1e9  # of RoPE: pairs from SLOW on turn by less than a quarter within 2,048 tokens
SLOW = 14
BIAS, SHARPNESS = 17.3, 9.0  # of the scores of layer 0, and of layer 1


def lookup_config(vocab: int) -> LlamaConfig:
    return LlamaConfig(
        vocab=vocab, hidden=3 * WIDTH, intermediate=2, layers=2, q_heads=1, kv_heads=1,
        head_dim=WIDTH, rope_base=BASE, qkv_bias=True,
    )  # fmt: skip


def lookup_weights(
    device: Any, config: LlamaConfig, *, seed: int = 0, dtype: Any = np.float32
) -> Any:
    """Make the weights: codes of tokens are drawn, all else follows."""
    tensors = lookup_tensors(config, seed)
    read: Callable[[str], Array | None] = tensors.get
    return assemble(device, config, read, dtype)


def lookup_tensors(config: LlamaConfig, seed: int) -> Mapping[str, Array]:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor[...] = 1.0
    slow = np.arange(WIDTH) % (WIDTH // 2) >= SLOW
    codes = np.random.default_rng(seed).standard_normal((config.vocab, WIDTH))
    for part in (slow, ~slow):  # of the same length each, so that each code fits itself best
        codes[:, part] *= np.sqrt(part.sum()) / np.linalg.norm(codes[:, part], axis=1)[:, None]
    token, before, then = (slice(n * WIDTH, (n + 1) * WIDTH) for n in range(3))
    tensors["model.embed_tokens.weight"][:, token] = codes
    tensors["lm_head.weight"][:, then] = codes
    unit = np.eye(WIDTH, dtype=np.float32)

    # Layer 0. All keys are the same and all queries too, one position behind them.
    at = "model.layers.0.self_attn."
    angles = BASE ** (-np.arange(SLOW) / (WIDTH // 2))
    tensors[f"{at}k_proj.bias"][:SLOW] = BIAS
    tensors[f"{at}q_proj.bias"][:SLOW] = BIAS * np.cos(angles)
    tensors[f"{at}q_proj.bias"][WIDTH // 2 : WIDTH // 2 + SLOW] = -BIAS * np.sin(angles)
    tensors[f"{at}v_proj.weight"][:, token] = unit / np.sqrt(3)  # what the norm multiplies by
    tensors[f"{at}o_proj.weight"][before] = unit

    # Layer 1. A query is its token, a key the token before it; the slow pairs hardly rotate.
    at = "model.layers.1.self_attn."
    tensors[f"{at}q_proj.weight"][:, token] = SHARPNESS * unit * slow
    tensors[f"{at}k_proj.weight"][:, before] = unit * slow
    tensors[f"{at}v_proj.weight"][:, token] = unit / np.sqrt(1.5)
    tensors[f"{at}o_proj.weight"][then] = unit
    return tensors


def lookup_prompts(
    count: int, vocab: int, prompt_tokens: int, output_tokens: int, *, seed: int = 0
) -> tuple[list[Prompt], list[list[int]]]:
    """Return texts whose last token occurs in them before, and the tokens that follow it there.

    What is asked for moves from the beginning of the text to its end, request by request.
    """
    rng = np.random.default_rng(seed)
    prompts, answers = [], []
    for number in range(count):
        text = rng.permutation(vocab)[: prompt_tokens - 1]
        last = len(text) - output_tokens - 1
        at = 1 + round((last - 1) * number / max(count - 1, 1))
        prompts.append(Prompt(number, 0.0, np.append(text, text[at]), output_tokens))
        answers.append(text[at + 1 : at + 1 + output_tokens].tolist())
    return prompts, answers
