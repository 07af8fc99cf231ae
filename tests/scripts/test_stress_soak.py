"""scripts/stress.py soak: what it reports, and that it notices what is wrong."""

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
    import stress

    return stress.main(["soak", "--device", device_name, *map(str, arguments)], **options)


@pytest.fixture
def few_plans(monkeypatch):
    """Let the warm-up be over soon: it takes until no more plans are kept."""
    call.forget()
    monkeypatch.setattr(call, "_MAX_PLANS", 60)


@pytest.fixture
def same_memory(monkeypatch):
    """Report the same resident memory in all samples: in a process that also runs other tests it
    depends on what they left and on memory pressure. Threads, files and Python's blocks do not."""
    import stress

    sample = stress.sample
    monkeypatch.setattr(stress, "sample", lambda: {**sample(), "rss_bytes": 50 << 20})


EVENTS = {
    "bf16": ("launched graphs", "forked", "preempted, to be recomputed"),
    "fp8": ("launched graphs", "offloaded", "onboarded"),
    "mla": ("launched graphs", "preempted, to be recomputed"),
    "past": ("launched graphs", "steps taken back", "offloaded", "onboarded"),
    "groups": ("steps taken back", "tokens popped", "forked", "preempted, to be recomputed"),
}  # fmt: skip
"""What happens in a run of 1,200 steps, besides what happens to all."""


def test_it_reports_what_was_done_and_held(device_name, tmp_path, capsys, few_plans, same_memory):
    path = tmp_path / "soak.json"
    assert soak(device_name, "--steps", 1200, "--seed", 0, "--json", path) == 0
    report = json.loads(path.read_text())
    assert report["device"] == kv.device(device_name).name and report["seed"] == 0
    assert report["counts"].keys() == EVENTS.keys() and report["problems"] == []
    assert report["steps"] == sum(c["steps"] for c in report["counts"].values()) == 1200
    for name, events in EVENTS.items():
        for what in ("audits", "rows compared", "outputs compared", "prefix hits",
                     "trees committed", "finished", "host_hits", *events):  # fmt: skip
            assert report["counts"][name][what] > 0, f"{name}: {what}"
    assert report["counts"]["past"]["most pages of the past"] > 16
    assert report["warm_up_steps"] < 900 and report["grown"].keys() == report["slack"].keys()
    printed = capsys.readouterr().out
    assert "1,200 steps" in printed and "prefix hits" in printed and "rss bytes" in printed


def test_memory_that_grows_is_noticed(device_name, capsys, few_plans):
    kept = []

    def keep():
        """Map new memory: the heap's may have been resident before."""
        kept.append(mmap.mmap(-1, 320_000))
        kept[-1].write(b"1" * 320_000)

    arguments = ("--steps", 300, "--only", "bf16", "fp8", "mla")
    assert soak(device_name, *arguments, after_step=keep) == 1
    assert "rss_bytes grew by" in capsys.readouterr().err


def test_files_that_stay_open_are_noticed(device_name, capsys, few_plans, same_memory, tmp_path):
    kept = []
    (tmp_path / "f").touch()

    def keep():
        kept.append((tmp_path / "f").open())

    arguments = ("--steps", 300, "--only", "bf16", "fp8", "mla")
    assert soak(device_name, *arguments, after_step=keep) == 1
    for file in kept:
        file.close()
    assert "files grew by" in capsys.readouterr().err


def test_it_runs_for_a_time(device_name, capsys, same_memory):
    assert soak(device_name, "--seconds", 0.3) == 0
    assert "grew by" not in capsys.readouterr().err


def test_a_fault_is_the_exit_status(device_name, capsys, monkeypatch):
    monkeypatch.setattr(Sequences, "_release", lambda self, pages: None)
    assert soak(device_name, "--steps", 500, "--only", "bf16", "--seed", 5) == 1
    said = capsys.readouterr().err
    assert "stress: step " in said and ": bf16: pages " in said


def free_more(self, sequence, position):
    """Free the pages of a window a page too early."""
    free_unseen(self, sequence, position + self._page_size)


def copy_no_states(self, access, pairs, *sequences, **options):
    return copy_states(self, access, [], *sequences, **options)


def lose_pages(self, pages):
    """Free all but the last page."""
    free(self, np.asarray(pages)[:-1])


def hashes_of_lengths(token_ids, block_tokens, **options):
    return block_hashes([0] * len(token_ids), block_tokens, **options)


free, block_hashes = PageAllocator.free, kv.block_hashes
free_unseen, copy_states = Sequences.free_unseen, States._copy
WRONG = {
    "pages are not copied": (PageMover, "copy_pages", lambda *_: None, "rows differ"),
    "tokens are not moved": (PageMover, "move_slots", lambda *_: None, "rows differ|off by"),
    "pages are lost": (PageAllocator, "free", lose_pages, "are allocated, and nobody has them"),
    "leases are kept": (Lease, "release", lambda self: None, "blocks leased"),
    "hashes of lengths alone": (kv, "block_hashes", hashes_of_lengths, "differ|off by"),
    "references are not dropped": (
        Sequences, "_release", lambda self, pages: None, "are referred to"),
}  # fmt: skip
WRONG_PAST = {
    "conversions": (kv.cache.paged.moves, "store_kv", lambda *_, **__: None, "rows differ|off by"),
}  # fmt: skip
WRONG_GROUPS = {
    "windows": (Sequences, "free_unseen", free_more, "lacks pages that a window sees|off by"),
    "states of prefixes": (
        HeldBlocks, "load",
        lambda held, *_, **options: CopiedPages(held._tiers.engine.device.stream()),
        "the state of sequence"),
    "states of forks": (States, "_copy", copy_no_states, "the state of sequence"),
    "slots": (States, "_free", lambda self, *slots: None, "state pages .* are allocated"),
}  # fmt: skip
FAULTS = [
    *(("bf16", wrong) if i < 3 else full_only("bf16", wrong)
      for i, wrong in enumerate(WRONG.values())),
    *(("past", wrong) for wrong in WRONG_PAST.values()),
    *(("groups", wrong) for wrong in WRONG_GROUPS.values()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[*WRONG, *WRONG_PAST, *WRONG_GROUPS])
def test_what_is_wrong_is_noticed(device, monkeypatch, name, fault):
    """Controls: each takes one part of the package away."""
    from workloads.audit import Broken
    from workloads.soak import Soak

    owner, attribute, wrong, message = fault
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(Broken, match=message):
        source = Soak(device, 5, (name,), check_every=1)
        for _ in range(600):
            source.step()
