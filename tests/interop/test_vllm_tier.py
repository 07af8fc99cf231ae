"""The tier of vLLM's offloading keeps blocks of its CPU memory, and never gives wrong ones back."""

from __future__ import annotations

import errno
import mmap
import time

import numpy as np
import pytest
from engine_interfaces import VLLM, adapter, store_url, vllm_spec

from kvcupy.cache.tiered import disk

BLOCK = 4096


@pytest.fixture
def vllm():
    """The module with the tier, and the classes of vLLM."""
    with adapter("vllm_tier", VLLM) as module:
        import vllm.v1.kv_offload.base as base
        import vllm.v1.kv_offload.tiering.base as tiering

        yield type("Vllm", (), {"tier": module.KvcupyTier, "base": base, "tiering": tiering})


@pytest.fixture(params=["disk", "store", "both"])
def where(request, tmp_path):
    """Options of a tier with a disk, a store, or both."""
    on_disk = {"disk_path": tmp_path, "disk_bytes": 2**20}
    in_store = {"store": store_url(), "store_bytes": 2**20}
    chosen = {"disk": on_disk, "store": in_store, "both": {**on_disk, **in_store}}
    return chosen[request.param]


class Engine:
    """What vLLM's scheduler does with one tier."""

    def __init__(self, vllm, spec=None, memory=None, **options):
        self._vllm = vllm
        self.memory = np.zeros((8, BLOCK), np.uint8) if memory is None else memory
        self.view = memoryview(self.memory)
        self.tier = vllm.tier(spec or vllm_spec(), self.view, "KvcupyTier", **options)
        self._jobs = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.tier.shutdown()

    def fill(self, seed=0):
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape)
        return self.memory.copy()

    def store(self, keys, chunks):
        return self._run(self.tier.submit_store, keys, chunks, False)

    def load(self, keys, chunks):
        return self._run(self.tier.submit_load, keys, chunks, True)

    def _run(self, submit, keys, chunks, is_promotion):
        context = self._vllm.base.ReqContext(req_id="r")
        self._jobs += 1
        submit(
            self._vllm.tiering.TransferJob(
                self._jobs, keys, np.array(chunks), is_promotion, context
            )
        )
        self.tier.drain_jobs()
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == self._jobs
        return result

    def found(self, keys, *, request_goes_on=False):
        """Look up keys for a request, which keeps the answers."""
        context = self._vllm.base.ReqContext(req_id="r")
        results = self._vllm.base.LookupResult
        for _ in range(1000):
            answers = [self.tier.lookup(key, context) for key in keys]
            if results.RETRY not in answers:
                break
            self.tier.on_schedule_end(None)
            time.sleep(0.001)
        if not request_goes_on:
            self.tier.on_request_finished(context)
        assert results.RETRY not in answers
        return [answer == results.HIT for answer in answers]


def keys_of(*numbers):
    return [bytes([n]) * 32 + bytes(4) for n in numbers]


def test_blocks_come_back_after_a_restart(vllm, where):
    keys = keys_of(1, 2, 3)
    with Engine(vllm, **where) as engine:
        wanted = engine.fill()
        assert engine.found(keys) == [False] * 3
        result = engine.store(keys, [5, 0, 3])
        assert (result.success, result.transfer_bytes) == (True, 3 * BLOCK)
    with Engine(vllm, **where) as engine:
        assert engine.found(keys_of(1, 4, 3)) == [True, False, True]
        assert engine.load(keys, [1, 2, 6]).success
        assert (engine.memory[[1, 2, 6]] == wanted[[5, 0, 3]]).all()
        assert not engine.memory[[0, 3, 4, 5, 7]].any()
        if engine.tier._store is not None:
            engine.tier._store.remove()


def test_a_block_that_is_gone_is_a_miss_for_the_rest_of_the_request(vllm, where):
    with Engine(vllm, **where) as engine:
        engine.fill()
        engine.store(keys_of(1), [0])
        engine.tier._lookup_manager._contains = lambda keys: [True] * len(keys)
        assert engine.found(keys_of(1, 2), request_goes_on=True) == [True, True]
        result = engine.load(keys_of(2, 1), [1, 2])
        assert (result.success, list(result.successful_keys)) == (False, keys_of(1))
        assert engine.found(keys_of(1, 2)) == [True, False]
        assert engine.found(keys_of(2)) == [True]  # asked again
        if engine.tier._store is not None:
            engine.tier._store.remove()


