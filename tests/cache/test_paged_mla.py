"""`PagedKVCache` of latents: multi-head latent attention with absorbed queries."""

from __future__ import annotations

import numpy as np
import pytest
from gather_cases import as_numpy
from helpers import QUANTISED, Case, from_values
from paged_cases import BINARY, FOREST, Twin, rope_of
from paged_snapshot import snapshot

import kvcupy as kv
from kvcupy import reference
from kvcupy.testing.arrays import assert_near

R, P = 16, 8
LATENT = {
    "latent_dim": R, "rope_dim": P, "head_dim": R + P, "num_kv_heads": 1, "num_q_heads": 6
}  # fmt: skip


class LatentTwin(Twin):
    """K of the model is the latent and the rope part side by side; V is the latent."""

    def __init__(self, device, **options):
        super().__init__(device, **{**LATENT, **options})
        if self.options["dtype"] in QUANTISED:  # one scale for both parts, 1 unless given
            self.model.k_scale = self.options.get("k_scale", 1.0)
            self.model.v_scale = self.model.k_scale

    def rows(self, *shape, loud=2.0):
        return from_values(self.rng.standard_normal(shape) * loud, self.fmt)

    def attend_layer(self, layer, *, padding=0, given_out=True, sm_scale=0.2, **masks):
        """Attend once; rows past the step are NaN."""
        count = len(self.model.new_tokens())
        case = Case(self.device, next(self._cases))
        heads, total = self.options["num_q_heads"], count + padding
        content = [self.rows(total, heads, R + P), self.rows(total, R), self.rows(total, P)]
        for rows in content:
            rows[count:] = from_values(np.nan, self.fmt)
        given = [case.place(rows, self.fmt) for rows in content]
        out = case.output(self.fmt, (total, heads, R), name="out") if given_out else None
        passed = {
            name: case.place(value, "fp32").array if isinstance(value, np.ndarray) else value
            for name, value in masks.items()
        }
        got = self.cache.attention_mla(
            layer, *(a.array for a in given), sm_scale=sm_scale,
            out=None if out is None else out.array, **passed,
        )  # fmt: skip
        query, latent, rope_key = (a.view for a in given)
        key = np.concatenate([latent, rope_key], 1)[:, None]
        want, allowed = self.model.attention(
            layer, query, key, latent[:, None], sm_scale=sm_scale, **masks
        )
        assert tuple(got.shape) == (total, heads, R)
        stored = as_numpy(self.device, got, self.fmt)
        values = reference.decode(stored, self.fmt)[:count]
        assert_near(f"out of layer {layer}", values, want, allowed, self.seed)
        if out is None:
            assert not stored[count:].view(np.uint8).any()
        else:
            reference.bits_of(out.view, self.fmt)[:count] = reference.bits_of(stored, self.fmt)[
                :count
            ]
        case.check("", [])

    def check_contents(self, name, start=0, stop=None):
        """`get_kv` gives the latent (L, n, R) and the rope part (L, n, P)."""
        cache_fmt = self.options["dtype"]
        fmt = "bf16" if cache_fmt in QUANTISED else cache_fmt
        stop = len(self.model.sequences[name].tokens) if stop is None else stop
        if start == stop:
            return
        latent, rope_key = self.cache.get_kv(name, start, stop)
        want = self.model.get_kv(name, start, stop)[0][:, :, 0]
        self.compare_rows(f"latent of {name!r}", latent, want[..., :R], fmt, "V")
        self.compare_rows(f"rope part of {name!r}", rope_key, want[..., R:], fmt, "K")

    def set_kv(self, name, start, count):
        latent, rope_key = self.rows(2, count, R), self.rows(2, count, P)
        case = Case(self.device, next(self._cases))
        placed = [case.place(a, self.fmt).array for a in (latent, rope_key)]
        key = np.concatenate([latent, rope_key], -1)[:, :, None]
        self.model.set_kv(name, start, key, latent[:, :, None])
        self.cache.set_kv(name, start, *placed)
        case.check("", [])
        self.check()


@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
def test_steps(device, fmt, mode):
    """Prefill, chunks, decode, a fork within a page, a pop: only the rope part is rotated."""
    twin = LatentTwin(device, dtype=fmt, rope=rope_of(P), rope_mode=mode)
    twin.prefill("a", 9, "b", 3)
    twin.step("ba", [5, 1])
    twin.fork("a", "c", 7)
    twin.pop("b", 2)
    twin.step("cab", [1, 1, 1])
    twin.set_kv("a", 2, 6)
    twin.step("bca", [1, 4, 2])


@pytest.mark.parametrize("k_scale", [None, 0.05])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_quantised(device, fmt, k_scale):
    """One scale for both parts; 1 where none is given."""
    options = {} if k_scale is None else {"k_scale": k_scale}
    twin = LatentTwin(device, seed=1, dtype=fmt, rope=rope_of(P), rope_mode="inline", **options)
    twin.prefill("a", 9)
    twin.step("a", [1])
    twin.fork("a", "b", 6)
    twin.step("ba", [1, 3])


