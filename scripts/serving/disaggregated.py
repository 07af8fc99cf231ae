"""Prefill in one process, decode in another: the node that each of them runs, and what they say.

The decoding process starts the other one, and asks it for a prompt by a line of JSON; the answers
are lines too: a ticket as soon as there is one, then the first token, then times.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

import kvcupy as kv
from kvcupy.bench.timers import named_stream
from kvcupy.timelines.timeline import Span

from .llama import Buffers, Llama, StepInputs

LAYERS, WHOLE = "layer by layer", "when all is computed"
NO_EXPORT = "without an export"


@dataclass(frozen=True)
class NodeSettings:
    """What both processes have in common."""

    num_pages: int
    page_size: int
    dtype: str
    most_tokens: int  # of a step


class Node:
    """A model, and a cache for its sequences."""

    def __init__(self, model: Llama, settings: NodeSettings) -> None:
        config, self.device = model.config, model.device
        self.model = model
        self.compute = named_stream(self.device, "compute")
        self.cache = kv.PagedKVCache(
            num_layers=config.layers, num_q_heads=config.q_heads, num_kv_heads=config.kv_heads,
            head_dim=config.head_dim, num_pages=settings.num_pages, page_size=settings.page_size,
            dtype=settings.dtype, rope=model.rope, max_batch_tokens=settings.most_tokens,
            device=self.device, copy_stream=named_stream(self.device, "tables"),
        )  # fmt: skip
        self.buffers = Buffers(self.device, config, settings.most_tokens)

    def enqueue(self, tokens: Sequence[Sequence[int]]) -> None:
        """Enqueue the begun step, whose sequences get these tokens."""
        ids = np.concatenate([np.asarray(part, np.int64) for part in tokens])
        rows = np.cumsum([len(part) for part in tokens]) - 1
        inputs = StepInputs(ids, np.full(len(ids), -1), rows)
        self.model.forward_step(self.cache, self.buffers, inputs, self.compute)

    def chosen(self, count: int) -> list[int]:
        """Wait for the step, and return the token that follows each sequence."""
        self.compute.synchronize()
        return [int(token) for token in self.buffers.pinned_next[0, :count]]

    def step(self, names: Sequence[Any], tokens: Sequence[Sequence[int]]) -> list[int]:
        with self.cache.forward(list(names), [len(part) for part in tokens]):
            self.enqueue(tokens)
        return self.chosen(len(names))

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return what follows each prompt, computed in this process alone."""
        outputs = []
        for number, prompt in enumerate(prompts):
            name = ("alone", number)
            self.cache.add_sequence(name)
            outputs.append(self.step([name], [prompt]))
        names = [("alone", number) for number in range(len(prompts))]
        self.decode(names, outputs, count)
        return outputs

    def decode(self, names: Sequence[Any], outputs: Sequence[list[int]], count: int) -> None:
        """Extend outputs, of which the last token is not cached, to `count` tokens."""
        while len(outputs[0]) < count:
            following = self.step(names, [[output[-1]] for output in outputs])
            for output, token in zip(outputs, following, strict=True):
                output.append(token)
        for name in names:
            self.cache.remove_sequence(name)


# --- The prefilling process ---


def serve_prefills(
    node: Node, sender: Any, requests: IO[str], answers: IO[str], lease_s: float = 30.0
) -> None:
    """Answer requests, a line each, until there are no more."""

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    say(ready=True)
    for number, line in enumerate(requests):
        request = json.loads(line)
        way, prompt, name = request["way"], request["tokens"], ("prefill", number)
        node.cache.add_sequence(name)
        recorded = None

        def export(name: Any = name) -> None:
            now = time.perf_counter()
            ticket = node.cache.export_sequence(name, sender, lease_s=lease_s)
            say(ticket=base64.b64encode(ticket).decode(), exported_s=now)

        with kv.timeline() as timeline:
            if request["timeline"]:
                recorded = timeline
            start_s = time.perf_counter()
            with node.cache.forward([name], [len(prompt)]):
                if way == LAYERS:
                    export()
                node.enqueue([prompt])
            (token,) = node.chosen(1)
            end_s = time.perf_counter()
        if way == WHOLE:
            export()
        node.cache.remove_sequence(name)
        spans = [] if recorded is None else [asdict(span) for span in recorded.spans]
        say(
            token=token, start_s=start_s, end_s=end_s, spans=spans,
            timeline_s=0.0 if recorded is None else recorded.start_s,
        )  # fmt: skip


@dataclass
class Prefilled:
    """What became of a prompt. Times are of `time.perf_counter`, which both processes share.

    Attributes
    ----------
    token : the first of the answer
    start_s, end_s : of the computation
    exported_s : when the ticket was made
    arrived_s : when all pages had arrived
    layers_s : when each layer had
    num_bytes : of the pages
    spans : of the prefilling process, on the clock of both
    """

    token: int
    start_s: float
    end_s: float
    exported_s: float = 0.0
    arrived_s: float = 0.0
    layers_s: tuple[float, ...] = ()
    num_bytes: int = 0
    spans: tuple[Span, ...] = ()


class PrefillProcess:
    """The other process, and the receiver of what it exports."""

    def __init__(self, command: Sequence[str], node: Node, receiver: Any) -> None:
        self._node, self._receiver = node, receiver
        self._arrivals = named_stream(node.device, "arrivals")
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    @property
    def pid(self) -> int:
        return self._process.pid

    def prefill(
        self, name: Any, prompt: Sequence[int], way: str, *, timeline: bool = False
    ) -> Prefilled:
        """Let it compute a prompt, and import the sequence unless it computes alone."""
        request = {"way": way, "tokens": [int(t) for t in prompt], "timeline": timeline}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if way == NO_EXPORT:
            return self._computed()
        offered = self._answer("ticket")
        ticket = base64.b64decode(offered["ticket"])
        pull = self._node.cache.import_sequence(name, ticket, self._receiver)
        layers_s: list[float] = []
        for layer in range(self._node.cache.pool.num_layers):
            pull.wait_layer(layer, self._arrivals)
            self._arrivals.call(lambda: layers_s.append(time.perf_counter()))
        self._arrivals.synchronize()
        pull.synchronize()
        arrived_s = time.perf_counter()
        result = self._computed()
        result.exported_s, result.arrived_s = offered["exported_s"], arrived_s
        result.layers_s, result.num_bytes = tuple(layers_s), pull.num_bytes
        return result

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _computed(self) -> Prefilled:
        answer = self._answer("token")
        shift_us = answer["timeline_s"] * 1e6
        spans = tuple(
            Span(**{
                **span, "start_us": span["start_us"] + shift_us, "waits": tuple(span["waits"]),
            })
            for span in answer["spans"]
        )  # fmt: skip
        return Prefilled(answer["token"], answer["start_s"], answer["end_s"], spans=spans)

    def _answer(self, field: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the prefilling process has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if field not in answer:
            raise RuntimeError(f"expected {field}, got {line:.200}")
        return answer


def on_their_way(prefilled: Prefilled) -> list[Span]:
    """Return a span per layer: from when its pages were written until they had arrived."""
    written = [s.end_us for s in prefilled.spans if "attention" in s.name and s.lane == "compute"]
    arrived = [1e6 * moment for moment in prefilled.layers_s]
    if len(written) != len(arrived):
        raise ValueError(f"expected {len(arrived)} layers of attention, got {len(written)}")
    return [
        Span(f"layer {layer}", "on their way", start, max(0.0, end - start), "pages",
             num_bytes=prefilled.num_bytes // len(arrived))
        for layer, (start, end) in enumerate(zip(written, arrived, strict=True))
    ]  # fmt: skip
