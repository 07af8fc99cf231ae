"""Leases, generations and quarantine: every state of a model, and the real classes beside it.

By default: two senders and two receivers with a page each, two offers, two pulls and one killed
process: 31,873 states over "nixl", 25,585 over "socket". `-m slow` enumerates seven larger
instances with 1,613,229 states: cut connections, READs that fail or flip bits, two pages, two pulls
of an offer, a third pull, two killed processes.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from functools import cache
from pathlib import Path

import lease_world
import pytest
from helpers import examples, without_collection
from lease_model import GUARDS, LIVENESS, LeaseModel
from lease_world import World
from state_space import StateSpace

from kvcupy.remote.migration import nixl, receiver, sender
from kvcupy.remote.migration.nixl import NixlEngine, _Reader, _Verification
from kvcupy.remote.migration.protocol import Channel
from kvcupy.remote.migration.receiver import PageReceiver
from kvcupy.remote.migration.sender import PageSender

RESULTS = Path(__file__).parents[2] / "scripts/results/lease_model.json"
INSTANCES = json.loads(RESULTS.read_text())
SMALL = {"senders": 1, "receivers": 1, "failures": 1}

# Sets of guards of which each alone prevents what happens without all of them: the kind of the
# violation (or of `LIVENESS`), and the instance.
CUTS = [
    (("sender_id", "generation", "token"), "older generation", {}),
    (("open_offers", "generation", "check"), "wrong bytes", {}),
    (("channels", "check"), "wrong bytes", {}),
    (("channels",), "wrong bytes", {"engine": "socket"}),
    (("num_pulls",), "too many pulls", {"receivers": 2}),
    (("written",), "late write", {}),
    (("is_ready",), "wrong bytes", {}),
    (("is_released",), "freed twice", {}),
    (("confirmation",), "bytes of another offer", {"crashes": 0}),
    (("checksum",), "wrong bytes", {"flips": 1}),
    (("read_failure", "checksum"), "wrong bytes", {}),
    (("confirming",), "older answer", {}),
    (("every_read",), "late landing", {"reads": 2}),
    (("quiet",), "late landing", {}),
    (("busy",), "late landing", {}),
    (("expiry",), "pages of senders, by their own steps", {}),
    (("check",), "pages of senders, by their own steps", {}),
    (("deadline",), "pages of receivers, by their own steps once nothing is in flight", {}),
    (("refusal", "deadline"), "all pages", {}),
]

# Defects of other libraries: the guards that prevent them here, and the kind of the violation.
PEERS = {
    "vLLM 52234: a stale reference is read after its blocks were used again": (
        ("confirmation",), "bytes of another offer",
    ),
    "vLLM 52234: what a failed READ left is served": (("read_failure", "checksum"), "wrong bytes"),
    "vLLM 50754: nobody hears of a transfer that failed": (("refusal", "deadline"), "all pages"),
    "vLLM 56104: the first of several failing READs releases the blocks": (
        ("every_read",), "late landing",
    ),
    "SGLang 24527: pages of an aborted pull are used again before it has ended": (
        ("busy",), "late landing",
    ),
}  # fmt: skip


def id_of(value):
    return "+".join(value) if type(value) is tuple else "" if type(value) is dict else value


def find(without, kind, **options):
    """Return the shortest path to a violation of a kind, without some guards; None if none is."""
    space = StateSpace(LeaseModel(without=without, **{**SMALL, **options}), until=kind)
    if kind in LIVENESS:
        return space.unable(*LIVENESS[kind])
    return space.counterexample and space.counterexample.path


@cache
def is_correct(**options):
    """Return whether no state of a small instance with all guards is wrong."""
    space = StateSpace(LeaseModel(**{**SMALL, **options}))
    return space.counterexample is None and not any(
        space.unable(*property_) for property_ in LIVENESS.values()
    )


def assert_correct(instance):
    with without_collection():
        space = StateSpace(LeaseModel(**INSTANCES["base"] | instance["options"]))
    assert space.counterexample is None, str(space.counterexample)
    for name, property_ in LIVENESS.items():
        path = space.unable(*property_)
        assert path is None, "\n".join((f"never free: {name}", *path))
    assert len(space) == instance["states"]


@pytest.mark.parametrize("instance", INSTANCES["default"], ids=str)
def test_no_state_is_wrong(instance):
    assert_correct(instance)


@pytest.mark.slow
@pytest.mark.parametrize("instance", INSTANCES["slow"], ids=str)
def test_no_state_is_wrong_in_larger_instances(instance):
    assert_correct(instance)


@pytest.mark.parametrize(("without", "kind", "options"), CUTS, ids=id_of)
def test_what_guards_prevent(without, kind, options):
    """And that each guard of several is enough."""
    path = find(without, kind, **options)
    assert path is not None
    print(*without, f"-> {kind}", *path, sep="\n    ")
    for guard in without if len(without) > 1 else ():
        others = set(without) - {guard}
        assert find(others, kind, **options) is None, f"{guard} does not help"
    assert is_correct(**options)


def test_every_guard_prevents_something():
    assert {guard for without, _, _ in CUTS for guard in without} == set(GUARDS)


@pytest.mark.parametrize("name", PEERS)
def test_defects_of_peers(name):
    without, kind = PEERS[name]
    (options,) = (cut[2] for cut in CUTS if cut[:2] == (without, kind))
    path = find(without, kind, **options)
    print(name, *path, sep="\n    ")
    if kind == "late landing":
        assert "frees" in path[-2] and "lands" in path[-1]


# --- The real classes ---


@pytest.fixture
def world(monkeypatch):
    """Make worlds, each of which is closed before the next."""
    monkeypatch.setattr(nixl, "Agent", lease_world.HeldAgent)
    waiting_for_done, worlds = {}, []
    receive = lease_world.noting(Channel.receive, waiting_for_done)
    monkeypatch.setattr(Channel, "receive", receive)
    monkeypatch.setattr(sender, "_ABORT_DELAY_S", 1e6)  # `World.abort` ends it
    monkeypatch.setattr(receiver, "_MAX_ATTEMPTS", LeaseModel().attempts)
    monkeypatch.setattr(receiver, "_RETRY_S", 0.0)

    def make(engine="nixl", seed=0, reads=1, **options):
        close()
        monkeypatch.setattr(nixl, "_READ_BYTES", 128 // reads)  # K and V have 64 each
        worlds.append(World(engine, seed, waiting_for_done, reads=reads, **options))
        return worlds[-1]

    def close():
        while worlds:
            worlds.pop().close()

    yield make
    close()


@pytest.mark.parametrize("engine", ["nixl", "socket"])
def test_the_real_classes_take_the_steps_of_the_model(engine, world):
    """In random orders, with the same pages, outcomes and messages after each step; in the end all
    pages are free."""
    actions = set()
    for seed in range(examples(200)):
        walking = world(
            engine, seed, reads=1 + seed % 2, num_pulls=1 + seed // 2 % 2,
            sender_pages=1 + seed // 4 % 2, offers=4, pulls=5, cuts=1, failures=1,
            secret=None if seed // 8 % 2 else lease_world.SECRET,
        )  # fmt: skip
        walking.walk(60)
        walking.follow(())
        actions |= walking.actions
    only = {"nixl": {"send"}, "socket": {"read_fails"}}[engine]
    assert lease_world.ACTIONS - actions == only


# What each guard is in the source, and the source without it. Time in `World` is abstract, so the
# deadline is tested elsewhere, with a clock.
SOURCES = {
    "sender_id": [(PageReceiver._connect, "channel.peer != ticket.sender_id", "False")],
    "open_offers": [(PageSender._end, "del self._offers[offer.number]", "pass")],
    "generation": [(PageSender._claim, "offer.generation == generation and", "")],
    "token": [(PageSender._claim, "hmac.compare_digest(offer.token, token)", "True")],
    "num_pulls": [
        (PageSender._claim, "offer.completed + len(offer.channels) >= offer.num_pulls", "False")
    ],
    "written": [(PageSender._settle, "None in offer.written and not self._closed", "False")],
    "is_ready": [(PageSender._is_ready, "return False", "return True")],
    "channels": [(PageSender._settle, "offer.channels or offer.num_readers", "False")],
    "is_released": [
        (PageSender._settle, " or offer.is_released", ""),
        (PageSender._settle, "offer.offered.prepared.clear()", "pass"),
        (PageSender._settle, "del offer.offered", "pass"),
    ],
    "expiry": [(PageSender._keep, "offer.expires <= now", "False")],
    "check": [(PageSender._check, "offer.ended:", "False:")],
    "refusal": [
        (PageSender._serve, "channel.refuse(failure.reason, str(error), time.monotonic() + 1)",
         "return True"),
    ],
    "confirmation": [
        (_Reader._end_read, "self._unconfirmed.append(read)",
         "self._num_confirmed += len(read.layers); self._task.arrived(0)"),
    ],
    "checksum": [(_Verification._compare, "self._digests.popleft() != expected", "False")],
    "read_failure": [(_Reader._end_read, "failure is not None", "False")],
    "confirming": [
        (PageReceiver._granted, "if channel.confirming:", "if False:"),
        (PageReceiver._granted, "is_confirming = channel.confirming", "pass"),
    ],
    "every_read": [(_Reader.pending, "list(self._begun)", "list(self._begun)[:1]")],
    "quiet": [(NixlEngine.quiet, "return ", "return True or ")],
    "busy": [
        (PageReceiver.pull, "self._pool.allocator._mark_busy(ordered, pull._landing)", "pass")
    ],
}  # fmt: skip


def remove(guard, monkeypatch):
    """Remove a guard from the real code."""
    for function, old, new in SOURCES[guard]:
        owner = inspect.getmodule(function)
        name, method = function.__qualname__.split(".")
        current = getattr(getattr(owner, name), method)
        source = getattr(current, "source", None) or textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{function.__qualname__} has changed: {guard}"
        code = source.replace(old, new)
        namespace = {}
        exec("from __future__ import annotations\n" + code, vars(owner), namespace)
        namespace[method].source = code
        monkeypatch.setattr(getattr(owner, name), method, namespace[method])


assert set(GUARDS) - set(SOURCES) == {"deadline"}
FOLLOWED = [cut for cut in CUTS if set(cut[0]) & set(SOURCES)]


@pytest.mark.parametrize("is_removed", [False, True], ids=["intact", "removed"])
@pytest.mark.parametrize(("without", "kind", "options"), FOLLOWED, ids=id_of)
def test_the_real_classes_have_the_guards(without, kind, options, is_removed, world, monkeypatch):
    """On the path to a violation they do what the model with all guards does. A copy of their
    source without the guards does not."""
    path = find(without, kind, **options)
    if is_removed:
        for guard in set(without) & set(SOURCES):
            remove(guard, monkeypatch)
    walking = world(**{**SMALL, **options})
    walking.pause_s = 0.005
    if not is_removed:
        walking.follow(path)
        return
    walking.patience_s, walking.pause_s = 0.1, 0.01
    with pytest.raises(AssertionError, match="expected"):
        walking.follow(path)
