"""The events of the connector for vLLM, as a router applies them."""

import vllm_stand_in as vllm
from test_vllm_connector import (
    GROUPS,
    HOST,
    SMALL_HOST,
    check,
    connector,
    conversations,
    make,
    worker_of,
)
from vllm_stand_in import BLOCK_TOKENS

__all__ = ["connector", "make"]  # fixtures

PROMPTS = conversations(40)


class Router:
    """What is known of an engine that has published events; each must be true by itself."""

    def __init__(self, windows=(None,)):
        self.windows = windows
        self.blocks = {"CPU": set()}
        self.num_stored = self.num_removed = 0

    def apply(self, events):
        for event in events:
            known = self.blocks[event.medium]
            blocks = {(event.group_idx, hash) for hash in event.block_hashes}
            if isinstance(event, vllm.BlockRemoved):
                assert known.issuperset(blocks)
                known.difference_update(blocks)
                self.num_removed += len(event.block_hashes)
                continue
            assert known.isdisjoint(blocks)
            known.update(blocks)
            self.num_stored += len(event.block_hashes)
            self.check_stored(event)
        return self

    def check_stored(self, event):
        assert event.block_size == BLOCK_TOKENS
        window = self.windows[event.group_idx]
        kind = "full_attention" if window is None else "sliding_window"
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (kind, window)
        assert (event.parent_block_hash, event.token_ids) == (None, [])


def hashes_of(prompts, salt="", num_groups=1):
    """Blocks of prompts and answers by group, by the number that the tiers have for each."""
    from kvcupy.interop.vllm_connector.groups import _mask, number_of

    found = {}
    for prompt in prompts:
        tokens = prompt + vllm.tokens_alone(prompt, 3)
        for hash in vllm.Request("any", tokens, 0, salt=salt).block_hashes:
            for group in range(num_groups):
                found[number_of(hash, b"") ^ _mask(group)] = (group, hash)
    return found


def in_tiers(engine, prompts):
    """The blocks that host memory has, by medium."""
    names = hashes_of(prompts, num_groups=len(engine.windows))
    tiers = worker_of(engine).cache._tiers[0]
    return {"CPU": {names[n] for n in tiers.host.pages}}


def with_store(tmp_path):
    return {**SMALL_HOST, "stores": [f"file:{tmp_path}/kv"]}


@GROUPS
def test_a_router_knows_the_blocks_of_host_memory(make, tmp_path, model):
    engine = make(with_store(tmp_path), events=True, **model)
    router = Router(engine.windows)
    for i in range(0, len(PROMPTS), 4):
        check(engine, PROMPTS[i : i + 4], flush=True)
        engine.step()
        router.apply(engine.events)
        engine.events.clear()
        assert router.blocks == in_tiers(engine, PROMPTS)
    assert router.num_removed > 50
    assert all(router.blocks.values())


def test_blocks_of_an_earlier_engine_are_announced_when_they_are_used(make, tmp_path):
    options = with_store(tmp_path)
    first = make(options)
    check(first, PROMPTS, flush=True)
    first.close()
    second = make(options, events=True)
    second.step()
    assert second.events == []
    prompt = PROMPTS[-1]
    assert check(second, [prompt])[1] > 0
    second.step()
    known = Router().apply(second.events).blocks
    names = set(hashes_of([prompt]).values())
    expected = in_tiers(second, PROMPTS)
    assert known == {medium: blocks & names for medium, blocks in expected.items()}
    assert known["CPU"]


def test_blocks_of_a_salted_prompt_have_its_hashes(make):
    engine = make(HOST, events=True)
    engine.run(engine.add(PROMPTS[0], salt="tenant"))
    engine.step()
    blocks = Router().apply(engine.events).blocks
    names = hashes_of([PROMPTS[0]], "tenant")
    assert blocks["CPU"] == {names[n] for n in worker_of(engine).cache._tiers[0].host.pages}


def test_a_reset_removes_every_block(make, tmp_path):
    engine = make(with_store(tmp_path), events=True)
    check(engine, PROMPTS, flush=True)
    engine.reset()
    engine.step()
    router = Router().apply(engine.events)
    assert router.num_stored == router.num_removed > 0
    check(engine, PROMPTS[:1])
    engine.step()
    assert len(Router().apply(engine.events).blocks["CPU"]) > 0


def test_only_blocks_of_tiers_are_remembered(make, monkeypatch):
    engine = make(SMALL_HOST, events=True)
    from kvcupy.interop.vllm_connector import scheduler

    monkeypatch.setattr(scheduler, "_MAX_ABSENT", most := 100)
    prompts = conversations(120)
    check(engine, prompts)
    engine.step()
    cache, named = worker_of(engine).cache, engine.scheduler._events._names
    assert len(named) <= 2 * cache.host_pool.num_pages + most < len(hashes_of(prompts))
    assert Router().apply(engine.events).blocks == in_tiers(engine, prompts)


def test_blocks_that_are_not_saved_are_forgotten(make, monkeypatch):
    engine = make(HOST, events=True)
    from kvcupy.interop.vllm_connector import scheduler

    monkeypatch.setattr(scheduler, "_MAX_ABSENT", 20)
    monkeypatch.setattr(worker_of(engine), "start_saves", lambda: None)
    check(engine, PROMPTS)
    assert len(engine.scheduler._events._names) == 20
    assert engine.events == []


def test_nothing_is_recorded_unless_events_are_enabled(make):
    engine = make(HOST)
    check(engine, PROMPTS[:4])
    assert engine.events == []
    assert not worker_of(engine).cache._tiers[0].listeners


def test_a_worker_in_another_process_publishes_nothing_and_says_so(make, caplog):
    engine = make(HOST, separate=True, events=True)
    check(engine, PROMPTS[:4])
    assert engine.events == []
    assert caplog.text.count("KV events of host memory need one worker") == 1
