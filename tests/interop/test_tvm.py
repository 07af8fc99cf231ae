"""TVM's calls of a paged KV cache, held against what its documentation says.

The reference keeps K and V of each sequence in one piece, and attends in float64.
"""

from __future__ import annotations

import math

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

from kvcupy.interop import tvm  # noqa: E402

LAYERS, Q_HEADS, HEADS, WIDTH, PAGE = 2, 4, 2, 8, 16
ROPE = {"rope_scale": 0.5, "rope_theta": 100.0}
SCALE = 0.3


@pytest.fixture
def place(device):
    return "cpu" if device.kind == "host" else device.torch_name


def create(place, *, capacity=256, sliding=0, rope_mode=1, num_seqs=8, **options):
    return tvm.paged_attention_kv_cache_create(
        [num_seqs, capacity, 64, PAGE, sliding], [0, LAYERS], Q_HEADS, HEADS, WIDTH, WIDTH,
        [0] * LAYERS, False, rope_mode, ROPE["rope_scale"], ROPE["rope_theta"], None,
        torch.zeros((), device=place), "kernels of TVM", **options,
    )  # fmt: skip


def call(name, cache, *arguments):
    return tvm.get_global_func(f"vm.builtin.{name}")(cache, *arguments)


def free(cache):
    return call("attention_kv_cache_get_num_available_pages", cache)


def rotated(x, positions):
    """Rotate halves of (tokens, heads, width); positions are multiplied by the scale."""
    frequencies = ROPE["rope_theta"] ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = (positions.double()[:, None] * ROPE["rope_scale"] * frequencies)[:, None]
    a, b = x.double().cpu().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def append(world, seqs, count, *tree):
    """Run a step that appends as many ones to each sequence."""
    call("kv_state_begin_forward", world.cache, seqs, [count] * len(seqs), *tree)
    qkv = torch.ones(count * len(seqs), Q_HEADS + 2 * HEADS, WIDTH, device=world.place)
    for layer in range(LAYERS):
        name = "attention_kv_cache_attention_with_fused_qkv"
        call(name, world.cache, layer, SCALE, qkv, qkv.new_empty(len(qkv), Q_HEADS, WIDTH))
    call("kv_state_end_forward", world.cache)


class World:
    """A cache, and K and V of its sequences as they are cached: (layers, tokens, heads, width)."""

    def __init__(self, place, **options):
        self.cache, self.place = create(place, **options), place
        self.generator = torch.Generator().manual_seed(0)
        self.kv = {}

    def add(self, seq):
        call("kv_state_add_sequence", self.cache, seq)
        self.kv[seq] = torch.zeros(2, LAYERS, 0, HEADS, WIDTH, dtype=torch.float64)

    def step(self, seqs, counts, parents=None):
        """Run a step, and compare positions and attention with the reference."""
        trees = () if parents is None else ([n for tree in parents for n in tree],)
        call("kv_state_begin_forward", self.cache, seqs, counts, *trees)
        depths = [depths_of(tree) for tree in parents or [chain(n) for n in counts]]
        starts = [self.kv[seq].shape[2] for seq in seqs]
        positions = [
            torch.tensor([start + depth for depth in own])
            for start, own in zip(starts, depths, strict=True)
        ]
        tokens = torch.cat(positions)
        assert call("attention_kv_cache_get_query_positions", self.cache).tolist() == (
            tokens.tolist()
        )
        new = []
        for layer in range(LAYERS):
            qkv = torch.randn(len(tokens), Q_HEADS + 2 * HEADS, WIDTH, generator=self.generator)
            out = torch.full((len(tokens), Q_HEADS, WIDTH), math.nan, device=self.place)
            name = "attention_kv_cache_attention_with_fused_qkv"
            call(name, self.cache, layer, SCALE, qkv.to(self.place), out)
            q, k = (
                rotated(x, tokens) for x in qkv[:, : Q_HEADS + HEADS].split([Q_HEADS, HEADS], 1)
            )
            new.append(torch.stack((k, qkv[:, Q_HEADS + HEADS :].double())))
            expected, at = [], 0
            for seq, count, tree in zip(
                seqs, counts, parents or [chain(n) for n in counts], strict=True
            ):
                own = new[-1][:, at : at + count]
                keys, values = torch.cat((self.kv[seq][:, layer], own), dim=1)
                expected.append(attended(q[at : at + count], keys, values, tree))
                at += count
            assert torch.allclose(out.double().cpu(), torch.cat(expected), rtol=1e-5, atol=1e-5)
        call("kv_state_end_forward", self.cache)
        at = 0
        for seq, count in zip(seqs, counts, strict=True):
            own = torch.stack([layer[:, at : at + count] for layer in new], dim=1)
            self.kv[seq] = torch.cat((self.kv[seq], own), dim=2)
            at += count

    def check(self):
        """Compare what is cached, and how much."""
        for seq, expected in self.kv.items():
            length = expected.shape[2]
            k, v = torch.full((2, LAYERS, length, HEADS, WIDTH), math.nan, device=self.place)
            call("attention_kv_cache_debug_get_kv", self.cache, seq, 0, length, k, v)
            assert torch.allclose(torch.stack((k, v)).double().cpu(), expected, atol=1e-5)
        total = call("attention_kv_cache_get_total_sequence_length", self.cache)
        assert total == sum(x.shape[2] for x in self.kv.values())


