"""kv.TieredCache with a disk tier: blocks go there, return, and outlive the process."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

import numpy as np
import pytest
from engine_cases import NUM_LAYERS, pool_of
from stream_cases import Gate, delay
from tiered_cases import Blocks, in_time, snapshot

import kvcupy as kv
from kvcupy.cache.tiered import disk_blocks, disk_format
from kvcupy.cache.tiered.cache import TieredCache
from kvcupy.cache.tiered.disk import DiskTier

A, B, C, D, E, F, G, H = range(20, 28)
ROOM = 2**17  # of the file: 31 slots
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


def file_of(slots):
    """Bytes of a file with so many slots: a header, a table, and 4096 for each small page."""
    return 4096 * (2 + slots)


def write_down(blocks, hashes, at_once=2):
    """Insert blocks and let them leave the device, a few at a time."""
    for i in range(0, len(hashes), at_once):
        blocks.insert(hashes[i : i + at_once])
        blocks.evict_all()


def damage(path, blocks, hash):
    """Flip a byte of a block in the file."""
    data = bytearray(path.read_bytes())
    at = data.find(blocks.bits(hash)[:16].tobytes())
    assert at > 0, "the block is not in the file"
    data[at] ^= 1
    path.write_bytes(data)


# Down and up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", ["through", "back"])
def test_a_block_comes_back_from_disk(device, path, write, layout):
    pools = pool_of(device, 2), pool_of(device, 2, layout=layout, placement="pinned")
    blocks = Blocks(device, pools=pools, disk=path, disk_bytes=ROOM, write=write)
    write_down(blocks, [A, B, C, D])
    assert blocks.blocks() == (set(), {C, D}, {A, B})
    assert blocks.cache.match([A, B, C, D]) == (0, 0, 4, 4)
    blocks.use([A, B], known=2)
    assert blocks.blocks() == ({A, B}, {A, B}, {A, B, C, D})
    blocks.use([C, D], known=2)
    found = blocks.cache.stats()
    page = blocks.host_pool.page_bytes
    assert found["disk_hits"] == 4 and found["lost"] == 0 and found["disk_blocks"] == 4
    assert found["disk_write_bytes"] == 4 * page and found["disk_read_bytes"] == 4 * page
    assert found["disk_write_s"] > 0 and found["disk_read_s"] > 0
    blocks.assert_no_leak()


def test_hashes_of_128_bits_go_through_all_tiers_and_outlive_the_process(device, path):
    """Also beside 64-bit hashes of the same low bits, and above signed 128-bit numbers."""
    hashes = [2**128 - 1, 2**64 - 1, 2**127, 7, 2**64 + 7, *kv.block_hashes(range(2), 1, bits=128)]
    pools = [pool_of(device, 4), pool_of(device, 4, placement="pinned")]
    blocks = Blocks(device, pools=pools, disk=path, disk_bytes=ROOM)
    write_down(blocks, hashes)
    blocks.use(hashes[:4], known=4)
    blocks.cache.close()
    blocks = Blocks(device, pools=pools, disk=path, disk_bytes=ROOM)
    for some in (hashes[:4], hashes[4:]):
        assert blocks.cache.match(some) == (0, 0, len(some), len(some))
        blocks.use(some, known=len(some))
    blocks.cache.close()


def test_one_load_for_blocks_of_all_tiers(device, path, monkeypatch):
    blocks = Blocks(device, 4, 4, disk=path, disk_bytes=ROOM)
    write_down(blocks, [A, B, C, D, E, F])
    blocks.insert([C])
    assert blocks.cache.match([C, E, A, B, H]) == (1, 2, 4, 4)
    calls, genuine = [], blocks.engine.load
    monkeypatch.setattr(
        blocks.engine, "load", lambda *a, **o: calls.append(len(a[0])) or genuine(*a, **o)
    )
    blocks.use([C, E, A, B, H], known=4)
    assert calls == [3]
    found = blocks.cache.stats()
    assert [found[f"{t}_hits"] for t in ("device", "host", "disk")] == [1, 1, 2]
    assert found["misses"] == 1


def test_scales_and_mla_go_to_disk(device, path, tmp_path):
    quantised = {"dtype": "fp8_e4m3", "scales": True}
    pools = pool_of(device, 2, **quantised), pool_of(device, 2, placement="pinned", **quantised)
    cache = TieredCache(*pools, disk=path, disk_bytes=ROOM)
    for layer in range(NUM_LAYERS):
        scales = np.full(pools[0].k_scale(layer).shape, layer + 0.5, np.float32)
        for view in (pools[0].k_scale, pools[0].v_scale):
            device.copy(view(layer), device.asarray(scales))
    cache.insert([A, B], pools[0].allocator.alloc(2))
    cache.close()
    pools = pool_of(device, 2, **quantised), pool_of(device, 2, placement="pinned", **quantised)
    with TieredCache(*pools, disk=path, disk_bytes=ROOM).acquire([A, B]) as lease:
        lease.wait()
        device.synchronize()
        for layer in range(NUM_LAYERS):
            for view in (pools[0].k_scale, pools[0].v_scale):
                assert (device.to_numpy(view(layer)) == layer + 0.5).all()

    def mla(placement):
        return kv.MLAPool(2, 2, 3, 8, dtype="fp16", placement=placement, device=device)

    pools, other = (mla("device"), mla("pinned")), tmp_path / "mla"
    device.copy(pools[0].k(1)[0], device.asarray(np.full((2, 8), 3, np.float16)))
    cache = TieredCache(pools[0], pools[1], disk=other, disk_bytes=ROOM)
    cache.insert([A], pools[0].allocator.alloc(1))
    cache.close()
    pools = mla("device"), mla("pinned")
    with TieredCache(*pools, disk=other, disk_bytes=ROOM).acquire([A]) as lease:
        lease.wait()
        device.synchronize()
        assert (device.to_numpy(pools[0].k(1))[lease.pages[0]] == 3).all()


def test_the_disk_has_an_order_too(device, path):
    blocks = Blocks(device, 1, 1, disk=path, disk_bytes=file_of(2))
    write_down(blocks, [A, B, C], 1)
    assert blocks.blocks() == (set(), {C}, {A, B})
    blocks.use([A], known=1)
    assert blocks.blocks() == ({A}, {A}, {B, A, C} - {B}), "B was used longest ago"
    assert blocks.cache.stats()["lost"] == 1
    assert blocks.cache.stats()["disk_evicted"] == 1


def test_a_block_on_disk_is_not_written_again(device, path):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    write_down(blocks, [A, B, C, D])
    for _ in range(3):
        blocks.use([A, B], known=2)
        blocks.use([C, D], known=2)
    assert blocks.cache.stats()["disk_write_bytes"] == 4 * blocks.host_pool.page_bytes


def test_a_write_leaves_the_slots_of_blocks_that_are_leaving_the_device(device, path):
    """Although A is first in the disk's order: it would have to be written again."""
    few = {"disk": path, "disk_bytes": file_of(2)}
    blocks = Blocks(device, 2, 1, write="back", **few)
    write_down(blocks, [A, B, C], 1)
    blocks.insert([A])
    blocks.cache.retain([A], priority=-1)
    assert blocks.order("disk") == [A, B]
    blocks.insert([D])
    assert blocks.blocks() == ({A, D}, {C}, {A, B})
    blocks.evict_all()
    assert blocks.blocks() == (set(), {D}, {A, C})
    found = blocks.cache.stats()
    assert found["disk_write_bytes"] == 3 * blocks.host_pool.page_bytes and found["lost"] == 1


