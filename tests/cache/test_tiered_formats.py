"""`TieredCache(disk_dtype=, shared_dtype=)`: blocks that lower tiers keep in other formats."""

from __future__ import annotations

import errno
from contextlib import closing

import numpy as np
import pytest
from helpers import full_only
from line_process import LineProcess, poll
from tiered_cases import in_time
from tiered_store_cases import Held, WireStore, names

import kvcupy as kv
from kvcupy.cache.inspection import inspect
from kvcupy.cache.pool import pool_like
from kvcupy.cache.tiered import conversion
from kvcupy.cache.tiered.conversion import Conversion, converted_store
from kvcupy.cache.wire import WirePages

pytestmark = pytest.mark.usefixtures("quick_host")

PAGE, LAYERS, WIDTH = 4, 3, 32
PAIRS = [
    ("bf16", "nvfp4"), ("bf16", "fp8_e4m3"), ("fp16", "int8"), ("fp8_e4m3", "nvfp4"),
    *(full_only(*pair) for pair in [
        ("fp32", "bf16"), ("fp16", "bf16"), ("fp16", "mxfp4"), ("bf16", "int4"),
        ("fp8_e4m3", "int8"), ("int8", "int4"), ("fp8_e5m2", "fp8_e4m3"), ("fp32", "fp8_e5m2"),
    ]),
]  # fmt: skip
QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")


def pool_of(device, num_pages, dtype, *, latent=False, placement="device", **options):
    options |= {"dtype": dtype, "placement": placement, "device": device}
    options.setdefault("scales", dtype in QUANTISED)
    if latent:
        return kv.MLAPool(num_pages, PAGE, LAYERS, 3 * WIDTH, **options)
    return kv.KVPool(num_pages, PAGE, LAYERS, 2, WIDTH, v_head_dim=2 * WIDTH, **options)


def blocks_of(pool, pages):
    """The bytes of pages in the order of the wire."""
    pages = list(pages)
    if not pages:
        return []
    there = pool_like(pool, len(pages), dtype=pool.dtype)
    pool.device.synchronize()
    kv.transfer_pages(pool, there, pages, range(len(pages)))
    pool.device.synchronize()
    wire, blocks = WirePages(there), []
    for page in range(len(pages)):
        block = bytearray(wire.block_bytes)
        wire.read_into(page, block)
        blocks.append(bytes(block))
    return blocks


def in_file(block, dtype, latent):
    """The bytes of a block as a pool has them: its scales go slot by slot, not layer by layer."""
    if dtype not in QUANTISED:
        return block
    sizes = [LAYERS * PAGE * (1 if latent else 2) * 4] * (1 if latent else 2)
    codes, scales = block[: -sum(sizes)], block[-sum(sizes) :]
    parts = np.frombuffer(scales, np.float32).reshape(len(sizes), LAYERS, PAGE, -1)
    return codes + parts.swapaxes(1, 2).tobytes()


