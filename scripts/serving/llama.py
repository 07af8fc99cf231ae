"""A Llama model on NumPy or CuPy: an uncached forward pass, and a step through a paged cache.

    tokens -> embed -> [norm, qkv | attention | out, norm, mlp] x layers -> norm, head -> argmax

The parts between bars are array expressions on one stream; attention is explicit in the uncached
pass, and `PagedKVCache.attention_qkv` in a step. Everything runs in the library of the weights'
arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common.measure import run_named

import kvcupy as kv
from kvcupy import reference
from kvcupy.formats import FORMATS

Attend = Callable[[Any, Any, Any], Any]
"""Takes queries, keys and values (T, heads, D) of a layer before RoPE; returns (T, q_heads, D)."""

Array = np.ndarray[Any, Any]
Read = Callable[[str], "Array | None"]
"""Returns the tensor of a name, or None if there is none."""

NORMS = "input_layernorm", "post_attention_layernorm"


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model.

    Attributes
    ----------
    tied : whether the head is the embedding
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    tied: bool = False

    @property
    def qkv_heads(self) -> int:
        """Heads of the packed projection: queries, then keys, then values."""
        return self.q_heads + 2 * self.kv_heads


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, transposed: (inputs, outputs)."""

    input_norm: Any  # (hidden,)
    qkv: Any  # (hidden, qkv_heads * head_dim)
    out: Any  # (q_heads * head_dim, hidden)
    mlp_norm: Any  # (hidden,)
    gate_up: Any  # (hidden, 2 * intermediate)
    down: Any  # (intermediate, hidden)


@dataclass(frozen=True)
class Weights:
    """Weights of a model: matrices in the compute dtype, norms and biases in float32."""

    embedding: Any  # (vocab, hidden)
    layers: Sequence[Layer]
    norm: Any  # (hidden,)
    head: Any  # (hidden, vocab)


class Buffers:
    """What steps read and write, allocated once for the largest: no step frees memory in use.

    Attributes
    ----------
    pinned_in : int64 (slots, 3, tokens): ids, feeds and rows of a step, one slot per step in flight
    pinned_next : int64 (slots, tokens): the tokens that a step has chosen, once its copy is done
    """

    def __init__(self, device: Any, config: LlamaConfig, tokens: int, slots: int = 1) -> None:
        heads, width = config.qkv_heads, config.head_dim
        self.pinned_in = device.empty_pinned((slots, 3, tokens), np.int64)
        self.pinned_next = device.empty_pinned((slots, tokens), np.int64)
        self.inputs, self.next = (device.zeros(s, np.int64) for s in ((3, tokens), (tokens,)))
        self.x = device.zeros((tokens, config.hidden), np.float32)
        self.qkv = device.zeros((tokens, heads, width), np.float32)
        self.attended = device.zeros((tokens, config.q_heads, width), np.float32)


