"""Prefill in one process and decode in another, which reads pages while the first still computes.

    prefill   compute   |layer 0|layer 1|layer 2|layer 3| ...
    pages                       |layer 0|layer 1|layer 2| ...
    decode    compute                                      |step 1|step 2| ...

The decoding process starts the other one, and asks it for a prompt by a line of JSON; the answers
are lines too: a ticket as soon as there is one, then the first token. The sequence is exported in
the step that prefills it, so that each layer leaves as soon as its attention has run, over NIXL
(kvcupy[nixl]), between caches in host memory. A single process that does everything must give the
same tokens.

exposed    from the end of the computation to the arrival of the last page; negative where it
           arrives while the last layer still computes

    python scripts/disaggregated_demo.py --quick
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, Any

import common.one_core  # noqa: F401
import numpy as np
from common import frame
from common.checks import WrongBytes
from common.measure import log_compilation, one_core_per_stream, require_products
from common.report import format_table
from serving.llama import Llama, LlamaConfig, random_weights
from serving.server import CacheSettings, Node

import kvcupy as kv
from kvcupy import devices

HEADS, VOCABULARY = 8, 1024


class PairedNode(Node):
    """What each of the two processes runs."""

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return what follows each prompt, computed in this process alone."""
        outputs = []
        for number, prompt in enumerate(prompts):
            self.cache.add_sequence(number)
            outputs.append(self.step([number], [prompt]))
        self.decode(range(len(prompts)), outputs, count)
        return outputs

    def decode(self, names: Sequence[Any], outputs: Sequence[list[int]], count: int) -> None:
        """Extend outputs, of which the last token is not cached, to `count` tokens."""
        while len(outputs[0]) < count:
            following = self.step(names, [[output[-1]] for output in outputs])
            for output, token in zip(outputs, following, strict=True):
                output.append(token)
        for name in names:
            self.cache.remove_sequence(name)


