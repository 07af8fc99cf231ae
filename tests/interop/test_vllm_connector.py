"""The connector for vLLM, below a stand-in for vLLM's engine (`vllm_stand_in`).

`scripts/vllm_check.py` runs it below vLLM itself.
"""

import importlib
import importlib.util
import random
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import vllm_stand_in as vllm
from vllm_stand_in import BLOCK_TOKENS, Engine, tokens_alone

import kvcupy as kv
from kvcupy.cache.tiered import holds

SHAPES = {
    "HND": None,
    "NHD": (24, BLOCK_TOKENS, 2, 8),
    "stacked": (2, 24, BLOCK_TOKENS, 2, 8),
    "interleaved": (24, 2, BLOCK_TOKENS, 2, 8),
    "latent": (24, BLOCK_TOKENS, 24),
}
HOST = {"host_bytes": 2**18}  # more than all blocks
SMALL_HOST = {"host_bytes": 2**13}  # 16 blocks
GROUPS = pytest.mark.parametrize(
    "model",
    [{}, *({"windows": windows, "num_blocks": 40} for windows in ((None, 6), (9, None)))],
    ids=["one group", "full and window", "window and full"],
)  # fmt: skip


@pytest.fixture
def connector(monkeypatch):
    return vllm.install(monkeypatch)


@pytest.fixture
def make(connector):
    """Make engines, and close them."""
    engines = []

    def make_engine(options, **arguments):
        engines.append(Engine(connector, options, **arguments))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def conversations(count, seed=0):
    """Prompts that extend each other, or share one of three beginnings."""
    rng = random.Random(seed)
    words = lambda n: [rng.randrange(3, 500) for _ in range(n)]  # noqa: E731
    starts, known = [words(18) for _ in range(3)], []
    prompts = []
    for _ in range(count):
        if known and rng.random() < 0.6:
            prompt = rng.choice(known)
        else:
            known.append(prompt := list(rng.choice(starts)))
        prompt += words(rng.randrange(3, 14))
        if len(prompt) > 60:
            known.remove(prompt)
        prompts.append(list(prompt))
    return prompts


def check(engine, prompts, at_once=4, flush=False):
    """Serve prompts, and compare every token; return how many tokens were not computed."""
    cached = external = 0
    for i in range(0, len(prompts), at_once):
        requests = [engine.add(prompt) for prompt in prompts[i : i + at_once]]
        for output, prompt in zip(engine.run(*requests), prompts[i : i + at_once], strict=True):
            assert output == tokens_alone(prompt, 3, engine.weights), f"prompt {prompt}"
        cached += sum(r.num_cached for r in requests)
        external += sum(r.num_external for r in requests)
        if flush:  # what a thread does from time to time
            worker_of(engine).cache.flush()
    return cached, external


def settle(engine):
    for _ in range(100):
        engine.step()
        if not engine.held:
            return
        time.sleep(0.01)


def worker_of(engine):
    return engine.worker._worker


def assert_nothing_held(engine):
    settle(engine)
    worker = worker_of(engine)
    deadline = time.monotonic() + 5
    while worker.cache._tiers[0].host.held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(engine.free) == len(engine.num_refs) - 1
    lookups = worker.lookups
    assert (lookups._num_held, lookups._lookups, lookups._claimed) == (0, {}, {})
    assert worker._receiving == {}
    assert not worker.cache._tiers[0].host.held
    scheduler = engine.scheduler._scheduler
    known = scheduler._generation
    assert not (scheduler._tracked or known.found or known.loading or known.numbers)


# --- Tokens ---


