"""scripts/soak.py: what it reports, and that it notices what is wrong."""

from __future__ import annotations

import json
import mmap

import numpy as np
import pytest
from helpers import full_only

import kvcupy as kv
from kvcupy.cache.hazards import CopiedPages
from kvcupy.cache.paged.moves import PageMover
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.paged.states import States
from kvcupy.cache.pages import PageAllocator
from kvcupy.cache.tiered.holds import HeldBlocks
from kvcupy.cache.tiered.leases import Lease
from kvcupy.ops import call

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")


def soak(device_name, *arguments, **options):
    import soak

    return soak.main(["--device", device_name, *map(str, arguments)], **options)


@pytest.fixture
def few_plans(monkeypatch):
    """Let the warm-up be over soon: it takes until no more plans are kept."""
    call.forget()
    monkeypatch.setattr(call, "_MAX_PLANS", 60)


@pytest.fixture
def same_memory(monkeypatch):
    """Report the same resident memory in all samples: in a process that also runs other tests it
    depends on what they left and on memory pressure. Threads, files and Python's blocks do not."""
    import soak as script

    sample = script.sample
    monkeypatch.setattr(script, "sample", lambda: {**sample(), "rss_bytes": 50 << 20})


def test_it_reports_what_was_done_and_held(device_name, tmp_path, capsys, few_plans, same_memory):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "soak.json", tmp_path / "new" / "soak.png"
    assert soak(device_name, "--steps", 420, "--seed", 3, "--json", path, "--plot", picture) == 0
    report = json.loads(path.read_text())
    assert report["device"] == kv.device(device_name).name and report["seed"] == 3
    assert report["steps"] == sum(s["counts"]["steps"] for s in report["servers"].values()) == 420
    for name, server in report["servers"].items():
        counts = server["counts"]
        for what in ("audits", "rows compared", "outputs compared", "launched graphs",
                     "prefix hits", "forked", "trees committed", "offloaded", "onboarded",
                     "preempted, to be recomputed", "finished"):  # fmt: skip
            assert counts[what] > 0, f"{name}: {what}"
        assert server["blocks"]["host_hits"] > 0 and server["blocks"]["failed_loads"] == 0
    assert report["warm_up_steps"] < 300 and report["grown"].keys() == report["slack"].keys()
    last = report["at_the_end"]
    assert last["step"] == 420 and 0 < last["device_pages"] <= report["sizes"]["device_pages"]
    assert last["disk_bytes"] > 0 and picture.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "420 steps" in printed and "prefix hits" in printed and "rss bytes" in printed


def test_memory_that_grows_is_noticed(device_name, capsys, few_plans):
    kept = []

    def keep():
        """Map new memory: the heap's may have been resident before."""
        kept.append(mmap.mmap(-1, 320_000))
        kept[-1].write(b"1" * 320_000)

    assert soak(device_name, "--steps", 300, after_step=keep) == 1
    assert "rss_bytes grew by" in capsys.readouterr().err


def test_a_shared_store_below_the_tiers(device_name, tmp_path, few_plans, same_memory, monkeypatch):
    import soaking.server

    monkeypatch.setattr(soaking.server, "HOST_PAGES", 16)  # so that blocks are evicted soon
    path = tmp_path / "soak.json"
    assert soak(device_name, "--steps", 240, "--shared", "--json", path) == 0
    servers = json.loads(path.read_text())["servers"].values()
    assert sum(server["blocks"]["shared_hits"] for server in servers) > 0
    assert [server["blocks"]["shared_errors"] for server in servers] == [0, 0, 0]


def test_a_past(device_name, tmp_path, few_plans, same_memory, monkeypatch):
    import soak as script

    monkeypatch.setattr(script, "VARIANTS", ())  # that server alone
    path = tmp_path / "soak.json"
    assert soak(device_name, "--steps", 160, "--past", "--json", path) == 0
    report = json.loads(path.read_text())
    counts = report["servers"]["past"]["counts"]
    assert counts["most pages of the past"] > 16 and report["past"]
    for what in ("rows compared", "outputs compared", "launched graphs", "trees committed",
                 "steps taken back", "offloaded", "onboarded"):  # fmt: skip
        assert counts[what] > 0, what


