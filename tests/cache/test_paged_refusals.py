"""`PagedKVCache`: whatever raises names what is wrong, and leaves all as it was, bit for bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers import from_values, to_device
from paged_cases import BINARY, Twin, rope_of, snapshot

import kvcupy as kv
from kvcupy.arrays import ArrayView, view

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

BOTH = (TypeError, ValueError)
F = np.float32


def crowd(device, **options):
    """A parent and its fork, which shares a partial page; two with trees, one slid, one empty."""
    twin = Twin(device, **{"max_batch_tokens": 40, "rope": rope_of(8, 64), **options})
    twin.prefill("a", 12)
    twin.fork("a", "b")
    twin.pop("b", 3)
    twin.prefill("tree", 5, "other", 3)
    twin.step(["tree", "other"], [7, 2], [BINARY, [-1, 0]])
    twin.add("slid", "empty")
    twin.slide("slid", 5, 1)
    twin.step(["slid"], [15])
    return twin


def in_step(twin, call, error, name=None):
    """Assert that a call raises, names the argument, and changes nothing that can be seen.

    In a step that has begun, lengths include its tokens.
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
    twin.commit(["other", "tree"], [1, 4])
    twin.step(["b", "slid", "tree", "a", "empty"], [2, 1, 3, 1, 4])


def rows(twin, count, heads=4, kv_heads=2, width=8, fmt="fp32"):
    arrays = (
        from_values(twin.rng.standard_normal((count, h, width)), fmt)
        for h in (heads, kv_heads, kv_heads)
    )
    return [to_device(twin.device, a) for a in arrays]


# --- Outside of a step: what is wrong, the call, the error, what the message names ---


def begin(seqs, append_lens, *tree):
    options = {"token_tree": tree[0]} if tree else {}
    return lambda c: c.begin_forward(seqs, append_lens, **options)


def commit(seqs, leaves):
    return lambda c: c.commit_token_tree(seqs, leaves)


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

COMMITS = [
    ("no tree", commit(["tree", "a"], [0, 0]), ValueError, "seqs"),
    ("an empty sequence", commit(["empty"], [-1]), ValueError, "seqs"),
    ("a tree twice", commit(["tree", "tree"], [0, 0]), ValueError, "seqs"),
    ("fewer leaves", commit(["tree"], []), ValueError, "leaves|seqs"),
    ("more leaves", commit(["tree"], [0, 1]), ValueError, "leaves|seqs"),
    ("leaf past the end", commit(["tree"], [7]), ValueError, "leaves"),
    ("leaf below -1", commit(["tree"], [-2]), ValueError, "leaves"),
    ("leaf a fraction", commit(["tree"], [0.5]), BOTH, "leaves"),
    ("second leaf", commit(["tree", "other"], [3, 2]), ValueError, "leaves"),
]

QKV = np.zeros((1, 8, 8), F)
NO_STEP = [
    ("attention", lambda c: c.attention(0, QKV[:, :4], QKV[:, :2], QKV[:, :2])),
    ("attention_qkv", lambda c: c.attention_qkv(0, QKV)),
    ("query_positions", lambda c: c.query_positions()),
    ("slot_mapping", lambda c: c.slot_mapping()),
    ("block_table", lambda c: c.block_table()),
    ("page_table_csr", lambda c: c.page_table_csr()),
    ("end_forward", lambda c: c.end_forward()),
]
NO_STEP = [(f"{what} without a step", call, kv.KvcupyError, None) for what, call in NO_STEP]
# fmt: on


@pytest.mark.parametrize("calls", [BEGINS, UNKNOWN, SEQUENCES, COMMITS, NO_STEP],
                         ids=["begins", "unknown", "sequences", "commits", "no step"])  # fmt: skip
def test_refused(device, calls):
    """Also after a step that was refused, which can be neither attended in nor ended."""
    twin = crowd(device)
    for what, call, error, name in calls:
        print(what)
        for _ in range(2):
            unchanged(twin, call, error, name)
            unchanged(twin, begin(["a", "a"], [1, 1]), ValueError, "seqs")
    assert "new" not in twin.cache
    goes_on(twin)
    unchanged(twin, commit(["tree"], [0]), ValueError, "seqs")


def test_unknown_sequences():
    """`UnknownSequence` is a KeyError and a KvcupyError."""
    assert issubclass(kv.UnknownSequence, KeyError)
    assert issubclass(kv.UnknownSequence, kv.KvcupyError)


@pytest.mark.parametrize("seqs", [["b", "a"], ["a", "b"]])
def test_a_full_cache(device, seqs):
    """Among others the first of a step fits, and takes nothing all the same."""
    twin = crowd(device, num_pages=13)
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