def test_a_block_goes_to_disk_when_its_save_is_done(device, path):
    """Not before: the host page has nothing yet."""
    blocks = Blocks(device, 4, 1, disk=path, disk_bytes=ROOM, write="back")
    blocks.insert([A, B])
    delay(blocks.engine.save_stream)
    blocks.cache.evict(1)
    blocks.cache.evict(1)
    assert len(blocks.blocks()[2]) == 1
    blocks.use([A], known=1)
    blocks.use([B], known=1)


def test_a_disk_block_is_not_read_over_a_page_that_is_still_being_loaded(device, path):
    """B's host page is the only one, and B is still on its way up from there."""
    blocks = Blocks(device, 4, 1, disk=path, disk_bytes=ROOM)
    write_down(blocks, [A, B], 1)
    delay(blocks.engine.load_stream)
    second = blocks.cache.acquire([B])
    first = in_time(lambda: blocks.cache.acquire([A]))
    for lease in (second, first):  # all pages are read below
        lease.wait()
    for lease, hash in ((second, B), (first, A)):
        blocks.assert_holds(lease, [hash])


def test_through_does_not_wait_for_space_in_lower_tiers(device, path):
    """An insert copies to the host tier what it can at once."""
    blocks = Blocks(device, 4, 1, disk=path, disk_bytes=ROOM)
    gate = Gate(blocks.engine.save_stream)
    blocks.device.synchronize = lambda: None  # would wait for the gate
    try:
        pages = blocks.device_pool.allocator.alloc(2)
        for page, hash in zip(pages.tolist(), (A, B), strict=True):
            blocks.fill(page, hash)
        for page, hash in zip(pages.tolist(), (A, B), strict=True):
            in_time(lambda hash=hash, page=page: blocks.cache.insert([hash], [page]))
    finally:
        del blocks.device.synchronize
    assert blocks.blocks() == ({A, B}, {A}, set())
    gate.open()
    blocks.evict_all()
    assert blocks.cache.match([A, B])[2] == 2
    blocks.use([A], known=1)
    blocks.use([B], known=1)


