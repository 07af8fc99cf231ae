"""The tier of vLLM's offloading keeps blocks of its CPU memory, and never gives wrong ones back."""

from __future__ import annotations

import errno
import mmap
import time

import numpy as np
import pytest
from engine_interfaces import VLLM, adapter, store_url, vllm_spec

from kvcupy.remote.stores import file

BLOCK = 4096


@pytest.fixture
def vllm():
    """The module with the tier, and the classes of vLLM."""
    with adapter("vllm_tier", VLLM) as module:
        import vllm.v1.kv_offload.base as base
        import vllm.v1.kv_offload.tiering.base as tiering

        yield type("Vllm", (), {"tier": module.KvcupyTier, "base": base, "tiering": tiering})


@pytest.fixture(params=[1, 2], ids=["one store", "two stores"])
def where(request):
    """Options of a tier."""
    return {"stores": [{"url": store_url(), "capacity_bytes": 2**20}, store_url()][: request.param]}


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


def test_weights_are_distinguished_by_an_option(vllm, where):
    with Engine(vllm, **where, model="a") as engine:
        engine.store(keys_of(1), [0])
        with Engine(vllm, **where, model="b") as stranger:
            assert stranger.found(keys_of(1)) == [False]


def test_a_full_store_evicts_what_was_not_used(vllm):
    stores = [{"url": store_url(), "capacity_bytes": 3 * 2 * BLOCK}]  # with its header, two pages
    with Engine(vllm, stores=stores) as engine:
        engine.fill()
        for number in (1, 2, 3):
            assert engine.store(keys_of(number), [number]).success
        assert engine.load(keys_of(1), [0]).success  # a use
        assert engine.store(keys_of(4), [4]).success
        assert engine.found(keys_of(1, 2, 3, 4)) == [True, False, True, True]
        assert not engine.store(keys_of(7, 8, 9, 10), [0, 1, 2, 3]).success  # more than fit
        assert sum(engine.found(keys_of(7, 8, 9, 10))) == 3


def test_a_damaged_block_comes_from_the_next_store(vllm, tmp_path):
    with Engine(vllm, stores=[f"file:{tmp_path}/near", store_url()]) as engine:
        wanted = engine.fill()
        engine.store(keys_of(1), [0])
        [path] = (p for p in tmp_path.rglob("*-*") if p.is_file())
        content = bytearray(path.read_bytes())
        content[777] ^= 1
        path.write_bytes(content)
        assert engine.load(keys_of(1), [5]).success
        assert (engine.memory[5] == wanted[0]).all() and not path.exists()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_disk_is_a_miss(vllm, monkeypatch, call):
    with Engine(vllm, stores=[store_url()]) as engine:
        engine.fill()
        assert engine.store(keys_of(1), [0]).success

        def fail(*arguments):
            raise OSError(errno.EIO, "the disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(file.os, call, fail)
            result = engine.load if call == "preadv" else engine.store
            assert not result(keys_of(1 if call == "preadv" else 2), [1]).success
        for store in engine.tier._below._opened.values():
            store._retry_at.clear()
        assert engine.load(keys_of(1), [2]).success
        assert (engine.memory[2] == engine.memory[0]).all()


def test_a_lost_store_is_a_miss(vllm, monkeypatch):
    with Engine(vllm, stores=[store_url()]) as engine:
        engine.store(keys_of(1), [0])
        [store] = engine.tier._below._opened.values()

        def lost(*arguments):
            raise OSError("the server is gone")

        with monkeypatch.context() as patch:
            for name in ("exists", "get", "put"):
                patch.setattr(store._backend, name, lost)
            assert engine.found(keys_of(1)) == [False]
            assert not engine.load(keys_of(1), [1]).success
            assert not engine.store(keys_of(2), [1]).success


def test_a_job_that_raises_fails_alone(vllm, where):
    with Engine(vllm, **where) as engine:
        engine.fill()
        assert not engine.store(keys_of(1), [99]).success  # no such chunk
        assert engine.store(keys_of(2), [0]).success
        assert engine.load(keys_of(2), [1]).success
        assert engine.store([], []).success


def test_blocks_are_encrypted(vllm, tmp_path):
    pytest.importorskip("cryptography")
    stores = [f"file:{tmp_path}/kv"]
    with Engine(vllm, stores=stores, encryption_key="11" * 32) as engine:
        wanted = engine.fill()
        engine.store(keys_of(1), [0])
        [path] = (p for p in tmp_path.rglob("*-*") if p.is_file())
        assert wanted[0, :16].tobytes() not in path.read_bytes()
        assert engine.load(keys_of(1), [1]).success
        assert (engine.memory[1] == wanted[0]).all()
        with Engine(vllm, stores=stores, encryption_key=bytes(32)) as stranger:
            assert stranger.found(keys_of(1)) == [False]


def test_stored_blocks_are_published(vllm):
    spec = vllm_spec(events=True)
    options = {"stores": [store_url()], "enable_kv_events": True}
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
    engine.tier.shutdown()
    engine.tier.shutdown()
    engine.memory = engine.view = memory = None
    engine.tier._primary_kv_view = None  # which vLLM releases
    region.close()  # raises if an array is over the memory


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "stores: expected a list of URLs, got NoneType"),
        ({"stores": []}, TypeError, "stores: expected a list of URLs, got an empty list"),
        ({"stores": ["file:kv"], "colour": 1}, TypeError, "colour"),
        ({"stores": ["ftp:x"]}, ValueError, "url"),
        ({"stores": [{"url": "file:kv", "capacity_bytes": 100}]}, ValueError, "capacity_bytes"),
    ],
)
def test_wrong_options_are_refused(vllm, tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        Engine(vllm, **options)


@pytest.mark.parametrize(
    "named", [{"type": "KvcupyTier", "module_path": "kvcupy.interop.vllm_tier"}, {"type": "kvcupy"}]
)
def test_vllm_makes_the_tier_by_name(vllm, named):
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    view = memoryview(np.zeros((8, BLOCK), np.uint8))
    options = {**named, "stores": [store_url()], "locality": "REMOTE"}
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
