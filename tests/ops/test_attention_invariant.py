"""Batch-invariant attention: the bits of a sequence's output depend on that sequence alone.

One sequence is computed alone and whole, with one page size and layout; then its tokens again: in
other batches, cut into other chunks, token by token, in other pages, sizes and layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import examples

import kvcupy as kv
from kvcupy.formats import numpy_dtype

MAX_TOKENS = 700  # more than a block of keys


@dataclass(frozen=True)
class Kind:
    """Formats and shapes of the query and the caches, and options of attention."""

    query: str = "bf16"
    cache: str = "bf16"
    widths: tuple[int, int] = (64, 64)
    heads: int = 2
    group: int = 4
    dynamic: bool = False
    latent: bool = False
    learned_sinks: bool = False


KINDS = {
    "bf16": Kind(),
    "fp16, wide": Kind("fp16", "fp16", (128, 128), 1, 2),
    "fp32": Kind("fp32", "fp32", (32, 32), 1, 3),
    "one element": Kind("fp32", "fp32", (1, 1), 1, 1),
    "fp8, static": Kind("bf16", "fp8_e4m3"),
    "int8, learned sinks": Kind("fp16", "int8", learned_sinks=True),
    "fp8, dynamic": Kind("bf16", "fp8_e4m3", dynamic=True),
    "mixed formats": Kind("fp32", "fp16", (48, 64)),
    "nvfp4": Kind("bf16", "nvfp4"),
    "mxfp4": Kind("bf16", "mxfp4", (128, 128), 1, 2),
    "int4": Kind("fp16", "int4"),
    "latents": Kind("bf16", "bf16", (576, 512), 1, 16, latent=True),
    "latents of many heads": Kind("bf16", "bf16", (576, 512), 1, 40, latent=True),
    "latents of nvfp4": Kind("bf16", "nvfp4", (576, 512), 1, 16, latent=True),
    "latents of mxfp4": Kind("bf16", "mxfp4", (576, 512), 1, 16, latent=True),
    "latents of int4": Kind("fp16", "int4", (576, 512), 1, 16, latent=True),
}
OPTIONS = {
    "causal": {},
    "window": {"window": 40},
    "window and first keys": {"window": 150, "sink_tokens": 5},
    "long window and first keys": {"window": 20, "sink_tokens": 300},
    "soft cap": {"logits_soft_cap": 9.0},
}


class Tokens:
    """Query, K and V of one sequence."""

    def __init__(self, kind, rng, count):
        self.kind, self.count = kind, count
        shape = (count, kind.heads * kind.group, kind.widths[0])
        self.query = rng.standard_normal(shape, np.float32).astype(numpy_dtype(kind.query))
        self.key, self.value = (
            rng.standard_normal((count, kind.heads, width), np.float32)
            .astype(numpy_dtype(kind.query))
            for width in kind.widths
        )  # fmt: skip


class Pages:
    """A cache of several sequences, whose pages lie in any order."""

    def __init__(self, device, kind, sequences, rng, page_size, layout):
        self.device, self.kind, self.layout, self.sequences = device, kind, layout, sequences
        counts = [-(-s.count // page_size) for s in sequences]
        pages = rng.permutation(sum(counts) + 3)
        self.table = np.full((len(sequences), max(counts) + int(rng.integers(3))), -1, np.int32)
        heads, widths = kind.heads, kind.widths
        shapes = [
            (len(pages), *((page_size, heads) if layout == "NHD" else (heads, page_size)), width)
            for width in widths
        ]
        if kind.latent:
            self.k = device.zeros(shapes[0], kind.cache)
            self.v = self.k[..., : widths[1]]
        else:
            self.k, self.v = (device.zeros(shape, kind.cache) for shape in shapes)
        self.scales = {}
        if kind.dynamic:
            for name in ("k_scale_cache", "v_scale_cache"):
                self.scales[name] = device.zeros((len(pages) * page_size, heads), "fp32")
        elif kind.cache in ("fp8_e4m3", "int8"):
            self.scales = {"k_scale": 0.05, "v_scale": 0.07}
        taken = 0
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            own = pages[taken : taken + count]
            self.table[row, :count], taken = own, taken + count
            places = np.arange(sequence.count)
            slots = own[places // page_size] * page_size + places % page_size
            key, value, slots = map(device.asarray, (sequence.key, sequence.value, slots))
            if kind.latent:
                latent, rope = key[:, 0, : widths[1]], key[:, 0, widths[1] :]
                kv.store_mla(latent, rope, self.k[:, :, 0], slots)
            else:
                kv.store_kv(key, value, self.k, self.v, slots, layout=layout, **self.scales)

    def attend(self, news, lengths, invariant=True, sinks=None, **options):
        """Return the outputs and LSE of the last `news` of the first `lengths` tokens of each."""
        device = self.device
        rows = [
            s.query[n - new : n] for s, new, n in zip(self.sequences, news, lengths, strict=True)
        ]
        query = device.asarray(np.concatenate(rows))
        if any(new != 1 for new in news):
            options["query_lens"] = device.asarray(np.array(news, np.int32))
        if sinks is not None:
            options["sinks"] = device.asarray(sinks)
        out, lse = kv.paged_attention(
            query, self.k, self.v, device.asarray(self.table),
            device.asarray(np.array(lengths, np.int32)), layout=self.layout, return_lse=True,
            batch_invariant=invariant, **self.scales, **options,
        )  # fmt: skip
        kv.check_faults(device)
        stops = np.cumsum(news)[:-1]
        return [
            (a.tobytes(), b.tobytes())
            for a, b in zip(*(np.split(device.to_numpy(x), stops) for x in (out, lse)), strict=True)
        ]


def sinks_of(kind):
    if not kind.learned_sinks:
        return None
    return np.linspace(-1, 2, kind.heads * kind.group).astype(np.float32)


def differences(device, kind, options, rng, rounds, invariant=True):
    """Compare the tokens of a sequence, computed alone, with the same in other batches."""
    count = int(rng.integers(2, MAX_TOKENS))
    tokens = Tokens(kind, rng, count)
    layouts = ["NHD"] if kind.latent else ["NHD", "HND"]
    sizes = [1, 3, 16, 64, 128]
    sinks = sinks_of(kind)
    options = {**options, "sinks": sinks, "invariant": invariant}
    alone = Pages(device, kind, [tokens], rng, 16, "NHD")
    [(out, lse)] = alone.attend([count], [count], **options)
    own_rows = [len(b) // count for b in (out, lse)]
    found = 0
    for _ in range(rounds):
        others = [Tokens(kind, rng, int(rng.integers(1, 300))) for _ in range(rng.integers(3))]
        place = int(rng.integers(len(others) + 1))
        batch = [*others[:place], tokens, *others[place:]]
        pages = Pages(device, kind, batch, rng, int(rng.choice(sizes)), str(rng.choice(layouts)))
        stop = int(rng.integers(1, count + 1))
        new = 1 if rng.random() < 0.4 else int(rng.integers(1, stop + 1))
        news = [1 if new == 1 and rng.random() < 0.7 else int(rng.integers(1, s.count + 1))
                for s in batch]  # fmt: skip
        lengths = [s.count for s in batch]
        news[place], lengths[place] = new, stop
        got = pages.attend(news, lengths, **options)[place]
        want = [b[(stop - new) * n : stop * n] for b, n in zip((out, lse), own_rows, strict=True)]
        found += list(got) != want
    return found


@pytest.fixture(params=[1, 32], ids=["threads alone", "warps"])
def any_device(request, device, monkeypatch):
    """The device; a host with threads in lockstep, or not."""
    if device.kind == "host":
        monkeypatch.setattr(device, "warp_lanes", request.param)
        monkeypatch.setattr(kv.ops.call, "_plans", {})
    elif request.param == 1:
        pytest.skip("threads of a GPU run in warps")
    return device


@pytest.mark.covering
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_same_bits_in_any_company(any_device, lenient_host, kind, options):
    rng = np.random.default_rng(len(kind) + 100 * len(options))
    rounds = examples(24)
    assert differences(any_device, KINDS[kind], OPTIONS[options], rng, rounds) == 0


def test_the_strict_device_agrees(any_device):
    rng = np.random.default_rng(3)
    assert differences(any_device, KINDS["bf16"], {"window": 60, "sink_tokens": 3}, rng, 3) == 0


@pytest.mark.parametrize("kind", ["bf16", "fp8, static"])
def test_without_the_option_company_changes_bits(any_device, lenient_host, kind):
    """A control: the comparison notices one kernel for prefill and another for decode."""
    if any_device.warp_lanes == 1:
        pytest.skip("one thread has one order for all tiles")
    rng = np.random.default_rng(5)
    assert differences(any_device, KINDS[kind], {}, rng, 12, invariant=False) > 0


def test_the_setting_holds_for_calls_that_say_nothing(device, lenient_host, monkeypatch):
    rng = np.random.default_rng(7)
    monkeypatch.setattr(kv.config, "_batch_invariant", True)
    assert differences(device, KINDS["bf16"], {}, rng, 6, invariant=None) == 0


@pytest.mark.parametrize("kind", ["bf16", "int4", "latents"])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_what_the_usual_kernels_compute(any_device, lenient_host, kind, options):
    kind, rng = KINDS[kind], np.random.default_rng(11)
    tokens = [Tokens(kind, rng, n) for n in (530, 70)]
    pages = Pages(any_device, kind, tokens, rng, 16, "NHD")
    lengths, news = [530, 70], [9, 70]
    query = np.concatenate([s.query[-n:] for s, n in zip(tokens, news, strict=True)])
    arrays = query, pages.table, np.array(lengths), np.array(news)
    query, table, lengths, news = map(any_device.asarray, arrays)
    results = [
        kv.paged_attention(
            query, pages.k, pages.v, table, lengths, query_lens=news, return_lse=True,
            batch_invariant=invariant, **OPTIONS[options],
        )
        for invariant in (True, False)
    ]  # fmt: skip
    for got, want, near in zip(*results, (0.02, 1e-4), strict=True):
        got, want = (any_device.to_numpy(a).astype(np.float32) for a in (got, want))
        np.testing.assert_allclose(got, want, rtol=near, atol=near)


@pytest.mark.parametrize("value", [1, "yes", np.zeros(1)])
def test_other_values_are_refused(device, value):
    call = {
        "query": np.ones((1, 1, 8), np.float32), "k_cache": np.ones((1, 1, 1, 8), np.float32),
        "v_cache": np.ones((1, 1, 1, 8), np.float32), "block_table": np.zeros((1, 1), np.int32),
        "seq_lens": np.ones(1, np.int32),
    }  # fmt: skip
    call = {name: device.asarray(array) for name, array in call.items()}
    with pytest.raises(TypeError, match=r"^batch_invariant: expected a bool"):
        kv.paged_attention(**call, batch_invariant=value)
    with pytest.raises(TypeError, match=r"^batch_invariant: expected a bool"):
        kv.config.batch_invariant = value