def made(*shape, dtype=np.float32):
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return lambda device: device.asarray(values)


def gaps(device):
    return device.zeros((2, 2, 2, 16), "fp32")[..., ::2]


def elsewhere(device):
    here = view(ROWS(device))
    return ArrayView(here.pointer, here.shape, here.strides, here.format, "cuda:77")


ROWS = made(2, 2, 2, 8)

# fmt: off
SETS = [
    (-1, ROWS, ROWS, ValueError, "start"),
    (11, ROWS, ROWS, ValueError, "start|k"),
    (13, made(2, 0, 2, 8), made(2, 0, 2, 8), ValueError, "start|k"),
    (1.0, ROWS, ROWS, TypeError, "start"),
    (0, made(3, 2, 2, 8), ROWS, ValueError, "k"),
    (0, made(2, 2, 3, 8), ROWS, ValueError, "k"),
    (0, made(2, 2, 2, 9), ROWS, ValueError, "k"),
    (0, ROWS, made(2, 2, 2, 9), ValueError, "v"),
    (0, ROWS, made(2, 3, 2, 8), ValueError, "v|k"),
    (0, made(2, 2, 16), made(2, 2, 16), ValueError, "k"),
    (0, made(2, 2, 2, 8, dtype=np.int64), made(2, 2, 2, 8, dtype=np.int64), TypeError, "k"),
    *((3, *pair, error, name)
      for bad, error in [
        (None, TypeError),
        ("text", TypeError),
        (made(2, 2, 2, 8, dtype=np.int64), TypeError),
        (made(2, 2, 2, 8, dtype=np.float64), TypeError),
        (gaps, ValueError),
        (elsewhere, ValueError),
    ] for name, pair in [("k", (bad, ROWS)), ("v", (ROWS, bad))]),
]
# fmt: on


def test_set_kv(device):
    """Also where the pages are shared: none is copied."""
    twin = crowd(device)
    twin.fork("a", "sharer", 12)
    for number, (start, key, value, error, name) in enumerate(SETS):
        print(f"row {number}")
        key, value = (make(device) if callable(make) else make for make in (key, value))
        unchanged(twin, lambda cache: cache.set_kv("a", start, key, value), error, name)  # noqa: B023
    goes_on(twin)


# --- Within a step of 4 tokens: the argument, its value, the error ---

# fmt: off
ARRAYS = [
    ("query", np.zeros((3, 4, 8), F), ValueError), ("key", np.zeros((3, 2, 8), F), ValueError),
    ("value", np.zeros((3, 2, 8), F), ValueError), ("query", np.zeros((4, 2, 8), F), ValueError),
    ("query", np.zeros((4, 4, 7), F), ValueError), ("query", np.zeros((4, 32), F), ValueError),
    ("key", np.zeros((4, 4, 8), F), ValueError), ("key", np.zeros((4, 2, 6), F), ValueError),
    ("value", np.zeros((4, 1, 8), F), ValueError), ("value", np.zeros((4, 2, 9), F), ValueError),
    ("query", np.zeros((4, 4, 8), np.float64), TypeError),
    ("key", np.zeros((4, 2, 8), np.int32), TypeError),
    ("value", np.zeros((4, 2, 8), np.float64), TypeError),
    ("query", None, TypeError), ("key", None, TypeError), ("value", [1.0], TypeError),
    ("out", np.zeros((3, 4, 8), F), ValueError), ("out", np.zeros((4, 2, 8), F), ValueError),
    ("out", np.zeros((4, 4, 6), F), ValueError),
    ("out", np.zeros((4, 4, 8), np.float64), TypeError),
]
OPTIONS_OF_ATTENTION = [
    *(("layer", value, ValueError) for value in (2, -1)),
    *(("layer", value, TypeError) for value in (1.0, "0", None, True)),
    ("sm_scale", "1", TypeError), ("window", 0, ValueError), ("window", -2, ValueError),
    ("window", 1.5, TypeError), ("sink_tokens", -1, ValueError), ("sink_tokens", 1.5, TypeError),
    ("sinks", 2, TypeError), ("sinks", np.zeros(3, F), ValueError),
    ("sinks", np.zeros(4, np.float64), BOTH), ("logits_soft_cap", "1", TypeError),
    ("logits_soft_cap", -1.0, ValueError),
    ("qkv", np.zeros((3, 8, 8), F), ValueError), ("qkv", np.zeros((4, 7, 8), F), ValueError),
    ("qkv", np.zeros((4, 8, 9), F), ValueError), ("qkv", np.zeros((4, 64), F), ValueError),
    ("qkv", np.zeros((4, 8, 8), np.int16), TypeError), ("qkv", None, TypeError),
]
# fmt: on


