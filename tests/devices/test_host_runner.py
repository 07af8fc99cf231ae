"""The host device runs CUDA kernels: indices, barriers, shared memory, warps, atomics, failures.

It is the lenient one here; `test_strict.py` has the strict one.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcupy.devices import cxx
from kvcupy.errors import CompileError, DeviceError
from kvcupy.kernels import Kernel

SEEDS = range(1, 51)


def params_dtype(*fields: tuple[str, str]) -> np.dtype:
    return np.dtype(list(fields), align=True)


THREADS = params_dtype(
    ("in", "u8"), ("out", "u8"), ("shared_start", "u8"), ("count", "i4"), ("who", "i4")
)
WARPS = params_dtype(
    ("in", "u8"), ("mask", "u8"), ("out", "u8"), ("operand", "i4"), ("kind", "i4"), ("width", "i4")
)
ATOMICS = params_dtype(("in", "u8"), ("out", "u8"), ("old", "u8"), ("words", "i4"))
OF_FILE = {
    "host_threads.cu": (THREADS, "ThreadsParams"),
    "host_warps.cu": (WARPS, "WarpsParams"),
    "host_atomics.cu": (ATOMICS, "AtomicsParams"),
}


@pytest.fixture
def sources(kernel_sources, lenient_host):
    for name in OF_FILE:
        kernel_sources.add(name)
    return kernel_sources


@pytest.fixture
def device(sources):
    """A host device of the test's own: the runner is tested here, whatever ``--device`` says."""
    return sources.device()


def kernel(file: str, name: str, *arguments: str | int, barriers: bool = False):
    params, struct = OF_FILE[file]
    return Kernel(file, name, params, struct, barriers).specialise(*arguments)


def plain(name: str, argument: int | str, *, barriers: bool = False):
    return kernel("host_threads.cu", name, argument, barriers=barriers)


def fibers(name: str, argument: int):
    return plain(name, argument, barriers=True)


def warps(name: str, argument: int | str):
    return kernel("host_warps.cu", name, argument, barriers=True)


def atomics(name: str, ctype: str):
    return kernel("host_atomics.cu", name, ctype)


def run(device, specialisation, grid, block, *, smem=0, stream=None, **fields):
    """Pack `fields`, arrays by address, and launch; the stream keeps the arrays."""
    params = np.zeros((), specialisation.kernel.params)
    for name, value in fields.items():
        params[name.rstrip("_")] = value.ctypes.data if isinstance(value, np.ndarray) else value
    shapes = [(*np.atleast_1d(shape).tolist(), 1, 1)[:3] for shape in (grid, block)]
    packed, stream = params.tobytes(), device.as_stream(stream)
    function, owners = device.load(specialisation), tuple(fields.values())
    device.launch(function, *shapes, smem, packed, stream, owners)


