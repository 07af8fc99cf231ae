"""scripts/stress.py soak: what it reports, and that it notices what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers import full_only

import kvcupy as kv
from kvcupy.cache.paged.moves import PageMover
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.pages import PageAllocator
from kvcupy.cache.tiered.leases import Lease

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")


def test_it_reports_what_was_done(device_name, tmp_path, monkeypatch):
    import stress

    sample, path = stress.sample, tmp_path / "soak.json"
    # In a process that also runs other tests, memory depends on what those left.
    monkeypatch.setattr(stress, "sample", lambda: {**sample(), "rss_bytes": 50 << 20})
    arguments = ["soak", "--device", device_name, "--steps", "800", "--json", str(path)]
    assert stress.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["problems"] == [] and report["slack"].keys() >= report["grown"].keys()
    assert report["steps"] == sum(c["steps"] for c in report["counts"].values()) == 800
    for counts in report["counts"].values():
        for what in ("rows compared", "outputs compared", "prefix hits", "finished", "host_hits",
                     "onboarded", "forked", "preempted, to be recomputed"):  # fmt: skip
            assert counts[what] > 0, what
    assert report["counts"]["past"]["most pages of the past"] > 16


def test_what_grows_is_noticed(scripts_on_path):
    from workloads.audit import SLACK, beyond_slack, growth

    level = dict.fromkeys(SLACK, 10.0) | {"plans": 10**9}
    samples = [{**level, "step": n, "files": n, "threads": n / 100} for n in range(100)]
    (problem,) = beyond_slack(growth(samples))
    assert problem.startswith("files grew by 79 after the warm-up")


def lose_pages(self, pages, free=PageAllocator.free):
    """Free all but the last page."""
    free(self, np.asarray(pages)[:-1])


def hashes_of_lengths(token_ids, block_tokens, block_hashes=kv.block_hashes, **options):
    return block_hashes([0] * len(token_ids), block_tokens, **options)


FAULTS = {
    "pages are not copied": (PageMover, "copy_pages", lambda *_: None, "rows differ"),
    "pages are lost": (PageAllocator, "free", lose_pages, "are allocated, and nobody has them"),
    "references are not dropped": (
        Sequences, "_release", lambda self, pages: None, "are referred to"),
    "leases are kept": (Lease, "release", lambda self: None, "blocks leased"),
    "hashes of lengths alone": (kv, "block_hashes", hashes_of_lengths, "differ|off by"),
    "conversions": (kv.cache.paged.moves, "store_kv", lambda *_, **__: None, "rows differ|off by"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*list(FAULTS)[:3], *map(full_only, list(FAULTS)[3:5]),
                                  "conversions"])  # fmt: skip
def test_what_is_wrong_is_noticed(device, monkeypatch, name):
    """Controls: each takes one part of the package away."""
    from workloads.audit import Broken
    from workloads.soak import Soak

    owner, attribute, wrong, message = FAULTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    source = Soak(device, 5, ("past" if name == "conversions" else "bf16",), check_every=1)
    with pytest.raises(Broken, match=message):
        for _ in range(600):
            source.step()
