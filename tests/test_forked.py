"""A forked child makes its own objects; whatever it does with its parent's raises at once."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from agents import Network
from engine_cases import PATIENCE_S
from forks import WATCHDOG_S, in_child, refused

import kvcupy as kv
from kvcupy import errors
from kvcupy.devices import cache, host
from kvcupy.errors import ProcessLocal
from kvcupy.interop.byte_store import ByteStore

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# Attributes with which a child may ask any object what it is, or be done with it.
HARMLESS = {"close"}


def pool(pages=4, **options):
    return kv.KVPool(pages, 2, 2, 1, 8, dtype="fp16", device="host", **options)


def rows(value=1):
    return np.full((2, 1, 8), value, np.float16)


# --- Every public object, and all that it has -----------------------------------------------------


SOURCES = sorted(Path(kv.__path__[0]).rglob("*.py"))


def module_of(path):
    relative = path.relative_to(Path(kv.__path__[0]).parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def kinds():
    """Return all classes whose objects belong to a process."""
    for path in SOURCES:
        if "ProcessLocal" in path.read_text():
            with suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module_of(path))
    found, left = set(), {ProcessLocal}
    while left:
        kind = left.pop()
        left |= set(kind.__subclasses__())
        found.add(kind)
    own = {k for k in found if k.__module__.startswith("kvcupy.") and not inspect.isabstract(k)}
    return sorted(own - {ProcessLocal}, key=lambda kind: (kind.__module__, kind.__name__))


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """Objects of many classes, in use."""
    with ExitStack() as stack:
        device = kv.device("host")
        stream = device.stream()
        with stream.capture() as graph:
            kv.store_kv(rows(), rows(), *np.zeros((2, 8, 1, 8), np.float16), np.array([0, 1]),
                        stream=stream)  # fmt: skip
        kv.store_kv(rows(), rows(), *np.zeros((2, 8, 1, 8), np.float16), np.array([0, 1]),
                    stream=stream)  # fmt: skip
        pools = [pool(), pool(16)]
        engine = kv.TransferEngine(pool(), pool())
        tiers = kv.TieredCache(*pools)
        tiers.insert([7], pools[0].allocator.alloc(1))
        cache = kv.PagedKVCache(
            num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=4, device=device
        )
        shape = {"num_kv_heads": 1, "head_dim": 8}
        groups = kv.PagedKVCache(
            num_q_heads=1, page_size=2, num_tokens=16, device=device,
            groups=[kv.FullAttention(layers=[0], **shape),
                    kv.SlidingWindow(layers=[1], window=4, **shape)],
        )  # fmt: skip
        store = ByteStore([f"file:{tmp_path}/bytes"], model="m")
        store.open(64)
        blocks = kv.BlockStore.open(f"file:{tmp_path}/pages", pool())
        Network(immediate=True).install(monkeypatch)
        sender, receiver = kv.PageSender(pool()), kv.PageReceiver(pool())
        publisher = pytest.importorskip("kvcupy.events").Publisher(f"ipc://{tmp_path}/events")
        publisher.follow(tiers)
        for each in (tiers, store, blocks, sender, receiver, publisher):
            stack.callback(each.close)
        yield [
            stream, stream.record(), device.event(), graph, *pools, kv.MLAPool(2, 2, 1, 8,
            device=device), pools[0].allocator, engine, engine.save([0], [1]), tiers,
            stack.enter_context(tiers.acquire([7])), tiers.hold([7]), cache, groups,
            kv.TieredCache(groups=groups, host_bytes=1 << 16), store, blocks, blocks._backend,
            sender, receiver, receiver.pull(sender.offer(sender.pools[0].allocator.alloc(1)), [0]),
            publisher,
        ]  # fmt: skip


def test_nothing_of_the_parent_can_be_used(objects):
    """Neither what is in use, nor any other class: all that has a public name raises."""
    unmade = [kind.__new__(kind) for kind in kinds() if kind not in set(map(type, objects))]
    assert len(unmade) < len(objects)

    def work():
        for each in [*objects, *unmade]:
            kind = type(each).__name__
            assert repr(each) == f"<{kind} of process {os.getppid()}>"
            assert isinstance(each, ProcessLocal) and each in [each] and hash(each)
            for name in dir(type(each)):
                usable = name in HARMLESS or name in type(each)._usable
                if not (name.startswith("__") or usable):
                    refused(lambda: getattr(each, name), kind)  # noqa: B023

    in_child(work)


def test_an_object_that_an_interrupt_broke_does_not_save_the_others():
    broken, other = (kv.KVPool(2, 2, 1, 1, 8, device="host").allocator for _ in range(2))
    broken._guard.mark_broken()
    in_child(lambda: refused(lambda: other.num_free, "PageAllocator"))


def test_special_methods_raise_too(objects):
    """Those that only ask what an object is do not, nor does the end of a block."""
    harmless = {
        *vars(object), "__abstractmethods__", "__annotations__", "__dict__", "__del__", "__doc__",
        "__enter__", "__exit__", "__getattribute__", "__module__", "__orig_bases__",
        "__parameters__", "__setstate__", "__slots__", "__static_attributes__", "__firstlineno__",
        "__weakref__", "__class_getitem__",
    }  # fmt: skip

    def work():
        for each in objects:
            for name in set(dir(type(each))) - harmless:
                if name.startswith("__"):
                    call = getattr(each, name)
                    arguments = [0] * len(inspect.signature(call).parameters)
                    refused(lambda: call(*arguments))  # noqa: B023
            if hasattr(type(each), "__enter__"):
                with each:
                    pass

    in_child(work)


def test_what_was_taken_from_an_object_before_raises(objects):
    """A bound method, and functions of kvcupy that an object is passed to."""
    stream, event, graph = objects[0], objects[1], objects[3]
    engine = next(each for each in objects if isinstance(each, kv.TransferEngine))
    cache = next(each for each in objects if isinstance(each, kv.PagedKVCache))
    first = next(each for each in objects if isinstance(each, kv.KVPool))
    host = kv.device("host")
    calls = [
        stream.synchronize, event.synchronize, event.done, graph.launch, engine._flush,
        first.allocator.free, cache.sequence_length, first.k,
    ]  # fmt: skip

    def work():
        for call in calls:
            arguments = [0] if call.__name__ in ("free", "sequence_length", "k") else []
            refused(lambda: call(*arguments))  # noqa: B023
        own, array = host.stream(), np.zeros((8, 1, 8), np.float16)
        refused(lambda: kv.fork(own, stream), "HostStream")
        refused(lambda: own.wait(stream), "HostStream")
        refused(lambda: own.wait(event), "HostEvent")
        refused(lambda: kv.keep_alive(array, stream), "HostStream")
        refused(lambda: kv.copy_pages(first, [0], [1]), "KVPool")
        refused(lambda: kv.transfer_pages(pool(), first, [0], [1]), "KVPool")
        refused(lambda: kv.TransferEngine(first, pool()), "KVPool")
        for issue in (
            lambda: kv.store_kv(
                rows(), rows(), array, array.copy(), np.array([0, 1]), stream=stream
            ),
            lambda: host.copy(array, array.copy(), stream=stream),
        ):
            refused(issue, "HostStream")
        assert not array.any()

    in_child(work)


MAKES = {"Lock", "RLock", "Thread", "ThreadPoolExecutor", "SimpleQueue", "Semaphore", "Condition"}


def test_locks_of_modules_are_process_locks():
    for path in SOURCES:
        for top in ast.parse(path.read_text()).body:
            if isinstance(top, (ast.Assign, ast.AnnAssign)):
                calls = [node.func for node in ast.walk(top) if isinstance(node, ast.Call)]
                made = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
                assert not made & MAKES, f"{module_of(path)}, line {top.lineno}"


# --- Children that make their own -----------------------------------------------------------------


def attend(value):
    """Use one of everything, and check a result of each."""
    host = kv.device("host")
    own = host.stream()
    k, v = np.zeros((2, 8, 1, 8), np.float16)
    for stream in (None, own):
        kv.store_kv(rows(value), rows(value), k, v, np.array([2, 5]), stream=stream)
        host.synchronize()
        assert (k[[2, 5]] == value).all() and (v[[2, 5]] == value).all()
        k[:] = 0
    with own.capture() as graph:
        kv.store_kv(rows(value), rows(value), k, v, np.array([0, 1]), stream=own)
    graph.launch()
    assert (k[:2] == value).all()
    pools = [pool(), pool()]
    pools[0].k(1)[1] = value
    kv.TransferEngine(*pools).save([1], [3], after=False).synchronize()
    assert (pools[1].k(1)[3] == value).all()
    tiers = kv.TieredCache(*[pool() for _ in range(2)])
    pages = tiers.device_pool.allocator.alloc(1)
    tiers.device_pool.k(0)[pages] = value
    tiers.insert([1], pages)
    tiers.evict(1)
    with tiers.acquire([1]) as lease:
        lease.wait()
        assert (tiers.device_pool.k(0)[lease.pages] == value).all()
    tiers.close()
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=4, dtype="fp16",
        device=host,
    )  # fmt: skip
    cache.add_sequence(0)
    cache.begin_forward([0], [2])
    out = cache.attention(0, rows(value), rows(value), rows(value))
    cache.end_forward()
    np.testing.assert_allclose(out, value)
    assert kv.metrics.collect() is not None


def test_a_child_makes_its_own(objects):
    """Its parent has used kernels, graphs and helper threads, and is using them."""
    attend(3)
    in_child(lambda: attend(4), parent=lambda: attend(5))
    attend(6)


def test_a_grandchild(objects):
    """It can use neither what its parent has made, nor what that has inherited."""

    def work():
        own = kv.device("host").stream()

        def further():
            refused(lambda: own.synchronize(), "HostStream")
            refused(lambda: objects[0].synchronize(), "HostStream")
            assert repr(objects[0]) != repr(own)
            attend(2)

        in_child(further)
        own.synchronize()

    in_child(work)


def test_locks_that_other_threads_hold_at_the_fork(objects):
    """Of the process, and of each object."""
    attend(3)
    locks = [lock for reference in tuple(errors._locks) if (lock := reference()) is not None]
    assert len(locks) > 10
    for each in objects:
        locks += [
            v for v in getattr(each, "__dict__", {}).values() if hasattr(v, "_at_fork_reinit")
        ]
    tiers = next(each for each in objects if isinstance(each, kv.TieredCache))
    locks += [objects[0]._state.lock, tiers._tiers[0].lock]
    held, released = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in dict.fromkeys(locks):
                stack.enter_context(lock)
            held.set()
            released.wait(PATIENCE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(PATIENCE_S)

    def work():
        attend(4)
        for each in objects:
            refused(lambda: each.anything)  # noqa: B023
            if hasattr(type(each), "close"):
                each.close()

    def parent():
        released.set()
        holder.join()

    in_child(work, parent=parent)
    attend(5)


def test_a_kernel_that_another_thread_compiles_at_the_fork(monkeypatch, tmp_path):
    """The child holds neither its lock, nor the lock of its file, when it needs the kernel too."""
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))
    compiling, forked, child = threading.Event(), threading.Event(), []

    def make(path):
        compiling.set()
        assert forked.wait(PATIENCE_S)
        path.write_bytes(b"library")

    def get(made=make):
        return cache.file("host-1", ".so", made).read_bytes()[:7]

    compiler = threading.Thread(target=lambda: child.append(get()))
    compiler.start()
    assert compiling.wait(PATIENCE_S)

    def work():
        assert get(lambda path: path.write_bytes(b"library")) == b"library"

    in_child(work, parent=lambda: (forked.set(), compiler.join()))
    assert child == [b"library"]


def test_a_build_that_is_loaded_at_the_fork(monkeypatch):
    """Python's `cached_property` has had a lock that all its objects share."""
    attend(3)
    function = next(iter(kv.device("host")._functions.values()))
    loading, forked = threading.Event(), threading.Event()
    library = host.HostFunction._library

    def slow(self, build):
        if threading.current_thread() is loader:
            loading.set()
            assert forked.wait(PATIENCE_S)
        return library(self, build)

    monkeypatch.setattr(host.HostFunction, "_library", slow)
    again = [host.HostFunction(function.specialisation, ()) for _ in range(2)]
    loader = threading.Thread(target=lambda: again[0].build(strict=False))
    loader.start()
    assert loading.wait(PATIENCE_S)
    in_child(
        lambda: [each.build(strict=False) for each in again],
        parent=lambda: (forked.set(), loader.join()),
    )


