"""The cases of the benchmark of operations: arguments in a model's shapes, torch's code, checks.

Every case holds several sets of arguments, which calls rotate over, in caches for all sets. A
candidate makes one call per set. Copies are checked byte by byte, rotations and attention against
float64. torch attends over keys and values that are already contiguous.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common.checks import BF16, WrongBytes, normal_bits, require_equal
from common.models import Model
from common.timers import Call

import kvcupy as kv
from kvcupy import reference
from kvcupy.formats import FORMATS, carrier_dtype, numpy_dtype
from kvcupy.ops.spec import OPERATIONS
from kvcupy.testing.tolerances import rotation_errors

from . import baselines
from .baselines import Builder, NotMeasured, Wrap, on_stream, upload, without_stream

Array = np.ndarray[Any, Any]

SCALE = 0.0625  # a power of two: dividing and multiplying by the reciprocal agree bitwise
STORED = {"bf16": "bf16", "fp8 static": "fp8_e4m3"}
MAX_POSITIONS, ROPE_BASE = 8192, 500_000.0
DELTA = 1000  # positions that pages are shifted by
CHECKED_TOKENS, CHECKED_ROWS = 128, 6  # of each set, against float64
ATTENTION_TOLERANCE = {"bf16": 1.6e-2, "fp16": 2e-3, "fp32": 2e-5}  # of outputs of about 1
BASELINE_ERROR = 2.0**-6  # of rotations in bf16, by the largest element


@dataclass(frozen=True)
class Shape:
    """What a case does, and how much.

    Attributes
    ----------
    count : tokens that are stored or gathered, pages, or sequences
    format : of the cache; of the query of fp8 attention: bf16
    new : tokens of each sequence that attend, or are appended
    context : tokens of each sequence that are attended to
    window : how many keys a query sees; 0: all
    """

    operation: str
    model: Model
    count: int
    format: str = "bf16"
    new: int = 1
    context: int = 0
    window: int = 0
    page_size: int = 16

    @property
    def name(self) -> str:
        op, model, pages = self.operation, self.model.name, ""
        if self.page_size != 16 and "store" not in op:
            pages = f" page={self.page_size}"
        if op == "slot_mapping":
            return f"{op} sequences={self.count} appended={self.new}{pages}"
        if op == "gather_kv":
            return f"{op} {model} {self.format} to bf16 T={self.count}{pages}"
        if op == "copy_pages":
            what = "latent" if self.model.mla else "K and V"
            return f"{op} {model} {what} pages={self.count}{pages}"
        if op == "shift_pages":
            return f"{op} {model} K onto other pages={self.count}{pages}"
        if op == "paged_attention":
            what = "decode" if self.new == 1 else f"prefill {self.new} of"
            window = f" window={self.window}" if self.window else ""
            return f"{op} {model} {self.format} {what} {self.count} x {self.context}{window}{pages}"
        return f"{op} {model} {self.format} T={self.count}"

    @property
    def model_name(self) -> str:
        return "any" if self.operation == "slot_mapping" else self.model.name

    @property
    def rotary(self) -> int:
        return self.model.rope or self.model.head_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a key and of a value: for MLA, of the whole row and of the latent in it."""
        if self.model.mla:
            return sum(self.model.row_widths), self.model.latent
        return self.model.head_dim, self.model.head_dim

    @property
    def query_format(self) -> str:
        return "bf16" if FORMATS[self.format].quantised else self.format

    @property
    def bytes_moved(self) -> int:
        """Bytes that a call has to read and write."""
        model, count, row = self.model, self.count, sum(self.model.row_widths)
        stored = row * (1 if self.format == "fp8 static" else 2)
        if self.operation == "slot_mapping":  # slots, lengths, and page table entries
            return count * (self.new * 8 + 8 + 4 * -(-self.new // self.page_size))
        if self.operation == "copy_pages":
            return count * (2 * row * self.page_size * 2 + 16)
        if self.operation == "shift_pages":
            keys = self.page_size * model.row_widths[0]
            return count * (2 * keys * 2 + 16) + 4 * model.head_dim
        if self.operation == "paged_attention":
            seen = min(self.window + self.new - 1 if self.window else self.context, self.context)
            width = self.widths[0] if model.mla else sum(self.widths)
            rows = count * seen * (model.kv_heads or 1) * width * FORMATS[self.format].itemsize
            queries = count * self.new * model.q_heads * sum(self.widths)
            return rows + queries * FORMATS[self.query_format].itemsize
        if not self.operation.startswith("rope"):  # rows, slots and stored rows
            return count * (2 * row + 8 + stored)
        keys = self.rotary if model.mla else model.row_widths[0]
        # Query and key read and written, the other rows, cos and sin, slots and positions.
        rotated = 4 * (model.q_heads * self.rotary + keys)
        return count * (rotated + 2 * (row - keys) + 4 * self.rotary + stored + 16)

    @property
    def flops(self) -> int:
        """Multiplications and additions of attention over the keys that are visible, else 0."""
        seen = range(self.context - self.new + 1, self.context + 1)
        keys = sum(min(n, self.window or n) for n in seen) if self.context else 0
        return 2 * self.count * keys * self.model.q_heads * sum(self.widths)

    def build(self, device: Any, sets: int) -> Case:
        kinds: dict[str, type[Case]] = {
            "gather_kv": Gather, "copy_pages": CopyPages, "shift_pages": ShiftPages,
            "slot_mapping": SlotMapping, "paged_attention": Attention,
        }  # fmt: skip
        return kinds.get(self.operation, Store)(device, self, sets)


class Bits:
    """An argument of a case: its bits on the host and on the device, and what format they have."""

    def __init__(self, device: Any, values: Array, format: str) -> None:
        self.format = format
        self.host = values.view(carrier_dtype(format))
        self.array = upload(device, self.host)


class Case:
    """Arguments of a shape on a device, and the calls of every candidate: one for each set.

    Attributes
    ----------
    shared : arguments of all of kvcupy's calls by name: `Bits`, or a list of them
    own : the other arguments of each call
    options : what kvcupy's calls take besides arrays
    """

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        self.device, self.shape, self.sets = device, shape, sets
        self.shared: dict[str, Any] = {}
        self.own: list[dict[str, Bits]] = [{} for _ in range(sets)]
        self.options: dict[str, Any] = {}
        self.draw(np.random.default_rng(0))
        device.synchronize()

    def draw(self, rng: np.random.Generator) -> None:
        """Draw the arguments."""
        raise NotImplementedError

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        """Return what torch does with the tensors of a set; NotMeasured: it has no such thing."""
        raise NotImplementedError

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare what a candidate left or returned, a result for each set; raise WrongBytes."""
        raise NotImplementedError

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return, by project, what builds the calls of its kernels; these use torch's stream."""
        return {}

    def bits(self, values: Array, format: str) -> Bits:
        return Bits(self.device, values, format)

    def zeros(self, shape: tuple[int, ...], format: str) -> Bits:
        """Return an argument that is written."""
        return Bits(self.device, np.zeros(shape, carrier_dtype(format)), format)

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return kvcupy's calls, on arrays that `wrap` makes from bits and a format."""
        operation = getattr(kv, self.shape.operation)
        shared = wrapped(self.shared, wrap)
        signature = inspect.signature(OPERATIONS[self.shape.operation].function)
        calls: list[Call] = []
        for own in self.own:
            bound = signature.bind(**shared, **wrapped(own, wrap), **self.options)
            calls.append(partial(on_stream, partial(operation, *bound.args, **bound.kwargs)))
        return calls

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
        """Return torch's calls; they go to torch's current stream."""
        return self.calls_of(self.torch_work(torch, wrap), wrap)

    def calls_of(self, work: Callable[..., Any], wrap: Wrap) -> list[Call]:
        """Return calls of torch, or of what runs on its stream: with the tensors of each set."""
        sets = (wrapped(own, wrap).values() for own in self.own)
        return [partial(without_stream, partial(work, *tensors)) for tensors in sets]

    def wipe(self) -> None:
        """Restore the arguments that an earlier candidate wrote."""
        every = {**self.shared, **self.own[0], **self.options}
        written = set(OPERATIONS[self.shape.operation].written(every))
        for arguments in (self.shared, *self.own):
            for name in written & arguments.keys():
                several = arguments[name]
                for bits in several if isinstance(several, list) else [several]:
                    self.device.copy(bits.array, self.device.asarray(bits.host))
        self.device.synchronize()

    def require(self, candidate: str, name: str, got: Any, expected: Any) -> None:
        """Compare an array of the device with NumPy's, byte by byte."""
        self.device.synchronize()
        case = f"{self.shape.name}, {candidate}, {name}"
        require_equal(case, self.device.to_numpy(got).view(expected.dtype), expected)

    def require_rotated(
        self, candidate: str, before: Array, got: Array, table: Array, positions: Array
    ) -> None:
        """Compare some rotated rows with float64, given as bits (T, H, D)."""
        tokens = np.linspace(0, len(got) - 1, min(len(got), CHECKED_TOKENS)).astype(np.int64)
        rows, interleaved = before[tokens].view(BF16), self.shape.model.mla
        angles = reference.cos_sin(table, positions[tokens])
        exact = reference.rotate(rows, *angles, interleaved=interleaved)
        allowed: Any = BASELINE_ERROR * np.abs(rows.astype(np.float64)).max()
        if candidate.startswith("kvcupy"):
            allowed = rotation_errors(exact, rows, *angles, "bf16", interleaved=interleaved)
        wrong = np.argwhere(~(np.abs(got[tokens].view(BF16).astype(np.float64) - exact) <= allowed))
        if len(wrong):
            raise WrongBytes(
                f"{self.shape.name}, {candidate}: {len(wrong)} elements are too far off, the first "
                f"at {tuple(map(int, wrong[0]))}"
            )

    def to_bits(self, array: Any) -> Array:
        return np.asarray(self.device.to_numpy(array)).view(np.uint16)


def wrapped(arguments: dict[str, Any], wrap: Wrap) -> dict[str, Any]:
    """Return arguments in the dtypes of their formats, in arrays of the library of `wrap`."""
    return {
        name: [wrap(each.array, each.format) for each in bits] if isinstance(bits, list)
        else wrap(bits.array, bits.format)
        for name, bits in arguments.items()
    }  # fmt: skip


def stored_bits(part: Array, fmt: str) -> Array:
    """Return the stored bits of bf16 rows, in NumPy."""
    if fmt == "bf16":
        return part.view(np.uint16)
    values = part.view(BF16).astype(np.float32) / np.float32(SCALE)
    return values.clip(-448, 448).astype(numpy_dtype("fp8_e4m3")).view(np.uint8)


class Store(Case):
    """Rows of each set and the slots that they go to; with RoPE, query and key are rotated."""

    def draw(self, rng: np.random.Generator) -> None:
        shape, model = self.shape, self.shape.model
        parts: list[tuple[int, ...]] = [(model.kv_heads, model.head_dim)] * 2
        self.rows, caches, scales = ("key", "value"), ("k_cache", "v_cache"), ("k_scale", "v_scale")
        if model.mla:
            parts = [(width,) for width in model.row_widths]
            self.rows, caches, scales = ("latent", "rope_key"), ("cache",), ("scale",)
        rows = dict(zip(self.rows, parts, strict=True))
        self.rotated: tuple[str, ...] = ()
        if shape.operation.startswith("rope"):
            self.rotated = ("query", "rope_key" if model.mla else "key")
            rows = {"query": (model.q_heads, shape.rotary), **rows}
            self.positions = (np.arange(shape.count) + 1000) % MAX_POSITIONS
            table = kv.rope_table(MAX_POSITIONS, shape.rotary, base=ROPE_BASE, device="host")
            self.table = np.asarray(table)
            self.shared["rope_table"] = self.bits(self.table, "fp32")
            self.shared["positions"] = self.bits(self.positions, "int64")
            if model.mla:
                self.options["interleaved"] = True
        num_slots = -(-(self.sets * shape.count + 64) // 16) * 16
        order = rng.permutation(num_slots - 1) + 1  # some projects do not write slot 0
        for own, slots in zip(self.own, np.split(order, shape.count * np.arange(1, self.sets + 1)),
                              strict=False):  # fmt: skip
            for name, part in rows.items():
                own[name] = self.bits(normal_bits(rng, (shape.count, *part)), "bf16")
            own["slot_mapping"] = self.bits(slots.copy(), "int64")
        widths = [(sum(model.row_widths),)] if model.mla else parts
        self.caches = [self.zeros((num_slots, *width), STORED[shape.format]) for width in widths]
        self.shared |= dict(zip(caches, self.caches, strict=True))
        if shape.format != "bf16":
            self.options |= dict.fromkeys(scales, SCALE)

    def targets(self, caches: list[Any]) -> list[Any]:
        """Return what the rows are written to: of MLA, two parts of one cache."""
        if not self.shape.model.mla:
            return caches
        split = self.shape.model.row_widths[0]
        return [caches[0][:, :split], caches[0][:, split:]]

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        """Return the work as models are written: one rounding per operation, slots by indexing."""
        targets = self.targets([wrap(cache.array, "bits") for cache in self.caches])
        names = list(self.own[0])
        rotate = None
        if self.rotated:
            table, positions = (
                wrap(self.shared[n].array, self.shared[n].format)
                for n in ("rope_table", "positions")
            )
            rotate = baselines.rotation(torch, table[positions], self.shape.model.mla)

        def work(*tensors: Any) -> Any:
            given = dict(zip(names, tensors, strict=True))
            for name in self.rotated:
                given[name] = rotate(given[name])
            for target, name in zip(targets, self.rows, strict=True):
                rows = given[name]
                if self.shape.format != "bf16":
                    rows = (rows.float() / SCALE).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
                target[given["slot_mapping"]] = rows.view(target.dtype)
            return [given[name] for name in self.rotated] or None

        return work

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        if self.rotated or self.shape.format != "bf16" or self.shape.model.mla:
            return {}
        makers = {"flashinfer": baselines.flashinfer_store}
        if self.device.kind == "host":
            makers["vllm"] = baselines.vllm_cpu_store
        caches = [wrap(cache.array, "bf16") for cache in self.caches]
        return {
            name: lambda make=make: self.calls_of(make(torch, caches), wrap)
            for name, make in makers.items()
        }

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare the rotated rows, and all caches with what the rows of each set become.

        `results` are the rotated rows, None where they are in place; or caches elsewhere.
        """
        caches = [np.zeros_like(cache.host) for cache in self.caches]
        for own, result in zip(self.own, results, strict=True):
            given = {name: bits.host for name, bits in own.items()}
            for number, name in enumerate(self.rotated):
                array = own[name].array if result is None else result[number]
                shape = (self.shape.count, -1, self.shape.rotary)
                before, given[name] = given[name], self.to_bits(array)
                self.require_rotated(
                    f"{candidate}, {name}", before.reshape(shape), given[name].reshape(shape),
                    self.table, self.positions,
                )  # fmt: skip
            for target, name in zip(self.targets(caches), self.rows, strict=True):
                target[given["slot_mapping"]] = stored_bits(given[name], self.shape.format)
        stored = [cache.array for cache in self.caches]
        if not self.rotated and results[0] is not None:  # whole pages
            stored = [pages.flatten(0, 1)[: len(caches[0])] for pages in results[0]]
        for i, (array, want) in enumerate(zip(stored, caches, strict=True)):
            self.require(candidate, f"cache {i}", array, want)


class Pages(Case):
    """What reads or writes whole pages of a paged cache."""

    @property
    def row(self) -> tuple[int, int]:
        """Heads and width of a token in one cache."""
        model = self.shape.model
        return (1, sum(model.row_widths)) if model.mla else (model.kv_heads, model.head_dim)

    def draw_cache(self, rng: np.random.Generator, num_pages: int) -> Bits:
        bits = normal_bits(rng, (num_pages, self.shape.page_size, *self.row))
        return self.bits(stored_bits(bits, self.shape.format), STORED[self.shape.format])

    def draw_lists(self, rng: np.random.Generator, *names: str) -> int:
        """Draw source and target pages of each set, no page twice; return how many there are."""
        order = rng.permutation(2 * self.sets * self.shape.count).reshape(self.sets, 2, -1)
        for own, lists in zip(self.own, order, strict=True):
            for name, pages in zip(names, lists, strict=True):
                own[name] = self.bits(pages.copy(), "int64")
        return int(order.size)


class Gather(Pages):
    """Rows of K and V out of a paged cache, dequantised where it is quantised."""

    def draw(self, rng: np.random.Generator) -> None:
        shape, count = self.shape, self.shape.count
        num_pages = -(-(self.sets * count + 64) // shape.page_size)
        self.caches = [self.draw_cache(rng, num_pages) for _ in "kv"]
        self.shared = dict(zip(("k_cache", "v_cache"), self.caches, strict=True))
        if shape.format != "bf16":
            self.options = {"k_scale": SCALE, "v_scale": SCALE}
        slots = rng.permutation(num_pages * shape.page_size)
        for i, own in enumerate(self.own):
            own["slots"] = self.bits(slots[i * count : (i + 1) * count], "int64")
            for side in "kv":
                own[f"{side}_out"] = self.zeros((count, *self.row), "bf16")

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        caches = [wrap(cache.array, cache.format).reshape(-1, *self.row) for cache in self.caches]

        def gather(slots: Any, *outs: Any) -> None:
            for cache, out in zip(caches, outs, strict=True):
                if self.shape.format == "bf16":
                    torch.index_select(cache, 0, slots, out=out)
                else:
                    rows = cache.view(torch.uint8)[slots].view(cache.dtype)
                    out.copy_(rows.float() * SCALE)

        return gather

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for own in self.own:
            for cache, out in zip(self.caches, (own["k_out"], own["v_out"]), strict=True):
                rows = cache.host.reshape(-1, *self.row)[own["slots"].host]
                if self.shape.format != "bf16":
                    values = rows.view(numpy_dtype("fp8_e4m3")).astype(np.float32)
                    rows = (values * np.float32(SCALE)).astype(BF16)
                self.require(candidate, "rows", out.array, rows.view(np.uint16))


class CopyPages(Pages):
    """Pages of each cache onto other pages."""

    def draw(self, rng: np.random.Generator) -> None:
        num_pages = self.draw_lists(rng, "src_pages", "dst_pages")
        count = 1 if self.shape.model.mla else 2
        self.caches = [self.draw_cache(rng, num_pages) for _ in range(count)]
        self.shared["cache"] = self.caches

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        caches = [wrap(cache.array, "bf16") for cache in self.caches]

        def copy(src: Any, dst: Any) -> None:
            for cache in caches:
                cache[dst] = cache[src]

        return copy

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for cache in self.caches:
            want = cache.host.copy()
            for own in self.own:
                want[own["dst_pages"].host] = cache.host[own["src_pages"].host]
            self.require(candidate, "pages", cache.array, want)


class ShiftPages(Pages):
    """Keys of pages, moved on by as many positions, onto other pages."""

    def draw(self, rng: np.random.Generator) -> None:
        self.keys = self.draw_cache(rng, self.draw_lists(rng, "pages", "out_pages"))
        table = kv.rope_table(2 * DELTA, self.shape.rotary, base=ROPE_BASE, device="host")
        self.table = self.bits(np.asarray(table), "fp32")
        self.shared = {"pool": self.keys, "rope_table": self.table}
        self.options["delta"] = DELTA

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        keys = wrap(self.keys.array, "bf16")
        angles = wrap(self.table.array, "fp32")[DELTA : DELTA + 1]
        rotate = baselines.rotation(torch, angles, False)

        def shift(pages: Any, out_pages: Any) -> None:
            rows = keys[pages]
            keys[out_pages] = rotate(rows.reshape(1, -1, rows.shape[-1])).reshape(rows.shape)

        return shift

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        self.device.synchronize()
        got, shape = self.to_bits(self.keys.array), (-1, *self.row)
        for own in self.own:
            before = self.keys.host[own["pages"].host].reshape(shape)
            moved = got[own["out_pages"].host].reshape(shape)
            positions = np.full(len(moved), DELTA)
            self.require_rotated(candidate, before, moved, self.table.host, positions)


class SlotMapping(Case):
    """The slots of a step in which every sequence appends the same number of tokens."""

    def draw(self, rng: np.random.Generator) -> None:
        batch, append, page_size = self.shape.count, self.shape.new, self.shape.page_size
        max_tokens = -(-max(4096, append) // page_size) * page_size
        self.options = {"page_size": page_size}
        for own in self.own:
            table = rng.permutation(batch * max_tokens // page_size).reshape(batch, -1)
            own["block_table"] = self.bits(table.astype(np.int32), "int32")
            lengths = rng.integers(append, max_tokens + 1, batch)
            own["seq_lens"] = self.bits(lengths.astype(np.int32), "int32")
            own["append_lens"] = self.bits(np.full(batch, append, np.int32), "int32")
            own["out"] = self.bits(np.full(batch * append, -1), "int64")

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        device = wrap(self.own[0]["out"].array, "int64").device
        batch, append, size = self.shape.count, self.shape.new, self.shape.page_size

        def find(table: Any, lengths: Any, counts: Any, out: Any) -> None:
            rows = torch.repeat_interleave(torch.arange(batch, device=device), append)
            offsets = torch.arange(batch * append, device=device) - rows * append
            tokens = (lengths - counts)[rows] + offsets
            out[...] = table[rows, tokens // size] * size + tokens % size

        return find

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for own in self.own:
            *tables, out = own.values()
            want = reference.slot_mapping(*(bits.host for bits in tables), self.shape.page_size)
            self.require(candidate, "slots", out.array, want)


class Attention(Case):
    """Sets of pages of one cache, and a query and an output for each."""

    def draw(self, rng: np.random.Generator) -> None:
        shape, model = self.shape, self.shape.model
        pages = -(-shape.context // shape.page_size)
        tables = rng.permutation(self.sets * shape.count * pages).astype(np.int32)
        rows = (tables.size, shape.page_size, model.kv_heads or 1)
        widths = shape.widths[:1] if model.mla else shape.widths
        self.caches = [self.drawn(rng, (*rows, width), shape.format) for width in widths]
        queries = (shape.count * shape.new, model.q_heads)
        for own, table in zip(self.own, np.split(tables, self.sets), strict=True):
            own["query"] = self.drawn(rng, (*queries, shape.widths[0]), shape.query_format)
            own["block_table"] = self.bits(table.reshape(shape.count, pages), "int32")
            own["out"] = self.zeros((*queries, shape.widths[1]), shape.query_format)
        self.shared["seq_lens"] = self.bits(np.full(shape.count, shape.context, np.int32), "int32")
        if shape.new > 1:
            new = np.full(shape.count, shape.new, np.int32)
            self.shared["query_lens"] = self.bits(new, "int32")
        if model.sinks:
            logits = rng.standard_normal(model.q_heads, np.float32)
            self.shared["sinks"] = self.bits(logits, "fp32")
        self.options = {"sm_scale": float(model.head_dim**-0.5), "window": shape.window or None}

    def drawn(self, rng: np.random.Generator, shape: tuple[int, ...], fmt: str) -> Bits:
        """Draw values, which repeat in large arrays, though no two rows are equal."""
        values = rng.standard_normal(min(int(np.prod(shape)), 1_000_003), np.float32)
        return self.bits(np.resize(reference.encode(values, fmt), shape), fmt)

    def paged(self, wrap: Wrap) -> list[Any]:
        """Return K and V in pages: of MLA, two views of one cache."""
        caches = [wrap(cache.array, self.shape.format) for cache in self.caches]
        return [caches[0], caches[-1][..., : self.shape.widths[1]]]

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        caches = [wrap(array, self.shape.format) for array in self.paged(lambda array, _: array)]
        shared = wrapped(self.shared, wrap) | self.options
        calls: list[Call] = []
        for own in (wrapped(own, wrap) for own in self.own):
            arrays = (own["query"], *caches, own["block_table"])
            bound = partial(kv.paged_attention, *arrays, **shared, out=own["out"])
            calls.append(partial(on_stream, bound))
        return calls

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
        """Return torch's calls over contiguous keys."""
        shape = self.shape
        if FORMATS[shape.format].quantised or shape.model.sinks:
            what = "sinks" if shape.model.sinks else shape.format
            raise NotMeasured(f"scaled_dot_product_attention takes no {what}")
        parts = self.paged(wrap)
        ahead, mask = shape.context - shape.new, None
        first = max(0, ahead + 1 - shape.window) if shape.window else 0  # that any query sees
        causal = ahead == 0 and not (0 < shape.window < shape.context)
        if shape.new > 1 and not causal:
            mask = torch.ones(shape.new, shape.context, dtype=torch.bool, device=parts[0].device)
            mask = mask.tril(ahead)
            if shape.window:
                mask &= ~mask.tril(ahead - shape.window)
            mask = mask[:, first:]
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention, attn_mask=mask,
            is_causal=causal and shape.new > 1, scale=self.options["sm_scale"], enable_gqa=True,
        )  # fmt: skip

        def work(rows: Any, keys: Any, values: Any) -> Any:
            return attend(rows, keys, values).transpose(1, 2)

        calls: list[Call] = []
        for own in (wrapped(own, wrap) for own in self.own):
            keys, values = (
                part[own["block_table"].long()].flatten(1, 2)[:, first : shape.context]
                .transpose(1, 2).contiguous() for part in parts
            )  # fmt: skip
            rows = own["query"].view(shape.count, shape.new, *own["query"].shape[1:])
            bound = partial(work, rows.transpose(1, 2), keys, values)
            calls.append(partial(without_stream, bound))
        return calls

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return what others run over the same pages; vLLM's CPU kernels copy them."""
        shape = self.shape
        if shape.model.sinks or FORMATS[shape.format].quantised:
            return {}
        makers: dict[str, Callable[..., Iterator[Callable[[], Any]]]] = {}
        if self.device.kind == "host" and not shape.model.mla:
            makers["vllm"] = baselines.vllm_cpu_attention
        if shape.format == "bf16":
            makers["flashinfer"] = baselines.flashinfer_attention
            if shape.model.mla:
                makers["flashinfer"] = baselines.flashinfer_mla

        def build(make: Callable[..., Iterator[Callable[[], Any]]]) -> list[Call]:
            sets = [wrapped(own, wrap) for own in self.own]
            pairs = [(own["query"], own["block_table"]) for own in sets]
            last = self.options["sm_scale"] if shape.model.mla else shape.window
            works = make(torch, pairs, self.paged(wrap), shape.context, last)
            return [partial(without_stream, work) for work in works]

        return {name: partial(build, make) for name, make in makers.items()}

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare some rows of each set with float64."""
        shape, rng = self.shape, np.random.default_rng(1)
        for number, (own, result) in enumerate(zip(self.own, results, strict=True)):
            if candidate.startswith("kvcupy"):
                out = self.device.to_numpy(own["out"].array)
                got = reference.decode(out, shape.query_format)
            else:
                got = np.asarray(result.float().cpu(), np.float64).reshape(own["out"].host.shape)
            for row in rng.choice(len(got), min(CHECKED_ROWS, len(got)), replace=False):
                head = int(rng.integers(shape.model.q_heads))
                error = np.abs(got[row, head] - self._exact(own, int(row), head)).max()
                if not error <= ATTENTION_TOLERANCE[shape.query_format]:
                    raise WrongBytes(
                        f"{shape.name}, {candidate}: row {row} of set {number}, head {head} is off "
                        f"by {error:.2g}"
                    )

    def _exact(self, own: dict[str, Bits], row: int, head: int) -> Array:
        """Return what a query of a set should give, in float64."""
        shape = self.shape
        head_of_cache = head * (shape.model.kv_heads or 1) // shape.model.q_heads
        caches = [cache.host for cache in self.caches]
        keys, values = (
            array[:, :, head_of_cache, None].view(numpy_dtype(shape.format))
            for array in (caches[0], caches[-1][..., : shape.widths[1]])
        )
        query = own["query"].host[row, head].view(numpy_dtype(shape.query_format))
        sinks = self.shared["sinks"].host[head, None] if shape.model.sinks else None
        exact, _, _ = reference.paged_attention(
            query[None, None], keys, values, own["block_table"].host[row // shape.new, None],
            np.array([shape.context - shape.new + row % shape.new + 1]), sinks=sinks,
            **self.options,
        )  # fmt: skip
        return np.asarray(exact[0, 0])
