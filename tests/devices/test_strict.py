"""The strict host device refuses what a GPU would punish, and nothing else.

Each kind of fault has one kernel (`kernels/strict.cu`) that is refused, with kernel,
thread and address, and one beside it without the fault that is not.
"""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.errors import DeviceError
from kvcupy.kernels import Kernel

PARAMS = np.dtype([("in", "u8"), ("out", "u8"), ("count", "i4"), ("who", "i4")], align=True)
SEEDS = (1, 2, 3, 4, 5)
SYNCWARP, SHUFFLE, VOTE, MMA, LDMATRIX = range(5)
ACTS = {SYNCWARP: "__syncwarp", SHUFFLE: "a shuffle", VOTE: "a vote", MMA: "mma.sync",
        LDMATRIX: "ldmatrix"}  # fmt: skip


@pytest.fixture
def sources(kernel_sources, monkeypatch):
    kernel_sources.add("strict.cu")
    monkeypatch.setattr(kv.config, "_strict", True)
    return kernel_sources


@pytest.fixture
def device(sources):
    return sources.device()


class Run:
    """One launch of a kernel of `strict.cu`; `inputs` are the bytes 0, 1, 2, ..."""

    def __init__(self, device):
        self.device = device

    def __call__(self, name, *arguments, threads=32, grid=1, smem=0, who=-1, count=1,
                 barriers=True, stream=None):  # fmt: skip
        kernel = Kernel("strict.cu", name, PARAMS, "StrictParams", barriers)
        specialisation = kernel.specialise(*arguments)
        inputs, out = self.device.zeros(1 << 14, "int8"), self.device.zeros(1 << 14, "int8")
        inputs[...] = (np.arange(1 << 14) % 100).astype(np.int8)
        params = np.zeros((), PARAMS)
        params["in"], params["out"] = inputs.ctypes.data, out.ctypes.data
        params["count"], params["who"] = count, who
        self.device.launch(
            self.device.load(specialisation), (grid, 1, 1), (threads, 1, 1), smem,
            params.tobytes(), self.device.as_stream(stream), (inputs, out),
        )  # fmt: skip
        self.last = specialisation, inputs, out
        return out

    def refused(self, *arguments, **options) -> str:
        """Return what a launch is refused with: it names kernel, block and thread."""
        with pytest.raises(DeviceError) as caught:
            self(*arguments, **options)
        text = str(caught.value)
        name = f"strict.cu:{arguments[0]}<{', '.join(map(str, arguments[1:]))}>"
        assert text.startswith(name), text
        assert re.search(r"block \(\d+, 0, 0\), thread \(\d+, 0, 0\): ", text), text
        assert re.search(r"thread_order_seed = \d+", text), text
        return text


@pytest.fixture
def run(device):
    return Run(device)


def thread_of(text: str) -> int:
    """The thread that a refusal names first."""
    return int(re.search(r"thread \((\d+), 0, 0\): ", text)[1])