def first_difference(got, want) -> str:
    """Say where two arrays differ, or nothing."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return f"shape {got.shape}, want {want.shape}"
    wrong = np.argwhere(got != want)
    if not len(wrong):
        return ""
    at = tuple(map(int, wrong[0]))
    return f"{len(wrong)} of {want.size} differ, first at {at}: got {got[at]}, want {want[at]}"


def assert_equal(got, want, context: object = "") -> None:
    difference = first_difference(got, want)
    assert not difference, f"{difference} {context}"


# Indices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("barriers", [False, True], ids=["plain", "fibers"])
@pytest.mark.parametrize(("grid", "block"), [
    ((1, 1, 1), (1, 1, 1)),
    ((3, 1, 1), (7, 1, 1)),
    ((2, 3, 4), (5, 2, 3)),
    ((1, 5, 1), (2, 1, 8)),
    ((1, 1, 2), (1, 512, 2)),
    ((2, 1, 3), (1, 3, 64)),
])  # fmt: skip
def test_indices_of_three_dimensions(device, grid, block, barriers):
    want = [
        (x, y, z, bx, by, bz, *block, *grid)
        for bz, by, bx in itertools.product(*map(range, reversed(grid)))
        for z, y, x in itertools.product(*map(range, reversed(block)))
    ]
    got = np.zeros((len(want), 12), np.int32)
    run(device, plain("write_indices", 12, barriers=barriers), grid, block, out=got)
    assert_equal(got, want)


@pytest.mark.parametrize("barriers", [False, True], ids=["plain", "fibers"])
def test_long_grids_run_on_several_workers_with_shared_memory_of_their_own(device, barriers):
    blocks, spins = 40, 1_000_000  # some 50 ms; help is called for much sooner
    long = plain("name_worker", spins, barriers=barriers)
    for workers in (1, 3):
        device.num_workers = workers
        got, places = np.zeros(blocks, np.int32), np.zeros(blocks, np.uint64)
        run(device, long, blocks, 1, out=got, shared_start=places)
        assert_equal(got, np.arange(blocks) + spins)
        used = len(np.unique(places))
        assert min(workers, 2) <= used <= workers, f"{used} of {workers} workers"


# Barriers and shared memory ----------------------------------------------------------------------


def reverse(device, blocks=3, block=64):
    """Reverse the values of each block; return the first difference."""
    values = np.arange(blocks * block, dtype=np.int32)
    got = np.full_like(values, -1)
    run(device, fibers("reverse_static", block), blocks, block, in_=values, out=got)
    return first_difference(got, values.reshape(blocks, block)[:, ::-1].ravel())


def sum_in_a_tree(device, blocks=3, block=256):
    values = np.random.default_rng(0).integers(0, 1000, (blocks, block), dtype=np.int32)
    got = np.full(blocks, -1, np.int32)
    run(device, fibers("tree_sum", block), blocks, block, smem=4 * block, in_=values, out=got)
    return first_difference(got, values.sum(axis=1))


@pytest.mark.parametrize("check", [reverse, sum_in_a_tree])
def test_barriers_hold_in_every_order_of_threads(device, check):
    assert not check(device), "in the order of the index"
    for seed in SEEDS:
        device.thread_order_seed = seed
        difference = check(device)
        assert not difference, f"{difference}, seed {seed}"


@pytest.mark.parametrize(("check", "comment"), [
    (reverse, "tile is complete"),
    (sum_in_a_tree, "the level below is complete"),
])  # fmt: skip
def test_a_missing_barrier_shows(sources, check, comment):
    """The control of the test above."""
    sources.replace("host_threads.cu", f"__syncthreads();  // {comment}", "")
    device = sources.device()
    wrong = 0
    for seed in SEEDS:
        device.thread_order_seed = seed
        wrong += bool(check(device))
    assert wrong, f"no seed of {SEEDS} gave a wrong result"


# Warps -------------------------------------------------------------------------------------------

INDEX, UP, DOWN, XOR = range(4)


def shuffled(kind: int, values: np.ndarray, operand: int, width: int) -> np.ndarray:
    """Give the value of every lane after a shuffle, by the definition of `shfl.sync` in PTX."""
    lanes = np.arange(values.size)
    lane, offset, outside = lanes % 32, operand & 31, ~(width - 1) & 31
    first, last = lane & outside, lane & outside | width - 1
    source = {
        INDEX: first | offset & ~outside, UP: lane - offset, DOWN: lane + offset, XOR: lane ^ offset
    }[kind]  # fmt: skip
    valid = source >= first if kind == UP else source <= last
    return values[lanes - lane + np.where(valid, source, lane)]


def masks(threads: int, groups: list[int]) -> np.ndarray:
    """Give each thread the mask of its group; a thread in none gets 0."""
    found = np.zeros(threads, np.uint32)
    for group in groups:
        members = np.array([lane for lane in range(32) if group >> lane & 1])
        for warp in range(0, threads, 32):
            at = warp + members
            found[at[at < threads]] = group
    return found


GROUPINGS = {
    "full": [0xFFFFFFFF],
    "halves": [0x0000FFFF, 0xFFFF0000],
    "even and odd": [0x55555555, 0xAAAAAAAA],
    "some": [0x0FF0A501],
}


@pytest.mark.parametrize("kind", [INDEX, UP, DOWN, XOR], ids=["idx", "up", "down", "xor"])
def test_shuffles(device, kind):
    threads = 80  # two warps and a half
    values = np.random.default_rng(kind).integers(0, 2**30, threads, dtype=np.int32)
    compared = 0
    for width, (name, groups) in itertools.product((2, 4, 8, 16, 32), GROUPINGS.items()):
        mask = masks(threads, groups)
        for operand in (0, 1, 2, 3, 7, 15, 16, 31, 33):
            device.thread_order_seed = operand
            got = np.full(threads, -1, np.int32)
            how = {"mask": mask, "operand": operand, "kind": kind, "width": width}
            run(device, warps("shuffle", "int"), 1, threads, in_=values, out=got, **how)
            # A value from a lane that takes no part, or does not exist, is undefined.
            lanes = np.arange(128)
            source = shuffled(kind, lanes, operand, width)[:threads]
            known = (mask != 0) & (source < threads)
            known &= (mask >> (source % 32).astype(np.uint32) & 1) == 1
            want = values[np.minimum(source, threads - 1)]
            compared += known.sum()
            assert_equal(got[known], want[known], f"width {width}, mask {name}, operand {operand}")
    assert compared > 4000


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("threads", [8, 32, 80])
def test_votes_count_the_threads_there_are(device, grouping, threads):
    vote = warps("vote", 3)
    mask = masks(threads, GROUPINGS[grouping])
    rng = np.random.default_rng(threads)
    for chance in (0.0, 0.5, 1.0):
        yes = (rng.random(threads) < chance).astype(np.int32)
        got = np.full((threads, 3), -1, np.int32)
        run(device, vote, 1, threads, in_=yes, mask=mask, out=got)
        want = np.full((threads, 3), -1, np.int32)
        for self in np.flatnonzero(mask):
            warp = self - self % 32
            lanes = [i for i in range(min(32, threads - warp)) if mask[self] >> i & 1]
            votes = [bool(yes[warp + i]) for i in lanes]
            ballot = np.uint32(sum(1 << i for i, v in zip(lanes, votes, strict=True) if v))
            want[self] = ballot.view(np.int32), any(votes), all(votes)
        assert_equal(got, want, f"chance {chance}")


def test_warp_barriers_of_disjoint_masks_do_not_wait_for_one_another(device):
    function = warps("pass_round", 96)
    values = np.arange(96, dtype=np.int32) * 10
    for size, seed in itertools.product((2, 4, 8, 16, 32), (0, 1, 2, 3)):
        device.thread_order_seed = seed
        groups = [((1 << size) - 1) << first for first in range(0, 32, size)]
        got = np.full_like(values, -1)
        run(device, function, 1, 96, in_=values, mask=masks(96, groups), out=got, operand=size)
        by_group = values.reshape(-1, size)
        want = [np.roll(row, -(group % 3 + 1)) for group, row in enumerate(by_group)]
        assert_equal(got, np.ravel(want), f"groups of {size}, seed {seed}")


# Atomics -----------------------------------------------------------------------------------------

CTYPES = {"int": np.int32, "unsigned": np.uint32, "long long": np.int64, "u64": np.uint64,
          "float": np.float32}  # fmt: skip
INTEGERS = [name for name in CTYPES if name != "float"]
BLOCKS, BLOCK, WORDS = 200, 256, 3


REDUCTIONS = {
    "add": np.add, "add_by_swapping": np.add, "largest": np.maximum, "smallest": np.minimum,
    "all_bits": np.bitwise_and, "any_bits": np.bitwise_or,
}  # fmt: skip


@pytest.mark.parametrize(
    ("ctype", "name"), [("float", "add"), *itertools.product(INTEGERS, REDUCTIONS)]
)
def test_atomics_reduce(device, ctype, name):
    """All threads of many blocks, on several workers, work on three words."""
    dtype, function = CTYPES[ctype], REDUCTIONS[name]
    device.num_workers = 4
    if function is np.add:
        values = (np.arange(BLOCKS * BLOCK) % 8).astype(dtype)  # float sums are exact
    else:
        info = np.iinfo(dtype)
        rng = np.random.default_rng(1)
        values = rng.integers(info.min, info.max, BLOCKS * BLOCK, dtype=dtype, endpoint=True)
    if name == "all_bits":
        values |= dtype(0x70F0F0F0)
    if name == "any_bits":
        values &= dtype(0x0F0F0F0F)
    words = np.full(WORDS, values[1])
    run(device, atomics(name, ctype), BLOCKS, BLOCK, in_=values, out=words, words=WORDS)
    want = [function.reduce(values[i::WORDS], initial=values[1], dtype=dtype) for i in range(WORDS)]
    assert_equal(words, want)


@pytest.mark.parametrize("ctype", INTEGERS)
def test_atomics_return_what_was_there(device, ctype):
    """Numbers drawn are all different; of values passed on, none is lost and none is doubled."""
    device.num_workers = 4
    threads = BLOCKS * BLOCK
    for name in ("draw_numbers", "pass_on"):
        word, old = np.zeros(1, CTYPES[ctype]), np.full(threads, -1, np.int32)
        run(device, atomics(name, ctype), BLOCKS, BLOCK, out=word, old=old, words=1)
        seen = np.sort(old if name == "draw_numbers" else np.append(old, word.astype(np.int32)))
        assert_equal(seen, np.arange(seen.size), name)


# Failures ----------------------------------------------------------------------------------------


def assert_names(error, specialisation, grid, block):
    text = str(error.value)
    for part in (specialisation.expression, f"grid {grid}", f"block {block}"):
        assert part in text, f"{part!r} is not in {text!r}"


def assert_works(device):
    """The device runs kernels as before."""
    assert not reverse(device)
    assert not sum_in_a_tree(device)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(("name", "barriers"), [
    ("trap_one", False), ("trap_one", True), ("trap_between_barriers", True),
])  # fmt: skip
def test_trap(device, name, barriers, workers):
    device.num_workers = workers
    trapping = plain(name, 7, barriers=barriers)
    for who in (0, 37, 40 * 64 - 1):
        out = np.zeros(40 * 64, np.int32)
        with pytest.raises(DeviceError, match="trapped") as error:
            run(device, trapping, 40, 64, out=out, count=out.size, who=who)
        assert_names(error, trapping, (40, 1, 1), (64, 1, 1))
        assert out[who] == 0
        run(device, trapping, 40, 64, out=out, count=out.size, who=-1)
        assert_equal(out, np.full(out.size, 7), f"after a trap of {who}")
    assert_works(device)


def test_divergent_barriers(device):
    for seed in range(4):
        device.thread_order_seed = seed
        diverging = fibers("diverge", 1)
        with pytest.raises(DeviceError, match="diverge") as error:
            run(device, diverging, 2, (16, 4), out=np.zeros(128, np.int32), who=3)
        assert_names(error, diverging, (2, 1, 1), (16, 4, 1))
        assert_works(device)


@pytest.mark.parametrize("name", ["reverse_static", "shuffle_once"])
def test_a_barrier_in_a_kernel_declared_without(device, name):
    wrong = plain(name, 32)
    values = np.zeros(32, np.int32)
    with pytest.raises(DeviceError, match="without barriers") as error:
        run(device, wrong, 1, 32, in_=values, out=values.copy())
    assert_names(error, wrong, (1, 1, 1), (32, 1, 1))
    assert_works(device)


@pytest.mark.parametrize(("grid", "block", "smem"), [
    ((0, 1, 1), (32, 1, 1), 0),
    ((1, -1, 1), (32, 1, 1), 0),
    ((1, 65536, 1), (32, 1, 1), 0),
    ((2**31, 1, 1), (32, 1, 1), 0),
    ((1, 1, 1), (0, 1, 1), 0),
    ((1, 1, 1), (1025, 1, 1), 0),
    ((1, 1, 1), (32, 33, 1), 0),
    ((1, 1, 1), (1, 1, 65), 0),
    ((1, 1, 1), (32, 1, 1), 227 * 1024 + 1),
    ((1, 1, 1), (32, 1, 1), -1),
])  # fmt: skip
def test_bad_launches(device, grid, block, smem):
    function = plain("write_indices", 12)
    got = np.zeros(12, np.int32)
    with pytest.raises(DeviceError, match="cannot be launched") as error:
        run(device, function, grid, block, smem=smem, out=got)
    assert_names(error, function, grid, block)
    assert not got.any()
    assert_works(device)


def test_compile_error_carries_the_log(device):
    broken = plain("write_indices", "no_such_name")
    with pytest.raises(CompileError, match="no_such_name") as error:
        device.load(broken)
    assert "no_such_name" in error.value.log
    assert broken.expression in str(error.value)
    assert_works(device)


# Several threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["a cache", "no cache"])
def test_many_threads_load_and_launch_one_kernel_at_once(sources, tmp_path, monkeypatch, place):
    """It is compiled once where there is a cache, and stays usable by those who have it already."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "never" if place == "no cache" else tmp_path / "cache"
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(folder))
    compiled = []
    compile_one = cxx._compile
    monkeypatch.setattr(cxx, "_compile", lambda *args: (compiled.append(1), compile_one(*args)))
    devices = [sources.device() for _ in range(2)]
    barriers = fibers("reverse_static", 64)
    values = np.arange(640, dtype=np.int32)
    want = values.reshape(-1, 64)[:, ::-1].ravel()

    def work(i):
        for repeat in range(20):
            got = np.zeros_like(values)
            run(devices[i % 2], barriers, 10, 64, in_=values, out=got)
            assert_equal(got, want, f"thread {i}, repeat {repeat}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(compiled) == 1
