"""Paged attention: decode over long caches, and prefill, compared with torch's attention.

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
from common.checks import WrongBytes
from common.models import Model
from common.timers import Call

import kvcupy as kv
from kvcupy import reference
from kvcupy.formats import FORMATS, numpy_dtype

from . import baselines, candidates
from .baselines import (
    Builder,
    NotMeasured,
    Wrap,
    ignoring_stream,
    on_stream,
)

Array = np.ndarray[Any, Any]

# Of outputs of about 1: two roundings, and sums.
TOLERANCE = {"bf16": 1.6e-2, "fp16": 2e-3, "fp32": 2e-5}
CHECKED_ROWS = 6  # of each set
BANK = 1_000_003  # values drawn; a prime, so that no two rows are equal


@dataclass(frozen=True)
class Shape(candidates.Shape):
    """Sequences of `context` tokens each, of which the last `new` attend.

    Attributes
    ----------
    format : of the cache; the query of fp8 is bf16
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

    def build(self, device: Any, sets: int) -> AttentionCase:
        return AttentionCase(device, self, sets)


class AttentionCase(candidates.Case):
    """Arguments of one shape: sets of pages of one cache, and a query and an output for each."""

    def draw(self, rng: np.random.Generator) -> None:
        shape, model = self.shape, self.shape.model
        pages = -(-shape.context // shape.page_size)
        tables = rng.permutation(self.sets * shape.batch * pages).astype(np.int32)
        rows = (tables.size, shape.page_size, shape.heads)
        widths = shape.widths[:1] if model.mla else shape.widths
        self.caches = [
            self.bits(_draw(rng, (*rows, n), shape.format), shape.format) for n in widths
        ]
        queries = (self.sets, shape.batch * shape.new, model.q_heads, shape.widths[0])
        self.queries = self.bits(_draw(rng, queries, shape.query_format), shape.query_format)
        self.tables = self.bits(tables.reshape(self.sets, shape.batch, pages), "int32")
        self.outs = self.zeros((*queries[:3], shape.widths[1]), shape.query_format)
        self.shared["seq_lens"] = self.bits(np.full(shape.batch, shape.context, np.int32), "int32")
        if shape.new > 1:
            new = np.full(shape.batch, shape.new, np.int32)
            self.shared["query_lens"] = self.bits(new, "int32")
        if model.sinks:
            logits = rng.standard_normal(model.q_heads, np.float32)
            self.shared["sinks"] = self.bits(logits, "fp32")
        self.options = {"sm_scale": shape.sm_scale, "window": shape.window or None}

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return a call for each query and its page table."""
        shared = candidates.wrapped(self.shared, wrap)
        caches = [wrap(a, self.shape.format) for a in self._parts([c.array for c in self.caches])]
        operation: Any = kv.paged_attention
        calls: list[Call] = []
        for own in zip(self.queries.array, self.outs.array, self.tables.array, strict=True):
            query, out = (wrap(array, self.shape.query_format) for array in own[:2])
            arrays = (query, *caches, wrap(own[2], "int32"))
            bound = partial(operation, *arrays, **shared, out=out, **self.options)
            calls.append(partial(on_stream, bound))
        return calls

    def _parts(self, caches: list[Any]) -> list[Any]:
        """Return K and V: of MLA, two views of one cache."""
        return [caches[0], caches[-1][..., : self.shape.widths[1]]]

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
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
        tables = torch.as_tensor(self.tables.host, device=query.device)
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
        caches = [wrap(a, self.shape.format) for a in self._parts([c.array for c in self.caches])]
        return wrap(self.queries.array, self.shape.query_format), caches

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return what others run over the same pages; vLLM's CPU kernels copy them."""
        shape = self.shape
        if shape.model.sinks or FORMATS[shape.format].quantised:
            return {}
        makers: dict[str, Callable[..., list[Callable[[], Any]]]] = {}
        last: Any = shape.window
        if shape.model.mla:
            last = shape.sm_scale
        elif self.device.kind == "host":
            makers["vllm"] = baselines.vllm_cpu_attention
        if shape.format == "bf16":
            mla = shape.model.mla
            makers["flashinfer"] = (
                baselines.flashinfer_mla if mla else baselines.flashinfer_attention
            )

        def build(make: Callable[..., list[Callable[[], Any]]]) -> list[Call]:
            query, caches = self._tensors(torch, wrap)
            tables = wrap(self.tables.array, "int32")
            works = make(torch, query, caches, tables, shape.context, last)
            return [partial(ignoring_stream, work) for work in works]

        return {name: partial(build, make) for name, make in makers.items()}

    def wipe(self) -> None:
        """Zero the outputs."""
        self.device.copy(self.outs.array, self.device.asarray(self.outs.host))
        self.device.synchronize()

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare some rows of each set with float64."""
        shape, rng = self.shape, np.random.default_rng(1)
        outs = self.device.to_numpy(self.outs.array)
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
        sequence, head_of_cache = row // shape.new, head * shape.heads // shape.model.q_heads
        keys, values = (
            a[:, :, head_of_cache, None].view(numpy_dtype(shape.format))
            for a in self._parts([cache.host for cache in self.caches])
        )
        query = self.queries.host[number, row, head].view(numpy_dtype(shape.query_format))
        sinks = self.shared["sinks"].host[head, None] if shape.model.sinks else None
        exact, _, _ = reference.paged_attention(
            query[None, None], keys, values, self.tables.host[number, sequence, None],
            np.array([shape.context - shape.new + row % shape.new + 1]), sinks=sinks,
            **self.options,
        )  # fmt: skip
        return np.asarray(exact[0, 0])


def _draw(rng: np.random.Generator, shape: tuple[int, ...], fmt: str) -> Array:
    """Draw bits of values, which repeat in large arrays: drawing them all would take minutes."""
    values = rng.standard_normal(min(int(np.prod(shape)), BANK), np.float32)
    return np.resize(reference.encode(values, fmt), shape)