class Narrow:
    """A cache whose blocks come from random values, and what each tier should have of them."""

    def __init__(self, device, above, below, *, latent=False, layout="page_first", on_host=6,
                 device_dtype=None, scales=None, placement="pinned", **options):  # fmt: skip
        self.device, self.below = device, below
        own = {} if scales is None else {"scales": scales}
        device_dtype = device_dtype or above
        self.device_pool = pool_of(
            device, 4, device_dtype, latent=latent,
            **(own if device_dtype == above else {}),
        )  # fmt: skip
        self.host_pool = pool_of(
            device, on_host, above, latent=latent, layout=layout, placement=placement, **own
        )
        if device_dtype != above:
            options["host_dtype"] = above
        self.cache = kv.TieredCache(self.device_pool, self.host_pool, **options)
        self.exact, self.narrowed, self.widened = {}, {}, {}

    def insert(self, hashes, seed):
        """Insert random blocks; note what they are, as what they are stored, and come back."""
        pool, count = self.device_pool, len(hashes)
        pages = pool.allocator.alloc(count)
        source = pool_like(pool, count, dtype="fp32", placement="device")
        rng = np.random.default_rng(seed)
        for part in source.parts:
            values = rng.standard_normal(part.shape).astype(np.float32)
            self.device.copy(part, self.device.asarray(values))
        if pool.dtype == "fp32":
            kv.transfer_pages(source, pool, range(count), pages)
        else:
            kv.transfer_pages(source, pool, range(count), pages, convert=True)
        host, stored = (pool_like(self.host_pool, count, dtype=dtype)
                        for dtype in (self.host_pool.dtype, self.below))  # fmt: skip
        back, arrived = (pool_like(like, count, dtype=like.dtype) for like in (host, pool))
        self.device.synchronize()
        everything = range(count)
        between = pool.dtype != host.dtype
        kv.transfer_pages(pool, host, pages, everything, convert=between)
        kv.transfer_pages(host, stored, everything, everything, convert=True)
        kv.transfer_pages(stored, back, everything, everything, convert=True)
        kv.transfer_pages(back, arrived, everything, everything, convert=between)
        for into, of in ((self.exact, (pool, pages)), (self.narrowed, (stored, everything)),
                         (self.widened, (arrived, everything))):  # fmt: skip
            into.update(zip(hashes, blocks_of(*of), strict=True))
        pool.allocator.free(self.cache.insert(hashes, pages))

    def drop_from_memory(self):
        """Let lower tiers alone have the blocks."""
        self.cache.flush()
        self.cache.evict(int(self.cache.stats()["device_blocks"]))
        self.host_pool.allocator.free(self.cache.take_host_pages(self.host_pool.num_pages))

    def use(self, hashes, expected, known=None):
        """Acquire, layer by layer, and compare every byte."""
        with in_time(lambda: self.cache.acquire(hashes)) as lease:
            assert lease.num_blocks == (len(hashes) if known is None else known)
            for layer in range(LAYERS):
                lease.wait_layer(layer)
            for hash, block in zip(hashes, blocks_of(self.device_pool, lease.pages), strict=False):
                assert block == expected[hash], hash

    def end(self):
        self.cache.clear()
        for pool in (self.device_pool, self.host_pool):
            pool.allocator.check_leaks()
        self.cache.close()


# --- On disk ---