@GROUPS
@pytest.mark.parametrize("separate", [False, True], ids=["one process", "two processes"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_host_memory_serves_what_the_device_has_evicted(make, layerwise, separate, model):
    engine = make({**HOST, "layerwise": layerwise}, separate=separate, **model)
    _, external = check(engine, conversations(60))
    assert external > 300
    assert_nothing_held(engine)


@pytest.mark.parametrize("shape", SHAPES)
def test_layouts(make, shape):
    engine = make(HOST, shape=SHAPES[shape])
    assert check(engine, conversations(30))[1] > 100


@GROUPS
@pytest.mark.parametrize("separate", [False, True], ids=["one process", "two processes"])
def test_a_store_serves_what_host_memory_has_evicted(make, tmp_path, separate, model):
    options = {"host_bytes": 2**13, "stores": [f"file:{tmp_path}/blocks"]}
    engine = make(options, separate=separate, **model)
    _, external = check(engine, conversations(60), flush=True)
    assert external > 150
    assert engine.sources[vllm.CacheHitSource.EXTERNAL_UNSPECIFIED] > 0
    assert_nothing_held(engine)


@GROUPS
def test_preempted_requests(make, model):
    engine = make(HOST, **{**model, "num_blocks": model.get("num_blocks", 28) - 4})
    prompts = conversations(40)
    requests = [engine.add(prompt, 9) for prompt in prompts]
    for output, prompt in zip(engine.run(*requests), prompts, strict=True):
        assert output == tokens_alone(prompt, 9)
    assert engine.num_preempted > 1
    assert_nothing_held(engine)


def test_the_stand_in_notices_a_wrong_byte(make):
    engine = make(HOST)
    prompt = list(range(3, 40))
    check(engine, [prompt])
    check(engine, conversations(20))  # evict it from the device
    settle(engine)
    worker_of(engine).cache.host_pool.k(0)[...] ^= 1
    with pytest.raises(AssertionError, match="layers have different rows"):
        check(engine, [prompt])


@GROUPS
def test_a_store_serves_the_next_engine(make, tmp_path, model):
    prompts = conversations(30)
    options = {**SMALL_HOST, "stores": [{"url": f"file:{tmp_path}/kv", "capacity_bytes": 2**24}]}
    first = make(options, **model)
    check(first, prompts)
    first.close()
    assert check(make(options, **model), prompts[-4:])[1] > 60


@GROUPS
def test_two_engines_share_a_store(make, tmp_path, model):
    prompts = conversations(30)
    options = {**HOST, "stores": [f"file:{tmp_path}/store"]}
    first, second = make(options, **model), make(options, **model)
    other = make(options, name="another model", **model)
    check(first, prompts)
    assert worker_of(first).cache.flush() == 0
    prompt = prompts[-1]
    assert check(second, [prompt])[1] == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.sources == {vllm.CacheHitSource.EXTERNAL_UNSPECIFIED: second_tokens(prompt)}
    assert check(other, [prompt])[1] == 0


def second_tokens(prompt):
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_salt_separates_requests(make):
    engine = make(HOST)
    prompt = list(range(3, 40))
    found = []
    for salt in ("one", "two", "one"):
        check(engine, conversations(20, seed=len(found)))
        request = engine.add(prompt, salt=salt)
        engine.run(request)
        found.append(request.num_cached > 0)
    assert found == [False, False, True]


def test_reset_forgets_all_blocks(make, tmp_path):
    options = {**HOST, "stores": [f"file:{tmp_path}/store"]}
    engine, prompt = make(options), list(range(3, 40))
    check(engine, [prompt])
    worker_of(engine).cache.flush()
    check(engine, conversations(20))
    engine.reset()
    assert check(engine, [prompt])[1] == 0


# --- Order ---


NOTICED_S = 0.1  # a step without its waits is faster, on a busy machine too


def check_with_delays(engine, monkeypatch, direction, delay_s=0.004):
    """Serve prompts while the transfers of one direction lag behind the steps."""
    stream = getattr(worker_of(engine).cache.engine, f"{direction}_stream")
    build = engine.scheduler.build_connector_meta

    def delayed(output):
        metadata = build(output)
        if metadata.step.loads or metadata.step.saves:
            stream.call(lambda: time.sleep(delay_s))
        return metadata

    monkeypatch.setattr(engine.scheduler, "build_connector_meta", delayed)
    return check(engine, conversations(24))[1]


@GROUPS
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("direction", ["save", "load"])
def test_slow_transfers(make, monkeypatch, direction, layerwise, model):
    engine = make({**HOST, "layerwise": layerwise}, **model)
    assert check_with_delays(engine, monkeypatch, direction) > 60
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("direction", "waits"),
    [("save", ["begin"]), ("load", ["wait_for_layer", "finish_loads"])],
)  # fmt: skip
def test_without_its_waits_slow_transfers_are_noticed(make, monkeypatch, direction, waits):
    engine = make({**HOST, "layerwise": True})
    for name in waits:
        monkeypatch.setattr(worker_of(engine), name, lambda *_: None)
    with pytest.raises(AssertionError):
        check_with_delays(engine, monkeypatch, direction, NOTICED_S)


def test_without_its_wait_a_slow_save_of_a_window_is_noticed(make, monkeypatch):
    engine = make(HOST, windows=(None, 6), num_blocks=40)
    monkeypatch.setattr(worker_of(engine), "begin", lambda *_: None)
    with pytest.raises(AssertionError):
        check_with_delays(engine, monkeypatch, "save", NOTICED_S)


def test_slow_saves_of_blocks_that_are_zeroed(make, monkeypatch):
    """vLLM's newer model runner zeroes blocks before it calls the connector."""
    engine = make(HOST, windows=(None, 6), num_blocks=40, zeroes=True)
    assert check_with_delays(engine, monkeypatch, "save") > 60


def test_without_the_wait_the_saves_of_zeroed_blocks_are_noticed(make, monkeypatch):
    engine = make(HOST, windows=(None, 6), num_blocks=40, zeroes=True)
    worker_of(engine)._waits_for_saves = False
    with pytest.raises(AssertionError):
        check_with_delays(engine, monkeypatch, "save", NOTICED_S)


# --- Groups of layers ---


def forget(engine, group, index, prompt):
    """Let the tiers lose a block of a prompt."""
    from kvcupy.interop.vllm_connector.groups import number_of

    groups = engine.worker._groups
    numbers = [number_of(hash, b"") for hash in vllm.Request("any", prompt, 0).block_hashes]
    cache = worker_of(engine).cache
    key = groups.key(group, index, numbers)
    assert cache.match([key]).host == 1
    with cache._tiers[0].lock:
        cache._tiers[0].discard([key])


@pytest.mark.parametrize(
    ("group", "index", "found"),
    [
        (0, 8, 8),  # full attention needs all blocks
        (1, 8, 8),  # the window of 6 tokens needs the last two
        (1, 7, 7),
        (1, 6, 9),
        (1, 0, 9),
    ],
)
def test_a_prefix_is_found_as_far_as_every_group_can_restore_it(make, group, index, found):
    engine, prompt = make(HOST, windows=(None, 6), num_blocks=40), list(range(3, 40))
    check(engine, [prompt])
    check(engine, conversations(20))  # evict it from the device
    settle(engine)
    forget(engine, group, index, prompt)
    assert check(engine, [prompt])[1] == found * BLOCK_TOKENS


def test_blocks_behind_which_a_window_has_moved_are_not_saved(make):
    """Their places in vLLM's table have its block 0, or what another request wrote meanwhile."""
    engine, prompt = make(SMALL_HOST, windows=(None, 6), num_blocks=40), list(range(3, 40))
    saved = []
    start_saves = worker_of(engine).start_saves
    worker_of(engine).start_saves = lambda: (
        saved.extend(worker_of(engine)._step.saves.values()) or start_saves()
    )
    for _ in range(4):  # with hits on the device and in host memory
        check(engine, [prompt, prompt + [7] * 9], at_once=1)
        check(engine, conversations(6))
    assert saved and 0 not in saved


def test_workers_agree_on_a_prefix(make):
    """A worker that has more of it holds the blocks that windows need of the shorter one."""
    from kvcupy.interop.vllm_connector.steps import Answer, Found

    engine, prompt = make(HOST, windows=(None, 6), num_blocks=40, separate=True), [7] * 37
    check(engine, [prompt])
    settle(engine)
    scheduler, lookups = engine.scheduler._scheduler, worker_of(engine).lookups
    scheduler._num_workers = 2
    request = vllm.Request("request", prompt, 3)
    for other in (5, 3, 3):
        assert scheduler.match(request, 0) == (None, False)
        number, first, keys = scheduler._step.lookups.pop(request.request_id)
        found = lookups.find(request.request_id, first, keys)
        answers = [found, Found(("host",) * other)]
        scheduler.note_output(SimpleNamespace(), Answer({(request.request_id, number): answers}))
    assert scheduler.match(request, 0) == (3 * BLOCK_TOKENS, True)
    lookup = lookups.take(request.request_id, None)
    window = {(1, 1): 8, (1, 2): 9}
    assert lookup.numbers(engine.worker._groups, window).keys() == window.keys()
    lookups.release(lookup)


def groups_of(config, *specs):
    from kvcupy.interop.vllm_connector.groups import Groups

    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec)) for spec in specs]
    return Groups.of(config, SimpleNamespace(kv_cache_groups=groups, hash_block_size=4))


