"""Compare caches that keep old tokens in a narrower format with caches of one format.

`capacity` fills two caches of the same bytes with prompts until `CacheFull`, empties them, and
counts: bytes of the pools' arrays, allocated pages, tokens. It also compares the tokens that both
give to the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from common.checks import WrongBytes
from common.report import format_table

import kvcupy as kv

from .engine import Server
from .llama import Llama
from .requests import Prompt
from .schedule import CacheSettings, Policy


class TooFewTokens(WrongBytes):
    """A cache with a past held fewer tokens than it should, or did not free what it held."""


def settings_of_equal_bytes(
    settings: CacheSettings, tokens: int, sequences: int, budget: int, page_ratio: float
) -> tuple[CacheSettings, CacheSettings]:
    """Return settings of a cache of one format, and of one with a past of at most its bytes.

    Parameters
    ----------
    settings : with a past; its numbers of pages are ignored
    tokens, sequences : what the cache with the past has pages for
    budget : tokens of a step, which a prompt brings in `dtype`
    page_ratio : bytes of a page, in pages of the past
    """
    own = sequences * settings.own_pages(tokens) + settings.pages(budget) + 1
    past = sequences * settings.past_pages(tokens)
    mixed = replace(settings, num_pages=own, num_past_pages=past)
    plain = replace(
        settings, num_pages=int(np.ceil(own + past / page_ratio)), past=None, recent=None, sinks=0,
        num_past_pages=None,
    )  # fmt: skip
    return plain, mixed


def filled(server: Server, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Fill a cache with prompts until it is full, then empty it; return what was counted.

    Raises
    ------
    TooFewTokens
        Pages are held once the cache is empty, or it never was full.
    """
    cache, settings = server.cache, server.settings
    cache.clear()
    for prompt in prompts:
        cache.add_sequence(prompt.number)
        if _append(server, prompt) < len(prompt.tokens):
            break
    else:
        raise TooFewTokens(f"{len(prompts)} prompts do not fill the cache")
    server.model.device.synchronize()
    kv.check_faults(server.model.device)
    pools = [pool for pool in (cache.pool, cache.past_pool) if pool is not None]
    complete = sum(cache.sequence_length(p.number) == len(p.tokens) for p in prompts
                   if p.number in cache)  # fmt: skip
    counted = {
        "bytes": sum(sum(p.num_bytes for p in (*x.parts, *x.scale_parts)) for x in pools),
        "pages": settings.num_pages,
        "past_pages": settings.num_past_pages or 0,
        "tokens": cache.total_length,
        "complete_prompts": complete,
        "pages_held": settings.num_pages - cache.num_available_pages,
        "past_pages_held": (settings.num_past_pages or 0) - cache.num_available_past_pages,
    }
    for prompt in prompts:
        if prompt.number in cache:
            cache.remove_sequence(prompt.number)
    held = [int(pool.allocator.allocated().size) for pool in pools]
    if any(held) or cache.total_length:
        raise TooFewTokens(f"{held} pages are held by an empty cache")
    return {**counted, "pages_held_when_empty": sum(held)}


def _append(server: Server, prompt: Prompt) -> int:
    """Prefill as much of a prompt as there is room for; return how many tokens."""
    cache, at, chunk = server.cache, 0, server.policy.budget
    while at < len(prompt.tokens) and chunk:
        count = min(chunk, len(prompt.tokens) - at)
        try:
            cache.begin_forward([prompt.number], [count])
        except kv.CacheFull:
            chunk = count // 2
            continue
        server.device.synchronize()  # of the step before, whose inputs lie where these will
        server.enqueue([prompt.tokens[at : at + count]], rows=[])
        cache.end_forward()
        at += count
    return at