@pytest.mark.parametrize("rope", [None, rope_of(8, 64)], ids=["plain", "rotated"])
def test_attention(device, rope):
    """Nothing is stored before all arguments have been checked."""
    twin = crowd(device, rope=rope)
    twin.both("begin", ["a", "b"], [1, 3], None)
    good = dict(zip(("query", "key", "value"), rows(twin, 4), strict=True))
    for number, (name, value, error) in enumerate(ARRAYS + OPTIONS_OF_ATTENTION):
        print(f"row {number}")
        placed = to_device(device, value) if isinstance(value, np.ndarray) else value
        if name == "qkv":
            in_step(twin, lambda c: c.attention_qkv(0, placed), error, name)  # noqa: B023
        else:
            arguments = {**good, "layer": 0, name: placed}
            in_step(twin, lambda c: c.attention(**arguments), error, name)  # noqa: B023
        if name == "out":
            assert not device.to_numpy(placed).any()
    twin.attend()
    twin.both("end")
    twin.check()
    goes_on(twin)


@pytest.mark.parametrize("trees", [None, [[-1, 0, 0], [2]]])
def test_what_a_step_forbids(device, trees):
    """To its own sequences, before attention and after; the others may do as they like."""
    twin = crowd(device)
    twin.commit(["other"], [1])
    twin.prefill("own", 6, "third", 6, "more", 3)
    if trees is None:
        twin.commit(["tree"], [2])
    twin.both("begin", ["own", "tree"], [3, 1], trees)
    held = twin.cache.get_kv("a", 0, 2)
    for _ in range(2):
        for name in ("own", "tree"):
            for call in (
                lambda cache, name=name: cache.remove_sequence(name),
                lambda cache, name=name: cache.fork_sequence(name, "new"),
                lambda cache, name=name: cache.fork_sequence(name, "new", 2),
                lambda cache, name=name: cache.pop_tokens(name, 1),
                lambda cache, name=name: cache.enable_sliding_window(name, 4),
                lambda cache, name=name: cache.set_kv(name, 0, *held),
                lambda cache, name=name: cache.save_sequence(name, "never written"),
                lambda cache, name=name: cache.commit_token_tree([name], [0]),
            ):
                in_step(twin, call, (kv.KvcupyError, ValueError))
        in_step(twin, lambda cache: cache.begin_forward(["third"], [1]), kv.KvcupyError)
        assert "new" not in twin.cache
        twin.attend()
    twin.both("add", "late")
    twin.both("fork", "third", "fork of another", 5)
    twin.both("pop", "third", 2)
    twin.both("remove", "more")
    twin.set_kv("third", 1, 2)
    twin.attend_layer(1)
    twin.both("end")
    twin.check()
    twin.step(["late", "third", "fork of another"], [1, 1, 1])


@pytest.mark.parametrize("rope", [None, rope_of(8, 64)])
def test_sinks_that_attention_cannot_read(rope):
    """Their addresses are looked at before keys are stored, in calls of a known kind too."""
    twin = crowd(kv.device("host"), rope=rope)
    twin.both("begin", ["a", "b"], [1, 3], None)
    arrays, memory = rows(twin, 4), np.zeros(4 * 4 * 8 * 4 + 17, np.uint8)
    out, odd = memory[:-17].view(F).reshape(4, 4, 8), memory[-16:].view(F)
    assert odd.ctypes.data % 4
    for sinks, name in ((odd, "sinks"), (out[0, 0, :4], "out")):
        call = lambda cache, s=sinks: cache.attention(0, *arrays, out=out, sinks=s)  # noqa: E731
        in_step(twin, call, ValueError, name)
    assert not memory.any()
    twin.attend()
    twin.both("end")
    twin.check()


def test_packed_rows_need_one_width(device):
    """With V of another width than K, rows cannot be packed."""
    twin = Twin(device, v_head_dim=12)
    twin.prefill("a", 2)
    twin.both("begin", ["a"], [1], None)
    given = to_device(device, np.zeros((1, 8, 8), F))
    in_step(twin, lambda c: c.attention_qkv(0, given), (ValueError, kv.KvcupyError))
    twin.attend()
    twin.both("end")


# --- Latents ---

R, P = 16, 8
LATENT = {
    "latent_dim": R, "rope_dim": P, "head_dim": R + P, "num_kv_heads": 1, "num_q_heads": 6
}  # fmt: skip


