"""How often caches of other formats give the same most likely token as one of 16 bits.

Each cache reads the same prompts in chunks. At every position of a prompt's second half the model
names its next token, given the text: differences do not add up. Then each prompt is continued
twice, by the cache's own tokens and by those that the cache of 16 bits chose. A cache of float32
is the control: what differs there differs between two caches that nobody calls lossy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import kvcupy as kv
from kvcupy.bench.report import format_table

from .capacity import same_tokens
from .engine import Server
from .llama import Llama, StepInputs
from .requests import Prompt
from .schedule import CacheSettings, Policy

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Read:
    """What a cache made of the prompts, by prompt.

    Attributes
    ----------
    on_text : most likely tokens after each token of a prompt's second half
    own : greedy continuations
    forced : most likely tokens along the continuations of another cache, if there were any
    """

    on_text: list[list[int]]
    own: list[list[int]]
    forced: list[list[int]]


def parse_settings(plain: CacheSettings, name: str) -> CacheSettings:
    """Return settings by name: ENCODING[@RECENT], of old tokens: "nvfp4+hadamard@64".

    A name that begins with "=" is the format of the whole cache.
    """
    if name.startswith("="):
        return replace(plain, dtype=name[1:], past=None, recent=None, sinks=0)
    past, _, recent = name.partition("@")
    return replace(
        plain, past=str(kv.Encoding.of(past, "name")),
        recent=int(recent) if recent else plain.recent,
    )  # fmt: skip


def agreement(
    model: Llama, settings: CacheSettings, policy: Policy, prompts: Sequence[Prompt],
    names: Sequence[str], done: Callable[[str, Mapping[str, Any]], None] = lambda name, row: None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Compare caches with one of `settings.dtype` alone, by name.

    Parameters
    ----------
    names : as `parse_settings` reads them
    done : called with each name and its row
    """
    goal = max(prompt.goal for prompt in prompts)
    pages = (2 * len(prompts) + 1) * (settings.pages(goal) + 1) + settings.pages(policy.budget)
    settings = replace(settings, num_pages=pages)
    plain = read(Server(model, parse_settings(settings, f"={settings.dtype}"), policy), prompts)
    rows = {}
    for name in names:
        server = Server(model, parse_settings(settings, name), policy)
        other = read(server, prompts, plain.own)
        pool = server.cache.past_pool or server.cache.pool
        rows[name] = {
            "page_bytes": pool.page_bytes,
            **{part: same_tokens(getattr(plain, "own" if part == "forced" else part),
                                 getattr(other, part)) for part in ("on_text", "own", "forced")},
        }  # fmt: skip
        done(name, rows[name])
    return rows


def read(
    server: Server, prompts: Sequence[Prompt], continuations: Sequence[Sequence[int]] | None = None
) -> Read:
    """Read prompts, and continue each by the tokens of the cache and by `continuations`."""
    cache, at_a_time = server.cache, server.policy.budget
    on_text, own = [], []
    for prompt in prompts:
        ids, chosen = np.asarray(prompt.tokens), []
        cache.add_sequence(prompt.number)
        for start in range(0, len(ids), at_a_time):
            part = ids[start : start + at_a_time]
            first = min(max(len(ids) // 2 - start, 0), len(part))  # of the second half
            chosen += step(server, [prompt.number], [part], range(first, len(part)))
        on_text.append(chosen[:-1])
        own.append(chosen[-1:])
    numbers, forced = [prompt.number for prompt in prompts], []
    for prompt, first in zip(prompts, own, strict=True) if continuations else ():
        numbers.append(len(prompts) + prompt.number)
        cache.fork_sequence(prompt.number, numbers[-1])
        forced.append(list(first))
    for at in range(prompts[0].output_length - 1):
        feeds = [tokens[-1] for tokens in own] + [tokens[at] for tokens in continuations or ()]
        chosen = step(server, numbers, [[token] for token in feeds], range(len(feeds)))
        for tokens, token in zip([*own, *forced], chosen, strict=True):
            tokens.append(token)
    return Read(on_text, own, forced)


def step(
    server: Server, numbers: Sequence[int], parts: Sequence[Sequence[int]], rows: Sequence[int]
) -> list[int]:
    """Append tokens to sequences; return what is most likely after those of `rows`."""
    cache, model = server.cache, server.model
    ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
    cache.begin_forward(numbers, [len(part) for part in parts])
    inputs = StepInputs(ids, np.full(len(ids), -1), np.asarray(rows, np.int64))
    model.forward_step(cache, server.buffers, inputs, server.compute)
    cache.end_forward()
    model.device.synchronize()
    return server.buffers.pinned_next[0, : len(rows)].tolist()


def render(report: Mapping[str, Any]) -> str:
    """Return the shares of equal tokens in each model as text."""
    lines = []
    for model, rows in report["models"].items():
        table = [
            (name, row["page_bytes"],
             *(f"{row[part]['same_tokens'] / row[part]['tokens']:.2%} of {row[part]['tokens']}"
               for part in ("on_text", "forced", "own")),
             f"{row['own']['same_requests']} of {report['requests']}")
            for name, row in rows.items()
        ]  # fmt: skip
        columns = (f"{model} model", "bytes of a page", "same on the text", "same along bf16's",
                   "same greedy", "whole requests")  # fmt: skip
        lines += [format_table(columns, table), ""]
    return "\n".join(lines[:-1]).replace("bf16's", f"{report['dtype']}'s")
