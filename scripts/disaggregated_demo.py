"""Prefill in one process and decode in another, and show how much of the migration is hidden.

The decoding process gets the sequence's pages while the prefilling one still computes:

    prefill   compute   |layer 0|layer 1|layer 2|layer 3| ...
    pages                       |layer 0|layer 1|layer 2| ...
    decode    compute                                      |step 1|step 2| ...

The decoding process starts the other one, and asks it for a prompt by a line of JSON; the answers
are lines too: a ticket as soon as there is one, then the first token, then times.

Two ways: the sequence is exported in the step that prefills it, so that each layer leaves as soon
as its attention has run; and it is exported when all is computed. Both are compared with one
process that does everything: the tokens must be the same.

migration     from the export of a computed sequence to the arrival of its last page: ticket,
              connection, handshake and all
exposed       from the end of the computation to the arrival of the last page; negative where it
              arrives while the last layer still computes
hidden        1 - exposed / migration, of medians, and at most 1: what of the migration no one has
              to wait for
with export   the time of the computation beside which layers leave, to compare with that alone

    python scripts/disaggregated_demo.py --out build/disaggregated
    python scripts/disaggregated_demo.py --engine nixl --json build/disaggregated.json
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

import common.one_core  # noqa: F401
import numpy as np
from common import frame
from common.measure import (
    QUICK_NOTE,
    chosen_device,
    log_compilation,
    one_core_per_stream,
    require_products,
)
from common.report import format_table
from common.timers import named_stream
from serving.engine import Node
from serving.llama import Llama, LlamaConfig, random_weights
from serving.schedule import CacheSettings

import kvcupy as kv
from kvcupy.timelines.timeline import Span, Timeline

HEADS = 8, 8  # of queries, of keys and values
DRAWN_OF = 3  # runs, of which the shortest is drawn: other programs disturbed it least
LAYERS, WHOLE = "layer by layer", "when all is computed"
NO_EXPORT = "without an export"


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


def serve_prefills(
    node: PairedNode, sender: Any, requests: IO[str], answers: IO[str], lease_s: float = 30.0
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

    def __init__(self, command: Sequence[str], node: PairedNode, receiver: Any) -> None:
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
    node = make_node(chosen_device(arguments.device), arguments)
    sender = kv.PageSender(node.cache.pool, listen=arguments.listen, engine=arguments.engine)
    try:
        with one_core_per_stream(node.device):
            serve_prefills(node, sender, sys.stdin, answers)
    finally:
        sender.close()


def measure(
    node: PairedNode,
    process: PrefillProcess,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    rounds: int,
) -> tuple[dict[str, list[Prefilled]], int]:
    """Prefill every prompt in every way, round by round; check the tokens of each."""
    expected = node.generate(prompts, output_tokens)
    samples: dict[str, list[Prefilled]] = {LAYERS: [], WHOLE: [], NO_EXPORT: []}
    checked = 0
    for number in range(rounds + 1):  # the first warms up
        for way, results in samples.items():
            names = [(way, number, i) for i in range(len(prompts))]
            runs = [process.prefill(*pair, way) for pair in zip(names, prompts, strict=True)]
            if number:
                results += runs
            if way == NO_EXPORT:
                continue
            outputs = [[run.token] for run in runs]
            node.decode(names, outputs, output_tokens)
            if outputs != expected:
                raise WrongTokens(f"{way}: expected {expected}, got {outputs}")
            checked += sum(map(len, outputs))
    return samples, checked


def times_of(samples: dict[str, list[Prefilled]]) -> dict[str, Any]:
    """Return times in ms, and how much of the migration is hidden."""
    times = {
        "compute_ms": [run.end_s - run.start_s for run in samples[NO_EXPORT]],
        "compute_with_export_ms": [run.end_s - run.start_s for run in samples[LAYERS]],
        "migration_ms": [run.arrived_s - run.exported_s for run in samples[WHOLE]],
        "exposed_ms": [run.arrived_s - run.end_s for run in samples[LAYERS]],
        "one_after_another_ms": [run.arrived_s - run.start_s for run in samples[WHOLE]],
        "layer_by_layer_ms": [run.arrived_s - run.start_s for run in samples[LAYERS]],
    }
    result: dict[str, Any] = {}
    for prefix, reduced in (("", median), ("least_", min), ("most_", max)):
        result |= {prefix + name: 1e3 * reduced(values) for name, values in times.items()}
    result["hidden"] = min(1.0, 1 - result["exposed_ms"] / result["migration_ms"])
    num_bytes = samples[WHOLE][0].num_bytes
    result["bytes_per_sequence"] = num_bytes
    result["gb_per_s"] = num_bytes / result["migration_ms"] / 1e6
    result["runs"] = len(samples[LAYERS])
    return result


def draw(
    node: PairedNode, process: PrefillProcess, prompt: Sequence[int], output_tokens: int, out: Path
) -> None:
    """Save a timeline of both processes as a page, as JSON and as a picture."""

    def record() -> Any:
        with kv.timeline() as recorded:
            run = process.prefill("drawn", prompt, LAYERS, timeline=True)
            node.decode(["drawn"], [[run.token]], output_tokens)
        own_us = recorded.start_s * 1e6
        spans = [
            *(_moved(span, 0, "1 prefill") for span in run.spans),
            *(_moved(span, 0, "2 pages") for span in on_their_way(run)),
            *(_moved(span, own_us, "3 decode") for span in recorded.spans),
        ]
        spans = [span for span in spans if span.lane in ("compute", "on their way")]
        start_us = min(span.start_us for span in spans)
        merged = Timeline()
        merged.add(_moved(span, -start_us, span.device) for span in spans)
        return merged, max(span.end_us for span in merged.spans)

    merged, _ = min((record() for _ in range(DRAWN_OF)), key=lambda pair: pair[1])
    out.mkdir(parents=True, exist_ok=True)
    title = f"A prompt of {len(prompt)} tokens: prefill and decode in two processes"
    for suffix in ("html", "json"):
        merged.save(out / f"timeline.{suffix}", title=title)
    merged.plot(out / "timeline.png", title=title)


def _moved(span: Span, us: float, device: str) -> Span:
    return replace(span, start_us=span.start_us + us, device=device)


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Be the decoding process: start the other one, measure, and return the report."""
    node = make_node(device, arguments)
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.integers(0, 1024, (arguments.requests, arguments.tokens)).tolist()
    with ExitStack() as ending, one_core_per_stream(node.device):
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        listen = arguments.listen or f"unix:{folder / 'pages'}"
        receiver = kv.PageReceiver(node.cache.pool, engine=arguments.engine)
        ending.callback(receiver.close)
        command = [*arguments.command, "--worker", "--listen", listen]
        process = PrefillProcess(command, node, receiver)
        ending.callback(process.close)
        samples, checked = measure(
            node, process, prompts, arguments.output_tokens, arguments.rounds
        )
        if arguments.out:
            draw(node, process, prompts[0], arguments.output_tokens, arguments.out)
        stats = receiver.stats()
    node.cache.clear()
    if node.cache.num_available_pages != node.cache.pool.num_pages:
        raise WrongTokens(f"pages were not given back: {node.cache}")
    return {
        "engine": arguments.engine,
        "listen": listen.partition(":")[0],
        "layers": arguments.layers,
        "hidden_size": arguments.hidden,
        "tokens": arguments.tokens,
        "output_tokens": arguments.output_tokens,
        "page_size": arguments.page_size,
        "dtype": arguments.dtype,
        "requests": arguments.requests,
        "tokens_checked": checked,
        "receiver": stats,
        **times_of(samples),
    }


