"""Sequences of a paged cache that are offloaded to host memory, and come back."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
from engine_cases import poll
from paged_tiers_cases import FORMATS, PAGE, Prefixed, hashes_of, same_outputs, tokens_of
from paged_world import HOLD_S
from stream_cases import Gate, Log
from table_cases import background

import kvcupy as kv
from kvcupy import observe
from kvcupy.ops import transfer as transfer_ops

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

PROMPT = tokens_of(1, 14)


@pytest.fixture
def one(device):
    prefixed = Prefixed(device)
    prefixed.prefill("s", PROMPT)
    return prefixed


@pytest.mark.parametrize("spoilt", [False, True], ids=["pages kept", "pages overwritten"])
@pytest.mark.parametrize("name", FORMATS)
def test_bits(device, name, spoilt):
    one = Prefixed(device, **FORMATS[name])
    one.prefill("s", PROMPT)
    plain = Prefixed(device, tiered=False, **FORMATS[name])
    plain.cache.add_sequence("s")
    plain.step("s", PROMPT)
    raw, bits = one.raw("s"), one.bits("s")
    one.cache.offload("s")
    assert one.cache.num_available_pages == 12 and one.host_pool.allocator.num_allocated == 4
    assert one.cache.sequence_length("s") == 14 and one.cache.total_length == 14
    if spoilt:
        one.cache.add_sequence("t")
        one.step("t", tokens_of(2, 40))
        one.cache.remove_sequence("t")
    one.cache.onboard("s")
    assert one.host_pool.allocator.num_allocated == 0
    assert one.raw("s") == raw and one.bits("s") == bits == plain.bits("s")
    same_outputs(one.step("s", [3, 4, 5]), plain.step("s", [3, 4, 5]))
    one.cache.remove_sequence("s")
    assert one.known(PROMPT)[0] == 12, "it is published as any other"
    one.assert_no_leak()


def test_again_and_again(one):
    bits = one.bits("s")
    for _ in range(5):
        one.cache.offload("s")
        one.cache.onboard("s")
        one.cache.onboard("s")  # it is here
    assert one.bits("s") == bits
    one.assert_no_leak()


def test_reused_blocks(one):
    one.cache.remove_sequence("s")
    one.prefill("a", PROMPT)
    bits = one.bits("a")
    one.cache.offload("a")
    one.tiers.evict(3)  # no lease holds them any more
    one.spoil()
    one.cache.onboard("a")
    assert one.bits("a") == bits
    one.assert_no_leak()


def test_an_empty_sequence(device):
    one = Prefixed(device)
    one.cache.add_sequence("s")
    one.cache.offload("s")
    one.cache.onboard("s")
    one.cache.offload("s")
    assert one.cache.sequence_length("s") == 0
    one.assert_no_leak()


# --- While it is away ---


def test_an_offloaded_sequence_is_of_no_use(one, tmp_path):
    pytest.importorskip("safetensors")
    cache, rows = one.cache, one.rows([1])
    one.prefill("here", [1, 2, 3])
    cache.offload("s")
    one.settle()  # its pages are free once they are saved
    before = one.state()
    calls = {
        "seqs": [lambda: cache.begin_forward(["here", "s"], [1, 1])],
        "parent": [lambda: cache.fork_sequence("s", "c"), lambda: cache.fork_sequence("s", "c", 0)],
        "seq": [
            lambda: cache.pop_tokens("s", 1), lambda: cache.pop_tokens("s", 0),
            lambda: cache.get_kv("s", 0, 1), lambda: cache.get_kv("s", 0, 0),
            lambda: cache.set_kv("s", 0, *rows[1:]),
            lambda: cache.save_sequence("s", tmp_path / "s"), lambda: cache.offload("s"),
        ],
    }  # fmt: skip
    for name, all_calls in calls.items():
        for call in all_calls:
            with pytest.raises(ValueError, match=rf"^{name}: 's' is offloaded"):
                call()
            assert one.state() == before
    assert not (tmp_path / "s").exists()
    with pytest.raises(ValueError, match=r"^seqs: "):
        cache.commit_token_tree(["s"], [0])
    with pytest.raises(ValueError, match=r"^seq: "):
        cache.add_sequence("s", hashes=hashes_of(PROMPT))
    one.step("here", [4])
    one.assert_no_leak()


@pytest.mark.parametrize("way", ["remove", "clear"])
def test_host_pages_come_back(one, way):
    one.cache.offload("s")
    assert one.host_pool.allocator.num_allocated == 4
    if way == "remove":
        one.cache.remove_sequence("s")
    else:
        one.cache.clear()
    one.settle()
    assert one.host_pool.allocator.num_free == 16
    one.assert_no_leak()


def test_sequences_of_the_running_step_and_trees(one):
    one.prefill("t", [1, 2, 3])
    one.cache.begin_forward(["s"], [1])
    with pytest.raises(kv.KvcupyError, match="running step"):
        one.cache.offload("s")
    one.cache.onboard("s")  # it is here
    one.cache.offload("t")
    one.cache.onboard("t")
    one.cache.end_forward()
    with one.cache.forward(["s"], [2], token_tree=[[-1, 0]]):
        pass
    with pytest.raises(ValueError, match=r"^seq: .*commit_token_tree"):
        one.cache.offload("s")
    one.assert_no_leak()


# --- Room ---


def test_no_room_in_host_memory(device):
    one = Prefixed(device, host_pages=5)
    for name in "ab":
        one.cache.add_sequence(name)
        one.step(name, PROMPT)
    one.cache.offload("a")
    one.settle()  # its pages are free once they are saved
    before = one.state()
    with pytest.raises(kv.CacheFull, match="host"):
        one.cache.offload("b")
    assert one.state() == before
    one.cache.remove_sequence("a")
    one.cache.offload("b")
    one.assert_no_leak()


@pytest.mark.parametrize("side", ["host", "device"])
def test_pages_that_are_soon_free_are_waited_for(device, side):
    """Those that the transfer of an offloaded sequence still touches."""
    one = Prefixed(device, num_pages=8, host_pages=5 if side == "host" else 16)
    if side == "device":
        one.publish(PROMPT)
        one.tiers.evict(3)
    for name in "ab":
        one.cache.add_sequence(name)
        one.step(name, PROMPT)
    one.settle()
    gate = Gate(one.tiers.engine.save_stream)
    try:
        one.cache.offload("a")
        with background(lambda: next_call(one, side)) as thread:
            poll(lambda: not thread.is_alive(), HOLD_S)
            gate.open()
    finally:
        gate.open()
    one.assert_no_leak()


def next_call(one, side):
    if side == "host":
        one.cache.remove_sequence("a")
        one.cache.offload("b")
    else:
        one.cache.add_sequence("c", hashes=hashes_of(PROMPT))


def test_blocks_make_room_in_host_memory(device):
    one = Prefixed(device, host_pages=5)
    one.publish(PROMPT)
    one.prefill("s", tokens_of(2, 14))
    one.settle()
    assert one.tiers.stats()["host_blocks"] == 3
    bits = one.bits("s")
    one.cache.offload("s")
    one.cache.onboard("s")
    assert one.bits("s") == bits
    one.assert_no_leak()


def test_no_room_on_the_device(one):
    one.cache.offload("s")
    one.cache.add_sequence("t")
    one.step("t", tokens_of(2, 9 * PAGE))
    one.settle()
    before = one.state()
    with pytest.raises(kv.CacheFull):
        one.cache.onboard("s")
    assert one.state() == before
    one.cache.pop_tokens("t", PAGE)
    one.cache.onboard("s")
    assert one.bits("s") == reference_bits(one)
    one.assert_no_leak()


def reference_bits(one):
    plain = Prefixed(one.device, tiered=False)
    plain.cache.add_sequence("s")
    plain.step("s", PROMPT)
    return plain.bits("s")


def test_blocks_make_room_on_the_device(one):
    one.cache.offload("s")
    one.publish(tokens_of(2, 40))
    assert one.tiers.stats()["device_blocks"] == 10
    one.cache.onboard("s")
    assert one.bits("s") == reference_bits(one)
    one.assert_no_leak()


# --- Failures ---


@pytest.mark.parametrize("waits", [False, True])
def test_blocks_of_a_sequence_that_was_loaded_again(one, waits):
    """Its load may be in flight: the tiers have the blocks once it is over."""
    bits = one.bits("s", 12)
    one.cache.offload("s")
    one.spoil()
    if waits:
        one.cache.onboard("s")
        one.settle()
    else:
        one.settle()
        gate = Gate(one.tiers.engine.load_stream)
        one.cache.onboard("s")
        assert not one.cache._sequences.find("s").loads[0].done()
    one.cache.remove_sequence("s")
    if not waits:
        assert one.tiers.stats()["device_blocks"] == 3
        gate.open()
    assert one.known(PROMPT) == (12, bits)
    one.assert_no_leak()


@pytest.mark.parametrize("known", [False, True])
def test_no_blocks_of_a_sequence_whose_load_fails(one, known):
    if one.device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    one.cache.offload("s")
    one.settle()
    gate = Gate(one.tiers.engine.load_stream)
    one.tiers.engine.load_stream.call(boom)
    one.cache.onboard("s")
    if not known:
        one.cache.remove_sequence("s")
    gate.open()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        one.tiers.engine.load_stream.synchronize()
    if known:
        one.cache.remove_sequence("s")
    # If they have waited for the load, they fail too.
    for stream in (one.cache._steps.access.copy_stream, one.tiers.engine.save_stream):
        with suppress(kv.DeviceError):
            stream.synchronize()
    one.settle()
    assert one.tiers.match(hashes_of(PROMPT)).stores == 0
    assert one.cache.num_available_pages == 12
    one.publish(PROMPT)
    assert one.known(PROMPT)[0] == 12
    one.assert_no_leak()


@pytest.mark.parametrize("how", ["refused", "no memory"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_save_that_cannot_be_sent(one, how, shared):
    if shared:
        one.cache.fork_sequence("s", "child")
    one.settle()
    before, bits = one.state(), one.bits("s")
    with failing(how, "save"), pytest.raises(kv.DeviceError):
        one.cache.offload("s")
    one.device.synchronize()
    assert one.state() == before and one.bits("s") == bits
    one.cache.offload("s")
    one.cache.onboard("s")
    assert one.bits("s") == bits
    one.assert_no_leak()


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("how", ["refused", "no memory"])
def test_a_load_that_cannot_be_sent(one, how, layer):
    bits = one.bits("s")
    one.cache.offload("s")
    one.settle()
    before = one.state()
    with failing(how, f"load {layer}"), pytest.raises(kv.DeviceError):
        one.cache.onboard("s")
    one.tiers.engine.load_stream.synchronize()
    assert one.state() == before, "it can be tried again"
    one.cache.onboard("s")
    assert one.bits("s") == bits
    one.assert_no_leak()


@contextmanager
def failing(how, refused):
    """Let a part of a transfer fail when it is put on its stream."""
    genuine = transfer_ops.PreparedTransfer.issue

    def issue(self, pairs, stream, *, name, keep):
        if name == refused:
            raise MemoryError("no pinned memory")
        genuine(self, pairs, stream, name=name, keep=keep)

    if how == "refused":
        with observe.attached(Log(refuse=refused)):
            yield
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_ops.PreparedTransfer, "issue", issue)
            yield


def boom():
    raise OSError("no such luck")


def test_a_save_that_fails_on_the_stream(one):
    if one.device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    one.tiers.engine.save_stream.call(boom)
    one.cache.offload("s")
    for _ in range(2):
        with pytest.raises(kv.DeviceError, match="no such luck"):
            one.cache.onboard("s")
    assert one.cache.num_available_pages == 12
    one.assert_no_leak()


@pytest.mark.parametrize("way", ["onboard", "reuse"])
def test_a_load_that_fails_on_the_stream(one, way):
    if one.device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    if way == "onboard":
        one.cache.offload("s")
    else:
        one.cache.remove_sequence("s")
        one.tiers.evict(3)
    one.settle()
    one.tiers.engine.load_stream.call(boom)
    if way == "onboard":
        one.cache.onboard("s")
    else:
        one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    rows = one.rows([1])
    for _ in range(2):
        with pytest.raises(kv.DeviceError, match="no such luck"), one.cache.forward(["s"], [1]):
            one.attend(0, rows)
        with pytest.raises(kv.DeviceError, match="no such luck"):
            one.cache.get_kv("s", 0, 4)
        with pytest.raises(kv.DeviceError, match="no such luck"):
            one.cache.offload("s")
    one.cache.remove_sequence("s")
    assert one.cache.num_available_pages == 12
    one.prefill("t", tokens_of(2, 14))
    one.assert_no_leak()
