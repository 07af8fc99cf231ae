"""Resets of the prefix cache below a stand-in for vLLM's engine: requests, steps, resets,
preemptions and aborts in every order. The weights change with each reset.

The stand-in compares the rows of each token with the current weights', unless vLLM itself has kept
older blocks.
"""

import itertools
import random

import numpy as np
import pytest
import vllm_stand_in as vllm
from test_vllm_connector import connector, make
from test_vllm_connector_events import Router
from vllm_stand_in import BLOCK_TOKENS, Engine, rows_of

__all__ = ["connector", "make"]  # fixtures

PROMPT, COUNT = [7, 8, 9, 10, 11, 12, 13, 14, 15], 4  # two blocks, and then a third
OPTIONS = {"host_bytes": 2**14, "layerwise": False}
ENGINES = {
    "one process": {"events": True},
    "two processes": {"separate": True},
    "late reports": {"separate": True, "late": 1, "policy": "fail"},
    "two workers": {"workers": 2},
    "window": {"windows": (None, 6), "num_blocks": 20},
}
# A lookup is pending, has arrived, is loaded, has been loaded; the request runs.
BEGINNINGS = ("step", "arrive", "step", "arrive", "step")
ACTIONS = (
    "step", "step of running", "arrive", "reset", "reset keeping", "reset in flight", "preempt",
    "add", "abort",
)  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """URLs of stores that have the prompt's blocks, as the first weights compute them."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        connector, urls, engines = vllm.install(patch), {}, []
        for name, options in ENGINES.items():
            urls[name] = f"file:{folder}/{len(urls)}"
            options = {**options, "num_blocks": 20}
            engines.append(Engine(connector, {**OPTIONS, "stores": [urls[name]]}, **options))
            engines[-1].generate(PROMPT, count=COUNT)
            for worker in engines[-1].workers:
                worker._worker.cache.flush()
                assert worker._worker.cache.stats()["store_put_bytes"] > 0
        yield urls
        for engine in engines:
            engine.close()


class Model:
    """An engine whose fetches and loads end when the test says so."""

    def __init__(self, connector, store, **options):
        from kvcupy.interop.vllm_connector import lookups

        lookups._FETCH_TIMEOUT_S = 1e6  # fetches wait for the test
        options = {"num_blocks": 12, **options}
        self.engine = engine = Engine(connector, {**OPTIONS, "stores": [store]}, **options)
        self.workers = [worker._worker for worker in engine.workers]
        self.scheduler = engine.scheduler._scheduler
        self.jobs, self.arrived, self.requests = [], set(), []
        self.router = Router(engine.windows)
        for worker in self.workers:
            worker.lookups._fetchers.submit = self.jobs.append
            finished = worker.finished
            worker.finished = lambda names, w=worker, f=finished: self.finished(w, f, names)

    def finished(self, worker, finished, names):
        """Report loads only once they have arrived."""
        flying = {
            name: loading for name, loading in worker._receiving.items()
            if loading.completion is not None and id(loading) not in self.arrived
        }  # fmt: skip
        for name in flying:
            del worker._receiving[name]
        received, failed = finished(names)
        worker._receiving.update(flying)
        loads = {r.request_id: r.loaded_in for r in self.requests}
        for name in received:  # they fail if a reset has come over them, to be computed again
            is_old = loads[name] < self.engine.num_resets
            assert (name in failed) == (is_old and worker._recomputes), "loads that fail"
        assert not worker._invalid
        return received, failed

    def act(self, action):
        engine = self.engine
        if action == "step":
            engine.step()
        elif action == "step of running":
            engine.step(admits=False)
        elif action == "arrive":
            while self.jobs:
                self.jobs.pop(0)()
            for worker in self.workers:
                for loading in worker._receiving.values():
                    if loading.completion is not None:
                        loading.completion.synchronize()
                    self.arrived.add(id(loading))
        elif action == "reset":
            self.reset()
        elif action == "reset keeping":
            engine.reset(preempt=False)
        elif action == "reset in flight":
            engine.step(self.reset)
        elif action == "preempt":
            if engine.running:
                engine.preempt(engine.running[-1])
        elif action == "add":
            self.requests.append(engine.add(PROMPT, COUNT))
        elif action == "abort":
            for request in self.unfinished[:1]:
                engine.abort(request)
        self.check()

    def reset(self):
        """Reset with all requests preempted, or if vLLM refuses that, with none."""
        loading = [r for r in self.engine.waiting if r.tables]
        self.engine.reset(preempt=not loading and not self.engine.held)

    @property
    def unfinished(self):
        return [r for r in self.requests if r in self.engine.waiting or r in self.engine.running]

    def check(self):
        """Compare every block that requests can find with what the weights compute."""
        from kvcupy.interop.vllm_connector.groups import number_of

        engine, present = self.engine, set()
        for worker in self.workers:
            tiers = worker.cache._tiers[0]
            for saving, _ in worker._saving:
                saving.synchronize()
            for request in self.requests:
                rows = rows_of(request.tokens, engine.weights)
                numbers = [
                    number_of(h, self.scheduler._generation.salt) for h in request.block_hashes
                ]
                for group, i in itertools.product(range(len(engine.windows)), range(len(numbers))):
                    key = engine.workers[0]._groups.key(group, i, numbers)
                    if (page := tiers.host.pages.get(key)) is None:
                        continue
                    present.add((group, request.block_hashes[i]))
                    found = np.asarray(worker.cache.host_pool.k(0))[page].reshape(-1)
                    found = found.view(np.float32).reshape(2, BLOCK_TOKENS, 8)
                    expected = rows[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
                    assert (found == np.array(expected)[:, None]).all(), "saved rows"
        if engine.scheduler._events is not None:
            engine.events += engine.scheduler.take_events()
            self.router.apply(engine.events)
            engine.events.clear()
            assert self.router.blocks["CPU"] <= present, "events"

    def finish(self):
        """Let everything arrive, and serve the prompt once more."""
        self.act("add")
        for _ in range(60):
            self.act("arrive")
            self.act("step")
            if not self.unfinished and not self.engine.held:
                break
        else:
            raise AssertionError("the engine does not get on")
        for _ in range(1 + self.engine.late):
            self.act("step")
        assert len(self.engine.free) == len(self.engine.num_refs) - 1
        for worker in self.workers:
            lookups = worker.lookups
            assert (lookups._num_held, lookups._lookups, lookups._claimed) == (0, {}, {})
            assert not (worker._asked or worker._receiving)

    def serve(self, actions):
        """Start as a new engine does, and do the actions."""
        try:
            self.engine.reset()
            self.engine.weights, self.scheduler._generation.salt = 0, b""
            self.requests.clear()
            self.act("step")
            self.act("add")
            stored = self.scheduler.numbers(self.requests[0])
            below = [worker.cache._tiers[0].store.states[0].store for worker in self.workers]
            assert all(all(store.contains(stored)) for store in below)
            for action in actions:
                self.act(action)
            self.finish()
        except BaseException as error:
            error.add_note(f"actions: {actions}")
            raise


@pytest.fixture
def model(connector, stores, request):
    """A model of an engine of `ENGINES`."""
    model = Model(connector, stores[request.param], **ENGINES[request.param])
    yield model
    model.engine.close()


def orders(length):
    """Every order of some actions with a reset, after each part of the beginning."""
    for n in range(len(BEGINNINGS) + 1):
        for actions in itertools.product(ACTIONS, repeat=length):
            if any(action.startswith("reset") for action in actions):
                yield (*BEGINNINGS[:n], *actions)


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ENGINES, indirect=True)
def test_every_order_of_few_actions(model, length):
    for actions in orders(length):
        model.serve(actions)


def serve_at_random(model, seeds):
    for seed in seeds:
        model.serve(random.Random(seed).choices(ACTIONS, [6, 1, 4, 1, 1, 1, 1, 2, 1], k=24))


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ENGINES, indirect=True)
def test_longer_orders(model, count):
    serve_at_random(model, range(count))


# --- Controls ---


def wrap(owner, name, wrapper):
    """Let `wrapper(method, *arguments)` take the place of a method."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: wrapper(method, *arguments))


