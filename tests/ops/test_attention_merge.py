"""The last block of a tile whose keys were cut merges the pieces, in the order of the keys."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import from_values

import kvcupy as kv
from kvcupy.devices.host import HostDevice
from kvcupy.ops import attention_choice, call

# Lengths, new tokens, and arguments; pieces have about 16 keys.
CALLS = {
    "some pieces": ([300, 5], [5, 2], {"heads": (4, 2), "padding": 3}),
    "pieces without keys": ([70, 0], [2, 1], {"heads": (4, 2)}),
    "in two steps": ([150, 1200], None, {"heads": (24, 2), "fmt": "bf16"}),
    "one row": ([200], None, {"heads": (1, 1), "widths": (40, 24)}),
    "latents": ([250], None, {"heads": (16, 1), "widths": (576, 512)}),
    "latents in two steps": (
        [1200], None, {"heads": (16, 1), "widths": (512, 512), "fmt": "bf16"},
    ),
}  # fmt: skip


@pytest.fixture
def many_pieces(device, monkeypatch):
    """Cut keys into pieces of few keys."""
    monkeypatch.setattr(device, "sm_count", 132)
    monkeypatch.setattr(call, "_plans", {})
    for name in ("_MIN_KEYS", "_MIN_BYTES", "_MIN_KEYS_OF_LONG", "_MIN_BYTES_OF_LONG"):
        monkeypatch.setattr(attention_choice, name, 16)
    monkeypatch.setattr(attention_choice, "_MIN_BYTES_PER_STATE_BYTE", 0)


def arguments_of(device, name):
    """Return a case, its arguments and outputs."""
    lens, new, more = CALLS[name]
    case = AttentionCase(device, 4)
    args = case.arguments(
        lens, new, **{"fmt": "fp16", "widths": (64, 64), "page_size": 16, "loud": 1.0, **more}
    )
    args["sinks"] = case.sinks(more["heads"][0])
    return case, args


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("name", CALLS)
def test_the_output_is_that_of_all_keys(device, name):
    case, args = arguments_of(device, name)
    case.attend(args)


def bits_in_other_orders(device, name):
    """Return the bits of output and lse, for each of several orders in which blocks run."""
    bits = []
    for seed in range(4):
        device.thread_order_seed = seed
        case, args = arguments_of(device, name)
        out, lse = case.results(args, fmt="fp32")
        case.issue(args, out, lse)
        bits.append((out.live().tobytes(), lse.live().tobytes()))
    device.thread_order_seed = 0
    return bits


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("name", ["some pieces", "in two steps", "latents in two steps"])
def test_bits_do_not_depend_on_which_block_is_last(device, name):
    if not isinstance(device, HostDevice):
        pytest.skip("the order of blocks on a GPU cannot be chosen")
    first, *others = bits_in_other_orders(device, name)
    assert all(each == first for each in others)


def two_layers(device):
    """Return the bits of a decode step whose two layers have the same arrays."""
    cache = kv.PagedKVCache(
        num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=64, num_pages=20, dtype="bf16",
        device=device,
    )  # fmt: skip
    cache.add_sequence("a")
    rng = np.random.default_rng(5)
    for count in (150, 1):
        rows = [
            device.asarray(from_values(rng.standard_normal((count, n, 64)), "bf16"))
            for n in (2, 1, 1)
        ]
        with cache.forward(["a"], [count]):
            outs = [cache.attention(layer, *rows) for layer in range(2)]
            device.synchronize()
    return [device.to_numpy(out).tobytes() for out in outs]


@pytest.mark.usefixtures("many_pieces")
def test_counters_are_ready_for_the_next_layer(device):
    first, second = two_layers(device)
    assert first == second


# Kernels that are wrong ---------------------------------------------------------------------------


@pytest.mark.usefixtures("many_pieces")
def test_an_order_that_the_last_block_decides_is_noticed(kernel_sources):
    file, last_first = "attention_merge.cuh", "(part + j + number_of_block()) % batch.count"
    kernel_sources.replace(file, "nth = min(part + j, batch.count - 1)", f"nth = {last_first}")
    device = kernel_sources.device()
    device.sm_count = 132
    assert len(set(bits_in_other_orders(device, "some pieces"))) > 1


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i64{state + level}", "i64{state}"),
        ("== static_cast<u32>(count - 1)", "== 0u"),
    ],
    ids=["one counter", "the first block"],
)
def test_a_wrong_count_is_noticed(kernel_sources, old, new):
    kernel_sources.replace("attention_merge.cuh", old, new)
    device = kernel_sources.device()
    device.sm_count = 132
    case, args = arguments_of(device, "in two steps")
    with pytest.raises(AssertionError):
        case.attend(args)


@pytest.mark.usefixtures("many_pieces")
def test_a_counter_that_is_not_reset_is_noticed(kernel_sources):
    kernel_sources.replace("attention_merge.cuh", "count_in_order(counter, count - 1)",
                           "count_in_order(counter, count)")  # fmt: skip
    device = kernel_sources.device()
    device.sm_count = 132
    first, second = two_layers(device)
    assert first != second