@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_trees(device, mode):
    twin = LatentTwin(device, seed=2, rope=rope_of(P), rope_mode=mode)
    twin.prefill("a", 6, "b", 7, "c", 2)
    twin.step("abc", [7, 7, 1], [BINARY, FOREST, None])
    twin.step("ba", [1, 2], [[6], [3, 7]])
    twin.commit("ba", [7, 8])
    twin.step("cab", [1, 1, 1])


@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_windows(device, mode):
    twin = LatentTwin(device, seed=3, rope=rope_of(P), rope_mode=mode)
    twin.add("a", "b")
    twin.slide("a", 6, 2)
    for lens in ([6, 13], [5, 1], [1, 4], [3, 1]):
        twin.step("ab", lens, window=6, sink_tokens=1)
    twin.fork("a", "c", 5)
    twin.step("cab", [1, 1, 1], sinks=np.float32([1, -1, 0, 2, 0.5, 3]))


@pytest.mark.parametrize("cascade", [True, False])
def test_shared_prefixes(device, cascade):
    twin = LatentTwin(device, seed=4, rope=rope_of(P), cascade=cascade)
    twin.prefill("a", 16)
    for name in "bcd":
        twin.fork("a", name)
    twin.step("abcd", [1, 1, 1, 1])
    twin.step("dbac", [2, 1, 1, 3])


def test_padding(device):
    twin = LatentTwin(device, seed=5, rope=rope_of(P), dtype="bf16")
    twin.add("a", "b")
    for given_out, padding in ((True, 3), (False, 1)):
        twin.step("ab", [5, 1], given_out=given_out, padding=padding)


def test_a_file(device, tmp_path):
    pytest.importorskip("safetensors")
    twin = LatentTwin(device, seed=6, rope=rope_of(P), dtype="bf16")
    twin.prefill("a", 9)
    twin.cache.save_sequence("a", tmp_path / "a")
    twin.cache.load_sequence("b", tmp_path / "a")
    twin.model.load("b", twin.model.sequences["a"])
    twin.step("ba", [2, 1])
    plain = Twin(device, dtype="bf16", num_kv_heads=1, head_dim=R + P, num_q_heads=6)
    with pytest.raises(ValueError, match=r"\bpath\b"):
        plain.cache.load_sequence("b", tmp_path / "a")
    plain.check()


def test_refused(device):
    """Attention of the other kind, a missing scale of scores, shapes of either part."""
    twin = LatentTwin(device, seed=7)
    twin.prefill("a", 9)
    twin.both("begin", ["a"], [2], None)
    good = {
        "query": np.zeros((2, 6, R + P), np.float32), "latent": np.zeros((2, R), np.float32),
        "rope_key": np.zeros((2, P), np.float32),
    }  # fmt: skip
    before = snapshot(twin.cache, ["a"])

    def attend(sm_scale=0.1, **changes):
        arrays = [device.asarray(a) for a in {**good, **changes}.values()]
        options = {} if sm_scale is None else {"sm_scale": sm_scale}
        twin.cache.attention_mla(0, *arrays, **options)

    with pytest.raises(TypeError, match="sm_scale"):
        attend(sm_scale=None)
    for name, array in good.items():
        for wrong in (array[:1], array[..., 1:]):
            with pytest.raises(ValueError, match=rf"\b{name}\b"):
                attend(**{name: np.ascontiguousarray(wrong)})
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            attend(**{name: array.astype(np.float64)})
    rows = [device.asarray(np.zeros((2, h, R + P), np.float32)) for h in (6, 1, 1)]
    with pytest.raises((TypeError, kv.KvcupyError)):
        twin.cache.attention(0, *rows)
    assert snapshot(twin.cache, ["a"]) == before
    twin.attend()
    twin.both("end")
    twin.check()


def test_latents_need_a_cache_of_latents(device):
    twin = Twin(device, seed=8)
    twin.prefill("a", 5)
    twin.both("begin", ["a"], [1], None)
    arrays = [device.asarray(np.zeros(s, np.float32)) for s in ((1, 4, 8), (1, 4), (1, 4))]
    before = snapshot(twin.cache, ["a"])
    with pytest.raises((TypeError, kv.KvcupyError)):
        twin.cache.attention_mla(0, *arrays, sm_scale=0.1)
    assert snapshot(twin.cache, ["a"]) == before
    twin.attend()
    twin.both("end")
    twin.check()


@pytest.mark.parametrize(
    ("name", "options"),
    [("num_kv_heads", {"num_kv_heads": 2}), ("head_dim", {"head_dim": R}),
     ("rope_dim", {"rope_dim": None}), ("rope_dim", {"rope_dim": 0}),
     ("rope", {"rope": rope_of(P + 2)}), ("v_head_dim", {"v_head_dim": 8}),
     ("latent_dim", {"latent_dim": 0})],
)  # fmt: skip
def test_options(device, name, options):
    with pytest.raises((TypeError, ValueError), match=rf"\b({name})\b"):
        kv.PagedKVCache(**{"num_layers": 1, "num_pages": 4, "device": "host", **LATENT, **options})