@pytest.mark.parametrize(
    "other",
    [{"model": "n"}, {"dtype": "fp8_e5m2"}, {"tp_size": 2}, {"layout": "HND"}],
    ids=lambda other: next(iter(other)),
)
def test_other_engines_do_not_find_blocks(vllm, where, other):
    keys = keys_of(1)
    with Engine(vllm, **where) as engine:
        engine.store(keys, [0])
        with Engine(vllm, vllm_spec(**other), **where) as stranger:
            assert stranger.found(keys) == [False]
            assert not stranger.load(keys, [0]).success
        if engine.tier._store is not None:
            engine.tier._store.remove()


@pytest.mark.parametrize("name", ["model", "tenant"])
def test_weights_and_tenants_are_told_apart_by_options(vllm, where, name):
    with Engine(vllm, **where, **{name: "a"}) as engine:
        engine.store(keys_of(1), [0])
        with Engine(vllm, **where, **{name: "b"}) as stranger:
            assert stranger.found(keys_of(1)) == [False]
        if engine.tier._store is not None:
            engine.tier._store.remove()


def test_a_full_file_evicts_what_was_not_used(vllm, tmp_path):
    size = 3 * BLOCK + 2 * 4096  # 3 blocks
    with Engine(vllm, disk_path=tmp_path / "file", disk_bytes=size) as engine:
        engine.fill()
        for number in (1, 2, 3):
            assert engine.store(keys_of(number), [number]).success
        engine.tier.touch(keys_of(1, 9), None)
        assert engine.store(keys_of(4), [4]).success
        assert engine.found(keys_of(1, 2, 3, 4)) == [True, False, True, True]
        assert engine.load(keys_of(3), [0]).success  # a use
        assert engine.store(keys_of(5), [5]).success
        assert engine.found(keys_of(1, 3, 4, 5)) == [False, True, True, True]
        assert engine.store(keys_of(4, 6), [4, 6]).success  # evicts none of these
        assert engine.found(keys_of(3, 4, 5, 6)) == [False, True, True, True]
        assert not engine.store(keys_of(7, 8, 9, 10), [0, 1, 2, 3]).success  # more than fit
        assert sum(engine.found(keys_of(7, 8, 9, 10))) == 3


def test_known_blocks_are_not_written_again(vllm, tmp_path):
    with Engine(vllm, disk_path=tmp_path, disk_bytes=2**20) as engine:
        wanted = engine.fill()
        engine.store(keys_of(1), [0])
        assert engine.store(keys_of(1, 2), [3, 4]).success
        assert engine.tier._disk.written_bytes == 2 * BLOCK
        engine.load(keys_of(1), [7])
        assert (engine.memory[7] == wanted[0]).all()