class Llama:
    """A model with its weights on one device.

    Parameters
    ----------
    context : the length of the rope table
    """

    def __init__(self, device: Any, config: LlamaConfig, weights: Weights, *, context: int) -> None:
        self.device, self.config, self.weights = device, config, weights
        self.rope = kv.rope_table(context, config.head_dim, base=config.rope_base, device=device)

    # Parts of both passes: array expressions, which the caller enqueues on a stream.

    def embed(self, tokens: Any) -> Any:
        """Return float32 (T, hidden) of token ids (T,)."""
        return self.weights.embedding[tokens].astype(np.float32)

    def project(self, layer: Layer, x: Any) -> Any:
        """Return queries, keys and values (T, q_heads + 2 * kv_heads, head_dim), not rotated."""
        normed = rms_norm(x, layer.input_norm, self.config.norm_eps)
        packed = linear(normed, layer.qkv)
        return packed.reshape(len(x), self.config.qkv_heads, self.config.head_dim)

    def finish_layer(self, layer: Layer, x: Any, attended: Any) -> Any:
        """Return the layer's output from its input and attention's output."""
        x = x + linear(attended.reshape(len(x), -1), layer.out)
        normed = rms_norm(x, layer.mlp_norm, self.config.norm_eps)
        gate, up = halves(linear(normed, layer.gate_up))
        return x + linear(silu(gate) * up, layer.down)

    def logits(self, x: Any) -> Any:
        """Return float32 (T, vocab) from the last layer's output."""
        return linear(rms_norm(x, self.weights.norm, self.config.norm_eps), self.weights.head)

    # The passes.

    def forward_plain(
        self, tokens: Any, *, cache_dtype: str = "fp32", attend: Attend | None = None
    ) -> Any:
        """Compute the logits of a whole sequence, without a cache.

        Parameters
        ----------
        tokens : ids (T,)
        cache_dtype : the format that keys and values are rounded to, as in a cache; quantised
            formats with one scale per token and head
        attend : rotates and attends instead

        Returns
        -------
        float32 (T, vocab) on the model's device, in the current stream of its library
        """
        xp = module_of(self.weights.embedding)
        ids = self.device.asarray(np.asarray(tokens, np.int64))
        q_heads, kv_heads = self.config.q_heads, self.config.kv_heads
        x = self.embed(ids)
        for layer in self.weights.layers:
            qkv = self.project(layer, x)
            if attend is not None:
                parts = np.split(qkv, (q_heads, q_heads + kv_heads), axis=1)
                x = self.finish_layer(layer, x, attend(*parts))
                continue
            rotated = rotate(qkv[:, : q_heads + kv_heads], self.rope[: len(x)])
            query, key = rotated[:, :q_heads], rounded(rotated[:, q_heads:], cache_dtype)
            value = rounded(qkv[:, q_heads + kv_heads :], cache_dtype)
            x = self.finish_layer(layer, x, causal_attention(xp, query, key, value))
        return self.logits(x)

    def forward_step(
        self, cache: Any, buffers: Buffers, inputs: tuple[Array, Array, Array], stream: Any, *,
        slot: int = 0,
    ) -> None:  # fmt: skip
        """Enqueue a step, which leaves greedy next tokens in `buffers.pinned_next[slot]`.

        Parameters
        ----------
        cache : a PagedKVCache between begin_forward and end_forward
        inputs : token ids (T,); feeds (T,), where not -1 the row of the step before that chose the
            token in place of its id; rows (R,), the tokens whose successors are needed
        slot : of the pinned buffers, which no step in flight uses
        """
        device, pinned = self.device, buffers.pinned_in[slot]
        t, r = len(inputs[0]), len(inputs[2])
        pinned[0, :t], pinned[1, :t], pinned[2, :r] = inputs
        device.copy(buffers.inputs, pinned, stream=stream)
        ids, feeds, selected = buffers.inputs[0, :t], buffers.inputs[1, :t], buffers.inputs[2, :r]
        x, qkv, attended = buffers.x[:t], buffers.qkv[:t], buffers.attended[:t]
        xp = module_of(x)

        def embed() -> None:
            # A feed of -1 indexes an element that is not used.
            x[...] = self.embed(xp.where(feeds < 0, ids, buffers.next[feeds]))

        def choose() -> None:
            buffers.next[:r] = self.logits(x[selected]).argmax(axis=-1)

        run_named(device, "embed", embed, stream)
        for number, layer in enumerate(self.weights.layers):

            def project(layer: Layer = layer) -> None:
                qkv[...] = self.project(layer, x)

            def finish(layer: Layer = layer) -> None:
                x[...] = self.finish_layer(layer, x, attended)

            run_named(device, "qkv", project, stream)
            cache.attention_qkv(number, qkv, out=attended, stream=stream)
            run_named(device, "mlp", finish, stream)
        if r:
            run_named(device, "logits", choose, stream)
            device.copy(buffers.pinned_next[slot, :r], buffers.next[:r], stream=stream)


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Divide rows by their root mean square, in float32."""
    xp = module_of(x)
    mean = xp.mean(x * x, axis=-1, keepdims=True)
    return x / xp.sqrt(mean + np.float32(eps)) * weight


def linear(x: Any, weight: Any) -> Any:
    """Multiply in the weight's format; return float32."""
    return (x.astype(weight.dtype, copy=False) @ weight).astype(np.float32, copy=False)


def silu(x: Any) -> Any:
    """Return x * sigmoid(x), by a form that does not overflow."""
    xp = module_of(x)
    return x * (np.float32(0.5) * (xp.tanh(np.float32(0.5) * x) + np.float32(1)))


