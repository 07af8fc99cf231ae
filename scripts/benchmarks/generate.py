"""Measure `generate` of transformers: its DynamicCache against kvcupy's PagedCache, in one run.

The model is random, with the shapes of a layer of Qwen3-0.6B (heads 16 / 8, 128 wide). Decoding is
timed token by token, the two caches in turns.

    python scripts/bench.py generate --json generate.json
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvcupy.bench.report import format_table

CANDIDATES = ("DynamicCache, sdpa", "PagedCache, kvcupy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=4)
    add("--context", type=int, default=1024, help="tokens of a prompt")
    add("--tokens", type=int, help="tokens to decode; default: 64")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Prefill both, then decode a token of each in turns."""
    import torch
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    from kvcupy.interop.transformers import PagedCache

    tokens = options.tokens or (8 if options.quick else 64)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=options.layers, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128,
    )  # fmt: skip
    torch.manual_seed(0)
    place = "cpu" if device.name == "host" else device.name
    dtype = getattr(torch, options.dtype)
    model = Qwen3ForCausalLM(config).eval().to(device=place, dtype=dtype)
    page_size = 16
    num_pages = options.batch * -(-(options.context + tokens + 1) // page_size)
    caches = {
        CANDIDATES[0]: ("sdpa", DynamicCache(config=config)),
        CANDIDATES[1]: ("kvcupy", PagedCache(config, num_pages=num_pages, page_size=page_size)),
    }
    ids = torch.randint(0, 1024, (options.batch, options.context), device=place)
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
                logits = model(
                    input_ids=inputs[name], past_key_values=cache, logits_to_keep=1
                ).logits
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
                "prefill_ms": times[name][0] * 1e3,
                "cache_bytes": cache_bytes(caches[name][1]),
                "step_bytes": growth[name],
            }
        )
    return {
        "model": f"{options.layers} layers of Qwen3-0.6B",
        "dtype": options.dtype,
        "batch": options.batch,
        "context": options.context,
        "tokens": tokens,
        "same_tokens": chosen[names[0]] == chosen[names[1]],
        "rows": rows,
    }


def cache_bytes(cache: Any) -> int:
    """Return the bytes of keys and values; of pages, those in use."""
    pages = getattr(cache, "pages", None)
    if pages is None:
        return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    pool = pages.pool
    return (pool.num_pages - pages.num_available_pages) * pool.page_bytes


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
        "more in a step MB",
    )
    rows = [
        (
            row["cache"], row["tokens_per_second"], row["median_ms"], row["p10_ms"], row["p90_ms"],
            row["prefill_ms"], row["cache_bytes"] / 1e6, row["step_bytes"] / 1e6,
        )
        for row in report["rows"]
    ]  # fmt: skip
    same = "the same tokens" if report["same_tokens"] else "tokens differ"
    return (
        f"{format_table(columns, rows)}\n\n{report['model']}, {report['dtype']}, batch "
        f"{report['batch']}, prompts of {report['context']}: {same}"
    )
