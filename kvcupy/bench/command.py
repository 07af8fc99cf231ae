"""The command: which cases are measured, and what becomes of the results."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import devices
from ..config import config
from ..errors import DeviceError
from ..progress import Progress
from . import attention, pages, rope, store, transfer
from .candidates import Bench, Shape, render
from .checks import WrongBytes
from .models import MODELS, Model
from .report import compare, describe, plot, read_json, require_matplotlib, where, write_json
from .timers import DIRECTIONS

OPERATIONS = (
    "store_kv", "store_mla", "rope_store_kv", "rope_store_mla", "gather_kv", "copy_pages",
    "slot_mapping", "paged_attention", "transfer_pages",
)  # fmt: skip
FORMATS = ("bf16", "fp8_e4m3")  # of caches


@dataclass(frozen=True)
class Sizes:
    """How much each operation does.

    Attributes
    ----------
    tokens : of a step that stores or gathers
    batches, contexts : sequences that decode, and the tokens of each
    prefill : new tokens of a sequence that already has as many; 0: none is measured
    transferred : tokens of all layers
    """

    tokens: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    prefill: int
    transferred: int
    page_size: int = 16


SIZES = {
    "cuda": Sizes((1, 16, 128, 4096), (1, 16, 64), (1024, 8192), 2048, 1024),
    "host": Sizes((1, 16, 128, 4096), (1, 8), (1024, 4096), 64, 256),
}
QUICK = Sizes((1, 128), (2,), (256,), 16, 32)
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
    page_size = sizes.page_size
    if operation in ("store_kv", "rope_store_kv", "gather_kv") and model.mla:
        return
    if operation in ("store_mla", "rope_store_mla") and not model.mla:
        return
    if operation in ("store_kv", "store_mla", "rope_store_kv", "rope_store_mla", "gather_kv"):
        for fmt in formats:
            scaled = "bf16" if fmt == "bf16" else "fp8 static"
            for count in sizes.tokens:
                if operation.startswith("store"):
                    yield store.Shape(operation, model, count, scaled)
                elif operation.startswith("rope"):
                    norm = " norm" if model.qk_norm and fmt == "bf16" else ""
                    yield rope.Shape(operation, model, count, scaled + norm)
                else:
                    yield pages.Shape(operation, count, scaled, model=model, page_size=page_size)
    elif operation == "copy_pages" and "bf16" in formats:
        for count in (1, -(-sizes.transferred // page_size)):
            yield pages.Shape(operation, count, model=model, page_size=page_size)
    elif operation == "slot_mapping":
        for count in sizes.batches:
            yield pages.Shape(operation, count, page_size=page_size)
        yield pages.Shape(operation, 1, append=max(sizes.tokens), page_size=page_size)
    elif operation == "paged_attention":
        yield from _attention(model, formats, sizes)
    elif operation == "transfer_pages" and "bf16" in formats:
        for to in DIRECTIONS:
            yield transfer.ModelShape(model, sizes.transferred, to, page_size=page_size)


def _attention(model: Model, formats: Sequence[str], sizes: Sizes) -> Iterator[attention.Shape]:
    """Yield decode steps in each kind of layer that the model has, and a prefill."""
    for fmt in formats:
        for context in sizes.contexts:
            for window in {0, model.window if model.window < context else 0}:
                for batch in sizes.batches:
                    yield attention.Shape(
                        model, batch, context, 1, fmt, window, page_size=sizes.page_size
                    )
    if sizes.prefill and "bf16" in formats:
        yield attention.Shape(model, 1, 2 * sizes.prefill, sizes.prefill,
                              page_size=sizes.page_size)  # fmt: skip


def main(
    device_name: str | None = None, *, operations: Sequence[str] | None = None,
    models: Sequence[str] | None = None, formats: Sequence[str] | None = None,
    quick: bool = False, rotate_mb: int | None = None, with_compile: bool = False,
    json_file: Path | None = None, plot_file: Path | None = None,
    compared: Sequence[Path] | None = None, lines: bool = False, **sizes: Any,
) -> int:  # fmt: skip
    """Measure cases, print and write the results, and return the exit status.

    1: a result of kvcupy's was wrong. 2: an option was wrong.

    Parameters
    ----------
    device_name : None: a GPU if there is one
    operations, models, formats : names; None: all, or few if `quick`
    quick : few small cases
    rotate_mb : size of the arguments that calls rotate over
    with_compile : measure torch.compile too
    json_file, plot_file : written
    compared : two JSON files to print the ratios of; nothing is measured
    lines : say how far it is where stderr is no terminal
    sizes : replace those of `Sizes` by that name, where they are not None
    """
    try:
        if compared is not None:
            print(compare(*map(_read, compared)))
            return 0
        device = _device(device_name)
        names = {
            "--op": (operations, OPERATIONS, OPERATIONS),
            "--model": (models, MODELS, QUICK_MODELS if quick else tuple(MODELS)),
            "--format": (formats, FORMATS, FORMATS),
        }
        chosen = [_chosen(option, *rest) for option, rest in names.items()]
        own = replace(QUICK if quick else SIZES[device.kind],
                      **{name: n for name, n in sizes.items() if n is not None})  # fmt: skip
        shapes = cases(chosen[0], [MODELS[name] for name in chosen[1]], chosen[2], own)
        if not shapes:
            raise ValueError(f"no case: {', '.join(chosen[1])} has none of {', '.join(chosen[0])}")
        if plot_file is not None:
            require_matplotlib()  # before all is measured, not after
    except (ValueError, DeviceError, OSError, ImportError) as error:
        print(f"bench: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    about = describe(device)  # now: the tree may change while this runs
    try:
        report = {
            "benchmark": "models", **about, "quick": quick,
            **_measure(device, shapes, quick, rotate_mb, with_compile, lines),
        }  # fmt: skip
    except WrongBytes as error:
        print(f"bench: wrong result: {error}", file=sys.stderr)
        return 1
    print(f"{render(report)}\n\n{where(report)}")
    if json_file is not None:
        write_json(json_file, report)
    if plot_file is not None:
        plot(report, plot_file)
    return 0


def _measure(
    device: Any, shapes: Sequence[Shape], quick: bool, rotate_mb: int | None, with_compile: bool,
    lines: bool,
) -> dict[str, Any]:  # fmt: skip
    """Measure with replays of graphs on a GPU; on the host device as torch's CPU calls go."""
    bench = Bench(
        device, quick=quick, modes=("eager",) if device.kind == "host" else ("graph",),
        rotate_bytes=None if rotate_mb is None else rotate_mb * 1_000_000,
        with_compile=with_compile,
    )  # fmt: skip
    fallback, config.fallback = config.fallback, "error"  # the reference is not measured
    try:
        with Progress("bench", len(shapes), "cases", lines=lines) as progress:
            return bench.report(shapes, progress.to)
    finally:
        config.fallback = fallback


def _device(name: str | None) -> Any:
    try:
        return devices.get(name)
    except ValueError as error:
        raise ValueError(f"--device: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"--compare: {error}") from None


def _chosen(
    option: str, names: Sequence[str] | None, known: Collection[str], default: Sequence[str]
) -> Sequence[str]:
    for name in names or ():
        if name not in known:
            raise ValueError(f"{option}: expected one of {', '.join(known)}, got {name}")
    return default if names is None else names