def capacity(
    model: Llama, settings: CacheSettings, policy: Policy, prompts: Sequence[Prompt],
    overflow: Sequence[Prompt], answers: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare two caches of the same bytes: what they hold, and the tokens that they give.

    Parameters
    ----------
    settings : of the cache with a past, which gets pages for all of `prompts`
    overflow : more prompts, numbered on, to fill the caches with
    answers : the tokens that are right, if that is known

    Raises
    ------
    TooFewTokens
        The cache with a past has more bytes than the other, or one is not empty at the end.
    """
    policy = replace(policy, share=False)
    own, past = (page_bytes(model, settings.page_size, fmt)
                 for fmt in (settings.dtype, settings.past))  # fmt: skip
    goal = max(prompt.goal for prompt in prompts)
    both = settings_of_equal_bytes(settings, goal, len(prompts), policy.budget, own / past)
    counted, outputs = [], []
    for each in both:
        server = Server(model, each, policy)
        outcome, _ = server.serve(prompts)
        outputs.append(outcome.tokens)
        counted.append({
            **filled(server, [*prompts, *overflow]), "most_running": outcome.counts.most_running,
            "preemptions": outcome.counts.preemptions,
        })  # fmt: skip
    plain, mixed = counted
    if mixed["bytes"] > plain["bytes"]:
        raise TooFewTokens(f"{mixed['bytes']} bytes with a past, {plain['bytes']} without")
    return {
        "config": asdict(model.config), "requests": len(prompts),
        "prompt_tokens": len(prompts[0].tokens), "output_tokens": prompts[0].output_length,
        "page_bytes": own, "past_page_bytes": past, "plain": plain, "mixed": mixed,
        "times_the_tokens": mixed["tokens"] / plain["tokens"], "at_most": own / past,
        **same_tokens(*outputs), "margins": margins(model, settings.dtype, prompts, *outputs),
        "right_tokens": None if answers is None else {
            name: same_tokens(tokens, answers)["same_tokens"]
            for name, tokens in zip(("plain", "mixed"), outputs, strict=True)
        },
    }  # fmt: skip


def page_bytes(model: Llama, page_size: int, dtype: str | None) -> int:
    config = model.config
    pool = kv.KVPool(1, page_size, config.layers, config.kv_heads, config.head_dim, dtype=dtype,
                     device=model.device)  # fmt: skip
    return pool.page_bytes


def same_tokens(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> dict[str, int]:
    """Count tokens and requests, and those that are the same."""
    same = [[a == b for a, b in zip(one, other, strict=True)]
            for one, other in zip(first, second, strict=True)]  # fmt: skip
    return {
        "tokens": sum(map(len, same)),
        "same_tokens": sum(map(sum, same)),
        "same_requests": sum(map(all, same)),
    }


def margins(
    model: Llama, dtype: str, prompts: Sequence[Prompt], plain: Sequence[Sequence[int]],
    mixed: Sequence[Sequence[int]],
) -> dict[str, Any]:  # fmt: skip
    """Return by how much the best token was ahead of the next, relative to the logits' spread.

    Returns
    -------
    median : of all tokens of the cache of one format
    where_they_part : of its token over the other cache's at the first difference, by request
    """
    ahead, parted = [], []
    for prompt, want, got in zip(prompts, plain, mixed, strict=True):
        whole = np.concatenate([prompt.tokens, np.array(want[:-1], np.int64)])
        logits = model.device.to_numpy(model.forward_plain(whole, cache_dtype=dtype))
        rows = logits[len(prompt.tokens) - 1 :]
        spread = rows.std(axis=-1)
        ranked = np.sort(rows, axis=-1)
        ahead.append((ranked[:, -1] - ranked[:, -2]) / spread)
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
        if at is not None:
            parted.append(float((rows[at, want[at]] - rows[at, got[at]]) / spread[at]))
    return {"median": float(np.median(np.concatenate(ahead))), "where_they_part": parted}


def render_capacity(report: dict[str, Any]) -> str:
    """Return the comparison of two caches in each model as text."""
    past, lines = report["past"], []
    for name, model in report["models"].items():
        columns = (f"{name} model", "bytes", "pages", f"of {past}", "tokens", "prompts whole",
                   "served at once", "preempted")  # fmt: skip
        rows = [
            (label, f"{c['bytes']:,}", c["pages"], c["past_pages"], c["tokens"],
             c["complete_prompts"], c["most_running"], c["preemptions"])
            for label, c in ((report["dtype"], model["plain"]),
                             (f"{report['dtype']} and {past}", model["mixed"]))
        ]  # fmt: skip
        margin, right = model["margins"], model["right_tokens"]
        lines += [
            format_table(columns, rows),
            "",
            f"held            {model['times_the_tokens']:.2f} times the tokens in no more bytes, "
            f"of at most {model['at_most']:.2f}",
            f"freed           {model['plain']['pages_held_when_empty']} and "
            f"{model['mixed']['pages_held_when_empty']} pages are held by the emptied caches",
            f"tokens          {model['same_tokens']} of {model['tokens']} and "
            f"{model['same_requests']} of {model['requests']} requests are the same in both",
        ]
        if right:
            lines.append(
                f"right           {right['plain']} and {right['mixed']} are what the text says"
            )
        parted = margin["where_they_part"]
        lines.append(
            f"margins         the best token is {margin['median']:.2g} standard deviations of the "
            "logits ahead (median)"
            + (f",\n                and {max(parted):.2g} at most where requests part"
               if parted else "")
        )  # fmt: skip
        lines.append("")
    return "\n".join(lines[:-1])