@pytest.mark.covering
@pytest.mark.parametrize(("above", "below"), PAIRS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
@pytest.mark.parametrize("latent", [False, True], ids=["kv", "mla"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_blocks_on_disk(device, tmp_path, above, below, layout, latent, write):
    """The bytes of the file are those of a conversion, and come back as those of the way back."""
    path, hashes = tmp_path / "kv", kv.block_hashes(range(4 * PAGE), PAGE)
    options = {"disk": path, "disk_bytes": 2**20, "disk_dtype": below, "write": write}
    one = Narrow(device, above, below, latent=latent, layout=layout, **options)
    one.insert(hashes, seed=1)
    one.use(hashes, one.exact)
    one.cache.evict(4)
    one.drop_from_memory()
    assert one.cache.match(hashes) == (0, 0, 4)
    file, page_bytes = path.read_bytes(), len(one.narrowed[hashes[0]])
    for hash in hashes:
        assert in_file(one.narrowed[hash], below, latent) in file
        assert one.exact[hash][: WIDTH * PAGE] not in file
    stats = one.cache.stats()
    assert (stats["disk_write_bytes"], stats["lost"]) == (4 * page_bytes, 0)
    assert page_bytes <= one.host_pool.page_bytes
    for _ in range(2):
        one.use(hashes, one.widened)
        one.cache.evict(4)
    assert one.cache.stats()["disk_read_bytes"] == 4 * page_bytes
    one.cache.close()
    assert inspect(path)["formats"].split(", ")[0] == below
    again = Narrow(device, above, below, latent=latent, layout="page_first", **options)
    again.use(hashes, one.widened)
    again.end()


@pytest.mark.parametrize("scales", [False, True])
def test_every_tier_in_a_format_of_its_own(device, tmp_path, scales):
    """bf16 on the device, fp8 in host memory, with scales or without, four bits on disk."""
    hashes = kv.block_hashes(range(4 * PAGE), PAGE)
    one = Narrow(
        device, "fp8_e4m3", "nvfp4", device_dtype="bf16", scales=scales, disk=tmp_path / "kv",
        disk_bytes=2**20, disk_dtype="nvfp4",
    )  # fmt: skip
    one.insert(hashes, seed=2)
    one.drop_from_memory()
    one.use(hashes, one.widened)
    one.end()


def test_more_blocks_than_staged_pages(device, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcupy.cache.tiered.conversion._MOST_STAGED_PAGES", 3)
    hashes = kv.block_hashes(range(8 * PAGE), PAGE)
    one = Narrow(
        device, "bf16", "int8", on_host=8, disk=tmp_path / "kv", disk_bytes=2**20,
        disk_dtype="int8",
    )  # fmt: skip
    for part in (hashes[:4], hashes[4:]):
        one.insert(part, seed=part[0] % 1000)
        one.cache.flush()
        one.cache.evict(4)
    one.drop_from_memory()
    for part in (hashes[:4], hashes[4:]):
        one.use(part, one.widened)
        one.cache.evict(4)
    assert one.cache._shared._tiers.disk._pool.num_pages == 3
    one.end()


def test_a_file_keeps_its_format(device, tmp_path):
    options = {"disk": tmp_path / "kv", "disk_bytes": 2**20}
    Narrow(device, "bf16", "nvfp4", disk_dtype="nvfp4", **options).end()
    for dtype in ("mxfp4", "fp8_e4m3", None):
        with pytest.raises(ValueError, match="disk: expected"):
            Narrow(device, "bf16", "nvfp4", disk_dtype=dtype, **options)
    # Pages of as many bytes are told apart, too.
    other = {"disk": tmp_path / "other", "disk_bytes": 2**20}
    Narrow(device, "bf16", "int8", disk_dtype="int8", **other).end()
    with pytest.raises(ValueError, match="disk: expected formats fp8_e4m3"):
        Narrow(device, "bf16", "fp8_e4m3", disk_dtype="fp8_e4m3", **other)


def test_the_same_format_is_no_conversion(device, tmp_path):
    one = Narrow(
        device, "bf16", "fp8_e4m3", disk=tmp_path / "kv", disk_bytes=2**20, disk_dtype="bf16"
    )
    hashes = kv.block_hashes(range(2 * PAGE), PAGE)
    one.insert(hashes, seed=3)
    one.drop_from_memory()
    one.use(hashes, one.exact)
    assert one.cache._shared._tiers.disk._conversion is None
    one.end()


def failing(call):
    """A conversion that fails, as it is asked for or later on its stream."""

    def fail(*args, **options):
        raise kv.DeviceError("no such luck")

    if call == "at once":
        return fail
    return lambda conversion, prepared, src, dst: (
        conversion._stream.call(lambda: 1 / 0), conversion._stream.synchronize()
    )  # fmt: skip


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_conversion_that_fails_on_the_way_to_the_disk(device, tmp_path, monkeypatch, when):
    """What could not be written stays in host memory, and is written when it can be."""
    hashes = kv.block_hashes(range(2 * PAGE), PAGE)
    one = Narrow(
        device, "bf16", "nvfp4", disk=tmp_path / "kv", disk_bytes=2**20, disk_dtype="nvfp4"
    )
    one.insert(hashes, seed=4)
    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_move", failing(when))
        with pytest.raises(OSError, match="could not be converted") as caught:
            one.cache.flush()
    assert caught.value.errno == errno.EIO
    stats = one.cache.stats()
    assert (stats["disk_errors"], stats["disk_blocks"], stats["host_blocks"]) == (2, 0, 2)
    assert (stats["disk_write_bytes"], stats["lost"]) == (0, 0)
    one.drop_from_memory()
    one.use(hashes, one.widened)
    one.end()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_conversion_that_fails_on_the_way_back(device, tmp_path, monkeypatch, when):
    """The blocks are missing for now, and stay on disk."""
    hashes = kv.block_hashes(range(2 * PAGE), PAGE)
    one = Narrow(
        device, "bf16", "nvfp4", disk=tmp_path / "kv", disk_bytes=2**20, disk_dtype="nvfp4"
    )
    one.insert(hashes, seed=5)
    one.drop_from_memory()
    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_move", failing(when))
        one.use(hashes, one.widened, known=0)
    assert one.cache.stats()["disk_errors"] == 2
    assert one.cache.match(hashes).disk == 2
    one.use(hashes, one.widened)
    one.end()


def test_a_damaged_block_among_others(device, tmp_path):
    """The checksum is of what is stored."""
    path, hashes = tmp_path / "kv", kv.block_hashes(range(3 * PAGE), PAGE)
    one = Narrow(device, "bf16", "fp8_e4m3", disk=path, disk_bytes=2**20, disk_dtype="fp8_e4m3")
    one.insert(hashes, seed=6)
    one.drop_from_memory()
    stored = in_file(one.narrowed[hashes[1]], "fp8_e4m3", latent=False)
    at = path.read_bytes().find(stored)
    assert at > 0
    with path.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([stored[5] ^ 1]))
    one.use(hashes, one.widened, known=1)
    assert one.cache.match(hashes) == (1, 1, 1) and one.cache.match(hashes[2:]).disk == 1
    one.end()


# --- In a shared store ---


class Sharing(Narrow):
    """The same over a store in memory, with a pool of its own format."""

    def __init__(self, device, above, below, *, store=None, staged=3, latent=False, **options):
        like = pool_of(device, 1, above, latent=latent, placement="pinned")
        self.pool = pool_like(like, staged, dtype=below)
        self.store = WireStore(self.pool) if store is None else store.of(self.pool)
        super().__init__(
            device, above, below, latent=latent, shared=self.store, shared_dtype=below,
            shared_prefetch=1.0, on_host=32, **options,
        )  # fmt: skip

    def end(self):
        super().end()
        self.pool.allocator.check_leaks()


HASHES = names(*range(4))


@pytest.mark.covering
@pytest.mark.parametrize(("above", "below"), PAIRS)
@pytest.mark.parametrize("latent", [False, True], ids=["kv", "mla"])
@pytest.mark.parametrize("write", ["through", "back", "second_use"])
def test_blocks_in_a_shared_store(device, above, below, latent, write):
    one = Sharing(device, above, below, latent=latent, shared_write=write)
    one.insert(HASHES, seed=7)
    for _ in range(2):
        one.use(HASHES, one.exact)
    one.drop_from_memory()
    assert one.store.blocks == one.narrowed
    stats = one.cache.stats()
    block_bytes = one.pool.page_bytes
    assert (stats["shared_stored"], stats["shared_put_bytes"]) == (4, 4 * block_bytes)
    two = Sharing(device, above, below, latent=latent, shared_write=write, store=one.store)
    assert two.cache.match(HASHES).shared == 4
    two.use(HASHES, one.widened)
    stats = two.cache.stats()
    assert (stats["shared_hits"], stats["shared_get_bytes"]) == (4, 4 * block_bytes)
    one.use(HASHES, one.widened)
    for each in (one, two):
        each.end()


def test_prefetched_blocks_are_widened(device):
    one = Sharing(device, "bf16", "nvfp4")
    one.insert(HASHES, seed=8)
    one.drop_from_memory()
    one.cache.prefetch(HASHES)
    assert poll(lambda: one.cache.match(HASHES).host == 4)
    with one.cache.acquire(HASHES, wait="best_effort") as lease:
        assert lease.num_blocks == 4
    one.use(HASHES, one.widened)
    one.end()


def test_what_is_late_comes_for_others(device):
    one = Sharing(device, "bf16", "nvfp4")
    one.insert(HASHES, seed=9)
    one.drop_from_memory()
    gate = Held(one.store, "get")
    with one.cache.acquire(HASHES, wait="timeout", deadline_s=0.01) as lease:
        assert lease.num_blocks == 0
    gate.open()
    one.use(HASHES, one.widened)
    one.end()


def test_without_staged_pages_blocks_are_missing_and_nothing_is_lost(device):
    one = Sharing(device, "bf16", "nvfp4", staged=2)
    taken = one.pool.allocator.alloc(2)
    one.insert(HASHES, seed=10)
    one.cache.flush()
    stats = one.cache.stats()
    assert one.store.blocks == {} and stats["shared_failed"] == 4
    one.cache.evict(4)
    one.use(HASHES, one.exact)
    assert one.cache.stats()["lost"] == 0
    one.pool.allocator.free(taken[:1])  # one is enough
    one.cache.clear()
    one.insert(HASHES, seed=11)
    one.drop_from_memory()
    assert one.store.blocks == one.narrowed
    one.pool.allocator.alloc(1)
    one.use(HASHES, one.widened, known=0)
    assert one.cache.stats()["shared_misses"] > 0
    one.pool.allocator.free(taken)
    one.use(HASHES, one.widened)
    one.end()


class SlowStore(WireStore):
    """Each call takes seconds of a clock of the test's own. Calls have a deadline, as long as it is
    not shortened."""

    deadline_s, takes_s, now = 5.0, 2.0, 100.0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.deadlines = []

    def monotonic(self):
        return self.now

    def put(self, hashes, pages, *, deadline_s=None):
        return self.slowly(super().put, hashes, pages, deadline_s)

    def get(self, hashes, pages, *, deadline_s=None):
        return self.slowly(super().get, hashes, pages, deadline_s)

    def slowly(self, call, hashes, pages, deadline_s):
        self.deadlines.append(deadline_s)
        self.now += self.takes_s
        return call(hashes, pages)


def test_calls_of_a_store_have_one_deadline_together(device, monkeypatch):
    """They are several where staged pages are few; what is late has failed, or is missing."""
    host = pool_of(device, 8, "bf16", placement="pinned")
    pool = pool_like(host, 3, dtype="nvfp4")
    store = SlowStore(pool)
    monkeypatch.setattr(conversion, "time", store)
    converted, _ = converted_store(store, host, "nvfp4")
    taken = pool.allocator.alloc(2)
    assert converted.put(HASHES, range(4)) == ["stored"] * 3 + ["failed"]
    assert store.deadlines == [5.0, 3.0, 1.0] and list(store.blocks) == HASHES[:3]
    store.deadlines.clear()
    store.takes_s = 1.5
    assert converted.put(HASHES, range(4)) == ["known"] * 3 + ["stored"]
    assert store.deadlines == [5.0, 3.5, 2.0, 0.5]
    store.deadlines.clear()
    store.takes_s = 3.0
    assert converted.get(HASHES, range(4, 8)) == [True] * 2 + [False] * 2
    assert store.deadlines == [5.0, 2.0]
    assert blocks_of(host, [4, 5]) == blocks_of(host, [0, 1])
    pool.allocator.free(taken)
    pool.allocator.check_leaks()


@pytest.mark.parametrize("call", ["put", "get"])
@pytest.mark.parametrize("how", ["conversion", "store", "answer"])
def test_failures_are_misses(device, monkeypatch, call, how):
    one = Sharing(device, "bf16", "nvfp4")
    with monkeypatch.context() as patch:

        def fail():
            if how == "conversion":
                name = "down" if call == "put" else "up"
                patch.setattr(Conversion, name, failing("at once"))
            elif how == "store":
                one.store.fail[call] = ConnectionError("lost")
            else:
                one.store.answer[call] = []

        if call == "put":
            fail()
        one.insert(HASHES, seed=12)
        one.cache.flush()
        assert one.store.blocks == ({} if call == "put" else one.narrowed)
        if call == "get":
            one.drop_from_memory()
            fail()
            one.use(HASHES, one.widened, known=0)
    one.store.fail.clear()
    one.store.answer.clear()
    assert (one.cache.stats()["shared_errors"] > 0) == (how != "answer")
    one.use(HASHES, one.widened if call == "get" else one.exact)
    one.end()


def test_what_was_on_a_narrower_disk_is_not_put(device, tmp_path):
    """Neither from host memory, nor when it leaves the device."""
    one = Sharing(
        device, "bf16", "fp8_e4m3", disk=tmp_path / "kv", disk_bytes=2**20, disk_dtype="nvfp4",
        shared_write="second_use",
    )  # fmt: skip
    one.insert(HASHES, seed=13)
    one.drop_from_memory()
    assert one.store.blocks == {}, "no block was used twice"
    for _ in range(3):
        with one.cache.acquire(HASHES) as lease:
            assert lease.num_blocks == 4
    one.host_pool.allocator.free(one.cache.take_host_pages(32))
    for hash in HASHES:
        one.cache._shared._tiers.disk.evict([hash])
    one.cache.evict(4)  # back to host memory
    assert one.cache.match(HASHES).host == 4
    one.cache.flush()
    with one.cache.acquire(HASHES) as lease:
        assert lease.num_blocks == 4
    one.cache.flush()
    assert one.store.blocks == {}
    one.end()


def test_a_disk_that_is_as_wide_as_the_store_gives_it_blocks(device, tmp_path):
    one = Sharing(
        device, "bf16", "nvfp4", disk=tmp_path / "kv", disk_bytes=2**20,
        disk_dtype="fp8_e4m3", shared_write="second_use",
    )  # fmt: skip
    one.insert(HASHES, seed=14)
    one.drop_from_memory()
    for _ in range(2):
        with one.cache.acquire(HASHES) as lease:
            assert lease.num_blocks == 4
    one.cache.flush()
    assert set(one.store.blocks) == set(HASHES)
    one.end()


# --- Processes ---

PROGRAM = """
import numpy as np
import kvcupy as kv
from test_tiered_formats import *
"""


def open_store(device, url, dtype, num_pages=4):
    like = pool_of(device, 1, "bf16", placement="pinned")
    pool = pool_like(like, num_pages, dtype=dtype)
    return kv.SharedStore.open(url, pool, capacity_bytes=2**20, deadline_s=20.0)


def publish(url, seed, *dtypes):
    """Put random blocks into a store in some formats, from another process."""
    device = kv.device("host")
    blocks = {}
    for dtype in dtypes:
        with open_store(device, url + dtype, dtype) as store:
            one = Narrow(
                device, "bf16", dtype, shared=store, shared_dtype=dtype, shared_prefetch=1.0
            )
            one.insert(HASHES, seed)
            one.cache.flush()
            assert one.cache.stats()["shared_stored"] == 4
            one.end()
            blocks[dtype] = [block.hex() for block in one.widened.values()]
    return blocks


@pytest.mark.parametrize("dtypes", [("nvfp4", "int8"), full_only(("fp8_e4m3", "mxfp4"))], ids=str)
def test_another_process_reads_what_one_has_narrowed(device, tmp_path, dtypes):
    process = LineProcess(PROGRAM)
    url = f"shm:formats-{tmp_path.name}-{hash(str(tmp_path)) % 10**9}-"
    try:
        process.reply()
        written = process.do(f"answer(publish({url!r}, 15, *{dtypes!r}))")
        for dtype in dtypes:
            with open_store(device, url + dtype, dtype) as store:
                one = Narrow(
                    device, "bf16", dtype, shared=store, shared_dtype=dtype, shared_prefetch=1.0
                )
                expected = dict(zip(HASHES, map(bytes.fromhex, written[dtype]), strict=True))
                one.use(HASHES, expected)
                assert one.cache.stats()["shared_hits"] == 4
                one.end()
    finally:
        process.end()
        for dtype in dtypes:
            with open_store(device, url + dtype, dtype) as store:
                store.remove()


def test_caches_of_other_formats_find_none_of_each_others_blocks(device, tmp_path):
    """Also where blocks are as long: the format is part of the key."""
    url = f"shm:formats-mixed-{hash(str(tmp_path)) % 10**9}"
    with open_store(device, url, "int8") as first, open_store(device, url, "fp8_e4m3") as second:
        assert first.pool.page_bytes == second.pool.page_bytes
        one = Narrow(device, "bf16", "int8", shared=first, shared_dtype="int8", shared_prefetch=1.0)
        two = Narrow(device, "bf16", "fp8_e4m3", shared=second, shared_dtype="fp8_e4m3",
                     shared_prefetch=1.0)  # fmt: skip
        one.insert(HASHES, seed=16)
        one.cache.flush()
        assert first.exists(HASHES) == 4 and second.exists(HASHES) == 0
        two.use(HASHES, {}, known=0)
        two.insert(HASHES, seed=16)
        two.drop_from_memory()
        two.use(HASHES, two.widened)
        one.drop_from_memory()
        one.use(HASHES, one.widened)
        for each in (one, two):
            each.end()
        first.remove()


# --- Arguments ---


@pytest.mark.parametrize(("above", "options", "match"), [
    ("bf16", {"disk_dtype": "fp32"}, "^disk_dtype: expected a format that is not wider than bf16"),
    ("nvfp4", {"disk_dtype": "fp8_e4m3"}, "^disk_dtype: .* not wider than nvfp4"),
    ("nvfp4", {"disk_dtype": "mxfp4"}, "^disk_dtype: expected nvfp4 like host_pool"),
    ("bf16", {"disk_dtype": "int4_g128"}, "^disk_dtype: expected rows of a multiple of 128"),
    ("bf16", {"disk_dtype": "nothing"}, r"^disk_dtype: expected"),
    ("bf16", {"disk": None, "disk_bytes": 0, "disk_dtype": "nvfp4"},
     "^disk_dtype: expected None without disk"),
    ("bf16", {"shared_dtype": "nvfp4"}, "^shared_dtype: expected None without shared"),
])  # fmt: skip
def test_formats_that_do_not_fit(device, tmp_path, above, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        Narrow(device, above, above, **{"disk": tmp_path / "kv", "disk_bytes": 2**20, **options})
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(("dtype", "pool", "match"), [
    ("fp32", {}, "^shared_dtype: expected a format that is not wider"),
    ("nvfp4", {"dtype": "int4"}, "^shared: expected a store with a pool of nvfp4, got one of int4"),
    ("nvfp4", None, "^shared: expected a store with a pool of nvfp4, got one without"),
    (None, {"dtype": "nvfp4"}, "^shared: expected a store of host_pool"),
    ("nvfp4", {"dtype": "nvfp4", "latent": True}, "^shared: expected a pool of K and V"),
])  # fmt: skip
def test_stores_that_do_not_fit(device, dtype, pool, match):
    built = None if pool is None else pool_of(
        device, 2, pool.get("dtype", "bf16"), latent=pool.get("latent", False), placement="pinned"
    )  # fmt: skip
    with pytest.raises(ValueError, match=match):
        Narrow(device, "bf16", "nvfp4", shared=WireStore(built), shared_dtype=dtype)


def test_conversions_are_ordered(device, tmp_path):
    """What the engine writes is read by conversions, and the other way round."""
    hashes = kv.block_hashes(range(4 * PAGE), PAGE)
    with kv.order_checker(action="raise"):
        one = Narrow(
            device, "bf16", "nvfp4", disk=tmp_path / "kv", disk_bytes=2**20, disk_dtype="nvfp4"
        )
        with closing(one.cache):
            one.cache.insert(hashes, one.device_pool.allocator.alloc(4))
            for _ in range(2):
                one.drop_from_memory()
                with one.cache.acquire(hashes) as lease:
                    lease.wait()
