"""Batch-invariant paged caches: outputs of a sequence do not depend on its history or batch."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv

SHAPE = {
    "num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_pages": 96,
    "max_batch_tokens": 600,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("lenient_host")


class Alone:
    """Rows of the tokens of a sequence, the same whenever they are asked for."""

    def __init__(self, device, **options):
        self.cache = kv.PagedKVCache(**{**SHAPE, **options}, device=device)
        self.device, self.outputs = device, {}

    def step(self, **news):
        """Append some tokens to each sequence; keep the outputs of each token as bytes."""
        starts = {name: self.cache.sequence_length(name) for name in news}
        rows = [self.rows(name[0], starts[name], n) for name, n in news.items()]
        with self.cache.forward(list(news), list(news.values())):
            for layer in range(2):
                q, k, v = (
                    self.device.asarray(np.concatenate([r[i] for r in rows]) * (1 + layer))
                    for i in range(3)
                )
                out = self.device.to_numpy(self.cache.attention(layer, q, k, v))
                stop = 0
                for name, n in news.items():
                    for i in range(n):
                        self.outputs[name[0], starts[name] + i, layer] = out[stop + i].tobytes()
                    stop += n

    @staticmethod
    def rows(name, start, count):
        dtype = kv.formats.numpy_dtype("bf16")
        rng = np.random.default_rng(ord(name))
        whole = rng.standard_normal((700, 8, 64), np.float32)[start : start + count].astype(dtype)
        return whole[:, :4], whole[:, 4:6], whole[:, 6:]


@pytest.fixture
def want(device):
    alone = Alone(device, batch_invariant=True)
    alone.cache.add_sequence("a")
    alone.step(a=530)
    for _ in range(3):
        alone.step(a=1)
    return alone.outputs


def check(model, want):
    own = {key: bits for key, bits in model.outputs.items() if key[0] == "a"}
    assert own and all(bits == want[key] for key, bits in own.items())


@pytest.mark.parametrize(
    "options", [{}, {"page_size": 128, "num_pages": 20}, {"page_size": 5, "num_pages": 300}]
)
def test_in_a_batch_and_in_chunks(device, want, options):
    model = Alone(device, batch_invariant=True, **options)
    for name in "bac":
        model.cache.add_sequence(name)
    model.step(b=7, a=1)
    model.step(c=200, a=290)
    model.step(a=200, b=1, c=1)
    model.step(b=1, a=39)
    for _ in range(3):
        model.step(c=1, a=1, b=1)
    check(model, want)


def test_behind_a_fork(device, want):
    model = Alone(device, batch_invariant=True)
    model.cache.add_sequence("a")
    model.step(a=400)
    model.cache.fork_sequence("a", "ab", 333)
    model.step(ab=100, a=2)
    model.step(ab=97, a=128)
    model.step(ab=3, a=3)
    check(model, want)


def test_behind_a_reused_prefix(device, want):
    pool = kv.KVPool(96, 16, 2, 2, 64, device=device)
    host = kv.KVPool(96, 16, 2, 2, 64, device=device, placement="pinned")
    tiers = kv.TieredCache(pool, host)
    own = dict.fromkeys(("num_layers", "num_kv_heads", "head_dim", "num_pages"))
    model = Alone(device, pool=pool, batch_invariant=True, **own)
    model.cache.attach(tiers)
    hashes = kv.block_hashes(range(512), 16)
    model.cache.add_sequence("a", hashes=hashes)
    model.step(a=520)
    model.cache.remove_sequence("a")
    model.cache.add_sequence("a", hashes=hashes)
    assert model.cache.sequence_length("a") == 512
    model.step(a=18)
    for _ in range(3):
        model.step(a=1)
    tiers.close()
    check(model, want)


def test_the_setting_makes_caches_so(device, want, monkeypatch):
    monkeypatch.setattr(kv.config, "_batch_invariant", True)
    model = Alone(device)
    model.cache.add_sequence("a")
    model.step(a=250)
    model.step(a=280)
    check(model, want)


def test_what_it_excludes(device):
    with pytest.raises(ValueError, match=r"^demotion: expected None with batch_invariant"):
        Alone(device, batch_invariant=True, demotion=kv.Demotion("nvfp4", recent=4))
    with pytest.raises(TypeError, match=r"^batch_invariant: expected a bool"):
        Alone(device, batch_invariant=1)