def test_engines_that_group_layers_differently_do_not_share_blocks(make):
    from kvcupy.interop.vllm_connector.groups import Groups

    config, layers = make(HOST).scheduler._vllm_config, ["a", "b", "c", "d"]
    described = set()
    for names in (
        (layers[:2], layers[2:]),
        (layers[::2], layers[1::2]),
        (layers[1::-1], layers[2:]),
    ):
        groups = [
            SimpleNamespace(kv_cache_spec=SimpleNamespace(sliding_window=window), layer_names=own)
            for window, own in zip((6, None), names, strict=True)
        ]
        described.add(Groups.of(config, SimpleNamespace(kv_cache_groups=groups)).describe())
    assert len(described) == 3


STATE = {"kind": "mamba", "mamba_cache_mode": "align", "block_size": BLOCK_TOKENS}


def test_a_state_is_saved_from_the_block_that_vllm_names(make):
    from kvcupy.interop.vllm_connector.scheduler import Scheduler

    config = make(HOST).scheduler._vllm_config
    groups = groups_of(config, {"block_size": BLOCK_TOKENS}, STATE)
    assert groups.needed(3) == [(0, 0), (0, 1), (0, 2), (1, 2)]
    scheduler = Scheduler(config, groups, layerwise=True, find_worker=lambda: None)
    request, tables = vllm.Request("request", list(range(3, 17)), 3), ([1, 2, 3, 5], [0, 0, 4, 6])
    name = request.request_id
    scheduler.allocated(request, tables, 0)
    states = [(1, 4, 12), (1, 9, 10)]  # the second lies within a block
    output = SimpleNamespace(
        num_scheduled_tokens={name: 14},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: tables,
            boundary_state_offloads={name: states, "finished": [(1, 7, 4)]},
        ),
    )
    step, numbers = scheduler.build(output), scheduler.numbers(request)
    full = {groups.key(0, i, numbers): block for i, block in enumerate((1, 2, 3))}
    assert step.saves == {**full, groups.key(1, 2, numbers): 4}