# CacheFull ---------------------------------------------------------------------------------------


def test_more_from_disk_than_the_host_has_pages_changes_nothing(device, path):
    blocks = Blocks(device, 4, 2, disk=path, disk_bytes=ROOM)
    write_down(blocks, [A, B, C, D, E, F])
    blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull, match=r"^hashes: expected at most 2 blocks from disk.* got 3"):
        blocks.cache.acquire([A, B, C])
    assert snapshot(blocks) == before
    blocks.use([A, B], known=2)
    blocks.use([C, D], known=2)


# Damage and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_damaged_block_is_unknown_from_then_on(device, path, bad):
    blocks = Blocks(device, 3, 3, disk=path, disk_bytes=ROOM)
    write_down(blocks, [A, B, C, D, E, F], 3)
    blocks.insert([H])
    damage(path, blocks, (A, B, C)[bad])
    assert blocks.cache.match([A, B, C]) == (0, 0, 3, 3)
    with blocks.cache.acquire([A, B, C]) as lease:
        lease.wait()
        blocks.assert_holds(lease, [A, B, C][:bad])
    assert blocks.cache.match([A, B, C])[2] == bad
    found = blocks.cache.stats()
    assert (found["disk_errors"], found["disk_hits"], found["misses"]) == (1, bad, 3 - bad)
    rest = [hash for hash in (A, B, C) if hash != (A, B, C)[bad]]
    for hash in rest:
        blocks.use([hash], known=1)
    blocks.cache.evict(1)
    blocks.insert([(A, B, C)[bad]])
    blocks.use([A, B, C], known=3)
    blocks.assert_no_leak()


def test_a_disk_that_cannot_be_written_loses_what_leaves_the_host(device, path, monkeypatch):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)

    def write_many(self, items):
        return [OSError(errno.EIO, "broken") for _ in items]

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "write_many", write_many)
        write_down(blocks, [A, B, C, D])
        assert blocks.blocks() == (set(), {C, D}, set())
        found = blocks.cache.stats()
        assert (found["lost"], found["disk_errors"], found["disk_write_bytes"]) == (2, 2, 0)
        with pytest.raises(OSError, match="broken"):
            blocks.cache.flush()
        assert blocks.blocks() == (set(), {C, D}, set())
    blocks.cache.flush()
    assert blocks.blocks() == (set(), {C, D}, {C, D})
    write_down(blocks, [A, B])
    blocks.use([C, D], known=2)
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_a_flush_that_fails_closes_all_the_same(device, path, monkeypatch):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    blocks.insert([A])

    def flush(self):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "flush", flush)
        with pytest.raises(OSError, match="broken"):
            blocks.cache.close()
    blocks.cache.close()
    for pool in (blocks.device_pool, blocks.host_pool):
        pool.allocator.check_leaks()
    Blocks(device, 2, 2, disk=path, disk_bytes=ROOM).use([A], known=1)


# Reopening ---------------------------------------------------------------------------------------


