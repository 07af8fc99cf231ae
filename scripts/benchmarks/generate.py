"""Measure `generate` of transformers: its DynamicCache against kvcupy's PagedCache, in one run.

The model is random, with the shapes of a layer of Qwen3-0.6B (heads 16 / 8, 128 wide). Decoding is
timed token by token, the caches in turns.

    python scripts/bench.py generate --json generate.json

Models of mixed layers are narrow: their mix and context are what matters for the memory per token.

    python scripts/bench.py generate --model gemma3 --batch 1 --context 32768 --chunk 1024
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from common.report import format_table

MODELS = {
    "qwen3": "{} layers of Qwen3-0.6B",
    "gemma3": "{} layers, mixed as in Gemma 3: of 6, 5 with a window of 1,024",
    "granite4": "{} layers, mixed as in Granite 4: of 10, 9 with a Mamba 2 state",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="qwen3", choices=MODELS)
    add("--layers", type=int, help="default: 4, of mixed layers 6 or 10")
    add("--batch", type=int, default=4)
    add("--context", type=int, default=1024, help="tokens of a prompt")
    add("--chunk", type=int, help="tokens of a forward of the prefill; default: the prompt")
    add("--tokens", type=int, help="tokens to decode; default: 64")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Prefill both, then decode a token of each in turns."""
    import torch
    from transformers import DynamicCache

    from kvcupy.interop.transformers import PagedCache

    tokens = options.tokens or (8 if options.quick else 64)
    chunk = options.chunk or options.context
    torch.manual_seed(0)
    place = "cpu" if device.name == "host" else device.name
    dtype = getattr(torch, options.dtype)
    model, num_layers = make_model(options.model, options.layers)
    model = model.eval().to(device=place, dtype=dtype)
    forward_names = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in forward_names else "past_key_values"  # before release 5.24
    config = model.config
    page_size = 16
    num_pages = options.batch * -(-(options.context + tokens + 1) // page_size)
    paged = PagedCache(
        config, num_pages=num_pages, page_size=page_size,
        max_batch_tokens=None if options.chunk is None else options.batch * chunk,
    )  # fmt: skip
    caches: dict[str, tuple[str, Any]] = {}
    if options.model == "gemma3":
        caches["DynamicCache of all tokens, sdpa"] = "sdpa", DynamicCache()
    caches["DynamicCache, sdpa"] = "sdpa", DynamicCache(config=config)
    caches["PagedCache, kvcupy"] = "kvcupy", paged
    ids = torch.randint(0, 1024, (options.batch, options.context), device=place)
    prefill_s = dict.fromkeys(caches, 0.0)
    for part in ids.split(chunk, 1)[:-1]:
        for name, (implementation, cache) in caches.items():
            model.set_attn_implementation(implementation)
            start = time.perf_counter()
            with torch.no_grad():
                model(input_ids=part, **{argument: cache}, logits_to_keep=1)
            device.synchronize()
            prefill_s[name] += time.perf_counter() - start
    ids = ids.split(chunk, 1)[-1]
    inputs, chosen = dict.fromkeys(caches, ids), {name: [] for name in caches}
    times: dict[str, list[float]] = {name: [] for name in caches}
    growth: dict[str, int] = {}
    names = list(caches)
    for number in range(tokens + 1):
        for name in names if number % 2 else names[::-1]:
            implementation, cache = caches[name]
            model.set_attn_implementation(implementation)
            before = reset_peak() if number == tokens else None
            device.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                logits = model(input_ids=inputs[name], **{argument: cache}, logits_to_keep=1).logits
            inputs[name] = logits[:, -1].argmax(-1, keepdim=True)
            device.synchronize()
            times[name].append(time.perf_counter() - start)
            if before is not None:
                growth[name] = peak() - before
            chosen[name].append(inputs[name][:, 0].tolist())
    rows = []
    for name in names:
        decode = np.array(times[name][2:])  # the first compiles
        rows.append(
            {
                "cache": name,
                "tokens_per_second": options.batch / float(np.median(decode)),
                "median_ms": float(np.median(decode)) * 1e3,
                "p10_ms": float(np.percentile(decode, 10)) * 1e3,
                "p90_ms": float(np.percentile(decode, 90)) * 1e3,
                "prefill_ms": (prefill_s[name] + times[name][0]) * 1e3,
                "cache_bytes": cache_bytes(caches[name][1]),
                "bytes_per_token": cache_bytes(caches[name][1])
                / (options.batch * (options.context + tokens)),
                "allocated_bytes": allocated_bytes(caches[name][1]),
                "step_bytes": growth[name],
            }
        )
    return {
        "model": MODELS[options.model].format(num_layers),
        "dtype": options.dtype,
        "batch": options.batch,
        "context": options.context,
        "chunk": chunk,
        "tokens": tokens,
        "same_tokens": all(own == chosen[names[0]] for own in chosen.values()),
        "rows": rows,
    }


def make_model(name: str, num_layers: int | None) -> tuple[Any, int]:
    """Return a random model, and its number of layers."""
    import transformers

    if name == "qwen3":
        num_layers = num_layers or 4
        config = transformers.Qwen3Config(
            vocab_size=1024, hidden_size=1024, intermediate_size=3072, num_hidden_layers=num_layers,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        )  # fmt: skip
        return transformers.Qwen3ForCausalLM(config), num_layers
    narrow = {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "max_position_embeddings": 1 << 17,
    }  # fmt: skip
    if name == "gemma3":
        num_layers = num_layers or 6
        kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)]
        config = transformers.Gemma3TextConfig(
            **narrow, num_hidden_layers=num_layers, num_key_value_heads=1, head_dim=64,
            sliding_window=1024, layer_types=kinds,
        )  # fmt: skip
        return transformers.Gemma3ForCausalLM(config), num_layers
    num_layers = num_layers or 10
    kinds = ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(num_layers)]
    config = transformers.GraniteMoeHybridConfig(
        **narrow, num_hidden_layers=num_layers, num_key_value_heads=2, layer_types=kinds,
        mamba_n_heads=8, mamba_d_state=64, num_local_experts=0, shared_intermediate_size=512,
    )  # fmt: skip
    return transformers.GraniteMoeHybridForCausalLM(config), num_layers


