"""Request traces, and the steps of continuous batching."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Request:
    """One line of a request trace. `hash_ids` name the prefix blocks of the input."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """New tokens of one forward pass: one per running request, and chunks of waiting prompts."""

    decode: int
    prefill: int

    @property
    def tokens(self) -> int:
        return self.decode + self.prefill


def read_trace(path: str | Path) -> Iterator[Request]:
    """Read a trace of JSON lines, in order of arrival.

    Raises
    ------
    ValueError
        A line is not a request; the message names file and line.
    """
    with Path(path).open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                yield Request(
                    float(entry["timestamp"]),
                    int(entry["input_length"]),
                    int(entry["output_length"]),
                    tuple(entry.get("hash_ids", ())),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{number}: expected an object with timestamp, input_length and "
                    f"output_length, got {line.strip()[:80]!r}"
                ) from error


def synthetic_trace(seed: int = 0, *, requests_per_s: float = 6.0) -> Iterator[Request]:
    """Yield requests without end: Poisson arrivals, log-normal prompt and output lengths.

    The medians (about 6,900 tokens in, 350 out) are those of a conversation service; the rate
    fills a batch of 2,048 tokens per step.
    """
    rng = np.random.default_rng(seed)
    now = 0.0
    while True:
        yield Request(
            now,
            int(min(rng.lognormal(8.84, 1.05), 128_000)) + 1,
            int(min(rng.lognormal(5.86, 0.6), 2_000)) + 1,
        )
        now += rng.exponential(1e3 / requests_per_s)


@dataclass
class _Running:
    prompt: int  # tokens still to prefill
    output: int  # tokens still to decode


def batch_steps(
    requests: Iterable[Request],
    budget: int,
    *,
    step_ms: float = 30.0,
    max_running: int = 256,
    block_tokens: int = 512,
) -> Iterator[Step]:
    """Batch requests as a scheduler with chunked prefill does.

    Each step holds one token of every request that decodes, and prompt chunks, oldest first, up
    to `budget` tokens in all. Prompt blocks that an earlier request computed are not computed
    again. A step takes `step_ms` of trace time; steps without tokens are left out.
    """
    arrivals = iter(requests)
    upcoming = next(arrivals, None)
    running: deque[_Running] = deque()
    known: set[int] = set()
    now = 0.0
    while upcoming is not None or running:
        if not running and upcoming is not None:
            now = max(now, upcoming.timestamp)
        while upcoming and upcoming.timestamp <= now and len(running) < max_running:
            hit = next(
                (i for i, block in enumerate(upcoming.hash_ids) if block not in known),
                len(upcoming.hash_ids),
            )
            known.update(upcoming.hash_ids)
            prompt = max(upcoming.input_length - hit * block_tokens, 1)  # the last is always run
            running.append(_Running(prompt, upcoming.output_length))
            upcoming = next(arrivals, None)

        decode = prefill = 0
        for request in running:
            if request.prompt == 0 and decode < budget:
                request.output -= 1
                decode += 1
        for request in running:
            chunk = min(request.prompt, budget - decode - prefill)
            request.prompt -= chunk
            prefill += chunk
        running = deque(r for r in running if r.prompt > 0 or r.output > 0)
        now += step_ms
        if decode + prefill:
            yield Step(decode, prefill)


def busy_steps(
    requests: Iterable[Request], budget: int, count: int, *, skip: int = 500
) -> list[Step]:
    """Return `count` successive steps, the first of which both decodes and prefills.

    The first `skip` steps, in which the batch fills, are skipped if the trace is long enough.

    Raises
    ------
    ValueError
        The trace holds fewer than `count` steps.
    """
    window: deque[Step] = deque(maxlen=count)
    for number, step in enumerate(batch_steps(requests, budget)):
        window.append(step)
        if number >= skip + count - 1 and window[0].decode and window[0].prefill:
            break
    if len(window) < count:
        raise ValueError(f"expected a trace of at least {count} steps, got {len(window)}")
    return list(window)