def test_a_damaged_block_on_disk_comes_from_the_store(vllm, tmp_path):
    options = {"disk_path": tmp_path / "file", "disk_bytes": 2**20}
    with Engine(vllm, **options, store=store_url(), store_bytes=2**20) as engine:
        wanted = engine.fill()
        engine.store(keys_of(1), [0])
        contents = bytearray((tmp_path / "file").read_bytes())
        place = contents.index(wanted[0].tobytes())
        with (tmp_path / "file").open("r+b") as file:
            file.seek(place + 77)
            file.write(bytes([contents[place + 77] ^ 1]))
        assert engine.load(keys_of(1), [5]).success
        assert (engine.memory[5] == wanted[0]).all()
        engine.tier._store.remove()
        assert not engine.load(keys_of(1), [6]).success  # the disk forgot it, the store is closed


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_disk_is_a_miss(vllm, tmp_path, monkeypatch, call):
    with Engine(vllm, disk_path=tmp_path, disk_bytes=2**20) as engine:
        engine.fill()
        assert engine.store(keys_of(1), [0]).success

        def fail(*arguments):
            raise OSError(errno.EIO, "the disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, call, fail)
            result = engine.load if call == "preadv" else engine.store
            assert not result(keys_of(1 if call == "preadv" else 2), [1]).success
        assert engine.load(keys_of(1), [2]).success
        assert (engine.memory[2] == engine.memory[0]).all()


def test_after_failures_in_a_row_the_disk_is_skipped(vllm, tmp_path, monkeypatch):
    with Engine(vllm, disk_path=tmp_path, disk_bytes=2**20) as engine:
        engine.store(keys_of(*range(6)), range(6))

        def fail(*arguments):
            raise OSError(errno.EIO, "the disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "preadv", fail)
            engine.load(keys_of(*range(6)), range(6))
        assert engine.found(keys_of(0)) == [False]


def test_a_lost_store_is_a_miss(vllm, monkeypatch):
    with Engine(vllm, store=store_url(), store_bytes=2**20) as engine:
        engine.store(keys_of(1), [0])
        [blocks] = engine.tier._store._by_length.values()
        backend = blocks.opened._backend

        def lost(*arguments):
            raise OSError("the server is gone")

        with monkeypatch.context() as patch:
            for name in ("exists", "get", "put"):
                patch.setattr(backend, name, lost)
            assert engine.found(keys_of(1)) == [False]
            assert not engine.load(keys_of(1), [1]).success
            assert not engine.store(keys_of(2), [1]).success
        engine.tier._store.remove()


def test_a_job_that_raises_fails_alone(vllm, where):
    with Engine(vllm, **where) as engine:
        engine.fill()
        assert not engine.store(keys_of(1), [99]).success  # no such chunk
        assert engine.store(keys_of(2), [0]).success
        assert engine.load(keys_of(2), [1]).success
        assert engine.store([], []).success
        if engine.tier._store is not None:
            engine.tier._store.remove()


def test_blocks_are_encrypted(vllm, tmp_path):
    pytest.importorskip("cryptography")
    options = {"disk_path": tmp_path / "file", "disk_bytes": 2**20, "store": store_url()}
    options["store_bytes"] = 2**20
    with Engine(vllm, **options, encryption_key="11" * 32) as engine:
        wanted = engine.fill()
        engine.store(keys_of(1), [0])
        assert wanted[0].tobytes() not in (tmp_path / "file").read_bytes()
        assert engine.load(keys_of(1), [1]).success
        assert (engine.memory[1] == wanted[0]).all()
        options["disk_path"] = tmp_path / "other"
        with Engine(vllm, **options, encryption_key=bytes(32)) as stranger:
            assert stranger.found(keys_of(1)) == [False]
        engine.tier._store.remove()


def test_stored_blocks_are_published(vllm, tmp_path):
    spec = vllm_spec(events=True)
    options = {"disk_path": tmp_path, "disk_bytes": 2**20, "enable_kv_events": True}
    with Engine(vllm, spec, **options, locality="LOCAL") as engine:
        engine.store(keys_of(1, 2), [0, 1])
        engine.load(keys_of(1), [2])
        engine.store(keys_of(3), [99])
        [event] = engine.tier.take_events()
        assert (event.keys, event.removed) == (keys_of(1, 2), False)
        assert event.medium == vllm.base.Medium.STORAGE
        assert event.locality == vllm.base.Locality.LOCAL
        assert list(engine.tier.take_events()) == []


def test_vllm_can_unmap_its_memory(vllm, where):
    region = mmap.mmap(-1, 8 * BLOCK)
    memory = np.frombuffer(region, np.uint8).reshape(8, BLOCK)
    engine = Engine(vllm, memory=memory, **where)
    engine.store(keys_of(1), [0])
    if engine.tier._store is not None:
        engine.tier._store.remove()
    engine.tier.shutdown()
    engine.tier.shutdown()
    engine.memory = engine.view = memory = None
    engine.tier._primary_kv_view = None  # which vLLM releases
    region.close()  # raises if an array is over the memory


def test_engines_share_a_folder_but_no_file(vllm, tmp_path):
    options = {"disk_path": tmp_path, "disk_bytes": 2**20}
    with Engine(vllm, **options), Engine(vllm, vllm_spec(replica=1), **options):
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "expected disk_path, store or both"),
        ({"disk_path": "kv", "disk_bytes": 2**20, "colour": 1}, TypeError, "colour"),
        ({"store": "shm:x", "store_bytes": 2**20, "colour": 1}, TypeError, "colour"),
        ({"store": "ftp:x"}, ValueError, "url"),
        ({"disk_path": "kv", "disk_bytes": 100}, ValueError, "disk_bytes"),
    ],
)
def test_wrong_options_are_refused(vllm, tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        Engine(vllm, **options)


@pytest.mark.parametrize(
    "named", [{"type": "KvcupyTier", "module_path": "kvcupy.interop.vllm_tier"}, {"type": "kvcupy"}]
)
def test_vllm_makes_the_tier_by_name(vllm, tmp_path, named):
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    view = memoryview(np.zeros((8, BLOCK), np.uint8))
    options = {**named, "disk_path": str(tmp_path), "disk_bytes": 2**20, "locality": "REMOTE"}
    tier = SecondaryTierFactory.create_secondary_tier(options, view, vllm_spec())
    assert isinstance(tier, vllm.tier)
    assert tier.locality == vllm.base.Locality.REMOTE
    tier.shutdown()


def test_without_vllm_the_error_names_it(monkeypatch):
    import builtins
    import sys

    monkeypatch.delitem(sys.modules, "kvcupy.interop.vllm_tier", raising=False)
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("vllm"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"vLLM 0\.32"):
        import kvcupy.interop.vllm_tier  # noqa: F401