def keep(attribute):
    """Return a change by which the next generation has what the last one knew."""

    def change(model):
        def clear(method):
            before = getattr(model.scheduler._generation, attribute)
            method()
            setattr(model.scheduler._generation, attribute, before)

        wrap(model.scheduler, "clear", clear)

    return change


def begin_without(attribute):
    """Return a change by which a worker keeps what it has of the last generation."""

    def change(model):
        for worker in model.workers:

            def begin(method, generation, worker=worker):
                before = getattr(worker, attribute)
                setattr(worker, attribute, {})
                method(generation)
                setattr(worker, attribute, before)

            wrap(worker, "_begin", begin)

    return change


def keep_lookups(model):
    for worker in model.workers:
        worker.lookups.begin = lambda generation: None


def answer_any_question(model):
    model.scheduler._questions = itertools.repeat(0)


def save_any_request(model):
    model.scheduler._current = model.scheduler._tracked.get


def save_behind_any_hit(model):
    class Written(dict):
        def get(self, block, default):
            return model.scheduler._generation.number

    model.scheduler._written = Written()


def keep_events(model):
    model.engine.scheduler._events.clear = lambda: None


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("one process", keep("salt")),
        ("two processes", keep("salt")),
        ("one process", keep("numbers")),
        ("two processes", keep("questions")),
        ("late reports", answer_any_question),
        ("two processes", begin_without("_asked")),
        ("two workers", begin_without("_receiving")),
        ("one process", keep_lookups),
        ("two processes", keep_lookups),
        ("one process", save_any_request),
        ("one process", save_behind_any_hit),
        ("window", save_behind_any_hit),
        ("one process", keep_events),
    ],
    indirect=["model"],
)  # fmt: skip
def test_the_model_notices_what_outlives_a_reset(model, change):
    change(model)
    with pytest.raises(AssertionError):
        for actions in orders(2):
            model.serve(actions)
        serve_at_random(model, range(100))