# --- What the parent owns -------------------------------------------------------------------------


def test_the_parent_goes_on_when_its_objects_are_closed_and_dropped_in_a_child(objects, tmp_path):
    files = sorted(path.name for path in tmp_path.iterdir())

    def work():
        for each in objects:
            if hasattr(type(each), "close"):
                each.close()
                each.close()
        while objects:
            del each
            each = objects.pop()
        del each
        gc.collect()

    kept = list(objects)
    in_child(work)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    stream, _, _, graph, *_ = kept
    graph.launch(stream)
    stream.synchronize()
    by_kind = {type(each): each for each in kept}
    by_kind[kv.Pull].synchronize()
    by_kind[kv.TieredCache].flush()
    assert by_kind[kv.BlockStore].match([10**20]) == 0
    publisher = next(each for each in kept if type(each).__name__ == "Publisher")
    publisher.flush(deadline_s=PATIENCE_S)


PROGRAM = """
import os, sys
import kvcupy as kv
from kvcupy.devices import cache
own = cache._own_folder()  # removed when the process that made it ends
pool = kv.KVPool(4, 2, 1, 1, 8, device="host")
folder, = sys.argv[1:]
stream = kv.device("host").stream()
stream.call(lambda: None)
host = kv.KVPool(4, 2, 1, 1, 8, device="host")
store = kv.BlockStore.open(f"file:{folder}/store", host)
cache = kv.TieredCache(pool, host, stores=[store])
cache.prefetch([10**20])
if not (child := os.fork()):
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert own.is_dir(), "the child has removed it"
stream.synchronize()
cache.close()
print("ended")
"""


def test_a_child_that_exits_makes_no_noise_and_removes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True,
        timeout=2 * WATCHDOG_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_finalizers_run_in_the_process_that_has_made_them():
    calls = []

    class Owner:
        pass

    owners = [Owner(), Owner()]
    for owner in owners:
        errors.finalize(owner, calls.append, 1)

    def work():
        owners.clear()
        gc.collect()
        assert calls == []
        own = Owner()
        errors.finalize(own, calls.append, 2)
        del own
        assert calls == [2]

    del owner
    in_child(work)
    del owners[0]
    assert calls == [1]