def test_groups_of_layers(device_name, tmp_path, few_plans, same_memory, monkeypatch):
    import soak as script

    monkeypatch.setattr(script, "VARIANTS", ())  # that server alone
    path = tmp_path / "soak.json"
    assert soak(device_name, "--steps", 400, "--mixed", "--json", path) == 0
    report = json.loads(path.read_text())
    counts, blocks = (report["servers"]["mixed"][name] for name in ("counts", "blocks"))
    assert report["mixed"] and report["sizes"]["disk_blocks"] > 0
    for what in ("rows compared", "outputs compared", "prefix hits", "trees committed", "forked",
                 "steps taken back", "tokens popped", "preempted, to be recomputed"):  # fmt: skip
        assert counts[what] > 0, what
    assert blocks["host_hits"] > 0 and blocks["failed_loads"] == 0


def free_more(self, sequence, position):
    """Free the pages of a window a page too early."""
    free_unseen(self, sequence, position + self._page_size)


def copy_no_states(self, access, pairs, *sequences, **options):
    return copy_states(self, access, [], *sequences, **options)


free_unseen, copy_states = Sequences.free_unseen, States._copy
FORGOTTEN = {
    "windows": (Sequences, "free_unseen", free_more, "lacks pages that a window sees|off by"),
    "states of prefixes": (
        HeldBlocks, "load",
        lambda held, *_, **options: CopiedPages(held._shared.engine.device.stream()),
        "the state of sequence"),
    "states of forks": (States, "_copy", copy_no_states, "the state of sequence"),
    "slots": (States, "_free", lambda self, *slots: None, "state pages .* are allocated"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_group_that_is_forgotten_is_noticed(device, monkeypatch, tmp_path, name):
    from soaking.audit import Broken
    from soaking.mixed import MixedServer

    owner, attribute, wrong, message = FORGOTTEN[name]
    monkeypatch.setattr(owner, attribute, wrong)
    server = MixedServer(device, 5, tmp_path, check_every=1)
    with pytest.raises(Broken, match=message):
        for _ in range(400):
            server.step()


def test_it_runs_for_a_time(device_name, capsys, same_memory):
    assert soak(device_name, "--seconds", 0.3) == 0
    assert "too much" not in capsys.readouterr().err


def lose_pages(self, pages):
    """Free all but the last page."""
    free(self, np.asarray(pages)[:-1])


def hashes_of_lengths(token_ids, block_tokens):
    return block_hashes([0] * len(token_ids), block_tokens)


free, block_hashes = PageAllocator.free, kv.block_hashes
WRONG = {
    "pages are not copied": (PageMover, "copy_pages", lambda *_: None, "rows differ"),
    "tokens are not moved": (PageMover, "move_slots", lambda *_: None, "rows differ|off by"),
    "pages are lost": (PageAllocator, "free", lose_pages, "are allocated, and nobody has them"),
    "leases are kept": (Lease, "release", lambda self: None, "blocks leased"),
    "hashes of lengths alone": (kv, "block_hashes", hashes_of_lengths, "differ|off by"),
    "references are not dropped": (
        Sequences, "_release", lambda self, pages: None, "are referred to"),
}  # fmt: skip


def test_wrong_conversions_are_noticed(device, monkeypatch, tmp_path):
    from soaking.audit import Broken
    from soaking.contents import PAST
    from soaking.server import Server

    monkeypatch.setattr("kvcupy.cache.paged.moves.store_kv", lambda *_, **__: None)
    server = Server(device, PAST, 5, tmp_path, check_every=1)
    with pytest.raises(Broken, match=r"rows differ|off by"):
        for _ in range(200):
            server.step()


@pytest.mark.parametrize("name", [n if i < 3 else full_only(n) for i, n in enumerate(WRONG)])
def test_what_is_wrong_is_noticed(device, monkeypatch, tmp_path, name):
    from soaking.audit import Broken
    from soaking.contents import VARIANTS
    from soaking.server import Server

    owner, attribute, wrong, message = WRONG[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(Broken, match=message):
        server = Server(device, VARIANTS[0], 5, tmp_path, check_every=1)
        for _ in range(600):
            server.step()