def cache_bytes(cache: Any) -> int:
    """Return the bytes of keys, values and states; of pages and slots, those in use."""
    pages = getattr(cache, "pages", None)
    if pages is None:
        tensors = [x for layer in cache.layers for x in tensors_of(layer)]
        return sum(x.nbytes for x in tensors if x is not None)
    used = sum(
        (pool.num_pages - pool.allocator.num_available) * pool.page_bytes for pool in pages.pools
    )
    return used + cache.batch_size * sum(state_bytes for state_bytes, _ in states_of(pages))


def allocated_bytes(cache: Any) -> int:
    """Return the bytes that a cache has allocated."""
    pages = getattr(cache, "pages", None)
    if pages is None:
        return cache_bytes(cache)
    pools = sum(pool.num_pages * pool.page_bytes for pool in pages.pools)
    return pools + sum(state_bytes * count for state_bytes, count in states_of(pages))


def states_of(pages: Any) -> list[tuple[int, int]]:
    """Return the bytes of a state and the number of slots, of each recurrent group."""
    with suppress(NotImplementedError):  # of one group
        parts = pages.plan().groups
        return [(part.group.state_bytes(), part.num_slots) for part in parts if part.num_slots]
    return []


def tensors_of(layer: Any) -> list[Any]:
    """Return the tensors of a layer of transformers' cache; some may be None."""
    states = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    own = [getattr(layer, name, None) for name in ("keys", "values")]
    return [*own, *(x for of_kind in states for x in of_kind.values())]


def reset_peak() -> int:
    """Start a new peak of this process's memory; return what it has now, free memory given back."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak of resident memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no VmHWM")


def render(report: dict[str, Any]) -> str:
    columns = (
        "cache",
        "tokens/s",
        "ms",
        "p10",
        "p90",
        "prefill ms",
        "cache MB",
        "B/token",
        "allocated MB",
        "more in a step MB",
    )
    rows = [
        (
            row["cache"], row["tokens_per_second"], row["median_ms"], row["p10_ms"], row["p90_ms"],
            row["prefill_ms"], row["cache_bytes"] / 1e6, row["bytes_per_token"],
            row["allocated_bytes"] / 1e6, row["step_bytes"] / 1e6,
        )
        for row in report["rows"]
    ]  # fmt: skip
    same = "the same tokens" if report["same_tokens"] else "tokens differ"
    return (
        f"{format_table(columns, rows)}\n\n{report['model']}, {report['dtype']}, batch "
        f"{report['batch']}, prompts of {report['context']}: {same}"
    )
