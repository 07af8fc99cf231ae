"""`PagedKVCache`: whatever raises names what is wrong, and leaves all as it was, bit for bit.

Calls of steps, trees and sequences here; arguments of attention, and what a step forbids, in
test_paged_refusals.py.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from paged_cases import BINARY, Twin, rope_of
from paged_snapshot import snapshot

import kvcupy as kv
from kvcupy.arrays import ArrayView, view

# What is looked at is the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

BOTH = (TypeError, ValueError)


def crowd(device, **options):
    """A parent and its fork, which shares a partial page; one with a tree, one slid, one empty."""
    twin = Twin(device, **{"max_batch_tokens": 40, "rope": rope_of(8, 64), **options})
    twin.prefill("a", 12)
    twin.fork("a", "b")
    twin.pop("b", 3)
    twin.prefill("tree", 5)
    twin.step(["tree"], [7], [BINARY])
    twin.add("slid", "empty")
    twin.slide("slid", 5, 1)
    twin.step(["slid"], [15])
    return twin


def in_step(twin, call, error, name=None):
    """Assert that a call raises, names the argument, and changes nothing that can be seen.

    In a step that has begun lengths are those of the step.
    """
    names = [*twin.model.sequences]
    before = snapshot(twin.cache, names)
    with pytest.raises(error) as caught:
        call(twin.cache)
    if name is not None:
        assert re.search(rf"\b({name})\b", str(caught.value)), f"{name} not in {caught.value}"
    assert snapshot(twin.cache, names) == before
    return caught.value


def unchanged(twin, call, error, name=None):
    """Do as `in_step` does, outside of one, and compare with the model."""
    raised = in_step(twin, call, error, name)
    twin.check()
    return raised


def goes_on(twin):
    """Steps that follow are right: nothing was left half done."""
    twin.commit(["tree"], [4])
    twin.step(["b", "slid", "tree", "a", "empty"], [2, 1, 3, 1, 4])


# --- Refused calls: what is wrong, the call, the error, what the message names ---


def begin(seqs, append_lens, *tree):
    options = {"token_tree": tree[0]} if tree else {}
    return lambda c: c.begin_forward(seqs, append_lens, **options)


# fmt: off
BEGINS = [
    ("begin unknown", begin(["a", "who"], [1, 1]), kv.UnknownSequence, "who"),
    ("begin unknown first", begin(["who", "a"], [1, 1]), kv.UnknownSequence, "who"),
    ("twice", begin(["a", "b", "a"], [1, 2, 3]), ValueError, "seqs"),
    ("none", begin([], []), ValueError, "seqs|append_lens"),
    ("fewer lengths", begin(["a", "b"], [1]), ValueError, "append_lens|seqs"),
    ("more lengths", begin(["a"], [1, 1]), ValueError, "append_lens|seqs"),
    ("zero", begin(["a", "b"], [3, 0]), ValueError, "append_lens"),
    ("negative", begin(["a", "b"], [3, -1]), ValueError, "append_lens"),
    ("fractional", begin(["a"], [1.5]), BOTH, "append_lens"),
    ("bool", begin(["a"], [True]), BOTH, "append_lens"),
    ("text", begin(["a"], ["1"]), BOTH, "append_lens"),
    ("too many", begin(["a", "b"], [20, 21]), ValueError, "append_lens"),
    ("too many alone", begin(["a"], [41]), ValueError, "append_lens"),
    ("tree pending", begin(["a", "tree"], [1, 1]), ValueError, "token_tree"),
    ("entry missing", begin(["a", "tree"], [1, 1], [[-1], None]), ValueError, "token_tree"),
    ("fewer entries", begin(["a", "b"], [1, 1], [[-1]]), ValueError, "token_tree"),
    ("more entries", begin(["a"], [1], [[-1], [-1]]), ValueError, "token_tree"),
    ("short tree", begin(["a", "b"], [1, 3], [None, [-1, 0]]), ValueError, "token_tree"),
    ("long tree", begin(["a"], [3], [[-1, 0, 1, 2]]), ValueError, "token_tree"),
    ("empty tree", begin(["a"], [1], [[]]), ValueError, "token_tree"),
    ("own parent", begin(["b", "a"], [1, 3], [None, [-1, 1, 0]]), ValueError, "token_tree"),
    ("parent after child", begin(["a"], [3], [[-1, 2, 0]]), ValueError, "token_tree"),
    ("parent below -1", begin(["a"], [3], [[-1, 0, -2]]), ValueError, "token_tree"),
    ("own parent, later round", begin(["tree"], [2], [[6, 8]]), ValueError, "token_tree"),
    ("parent past the round", begin(["tree"], [2], [[7, 0]]), ValueError, "token_tree"),
    ("fractional parent", begin(["a"], [2], [[-1, 0.5]]), BOTH, "token_tree"),
    ("tree is a number", begin(["a"], [1], [0]), BOTH, "token_tree"),
]

UNKNOWN = [
    ("remove unknown", lambda c: c.remove_sequence("who"), kv.UnknownSequence, "who"),
    ("fork unknown", lambda c: c.fork_sequence("who", "new"), kv.UnknownSequence, "who"),
    ("pop unknown", lambda c: c.pop_tokens("who", 0), kv.UnknownSequence, "who"),
    ("length unknown", lambda c: c.sequence_length("who"), kv.UnknownSequence, "who"),
    ("commit unknown", lambda c: c.commit_token_tree(["tree", "who"], [0, 0]), kv.UnknownSequence,
     "who"),
    ("window unknown", lambda c: c.enable_sliding_window("who", 4), kv.UnknownSequence, "who"),
    ("get unknown", lambda c: c.get_kv("who", 0, 0), kv.UnknownSequence, "who"),
    ("set unknown", lambda c: c.set_kv("who", 0, *c.get_kv("a", 0, 2)), kv.UnknownSequence, "who"),
    ("save unknown", lambda c: c.save_sequence("who", "never written"), kv.UnknownSequence, "who"),
]

SEQUENCES = [
    ("add known", lambda c: c.add_sequence("a"), ValueError, "seq"),
    ("add unhashable", lambda c: c.add_sequence([1]), TypeError, "seq"),
    ("fork to known", lambda c: c.fork_sequence("a", "b"), ValueError, "child"),
    ("fork to itself", lambda c: c.fork_sequence("a", "a"), ValueError, "child"),
    ("fork below 0", lambda c: c.fork_sequence("a", "new", -1), ValueError, "at"),
    ("fork past the end", lambda c: c.fork_sequence("a", "new", 13), ValueError, "at"),
    ("fork at a fraction", lambda c: c.fork_sequence("a", "new", 1.0), TypeError, "at"),
    ("fork of a tree", lambda c: c.fork_sequence("tree", "new"), ValueError, "parent"),
    ("fork of a tree's root", lambda c: c.fork_sequence("tree", "new", 3), ValueError, "parent"),
    ("pop below 0", lambda c: c.pop_tokens("a", -1), ValueError, "n"),
    ("pop past the start", lambda c: c.pop_tokens("a", 13), ValueError, "n"),
    ("pop a fraction", lambda c: c.pop_tokens("a", 1.0), TypeError, "n"),
    ("pop past a slid start", lambda c: c.pop_tokens("slid", 7), ValueError, "n"),
    ("pop of a tree", lambda c: c.pop_tokens("tree", 1), ValueError, "seq"),
    ("window 0", lambda c: c.enable_sliding_window("a", 0), ValueError, "window"),
    ("sinks below 0", lambda c: c.enable_sliding_window("a", 4, -1), ValueError, "sink_tokens"),
    ("only sinks", lambda c: c.enable_sliding_window("a", 0, 4), ValueError, "window"),
    ("window a fraction", lambda c: c.enable_sliding_window("a", 4.5), TypeError, "window"),
    ("other sinks", lambda c: c.enable_sliding_window("slid", 4, 2), ValueError, "sink_tokens"),
    ("get backwards", lambda c: c.get_kv("a", 5, 3), ValueError, "start|stop"),
    ("get below 0", lambda c: c.get_kv("a", -1, 3), ValueError, "start"),
    ("get from a fraction", lambda c: c.get_kv("a", 1.0, 3), TypeError, "start"),
    ("get to a fraction", lambda c: c.get_kv("a", 1, 3.0), TypeError, "stop"),
    ("get past the end", lambda c: c.get_kv("a", 0, 13), ValueError, "stop"),
    ("get past a slid end", lambda c: c.get_kv("slid", 0, 7), ValueError, "stop"),
    ("get no format", lambda c: c.get_kv("a", 0, 3, dtype="int64"), ValueError, "dtype"),
    ("length unhashable", lambda c: c.sequence_length([1]), TypeError, "seq"),
]
# fmt: on


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [pytest.param(*row, id=what) for what, *row in BEGINS + UNKNOWN + SEQUENCES],
)
def test_refused(device, call, error, name):
    twin = crowd(device)
    unchanged(twin, call, error, name)
    assert "new" not in twin.cache
    goes_on(twin)


def test_unknown_sequences():
    """`UnknownSequence` is a KeyError and a KvcupyError."""
    assert issubclass(kv.UnknownSequence, KeyError)
    assert issubclass(kv.UnknownSequence, kv.KvcupyError)


@pytest.mark.parametrize("seqs", [["b", "a"], ["a", "b"]])
def test_a_full_cache(device, seqs):
    """Among others the first of a step fits, and takes nothing all the same."""
    twin = crowd(device, num_pages=11)
    free = twin.cache.num_available_pages
    assert free == 2
    unchanged(twin, lambda cache: cache.begin_forward(seqs, [9, 9]), kv.CacheFull)
    unchanged(twin, lambda cache: cache.begin_forward(["a"], [9]), kv.CacheFull)
    twin.step(["a"], [8])
    unchanged(twin, lambda cache: cache.begin_forward(["b"], [1]), kv.CacheFull)  # a copy
    unchanged(twin, lambda cache: cache.fork_sequence("a", "new", 7), kv.CacheFull)
    assert "new" not in twin.cache
    shared = twin.cache.get_kv("a", 0, 1)
    unchanged(twin, lambda cache: cache.set_kv("b", 0, *shared), kv.CacheFull)
    unchanged(
        twin, lambda cache: cache.begin_forward(["tree"], [9], token_tree=[[-1] * 9]), kv.CacheFull
    )
    twin.remove("a")
    goes = twin.step(["b"], [4])
    assert goes


def test_two_long_appends(device):
    """Three pages of 16 and twice 40 tokens: neither sequence is longer, and no page is gone."""
    twin = Twin(device, page_size=16, num_pages=3, num_layers=1)
    twin.add("a", "b")
    unchanged(twin, lambda cache: cache.begin_forward(["a", "b"], [40, 40]), kv.CacheFull)
    assert twin.lengths() == {"a": 0, "b": 0} and twin.cache.num_available_pages == 3
    twin.step("ab", [32, 16])


def test_commits_after_a_refused_step(device):
    """A refused step does not change how many nodes are pending."""
    twin = crowd(device)
    for lens in ([5], [1]):
        unchanged(twin, lambda cache, lens=lens: cache.begin_forward(["tree"], lens), ValueError)
    twin.commit(["tree"], [6])
    assert twin.cache.sequence_length("tree") == 8
    twin.step(["tree"], [1])


# --- commit_token_tree ---

COMMITS = {
    "no tree": ((["tree", "a"], [0, 0]), ValueError, "seqs"),
    "empty": ((["empty"], [-1]), ValueError, "seqs"),
    "twice": ((["tree", "tree"], [0, 0]), ValueError, "seqs"),
    "fewer leaves": ((["tree"], []), ValueError, "leaves|seqs"),
    "more leaves": ((["tree"], [0, 1]), ValueError, "leaves|seqs"),
    "leaf past the end": ((["tree"], [7]), ValueError, "leaves"),
    "leaf below -1": ((["tree"], [-2]), ValueError, "leaves"),
    "leaf a fraction": ((["tree"], [0.5]), BOTH, "leaves"),
    "second leaf": ((["tree", "other"], [3, 2]), ValueError, "leaves"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMITS)
def test_commit_token_tree(device, case):
    """The first of two is not committed if the second cannot be."""
    (seqs, leaves), error, name = COMMITS[case]
    twin = crowd(device)
    twin.prefill("other", 3)
    twin.step(["other"], [2], [[-1, 0]])
    unchanged(twin, lambda cache: cache.commit_token_tree(seqs, leaves), error, name)
    twin.commit(["other", "tree"], [1, 5])
    unchanged(twin, lambda cache: cache.commit_token_tree(["tree"], [0]), ValueError, "seqs")
    twin.step(["tree", "other", "b"], [1, 1, 1])


# --- set_kv: where it starts, keys, values, the error, what the message names ---


def rows(*shape, dtype=np.float32):
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return lambda device: device.asarray(values)


def gaps(device):
    return device.zeros((2, 2, 2, 16), "fp32")[..., ::2]


def elsewhere(device):
    here = view(GOOD(device))
    return ArrayView(here.pointer, here.shape, here.strides, here.format, "cuda:77")


GOOD = rows(2, 2, 2, 8)

# fmt: off
SETS = [
    (-1, GOOD, GOOD, ValueError, "start"),
    (11, GOOD, GOOD, ValueError, "start|k"),
    (13, rows(2, 0, 2, 8), rows(2, 0, 2, 8), ValueError, "start|k"),
    (1.0, GOOD, GOOD, TypeError, "start"),
    (0, rows(3, 2, 2, 8), GOOD, ValueError, "k"),
    (0, rows(2, 2, 3, 8), GOOD, ValueError, "k"),
    (0, rows(2, 2, 2, 9), GOOD, ValueError, "k"),
    (0, GOOD, rows(2, 2, 2, 9), ValueError, "v"),
    (0, GOOD, rows(2, 3, 2, 8), ValueError, "v|k"),
    (0, rows(2, 2, 16), rows(2, 2, 16), ValueError, "k"),
    (0, rows(2, 2, 2, 8, dtype=np.int64), rows(2, 2, 2, 8, dtype=np.int64), TypeError, "k"),
    *((3, *pair, error, name)
      for bad, error in [
        (None, TypeError),
        ("text", TypeError),
        (rows(2, 2, 2, 8, dtype=np.int64), TypeError),
        (rows(2, 2, 2, 8, dtype=np.float64), TypeError),
        (gaps, ValueError),
        (elsewhere, ValueError),
    ] for name, pair in [("k", (bad, GOOD)), ("v", (GOOD, bad))]),
]
# fmt: on


@pytest.mark.parametrize(("start", "key", "value", "error", "name"), SETS)
def test_set_kv(device, start, key, value, error, name):
    """Also where the pages are shared: none is copied."""
    twin = crowd(device)
    twin.fork("a", "sharer", 12)
    key, value = (make(device) if callable(make) else make for make in (key, value))
    unchanged(twin, lambda cache: cache.set_kv("a", start, key, value), error, name)
    goes_on(twin)


# --- The constructor ---

OPTIONS = {
    "num_layers": (0, -1, 1.5, True, None), "num_q_heads": (0, 3, 1.5, "4"),
    "num_kv_heads": (0, -2, 1.5), "head_dim": (0, 1.5), "num_pages": (0, -3, 2.0),
    "page_size": (0, 1.5), "dtype": ("fp12", 3, None), "rope_mode": ("outline", 1),
    "max_batch_tokens": (0, -1, 1.5), "v_head_dim": (0, 1.5), "slots_in_flight": (0, 1.5),
    "k_scale": (0.5,), "device": ("gpu",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in OPTIONS.items() for v in vs])
def test_options(name, value):
    good = {
        "num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_pages": 4,
        "device": "host",
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError)) as caught:
        kv.PagedKVCache(**{**good, name: value})
    assert re.search(rf"\b{name}\b", str(caught.value)), caught.value


@pytest.mark.parametrize("rope", [
    np.zeros((9, 10), np.float32), np.zeros((9, 7), np.float32), np.zeros((9, 8), np.float64),
    np.zeros(8, np.float32), np.zeros((0, 8), np.float32), "table",
])  # fmt: skip
def test_tables_that_do_not_fit(rope):
    with pytest.raises((TypeError, ValueError), match=r"\brope\b"):
        kv.PagedKVCache(
            num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, num_pages=4, rope=rope,
            device="host",
        )  # fmt: skip


def test_constructor_takes_keywords_alone():
    with pytest.raises(TypeError):
        kv.PagedKVCache(2, 4, 2, 8, 4)
