"""`slot_mapping` and `page_table_csr`, by what a user sees of them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import INDEX_DTYPE, POISON_SLOT, Case, examples, poisoned_table
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import view

LENGTHS = (17, 0, 1, 16, 32, 33, 5)
APPENDED = (17, 0, 1, 3, 16, 2, 0)


class IndexCase(Case):
    """Index arrays between canaries, with calls that check everything."""

    def indices(self, values, dtype="int32", cut=None):
        return self.place(np.asarray(values).astype(INDEX_DTYPE[dtype]), dtype, cut)

    def numpy(self, array):
        return np.asarray(self.device.to_numpy(array))

    def slots_of(self, table, seq_lens, append_lens, page_size, *, out=None):
        got = kv.slot_mapping(
            table.array, seq_lens.array, append_lens.array, page_size,
            out=None if out is None else out.array,
        )  # fmt: skip
        want = reference.slot_mapping(table.view, seq_lens.view, append_lens.view, page_size)
        assert got.shape == want.shape
        assert self.numpy(got).dtype == np.int64 and self.numpy(got).tolist() == want.tolist()
        if out is not None:
            out.view[...] = want
        self.check("slot_mapping", [])

    def csr(self, table, seq_lens, page_size):
        got = kv.page_table_csr(table.array, seq_lens.array, page_size)
        want = reference.page_table_csr(table.view, seq_lens.view, page_size)
        assert len(got) == 3
        for name, a, b in zip(("indptr", "indices", "last_page_len"), got, want, strict=True):
            assert self.numpy(a).dtype == np.int32, name
            assert self.numpy(a).tolist() == b.tolist(), name
        self.check("page_table_csr", [])


def test_slot_mapping_by_hand(device):
    table = device.asarray(np.array([[4, 1], [7, POISON_SLOT]], np.int32))
    lengths, appended = (device.asarray(np.array(a, np.int32)) for a in ([6, 3], [3, 2]))
    got = kv.slot_mapping(table, lengths, appended, 4)
    assert np.asarray(device.to_numpy(got)).tolist() == [19, 4, 5, 29, 30]


def test_slot_mapping_into_an_output(device):
    case = IndexCase(device, 2)
    table = case.indices(poisoned_table(case.rng, LENGTHS, 4))
    total = sum(APPENDED)
    for shape, cut in (((total,), None), ((total + 4,), lambda a: a[2:-2])):
        out = case.place(np.full(shape, 99, np.int64), "int64", cut)
        case.slots_of(table, case.indices(LENGTHS), case.indices(APPENDED), 4, out=out)


def test_slots_past_two_to_the_31(device):
    """A page number fits int32, its slots do not."""
    case = IndexCase(device, 3)
    table = case.indices([[2**31 - 1, 2**30], [5, POISON_SLOT]])
    case.slots_of(table, case.indices([130, 1]), case.indices([70, 1]), 128)


def test_without_sequences_or_tokens(device):
    case = IndexCase(device, 5)
    none = case.indices([])
    for table in (case.indices(np.zeros((0, 4))), case.indices(np.zeros((0, 0)))):
        case.slots_of(table, none, none, 16)
        case.csr(table, none, 16)
    table = case.indices(np.full((3, 2), POISON_SLOT))
    case.slots_of(table, case.indices([0] * 3), case.indices([0] * 3), 16)
    case.csr(table, case.indices([0] * 3), 16)


@pytest.mark.parametrize("columns", [0, 4])
def test_without_sequences_an_output_is_padding(device, columns):
    """Else a padded store would write the slots of the step before."""
    none = device.asarray(np.zeros(0, np.int64))
    out = device.asarray(np.array([5, 6, 7]))
    table = device.zeros((0, columns), "int32")
    kv.slot_mapping(table, none, none, 16, out=out)
    assert device.to_numpy(out).tolist() == [-1, -1, -1]


def test_page_table_csr_by_hand(device):
    table = device.asarray(np.array([[4, 1], [POISON_SLOT] * 2, [7, POISON_SLOT]], np.int32))
    got = kv.page_table_csr(table, device.asarray(np.array([8, 0, 3], np.int32)), 4)
    assert [np.asarray(device.to_numpy(a)).tolist() for a in got] == [
        [0, 2, 2, 3],
        [4, 1, 7],
        [4, 0, 3],
    ]


@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_page_table_csr_takes_aligned_elements(device, name):
    """A GPU can read no others, and strides of five bytes lead to them."""
    call = {
        "block_table": device.asarray(np.array([[7, 3], [5, 0]], np.int32)),
        "seq_lens": device.asarray(np.array([5, 2], np.int32)),
    }
    array = view(call[name])
    raw = device.zeros((64,), np.uint8)
    strides = (5, 4)[: array.ndim]
    odd = kv.ArrayView(
        view(raw).pointer, array.shape, strides, array.format, array.device, owner=raw
    )
    with pytest.raises(ValueError, match=rf"^{name}: .*multiples of 4 bytes"):
        kv.page_table_csr(**{**call, name: odd}, page_size=4)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("stride", [4, 5, 8])
def test_lengths_that_are_read_on_the_host(device, start, stride):
    """`find_duplicate_slots` takes elements at any address, `slot_mapping` only aligned ones."""
    raw = np.zeros(64, np.uint8)
    for i, value in enumerate((2, 0, 2)):
        at = start + i * stride
        raw[at : at + 4] = np.array([value], np.int32).view(np.uint8)
    placed = device.asarray(raw)
    pointer = view(placed).pointer + start
    numbers = kv.ArrayView(pointer, (3,), (stride,), "int32", view(placed).device, owner=placed)
    assert kv.find_duplicate_slots(numbers).tolist() == [2]
    table = device.asarray(np.array([[7], [5], [3]], np.int32))
    lengths = device.asarray(np.array([3, 3, 3], np.int32))
    if start or stride % 4:
        with pytest.raises(ValueError, match=r"^append_lens: .*multiples of 4 bytes"):
            kv.slot_mapping(table, lengths, numbers, 4)
    else:
        slots = kv.slot_mapping(table, lengths, numbers, 4)
        assert device.to_numpy(slots).tolist() == [29, 30, 13, 14]


@settings(max_examples=examples(80), deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.integers(1, 20),
    lengths=st.lists(st.integers(0, 90), max_size=9),
    shares=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    dtypes=st.tuples(*[st.sampled_from(["int32", "int64"])] * 3),
    given_out=st.booleans(),
)
def test_any_table(device, seed, page_size, lengths, shares, dtypes, given_out):
    case = IndexCase(device, seed)
    appended = [round(n * share) for n, share in zip(lengths, shares, strict=False)]
    table = case.indices(poisoned_table(case.rng, lengths, page_size), dtypes[0])
    seq_lens = case.indices(lengths, dtypes[1])
    out = None
    if given_out:
        out = case.place(np.full(sum(appended), 99, np.int64), "int64")
    case.slots_of(table, seq_lens, case.indices(appended, dtypes[2]), page_size, out=out)
    case.csr(table, seq_lens, page_size)


@pytest.mark.parametrize("wrong", ["seq_lens", "append_lens"])
def test_what_only_the_device_sees_is_a_fault(device, wrong):
    """A sequence past its row of the table; slots that the output has no room for."""
    table = device.asarray(np.array([[1, 0], [4, 3]], np.int32))
    seq_lens = device.asarray(np.array([5, 9 if wrong == "seq_lens" else 6], np.int32))
    append_lens = device.asarray(np.array([2, 3], np.int64))
    out = device.asarray(np.full(4 if wrong == "append_lens" else 7, 99, np.int64))
    kv.slot_mapping(table, seq_lens, append_lens, 4, out=out)
    want = [7, 0, 19, 12] if wrong == "append_lens" else [7, 0, 14, 15, -1, -1, -1]
    assert device.to_numpy(out).tolist() == want
    with pytest.raises(kv.IndexFault, match=rf"slot_mapping: {wrong}\[1\]"):
        kv.check_faults(device)
    kv.check_faults(device)


INT64_MAX = 2**63 - 1
# append_lens, seq_lens, the slots of an output of seven (a table of two rows, pages of four), and
# the argument that is at fault.
GARBAGE = {
    "a negative append first": ([-5, 3], [5, 6], [19, 12, 13, -1, -1, -1, -1], "append_lens"),
    "a negative append last": ([3, -5], [5, 6], [6, 7, 0, -1, -1, -1, -1], "append_lens"),
    "the least append": ([-(2**63), 3], [5, 6], [19, 12, 13, -1, -1, -1, -1], "append_lens"),
    "the largest append": (
        [2, INT64_MAX],
        [5, INT64_MAX],
        [7, 0, 16, 17, 18, 19, 12],
        "append_lens",
    ),
    "two appends whose sum overflows": (
        [INT64_MAX, INT64_MAX],
        [INT64_MAX, 6],
        [4, 5, 6, 7, 0, 1, 2],
        "append_lens",
    ),
    "a negative length": ([2, 3], [-1, 6], [-1, -1, 19, 12, 13, -1, -1], "seq_lens"),
    "the least length": ([2, 3], [-(2**63), 6], [-1, -1, 19, 12, 13, -1, -1], "seq_lens"),
    "a length below its append": ([2, 3], [1, 6], [-1, 4, 19, 12, 13, -1, -1], "seq_lens"),
    "the largest length": ([2, 3], [INT64_MAX, 6], [-1, -1, 19, 12, 13, -1, -1], "seq_lens"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_lengths_never_write_past_the_output(device, name):
    appended, lengths, want, wrong = GARBAGE[name]
    table = device.asarray(np.array([[1, 0], [4, 3]], np.int32))
    buffer = device.asarray(np.full(7 + 2 * 8, 99, np.int64))
    lengths, appended = (device.asarray(np.array(a, np.int64)) for a in (lengths, appended))
    kv.slot_mapping(table, lengths, appended, 4, out=buffer[8:-8])
    with pytest.raises(kv.IndexFault, match=rf"slot_mapping: {wrong}\["):
        kv.check_faults(device)
    got = device.to_numpy(buffer).tolist()
    assert got == [99] * 8 + want + [99] * 8


def test_a_page_number_whose_slot_is_no_int64(device):
    """Its slot is past the end of every cache, not padding and not the slot of another page."""
    table = device.asarray(np.array([[2**62, 3]], np.int64))
    lengths, appended = (device.asarray(np.array([n])) for n in (6, 6))
    got = device.to_numpy(kv.slot_mapping(table, lengths, appended, 4)).tolist()
    assert got == [INT64_MAX] * 4 + [12, 13]
