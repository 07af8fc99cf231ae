"""Caches of mixed layers: each group attends through its own window, states follow the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from groups_model import (
    HEADS,
    PAGE,
    Mixture,
    Taken,
    TieredMixture,
    full,
    hashes_of,
    latent,
    recurrent,
    sliding,
)

import kvcupy as kv

# --- What can be restored ---


def mixture_of(device, *groups, tokens=0, step=0, **options):
    """A cache with a sequence "a" of some tokens, in steps of `step` (0: one)."""
    mixture = Mixture(list(groups), device, **options)
    mixture.add("a")
    while (left := tokens - len(mixture.tokens["a"])) > 0:
        mixture.step({"a": mixture.new(min(left, step or left))})
    mixture.poison()
    return mixture


def test_rejected_tokens_can_be_popped(device):
    """The tokens of the last step, up to a page, leave no window."""
    mixture = mixture_of(device, full(0), sliding(1, window=8), tokens=40, step=5)
    for count in (1, 2, 3, PAGE):
        mixture.step({"a": mixture.new(count)})
        mixture.poison()
        assert mixture.pop("a", count) == 0
    mixture.step({"a": mixture.new(3)})
    mixture.check()


def test_a_step_can_be_kept_in_windows(device):
    """Until the next step begins, any number of its tokens can be popped."""
    mixture = mixture_of(device, full(0), sliding(1, window=8), tokens=40, step=5)
    for left in (0, 1, 20):
        mixture.step({"a": mixture.new(21)}, keep_step=True)
        mixture.poison()
        assert mixture.pop("a", 21 - left) == 0
    mixture.step({"a": mixture.new(21)}, keep_step=True)
    mixture.step({"a": mixture.new(1)})
    mixture.check()
    assert mixture.pop("a", 21) > 0


def test_the_tables_of_a_group(device):
    """They say where a layer's tokens are; the pages that a window has freed are negative."""
    mixture = mixture_of(device, full(0), sliding(1, window=8), tokens=40, step=5)
    cache = mixture.cache
    with cache.forward(["a"], [3]):
        tables = [device.to_numpy(cache.block_table(layer=n))[0] for n in (0, 1)]
        slots = [device.to_numpy(cache.slot_mapping(layer=n)) for n in (0, 1)]
        for group, table, own in zip(cache._groups, tables, slots, strict=True):
            assert table.tolist() == group.sequences.find("a").pages.tolist()
            places = np.arange(40, 43)
            assert own.tolist() == (table[places // PAGE] * PAGE + places % PAGE).tolist()
        assert (tables[0] >= 0).all() and (tables[1] < 0).tolist() == [True] * 8 + [False] * 3
        with pytest.raises(ValueError, match="layer"):
            cache.block_table(layer=2)
    with pytest.raises(kv.KvcupyError):
        cache.slot_mapping(layer=0)


def test_behind_a_window_nothing_is_left(device):
    mixture = mixture_of(device, full(0), sliding(1, window=8), tokens=40, step=1)
    assert mixture.fork("a", "b", 20) == 20
    assert mixture.fork("a", "c") == 0
    mixture.step({"b": mixture.new(20), "c": mixture.new(1)})
    assert mixture.pop("a", 20) == 20


def test_sink_tokens_are_left(device):
    """They fill a page and a half: as many tokens as two pages hold are there."""
    group = sliding(1, window=8, sink_tokens=6)
    mixture = mixture_of(device, full(0), group, tokens=40, step=1)
    assert mixture.fork("a", "b", 20) == 12
    assert mixture.fork("a", "c", 7) == 0
    mixture.step({"b": mixture.new(30), "c": mixture.new(1)})
    mixture.step({"b": mixture.new(1), "c": mixture.new(1)})
    mixture.check()


def test_states_are_restored_where_they_were_kept(device):
    mixture = mixture_of(device, full(0), recurrent(1), tokens=20, step=4)
    assert [mixture.fork("a", f"at {n}", n) for n in (7, 8, 15, 16, 17, 20)] == [7, 0, 7, 0, 1, 0]
    assert mixture.pop("a", 1) == 3
    mixture.step({name: mixture.new(3) for name in mixture.tokens})
    mixture.check()


def test_the_oldest_states_make_room(device):
    memory = {"num_tokens": 48, "memory_bytes": 18 * PAGE * 128 + 3 * 64}
    mixture = mixture_of(device, full(0), recurrent(1), tokens=48, step=8, **memory)
    states = mixture.cache._states
    assert states.num_slots == 3
    num_kept = states.num_slots - 1
    assert list(states._of["a"].kept) == [48 - 8 * n for n in reversed(range(num_kept))]
    for number in range(num_kept):
        mixture.fork("a", number)
    assert not states._of["a"].kept
    with pytest.raises(kv.CacheFull, match="Recurrent of layers 1"):
        mixture.fork("a", "one more")
    mixture.check()


def test_a_step_that_is_taken_back(device):
    """The state is the one from before where the model has not touched it, else the last kept."""
    mixture = mixture_of(device, full(0), recurrent(1), tokens=20, step=4)
    for work in (False, "attention"):
        mixture.step({"a": mixture.new(2)}, work=work, keep=False)
        assert mixture.cache.sequence_length("a") == 20
    mixture.step({"a": mixture.new(2)}, keep=False)
    assert mixture.cache.sequence_length("a") == 16
    mixture.step({"a": mixture.new(3)}, {"a": [-1, 0, 1]}, keep=False)
    assert mixture.cache.sequence_length("a") == 16
    mixture.step({"a": mixture.new(2)})
    mixture.check()


@pytest.mark.parametrize(("leaf", "missing"), [(-1, 0), (0, 1), (1, 2), (2, 0)])
def test_rejected_drafts_roll_the_state_back(device, leaf, missing):
    mixture = mixture_of(device, full(0), recurrent(1), tokens=10)
    mixture.step({"a": mixture.new(3)}, {"a": [-1, 0, 1]})
    drafted = mixture.tokens["a"][10:]
    mixture.commit("a", leaf)
    assert mixture.cache.sequence_length("a") == (13 if leaf == 2 else 10)
    mixture.step({"a": drafted[:missing] or mixture.new(1)})
    mixture.check()


# --- A group among others, and alone ---


def of_kind(device, group, **options):
    return kv.PagedKVCache(
        num_q_heads=HEADS, page_size=PAGE, device=device, groups=[sliding(7, window=3), group],
        num_tokens=64, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3", "demotion", "rope"])
def test_the_same_bits_as_alone(device, kind):
    """Layer 5 of the model, the first of the second group, is layer 0 of a cache of one group."""
    shape = {
        "num_kv_heads": 2,
        "head_dim": 32,
        "dtype": "fp8_e4m3" if kind == "fp8_e4m3" else "bf16",
    }
    demotion = kv.Demotion("nvfp4", recent=6, first=2) if kind == "demotion" else None
    options = {}
    if kind == "rope":
        options = {"rope": kv.rope_table(64, 8, device=device), "rope_mode": "inline"}
    group = kv.FullAttention(layers=[5, 9], demotion=demotion, **shape)
    mixed = of_kind(device, group, **options)
    plain = kv.PagedKVCache(
        num_layers=2, num_q_heads=HEADS, num_pages=16, page_size=PAGE, device=device,
        demotion=demotion, **shape, **options,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    for cache in (mixed, plain):
        cache.add_sequence("a")
        cache.add_sequence("b")
    for lens in ([7, 3], [1, 1], [9, 5], [1, 1], [1, 1]):
        arrays = [
            device.asarray(rng.standard_normal((sum(lens), heads, 32), np.float32))
            for heads in (HEADS, 2, 2)
        ]
        window = [
            device.asarray(rng.standard_normal((sum(lens), h, d), np.float32))
            for h, d in ((HEADS, 16), (1, 16), (1, 8))
        ]
        with mixed.forward(["a", "b"], lens), plain.forward(["a", "b"], lens):
            mixed.attention(7, *window)
            for layer, number in ((5, 0), (9, 1)):
                got, want = mixed.attention(layer, *arrays), plain.attention(number, *arrays)
                np.testing.assert_array_equal(device.to_numpy(got), device.to_numpy(want))
    if kind == "demotion":
        assert mixed._groups[1].demoted_pool.allocator.num_allocated > 0


# --- Streams ---


class Decoder:
    """A model of one attention layer and one state, whose steps run on a stream."""

    def __init__(self, device, **options):
        self.cache = kv.PagedKVCache(
            num_q_heads=HEADS, page_size=PAGE, device=device, num_tokens=64, max_seq_len=32,
            groups=[full(2, **options), sliding(0, window=6), recurrent(1)],
        )  # fmt: skip
        self.device, self.stream = device, device.stream()
        self.outs = []
        self.rng = np.random.default_rng(5)

    def rows(self, count):
        shapes = {0: ((HEADS, 16), (1, 16), (1, 8)), 2: ((HEADS, 8), (2, 8), (2, 8))}
        made = {
            layer: [
                self.device.asarray(self.rng.standard_normal((count, *row), np.float32))
                for row in of_layer
            ]
            for layer, of_layer in shapes.items()
        }
        return {n: [*own, self.device.zeros((count, HEADS, 8), "fp32")] for n, own in made.items()}

    def work(self, rows, stream=None, update_on=None):
        """Attend, and add 1 to the states, on a stream, or that on another."""
        stream = stream or self.stream
        self.outs += [out for *_, out in rows.values()]
        for layer, (query, key, value, out) in rows.items():
            self.cache.attention(layer, query, key, value, out=out, stream=stream)
        slots = self.cache.state_slots(stream=stream)
        array = self.cache.state(1, "ssm")

        def update():
            chosen = slots[slots >= 0]
            array[chosen] = array[chosen] + 1

        stream = update_on or stream
        with kv.declare(reads=(slots,), writes=(array,), stream=stream):
            stream.call(update)


@pytest.mark.parametrize("encoding", [None, "fp8_e4m3"])
def test_captured_steps(device, encoding):
    """A graph of three sequences is launched for as many, and for fewer."""
    options = {"demotion": encoding and kv.Demotion(encoding, recent=5, first=1)}
    captured, plain = (Decoder(device, **options) for _ in range(2))
    for model in (captured, plain):
        for name, count in (("a", 9), ("b", 3), ("c", 14)):
            model.cache.add_sequence(name)
            with model.cache.forward([name], [count]):
                model.work(model.rows(count))
    fixed = captured.rows(3)
    plain.rows(3)
    with pytest.raises(Taken), captured.cache.forward(["a", "b", "c"], [1, 1, 1]):
        with captured.stream.capture() as graph:
            captured.work(fixed)
        raise Taken
    for names in ("abc", "ca", "b", "bca", "abc", "abc"):
        count = len(names)
        rows = plain.rows(count)
        with plain.cache.forward(list(names), [1] * count):
            plain.work(rows)
        with captured.cache.forward(list(names), [1] * count):
            for layer, arrays in rows.items():
                for target, source in zip(fixed[layer][:3], arrays, strict=False):
                    device.copy(target[:count], source, stream=captured.stream)
            graph.launch(captured.stream)
        device.synchronize()
        for layer, arrays in rows.items():
            got = device.to_numpy(fixed[layer][3][:count])
            np.testing.assert_array_equal(got, device.to_numpy(arrays[3]))
    for name in "abc":
        states = [
            device.to_numpy(model.cache.state(1, "ssm"))[model.cache._states.slots([name])[0]]
            for model in (captured, plain)
        ]
        np.testing.assert_array_equal(*states)
        assert states[0].any()


def stepped(model, update_on=None):
    """Steps, forks, pops and trees on one stream, and at last on another."""
    cache = model.cache
    other = model.device.stream()
    for name in "ab":
        cache.add_sequence(name)

    def forward(names, count, stream=None, **options):
        with cache.forward(list(names), [count] * len(names), **options):
            model.work(model.rows(count * len(names)), stream, update_on)

    forward("ab", 8)
    cache.fork_sequence("a", "c")
    forward("abc", 4)
    cache.pop_tokens("a", 4)
    forward("abc", 1, other)
    forward("ab", 3, other, token_tree=[[-1, 0, 1]] * 2)
    cache.commit_token_tree(["a", "b"], [2, 0])
    cache.remove_sequence("a")
    cache.add_sequence("d")
    forward("bcd", 2)
    model.device.synchronize()


def test_order(device):
    with kv.order_checker("raise") as checker:
        stepped(Decoder(device))
    assert checker.reports == []


def test_a_stream_that_did_not_ask_for_the_slots_is_reported(device):
    """The control of the test above. It raises, for slots that are not there yet may be any."""
    with pytest.raises(kv.OrderError), kv.order_checker("raise"):
        stepped(Decoder(device), device.stream())


# --- What is refused ---


def test_calls_that_mixtures_lack(device):
    """The errors say what to do instead."""
    mixture = mixture_of(device, full(0), sliding(1, window=8), tokens=5)
    cache = mixture.cache
    for call, error in (
        (lambda: cache.enable_sliding_window("a", 4), "enable_sliding_window .*: pass Sliding"),
        (cache.page_table_csr, r"page_table_csr .*: use block_table\(layer="),
    ):
        with pytest.raises(NotImplementedError, match=error):
            call()
    mixture.check()
    mixture.step({"a": mixture.new(1)})


def test_calls_for_another_layer(device):
    """The errors name the layer."""
    mixture = mixture_of(device, full(0), latent(1), tokens=5)
    cache, mismatch = mixture.cache, "^layer: expected one that holds "
    heads = [device.zeros((1, n, 8), "fp32") for n in (HEADS, 2, 2)]
    latents = [device.zeros((1, *shape), "fp32") for shape in ((HEADS, 12), (8,), (4,))]
    with cache.forward(["a"], [1]):
        for call in (cache.slot_mapping, cache.block_table):
            with pytest.raises(ValueError, match=f"^layer: .* in {call.__name__} .*got None"):
                call()
            with pytest.raises(ValueError, match=r"^layer: expected a layer with attention"):
                call(layer=2)
            call(layer=1)
        with pytest.raises(ValueError, match=mismatch + "K and V, got 1.*call attention_mla"):
            cache.attention(1, *heads)
        with pytest.raises(ValueError, match=mismatch + "K and V, got 1.*call attention_mla"):
            cache.attention_qkv(1, device.zeros((1, HEADS + 4, 8), "fp32"))
        with pytest.raises(ValueError, match=mismatch + "latents, got 0.*call attention"):
            cache.attention_mla(0, *latents, sm_scale=1.0)
        cache.attention(0, *heads)
        cache.attention_mla(1, *latents, sm_scale=1.0)


@pytest.mark.parametrize("depth", [2, 12])
def test_nodes_are_sink_tokens_by_their_depth(device, depth):
    """A draft sees the sink tokens that it will have once it is committed, and sees them then."""
    cache = mixture_of(device, sliding(0, window=3, sink_tokens=5), max_batch_tokens=256).cache
    rng = np.random.default_rng(depth)
    parents = [-1] * 40 + [5, *range(40, 38 + depth)]  # many roots; a chain behind one of them
    path = [5, *range(40, 39 + depth)]
    old, new, last = (
        [rng.standard_normal((n, *row), np.float32) for row in ((HEADS, 16), (1, 16), (1, 8))]
        for n in (2, len(parents), 9)
    )
    got = {}
    for name, nodes, trees in (("tree", range(len(parents)), [parents]), ("chain", path, None)):
        cache.add_sequence(name)
        outs = []
        for arrays, token_tree in ((old, None), ([a[nodes] for a in new], trees), (last, None)):
            with cache.forward([name], [len(arrays[0])], token_tree=token_tree):
                out = cache.attention(0, *map(device.asarray, arrays))
            if token_tree:
                cache.commit_token_tree([name], [path[-1]])
            outs.append(device.to_numpy(out))
        got[name] = outs
    in_tree = got["tree"][1][path]
    np.testing.assert_allclose(in_tree, got["chain"][1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["tree"][2], got["chain"][2], rtol=1e-5, atol=1e-6)


# --- Contents ---


def test_contents_are_written_by_layer(device):
    """A fork that shares them keeps its own, and so do the other layers."""
    mixture = mixture_of(device, full(0, 3), sliding(1, window=8, sink_tokens=2), latent(2),
                         tokens=20, step=4)  # fmt: skip
    cache = mixture.cache
    mixture.fork("a", "b")
    shapes = {1: ((1, 16), (1, 8)), 2: ((8,), (4,)), 3: ((2, 8), (2, 8))}
    before = {layer: cache.get_kv("b", 17, 20, layer=layer) for layer in (0, 1, 2, 3)}
    for layer, both in shapes.items():
        k, v = (device.asarray(np.full((2, *row), layer + 10, np.float32)) for row in both)
        cache.set_kv("a", 18, k, v, layer=layer)
        for got, part in zip(cache.get_kv("a", 17, 20, layer=layer), (k, v), strict=True):
            np.testing.assert_array_equal(device.to_numpy(got)[1:], device.to_numpy(part)[:2])
    for layer, want in before.items():
        for name in "ab" if layer == 0 else "b":
            for got, part in zip(cache.get_kv(name, 17, 20, layer=layer), want, strict=True):
                np.testing.assert_array_equal(device.to_numpy(got), device.to_numpy(part))
    mixture.check()
    mixture.step({"b": mixture.new(1)})
    mixture.check_empty()


def test_contents_that_are_not_there(device):
    mixture = mixture_of(
        device, full(0), sliding(1, window=8, sink_tokens=2), recurrent(2), tokens=40, step=4
    )
    cache = mixture.cache
    rows = [device.zeros((2, 1, d), "fp32") for d in (16, 8)]
    k, v = cache.get_kv("a", 0, 4, layer=1)  # the page of the sink tokens
    assert k.shape == (4, 1, 16) and v.shape == (4, 1, 8)
    for start, stop in ((4, 6), (2, 5), (26, 34)):
        with pytest.raises(ValueError, match=r"start: .* window .*from 28 on"):
            cache.get_kv("a", start, stop, layer=1)
    with pytest.raises(ValueError, match=r"start: .* window"):
        cache.set_kv("a", 20, *rows, layer=1)
    assert cache.get_kv("a", 4, 6, layer=0)[0].shape == (2, 2, 8)
    assert cache.get_kv("a", 28, 28, layer=1)[0].shape == (0, 1, 16)
    for layer, error in ((None, "get_kv"), (2, "attention"), (7, "attention")):
        with pytest.raises(ValueError, match=f"layer: .*{error}"):
            cache.get_kv("a", 38, 40, layer=layer)
    with pytest.raises(ValueError, match=r"^dtype: expected .* 16 elements"):
        cache.get_kv("a", 38, 40, layer=0, dtype="nvfp4")
    with pytest.raises(ValueError, match=r"layer: .*set_kv"):
        cache.set_kv("a", 38, *rows)
    with pytest.raises(ValueError, match=r"k: expected \(tokens, 1, 16\)"):
        cache.set_kv("a", 38, rows[0][None], rows[1][None], layer=1)
    mixture.check()


def test_written_contents_have_no_hashes(device):
    """Their blocks would have other bytes than the tokens of a prompt."""
    mixture = TieredMixture([full(0), sliding(1, window=8)], device, blocks=40, num_tokens=300)
    prompt = mixture.new(42)
    mixture.prompt("a", prompt)
    rows = [device.zeros((1, 1, d), "fp32") for d in (16, 8)]
    mixture.cache.set_kv("a", 37, *rows, layer=1)
    mixture.remove("a")
    assert mixture.tiers.match(hashes_of(prompt)).device == 9
    mixture.check_empty()


def test_layers_of_the_wrong_kind(device):
    mixture = mixture_of(device, full(0), sliding(1, window=8), latent(2), recurrent(3))
    cache = mixture.cache
    query, key, value = (device.zeros((1, h, d), "fp32") for h, d in ((HEADS, 16), (1, 16), (1, 8)))
    with cache.forward(["a"], [1]):
        with pytest.raises(ValueError, match="layer"):
            cache.attention(3, query, key, value)
        with pytest.raises(ValueError, match=r"^layer: .*got 2, .*call attention_mla"):
            cache.attention(2, query, key, value)
        with pytest.raises(ValueError, match="window"):
            cache.attention(1, query, key, value, window=9)
        cache.attention(1, query, key, value, window=8)
        with pytest.raises(ValueError, match="layer"):
            cache.state(0, "ssm")
        with pytest.raises(ValueError, match="layer"):
            cache.state(3, "h")
        for arguments, name in (
            ((3.0, "ssm"), "layer"),
            (([3], "ssm"), "layer"),
            ((3, []), "name"),
        ):
            with pytest.raises(TypeError, match=f"^{name}: "):
                cache.state(*arguments)
        with pytest.raises(TypeError, match=r"^seqs: "):
            cache.state_slots_of(3)
    with pytest.raises(kv.KvcupyError):
        cache.state_slots()


def test_full_names_the_group(device):
    mixture = mixture_of(device, full(0), sliding(1, window=4), tokens=20, num_tokens=64,
                         max_batch_tokens=8, step=4)  # fmt: skip
    pool = mixture.cache.pools[1]
    pool.allocator.alloc(pool.allocator.num_free)
    with pytest.raises(kv.CacheFull, match="SlidingWindow of layers 1"):
        mixture.step({"a": mixture.new(5)})
    assert mixture.cache.pools[0].allocator.num_allocated == 5
    assert mixture.cache.sequence_length("a") == 20


# --- Files ---


@pytest.mark.parametrize("leaf", [1, 0])
def test_a_checkpoint_behind_a_tree(device, leaf):
    """An accepted tree is as good as a step, also with no more slots than a tree needs."""
    mixture = mixture_of(device, full(0), recurrent(1), tokens=14, num_tokens=32)
    states = mixture.cache._states
    states._allocator.alloc(states._allocator.num_free - 1)
    mixture.step({"a": mixture.new(2)}, {"a": [-1, 0]})
    assert 16 not in states._of["a"].kept, "not before it is accepted"
    mixture.commit("a", leaf)
    assert list(states._of["a"].kept) == ([16] if leaf == 1 else [])
    mixture.check()
    mixture.step({"a": mixture.new(3)})
    assert mixture.cache.restorable_length("a", 16) == (16 if leaf == 1 else 0)
    mixture.pop("a", len(mixture.tokens["a"]) - 16)
    mixture.step({"a": mixture.new(3)})
    mixture.check()


def test_files_that_do_not_fit(device, tmp_path):
    path = tmp_path / "saved"
    one = mixture_of(device, full(0), sliding(1, window=8), recurrent(2), tokens=20)
    one.cache.save_sequence("a", path)
    for groups, name in (
        ([full(0), sliding(1, window=9), recurrent(2)], "group_window 1 9"),
        ([full(0), sliding(3, window=8), recurrent(2)], "layers 1 "),
        ([full(0), sliding(1, window=8)], "num_groups"),
        ([sliding(1, window=8), full(0), recurrent(2)], "group SlidingWindow, got FullAttention"),
    ):
        with pytest.raises(ValueError, match=name):
            Mixture(groups, device).cache.load_sequence("a", path)
    little = Mixture([full(0), sliding(1, window=8), recurrent(2)], device, num_tokens=16)
    with pytest.raises(kv.CacheFull, match="FullAttention of layers 0"):
        little.cache.load_sequence("a", path)
    little.check()
    assert "a" not in little.cache
    with pytest.raises(ValueError, match="new sequence"):
        one.cache.load_sequence("a", path)


@pytest.mark.parametrize("dtype", ["int32", np.float64, "fp8_e4m3", "uint8"])
def test_states_of_any_dtype(device, dtype, tmp_path):
    groups = [full(0), kv.Recurrent(layers=[1], state={"s": ((3,), dtype)}, checkpoint_tokens=4)]
    mixture = Mixture(groups, device)
    mixture.add("a")
    for value in (4, 8):
        with mixture.cache.forward(["a"], [4]):
            rows = mixture.cache.state(1, "s")
            rows[mixture.cache.state_slots()] = np.full(3, value, rows.dtype)
    assert mixture.cache.fork_sequence("a", "b", 4) == 0
    mixture.cache.save_sequence("a", tmp_path / "a")
    mixture.cache.load_sequence("c", tmp_path / "a")
    slots = mixture.cache._states.slots("abc")
    got = device.to_numpy(mixture.cache.state(1, "s"))[slots].astype(int)
    assert got.tolist() == [[8] * 3, [4] * 3, [8] * 3]


def test_a_copy_of_a_state_that_failed_in_flight(device, monkeypatch):
    """The sequence can only be removed; a state that was not kept is not used."""
    if device.kind != "host":
        pytest.skip("a failure in flight is injected on the host device")

    def fail(*_, stream, **__):
        def raising():
            raise ValueError("bad page")

        stream.call(raising)

    mixture = mixture_of(device, full(0), recurrent(1), tokens=7)
    cache = mixture.cache
    with monkeypatch.context() as patch:
        patch.setattr("kvcupy.cache.paged.states.copy_pages", fail)
        mixture.step({"a": mixture.new(1)})
        cache.fork_sequence("a", "b")
    with pytest.raises(kv.DeviceError, match="bad page"):
        cache._steps.access.copy_stream.synchronize()
    mixture.step({"a": mixture.new(2)})
    assert mixture.fork("a", "c", 8) == 8
    cache.begin_forward(["b"], [1])
    with pytest.raises(kv.DeviceError, match="never copied"):
        cache.state_slots()
    cache.clear()
    mixture.tokens.clear()
    mixture.check()


# --- One group ---


def test_a_cache_without_groups_has_one(device, tmp_path):
    """Declared or not, a group of full attention is the same cache: calls, bits, files, plan."""
    shape = {"num_kv_heads": 2, "head_dim": 8, "dtype": "fp32"}
    shared = {"num_q_heads": HEADS, "page_size": PAGE, "device": device, "max_batch_tokens": 64}

    def attend(query, *args, out, **options):
        called.append(len(query))

    called = []
    plain, declared = (
        kv.PagedKVCache(**shared, attention=attend, num_layers=2, num_pages=16, **shape),
        kv.PagedKVCache(**shared, attention=attend, num_tokens=64,
                        groups=[kv.FullAttention(layers=range(2), **shape)]),
    )  # fmt: skip
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((30, n, 8), np.float32) for n in (HEADS, 2, 2)]
    results = []
    for name, cache in (("plain", plain), ("declared", declared)):
        host = kv.KVPool(16, PAGE, 2, 2, 8, dtype="fp32", placement="pinned", device=device)
        cache.attach(kv.TieredCache(cache.pool, host))
        cache.add_sequence("a", hashes=kv.block_hashes(range(20), PAGE))
        cache.enable_sliding_window("a", 9, 2)
        outs = []
        for start, stop in ((0, 20), (20, 30)):
            with cache.forward(["a"], [stop - start]):
                tables = [*cache.page_table_csr(), cache.block_table(), cache.slot_mapping()]
                outs += [device.to_numpy(table).copy() for table in tables]
                for layer in (0, 1):
                    parts = [device.asarray(part[start:stop]) for part in rows]
                    outs.append(device.to_numpy(cache.attention(layer, *parts)))
        outs += map(device.to_numpy, cache.get_kv("a", 0, 11))
        cache.save_sequence("a", tmp_path / name)
        with pytest.raises(ValueError, match=r"^layer: expected 0 to 1, got 2"):
            cache.get_kv("a", 0, 1, layer=2)
        results.append([str(cache.plan()), *(out.tobytes() for out in outs)])
    assert results[0] == results[1] and called == 4 * [20]  # not over an evicted span
    for cache, name in ((plain, "declared"), (declared, "plain")):
        cache.load_sequence("b", tmp_path / name)
        contents = [device.to_numpy(part).tobytes() for part in cache.get_kv("b", 0, 11)]
        assert contents == results[0][-2:]
