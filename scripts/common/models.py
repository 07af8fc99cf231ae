"""Models whose shapes are measured. Source: their config.json on Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What one GPU of a deployment writes to its KV cache per token and layer.

    Attributes
    ----------
    q_heads, kv_heads : on this GPU; `kv_heads` is 0 for multi-head latent attention, whose row is
        `latent + rope` wide
    window : of the layers with a sliding window, in tokens; 0: there are none
    qk_norm : query and key are normalised before they are rotated
    sinks : each query head has a learned logit that joins the softmax
    """

    name: str
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    rope: int = 0
    window: int = 0
    qk_norm: bool = False
    sinks: bool = False

    @property
    def mla(self) -> bool:
        return self.kv_heads == 0

    @property
    def row_widths(self) -> tuple[int, int]:
        """Elements per token and layer in the two parts of a row: K and V, or latent and rope."""
        if self.mla:
            return self.latent, self.rope
        return self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def projection(self) -> tuple[int, int]:
        """The matrix that projects a hidden state to queries and K/V: (hidden, outputs)."""
        return self.hidden, self.q_heads * self.head_dim + sum(self.row_widths)


MODELS = {
    model.name: model
    for model in (
        Model("llama-3.1-8b", 4096, 32, 32, 8, 128),
        Model("llama-3.1-70b", 8192, 80, 64, 8, 128),
        Model("llama-3.1-70b-tp8", 8192, 80, 8, 1, 128),
        Model("qwen3-8b", 4096, 36, 32, 8, 128, qk_norm=True),
        Model("mistral-7b-v0.1", 4096, 32, 32, 8, 128, window=4096),
        Model("gemma-3-12b", 3840, 48, 16, 8, 256, window=1024, qk_norm=True),
        Model("gpt-oss-20b", 2880, 24, 64, 8, 64, window=128, sinks=True),
        Model("deepseek-v3-mla", 7168, 61, 16, 0, 192, latent=512, rope=64),
    )
}
"""By name; without a suffix, of a whole model. `tp8` and `mla`: one GPU of eight."""
