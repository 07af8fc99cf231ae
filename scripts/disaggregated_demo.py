"""Prefill in one process and decode in another, and show how much of the transfer is hidden.

The decoding process reads the sequence's pages while the prefilling one still computes:

    prefill   compute   |layer 0|layer 1|layer 2|layer 3| ...
    pages                       |layer 0|layer 1|layer 2| ...
    decode    compute                                      |step 1|step 2| ...

The decoding process starts the other one, and asks it for a prompt by a line of JSON; the answers
are lines too: a ticket as soon as there is one, then the first token and times. The pages move over
NIXL (kvcupy[nixl]), between caches in host memory.

Two ways: the sequence is exported in the step that prefills it, so that each layer leaves as soon
as its attention has run; and it is exported when all is computed. Both are compared with one
process that does everything: the tokens must be the same.

transfer   from the export of a computed sequence to the arrival of its last page
exposed    from the end of the computation to the arrival of the last page; negative where it
           arrives while the last layer still computes
hidden     1 - exposed / transfer, of medians, and at most 1

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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import common.one_core  # noqa: F401
import numpy as np
from common import frame
from common.measure import (
    QUICK_NOTE,
    log_compilation,
    one_core_per_stream,
    require_products,
)
from common.report import format_table
from serving.llama import Llama, LlamaConfig, random_weights
from serving.server import CacheSettings, Node

import kvcupy as kv
from kvcupy import devices

HEADS = 8, 8  # of queries, of keys and values
LAYERS, WHOLE = "layer by layer", "when all is computed"


class PairedNode(Node):
    """What each of the two processes runs."""

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


def serve_prefills(node: PairedNode, sender: Any, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests, a line each, until there are no more."""

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    def export(name: Any) -> None:
        now = time.perf_counter()
        ticket = node.cache.export_sequence(name, sender)
        say(ticket=base64.b64encode(ticket).decode(), exported_s=now)

    say(ready=True)
    for number, line in enumerate(requests):
        request = json.loads(line)
        prompt, name = request["tokens"], ("prefill", number)
        node.cache.add_sequence(name)
        with node.cache.forward([name], [len(prompt)]):
            if request["way"] == LAYERS:
                export(name)
            node.enqueue([prompt])
        (token,) = node.chosen(1)
        end_s = time.perf_counter()
        if request["way"] == WHOLE:
            export(name)
        node.cache.remove_sequence(name)
        say(token=token, end_s=end_s)


@dataclass
class Prefilled:
    """What became of a prompt. Times are of `time.perf_counter`, which both processes share.

    Attributes
    ----------
    token : the first of the answer
    end_s : when the computation ended
    exported_s : when the ticket was made
    arrived_s : when all pages had arrived
    num_bytes : of the pages
    """

    token: int
    end_s: float
    exported_s: float
    arrived_s: float
    num_bytes: int = 0


