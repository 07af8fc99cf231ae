"""Calls of `paged_attention`, `attend` and `merge_states` that check everything, and arguments.

Results are compared with the float64 reference, within `attention_errors` and `merge_errors`;
everything else, inputs, canaries and rows that belong to no sequence, bitwise. Whatever must not be
read is NaN, or a poisoned index.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import INDEX_DTYPE, Arg, Case, as_numpy, check_faults, from_values, poisoned_table

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import four_bit_view
from kvcupy.ops.attention import LayerArrays, StepAttention, check_options
from kvcupy.testing.arrays import assert_near
from kvcupy.testing.tolerances import attention_errors, merge_errors

FLOATS = ("fp32", "fp16", "bf16")

MORE = ("evicted_starts", "evicted_lens", "key_starts", "tree_lens", "rope_table", "interleaved",
        "rotary_start", "tree_positions", "cu_query_lens")  # fmt: skip
"""What a step of a cache has beside the arguments of `paged_attention`."""

PER_LAYER = ("k_cache", "v_cache", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
OPTIONS = {
    "layout": "NHD", "sm_scale": None, "causal": True, "window": None, "sink_tokens": None,
    "logits_soft_cap": None, "interleaved": False, "rotary_start": 0,
}  # fmt: skip


def attend(query, k_cache, v_cache, block_table, seq_lens, *, out=None, lse_out=None, sinks=None,
           stream=None, **arguments):  # fmt: skip
    """Attend as `paged_attention` does, also with the arguments that only a cache has."""
    arguments |= {"k_cache": k_cache, "v_cache": v_cache}
    arguments |= {"block_table": block_table, "seq_lens": seq_lens}
    options = {name: arguments.pop(name, default) for name, default in OPTIONS.items()}
    layer = LayerArrays(**{n: arguments.pop(n) for n in PER_LAYER if n in arguments})
    return StepAttention(**arguments).run(
        layer, query, out, check_options(**options), lse_out=lse_out, sinks=sinks, stream=stream
    )


# Arguments -----------------------------------------------------------------------------------

ARRANGEMENTS = {
    # How K, or V, (pages, page_size, H, width) is stored, and viewed from there; its layout.
    "NHD": (lambda a: a, None, "NHD"),
    "HND": (lambda a: a.swapaxes(1, 2), None, "HND"),
    "HND by strides": (lambda a: a.swapaxes(1, 2), lambda a: a.swapaxes(1, 2), "NHD"),
    "every other page": (lambda a: np.stack([a, a[::-1]], 1).reshape(-1, *a.shape[1:]),
                         lambda a: a[::2], "NHD"),
    "wider rows": (lambda a: np.concatenate([a[..., :1], a, a], -1),
                   lambda a: a[..., 1:1 + a.shape[-1] // 2], "NHD"),
}  # fmt: skip


def scales_of(kind, heads, side):
    """A static scale of K or of V."""
    unit = {"k": 0.03, "v": 0.05}[side]
    return {
        "none": None,
        "float": unit,
        "one element": np.float32([2 * unit]),
        "per head": np.linspace(unit, 5 * unit, heads).astype(np.float32),
    }[kind]


POISON_SCALE = {
    fmt: {"fp8_e4m3": 0x7F, "e8m0": 0xFF, "fp16": 0x7E00}[form.scale]
    for fmt, form in reference.FOUR_BIT.items()
}
"""Bits of a group scale that is NaN."""


def four_bit_rows(values, fmt, scales):
    """Quantise rows, (..., width); return their bytes, (..., row_bytes)."""
    form = reference.FOUR_BIT[fmt]
    size = values.shape[-1] // form.group * form.group_bytes
    rows = np.zeros((*values.shape[:-1], size), np.uint8)
    scales = np.broadcast_to(scales, values.shape[:-1])
    target = reference.FourBitRows.packed(rows, fmt)
    reference.quantise_rows(values.astype(np.float32), target, scales)
    return rows


class Views(Arg):
    """An argument made of parts of another."""

    def __init__(self, array, view):
        self.array, self.view = array, view


def as_rotated(arg, rotated_width=None):
    """Return a four-bit cache whose bytes are read as rows that were stored rotated.

    They are as random rotated as not.
    """
    width = rotated_width or arg.view.shape[-1]
    array = four_bit_view(
        arg.array.codes, arg.array.scales, arg.array.format, width, arg.array.scale_rule
    )
    return Views(array, reference.FourBitRows(arg.view.codes, arg.view.scales, arg.view.fmt, width))


def first_elements(arg, width, *, first_scale=0):
    """Return the first elements of each row of a four-bit cache, perhaps with scales of others."""
    form = reference.FOUR_BIT[arg.array.format]
    array, rows = arg.array, arg.view
    first = [
        (
            each.codes[..., : width // 2],
            each.scales[..., first_scale : first_scale + width // form.group],
        )
        for each in (array, rows)
    ]
    return Views(
        four_bit_view(*first[0], array.format, 0, array.scale_rule),
        reference.FourBitRows(*first[1], rows.fmt),
    )


def rotated(args, *names):
    """Return arguments with rotated caches, of K and V if none is named."""
    return args | {name: as_rotated(args[name]) for name in names or ("k_cache", "v_cache")}


class AttentionCase(Case):
    """The buffers of one test, with calls of the attention operations that check everything."""

    # Arguments

    def _cache(self, side, fmt, used, pages, page_size, heads, width, kind, loud):
        """Draw (pages, page_size, H, width), poison where unused, and its scale option."""
        values = self.rng.standard_normal((pages * page_size, heads, width)) * loud
        scale, option = np.ones((1, heads, 1)), {}
        if kind == "dynamic":
            scales = self.rng.uniform(0.01, 0.2, (len(values), heads)).astype(np.float32)
            scale = scales.astype(np.float64)[..., None]
            scales[~used] = np.nan
            option = {f"{side}_scale_cache": self.place(scales, "fp32", name=f"{side}_scale_cache")}
        elif kind != "none":
            static = scales_of(kind, heads, side)
            scale = np.broadcast_to(np.asarray(static, np.float64).reshape(1, -1, 1), scale.shape)
            placed = self.place(static, "fp32") if isinstance(static, np.ndarray) else static
            option = {f"{side}_scale": placed}
        if fmt in reference.FOUR_BIT:
            rows = four_bit_rows(values, fmt, scale[..., 0])
            poison = reference.FourBitRows.packed(rows, fmt)
            poison.scales[~used] = POISON_SCALE[fmt]
            return rows.reshape(pages, page_size, heads, -1), option
        stored = from_values(values / scale, fmt)
        if fmt != "int8":  # which has no NaN: there, values of the same size must do
            stored[~used] = from_values(np.nan, fmt)
        return stored.reshape(pages, page_size, heads, width), option

    def caches(self, k, v, how="NHD", fmts=(None, None)):
        """Place K and V (pages, page_size, H, width) in some arrangement, and name the layout.

        `fmts` are the formats of rows of bytes.
        """
        fmts = [fmt or reference.format_of(part) for fmt, part in zip(fmts, (k, v), strict=True)]
        layout = "HND"
        if how == "combined HND":
            both = self.place(np.stack([k, v], 1).swapaxes(2, 3), fmts[0], name="kv_cache")
            parts = [both.sub(lambda a, i=i: a[:, i]) for i in (0, 1)]
        else:
            store, cut, layout = ARRANGEMENTS[how]
            parts = [
                self.place(store(part), fmt, cut, name=name)
                for part, name, fmt in zip((k, v), ("k_cache", "v_cache"), fmts, strict=True)
            ]
        return {"k_cache": parts[0], "v_cache": parts[1], "layout": layout}

    def table(self, values, dtype="int32"):
        """Place a block table."""
        return self.place(np.asarray(values).astype(INDEX_DTYPE[dtype]), dtype, name="block_table")

    def queries(self, fmt, rows, heads, width, *, used=None, loud=2.0, spare_heads=0):
        """Place rows of a query; those past the `used` ones are NaN, and so are spare heads."""
        values = self.rng.standard_normal((rows, heads + spare_heads, width)) * loud
        values[rows if used is None else used :], values[:, heads:] = np.nan, np.nan
        return self.place(from_values(values, fmt), fmt, lambda a: a[:, :heads], name="query")

    def arguments(
        self, seq_lens, query_lens=None, *, fmt="fp32", cache_fmt=None, heads=(4, 2),
        widths=(16, 16), page_size=4, how="NHD", scales=("none", "none"), padding=0, loud=2.0,
        index=("int32", "int32"), spare_heads=0, evicted=None, key_starts=None,
    ):  # fmt: skip
        """Make all arguments of sequences that share no pages, in any order.

        `cache_fmt` is one format, or one each for K and V. `loud` is the size of queries and keys:
        with 2, scores reach 10.
        `evicted` are pairs (start, size), one per sequence; what lies in them is poison too, and so
        is what `key_starts` leave out.
        """
        k_fmt, v_fmt = (cache_fmt or fmt,) * 2 if not isinstance(cache_fmt, tuple) else cache_fmt
        seq_lens = np.asarray(seq_lens, np.int64)
        places = [np.arange(max(int(n), 0)) for n in seq_lens]
        for own, (start, size) in zip(places, evicted or (), strict=False):
            own[start:] += size
        reach = [own[-1] + 1 if len(own) else 0 for own in places]
        table = poisoned_table(self.rng, reach, page_size)
        pages = sum(-(-int(n) // page_size) for n in reach) + 3
        used = np.zeros(pages * page_size, bool)
        for sequence, (row, own) in enumerate(zip(table, places, strict=True)):
            tokens = own[0 if key_starts is None else key_starts[sequence] :]
            used[row[tokens // page_size] * page_size + tokens % page_size] = True
        rows = len(seq_lens) if query_lens is None else int(np.sum(query_lens))
        args = {"query": self.queries(fmt, rows + padding, heads[0], widths[0], used=rows,
                                      loud=loud, spare_heads=spare_heads)}  # fmt: skip
        size = (used, pages, page_size, heads[1])
        k, k_option = self._cache("k", k_fmt, *size, widths[0], scales[0], loud)
        v, v_option = self._cache("v", v_fmt, *size, widths[1], scales[1], 1.0)
        fmts = [f if f in reference.FOUR_BIT else None for f in (k_fmt, v_fmt)]
        args |= self.caches(k, v, how, fmts) | k_option | v_option
        args["block_table"] = self.table(table, index[0])
        args["seq_lens"] = self.slots(seq_lens, index[1])
        if query_lens is not None:
            args["query_lens"] = self.slots(query_lens, index[1])
        for name, counts in (
            ("evicted_starts", evicted and [start for start, _ in evicted]),
            ("evicted_lens", evicted and [size for _, size in evicted]),
            ("key_starts", key_starts),
        ):
            if counts is not None:
                args[name] = self.slots(counts, "int32")
        return args

    def nodes(self, tree_lens, query_lens, padding=0, columns=None):
        """Return a mask of trees with nodes of earlier steps, and noise where nothing may look."""
        rows = sum(query_lens) + padding
        mask = self.rng.random((rows, columns or max(tree_lens))) < 0.5
        return {
            "tree_mask": self.place(mask, "", name="tree_mask"),
            "tree_lens": self.slots(tree_lens, "int32"),
        }

    def rope(self, dim, *, positions=50, start=0, interleaved=False, cut=None, store=None):
        """Return a rope table for keys that are cached raw, and which elements it rotates."""
        table = reference.rope_table(positions, dim).astype(np.float32)
        placed = self.place(
            table if store is None else store(table), "fp32", cut, name="rope_table"
        )
        return {"rope_table": placed, "rotary_start": start, "interleaved": interleaved}

    def tail(self, tree_lens, columns=None, low=0, high=50):
        """Return positions of the nodes of trees."""
        drawn = self.rng.integers(low, high, (len(tree_lens), columns or max(tree_lens)))
        return {"tree_positions": self.place(drawn.astype(np.int32), "int32", name="tail")}

    def results(self, args, out_cut=None, lse_cut=None, *, fmt=None):
        """Place `out` and `lse_out` for a query of this shape."""
        rows, heads = args["query"].view.shape[:2]
        v = args["v_cache"].view
        shape = (rows, heads, v.shape[-1])
        return (
            self.output(fmt or args["query"].fmt, shape, out_cut, name="out"),
            self.output("fp32", shape[:2], lse_cut, name="lse_out"),
        )

    def sinks(self, heads, loud=4.0):
        """Return a learned sink per head."""
        values = (self.rng.standard_normal(heads) * loud).astype(np.float32)
        return self.place(values, "fp32", name="sinks")

    def tree(self, query_lens, rows=None, columns=None, *, any_mask=False):
        """Return the mask of a random tree per sequence, and noise where nothing may look."""
        rows, widest = rows or int(np.sum(query_lens)), max(query_lens)
        mask = self.rng.random((rows, columns or widest)) < 0.5
        start = 0
        for count in query_lens:
            part = mask[start : start + count, :count]
            if not any_mask:
                part[...] = False
                for node in range(count):
                    parent = int(self.rng.integers(-1, node)) if node else -1
                    if parent >= 0:
                        part[node] = part[parent]
                    part[node, node] = True
            start += count
        return self.place(mask, "", name="tree_mask")

    # Calls

    def issue(self, args, out=None, lse=None, *, stream=None):
        arguments = {name: self.to_pass(value) for name, value in args.items()}
        operation = attend if args.keys() & set(MORE) else kv.paged_attention
        return operation(
            **arguments, out=self.to_pass(out), lse_out=self.to_pass(lse), stream=stream
        )

    def attend(self, args, out="placed", lse="placed", *, stream=None, **options):
        """Check one call; outputs are placed here unless they are passed, or None."""
        args = {**args, **options}
        placed = self.results(args) if "placed" in (out, lse) else (None, None)
        out, lse = (p if isinstance(o, str) else o for o, p in zip((out, lse), placed, strict=True))
        if stream is not None:  # The uploads went to the current stream.
            self.device.synchronize()
        got = self.issue(args, out, lse, stream=stream)
        if stream is not None:
            stream.synchronize()
        self.settle(args, got, out, lse)
        return out, lse

    def settle(self, args, got, out, lse):
        """Check what a call left: results, faults, and that nothing else was written."""
        args = {name: a.view if isinstance(a, Arg) else a for name, a in args.items()}
        args.pop("cu_query_lens", None)  # the sums of query_lens
        fmt = reference.format_of(args["query"]) if out is None else out.fmt
        want, want_lse, faults = reference.paged_attention(**args)
        of_out, of_lse = attention_errors(args, want, want_lse, fmt)
        lens = args.get("query_lens")
        rows = min(len(want), len(args["seq_lens"]) if lens is None else int(lens.sum()))
        mine = slice(0, rows)
        assert tuple(got.shape) == want.shape
        if out is None:
            stored = as_numpy(self.device, got, fmt)
            assert not stored[rows:].view(np.uint8).any(), "rows of no sequence are not zero"
        else:
            stored = out.live()
        values = reference.decode(np.ascontiguousarray(stored), fmt)
        nothing = ~want.any(axis=2)  # saw no key, or sums of zeros only
        of_out[nothing] = 0
        assert_near("out", values[mine], want[mine], of_out[mine], self.seed)
        if lse is not None:
            seen = lse.live().astype(np.float64)
            assert_near("lse", seen[mine], want_lse[mine], of_lse[mine], self.seed)
            lse.view[mine] = lse.live()[mine]
        if out is not None:
            reference.bits_of(out.view, fmt)[mine] = reference.bits_of(stored, fmt)[mine]
        self.finish(faults)

    def finish(self, faults):
        """Compare the fault record, and every buffer, with what they should be."""
        check_faults(self.device, "paged_attention", faults)
        self.check_buffers()

    def merge(self, out_a, lse_a, out_b=None, lse_b=None, out=None, lse=None, *, base="e",
              stream=None):  # fmt: skip
        """Check one `kv.merge_states`; `out` and `lse` may belong to a state."""
        states = [None if a is None else a.view.copy() for a in (out_a, lse_a, out_b, lse_b)]
        if stream is not None:
            self.device.synchronize()
        got = kv.merge_states(
            *(self.to_pass(a) for a in (out_a, lse_a, out_b, lse_b)), out=self.to_pass(out),
            lse_out=self.to_pass(lse), lse_base=base, stream=stream,
        )  # fmt: skip
        if stream is not None:
            stream.synchronize()
        assert len(got) == 2
        want, want_lse = reference.merge_states(*states, lse_base=base)
        fmt, out_fmt = out_a.fmt, out_a.fmt if out is None else out.fmt
        outs, lses = (states[i] if out_b is None else np.stack(states[i::2]) for i in (0, 1))
        outs = reference.decode(np.ascontiguousarray(outs), fmt)
        of_out, of_lse = merge_errors(outs, lses.astype(np.float64), want, want_lse, out_fmt)
        of_out[~want.any(axis=2)] = 0
        for name, a, passed, exact, allowed, f in (
            ("out", got[0], out, want, of_out, out_fmt),
            ("lse", got[1], lse, want_lse, of_lse, "fp32"),
        ):  # fmt: skip
            assert tuple(a.shape) == exact.shape
            stored = as_numpy(self.device, a, f) if passed is None else passed.live()
            values = reference.decode(np.ascontiguousarray(stored), f)
            assert_near(name, values, exact, allowed, self.seed)
            if passed is not None:
                reference.bits_of(passed.view, f)[...] = reference.bits_of(stored, f)
        self.check("merge_states", [])


# Sequences: one new token each, few, and as many as take tensor cores ----------------------------

LENS = [9, 0, 30, 14, 5]
FEW = [3, 0, 1, 9, 5]
LONG = [70, 5, 90, 33, 20]
MANY = [30, 0, 40, 9, 20]
SHAPES = {"decode": (LENS, None), "few": (LENS, FEW), "many": (LONG, MANY)}
EVICTED = [(4, 3), (0, 5), (9, 8), (14, 2), (0, 4)]
"""Start and size of evicted spans: within a page, empty, two pages, past the end, at the start."""
STARTS = [2, 0, 11, 0, 4]

shapes = pytest.mark.parametrize("shape", SHAPES)
formats = pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])


def trees_of(case, lens, new, padding=0):
    """Return trees with nodes of earlier steps, of this step alone, and sequences without one."""
    appended = [1] * len(lens) if new is None else new
    nodes = [min(n + extra, length) for n, extra, length in
             zip(appended, (4, 0, 0, 2, 0), lens, strict=True)]  # fmt: skip
    nodes[2] = 0
    return case.nodes(nodes, appended, padding) | case.tail(nodes)


def call_of(
    device, seed, shape, fmt, *, evicted=False, starts=False, trees=False, rope=None, **more
):
    """Return a case and its arguments."""
    case = AttentionCase(device, seed)
    lens, new = SHAPES[shape]
    args = case.arguments(
        lens, new, fmt=fmt, evicted=EVICTED if evicted else None,
        key_starts=STARTS if starts else None,
        **{"widths": (32, 24), **more},
    )  # fmt: skip
    if rope:
        args |= case.rope(**rope)
    if trees:
        args |= trees_of(case, lens, new, more.get("padding", 0))
    return case, args