def test_the_order_survives(device, path):
    """Oldest first: that is what there is to know."""
    blocks = Blocks(device, 4, 4, disk=path, disk_bytes=file_of(4))
    blocks.insert([A])
    blocks.insert([B])
    blocks.insert([C])
    blocks.cache.close()
    again = Blocks(device, 4, 4, disk=path, disk_bytes=file_of(4))
    assert again.order("disk") == [A, B, C]
    again.insert([D, E])
    again.cache.flush()
    assert again.blocks()[2] == {B, C, D, E}
    again.cache.close()


def test_flush_keeps_the_hottest_where_the_disk_is_small(device, path):
    blocks = Blocks(device, 4, 4, disk=path, disk_bytes=file_of(2))
    blocks.insert([A, B, C, D])
    blocks.use([C])
    blocks.cache.flush()
    assert blocks.blocks()[2] == {A, C}
    assert blocks.order("disk") == [A, C]
    assert blocks.cache.stats()["lost"] == 0


def test_flush_keeps_what_is_to_be_on_disk_and_is(device, path):
    """A is the first there, but the host has it too."""
    options = {"disk": path, "disk_bytes": file_of(2)}
    blocks = Blocks(device, 4, 4, **options)
    blocks.insert([A])
    blocks.insert([B])
    blocks.cache.close()
    again = Blocks(device, 4, 4, **options)
    again.insert([A])
    again.insert([C])
    again.cache.retain([A], priority=-1)
    assert again.order("disk") == [A, B]
    again.cache.flush()
    assert again.blocks()[2] == {A, C}


def tear(path, block):
    """Flip bits of a block in the file, as a power failure in mid-write leaves it."""
    data = path.read_bytes()
    at = data.index(block)
    path.write_bytes(data[:at] + bytes(b ^ 255 for b in block) + data[at + len(block) :])


@pytest.mark.parametrize("leave", ["device", "host"])
def test_a_torn_block_does_not_stand_in_for_a_write(device, path, leave):
    """A is torn in the reopened file, and inserted again: the newer copy goes to disk."""
    options = {"disk": path, "disk_bytes": ROOM}
    blocks = Blocks(device, 2, 1, **options)
    blocks.insert([A])
    block = blocks.first_bytes_on_disk(A)
    blocks.cache.close()
    tear(path, block)
    again = Blocks(device, 2, 1, **options, write="through" if leave == "host" else "back")
    again.insert([A])
    again.evict_all()
    again.insert([B])
    again.evict_all()
    again.insert([C])
    again.evict_all()
    assert again.blocks()[2] == {A, B}
    again.use([A], known=1)
    assert again.cache.stats()["lost"] == 0


def test_a_whole_block_of_a_reopened_file_is_not_written_again(device, path):
    options = {"disk": path, "disk_bytes": ROOM}
    blocks = Blocks(device, 2, 1, **options)
    blocks.insert([A])
    blocks.cache.close()
    again = Blocks(device, 2, 1, **options)
    for hash in (A, B, C):
        again.insert([hash])
        again.evict_all()
    page_bytes = again.host_pool.page_bytes
    assert again.cache.stats()["disk_write_bytes"] == page_bytes  # B
    again.use([A], known=1)


def test_flush_writes_what_is_torn_on_disk(device, path):
    options = {"disk": path, "disk_bytes": ROOM}
    blocks = Blocks(device, 2, 1, **options)
    blocks.insert([A])
    block = blocks.first_bytes_on_disk(A)
    blocks.cache.close()
    tear(path, block)
    again = Blocks(device, 2, 1, **options)
    again.insert([A])
    again.cache.close()
    Blocks(device, 2, 1, **options).use([A], known=1)


def test_back_writes_nothing_that_has_not_left_the_host(device, path):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM, write="back")
    write_down(blocks, [A, B, C, D])
    blocks.cache.close()
    again = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    assert again.cache.match([A, B, C]) == (0, 0, 2, 2)
    again.use([A, B], known=2)


def test_clear_empties_the_file(device, path):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    write_down(blocks, [A, B, C, D])
    blocks.cache.clear()
    assert blocks.cache.match([A]) == (0, 0, 0, 0)
    blocks.insert([E])
    blocks.cache.close()
    again = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    assert again.blocks()[2] == {E}