# Alignment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("barriers", [False, True], ids=["plain", "fibers"])
@pytest.mark.parametrize("kernel", ["copy_words", "copy_words_away"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_wide_accesses_at_no_multiple_of_their_width(run, kernel, size, barriers):
    run(kernel, size, who=0, barriers=barriers)
    run(kernel, size, who=size, barriers=barriers)
    for moved in {1, size // 2, size + size // 2}:
        text = run.refused(kernel, size, who=moved, barriers=barriers)
        assert re.search(r"misaligned address 0x[0-9a-f]+", text)
        assert f"multiple of {size}" in text
        assert re.search(r"strict\.cu:\d+", text)


# Lanes and barriers ------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS, ids=ACTS.values())
@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_that_has_exited(run, act, seed):
    run.device.thread_order_seed = seed
    run("exits_before", act, smem=512)
    text = run.refused("exits_before", act, smem=512, who=7)
    # A lane that never meets the others at ldmatrix has missed the barrier before it.
    named = ACTS[SYNCWARP if act == LDMATRIX else act]
    assert f"{named} with the mask 0xffffffff" in text
    assert "lane 7" in text and "thread (7, 0, 0) has exited" in text


@pytest.mark.parametrize("act", ACTS, ids=ACTS.values())
def test_a_lane_that_never_comes(run, act):
    run("waits_elsewhere", act, smem=512)
    text = run.refused("waits_elsewhere", act, smem=512, who=3)
    assert "lane 3" in text
    assert re.search(r"thread \(3, 0, 0\) waits at the __syncthreads of strict\.cu:\d+", text)


@pytest.mark.parametrize("act", [SYNCWARP, SHUFFLE, VOTE])
def test_a_lane_that_its_own_mask_does_not_name(run, act):
    run("forgets_itself", act)
    text = run.refused("forgets_itself", act, who=9)
    assert thread_of(text) == 9 and "does not name its own lane 9" in text


@pytest.mark.parametrize("act", ACTS, ids=ACTS.values())
def test_a_lane_that_the_block_does_not_have(run, act):
    for threads in (16, 33, 63):
        text = run.refused("exits_before", act, smem=1024, threads=threads)
        assert "the block has no such thread" in text
    run("exits_before", act, smem=1024, threads=64)


def test_a_lane_that_is_read_and_not_named(run):
    got = run("shuffles_in_halves", 32)
    assert got[:32].tolist() == [i ^ 1 if i >= 16 else i for i in range(32)]
    text = run.refused("shuffles_in_halves", 32, who=5)
    assert thread_of(text) == 5 and "reads lane 21, which the mask does not name" in text


def test_two_barriers_in_the_place_of_one(run):
    run("two_barriers", 64, threads=64)
    text = run.refused("two_barriers", 64, threads=64, who=40)
    lines = re.findall(r"strict\.cu:(\d+)", text)
    assert len(set(lines)) == 2 and "__syncthreads" in text


def test_threads_that_have_exited_are_not_waited_for_by_a_block(run):
    """As on GPUs of compute capability 7.0 and newer."""
    for stay in (1, 33, 64, 100):
        got = run("barrier_of_the_rest", 100, threads=100, count=stay)
        assert got[:100].tolist() == [1] * stay + [0] * (100 - stay)


# Shared memory -----------------------------------------------------------------------------------

STATIC = pytest.mark.parametrize("static", ["false", "true"], ids=["dynamic", "static"])


@STATIC
def test_bytes_that_were_never_written(run, static):
    run("reads_unwritten", static, threads=64, grid=3, smem=64)
    text = run.refused("reads_unwritten", static, threads=64, smem=64, who=20)
    assert thread_of(text) == 19
    assert "read of 1 bytes" in text and "nobody has written it" in text
    assert re.search(r"at byte \d+ of (dynamic|static) shared memory \(address 0x", text)
    if static == "false":
        assert "at byte 20 of dynamic" in text


@STATIC
@pytest.mark.parametrize("barriers", [False, True], ids=["plain", "fibers"])
def test_what_the_block_before_has_left(run, static, barriers):
    run.device.num_workers = 1
    run("reads_of_the_block_before", static, grid=4, smem=32, barriers=barriers)
    text = run.refused(
        "reads_of_the_block_before", static, grid=2, smem=32, who=0, barriers=barriers
    )
    assert "block (1, 0, 0)" in text and "nobody has written it" in text


def test_past_the_end_of_shared_memory(run):
    run("past_the_end", 32, smem=32)
    run("past_the_end", 32, smem=33, who=5)
    text = run.refused("past_the_end", 32, smem=32, who=5)
    assert thread_of(text) == 5 and "at byte 32 of" in text and "the block has 32 bytes" in text


WARP_BARRIER, BLOCK_BARRIER = 1, 2
RACE = r"(read|write) of 1 bytes.*no barrier lies between it and the (read|write) of thread"


@STATIC
@pytest.mark.parametrize("two_writes", ["false", "true"], ids=["read and write", "two writes"])
@pytest.mark.parametrize("distance", [1, 16, 32, 64])
def test_races(run, static, two_writes, distance):
    """Neighbours of a warp need a barrier of the warp or the block, others one of the block."""
    options = {"threads": 128, "smem": 128, "count": distance}
    for seed in SEEDS:
        run.device.thread_order_seed = seed
        run("races", static, two_writes, BLOCK_BARRIER, **options)
        text = run.refused("races", static, two_writes, 0, **options)
        kinds = re.search(RACE, text).groups()
        assert shutil.which("addr2line") is None or re.search(r"\(strict\.cu:\d+", text), text
        assert "write" in kinds and ("read" in kinds) == (two_writes == "false")
        other = int(re.findall(r"thread \((\d+), 0, 0\)", text)[1])
        assert other ^ distance == thread_of(text)
        if distance < 32:
            run("races", static, two_writes, WARP_BARRIER, **options)
        else:
            run.refused("races", static, two_writes, WARP_BARRIER, **options)


def test_atomics_do_not_race_with_one_another(run):
    for seed in SEEDS:
        run.device.thread_order_seed = seed
        assert run("counts", "true", threads=96, smem=4)[:96].tolist() == [96] * 96
        assert "no barrier" in run.refused("counts", "false", threads=96, smem=4)


# Asynchronous copies -----------------------------------------------------------------------------

NOT_WAITED = "has not been waited for"
COPY_FAULTS = {number: NOT_WAITED for number in (1, 2, 4, 5)} | {3: f"{NOT_WAITED}|no barrier"}


def test_copies_that_are_waited_for(run):
    got = run("copies", 0, threads=64, smem=2048)
    assert (got[:1024] == run.last[1][:1024]).all()


@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_copies_that_are_not(run, fault):
    for seed in SEEDS:
        run.device.thread_order_seed = seed
        text = run.refused("copies", fault, threads=64, smem=2048)
        assert re.search(COPY_FAULTS[fault], text)


def test_groups_of_copies(run):
    """Group 0 may be read while group 1 is on its way; the last group only when none is left."""
    run("copies_in_groups", 1, who=0, smem=1024)
    run("copies_in_groups", 0, who=1, smem=1024)
    assert NOT_WAITED in run.refused("copies_in_groups", 1, who=1, smem=1024)
    assert NOT_WAITED in run.refused("copies_in_groups", 2, who=0, smem=1024)


# Limits of a launch ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "most"), [("bounded", 64), ("bounded_by_name", 96)])
def test_launch_bounds(run, kernel, most):
    run(kernel, 1, threads=most)
    with pytest.raises(DeviceError, match=rf"{most + 1} threads.*launch bounds allow {most}"):
        run(kernel, 1, threads=most + 1)


@pytest.mark.parametrize(("arch", "most"), [
    (None, 99), ("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_90", 227), ("sm_120", 99),
])  # fmt: skip
def test_shared_memory_of_an_architecture(run, monkeypatch, arch, most):
    if arch is not None:
        monkeypatch.setattr(kv.config, "strict_arch", arch)
    run("past_the_end", 32, smem=most * 1024)
    with pytest.raises(DeviceError, match=rf"{kv.config.strict_arch}.*has {most * 1024}"):
        run("past_the_end", 32, smem=most * 1024 + 1)


# Orders, streams and settings --------------------------------------------------------------------


@pytest.mark.parametrize("barriers", [False, True], ids=["plain", "fibers"])
def test_threads_and_blocks_come_in_an_order_drawn_for_each_launch(run, barriers):
    run.device.num_workers = 1

    def order():
        out = run("draws_numbers", 8, grid=16, threads=8, barriers=barriers)
        return tuple(out.view(np.int32)[1:129].tolist())

    kv.config.strict_seed = 7
    orders = [order() for _ in range(6)]
    assert len(set(orders)) == 6
    assert all(sorted(o) == list(range(128)) for o in orders)
    blocks = [tuple(np.argsort([min(o[i : i + 8]) for i in range(0, 128, 8)])) for o in orders]
    assert len(set(blocks)) > 1
    kv.config.strict_seed = 7
    assert [order() for _ in range(6)] == orders


@pytest.mark.parametrize(("name", "wrong", "error"), [
    ("strict", 1, TypeError), ("strict_arch", "sm_60", ValueError), ("strict_seed", -1, ValueError),
    ("strict_seed", 1.5, ValueError), ("strict_index_faults", "ignore", ValueError),
])  # fmt: skip
def test_wrong_settings(name, wrong, error):
    with pytest.raises(error, match=rf"{name}: expected .*got {wrong!r}"):
        setattr(kv.config, name, wrong)


# Index faults ------------------------------------------------------------------------------------


@pytest.fixture
def store(device, monkeypatch):
    monkeypatch.setattr(kv.config, "_strict_index_faults", "raise")

    def run(slots, stream=None):
        rows = device.zeros((len(slots), 4), "fp16")
        rows[...] = 1
        caches = [device.zeros((8, 4), "fp16") for _ in "kv"]
        kv.store_kv(rows, rows, *caches, np.array(slots), stream=stream)
        return caches

    return run


def test_an_index_past_the_end_raises_at_the_call(device, store):
    store([0, 7])
    with pytest.raises(kv.IndexFault, match=r"store_kv: slot_mapping\[1\]: expected 0 to 7, got 8"):
        store([3, 8])
    kv.check_faults(device)  # raising has cleared it
    store([3, 4])


def test_an_index_past_the_end_on_a_stream_raises_where_that_is_waited_for(device, store):
    stream = device.stream()
    store([3, 9], stream)
    caches = store([5], stream)
    with pytest.raises(kv.IndexFault, match=r"slot_mapping\[1\]: expected 0 to 7, got 9;"):
        stream.synchronize()
    stream.synchronize()
    assert caches[0][5].tolist() == [1] * 4  # what came after it was not skipped