class PrefillProcess:
    """The other process, and the receiver of what it exports."""

    def __init__(self, command: Sequence[str], node: PairedNode, receiver: Any) -> None:
        self._node, self._receiver = node, receiver
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    def prefill(self, name: Any, prompt: Sequence[int], way: str) -> Prefilled:
        """Let it compute a prompt, and import the sequence."""
        assert self._process.stdin is not None
        request = {"way": way, "tokens": [int(token) for token in prompt]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        offered = self._answer("ticket")
        ticket = base64.b64decode(offered["ticket"])
        pull = self._node.cache.import_sequence(name, ticket, self._receiver)
        pull.synchronize()
        arrived_s = time.perf_counter()
        computed = self._answer("token")
        return Prefilled(
            computed["token"], computed["end_s"], offered["exported_s"], arrived_s, pull.num_bytes
        )

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

    def _answer(self, field: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the prefilling process has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if field not in answer:
            raise RuntimeError(f"expected {field}, got {line:.200}")
        return answer


# --- What is measured -----------------------------------------------------------------------------


class WrongTokens(Exception):
    """Two processes did not give the tokens of one."""


def make_node(device: Any, arguments: argparse.Namespace) -> PairedNode:
    """Return the same node in both processes: weights follow from the seed."""
    q_heads, kv_heads = HEADS
    config = LlamaConfig(
        vocab=1024, hidden=arguments.hidden, intermediate=2 * arguments.hidden,
        layers=arguments.layers, q_heads=q_heads, kv_heads=kv_heads,
        head_dim=arguments.hidden // q_heads,
    )  # fmt: skip
    require_products(device)
    weights = random_weights(device, config)
    goal = arguments.tokens + arguments.output_tokens
    model = Llama(device, config, weights, context=goal)
    pages = -(-goal // arguments.page_size) * arguments.requests
    settings = CacheSettings(2 * pages, arguments.page_size, arguments.dtype)
    return PairedNode(model, settings, arguments.tokens)


def work(arguments: argparse.Namespace) -> None:
    """Be the prefilling process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else writes between the answers
    node = make_node(devices.get(arguments.device), arguments)
    with kv.PageSender(node.cache) as sender, one_core_per_stream(node.device):
        serve_prefills(node, sender, sys.stdin, answers)


def measure(
    node: PairedNode, process: PrefillProcess, prompts: Sequence[Sequence[int]],
    output_tokens: int, rounds: int,
) -> tuple[dict[str, list[Prefilled]], int]:  # fmt: skip
    """Prefill every prompt in both ways, round by round; check the tokens of each."""
    expected = node.generate(prompts, output_tokens)
    samples: dict[str, list[Prefilled]] = {LAYERS: [], WHOLE: []}
    checked = 0
    for number in range(rounds + 1):  # the first warms up
        for way, results in samples.items():
            names = [(way, number, i) for i in range(len(prompts))]
            runs = [process.prefill(*pair, way) for pair in zip(names, prompts, strict=True)]
            if number:
                results += runs
            outputs = [[run.token] for run in runs]
            node.decode(names, outputs, output_tokens)
            if outputs != expected:
                raise WrongTokens(f"{way}: expected {expected}, got {outputs}")
            checked += sum(map(len, outputs))
    return samples, checked


def times_of(samples: dict[str, list[Prefilled]]) -> dict[str, Any]:
    """Return times in ms, and how much of the transfer is hidden."""
    times = {
        "transfer_ms": [run.arrived_s - run.exported_s for run in samples[WHOLE]],
        "exposed_ms": [run.arrived_s - run.end_s for run in samples[LAYERS]],
    }
    result: dict[str, Any] = {}
    for prefix, reduced in (("", median), ("least_", min), ("most_", max)):
        result |= {prefix + name: 1e3 * reduced(values) for name, values in times.items()}
    num_bytes = samples[WHOLE][0].num_bytes
    return result | {
        "hidden": min(1.0, 1 - result["exposed_ms"] / result["transfer_ms"]),
        "bytes_per_sequence": num_bytes, "gb_per_s": num_bytes / result["transfer_ms"] / 1e6,
        "runs": len(samples[LAYERS]),
    }  # fmt: skip


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Be the decoding process: start the other one, measure, and return the report."""
    node = make_node(device, arguments)
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.integers(0, 1024, (arguments.requests, arguments.tokens)).tolist()
    with ExitStack() as ending, one_core_per_stream(node.device):
        receiver = ending.enter_context(kv.PageReceiver(node.cache))
        process = PrefillProcess([*arguments.command, "--worker"], node, receiver)
        ending.callback(process.close)
        samples, checked = measure(
            node, process, prompts, arguments.output_tokens, arguments.rounds
        )
        stats = receiver.stats()
    node.cache.clear()
    if node.cache.num_available_pages != node.cache.pool.num_pages:
        raise WrongTokens(f"pages were not given back: {node.cache}")
    names = ("layers", "hidden", "tokens", "output_tokens", "page_size", "dtype", "requests")
    settings = {"hidden_size" if n == "hidden" else n: getattr(arguments, n) for n in names}
    transport = os.environ.get("UCX_TLS", "UCX's choice")
    return {
        **settings, "transport": transport, "tokens_checked": checked, "receiver": stats,
        **times_of(samples),
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    """Return the table."""
    rows = [
        (name, report[f"{prefix}transfer_ms"], report[f"{prefix}exposed_ms"])
        for name, prefix in (("median", ""), ("least", "least_"), ("most", "most_"))
    ]
    notes = [
        f"{report['hidden']:.0%} of the transfer is hidden, of medians",
        f"{report['bytes_per_sequence'] / 1e6:.1f} MB per sequence, alone at "
        f"{report['gb_per_s']:.2f} GB/s; {report['runs']} runs",
        f"{report['tokens_checked']} tokens are those of one process",
    ]
    if report["quick"]:
        notes.append(QUICK_NOTE)
    about = (
        f"random Llama of {report['layers']} layers, hidden {report['hidden_size']}; "
        f"{report['requests']} prompts of {report['tokens']} tokens, pages of "
        f"{report['page_size']} {report['dtype']} tokens; NIXL, {report['transport']}"
    )
    return "\n\n".join([about, format_table(("ms", "transfer", "exposed"), rows),
                        "\n".join(notes)])  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=int, help="of the model; default 8")
    add("--hidden", type=int, help="of the model; default 256")
    add("--tokens", type=int, help="of a prompt; default 1024")
    add("--output-tokens", type=int, default=8, help="of an answer")
    add("--requests", type=int, default=2, help="prompts")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--dtype", default="fp32", choices=("fp32", "fp16", "bf16", "fp8_e4m3", "int8"),
        help="of the cache")  # fmt: skip
    add("--rounds", type=int, help="measured runs of each way; default 9")
    add("--seed", type=int, default=0, help="of the prompts")
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