def test_clear_empties_slots_with_older_copies(device, path):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    disk = blocks.tiers.disk
    for slot in range(2):
        disk._file.write(slot, A, [memoryview(bytes(disk.page_bytes))])
    blocks.cache.close()
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=ROOM)
    assert len(blocks.tiers.disk._file.entries()) == 2
    blocks.cache.clear()
    blocks.cache.close()
    assert Blocks(device, 2, 2, disk=path, disk_bytes=ROOM).blocks()[2] == set()


@pytest.mark.parametrize(
    "changes", [{"layout": "layer_first"}, {"page_size": 4}, {"dtype": "bf16"}, {"num_layers": 2}]
)
def test_a_file_of_other_pages_raises(device, path, changes):
    Blocks(device, disk=path, disk_bytes=ROOM).cache.close()
    layout = changes.pop("layout", "page_first")
    host_pool = pool_of(device, 2, layout=layout, placement="pinned", **changes)
    pools = pool_of(device, 2, **changes), host_pool
    with pytest.raises(ValueError, match=r"^disk: "):
        TieredCache(*pools, disk=path, disk_bytes=ROOM)
    Blocks(device, disk=path, disk_bytes=ROOM).cache.close()


def test_an_open_file_raises(device, path):
    first = Blocks(device, disk=path, disk_bytes=ROOM)
    with pytest.raises((ValueError, OSError), match="disk"):
        Blocks(device, disk=path, disk_bytes=ROOM)
    first.cache.close()
    Blocks(device, disk=path, disk_bytes=ROOM).cache.close()


def test_a_file_that_is_too_small(device, path):
    with pytest.raises(ValueError, match=r"^disk_bytes: expected at least"):
        Blocks(device, disk=path, disk_bytes=100)
    with pytest.raises(TypeError, match=r"^disk_bytes"):
        Blocks(device, disk=path, disk_bytes=None)


# Whose blocks they are ----------------------------------------------------------------------------


def open_with(device, path, **options):
    return Blocks(device, 2, 2, disk=path, disk_bytes=ROOM, **options)


def previous_file(device, path, monkeypatch):
    """Make a file as the previous version did, with the block A."""
    with monkeypatch.context() as patch:
        patch.setattr(disk_format, "VERSION", disk_format.PREVIOUS_VERSION)
        patch.setattr(
            disk_blocks,
            "_description",
            lambda pool, identity: disk_blocks._previous_description(pool),
        )
        blocks = open_with(device, path)
        blocks.insert([A])
        blocks.cache.close()
    assert path.read_bytes()[8:12] == b"\1\0\0\0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "b", "heads": (0, 4)}, "model b, got a"),
        ({"heads": (0, 4)}, "model none, got a"),
        ({"model": "a"}, "total_kv_heads 2, got 4"),
        ({"model": "a", "heads": (2, 4)}, "head_start 2, got 0"),
        ({"model": "a", "heads": (0, 4), "encryption_key": bytes(32)}, "encryption AES-256-GCM"),
    ],
)
def test_blocks_of_another_model_or_heads_are_refused(device, path, options, message):
    blocks = open_with(device, path, model="a", heads=(0, 4))
    blocks.insert([A])
    blocks.cache.close()
    with pytest.raises(ValueError, match=f"^disk: expected {message}"):
        open_with(device, path, **options)
    blocks = open_with(device, path, model="a", heads=(0, 4))
    blocks.use([A], known=1)
    blocks.cache.close()


def test_a_file_of_the_previous_version(device, path, monkeypatch):
    """It says neither whose model it is nor which heads, so it serves caches that do not either."""
    previous_file(device, path, monkeypatch)
    before = path.read_bytes()
    for options in ({"model": "a"}, {"heads": (0, 4)}, {"encryption_key": bytes(32)}):
        with pytest.raises(ValueError, match=r"^disk: expected version 2 .* remove the file"):
            open_with(device, path, **options)
    assert path.read_bytes() == before
    blocks = open_with(device, path)
    blocks.use([A], known=1)
    blocks.insert([B])
    blocks.cache.close()
    assert path.read_bytes()[:4096] == before[:4096], "the previous release can open it"
    blocks = open_with(device, path)
    blocks.use([A, B], known=2)
    blocks.cache.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": b"a"}, TypeError, "model: expected a str"),
        ({"heads": 4}, TypeError, "heads: expected a tuple of two ints, got 4"),
        ({"heads": (0.0, 4)}, TypeError, "heads: expected"),
        ({"heads": (3, 4)}, ValueError, r"heads: expected the first of 2 .* got \(3, 4\)"),
        ({"encryption_key": "k" * 32}, TypeError, "encryption_key: expected bytes"),
        ({"encryption_key": lambda tenant: b"secret"}, ValueError, "expected 32 bytes, got 6"),
    ],
)
def test_arguments_of_the_identity(device, path, options, error, message):
    with pytest.raises(error, match=message) as caught:
        open_with(device, path, **options)
    assert "secret" not in str(caught.value)
    assert not path.exists()