def test_groups_may_have_blocks_of_different_lengths(make):
    config = make(HOST).scheduler._vllm_config
    groups = groups_of(config, {"block_size": 4, "sliding_window": 6}, {"block_size": 8}, STATE)
    assert (groups.unit_tokens, groups.hash_tokens) == (8, 4)
    assert groups.needed(2) == [(1, 0), (0, 2), (0, 3), (1, 1), (2, 3)]
    numbers = [10, 20, 30, 40, 50]  # five blocks of four tokens
    assert [groups.num_blocks(number, numbers) for number in range(3)] == [5, 2, 5]
    assert groups.num_units(numbers) == 2
    keys = groups.keys(numbers, 0, 2)
    assert keys[0] == numbers[:4]
    assert len({key for own in keys for key in own}) == 10
    assert keys == [[groups.key(g, i, numbers) for i in range(n)] for g, n in enumerate((4, 2, 4))]
    assert groups.keys(numbers, 1, 2) == [keys[0][2:], keys[1][1:], keys[2][2:]]
    there = {(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 3)}
    missing = lambda g, own: next((i for i in own if (g, i) not in there), None)  # noqa: E731
    assert groups.longest(2, missing) == 2
    there.remove((2, 3))
    assert groups.longest(2, missing) == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "chunked_local_attention"},
        {"kind": "cross_attention"},
        {"kind": "mamba", "mamba_cache_mode": "all"},
        {"kind": "sliding_window", "sliding_window": 6, "prefix_cacheable": False},
    ],
    ids=lambda spec: spec["kind"],
)
def test_other_kinds_of_layers_are_refused(connector, spec):
    with pytest.raises(ValueError, match="expected layers with full attention, sliding windows or"):
        Engine(connector, HOST, spec=SimpleNamespace(**spec))