def render(report: dict[str, Any]) -> str:
    """Return the table."""
    columns = {
        "compute": "compute_ms", "with export": "compute_with_export_ms",
        "migration": "migration_ms", "exposed": "exposed_ms",
        "one after another": "one_after_another_ms", "layer by layer": "layer_by_layer_ms",
    }  # fmt: skip
    rows = [
        (name, *(report[prefix + column] for column in columns.values()))
        for name, prefix in (("median", ""), ("least", "least_"), ("most", "most_"))
    ]
    notes = [
        f"{report['hidden']:.0%} of the migration is hidden, of medians",
        f"{report['bytes_per_sequence'] / 1e6:.1f} MB per sequence, alone at "
        f"{report['gb_per_s']:.2f} GB/s; {report['runs']} runs",
        f"{report['tokens_checked']} tokens are those of one process",
    ]
    if report["quick"]:
        notes.append(QUICK_NOTE)
    about = (
        f"random Llama of {report['layers']} layers, hidden {report['hidden_size']}; "
        f"{report['requests']} prompts of {report['tokens']} tokens, pages of "
        f"{report['page_size']} {report['dtype']} tokens; engine {report['engine']}, "
        f"{report['listen']}"
    )
    return "\n\n".join([about, format_table(("ms", *columns), rows), "\n".join(notes)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=("socket", "nixl"), default="socket", help="that moves the pages")
    add("--listen", help='of the sender: "unix:PATH" or "tcp:127.0.0.1:PORT"; default: unix')
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
    add("--out", type=Path, help="write a timeline (HTML, JSON and PNG) to this folder")
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
