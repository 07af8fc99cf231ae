"""Tiers by groups of layers: random programs against a model that knows every token and state."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from groups_model import PAGE, full, latent, recurrent, sliding
from tiered_groups_cases import TieredMixture, hashes_of
from tiered_groups_reference import GroupTiers, Reference

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("lenient_host")

MIXES = {
    "window, full": [sliding(0, 1, window=6), full(2)],
    "sinks": [full(0), sliding(1, window=9, sink_tokens=5), latent(2)],
    "full, state": [full(0), recurrent(1, 2)],
    "state, window, full": [recurrent(0), sliding(1, window=7), full(2)],
    "windows": [sliding(0, window=5), sliding(1, window=12, sink_tokens=2)],
}


def prompts_of(mixture, count=8):
    """Prompts that share prefixes of several lengths."""
    rng = np.random.default_rng(3)
    prompts = [mixture.new(30)]
    for _ in range(count - 1):
        stem = prompts[rng.integers(len(prompts))]
        kept = int(rng.integers(len(stem)))
        prompts.append(stem[:kept] + mixture.new(int(rng.integers(3, 40 - kept // 2))))
    return prompts


def run(mixture, seed, steps=60):
    rng = np.random.default_rng(seed)
    prompts = prompts_of(mixture)
    mixture.chains = [hashes_of(p) for p in prompts]
    made = 0
    for _ in range(steps):
        names = list(mixture.tokens)
        name = names[rng.integers(len(names))] if names else None
        action = rng.choice(
            ["prompt", "step", "remove", "fork", "pop", "evict", "abort"],
            p=[0.34, 0.1, 0.26, 0.08, 0.08, 0.1, 0.04],
        )
        with suppress(kv.CacheFull):
            if action == "prompt" and len(names) < 4:
                made += 1
                mixture.prompt(
                    f"s{made}", prompts[rng.integers(len(prompts))],
                    chunk=int(rng.choice([5, 8, 16])),
                )  # fmt: skip
            elif name is None:
                continue
            elif action == "step":
                mixture.step({name: mixture.new(int(rng.integers(1, 10)))})
            elif action == "abort":
                mixture.step({name: mixture.new(3)}, keep=False)
            elif action == "remove":
                mixture.remove(name)
            elif action == "fork" and len(names) < 4:
                made += 1
                mixture.fork(name, f"s{made}", int(rng.integers(len(mixture.tokens[name]) + 1)))
            elif action == "pop":
                mixture.pop(name, int(rng.integers(min(6, len(mixture.tokens[name]) + 1))))
            elif action == "evict":
                mixture.tiers.evict(int(rng.integers(12)))
        mixture.check()
        if mixture.tiers.stats().get("shared_stored") is None:
            mixture.check_useful()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
def test_random_operations(device, mix, seed):
    mixture = TieredMixture(MIXES[mix], device, blocks=[12, 40, 6][seed], num_tokens=160)
    run(mixture, seed)
    assert sum(mixture.hits) > 0
    mixture.check_empty()


@pytest.mark.parametrize("mix", MIXES)
def test_random_operations_with_a_disk(device, mix, tmp_path):
    tiers = {"disk": tmp_path / "kv", "disk_bytes": 1 << 20}
    mixture = TieredMixture(MIXES[mix], device, blocks=6, num_tokens=160, tiers=tiers)
    run(mixture, 7)
    stats = mixture.tiers.stats()
    assert stats["disk_write_bytes"] > 0 and stats["disk_read_bytes"] > 0
    mixture.check_empty()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mix", MIXES)
def test_hits_are_those_of_a_simulation(device, mix, seed):
    mixture = TieredMixture(
        MIXES[mix], device, blocks=[14, 24][seed], num_tokens=200, tiers={"write": "back"}
    )
    rng = np.random.default_rng(seed)
    prompts = prompts_of(mixture, 12)
    groups = [
        GroupTiers(group.blocks, window, cache.host_pool.num_pages)
        for group, cache, window in zip(
            mixture.tiers.groups, mixture.caches,
            [*(g.window for g in mixture.cache._groups), 0], strict=False,
        )
    ]  # fmt: skip
    reference = Reference(groups)
    expected = []
    for _ in range(60):
        tokens = prompts[min(rng.geometric(0.2) - 1, len(prompts) - 1)]
        chunk = int(rng.choice([5, 8, 16]))
        expected.append(PAGE * reference.request(hashes_of(tokens[:-1]), len(tokens), chunk))
        mixture.prompt("a", tokens, chunk=chunk)
        mixture.settle()
        mixture.remove("a")
        mixture.settle()
        mixture.evict_all()
        for known, group in zip(mixture.known(), groups, strict=True):
            assert known == set(group.host)
    assert mixture.hits == expected
    assert 0 < sum(expected) < 60 * sum(map(len, prompts)) / len(prompts)
    mixture.check_empty()
