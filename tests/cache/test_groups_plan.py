"""How the memory of a cache is divided among groups of layers, and what a sequence takes."""

from __future__ import annotations

import numpy as np
import pytest
from groups_model import full, latent, recurrent, sliding

import kvcupy as kv

K = 1024


def cache_of(groups, **options):
    return kv.PagedKVCache(
        **{"num_q_heads": 8, "page_size": 16, "device": "host", "groups": groups, **options}
    )


def of_all(cache):
    """Bytes of all pools and states."""
    states = cache._states
    num_bytes = 0 if states is None else states.pool.num_bytes
    return sum(pool.num_bytes for pool in cache.pools) + num_bytes


def test_the_plan_is_what_there_is():
    groups = [full(0, 4), sliding(1, 2, window=64), latent(3), recurrent(5, 6)]
    cache = cache_of(groups, memory_bytes=1 << 20, num_tokens=256)
    plan = cache.plan()
    assert plan.num_bytes == of_all(cache) <= 1 << 20
    assert plan.num_bytes > 0.98 * (1 << 20)
    assert [part.group for part in plan.groups] == groups
    assert [part.bytes_per_token for part in plan.groups] == [256, 192, 48, 0]
    assert plan.groups[3].bytes_per_sequence == 2 * 2 * (12 * 2 + 10 * 4)
    text = str(plan)
    for name in ("FullAttention", "SlidingWindow", "Latent", "Recurrent", "all", "B/token"):
        assert name in text
    for part in plan.groups:
        assert f"{part.num_bytes:,}" in text