def halves(x: Any) -> tuple[Any, Any]:
    """Return views of the first and the second half of each row."""
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def rotate(heads: Any, table: Any) -> Any:
    """Rotate (T, heads, D) by the rows (T, D) of a rope table, pairs half a head apart."""
    xp = module_of(heads)
    first, second = halves(heads)
    cos, sin = halves(table[:, None, :])
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rounded(heads: Any, dtype: str) -> Any:
    """Return float32 (T, heads, D) rounded as a cache in a format stores them."""
    xp = module_of(heads)
    if dtype == "fp32":
        return heads
    on_host = np.ascontiguousarray(heads if xp is np else heads.get())
    scale = np.float32(1)
    if (limit := FORMATS[dtype].limit) is not None:
        largest = np.abs(on_host).max(axis=-1, keepdims=True)
        scale = np.maximum(largest, np.float32(1e-6)) / np.float32(limit)
    exact = reference.decode(reference.encode(on_host / scale, dtype), dtype)
    return xp.asarray(exact.astype(np.float32) * scale)


def module_of(array: Any) -> Any:
    """Return the module whose functions take an array: numpy or cupy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def causal_attention(xp: Any, query: Any, key: Any, value: Any) -> Any:
    """Attend explicitly to all earlier keys.

    query (T, Hq, D), key and value (T, H, D); returns (T, Hq, D)
    """
    t, q_heads, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(t, kv_heads, q_heads // kv_heads, width).transpose(1, 2, 0, 3)
    scores = grouped @ key.transpose(1, 2, 0)[:, None] * np.float32(width**-0.5)
    scores = xp.where(xp.tri(t, dtype=bool), scores, np.float32(-np.inf))
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = weights @ value.transpose(1, 0, 2)[:, None]  # (H, G, T, D)
    return attended.transpose(2, 0, 1, 3).reshape(t, q_heads, width)


# Weights ----------------------------------------------------------------------------------------


def random_weights(
    device: Any, config: LlamaConfig, *, seed: int = 0, dtype: Any = np.float32
) -> Weights:
    """Draw normal weights, scaled so that every product keeps the magnitude of its input."""
    shapes = tensor_shapes(config)
    streams = dict(zip(shapes, np.random.default_rng(seed).spawn(len(shapes)), strict=True))

    def draw(name: str) -> Array | None:
        if name not in shapes:
            return None
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        # With a tied head, embeddings of size 1 would make the model repeat its input.
        wide = name.endswith("embed_tokens.weight") and not config.tied
        spread = 1.0 if wide else shape[-1] ** -0.5
        return np.float32(spread) * streams[name].standard_normal(shape, np.float32)

    return assemble(device, config, draw, dtype)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors, by their names in files of Hugging Face."""
    hidden, inner = config.hidden, config.intermediate
    q_width, kv_width = (n * config.head_dim for n in (config.q_heads, config.kv_heads))
    products = {
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for number in range(config.layers):
        at = f"model.layers.{number}."
        shapes |= {f"{at}{name}.weight": shape for name, shape in products.items()}
        shapes |= {f"{at}{name}.weight": (hidden,) for name in NORMS}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    return shapes


def assemble(device: Any, config: LlamaConfig, read: Read, dtype: Any) -> Weights:
    """Check tensors, concatenate those that are multiplied together, and upload them."""
    shapes = tensor_shapes(config)

    def tensor(name: str) -> Array:
        array = read(name)
        if array is None or array.shape != shapes[name]:
            got = None if array is None else array.shape
            raise ValueError(f"{name}: expected shape {shapes[name]}, got {got}")
        return array

    def matrix(*names: str) -> Any:
        rows = np.concatenate([tensor(f"{name}.weight").astype(dtype) for name in names])
        return device.asarray(np.ascontiguousarray(rows.T))

    def vector(name: str) -> Any:
        return device.asarray(tensor(name).astype(np.float32))

    def layer(number: int) -> Layer:
        at = f"model.layers.{number}."
        qkv = [f"{at}self_attn.{part}_proj" for part in "qkv"]
        input_norm, mlp_norm = (vector(f"{at}{name}.weight") for name in NORMS)
        return Layer(
            input_norm=input_norm,
            qkv=matrix(*qkv),
            out=matrix(f"{at}self_attn.o_proj"),
            mlp_norm=mlp_norm,
            gate_up=matrix(*(f"{at}mlp.{part}_proj" for part in ("gate", "up"))),
            down=matrix(f"{at}mlp.down_proj"),
        )

    embedding = device.asarray(tensor("model.embed_tokens.weight").astype(dtype))
    return Weights(
        embedding=embedding,
        layers=[layer(number) for number in range(config.layers)],
        norm=vector("model.norm.weight"),
        head=embedding.T if config.tied else matrix("lm_head"),
    )