def make_node(device: Any, options: argparse.Namespace) -> PairedNode:
    """Return the same node in both processes: weights follow from the seed."""
    config = LlamaConfig(
        vocab=VOCABULARY, hidden=options.hidden, intermediate=2 * options.hidden,
        layers=options.layers, q_heads=HEADS, kv_heads=HEADS, head_dim=options.hidden // HEADS,
    )  # fmt: skip
    require_products(device)
    goal = options.tokens + options.output_tokens
    model = Llama(device, config, random_weights(device, config), context=goal)
    pages = 2 * -(-goal // 16) * options.requests
    return PairedNode(model, CacheSettings(pages, 16, options.dtype), options.tokens)


# --- The prefilling process ---


def work(options: argparse.Namespace) -> None:
    """Be the prefilling process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else writes between the answers
    node = make_node(devices.get(options.device), options)
    with kv.PageSender(node.cache) as sender, one_core_per_stream(node.device):
        serve_prefills(node, sender, sys.stdin, answers)


def serve_prefills(node: PairedNode, sender: Any, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests, a line each, until there are no more."""

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    say(ready=True)
    for number, line in enumerate(requests):
        prompt, name = json.loads(line), ("prefill", number)
        node.cache.add_sequence(name)
        with node.cache.forward([name], [len(prompt)]):
            ticket = node.cache.export_sequence(name, sender)
            say(ticket=base64.b64encode(ticket).decode())
            node.enqueue([prompt])
        (token,) = node.chosen(1)
        say(token=token, end_s=time.perf_counter())  # a clock that both processes share
        node.cache.remove_sequence(name)


# --- The decoding process ---


class PrefillProcess:
    """The other process, and the receiver of what it exports."""

    def __init__(self, command: Sequence[str], node: PairedNode, receiver: Any) -> None:
        self._node, self._receiver = node, receiver
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    def prefill(self, name: Any, prompt: Sequence[int]) -> tuple[int, float, int]:
        """Import a sequence that it computes: the first token, exposed seconds, and bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        ticket = base64.b64decode(self._answer("ticket")["ticket"])
        pull = self._node.cache.import_sequence(name, ticket, self._receiver)
        pull.synchronize()
        arrived_s = time.perf_counter()
        computed = self._answer("token")
        return computed["token"], arrived_s - computed["end_s"], pull.num_bytes

    def close(self) -> None:
        """Let it end."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _answer(self, field: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the prefilling process has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if field not in answer:
            raise RuntimeError(f"expected {field}, got {line:.200}")
        return answer


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Be the decoding process: start the other one, measure, and return the report."""
    node = make_node(device, options)
    shape, count = (options.requests, options.tokens), options.output_tokens
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, shape).tolist()
    expected, exposed_ms, num_bytes = node.generate(prompts, count), [], 0
    with ExitStack() as ending, one_core_per_stream(node.device):
        receiver = ending.enter_context(kv.PageReceiver(node.cache))
        process = PrefillProcess([*options.command, "--worker"], node, receiver)
        ending.callback(process.close)
        for number in range(options.rounds + 1):  # the first warms up
            names = [(number, i) for i in range(len(prompts))]
            runs = [process.prefill(*pair) for pair in zip(names, prompts, strict=True)]
            outputs = [[token] for token, _, _ in runs]
            node.decode(names, outputs, count)
            if outputs != expected:
                raise WrongBytes(f"expected tokens {expected}, got {outputs}")
            exposed_ms += [1e3 * seconds for _, seconds, _ in runs] if number else []
            num_bytes = runs[0][2]
        stats = receiver.stats()
    node.cache.clear()
    if node.cache.num_available_pages != node.cache.pool.num_pages:
        raise WrongBytes(f"pages were not given back: {node.cache}")
    return {
        "layers": options.layers, "hidden_size": options.hidden, "tokens": options.tokens,
        "output_tokens": count, "dtype": options.dtype, "requests": options.requests,
        "transport": os.environ.get("UCX_TLS", "UCX's choice"),
        "tokens_checked": (options.rounds + 1) * len(prompts) * count, "receiver": stats,
        "bytes_per_sequence": num_bytes, "exposed_ms": median(exposed_ms),
        "least_exposed_ms": min(exposed_ms), "most_exposed_ms": max(exposed_ms),
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    """Return the table."""
    row = (report["exposed_ms"], report["least_exposed_ms"], report["most_exposed_ms"])
    return (
        f"random Llama of {report['layers']} layers; {report['requests']} prompts of "
        f"{report['tokens']} tokens, {report['bytes_per_sequence'] / 1e6:.1f} MB each; NIXL, "
        f"{report['transport']}\n\n{format_table(('exposed ms', 'least', 'most'), [row])}\n\n"
        f"{report['tokens_checked']} tokens equal the tokens of one process"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=int, help="of the model; default 8")
    add("--hidden", type=int, help="of the model; default 256")
    add("--tokens", type=int, help="of a prompt; default 1024")
    add("--output-tokens", type=int, default=8, help="of an answer")
    add("--requests", type=int, default=2, help="prompts")
    add("--dtype", default="fp32", choices=("fp32", "bf16", "fp8_e4m3", "int8"),
        help="of the cache")  # fmt: skip
    add("--rounds", type=int, help="measured runs; default 9")
    add("--worker", action="store_true", help=argparse.SUPPRESS)  # be the other process


def main(argv: Sequence[str] | None = None) -> int:
    given, module = list(sys.argv[1:] if argv is None else argv), sys.modules[__name__]
    options = frame.parse(module, given)
    defaults = {"layers": 8, "hidden": 256, "tokens": 1024, "rounds": 9}
    if options.quick:
        defaults = {"layers": 3, "hidden": 64, "tokens": 48, "rounds": 1}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.worker:
        work(options)
        return 0
    options.command = [str(Path(__file__).resolve()), *given]
    return frame.run("disaggregated_demo", module, options, program="disaggregated_demo")


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