def test_no_group_starves_another():
    """As many sequences as the plan names fit, in all groups."""
    groups = [full(0), sliding(1, window=64), recurrent(2)]
    cache = cache_of(groups, memory_bytes=200_000, num_tokens=256, max_batch_tokens=32)
    count = int(cache.plan().num_sequences)
    assert count > 2
    for name in range(count):
        cache.add_sequence(name)
    for _ in range(256 // 8):
        for first in range(0, count, 4):
            names = list(range(first, min(first + 4, count)))
            with cache.forward(list(names), [8] * len(names)):
                pass
    assert [cache.sequence_length(name) for name in range(count)] == [256] * count


def demoting(num_pages, recent=16, first=0):
    demotion = kv.Demotion("nvfp4", recent=recent, first=first, num_pages=num_pages)
    return kv.FullAttention(
        layers=[0], num_kv_heads=1, head_dim=32, dtype="fp16", demotion=demotion
    )


def test_a_fixed_pool_of_old_tokens_is_part_of_the_plan():
    """Pages that it has no room for stay in the cache's dtype."""
    shape = {"num_q_heads": 1, "page_size": 4, "max_batch_tokens": 16, "num_tokens": 200}
    with pytest.raises(ValueError, match=r"memory_bytes: .* 200 tokens .* bytes are missing"):
        cache_of([demoting(3)], memory_bytes=20_000, **shape).plan()
    plan = cache_of([demoting(3)], memory_bytes=40_000, **shape).plan()
    assert plan.groups[0].num_pages >= 50 - 3
    assert plan.groups[0].bytes_per_sequence == (50 - 3) * 4 * 128 + 3 * 4 * 36
    assert cache_of([demoting(3)], **shape).pool.num_pages >= 50 - 3
    assert cache_of([demoting(None)], **shape).pool.num_pages < 20


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_keep_what_they_promise(seed):
    """As many sequences as a plan names can be filled, in steps of any sizes."""
    rng = np.random.default_rng(seed)
    length, step = int(rng.integers(1, 200)), int(rng.integers(1, 64))
    num_pages = None if rng.random() < 0.3 else int(rng.integers(1, 60))
    groups = [demoting(num_pages, int(rng.integers(40)), int(rng.integers(2) * rng.integers(20)))]
    if rng.random() < 0.4:
        groups.append(sliding(1, window=int(rng.integers(1, 60))))
    size = {"num_tokens": length, "memory_bytes": int(rng.integers(1000, 80_000))}
    if rng.random() < 0.5:
        size = {"num_tokens": length * int(rng.integers(1, 4)), "max_seq_len": length}
    page_size = int(rng.choice([1, 2, 4, 8]))
    try:
        cache = cache_of(groups, page_size=page_size, max_batch_tokens=step, **size)
        plan = cache.plan()
    except ValueError as error:
        assert "memory_bytes" in str(error), seed
        return
    left = dict.fromkeys(range(int(plan.num_sequences)), length)
    assert left, seed
    for name in left:
        cache.add_sequence(name)
    while left:
        room, counts = min(plan.step_tokens, step), {}
        for name in rng.permutation(list(left))[: rng.integers(1, len(left) + 1)].tolist():
            most = min(left[name], room)
            if most:
                counts[name] = 1 if rng.random() < 0.5 else int(rng.integers(1, most + 1))
                room -= counts[name]
        try:
            with cache.forward([*counts], [*counts.values()]):
                pass
        except kv.CacheFull as error:
            raise AssertionError(f"seed {seed}: {error}; {left} left\n{plan}") from error
        left = {name: n - counts.get(name, 0) for name, n in left.items()}
        left = {name: n for name, n in left.items() if n}


@pytest.mark.parametrize("groups", [[full(0), sliding(1, window=64)], [full(0), recurrent(1)]])
def test_less_than_a_sequence(groups):
    fits = cache_of(groups, memory_bytes=1 << 20, num_tokens=500, max_batch_tokens=16).plan()
    need = fits.bytes_per_sequence
    cache = cache_of(groups, memory_bytes=need // 2, num_tokens=500, max_batch_tokens=16)
    with pytest.raises(
        ValueError, match=r"memory_bytes: .* 500 tokens .* bytes are missing"
    ) as caught:
        cache.plan()
    assert of_all(cache) <= need // 2
    named = int(str(caught.value).split("at least ")[1].split()[0])
    fits = cache_of(groups, memory_bytes=named, num_tokens=500, max_batch_tokens=16)
    assert fits.plan().num_sequences >= 1, "that much is enough"
    with pytest.raises(ValueError, match="memory_bytes"):
        cache_of(groups, memory_bytes=100, num_tokens=500)


def test_max_seq_len_is_the_default():
    groups = [full(0), sliding(1, window=64)]
    plan = cache_of(groups, memory_bytes=1 << 20, max_seq_len=96).plan()
    assert plan.sequence_tokens == 96
    assert cache_of(groups, num_tokens=960, max_seq_len=96).plan().num_sequences == 10
    rope = kv.rope_table(80, 8, device="host")
    assert cache_of(groups, memory_bytes=1 << 20, rope=rope).plan().sequence_tokens == 80
    plan = cache_of(groups, memory_bytes=1 << 20).plan()
    assert plan.sequence_tokens == 1024
    assert plan.num_sequences >= 4
    with pytest.raises(ValueError, match="memory_bytes"):
        cache_of(groups)


def test_other_arguments_of_a_shape_are_refused():
    for name, value in (("num_layers", 2), ("num_pages", 8), ("head_dim", 8), ("dtype", "fp32")):
        with pytest.raises(ValueError, match=name):
            cache_of([full(0)], num_tokens=64, **{name: value})
    with pytest.raises(NotImplementedError, match="attention"):
        cache_of([full(0), sliding(1, window=8)], num_tokens=64, attention="auto")
    with pytest.raises(ValueError, match="num_q_heads"):
        cache_of([full(0)], num_tokens=64, num_q_heads=3)
    with pytest.raises(ValueError, match="memory_bytes"):
        kv.PagedKVCache(
            num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=1, memory_bytes=9,
            device="host",
        )  # fmt: skip


def test_groups_that_do_not_fit_together():
    for groups, error, text in (
        ([full(0), sliding(0, window=8)], ValueError, "each layer in one group"),
        ([recurrent(0)], NotImplementedError, "attention"),
        ([full(0), 3], TypeError, "groups"),
        ([full(0), recurrent(1), recurrent(2, checkpoint_tokens=16)], NotImplementedError, "check"),
    ):
        with pytest.raises(error, match=text):
            cache_of(groups, num_tokens=64)


def test_declarations_that_do_not_fit():
    shape = {"num_kv_heads": 1, "head_dim": 8}
    for make, name in (
        (lambda: kv.FullAttention(layers=[], **shape), "layers"),
        (lambda: kv.FullAttention(layers=[1, 1], **shape), "layers"),
        (lambda: kv.FullAttention(layers=[-1], **shape), "layers"),
        (lambda: kv.FullAttention(layers=[0], num_kv_heads=0, head_dim=8), "num_kv_heads"),
        (lambda: kv.FullAttention(layers=[0], dtype="int3", **shape), "int3"),
        (lambda: kv.SlidingWindow(layers=[0], window=0, **shape), "window"),
        (lambda: kv.SlidingWindow(layers=[0], window=4, sink_tokens=-1, **shape), "sink_tokens"),
        (lambda: kv.Latent(layers=[0], latent_dim=8, rope_dim=0), "rope_dim"),
        (lambda: kv.Recurrent(layers=[0], state={}), "state"),
        (lambda: kv.Recurrent(layers=[0], state={"a": 3}), "state"),
        (lambda: kv.Recurrent(layers=[0], state={"a": ((), "fp32")}), "state"),
        (lambda: kv.Recurrent(layers=[0], state={"a": ((2,), "fp32", 1)}), "^state: .*for 'a'"),
        *(
            (lambda dtype=dtype: kv.Recurrent(layers=[0], state={"a": ((2,), dtype)}), "^state: ")
            for dtype in ("fp3", "nvfp4", "U3", object, None)
        ),
        (
            lambda: kv.Recurrent(layers=[0], state={"a": ((2,), "fp32")}, checkpoint_tokens=0),
            "chec",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            make()


# --- Memory beside what is needed ---

TOKENS = 32 * K


def grown(cache, chunk):
    """Grow a sequence to its whole length."""
    cache.add_sequence("a")
    for _ in range(TOKENS // chunk):
        with cache.forward(["a"], [chunk]):
            pass
    assert cache.sequence_length("a") == TOKENS
    return cache


def test_windows_and_full_attention():
    """A mix like Gemma 3's: five windows of 1,024 to one layer of full attention."""
    shape = {"num_kv_heads": 1, "head_dim": 16, "dtype": "bf16"}
    groups = [
        kv.SlidingWindow(layers=[0, 1, 2, 3, 4], window=K, **shape),
        kv.FullAttention(layers=[5], **shape),
    ]
    minimum = (5 * K + TOKENS) * 64
    cache = grown(cache_of(groups, num_tokens=TOKENS, max_batch_tokens=512), 512)
    assert minimum <= of_all(cache) <= 1.1 * minimum
    within = cache_of(groups, memory_bytes=int(1.1 * minimum), num_tokens=TOKENS)
    assert of_all(grown(within, within.plan().step_tokens)) <= 1.1 * minimum
    without = kv.PagedKVCache(
        num_layers=6, num_q_heads=8, num_pages=TOKENS // 16, page_size=16, device="host", **shape
    )
    assert of_all(cache) < without.pool.num_bytes / 4.5
    held = cache.pools[0].allocator.num_allocated * 16
    assert K <= held <= K + 2 * 16
