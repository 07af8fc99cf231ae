"""The last block of a tile whose keys were cut merges the pieces, in the order of the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefill_calls import Call

from kvcupy.devices.host import HostDevice

CALLS = {
    "some pieces": Call(splits=3, seq_lens=(600, 5), query_lens=(20, 5), padding=3),
    "pieces without keys": Call(splits=20, seq_lens=(70, 0), query_lens=(2, 1), heads=(4, 2)),
    "learned sinks": Call(splits=4, seq_lens=(90, 0), query_lens=(3, 2), learned=True),
    "in two steps": Call(
        splits=70, seq_lens=(150, 1200), query_lens=(1, 2), heads=(24, 2), fmt="bf16", learned=True
    ),
    "one row": Call(splits=9, seq_lens=(200,), query_lens=(1,), heads=(1, 1), widths=(40, 24)),
    "latents": Call(
        kernel="latent", splits=7, seq_lens=(250,), query_lens=(1,), heads=(16, 1),
        widths=(576, 512), sm_scale=0.05,
    ),
    "latents in two steps": Call(
        kernel="latent", splits=10, seq_lens=(330,), query_lens=(1,), heads=(16, 1),
        widths=(512, 512), fmt="bf16", sm_scale=0.05,
    ),
}  # fmt: skip


def merging(name):
    call = CALLS[name]
    return replace(call, merges=True, kernel="decode" if call.kernel == "prefill" else call.kernel)


@pytest.mark.parametrize("name", CALLS)
def test_the_output_is_that_of_all_keys(device, name):
    merging(name).check(device)


def bits_in_other_orders(call, device):
    """Return the bits of output and lse, for each of several orders in which blocks run."""
    bits = []
    for seed in range(4):
        device.thread_order_seed = seed
        bits.append([array.tobytes() for array in call.run(device)])
    device.thread_order_seed = 0
    return bits


@pytest.mark.parametrize("name", ["some pieces", "in two steps", "latents in two steps"])
def test_bits_do_not_depend_on_which_block_is_last(device, name):
    if not isinstance(device, HostDevice):
        pytest.skip("the order of blocks on a GPU cannot be chosen")
    first, *others = bits_in_other_orders(merging(name), device)
    assert all(each == first for each in others)


# --- Kernels that are wrong -----------------------------------------------------------------------


def test_an_order_that_the_last_block_decides_is_noticed(kernel_sources):
    file, own_first = "attention_merge.cuh", "(part + j + number_of_block()) % group.count"
    kernel_sources.replace(file, "nth = min(part + j, group.count - 1)", f"nth = {own_first}")
    call, device = merging("some pieces"), kernel_sources.device()
    call.check(device)
    assert len({tuple(bits) for bits in bits_in_other_orders(call, device)}) > 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count_in_order(counter, count - 1)", "atomicAdd(counter, 1u)"),
        ("count_in_order(counter, count - 1)", "count_in_order(counter, count)"),
        ("i64{state + level}", "i64{state}"),
        ("== static_cast<u32>(count - 1)", "== 0u"),
    ],
    ids=["no reset", "one more", "one counter", "the first block"],
)
def test_a_wrong_count_is_noticed(kernel_sources, old, new):
    kernel_sources.replace("attention_merge.cuh", old, new)
    call, device = merging("in two steps"), kernel_sources.device()
    with pytest.raises(AssertionError):
        call.check(device)