def test_groups_whose_pages_differ_are_refused(connector, monkeypatch):
    engine = Engine(connector, HOST, windows=(None, 6))
    engine.close()
    caches = {"a": np.zeros((24, 2, 8), np.float32), "b": np.zeros((24, 2, 6), np.float32)}
    with pytest.raises(ValueError, match="expected one stride and contiguous blocks"):
        engine.worker.register_kv_caches(caches)


def test_tensors_of_several_groups_share_pages(make):
    """As vLLM lays them out: two tensors of a state lie in a page of an attention layer."""
    from kvcupy.interop.vllm_connector.caches import wrap_caches

    groups = make(HOST, windows=(None, 6), num_blocks=40).worker._groups
    memory = np.zeros((2, 6, 64), np.uint8)  # two layers of six blocks
    caches = {
        "attention.0": memory[0].view(np.float32).reshape(6, 2, 8),
        "attention.1": memory[1].view(np.float32).reshape(12, 1, 8),  # with smaller blocks
        "state": [memory[1, :, :16].view(np.float32), memory[1, :, 16:40].view(np.float16)],
    }
    pool = wrap_caches(caches, 6, groups).pool
    assert (pool.num_layers, pool.num_pages, pool.page_bytes) == (2, 6, 128)
    pool.k(1)[5] = 7
    assert (memory[1, 5] == 7).all() and not memory[0].any() and not memory[1, :5].any()


# --- Tensor parallelism ---


# Blocks by the number of heads, "H", and a token's elements of a head.
DIVIDED = {
    "HND": (24, "H", BLOCK_TOKENS, 16),
    "NHD": (24, BLOCK_TOKENS, "H", 16),
    "stacked": (2, 24, BLOCK_TOKENS, "H", 8),
    "interleaved": (24, 2, BLOCK_TOKENS, "H", 8),
}


@pytest.mark.parametrize("layout", DIVIDED)
@pytest.mark.parametrize(("workers", "heads"), [(2, 6), (3, 6), (4, 2)])
def test_workers_that_divide_or_repeat_heads(make, workers, heads, layout):
    engine = make(HOST, shape=DIVIDED[layout], workers=workers, heads=heads)
    assert check(engine, conversations(30))[1] > 100
    settle(engine)
    assert len(engine.free) == len(engine.num_refs) - 1


def test_workers_that_all_have_the_latent(make):
    spec = SimpleNamespace(kind="mla_attention", num_kv_heads=1, head_size=24)
    engine = make(HOST, workers=2, spec=spec, shape=SHAPES["latent"])
    assert check(engine, conversations(30))[1] > 100


# --- Another format below the device ---


@pytest.mark.parametrize("shape", [*SHAPES, "two heads in one"])
def test_blocks_are_converted_on_the_way(make, shape):
    """float32 of whole numbers is exact in fp16, so tokens are equal."""
    sizes = {"HND": (2, 4), "NHD": (2, 4), "latent": (1, 24)}.get(shape, (2, 8))
    spec = SimpleNamespace(num_kv_heads=sizes[0], head_size=sizes[1])
    options = {**HOST, "encoding": "fp16"}
    own = SHAPES.get(shape, (24, 4, BLOCK_TOKENS, 8))
    engine = make(options, shape=own, device_type="cuda", spec=spec)
    cache = worker_of(engine).cache
    assert 2 * cache.host_pool.page_bytes == cache.device_pool.page_bytes
    assert check(engine, conversations(30))[1] > 100


