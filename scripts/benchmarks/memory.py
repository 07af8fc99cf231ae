"""Compare the memory of a cache with groups with what its layers need, and with one without groups.

    needed           K and V of all tokens, of the windows' last ones, and one state
    groups           a `PagedKVCache` with groups, which a sequence has been grown in
    without groups   a `PagedKVCache` in which every layer keeps all tokens; it has no states

The layers are those that models repeat.

    python scripts/bench.py memory --json build/memory.json
"""

from __future__ import annotations

import argparse
from typing import Any

from common.report import format_table

import kvcupy as kv
from kvcupy.progress import count

PAGE_SIZE = 16


def mixes() -> dict[str, list[Any]]:
    """Return the groups of a model's repeated layers. Source: config.json on Hugging Face."""
    gemma = {"num_kv_heads": 8, "head_dim": 256}
    mamba = {"conv": ((8192, 4), "bf16"), "ssm": ((8192, 16), "fp32")}
    return {
        "Gemma 3 12B": [
            kv.SlidingWindow(layers=range(5), window=1024, **gemma),
            kv.FullAttention(layers=[5], **gemma),
        ],
        "Jamba 1.5 Mini": [
            kv.Recurrent(layers=[0, 1, 2, 3, 5, 6, 7], state=mamba),
            kv.FullAttention(layers=[4], num_kv_heads=8, head_dim=128),
        ],
    }  # fmt: skip


def needed_bytes(group: Any, tokens: int) -> int:
    """Return the bytes that layers need of a sequence."""
    if isinstance(group, kv.Recurrent):
        return group.state_bytes()
    return group.token_bytes() * min(tokens, getattr(group, "window", tokens))


def row_of(device: Any, name: str, groups: list[Any], tokens: int, step: int) -> dict[str, Any]:
    """Grow a sequence, and return the bytes."""
    common: dict[str, Any] = {"num_q_heads": 16, "page_size": PAGE_SIZE, "device": device}
    cache = kv.PagedKVCache(groups=groups, num_tokens=tokens, max_batch_tokens=step, **common)
    cache.add_sequence("a")
    while (length := cache.sequence_length("a")) < tokens:
        with cache.forward(["a"], [min(step, tokens - length)]):
            pass
    device.synchronize()
    num_layers = sum(len(group.layers) for group in groups)
    shape = next(group for group in groups if isinstance(group, kv.FullAttention))
    uniform = kv.KVPool(
        -(-tokens // PAGE_SIZE), PAGE_SIZE, num_layers, shape.num_kv_heads, shape.head_dim,
        device=device,
    )  # fmt: skip
    needed = sum(needed_bytes(group, tokens) for group in groups)
    return {
        "model": name,
        "layers": {type(group).__name__: len(group.layers) for group in groups},
        "needed_bytes": needed,
        "groups_bytes": cache.plan().num_bytes,
        "times_needed": cache.plan().num_bytes / needed,
        "without_groups_bytes": uniform.num_bytes,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=count, default=32768, help="of the sequence")
    parser.add_argument("--step", type=count, default=512, help="tokens of a step")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows = [
        row_of(device, name, groups, options.tokens, options.step)
        for name, groups in mixes().items()
    ]
    return {"tokens": options.tokens, "step_tokens": options.step, "rows": rows}


def render(report: dict[str, Any]) -> str:
    columns = (f"{report['tokens']} tokens", "layers", "needed MB", "groups MB", "times needed",
               "without groups MB")  # fmt: skip
    rows = [
        (row["model"], ", ".join(f"{n} {kind}" for kind, n in row["layers"].items()),
         f"{row['needed_bytes'] / 1e6:.1f}", f"{row['groups_bytes'] / 1e6:.1f}",
         f"{row['times_needed']:.3f}", f"{row['without_groups_bytes'] / 1e6:.1f}")
        for row in report["rows"]
    ]  # fmt: skip
    return format_table(columns, rows)


def problems(report: dict[str, Any]) -> list[str]:
    """Return a line for each cache that takes more than 1.1 times what is needed."""
    return [
        f"{row['model']}: {row['times_needed']:.3f} times the bytes that are needed"
        for row in report["rows"]
        if row["times_needed"] > 1.1
    ]
