"""Weights of a Llama model: read from a folder in Hugging Face layout, or random with a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .llama import Layer, LlamaConfig, Weights

Array = np.ndarray[Any, Any]
Read = Callable[[str], "Array | None"]  # returns a tensor by name, or None
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ATTENTION, MLP = "self_attn", "mlp"


def read_config(folder: str | Path) -> LlamaConfig:
    """Read `config.json` of a folder.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It describes another architecture, or lacks a number; the message names the file.
    """
    path = Path(folder) / "config.json"
    entries = json.loads(path.read_text())
    kind, activation = entries.get("model_type"), entries.get("hidden_act", "silu")
    if kind != "llama" or activation != "silu":
        raise ValueError(f"{path}: expected a llama with silu, got {kind!r} with {activation!r}")
    try:
        return _config(entries)
    except KeyError as error:
        raise ValueError(f"{path}: expected an entry {error}") from error


def _config(entries: Mapping[str, Any]) -> LlamaConfig:
    # Older files have rope_theta and rope_scaling, newer ones have rope_parameters with both.
    parameters = dict(entries.get("rope_parameters") or entries.get("rope_scaling") or {})
    base = float(parameters.pop("rope_theta", None) or entries.get("rope_theta") or 10000.0)
    longest = int(entries["max_position_embeddings"])
    if parameters.get("rope_type", parameters.get("type")) == "dynamic":
        parameters.setdefault("original_max_position_embeddings", longest)
    heads = int(entries["num_attention_heads"])
    return LlamaConfig(
        vocab=int(entries["vocab_size"]),
        hidden=int(entries["hidden_size"]),
        intermediate=int(entries["intermediate_size"]),
        layers=int(entries["num_hidden_layers"]),
        q_heads=heads,
        kv_heads=int(entries.get("num_key_value_heads") or heads),
        head_dim=int(entries.get("head_dim") or entries["hidden_size"] // heads),
        norm_eps=float(entries.get("rms_norm_eps", 1e-6)),
        rope_base=base,
        rope_scaling=parameters or None,
        max_positions=longest,
        tied=bool(entries.get("tie_word_embeddings", False)),
        attention_bias=bool(entries.get("attention_bias", False)),
        mlp_bias=bool(entries.get("mlp_bias", False)),
    )


def load_weights(
    device: Any, folder: str | Path, config: LlamaConfig, *, dtype: Any = np.float32
) -> Weights:
    """Upload the tensors of a folder to a device.

    Parameters
    ----------
    dtype : of the matrices: float32 or float16

    Raises
    ------
    ImportError
        The package safetensors is missing.
    ValueError
        A tensor is missing or has another shape; the message names it.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "weights from a file need safetensors: pip install safetensors"
        ) from error
    folder = Path(folder)
    index = folder / INDEX
    # The framework "np" gives bf16 as ml_dtypes.bfloat16.
    if index.exists():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / SINGLE, framework="np") as file:
            places = dict.fromkeys(file.keys(), SINGLE)

    def read(name: str) -> Array | None:
        if name not in places:
            return None
        with safe_open(folder / places[name], framework="np") as file:
            tensor: Array = file.get_tensor(name)
        return tensor

    return assemble(device, config, read, dtype)


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
    """Return the shapes of a model's tensors, by their names in files."""
    hidden, inner = config.hidden, config.intermediate
    q_width, kv_width = (n * config.head_dim for n in (config.q_heads, config.kv_heads))
    products = {
        f"{ATTENTION}.q_proj": (q_width, hidden),
        f"{ATTENTION}.k_proj": (kv_width, hidden),
        f"{ATTENTION}.v_proj": (kv_width, hidden),
        f"{ATTENTION}.o_proj": (hidden, q_width),
        f"{MLP}.gate_proj": (inner, hidden),
        f"{MLP}.up_proj": (inner, hidden),
        f"{MLP}.down_proj": (hidden, inner),
    }
    biased = {ATTENTION: config.attention_bias, MLP: config.mlp_bias}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for number in range(config.layers):
        at = f"model.layers.{number}."
        for name, shape in products.items():
            shapes[f"{at}{name}.weight"] = shape
            if biased[name.partition(".")[0]]:
                shapes[f"{at}{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (hidden,)
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

    def vector(*names: str) -> Any:
        if names[0] not in shapes:
            return None
        return device.asarray(np.concatenate([tensor(name).astype(np.float32) for name in names]))

    def layer(number: int) -> Layer:
        at = f"model.layers.{number}."
        qkv = [f"{at}{ATTENTION}.{part}_proj" for part in "qkv"]
        gate_up = [f"{at}{MLP}.{part}_proj" for part in ("gate", "up")]
        out, down = f"{at}{ATTENTION}.o_proj", f"{at}{MLP}.down_proj"
        return Layer(
            input_norm=vector(f"{at}input_layernorm.weight"),
            qkv=matrix(*qkv),
            qkv_bias=vector(*(f"{name}.bias" for name in qkv)),
            out=matrix(out),
            out_bias=vector(f"{out}.bias"),
            mlp_norm=vector(f"{at}post_attention_layernorm.weight"),
            gate_up=matrix(*gate_up),
            gate_up_bias=vector(*(f"{name}.bias" for name in gate_up)),
            down=matrix(down),
            down_bias=vector(f"{down}.bias"),
        )

    embedding = device.asarray(tensor("model.embed_tokens.weight").astype(dtype))
    return Weights(
        embedding=embedding,
        layers=[layer(number) for number in range(config.layers)],
        norm=vector("model.norm.weight"),
        head=embedding.T if config.tied else matrix("lm_head"),
    )