def test_four_bit_blocks(make):
    spec = SimpleNamespace(num_kv_heads=2, head_size=32)
    options = {**HOST, "encoding": "nvfp4+hadamard"}
    engine = make(options, shape=(24, 2, BLOCK_TOKENS, 64), device_type="cuda", spec=spec)
    cache = worker_of(engine).cache
    rows = np.random.default_rng(0).normal(size=(2, BLOCK_TOKENS, 64)).astype(np.float32)
    for layer in vllm.LAYERS:
        engine.caches[0][layer][3] = rows
    cache.save([2**100], [3]).synchronize()
    with cache.hold([2**100]) as held:
        held.load([5]).synchronize()
    for layer in vllm.LAYERS:
        error = engine.caches[0][layer][5] - rows
        assert 0 < np.sqrt((error**2).mean() / (rows**2).mean()) < 0.15
    assert cache.host_pool.page_bytes * 7 < cache.device_pool.page_bytes


def test_a_format_needs_known_layouts(connector):
    with pytest.raises(ValueError, match="encoding: expected None on a CPU"):
        Engine(connector, {**HOST, "encoding": "fp16"})
    spec = SimpleNamespace(num_kv_heads=3, head_size=8)
    with pytest.raises(ValueError, match=r"kv_caches: expected model.layers.0.attn with K and V"):
        Engine(connector, {**HOST, "encoding": "fp16"}, device_type="cuda", spec=spec)


# --- Requests that end early ---


@GROUPS
@pytest.mark.parametrize("layerwise", [False, True])
def test_aborted_requests_give_everything_back(make, tmp_path, layerwise, model):
    options = {**SMALL_HOST, "stores": [f"file:{tmp_path}/kv"], "layerwise": layerwise}
    engine, rng = make(options, **model), random.Random(1)
    prompts = conversations(60)
    for i in range(0, 60, 6):
        requests = [engine.add(prompt) for prompt in prompts[i : i + 6]]
        for _ in range(rng.randrange(4)):
            engine.step()
        for request in requests[::2]:
            if request in engine.waiting or request in engine.running:
                engine.abort(request)
        rest = [r for r in requests if not r.status.name.endswith("ABORTED")]
        for request, output in zip(rest, engine.run(*rest), strict=True):
            assert output == tokens_alone(request.prompt_token_ids, 3)
    assert_nothing_held(engine)


# --- Failures ---


@GROUPS
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("separate", [False, True], ids=["one process", "two processes"])
def test_failed_loads_are_computed_again(make, monkeypatch, layerwise, separate, model):
    engine = make({**HOST, "layerwise": layerwise}, separate=separate, **model)
    rng, load, failed = random.Random(2), holds.HeldBlocks.load, []

    def fail_often(held, pages, **options):
        if rng.random() < 0.4:
            failed.append(held)
            raise kv.DeviceError("load: an injected failure")
        return load(held, pages, **options)

    monkeypatch.setattr(holds.HeldBlocks, "load", fail_often)
    check(engine, conversations(60))
    assert len(failed) > 5
    monkeypatch.setattr(holds.HeldBlocks, "load", load)
    check(engine, conversations(60))  # nothing that was computed of missing blocks was saved
    assert_nothing_held(engine)


def stores_of(engine):
    return [state.store for state in worker_of(engine).cache._tiers[0].store.states]


def test_a_store_that_fails(make, tmp_path, monkeypatch):
    engine, prompts = make({**SMALL_HOST, "stores": [f"file:{tmp_path}/kv"]}), conversations(40)
    check(engine, prompts[:20], flush=True)

    def fail(*arguments, **options):
        raise OSError(5, "an injected failure")

    for name in ("match", "get", "put"):
        monkeypatch.setattr(stores_of(engine)[0], name, fail)
    check(engine, prompts[20:])
    assert worker_of(engine).cache.stats()["store_errors"] > 0
    assert_nothing_held(engine)