def test_attention_mla(device):
    """A missing scale of scores, shapes and formats of each part, attention of the other kind."""
    twin = Twin(device, seed=7, **LATENT)
    twin.prefill("a", 9)
    twin.both("begin", ["a"], [2], None)
    good = {"query": np.zeros((2, 6, R + P), F), "latent": np.zeros((2, R), F),
            "rope_key": np.zeros((2, P), F)}  # fmt: skip

    def attend(**changes):
        arguments = {"sm_scale": 0.1, **good, **changes}
        on_device = {n: device.asarray(a) if isinstance(a, np.ndarray) else a
                     for n, a in arguments.items() if a is not None}  # fmt: skip
        return lambda c: c.attention_mla(0, **on_device)

    in_step(twin, attend(sm_scale=None), TypeError, "sm_scale")
    for name, array in good.items():
        for wrong in (array[:1], array[..., 1:]):
            in_step(twin, attend(**{name: np.ascontiguousarray(wrong)}), ValueError, name)
        in_step(twin, attend(**{name: array.astype(np.float64)}), BOTH, name)
    wide = [device.asarray(np.zeros((2, h, R + P), F)) for h in (6, 1, 1)]
    in_step(twin, lambda c: c.attention(0, *wide), (TypeError, kv.KvcupyError))
    twin.attend()
    twin.both("end")
    twin.check()
    plain = Twin(device, seed=8)
    plain.prefill("a", 5)
    plain.both("begin", ["a"], [2], None)
    in_step(plain, attend(), (TypeError, kv.KvcupyError))
    plain.attend()
    plain.both("end")


# --- forward ---


def test_overwriting_in_a_capture(device):
    """It is refused before a shared page is copied."""
    twin = Twin(device, seed=31)
    twin.prefill("a", 4)
    twin.fork("a", "b")
    stream = device.stream()
    key, value = twin.cache.get_kv("a", 0, 4)
    before = snapshot(twin.cache, "ab")
    with stream.capture(), pytest.raises(kv.CaptureError, match="stream"):
        twin.cache.set_kv("a", 0, key, value, stream=stream)
    assert snapshot(twin.cache, "ab") == before


# --- The constructor ---

GOOD = {
    "num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_pages": 4,
    "device": "host",
}  # fmt: skip
OPTIONS = {
    "num_layers": (0, -1, 1.5, True, None), "num_q_heads": (0, 3, 1.5, "4"),
    "num_kv_heads": (0, -2, 1.5), "head_dim": (0, 1.5), "num_pages": (0, -3, 2.0),
    "page_size": (0, 1.5), "dtype": ("fp12", 3, None), "rope_mode": ("outline", 1),
    "max_batch_tokens": (0, -1, 1.5), "v_head_dim": (0, 1.5), "slots_in_flight": (0, 1.5),
    "k_scale": (0.5, np.float32([1]), {}), "v_scale": (0.5,), "device": ("gpu",),
    "copy_stream": (5, "main"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    for value in OPTIONS[name]:
        with pytest.raises((TypeError, ValueError)) as caught:
            kv.PagedKVCache(**{**GOOD, name: value})
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


@pytest.mark.parametrize(
    ("name", "options"),
    [("num_kv_heads", {"num_kv_heads": 2}), ("head_dim", {"head_dim": R}),
     ("rope_dim", {"rope_dim": None}), ("rope_dim", {"rope_dim": 0}),
     ("rope", {"rope": rope_of(P + 2)}), ("v_head_dim", {"v_head_dim": 8}),
     ("latent_dim", {"latent_dim": 0}), ("rope", {"rope_mode": "inline"})],
)  # fmt: skip
def test_options_of_latents(name, options):
    with pytest.raises((TypeError, ValueError), match=rf"\b({name})\b"):
        kv.PagedKVCache(**{"num_layers": 1, "num_pages": 4, "device": "host", **LATENT, **options})


@pytest.mark.parametrize("seqs", [{"a", "b"}, frozenset("ab"), {"a": 1, "b": 2}.keys()])
def test_sequences_in_no_order_are_refused(device, seqs):
    twin = crowd(device)
    if isinstance(seqs, (set, frozenset)):
        match = (
            rf"^seqs: expected a list of sequences, got {type(seqs).__name__}, which has no order"
        )
        for call in (
            lambda cache: cache.begin_forward(seqs, [1, 1]),
            lambda cache: cache.commit_token_tree(seqs, [0, 0]),
        ):
            with pytest.raises(TypeError, match=match):
                call(twin.cache)
        with pytest.raises(TypeError, match=r"^append_lens: expected a list of ints, got set"):
            twin.cache.begin_forward(["a", "b"], {1, 2})
    else:
        twin.cache.begin_forward(seqs, [1, 1])
        twin.cache.abort_forward()
    twin.check()
