"""Measure operations in the shapes of real models, and torch, FlashInfer and vLLM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import frame
from common.frame import OptionError
from common.models import MODELS, Model
from common.report import compare, read_json

from kvcupy.config import config
from kvcupy.progress import Progress, count

from .cases import Shape
from .measure import Bench, render

__all__ = ["cases", "main", "render", "run"]

OPERATIONS = (
    "store_kv", "store_mla", "rope_store_kv", "rope_store_mla", "gather_kv", "copy_pages",
    "shift_pages", "slot_mapping", "paged_attention",
)  # fmt: skip
FORMATS = ("bf16", "fp8_e4m3")  # of caches, by default
MORE_FORMATS = ("fp16", "fp32")  # which attention alone is measured with


@dataclass(frozen=True)
class Sizes:
    """How much each operation does.

    Attributes
    ----------
    tokens : of a step that stores or gathers
    batches, contexts : sequences that decode, and the tokens of each
    prefills : new tokens of a sequence, and its tokens with them
    decodes : sequences that decode, and the tokens of each; none: all of `batches` and `contexts`
    """

    tokens: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    prefills: Sequence[tuple[int, int]]
    page_size: int = 16
    decodes: Sequence[tuple[int, int]] = ()


SIZES = {
    "cuda": Sizes((1, 16, 128, 4096), (1, 16, 64), (1024, 8192), [(2048, 4096)]),
    "host": Sizes((1, 16, 128, 4096), (1, 8), (1024, 4096), [(64, 128)]),
}
QUICK = Sizes((1, 128), (2,), (256,), [(16, 32)])
QUICK_MODELS = ("llama-3.1-8b", "deepseek-v3-mla")


def cases(
    operations: Collection[str], models: Sequence[Model], formats: Sequence[str], sizes: Sizes
) -> list[Shape]:
    """Return the cases of some operations and models, those that no model has once."""
    shapes = [
        shape
        for operation in OPERATIONS if operation in operations
        for model in models
        for shape in _of(operation, model, formats, sizes)
    ]  # fmt: skip
    return list({shape.name: shape for shape in shapes}.values())


def _of(operation: str, model: Model, formats: Sequence[str], sizes: Sizes) -> Iterator[Shape]:
    """Yield the cases of one operation and model: none where the model has no such operation."""
    if operation in ("store_kv", "rope_store_kv", "gather_kv", "shift_pages") and model.mla:
        return
    if operation.endswith("_mla") and not model.mla:
        return
    shape = partial(Shape, operation, model, page_size=sizes.page_size)
    if operation in ("copy_pages", "shift_pages"):
        for count in (1, 64) if "bf16" in formats else ():
            yield shape(count)
    elif operation == "slot_mapping":
        for count in sizes.batches:
            yield shape(count)
        yield shape(1, new=max(sizes.tokens))
    elif operation == "paged_attention":
        pairs = sizes.decodes or [(b, n) for n in sizes.contexts for b in sizes.batches]
        for fmt in formats:
            for batch, context in pairs:
                for window in {0, model.window if model.window < context else 0}:
                    yield shape(batch, fmt, context=context, window=window)
            for new, context in sizes.prefills:
                yield shape(1, fmt, new=new, context=context)
    else:
        for fmt in (fmt for fmt in formats if fmt in FORMATS):
            for count in sizes.tokens:
                yield shape(count, "bf16" if fmt == "bf16" else "fp8 static")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    add = parser.add_argument
    add("--op", nargs="+", metavar="OPERATION", help="such as store_kv; default: all")
    add("--model", nargs="+", help="such as llama-3.1-8b; default: all, or two if --quick")
    add(
        "--format",
        nargs="+",
        help="of caches: bf16, fp8_e4m3, of attention also fp16, fp32; default: the first two",
    )
    add("--tokens", nargs="+", type=count, metavar="N", help="of a step that stores or gathers")
    add("--batch", nargs="+", type=count, metavar="N", help="sequences that decode")
    add("--context", nargs="+", type=count, metavar="N", help="tokens of each of them")
    prefill = "new tokens of a sequence, and all its tokens with them, as 64:2048"
    add("--prefill", nargs="*", type=_prefill, metavar="NEW:CONTEXT", help=prefill)
    decode = "sequences that decode, and the tokens of each, instead of --batch and --context"
    add("--decode", nargs="+", type=_pair, metavar="BATCH:CONTEXT", help=decode)
    add("--page-size", type=count, metavar="N", help="tokens per page; default: 16")
    rotated = "size of the arguments that calls rotate over; default: 256, 64 if --quick"
    add("--rotate-mb", type=count, metavar="MB", help=rotated)
    add("--progress", action="store_true", help="print lines where stderr is not a terminal")
    compared = "print the ratios of two files that --json has written, and measure nothing"
    add("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help=compared)


def main(options: argparse.Namespace) -> int:
    """Measure or compare, and return the exit status."""
    if options.compare is None:
        return frame.run("models", sys.modules[__name__], options)
    try:
        print(compare(*map(_read, options.compare)))
    except OptionError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure with replays of graphs on a GPU; on the host device as torch's CPU calls go."""
    operations = _chosen("--op", options.op, OPERATIONS, OPERATIONS)
    default = QUICK_MODELS if options.quick else tuple(MODELS)
    models = _chosen("--model", options.model, MODELS, default)
    formats = _chosen("--format", options.format, (*FORMATS, *MORE_FORMATS), FORMATS)
    sizes = {
        "tokens": options.tokens, "batches": options.batch, "contexts": options.context,
        "prefills": options.prefill, "page_size": options.page_size, "decodes": options.decode,
    }  # fmt: skip
    own = replace(QUICK if options.quick else SIZES[device.kind],
                  **{name: n for name, n in sizes.items() if n is not None})  # fmt: skip
    shapes = cases(operations, [MODELS[name] for name in models], formats, own)
    if not shapes:
        raise OptionError(f"no case: {', '.join(models)} has none of {', '.join(operations)}")
    bench = Bench(
        device, quick=options.quick,
        rotate_bytes=options.rotate_mb and options.rotate_mb * 1_000_000,
    )  # fmt: skip
    fallback, config.fallback = config.fallback, "error"  # the reference is not measured
    try:
        with Progress("bench", len(shapes), "cases", lines=options.progress) as progress:
            return bench.report(shapes, progress.to)
    finally:
        config.fallback = fallback


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    return count(first), count(second)


def _prefill(text: str) -> tuple[int, int]:
    new, context = _pair(text)
    if new > context:
        raise argparse.ArgumentTypeError(f"expected no more new tokens than tokens, got {text}")
    return new, context


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        raise OptionError(f"--compare: {error}") from None


def _chosen(
    option: str, names: Sequence[str] | None, known: Collection[str], default: Sequence[str]
) -> Sequence[str]:
    for name in names or ():
        if name not in known:
            raise OptionError(f"{option}: expected one of {', '.join(known)}, got {name}")
    return default if names is None else names