def chain(count):
    return list(range(-1, count - 1))


def path(tree, node):
    return [] if node < 0 else [*path(tree, tree[node]), node]


def depths_of(tree):
    return [len(path(tree, node)) - 1 for node in range(len(tree))]


def attended(q, keys, values, tree):
    """Attend with nodes of a tree over what is older and their own path."""
    older = len(keys) - len(tree)
    seen = torch.zeros(len(tree), len(keys), dtype=torch.bool)
    seen[:, :older] = True
    for node in range(len(tree)):
        seen[node, [older + i for i in path(tree, node)]] = True
    k, v = (x.repeat_interleave(Q_HEADS // HEADS, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


# --- Sequences and steps --------------------------------------------------------------------------


@pytest.fixture
def world(place, quick_host):
    return World(place)


def test_prefill_and_decode(world):
    for seq in range(3):
        world.add(seq)
    world.step([0, 2], [6, 19])
    world.step([2, 1, 0], [1, 17, 1])
    world.step([0, 1], [1, 1])
    world.check()


def test_forks_share_pages(world):
    """Of 40 tokens, page 16: a fork at 35 takes a page, at 32 and at 0 none."""
    world.add(0)
    world.step([0], [40])
    pages = free(world.cache)
    for child, at, taken in ((1, 35, 1), (2, 32, 1), (3, 0, 1)):
        call("kv_state_fork_sequence", world.cache, 0, child, at)
        world.kv[child] = world.kv[0][:, :, :at]
        assert free(world.cache) == pages - taken
    call("kv_state_fork_sequence", world.cache, 0, 4)  # all, by default
    call("kv_state_fork_sequence", world.cache, 0, 5, -1)
    world.kv[4] = world.kv[5] = world.kv[0]
    world.check()
    world.step([1, 2, 4, 0], [2, 1, 1, 1])
    world.check()


def test_popped_tokens_are_gone(world):
    world.add(0)
    world.step([0], [40])
    call("kv_state_fork_sequence", world.cache, 0, 1, 35)
    world.kv[1] = world.kv[0][:, :, :35]
    for seq, n in ((1, 17), (0, 8), (1, 0), (0, 32)):  # into what they share, and all of it
        call("kv_state_popn", world.cache, seq, n)
        world.kv[seq] = world.kv[seq][:, :, : world.kv[seq].shape[2] - n]
        world.check()
    world.step([0, 1], [3, 1])
    world.check()


def test_removal_in_any_order_leaves_no_page(world):
    total = free(world.cache)
    assert total == 256 // PAGE + 1  # TVM's extra one
    world.add(0)
    world.step([0], [40])
    for child in (1, 2):
        call("kv_state_fork_sequence", world.cache, child - 1, child, 20)
    for seq in (0, 2, 1):
        assert not call("attention_kv_cache_empty", world.cache)
        call("kv_state_remove_sequence", world.cache, seq)
    assert call("attention_kv_cache_empty", world.cache) and free(world.cache) == total
    world.kv.clear()
    world.add(7)
    world.step([7], [5])
    call("kv_state_clear", world.cache)
    assert call("attention_kv_cache_empty", world.cache) and 7 not in world.cache


def test_trees_are_committed_by_their_leaves(world):
    """In an order other than that of the step, the last a chain; -1 keeps nothing."""
    for seq in range(3):
        world.add(seq)
    world.step([0, 1, 2], [5, 17, 3])
    trees = {0: [-1, 0, 0, 1, 1, 2], 1: [-1, -1, 0], 2: [-1, 0, 1, 2]}
    world.step([0, 1, 2], [6, 3, 4], list(trees.values()))
    leaves = {2: 2, 0: 4, 1: -1}
    call(
        "attention_kv_cache_commit_accepted_token_tree_nodes", world.cache, list(leaves),
        list(leaves.values()),
    )  # fmt: skip
    for seq, leaf in leaves.items():
        committed = world.kv[seq].shape[2] - len(trees[seq])
        kept = [*range(committed), *(committed + i for i in path(trees[seq], leaf))]
        world.kv[seq] = world.kv[seq][:, :, kept]
    world.check()
    world.step([1, 0], [1, 2])
    world.check()


def test_a_sliding_window_keeps_the_first_and_the_last(place, quick_host):
    world = World(place, sliding=1, rope_mode=0, num_seqs=2)
    assert free(world.cache) == 256 // PAGE + 1 + 2 * 2
    call("kv_state_add_sequence", world.cache, 0)
    call("attention_kv_cache_enable_sliding_window_for_seq", world.cache, 0, 8, 3)
    values = torch.arange(20.0).view(-1, 1, 1).expand(-1, Q_HEADS + 2 * HEADS, WIDTH).contiguous()
    call("kv_state_begin_forward", world.cache, [0], [20])
    for layer in range(LAYERS):
        out = torch.empty(20, Q_HEADS, WIDTH, device=place)
        name = "attention_kv_cache_attention_with_fused_qkv"
        call(name, world.cache, layer, 0.0, values.to(place), out)
    call("kv_state_end_forward", world.cache)
    k, v = torch.empty(2, LAYERS, 8, HEADS, WIDTH, device=place)
    call("attention_kv_cache_debug_get_kv", world.cache, 0, 0, 8, k, v)
    assert v[1, :, 0, 0].tolist() == [0, 1, 2, 15, 16, 17, 18, 19]
    call("kv_state_begin_forward", world.cache, [0], [1])
    positions = call("attention_kv_cache_get_query_positions", world.cache)
    assert positions.tolist() == [8]  # those in the cache


def test_a_fork_has_no_sliding_window_until_one_is_enabled(place, quick_host):
    """As in TVM: nothing leaves the child, which has tokens of the parent's sinks alone."""
    world = World(place, sliding=1, rope_mode=0, num_seqs=3)
    enable = "attention_kv_cache_enable_sliding_window_for_seq"
    call("kv_state_add_sequence", world.cache, 0)
    call(enable, world.cache, 0, 8, 4)
    append(world, [0], 4)
    call("kv_state_fork_sequence", world.cache, 0, 1, -1)
    append(world, [1], 10)
    assert world.cache.sequence_length(1) == 14
    append(world, [0], 1)
    for position in (-1, 5):
        with pytest.raises(ValueError, match=r"^at: expected at most the 4 sinks"):
            call("kv_state_fork_sequence", world.cache, 0, 2, position)
    assert 2 not in world.cache
    call("kv_state_fork_sequence", world.cache, 1, 2, 10)  # its parent has no window
    call(enable, world.cache, 2, 6, 5)
    append(world, [2], 3)
    assert [world.cache.sequence_length(seq) for seq in range(3)] == [5, 14, 6]


def test_trees_of_several_steps_are_committed_as_one(world):
    """Leaves are nodes of the whole tree, of which the path alone remains."""
    for seq in range(2):
        world.add(seq)
    world.step([0, 1], [2, 2])
    committed = {seq: rows.shape[2] for seq, rows in world.kv.items()}
    for tree in ([-1], [0, 0], [1, 1, 2, 2]):
        append(world, [0, 1], len(tree), tree * 2)
    assert world.cache.sequence_length(0) == 9
    name = "attention_kv_cache_commit_accepted_token_tree_nodes"
    call(name, world.cache, [0, 1], [4, 2])  # 0, 1, 4; and 0, 2, of which the last step has none
    assert [world.cache.sequence_length(seq) - committed[seq] for seq in range(2)] == [3, 2]


@pytest.mark.parametrize(
    ("options", "mode"),
    [({"rope_mode": 0}, "none"), ({"rope_mode": 2}, "inline"), ({"sliding": 1}, "inline"),
     ({"sliding": 1, "rope_mode": 0}, "none")],
)  # fmt: skip
def test_rope_modes(place, options, mode):
    """Keys are cached as they come where attention rotates them, and where nothing does."""
    cache = create(place, **options)
    qkv = torch.randn(3, Q_HEADS + 2 * HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    out = torch.empty(3, Q_HEADS, WIDTH, device=place)
    call("kv_state_add_sequence", cache, 0)
    call("kv_state_begin_forward", cache, [0], [3])
    for layer in range(LAYERS):
        name = "attention_kv_cache_attention_with_fused_qkv"
        call(name, cache, layer, SCALE, qkv.to(place), out)
    call("kv_state_end_forward", cache)
    k, v = torch.empty(2, LAYERS, 3, HEADS, WIDTH, device=place)
    call("attention_kv_cache_debug_get_kv", cache, 0, 0, 3, k, v)
    q, keys, values = qkv.split([Q_HEADS, HEADS, HEADS], 1)
    assert torch.equal(k[0].cpu(), keys) and torch.equal(v[1].cpu(), values)
    if mode == "inline":
        q, keys = (rotated(x, torch.arange(3)) for x in (q, keys))
    expected = attended(q.double(), keys.double(), values.double(), chain(3))
    assert torch.allclose(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_scaling_that_tvm_compiles_in(place):
    """Frequencies of llama3 by keyword, and fewer elements that are rotated."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    cache = tvm.paged_attention_kv_cache_create(
        [1, 32, 16, PAGE, 0], [0, 1], 1, 1, WIDTH, WIDTH, [0], False, 1, 1.0, 5e5, None,
        torch.zeros((), device=place), rope_scaling=scaling, rotary_dim=4, max_positions=64,
    )  # fmt: skip
    table = kv.rope_table(64, 4, base=5e5, scaling=scaling, device="host")
    qkv = torch.randn(9, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    out = torch.empty(9, 1, WIDTH, device=place)
    call("kv_state_add_sequence", cache, 0)
    call("kv_state_begin_forward", cache, [0], [9])
    call("attention_kv_cache_attention_with_fused_qkv", cache, 0, SCALE, qkv.to(place), out)
    call("kv_state_end_forward", cache)
    k, v = torch.empty(2, 1, 9, 1, WIDTH, device=place)
    call("attention_kv_cache_debug_get_kv", cache, 0, 0, 9, k, v)
    key = qkv[:, 1]
    cos, sin = (torch.from_numpy(x) for x in (table[:9, :2].copy(), table[:9, 2:].copy()))
    a, b = key[:, :2], key[:, 2:4]
    expected = torch.cat((a * cos - b * sin, a * sin + b * cos, key[:, 4:]), dim=1)
    assert torch.allclose(k[0, :, 0].cpu(), expected, atol=1e-5)


def test_states_merge_in_base_2(place):
    o = torch.randn(2, 3, 2, WIDTH, generator=torch.Generator().manual_seed(1)).to(place)
    lse = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(2)).to(place)
    weights = torch.exp2(lse.double())
    expected = (o * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    name = "attention_kv_cache_merge_attn_output_inplace"
    into, into_lse = call(name, None, o[0], lse[0], o[1], lse[1])
    assert into.data_ptr() == o[0].data_ptr() and into_lse.data_ptr() == lse[0].data_ptr()
    assert torch.allclose(o[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse[0].double(), weights.sum(0).log2(), rtol=1e-5, atol=1e-5)


# --- Errors ---------------------------------------------------------------------------------------


def test_an_error_changes_nothing(world):
    world.add(0)
    world.add(1)
    world.step([0, 1], [40, 20])
    pages = free(world.cache)
    for error, arguments in (
        (kv.UnknownSequence, ([0, 9], [1, 1])),
        (ValueError, ([0, 0], [1, 1])),
        (ValueError, ([0], [0])),
        (ValueError, ([0, 1], [2, 1], [-1, 0])),  # three parents
        (ValueError, ([0], [2], [-1, 1])),  # its own parent
        (ValueError, ([0], [100])),  # more than a step takes
    ):
        with pytest.raises(error):
            call("kv_state_begin_forward", world.cache, *arguments)
        assert free(world.cache) == pages
        world.check()
    world.step([0, 1], [1, 1])


def test_a_full_cache_leaves_lengths(place):
    """Of three pages two sequences want four: neither gets any."""
    cache = create(place, capacity=2 * PAGE)
    for seq in range(2):
        call("kv_state_add_sequence", cache, seq)
    with pytest.raises(kv.CacheFull):
        call("kv_state_begin_forward", cache, [0, 1], [30, 30])
    assert free(cache) == 3 and call("attention_kv_cache_get_total_sequence_length", cache) == 0
    call("kv_state_begin_forward", cache, [0, 1], [30, 1])


def test_calls_out_of_order(world):
    qkv, out = torch.zeros(1, 8, WIDTH), torch.zeros(1, Q_HEADS, WIDTH)
    fused = "attention_kv_cache_attention_with_fused_qkv"
    for name, arguments in (("kv_state_end_forward", ()), (fused, (0, 1.0, qkv, out))):
        with pytest.raises(kv.KvcupyError, match="no step"):
            call(name, world.cache, *arguments)
    world.add(0)
    call("kv_state_begin_forward", world.cache, [0], [1])
    with pytest.raises(kv.KvcupyError):
        call("kv_state_begin_forward", world.cache, [0], [1])
    with pytest.raises(ValueError, match=r"exists|new"):
        call("kv_state_add_sequence", world.cache, 0)
    with pytest.raises(kv.UnknownSequence):
        call("kv_state_remove_sequence", world.cache, 5)
    with pytest.raises(ValueError, match=r"^fork_pos: "):
        call("kv_state_fork_sequence", world.cache, 0, 1, -2)


CREATE = {
    "cache_config": [2, 64, 32, PAGE, 0], "layer_indptr": [0, 1], "num_qo_heads": 2,
    "num_kv_heads": 1, "qk_head_dim": 8, "v_head_dim": 8, "attn_kinds": [0],
    "enable_kv_transfer": False, "rope_mode": 1, "rope_scale": 1.0, "rope_theta": 1e4,
    "rope_ext_factors": None, "init": torch.zeros(()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "change"),
    [
        ("cache_config", ValueError, {"cache_config": [2, 64, 32, PAGE]}),
        ("layer_indptr", NotImplementedError, {"layer_indptr": [0, 1, 2]}),
        ("attn_kinds", ValueError, {"attn_kinds": [0, 0]}),
        ("attn_kinds", NotImplementedError, {"attn_kinds": [1]}),
        ("attn_kinds", NotImplementedError, {"attn_kinds": [3]}),
        ("enable_kv_transfer", NotImplementedError, {"enable_kv_transfer": True}),
        ("rope_ext_factors", NotImplementedError, {"rope_ext_factors": torch.ones(4)}),
        ("rope_mode", ValueError, {"rope_mode": 3}),
        ("rope_scale", ValueError, {"rope_scale": 2.0, "rope_scaling": {"rope_type": "default"}}),
        ("init", TypeError, {"init": "float16"}),
    ],
)
def test_create_names_the_argument(name, error, change):
    with pytest.raises(error, match=f"^{name}: "):
        tvm.paged_attention_kv_cache_create(**{**CREATE, **change})


def test_what_is_not_offered_says_why(place):
    cache = create(place)
    for name in ("self_attention", "cross_attention", "append_mla_kv"):
        with pytest.raises(NotImplementedError, match="attention_mla"):
            call(f"attention_kv_cache_{name}", cache, 0)
    for name in ("disagg_prepare_recv", "disagg_mark_send"):
        with pytest.raises(NotImplementedError, match="NVSHMEM"):
            call(f"attention_kv_cache_{name}", cache, 0)
    with pytest.raises(NotImplementedError, match=r"shared_kv: kvcupy\.paged_attention"):
        call("attention_kv_cache_attention_with_shared_kv", cache, 0)
    with pytest.raises(NotImplementedError, match=r"^name: .vm\.builtin\.alloc_storage"):
        tvm.get_global_func("vm.builtin.alloc_storage")
    assert tvm.get_global_func("vm.builtin.alloc_storage", allow_missing=True) is None
    k = torch.empty(LAYERS, 1, HEADS, WIDTH, device=place)
    with pytest.raises(ValueError, match=r"^v_data: "):
        call("attention_kv_cache_debug_get_kv", cache, 0, 0, 1, k, k[:1])
    o, lse = torch.zeros(1, 1, 8, device=place), torch.zeros(1, 1, device=place)
    with pytest.raises(TypeError, match=r"^lse_cross_attn: "):
        tvm.attention_kv_cache_merge_attn_output_inplace(cache, o, lse, o.clone(), lse.double())
