"""Documents that are cached behind one prefix and used behind another: `PagedKVCache.splice`."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import demoting
from paged_cases import rope_of
from paged_snapshot import snapshot

import kvcupy as kv
from kvcupy import reference
from kvcupy.cache.paged import moves
from kvcupy.testing.arrays import from_values

LAYERS, HEADS, PAGE = 2, 2, 4
ROWS = {"fp32": "fp32", "fp16": "fp16"}


class Splices:
    """A cache, whose sequences get random keys and values by steps."""

    def __init__(self, device, width=8, *, seed=0, **options):
        self.device, self.width = device, width
        self.rng = np.random.default_rng(seed)
        dtype = options.pop("dtype", "fp32")
        self.fmt = ROWS.get(dtype, "bf16")
        self.latent = options.get("latent_dim")
        shape = {"latent_dim": None, "num_kv_heads": HEADS, "head_dim": width}
        if self.latent:
            shape = {"rope_dim": width}
        self.table = rope_of(options.pop("rotary_dim", width), 128)
        options = {"num_pages": 40, "rope": device.asarray(self.table), **shape, **options}
        if "pool" in options:
            options = {k: x for k, x in options.items() if k not in ("num_pages", *shape)}
        else:
            options |= {"num_layers": LAYERS, "page_size": PAGE, "dtype": dtype}
        self.cache = kv.PagedKVCache(num_q_heads=2 * HEADS, device=device, **demoting(options))
        self.interleaved = options.get("interleaved", False)
        self.mode = options.get("rope_mode", "normal")

    def rows(self, *shape, seed=None):
        rng = self.rng if seed is None else np.random.default_rng(seed)
        return self.device.asarray(from_values(rng.standard_normal(shape), self.fmt))

    def append(self, name, count, seed=None):
        """Append tokens; equal seeds give equal keys and values before their rotation."""
        if name not in self.cache:
            self.cache.add_sequence(name)
        if count == 0:
            return
        with self.cache.forward([name], [count]):
            for layer in range(LAYERS):
                seeds = [None if seed is None else (seed, layer, i) for i in range(2)]
                if self.latent:
                    query = self.rows(count, 2 * HEADS, self.latent + self.width)
                    latent = self.rows(count, self.latent, seed=seeds[0])
                    rope_key = self.rows(count, self.width, seed=seeds[1])
                    self.cache.attention_mla(layer, query, latent, rope_key, sm_scale=0.3)
                    continue
                query = self.rows(count, 2 * HEADS, self.width)
                key, value = (self.rows(count, HEADS, self.width, seed=s) for s in seeds)
                self.cache.attention(layer, query, key, value)

    def values(self, name, start, stop):
        """K and V as float32, NumPy: what is rotated comes first."""
        k, v = self.cache.get_kv(name, start, stop, dtype="fp32")
        k, v = (np.array(self.device.to_numpy(x)) for x in (k, v))
        return (v, k) if self.latent else (k, v)

    def check(self, name, first, source, start, stop, tolerance=1e-6, of_values=0.0):
        """Compare spliced tokens with the tokens of the source, rotated in float64."""
        keys, values = self.values(source, start, stop)
        got_keys, got_values = self.values(name, first, first + stop - start)
        assert (np.abs(got_values - values) <= of_values).all()
        delta = first - start if self.mode == "normal" else 0
        exact = reference.shift_rows(keys, self.table, delta, interleaved=self.interleaved)
        error = np.abs(got_keys - exact)
        if delta == 0:
            assert not error.any()
        assert error.max(initial=0) <= tolerance * max(1, np.abs(exact).max(initial=0)), error.max()


@pytest.mark.parametrize("start", [0, 1, 4, 7])
@pytest.mark.parametrize("prefix", [0, 3, 4, 9])
def test_any_alignment_of_pages(device, prefix, start):
    for stop in (start, start + 1, start + 4, 14):
        case = Splices(device, seed=prefix)
        case.append("document", 14)
        case.append("prompt", prefix)
        again = case.cache.splice("prompt", "document", start, stop, recompute=3)
        assert again == range(prefix, prefix + min(3, stop - start))
        assert case.cache.sequence_length("prompt") == prefix + stop - start
        case.check("prompt", prefix, "document", start, stop)
        case.append("prompt", 2)  # what follows is written behind
        case.check("prompt", prefix, "document", start, stop)


CACHES = {
    "fp16, interleaved": ({"dtype": "fp16", "interleaved": True}, 2e-3),
    "bf16": ({"dtype": "bf16"}, 2e-2),
    "a part of each head": ({"width": 12, "rotary_dim": 8}, 1e-6),
    "fp8_e4m3": ({"dtype": "fp8_e4m3"}, 0.1),
    "int8, a static scale": ({"dtype": "int8", "k_scale": 0.05, "v_scale": 0.05}, 0.02),
    "nvfp4": ({"dtype": "nvfp4", "width": 32}, 0.3),
    "nvfp4+hadamard": ({"dtype": "nvfp4+hadamard", "width": 32}, 0.3),
    "latents": ({"latent_dim": 16}, 1e-6),
    "fp8_e4m3 latents": ({"latent_dim": 16, "dtype": "fp8_e4m3"}, 0.1),
    "rotated on read": ({"rope_mode": "inline"}, 0),
    "not rotated": ({"rope_mode": "none", "rope": None}, 0),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_of_every_kind(device, name):
    options, tolerance = CACHES[name]
    case = Splices(device, **options)
    case.append("document", 11)
    case.append("prompt", 6)
    case.cache.splice("prompt", "document", 2)
    case.check("prompt", 6, "document", 2, 11, tolerance)
    case.cache.splice("document", "prompt", 6, 9)  # and back
    case.check("document", 11, "prompt", 6, 9, 2 * tolerance)


def test_a_pool_over_arrays_with_uneven_slots(device):
    """K and V of a page lie together, and pages of four bits, as FlashInfer has them."""
    for dtype, tolerance in (("fp32", 1e-6), ("nvfp4", 0.3)):
        row = 32 if dtype == "fp32" else 18
        numbers = np.float32 if dtype == "fp32" else np.uint8
        pages = [device.zeros((12, 2, PAGE, HEADS, row), numbers) for _ in range(LAYERS)]
        parts = [[p[:, i] for p in pages] for i in range(2)]
        if dtype == "nvfp4":
            parts = [[kv.view_as(layer, dtype) for layer in part] for part in parts]
        case = Splices(device, width=32, pool=kv.KVPool.wrap(*parts), dtype="bf16"
                       if dtype == "nvfp4" else "fp32")  # fmt: skip
        case.append("document", 7)
        case.append("prompt", 5)
        case.cache.splice("prompt", "document", 1)
        case.check("prompt", 5, "document", 1, 7, tolerance)


def test_keys_are_those_of_the_other_positions(device):
    """A spliced token has the key that a step would have written there."""
    case = Splices(device)
    case.append("document", 9, seed=5)
    case.append("prompt", 6)
    case.cache.fork_sequence("prompt", "computed")
    case.append("computed", 9, seed=5)
    case.cache.splice("prompt", "document")
    for got, want in zip(case.values("prompt", 6, 15), case.values("computed", 6, 15), strict=True):
        assert np.abs(got - want).max() < 2e-6


@pytest.mark.parametrize("dtype", ["fp32", "fp8_e4m3", "int8", "nvfp4"])
def test_two_ways_to_compute_the_first_tokens_again(device, dtype):
    """By a fork and `set_kv`, or in a step before the splice."""
    case = Splices(device, width=32, dtype=dtype)
    case.append("document", 12)
    case.append("a", 5)
    case.cache.fork_sequence("a", "b")
    again = case.cache.splice("a", "document", recompute=4)
    case.cache.fork_sequence("a", "computed", again.start)
    case.append("computed", len(again), seed=8)
    rows = case.cache.get_kv("computed", again.start, again.stop, dtype="fp32")
    case.cache.set_kv("a", again.start, *rows)
    case.append("b", 4, seed=8)
    assert case.cache.splice("b", "document", 4, recompute=0) == range(9, 9)
    for got, want in zip(case.values("a", 0, 17), case.values("b", 0, 17), strict=True):
        assert np.allclose(got, want, rtol=1e-5, atol=0)


def test_a_sequence_behind_itself(device):
    case = Splices(device)
    case.append("a", 6)
    case.cache.fork_sequence("a", "b")
    assert case.cache.splice("a", "a", 1, recompute=99) == range(6, 11)
    case.check("a", 6, "a", 1, 6)
    case.check("b", 0, "a", 0, 6)


def test_shared_pages_are_not_written(device):
    """The prefix has a partial page that a fork shares."""
    case = Splices(device)
    case.append("document", 6)
    case.append("a", 6)
    case.cache.fork_sequence("a", "b", 4)
    case.cache.fork_sequence("a", "c")
    before = case.values("c", 0, 6), case.values("document", 0, 6)
    case.cache.splice("a", "document")
    case.cache.splice("c", "document", 5)
    case.check("a", 6, "document", 0, 6)
    case.check("c", 6, "document", 5, 6)
    for name, old in zip(("c", "document"), before, strict=True):
        for got, want in zip(case.values(name, 0, 6), old, strict=True):
            assert (got == want).all()
    for name in ("a", "b", "c", "document"):
        case.cache.remove_sequence(name)
    assert case.cache.num_available_pages == 40


def test_windows(device):
    """Of the source only first tokens are certain to be where they were; on read all are."""
    case = Splices(device)
    case.append("document", 12)
    case.append("prompt", 2)
    case.cache.enable_sliding_window("document", 4, sink_tokens=5)
    case.append("document", 1)
    with pytest.raises(ValueError, match="stop: expected at most the 5 sink_tokens"):
        case.cache.splice("prompt", "document")
    case.cache.splice("prompt", "document", 1, 5)
    case.check("prompt", 2, "document", 1, 5)
    case.cache.enable_sliding_window("prompt", 3)
    case.cache.splice("prompt", "document", 0, 4)
    case.append("prompt", 1)
    assert case.cache.sequence_length("prompt") == 3
    inline = Splices(device, rope_mode="inline")
    inline.append("document", 12)
    inline.cache.enable_sliding_window("document", 4, sink_tokens=5)
    inline.append("document", 1)
    inline.append("prompt", 3)
    inline.cache.splice("prompt", "document")
    inline.check("prompt", 3, "document", 0, 9)


def test_demoted_tokens_come_back(device):
    case = Splices(device, width=32, dtype="fp16", past="int8", recent=6, sinks=4)
    case.append("document", 30)
    case.append("prompt", 3)
    before = case.cache.num_available_past_pages
    assert before < case.cache.past_pool.num_pages
    case.cache.splice("prompt", "document", 2, 29)
    assert case.cache.num_available_past_pages < before  # its own are demoted again
    case.check("prompt", 3, "document", 2, 29, 0.03, of_values=0.02)  # demoted twice


def test_trees_are_to_be_committed(device):
    case = Splices(device)
    case.append("document", 5)
    case.append("prompt", 5)
    with case.cache.forward(["prompt"], [2], token_tree=[[-1, 0]]):
        pass
    for arguments in (("prompt", "document"), ("document", "prompt")):
        with pytest.raises(ValueError, match="commit_token_tree"):
            case.cache.splice(*arguments)
    case.cache.commit_token_tree(["prompt"], [1])
    case.cache.splice("document", "prompt", 5)
    case.check("document", 5, "prompt", 5, 7)


def test_what_is_refused_changes_nothing(device):
    case = Splices(device, num_pages=12)
    case.append("a", 14)
    case.append("b", 6)
    names = ("a", "b")
    before = snapshot(case.cache, names)
    for arguments, error, name in (
        (("a", "c"), kv.UnknownSequence, "source"), (("c", "a"), kv.UnknownSequence, "seq"),
        (("a", []), TypeError, "source"), (("a", "b", -1), ValueError, "start"),
        (("a", "b", 7), ValueError, "start"), (("a", "b", 1.0), TypeError, "start"),
        (("a", "b", 3, 2), ValueError, "stop"), (("a", "b", 0, 7), ValueError, "stop"),
        (("a", "b", 0, True), TypeError, "stop"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            case.cache.splice(*arguments)
    for recompute, error in ((-1, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"^recompute: "):
            case.cache.splice("a", "b", recompute=recompute)
    with case.cache.forward(["a"], [1]):
        for arguments in (("a", "b"), ("b", "a")):
            with pytest.raises(kv.KvcupyError, match="running step"):
                case.cache.splice(*arguments)
        case.cache.pop_tokens("b", 0)
    case.cache.pop_tokens("a", 1)
    for _ in range(2):
        case.cache.splice("b", "a", 0, 8)
    case.cache.pop_tokens("b", 16)
    case.cache.fork_sequence("a", "shared")  # a partial page to be copied, too
    case.cache.remove_sequence("shared")
    assert snapshot(case.cache, names)["a"] == before["a"]
    state = snapshot(case.cache, names)
    with pytest.raises(kv.CacheFull):
        for _ in range(9):
            case.cache.splice("b", "a")
            state = snapshot(case.cache, names)
    assert snapshot(case.cache, names) == state


def test_positions_past_the_table(device):
    case = Splices(device)
    case.append("a", 70)
    before = snapshot(case.cache, "a")
    with pytest.raises(ValueError, match="stop: expected 'a' to stay within the 128 positions"):
        case.cache.splice("a", "a")
    assert snapshot(case.cache, "a") == before
    case.cache.splice("a", "a", 12)


def test_a_failed_launch_changes_nothing(device, monkeypatch):
    case = Splices(device)
    case.append("a", 6)
    case.append("b", 6)
    case.cache.fork_sequence("a", "c")
    before = snapshot(case.cache, "abc")

    def fail(*_, **__):
        raise kv.DeviceError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(moves, "shift_pages", fail)
        with pytest.raises(kv.DeviceError, match="no launch"):
            case.cache.splice("a", "b")
    after = snapshot(case.cache, "abc")
    assert {**after, "pool": None} == {**before, "pool": None}
    case.cache.splice("a", "b")
    case.check("a", 6, "b", 0, 6)


def test_blocks_behind_a_splice_have_no_hash(device):
    """They are not what a prefill of the prompt gives, and do not go to a tiered cache."""
    case = Splices(device)
    tiers = kv.TieredCache(
        case.cache.pool, kv.KVPool(8, PAGE, LAYERS, HEADS, 8, dtype="fp32", placement="pinned",
                                   device=device),
    )  # fmt: skip
    case.cache.attach(tiers)
    case.append("document", 9)
    hashes = [11, 22, 33, 44]
    case.cache.add_sequence("prompt", hashes)
    case.append("prompt", 6)
    case.cache.splice("prompt", "document")
    case.append("prompt", 4)
    case.cache.remove_sequence("prompt")
    assert tiers.match(hashes).host == 1
    case.cache.remove_sequence("document")
    tiers.close()
