"""`PagedKVCache`: arguments of attention, what is forbidden within a step, and without one."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import PATIENCE_S, poll
from gather_cases import as_numpy
from helpers import from_values, to_device
from paged_cases import BINARY, Twin, rope_of
from paged_snapshot import pages_of_pool, snapshot
from test_paged_errors import crowd, goes_on, in_step, unchanged

import kvcupy as kv

# What is looked at is the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")


def rows(twin, count, heads=4, kv_heads=2, width=8, fmt="fp32"):
    arrays = (
        from_values(twin.rng.standard_normal((count, h, width)), fmt)
        for h in (heads, kv_heads, kv_heads)
    )
    return [to_device(twin.device, a) for a in arrays]


# --- Without a step ---


def test_outside_a_step(device):
    twin = crowd(device)
    qkv = to_device(device, np.zeros((1, 8, 8), np.float32))
    for _ in range(2):  # before the first step, in effect, and after one
        for call in (
            lambda cache: cache.attention(0, *rows(twin, 1)),
            lambda cache: cache.attention_qkv(0, qkv),
            lambda cache: cache.query_positions(),
            lambda cache: cache.slot_mapping(),
            lambda cache: cache.block_table(),
            lambda cache: cache.page_table_csr(),
            lambda cache: cache.end_forward(),
        ):
            unchanged(twin, call, kv.KvcupyError)
        twin.step(["a"], [1])


def test_a_new_cache_has_no_step(device):
    twin = Twin(device)
    twin.add("a")
    unchanged(twin, lambda cache: cache.attention(0, *rows(twin, 1)), kv.KvcupyError)
    unchanged(twin, lambda cache: cache.query_positions(), kv.KvcupyError)


def test_a_refused_step_is_none(device):
    """After it there is nothing to attend in, and nothing to end."""
    twin = crowd(device)
    unchanged(twin, lambda cache: cache.begin_forward(["a", "a"], [1, 1]), ValueError)
    unchanged(twin, lambda cache: cache.attention(0, *rows(twin, 2)), kv.KvcupyError)
    unchanged(twin, lambda cache: cache.end_forward(), kv.KvcupyError)


# --- Within a step ---


@pytest.mark.parametrize("trees", [None, [[-1, 0, 0], [2]]])
def test_what_a_step_forbids(device, trees):
    """To its own sequences, before attention and after; the others may do as they like."""
    twin = crowd(device)
    twin.prefill("own", 6, "other", 6, "more", 3)
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
        in_step(twin, lambda cache: cache.begin_forward(["other"], [1]), kv.KvcupyError)
        assert "new" not in twin.cache
        twin.attend()
    twin.both("add", "late")
    twin.both("fork", "other", "fork of another", 5)
    twin.both("pop", "other", 2)
    twin.both("remove", "more")
    twin.set_kv("other", 1, 2)
    twin.attend_layer(1)
    twin.both("end")
    twin.check()
    twin.step(["late", "other", "fork of another"], [1, 1, 1])


def test_the_same_layer_again(device):
    """Attention of a layer replaces what the step had stored there."""
    twin = Twin(device, rope=rope_of(8))
    twin.prefill("a", 6, "b", 2)
    twin.both("begin", ["a", "b"], [3, 1], None)
    for layer in (1, 0, 1, 1):
        twin.attend_layer(layer)
    twin.both("end")
    twin.check()


@pytest.mark.parametrize(
    ("layer", "error"),
    [(2, ValueError), (-1, ValueError), (1.0, TypeError), ("0", TypeError), (None, TypeError),
     (True, TypeError)],
)  # fmt: skip
def test_layers(device, layer, error):
    twin = crowd(device)
    twin.both("begin", ["a", "b"], [1, 3], None)
    arrays = rows(twin, 4)
    in_step(twin, lambda cache: cache.attention(layer, *arrays), error, "layer")
    twin.attend()
    twin.both("end")
    goes_on(twin)


def shaped(**changes):
    """Arguments of a step of 4 tokens, some of another shape or format."""
    shapes = {"query": (4, 4, 8), "key": (4, 2, 8), "value": (4, 2, 8)}
    return {
        name: np.zeros(shape, np.float32) if name not in changes else changes[name]
        for name, shape in shapes.items()
    }


F = np.float32
ARGUMENTS = [
    ("query", np.zeros((3, 4, 8), F), ValueError), ("key", np.zeros((3, 2, 8), F), ValueError),
    ("value", np.zeros((3, 2, 8), F), ValueError), ("query", np.zeros((4, 2, 8), F), ValueError),
    ("query", np.zeros((4, 4, 7), F), ValueError), ("query", np.zeros((4, 32), F), ValueError),
    ("key", np.zeros((4, 4, 8), F), ValueError), ("key", np.zeros((4, 2, 6), F), ValueError),
    ("value", np.zeros((4, 1, 8), F), ValueError), ("value", np.zeros((4, 2, 9), F), ValueError),
    ("query", np.zeros((4, 4, 8), np.float64), TypeError),
    ("key", np.zeros((4, 2, 8), np.int32), TypeError),
    ("value", np.zeros((4, 2, 8), np.float64), TypeError),
    ("query", None, TypeError), ("key", None, TypeError), ("value", [1.0], TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "array", "error"), ARGUMENTS)
@pytest.mark.parametrize("rope", [None, rope_of(8, 64)])
def test_arrays(device, name, array, error, rope):
    """Nothing is stored before all have been looked at."""
    twin = crowd(device, rope=rope)
    twin.both("begin", ["a", "b"], [1, 3], None)
    given = [
        to_device(device, a) if isinstance(a, np.ndarray) else a
        for a in shaped(**{name: array}).values()
    ]
    in_step(twin, lambda cache: cache.attention(0, *given), error, name)
    twin.attend()
    twin.both("end")
    twin.check()


OUTS = [
    (np.zeros((3, 4, 8), F), ValueError), (np.zeros((4, 2, 8), F), ValueError),
    (np.zeros((4, 4, 6), F), ValueError), (np.zeros((4, 4, 8), np.float64), TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("out", "error"), OUTS)
@pytest.mark.parametrize("rope", [None, rope_of(8, 64)])
def test_outputs(device, out, error, rope):
    twin = crowd(device, rope=rope)
    twin.both("begin", ["a", "b"], [1, 3], None)
    arrays, placed = rows(twin, 4), to_device(device, out)
    in_step(twin, lambda cache: cache.attention(0, *arrays, out=placed), error, "out")
    if device.kind == "host":
        locked = np.zeros((4, 4, 8), F)
        locked.flags.writeable = False
        call = lambda cache: cache.attention(0, *arrays, out=locked)  # noqa: E731
        in_step(twin, call, (TypeError, ValueError), "out")
    assert not device.to_numpy(placed).any()
    twin.attend()
    twin.both("end")
    twin.check()


MASKS = [
    ("sm_scale", "1", TypeError),
    ("window", 0, ValueError),
    ("window", -2, ValueError),
    ("window", 1.5, TypeError),
    ("sink_tokens", -1, ValueError),
    ("sink_tokens", 1.5, TypeError),
    ("sinks", 2, TypeError),
    ("sinks", np.zeros(3, F), ValueError),
    ("sinks", np.zeros(4, np.float64), (TypeError, ValueError)),
    ("logits_soft_cap", "1", TypeError),
    ("logits_soft_cap", -1.0, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), MASKS)
def test_masks(device, name, value, error):
    twin = crowd(device)
    twin.both("begin", ["a", "b"], [1, 3], None)
    arrays = rows(twin, 4)
    given = to_device(device, value) if isinstance(value, np.ndarray) else value
    call = lambda cache: cache.attention(0, *arrays, **{name: given})  # noqa: E731
    in_step(twin, call, error, name)
    twin.attend()
    twin.both("end")
    twin.check()


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


@pytest.mark.parametrize(
    ("array", "error"),
    [(np.zeros((3, 8, 8), F), ValueError), (np.zeros((4, 7, 8), F), ValueError),
     (np.zeros((4, 8, 9), F), ValueError), (np.zeros((4, 64), F), ValueError),
     (np.zeros((4, 8, 8), np.int16), TypeError), (None, TypeError)],
)  # fmt: skip
def test_packed_arrays(device, array, error):
    twin = crowd(device)
    twin.both("begin", ["a", "b"], [1, 3], None)
    given = None if array is None else to_device(device, array)
    in_step(twin, lambda cache: cache.attention_qkv(0, given), error, "qkv")
    twin.attend()
    twin.both("end")
    twin.check()


def test_packed_rows_need_one_width(device):
    """With V of another width than K, rows cannot be packed."""
    twin = Twin(device, v_head_dim=12)
    twin.prefill("a", 2)
    twin.both("begin", ["a"], [1], None)
    given = to_device(device, np.zeros((1, 8, 8), F))
    in_step(twin, lambda cache: cache.attention_qkv(0, given), (ValueError, kv.KvcupyError))
    twin.attend()
    twin.both("end")


# --- forward ---


class Stop(Exception):
    pass


@pytest.mark.parametrize("attended", [0, 1, 2])
@pytest.mark.parametrize("seqs", [["a", "slid"], ["b", "empty"], ["tree", "b", "slid"]])
def test_a_block_that_raises(device, seqs, attended):
    """Tokens, nodes and pages of the step go, and what was there before stays, slid or shared."""
    twin = crowd(device)
    lens = [3, 6, 2][: len(seqs)]
    trees = [[-1, 6, 7], None, [-1, -1]] if seqs[0] == "tree" else None
    before = snapshot(twin.cache, [*twin.model.sequences])
    with pytest.raises(Stop), twin.cache.forward(seqs, lens, token_tree=trees):
        assert twin.cache.sequence_length(seqs[0]) == twin.lengths()[seqs[0]]
        for layer in range(attended):
            twin.cache.attention(layer, *rows(twin, sum(lens)))
        raise Stop
    after = snapshot(twin.cache, [*twin.model.sequences])
    assert {**after, "pool": None} == {**before, "pool": None}  # its slots may have been written
    twin.check()
    unchanged(twin, lambda cache: cache.attention(0, *rows(twin, 1)), kv.KvcupyError)
    goes_on(twin)


def test_a_block_that_raises_in_a_full_cache(device):
    twin = Twin(device, num_pages=3)
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.pop("b", 2)
    for _ in range(5):
        with pytest.raises(Stop), twin.cache.forward(["b"], [2]):
            assert twin.cache.num_available_pages == 0
            raise Stop
        twin.check()
    twin.step("b", [2])


def test_attention_that_raises_in_a_block(device):
    """An argument error leaves the block like any other exception."""
    twin = crowd(device)
    with pytest.raises(ValueError, match=r"\bquery\b"), twin.cache.forward(["a"], [2]):
        twin.cache.attention(0, *rows(twin, 2, heads=3))
    twin.check()
    goes_on(twin)


def test_a_block_that_cannot_begin(device):
    twin = crowd(device)
    ran = []

    def enter(cache):
        with cache.forward(["a", "who"], [1, 1]):
            ran.append(1)

    unchanged(twin, enter, kv.UnknownSequence)
    assert not ran
    goes_on(twin)


def test_blocks_within_blocks(device):
    """The inner one is refused; the outer one is not harmed."""
    twin = Twin(device)
    twin.prefill("a", 3, "b", 2)
    twin.model.begin(["a"], [2])
    with twin.cache.forward(["a"], [2]):
        with pytest.raises(kv.KvcupyError), twin.cache.forward(["b"], [1]):
            pass
        twin.attend()
    twin.model.end()
    twin.check()


def test_a_block(device):
    """It begins and ends a step, trees included."""
    twin = Twin(device)
    twin.prefill("a", 3)
    twin.model.begin(["a"], [7], [BINARY])
    with twin.cache.forward(["a"], [7], token_tree=[BINARY]):
        twin.attend()
    twin.model.end()
    twin.commit(["a"], [5])


def test_faults_in_the_arrays_of_a_step_are_no_business_of_others(device):
    """NaN and infinities in one sequence of a step reach no other, nor its next step."""
    twin = Twin(device, num_layers=1)
    twin.prefill("a", 5)
    twin.cache.add_sequence("bad")
    query, key, value = rows(twin, 4)
    for array in (query, key, value):
        array[2:] = float("nan")
    twin.model.begin(["a"], [2])
    with twin.cache.forward(["a", "bad"], [2, 2]):
        got = twin.cache.attention(0, query, key, value)
    want, allowed = twin.model.attention(
        0, *(as_numpy(device, a, "fp32")[:2] for a in (query, key, value))
    )
    twin.model.end()
    assert (np.abs(as_numpy(device, got, "fp32")[:2] - want) <= allowed).all()
    twin.cache.remove_sequence("bad")
    twin.check()


def test_what_raises_writes_nothing_to_the_pool(device):
    """The control of these tests: a step does change what they compare."""
    twin = crowd(device)
    before = pages_of_pool(twin.cache.pool)
    twin.step(["a"], [1])
    assert any((a != b).any() for a, b in zip(before, pages_of_pool(twin.cache.pool), strict=True))


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


def test_page_copies_after_a_failure_that_surfaced(device):
    """A failure of another stream that the copy stream inherited does not skip later copies."""
    twin = Twin(device, seed=32)
    cache, stream = twin.cache, device.stream()
    twin.prefill("a", 6)
    stream.call(lambda: 1 // 0)
    with cache.forward(["a"], [1]):
        rows = [device.zeros((1, h, 8), "fp32") for h in (4, 2, 2)]
        cache.attention(0, *rows, stream=stream)
    cache.fork_sequence("a", "b")
    with pytest.raises(kv.DeviceError):
        stream.synchronize()
    inherited = cache._steps._ring.uploader._last
    poll(lambda: inherited.error() is not None, PATIENCE_S)
    cache.fork_sequence("a", "c", 6)
    cache._steps.access.copy_stream.synchronize()
    want, got = (device.to_numpy(cache.get_kv(name, 4, 6)[0]) for name in "ac")
    assert got.any() and np.array_equal(got, want)