def test_damaged_files_are_misses(make, tmp_path):
    options = {**SMALL_HOST, "stores": [f"file:{tmp_path}/kv"]}
    prompts = conversations(20)
    first = make(options)
    check(first, prompts, flush=True)
    first.close()
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    for path in files[::2]:
        content = np.fromfile(path, np.uint8)
        content[97::97] ^= 0x40
        content.tofile(path)
    assert len(files) > 10
    check(make(options), prompts)


def test_a_store_that_hangs(make, tmp_path, monkeypatch, caplog):
    """Requests wait for the deadline once, and the next ones not at all."""
    from kvcupy.interop.vllm_connector import lookups

    monkeypatch.setattr(lookups, "_FETCH_TIMEOUT_S", 0.2)
    release = threading.Event()
    engine = make({**HOST, "stores": [f"file:{tmp_path}/store"]})
    (store,) = stores_of(engine)
    try:
        for name in ("match", "get", "put"):
            monkeypatch.setattr(store, name, lambda *_, **__: release.wait() and 0)
        started = time.monotonic()
        check(engine, conversations(12), at_once=12)
        assert 0.2 < time.monotonic() - started < 5
        started = time.monotonic()
        check(engine, conversations(12, seed=1))
        assert time.monotonic() - started < 0.2 + 2
        assert "blocks were not fetched in time" in caplog.text
        release.set()
        assert_nothing_held(engine)
    finally:
        release.set()
        monkeypatch.undo()


def test_saves_do_not_wait_for_a_store(make, tmp_path, monkeypatch):
    """With host memory full of blocks that a slow store has not got, saves are dropped."""
    engine = make({**SMALL_HOST, "stores": [f"file:{tmp_path}/kv"]})
    release, (store,) = threading.Event(), stores_of(engine)
    put = store.put
    monkeypatch.setattr(store, "put", lambda *arguments: release.wait() and put(*arguments))
    started = time.monotonic()
    check(engine, conversations(20))
    assert time.monotonic() - started < 5
    release.set()


# --- Options ---


def test_without_vllm_the_error_says_what_to_install():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    for name in [n for n in sys.modules if n.startswith("kvcupy.interop.vllm_connector")]:
        del sys.modules[name]
    with pytest.raises(ImportError, match="KvcupyConnector needs vLLM: pip install"):
        importlib.import_module("kvcupy.interop.vllm_connector")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_byte": 1}, ValueError, "host_byte"),
        ({"host_bytes": 0}, ValueError, "host_bytes: expected at least 1"),
        ({"host_bytes": "1"}, TypeError, "host_bytes: expected int"),
        ({"stores": "file:/kv"}, TypeError, "stores: expected a list of URLs"),
        ({"stores": [{"path": "/kv"}]}, TypeError, "stores: expected URLs, or dicts"),
        ({"encoding": "nvfp5"}, (TypeError, ValueError), "nvfp5"),
        ({"host_bytes": 2**16, "encoding": "nvfp4"}, ValueError, "encoding"),
        ({"encryption_key": "00"}, ValueError, "encryption_key: expected 32 bytes"),
        ({"encryption_key": "0g" * 32}, ValueError, "encryption_key: expected 64 hexadecimal"),
        ({"encryption_key": "00" * 32}, ValueError, "encryption_key: expected None without stores"),
        ({"host_bytes": 512}, ValueError, "host_bytes: expected at least two blocks"),
    ],
)  # fmt: skip
def test_options_are_checked_by_name(connector, options, error, message):
    with pytest.raises(error, match=message):
        Engine(connector, options)


def test_a_key_encrypts_the_stores(make, tmp_path):
    pytest.importorskip("cryptography")
    (tmp_path / "key").write_text("ab" * 32)
    options = {**HOST, "stores": [f"file:{tmp_path}/kv"]}
    encrypted = {**options, "encryption_key": f"file:{tmp_path}/key"}
    prompts = conversations(8)
    first = make(encrypted)
    check(first, prompts)
    first.close()
    again = make({**encrypted, "encryption_key": "ab" * 32})
    assert check(again, prompts[-1:])[1] > 0
    again.close()
    assert check(make(options), prompts[-1:])[1] == 0