def test_hashes_of_64_bits_on_disk_are_warned_of_once(device, path, monkeypatch, caplog):
    monkeypatch.setattr(kv.config, "_warned", set())
    for number in range(2):
        blocks = open_with(device, path)
        blocks.insert([2**64])
        assert len(caplog.records) == number
        blocks.cache.match([2**64, A])
        blocks.cache.match([A])
        blocks.cache.close()
        assert len(caplog.records) == 1
    assert "hashes of 64 bits on disk" in caplog.text
    Blocks(device, 2, 2).cache.match([A])
    assert len(caplog.records) == 1


# Encryption ---------------------------------------------------------------------------------------


def test_encrypted_blocks_outlive_the_process(device, path):
    hashes = kv.block_hashes(range(4), 1)
    asked = []
    blocks = open_with(device, path, encryption_key=lambda t: asked.append(t) or bytes(range(32)))
    assert asked == [""]
    write_down(blocks, hashes)
    blocks.use(hashes[:2], known=2)
    blocks.cache.close()
    data = path.read_bytes()
    for hash in hashes:
        assert blocks.first_bytes_on_disk(hash) not in data
        assert hash.to_bytes(16, "little") not in data
    for wrong in ({"encryption_key": bytes(32)}, {}):
        with pytest.raises(ValueError, match=r"^disk: expected encryption "):
            open_with(device, path, **wrong)
    blocks = open_with(device, path, encryption_key=bytes(range(32)))
    assert blocks.blocks()[2] == set(hashes)
    for pair in (hashes[:2], hashes[2:]):
        blocks.use(pair, known=2)
    blocks.cache.close()


def test_a_block_that_does_not_authenticate_is_forgotten(device, path):
    blocks = open_with(device, path, encryption_key=bytes(range(32)))
    write_down(blocks, [A, B, C, D])
    slot, layout = blocks.tiers.disk.slots[A], blocks.tiers.disk._file._layout
    with path.open("r+b") as file:
        file.seek(layout.payload_at(slot) + 5)
        byte = file.read(1)[0]
        file.seek(layout.payload_at(slot) + 5)
        file.write(bytes([byte ^ 1]))
    blocks.use([A], known=0)
    assert blocks.cache.match([A])[2] == 0
    blocks.use([B], known=1)
    assert blocks.cache.stats()["disk_errors"] == 1
    blocks.assert_no_leak()


# With a shared store ------------------------------------------------------------------------------


def test_model_and_heads_are_those_of_the_shared_store(device, path):
    def open_both(name, **options):
        pools = pool_of(device, 2), pool_of(device, 2, placement="pinned")
        store = kv.BlockStore.open(f"file:{path}-{name}", pools[1], model="a", heads=(0, 4))
        stack.callback(store.close)
        return TieredCache(*pools, disk=path, disk_bytes=ROOM, shared=store, **options)

    name = f"test-model-{os.getpid()}"
    with ExitStack() as stack:
        open_both(name).close()
        open_both(name, model="a", heads=(0, 4)).close()
        for options in ({"model": "b", "heads": (0, 4)}, {"model": "a"}):
            with pytest.raises(ValueError, match=r"^shared: expected a store of the same blocks"):
                open_both(name, **options)
    pools = pool_of(device, 2), pool_of(device, 2, placement="pinned")
    with pytest.raises(ValueError, match=r"^disk: expected model none, got a"):
        TieredCache(*pools, disk=path, disk_bytes=ROOM)


def test_a_key_without_a_disk(device):
    with pytest.raises(ValueError, match=r"^encryption_key: expected None where .* no disk"):
        Blocks(device, 2, 2, encryption_key=bytes(32))
