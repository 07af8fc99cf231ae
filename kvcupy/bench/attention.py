"""Paged attention: decode over long caches, and prefill, beside torch's own attention.

torch attends over the same keys and values, already gathered into contiguous arrays: the cost of
paging is in kvcupy's time and not in torch's. Some rows of every result are checked against
float64. GB/s count visible K and V, query and output once; TFLOP/s count both products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import kvcupy as kv

from .. import reference
from ..formats import FORMATS, carrier_dtype
from . import baselines, candidates
from .baselines import (
    Builder,
    Compile,
    NotMeasured,
    Wrap,
    as_it_is,
    ignoring_stream,
    on_stream,
    upload,
)
from .checks import WrongBytes
from .models import Model
from .timers import Call

Array = np.ndarray[Any, Any]

TOLERANCE = {"bf16": 1.6e-2, "fp32": 2e-5}  # of outputs of about 1: two roundings, and sums
CHECKED_ROWS = 6  # of each set
BANK = 1_000_003  # values drawn; a prime, so that no two rows are equal


@dataclass(frozen=True)
class Shape(candidates.Shape):
    """Sequences of `context` tokens each, of which the last `new` attend.

    Attributes
    ----------
    format : of the cache; the query is bf16 beside fp8
    window : how many keys a query sees; 0: all
    """

    model: Model
    batch: int
    context: int
    new: int = 1
    format: str = "bf16"
    window: int = 0
    page_size: int = 16

    operation = "paged_attention"

    @property
    def name(self) -> str:
        what = "decode" if self.new == 1 else f"prefill {self.new} of"
        window = f" window={self.window}" if self.window else ""
        pages = f" page={self.page_size}" * (self.page_size != 16)
        size = f"{self.batch} x {self.context}{window}{pages}"
        return f"paged_attention {self.model.name} {self.format} {what} {size}"

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def series(self) -> str:
        return f"{'decode' if self.new == 1 else 'prefill'} window={self.window}"

    @property
    def query_format(self) -> str:
        return "bf16" if FORMATS[self.format].quantised else self.format

    @property
    def heads(self) -> int:
        return self.model.kv_heads or 1

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a key and of a value: for MLA, of the whole row and of the latent in it."""
        if self.model.mla:
            return sum(self.model.row_widths), self.model.latent
        return self.model.head_dim, self.model.head_dim

    @property
    def sm_scale(self) -> float:
        return float(self.model.head_dim**-0.5)

    @property
    def bytes_moved(self) -> int:
        first = self.window + self.new - 1 if self.window else self.context
        width = self.widths[0] if self.model.mla else sum(self.widths)
        rows = self.batch * min(first, self.context) * self.heads * width
        queries = self.batch * self.new * self.model.q_heads * sum(self.widths)
        sizes = (FORMATS[f].itemsize for f in (self.format, self.query_format))
        return sum(n * size for n, size in zip((rows, queries), sizes, strict=True))

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over the keys that are visible."""
        seen = range(self.context - self.new + 1, self.context + 1)
        keys = sum(min(n, self.window or n) for n in seen)
        return 2 * self.batch * keys * self.model.q_heads * sum(self.widths)

    @property
    def compiles(self) -> bool:
        return False  # torch's attention is one kernel

    def build(self, device: Any, sets: int) -> AttentionCase:
        return AttentionCase(device, self, sets)


class AttentionCase(candidates.Case):
    """Arguments of one shape: sets of pages of one cache, and a query and an output for each."""

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        super().__init__(device, shape, sets)
        rng = np.random.default_rng(0)
        model, pages = shape.model, -(-shape.context // shape.page_size)
        self.tables = rng.permutation(sets * shape.batch * pages).astype(np.int32)
        self.tables = self.tables.reshape(sets, shape.batch, pages)
        rows = (self.tables.size, shape.page_size, shape.heads)
        widths = shape.widths[:1] if model.mla else shape.widths
        self.caches = [_draw(rng, (*rows, width), shape.format) for width in widths]
        queries = (sets, shape.batch * shape.new, model.q_heads, shape.widths[0])
        self.queries = _draw(rng, queries, shape.query_format)
        self.sinks = rng.standard_normal(model.q_heads, np.float32) if model.sinks else None

        self.caches_on_device = [upload(device, array) for array in self.caches]
        self.queries_on_device = upload(device, self.queries)
        self.tables_on_device = upload(device, self.tables)
        lengths = (np.full(shape.batch, n, np.int32) for n in (shape.context, shape.new))
        self.lengths_on_device = [upload(device, array) for array in lengths]
        self.sinks_on_device = None if self.sinks is None else upload(device, self.sinks)
        outs = (*queries[:3], shape.widths[1])
        self.outs = device.zeros(outs, carrier_dtype(shape.query_format))
        device.synchronize()

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return a call for each query and its page table."""
        shape = self.shape
        k_cache, v_cache = (wrap(a, shape.format) for a in self._parts(self.caches_on_device))
        lengths, new = (wrap(a, "int32") for a in self.lengths_on_device)
        options: dict[str, Any] = {"sm_scale": shape.sm_scale}
        if shape.new > 1:
            options["query_lens"] = new
        if shape.window:
            options["window"] = shape.window
        if self.sinks_on_device is not None:
            options["sinks"] = wrap(self.sinks_on_device, "fp32")
        calls: list[Call] = []
        for rows, out, table in zip(
            self.queries_on_device, self.outs, self.tables_on_device, strict=True
        ):
            query, target = (wrap(a, shape.query_format) for a in (rows, out))
            arrays = (query, k_cache, v_cache, wrap(table, "int32"), lengths)
            bound = partial(kv.paged_attention, *arrays, out=target, **options)
            calls.append(partial(on_stream, bound))
        return calls

    def _parts(self, caches: list[Any]) -> list[Any]:
        """Return K and V: of MLA, two views of one cache."""
        return [caches[0], caches[-1][..., : self.shape.widths[1]]]

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        """Return torch's calls over contiguous keys."""
        shape = self.shape
        if FORMATS[shape.format].quantised or shape.model.sinks:
            what = "sinks" if shape.model.sinks else shape.format
            raise NotMeasured(f"scaled_dot_product_attention takes no {what}")
        query, parts = self._tensors(torch, wrap)
        ahead, mask = shape.context - shape.new, None
        first = max(0, ahead + 1 - shape.window) if shape.window else 0  # that any query sees
        causal = ahead == 0 and not (0 < shape.window < shape.context)
        if shape.new > 1 and not causal:
            mask = torch.ones(shape.new, shape.context, dtype=torch.bool, device=query.device)
            mask = mask.tril(ahead)
            if shape.window:
                mask &= ~mask.tril(ahead - shape.window)
            mask = mask[:, first:]
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention, attn_mask=mask,
            is_causal=causal and shape.new > 1, scale=shape.sm_scale, enable_gqa=True,
        )  # fmt: skip

        def work(rows: Any, keys: Any, values: Any) -> Any:
            return attend(rows, keys, values).transpose(1, 2)

        calls: list[Call] = []
        tables = torch.as_tensor(self.tables, device=query.device)
        for rows, table in zip(query, tables, strict=True):
            keys, values = (
                part[table].flatten(1, 2)[:, first : shape.context].transpose(1, 2).contiguous()
                for part in parts
            )  # fmt: skip
            rows = rows.view(shape.batch, shape.new, *rows.shape[1:]).transpose(1, 2)
            calls.append(partial(ignoring_stream, partial(work, rows, keys, values)))
        return calls

    def _tensors(self, torch: Any, wrap: Wrap) -> tuple[Any, list[Any]]:
        """Return queries, and K and V in pages."""
        caches = [wrap(a, self.shape.format) for a in self._parts(self.caches_on_device)]
        return wrap(self.queries_on_device, self.shape.query_format), caches

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return what others run over the same pages, in bf16."""
        shape = self.shape
        if shape.format != "bf16" or shape.model.mla or shape.model.sinks:
            return {}
        makers: dict[str, Callable[..., list[Callable[[], Any]]]] = {
            "vllm": baselines.vllm_attention
        }
        if shape.new == 1:
            makers["flashinfer"] = baselines.flashinfer_decode

        def build(make: Callable[..., list[Callable[[], Any]]]) -> list[Call]:
            query, caches = self._tensors(torch, wrap)
            tables = wrap(self.tables_on_device, "int32")
            works = make(torch, query, caches, tables, shape.context, shape.window)
            return [partial(ignoring_stream, work) for work in works]

        return {name: partial(build, make) for name, make in makers.items()}

    def wipe(self) -> None:
        """Zero the outputs."""
        self.device.copy(self.outs, self.device.zeros(self.outs.shape, self.outs.dtype))
        self.device.synchronize()

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare some rows of each set with float64."""
        shape, rng = self.shape, np.random.default_rng(1)
        outs = self.device.to_numpy(self.outs)
        for number, result in enumerate(results):
            if candidate.startswith("kvcupy"):
                got = reference.decode(outs[number], shape.query_format)
            else:
                got = np.asarray(result.float().cpu(), np.float64).reshape(outs[number].shape)
            for row in rng.choice(len(got), min(CHECKED_ROWS, len(got)), replace=False):
                head = int(rng.integers(shape.model.q_heads))
                error = np.abs(got[row, head] - self._exact(number, int(row), head)).max()
                if not error <= TOLERANCE[shape.query_format]:
                    raise WrongBytes(
                        f"{shape.name}, {candidate}: row {row} of set {number}, head {head} is off "
                        f"by {error:.2g}"
                    )

    def _exact(self, number: int, row: int, head: int) -> Array:
        """Return what a query of a set should give, in float64."""
        shape = self.shape
        end = shape.context - shape.new + row % shape.new + 1
        start = max(0, end - shape.window) if shape.window else 0
        pages = self.tables[number, row // shape.new]
        group = shape.model.q_heads // shape.heads
        keys, values = (
            reference.decode(a[pages, :, head // group], shape.format)
            .reshape(-1, a.shape[-1])[start:end]
            for a in self._parts(self.caches)
        )  # fmt: skip
        query = reference.decode(self.queries[number, row, head], shape.query_format)
        scores = keys @ query * shape.sm_scale
        top = scores.max() if self.sinks is None else max(scores.max(), self.sinks[head])
        weights = np.exp(scores - top)
        total = weights.sum() + (0.0 if self.sinks is None else np.exp(self.sinks[head] - top))
        return np.asarray(weights @ values / total)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], fmt: str) -> Array:
    """Draw bits of values, which repeat in large arrays: drawing them all would take minutes."""
    values = rng.standard_normal(min(int(np.prod(shape)), BANK), np.float32)
    return np.resize(reference.encode(values, fmt), shape).view(carrier_dtype(fmt))
