"""Files of a disk tier that were damaged, cut, or made for others never give wrong blocks."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from disk_cases import (
    IDENTITY,
    PAGE_BYTES,
    checksum_of_previous,
    contents,
    filled,
    filled_by_previous,
    open_tier,
    reads,
    write,
)

from kvcupy.cache.tiered import disk_format
from kvcupy.cache.tiered.disk_format import Layout, Record, checksum, previous_checksum

BLOCKS = {0: 10, 1: 11, 2: 12}  # hash by slot
LAYOUT = Layout(3, PAGE_BYTES)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def whole(path):
    """The bytes of a file with three blocks."""
    return filled(path, BLOCKS, num_slots=3)


def served(path, expected=IDENTITY):
    """Open a file and return the slots that it lists, and those whose block is served."""
    with open_tier(path, 3, identity=expected, num_threads=1) as tier:
        listed = {slot for _, slot in tier.entries()}
        assert len(listed) == len(tier.entries())
        good = {slot for slot, block_hash in BLOCKS.items() if reads(tier, slot, block_hash)}
        assert {slot for _, slot in tier.entries()} == good  # others were dropped
        return listed, good


# --- Damage ---------------------------------------------------------------------------------------


def flip(path, whole, byte, bit):
    """Flip one bit of the file and make the rest as it was."""
    with path.open("r+b") as file:
        file.write(whole)
        file.seek(byte)
        file.write(bytes([whole[byte] ^ 1 << bit]))


def test_no_bit_of_the_header_can_flip_unseen(path, whole):
    used = [b for b in range(4096) if whole[b]]
    assert max(used) == 4095 and len(used) > 60
    for byte in used:
        for bit in range(8):
            flip(path, whole, byte, bit)
            with pytest.raises(ValueError, match=r"^disk: expected "):
                open_tier(path, 3)
    for byte in range(0, 4096, 61):
        flip(path, whole, byte, byte % 8)
        with pytest.raises(ValueError, match=r"^disk: expected "):
            open_tier(path, 3)


def test_no_bit_of_a_record_can_flip_unseen(path, whole):
    for byte in range(LAYOUT.record_at(1), LAYOUT.record_at(2)):
        for bit in range(8):
            flip(path, whole, byte, bit)
            assert served(path) == ({0, 2}, {0, 2}), (byte, bit)


def test_no_byte_of_a_payload_can_change_unseen(path, whole):
    start = LAYOUT.payload_at(1)
    for byte in range(start, start + PAGE_BYTES):
        flip(path, whole, byte, byte % 8)
        assert served(path) == ({0, 1, 2}, {0, 2}), byte
        assert served(path) == ({0, 2}, {0, 2})  # dropped for good


def test_bytes_between_do_not_matter(path, whole):
    between = [*range(LAYOUT.record_at(3), LAYOUT.payload_at(0), 97)]
    between += [*range(LAYOUT.payload_at(1) + PAGE_BYTES, LAYOUT.payload_at(2), 97)]
    for byte in between:
        flip(path, whole, byte, byte % 8)
        assert served(path) == ({0, 1, 2}, {0, 1, 2}), byte


def test_a_record_counts_in_its_own_place_only(path, whole):
    """Slot 1 has record and payload of slot 0, as after a misplaced write."""
    changed = bytearray(whole)
    for place, size in ((LAYOUT.record_at, 64), (LAYOUT.payload_at, PAGE_BYTES)):
        changed[place(1) : place(1) + size] = whole[place(0) : place(0) + size]
    path.write_bytes(changed)
    assert served(path) == ({0, 2}, {0, 2})


def test_a_record_of_another_length_is_none(path, whole):
    page = contents(11)
    for num_bytes, there in ((PAGE_BYTES, {0, 1, 2}), (PAGE_BYTES - 1, {0, 2})):
        record = Record(11, 99, 1, num_bytes, checksum(11, [page[:num_bytes]]))
        with path.open("r+b") as file:
            file.seek(LAYOUT.record_at(1))
            file.write(disk_format.encode_record(record))
        assert served(path) == (there, there)


def test_payloads_of_other_slots_are_not_taken(path, whole):
    changed = bytearray(whole)
    first, second = LAYOUT.payload_at(0), LAYOUT.payload_at(1)
    changed[first : first + PAGE_BYTES] = whole[second : second + PAGE_BYTES]
    path.write_bytes(changed)
    assert served(path) == ({0, 1, 2}, {1, 2})


# --- Checksums ------------------------------------------------------------------------------------


def test_the_checksum_is_the_same_for_ever():
    assert checksum(10, [contents(10, 20_000)]).hex() == "d7e695becff686fd32b2c460eef03cbb"
    assert previous_checksum(10, [contents(10, 20_000)]).hex() == "0f40f25c0d7bda3914e5d59c4c25fdf5"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5000, 20_000])
def test_the_previous_checksum_does_not_depend_on_parts(size):
    page = contents(10, size)
    expected = checksum_of_previous(10, bytes(page))
    for cuts in ([], [1], [4096], [100, 9000], [4096, 8192, 8200]):
        edges = [0, *(cut for cut in cuts if cut < size), size]
        parts = [page[start:end] for start, end in itertools.pairwise(edges)]
        assert previous_checksum(10, parts) == expected, cuts


def test_records_of_hashes_of_64_bits_are_those_of_files_written_before():
    record = Record(2**64 - 3, 7, 2, 5000, bytes(range(16)))
    expected = "fdffffffffffffff0000000000000000" + "0700000000000000" + "02000000" + "88130000"
    expected += "000102030405060708090a0b0c0d0e0f" + "6798eb830d9b46d869b053b42e4feaa8"
    raw = disk_format.encode_record(record)
    assert raw.hex() == expected
    assert disk_format.decode_record(memoryview(raw), disk_format.Layout(3, 5000), 2) == record


def test_the_checksum_knows_hash_and_length():
    page = contents(10, 8192)
    changed = [checksum(10, [page]), checksum(11, [page]), checksum(2**127 + 10, [page])]
    changed += [checksum(10, [page[:n]]) for n in (8191, 4096, 4095, 1, 0)]
    assert len(set(changed)) == len(changed)
    zeros = memoryview(bytes(3 * 4096))
    assert len({checksum(1, [zeros[:n]]) for n in range(0, len(zeros), 64)}) == 192


def test_the_checksum_sees_blocks_that_tore():
    old, new = (np.array(contents(h, 10 * 4096)).reshape(10, 4096) for h in (10, 11))
    right = checksum(11, [memoryview(new).cast("B")])
    for torn in range(1, 2**10):
        rows = torn >> np.arange(10) & 1
        mixed = np.where(rows[:, None], old, new)
        assert checksum(11, [memoryview(mixed).cast("B")]) != right, torn
    swapped = new[[1, 0, *range(2, 10)]]
    assert checksum(11, [memoryview(swapped).cast("B")]) != right


def test_the_checksum_sees_two_flips_of_the_highest_bit():
    page = np.array(contents(10, 8192))
    right = checksum(10, [memoryview(page)])
    for second in range(15, 8192, 8):
        page[[7, second]] ^= 0x80
        assert checksum(10, [memoryview(page)]) != right, second
        page[[7, second]] ^= 0x80
    assert checksum(10, [memoryview(page)]) == right


# --- Files that were cut --------------------------------------------------------------------------


def test_a_file_may_be_cut_anywhere(path, whole):
    edges = [0, 8, 32, 4080, 4096, LAYOUT.payload_at(0), len(whole)]
    edges += [LAYOUT.record_at(slot) for slot in range(4)]
    edges += [LAYOUT.payload_at(slot) + PAGE_BYTES for slot in range(3)]
    lengths = {edge + d for edge in edges for d in (-1, 0, 1)} | {*range(0, len(whole), 211)}
    for length in sorted(n for n in lengths if 0 <= n <= len(whole)):
        path.write_bytes(whole[:length])
        if 0 < length < 4096:
            with pytest.raises(ValueError, match=r"^disk: expected "):
                open_tier(path, 3)
            assert path.stat().st_size == length  # untouched
            continue
        there = {s for s in BLOCKS if LAYOUT.payload_at(s) + PAGE_BYTES <= length}
        assert served(path) == (there, there), length
        assert path.stat().st_size == LAYOUT.num_bytes
        with open_tier(path, 3) as tier:
            write(tier, 2, 12)
        assert served(path)[1] == there | {2}


def test_a_file_cut_while_it_is_open_gives_misses(path):
    with open_tier(path, 3) as tier:
        for slot, block_hash in BLOCKS.items():
            write(tier, slot, block_hash)
        os.truncate(path, LAYOUT.payload_at(1) + 4096)
        assert [reads(tier, slot, h) for slot, h in BLOCKS.items()] == [True, False, False]
        assert tier.entries() == [(10, 0)]
        write(tier, 2, 12)
        assert reads(tier, 2, 12)


# --- Files of something else ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"identity": {**IDENTITY, "format": "fp16"}}, "expected format fp16, got bf16"),
        ({"identity": {**IDENTITY, "scales": "K"}}, "expected scales K, got none"),
        ({"identity": {"format": "bf16"}}, "expected layout none, got page_first"),
        ({"page_bytes": PAGE_BYTES + 1}, "expected bytes of a page 5001, got 5000"),
        ({"num_slots": 4}, r"expected number of slots .which disk_bytes gives. 4, got 3"),
    ],
)
def test_files_for_other_pages_raise_and_stay(path, whole, options, message):
    with pytest.raises(ValueError, match=f"disk: {message} in {path}") as caught:
        open_tier(path, **{"num_slots": 3, **options})
    assert path.read_bytes() == whole
    assert served(path) == ({0, 1, 2}, {0, 1, 2})
    del caught  # which until here kept all that the failed call had, but for its lock


def header_of(monkeypatch, version, identity=IDENTITY):
    with monkeypatch.context() as patch:
        patch.setattr(disk_format, "VERSION", version)
        return disk_format.encode_header(LAYOUT, identity)


def test_other_versions_raise(path, whole, monkeypatch):
    for version in (0, 3):
        path.write_bytes(header_of(monkeypatch, version) + whole[4096:])
        message = f"disk: expected version 1 or 2 .*, got {version} in {path}; remove the file"
        with pytest.raises(ValueError, match=message):
            open_tier(path, 3)


def test_the_previous_version_is_opened_and_kept(path):
    """Its blocks are read, and written as the release that made it can read them."""
    old = {"format": "bf16"}
    before = filled_by_previous(path, BLOCKS, 3, old)
    with pytest.raises(ValueError, match=r"disk: expected version 2 .*, got 1 .* remove the file"):
        open_tier(path, 3)
    with pytest.raises(ValueError, match=r"disk: expected format fp16, got bf16"):
        open_tier(path, 3, previous={"format": "fp16"})
    with open_tier(path, 3, previous=old) as tier:
        assert all(reads(tier, slot, h) for slot, h in BLOCKS.items())
        write(tier, 2, 99)
    after, at = path.read_bytes(), LAYOUT.record_at(2)
    assert after[:at] == before[:at]
    assert after[at + 32 : at + 48] == checksum_of_previous(99, bytes(contents(99)))
    with open_tier(path, 3, previous=old) as tier:
        assert all(reads(tier, slot, h) for slot, h in {**BLOCKS, 2: 99}.items())
    flip(path, after, LAYOUT.payload_at(2), 0)
    with open_tier(path, 3, previous=old) as tier:
        assert not reads(tier, 2, 99)


@pytest.mark.parametrize("found", [b"\0" * 9000, b"kv", b"#!/bin/sh\n" * 900])
def test_files_of_others_raise_and_stay(path, found):
    path.write_bytes(found)
    with pytest.raises(ValueError, match=f"disk: expected a file of a disk tier, got {path}"):
        open_tier(path)
    assert path.read_bytes() == found


# --- Encrypted files ---

KEY = bytes(range(32))


@pytest.fixture
def sealed(path):
    """The bytes of an encrypted file with three blocks."""
    return filled(path, BLOCKS, num_slots=3, encryption_key=KEY)


def opened(path, **options):
    """Open an encrypted file and return the listed slots, and those whose block is served."""
    with open_tier(path, 3, num_threads=1, **{"encryption_key": KEY, **options}) as tier:
        listed = {slot for _, slot in tier.entries()}
        return listed, {s for s, block_hash in BLOCKS.items() if reads(tier, s, block_hash)}


def test_an_encrypted_file_shows_no_block_no_hash_and_no_key(path):
    # A small hash is mostly zeros, as is a sealed byte before padding: these have 16 other bytes.
    blocks = {slot: int.from_bytes(range(slot + 1, slot + 17), "little") for slot in BLOCKS}
    sealed = filled(path, blocks, num_slots=3, encryption_key=KEY)
    plain = filled(path.with_name("plain"), blocks, num_slots=3)
    assert len(plain) == len(sealed)
    for block_hash in blocks.values():
        hash_bytes = block_hash.to_bytes(16, "little")
        assert hash_bytes in plain and hash_bytes not in sealed
        page = bytes(contents(block_hash))
        for start in range(0, PAGE_BYTES - 8, 8):
            assert page[start : start + 8] in plain and page[start : start + 8] not in sealed
    assert KEY not in sealed
    assert len({disk_format.payload_name(h) for h in blocks.values()}) == 3  # the bound of nonces
    again = filled(path.with_name("again"), blocks, num_slots=3, encryption_key=KEY)
    records, payloads = LAYOUT.record_at, LAYOUT.payload_at
    for slot in BLOCKS:  # neither shows that the blocks are equal
        assert again[records(slot) : records(slot + 1)] != sealed[records(slot) : records(slot + 1)]
        assert again[payloads(slot) :][:PAGE_BYTES] != sealed[payloads(slot) :][:PAGE_BYTES]


def test_no_bit_of_an_encrypted_record_can_flip(path, sealed):
    for byte in range(LAYOUT.record_at(1), LAYOUT.record_at(2)):
        for bit in range(0, 8, 3):
            flip(path, sealed, byte, bit)
            assert opened(path) == ({0, 2}, {0, 2}), (byte, bit)


def test_no_byte_of_an_encrypted_payload_can_change(path, sealed):
    start = LAYOUT.payload_at(1)
    for byte in [*range(start, start + PAGE_BYTES, 13), start + PAGE_BYTES - 1]:
        flip(path, sealed, byte, byte % 8)
        assert opened(path) == ({0, 1, 2}, {0, 2}), byte
        assert opened(path) == ({0, 2}, {0, 2})  # dropped for good


@pytest.mark.parametrize("parts", [("record",), ("payload",), ("record", "payload")])
def test_encrypted_blocks_cannot_be_moved(path, sealed, parts):
    """Not to another slot, not to another hash, not over a block that was there before."""
    places = {"record": (LAYOUT.record_at, 64), "payload": (LAYOUT.payload_at, PAGE_BYTES)}
    changed = bytearray(sealed)
    for place, size in (places[part] for part in parts):
        changed[place(1) : place(1) + size] = sealed[place(0) : place(0) + size]
    path.write_bytes(changed)
    listed, good = opened(path)
    assert good == {0, 2} and listed == ({0, 2} if "record" in parts else {0, 1, 2})


@pytest.mark.parametrize("parts", [("record",), ("payload",), ("record", "payload")])
def test_blocks_of_another_encrypted_file_do_not_open(path, sealed, parts):
    """It has the same key, hashes and slots, but another model."""
    other = path.with_name("other")
    foreign = filled(other, BLOCKS, num_slots=3, encryption_key=KEY, identity={"model": "b"})
    places = {"record": (LAYOUT.record_at, 64), "payload": (LAYOUT.payload_at, PAGE_BYTES)}
    changed = bytearray(sealed)
    for place, size in (places[part] for part in parts):
        changed[place(1) : place(1) + size] = foreign[place(1) : place(1) + size]
    path.write_bytes(changed)
    assert opened(path)[1] == {0, 2}


def test_another_key_or_none_raises_and_changes_nothing(path, sealed):
    for options, message in (
        ({"encryption_key": bytes(32)}, "expected encryption AES-256-GCM, key .* got AES-256-GCM"),
        ({"encryption_key": None}, "expected encryption none, got AES-256-GCM"),
    ):
        with pytest.raises(ValueError, match=f"disk: {message}"):
            opened(path, **options)
    assert path.read_bytes() == sealed
    assert opened(path)[1] == {0, 1, 2}
    plain = filled(path.with_name("plain"), BLOCKS, num_slots=3)
    path.write_bytes(plain)
    with pytest.raises(
        ValueError, match=r"disk: expected encryption AES-256-GCM, key .*, got none"
    ):
        opened(path)
    assert path.read_bytes() == plain


def test_encrypted_blocks_in_several_parts(path):
    """Also written and read by several threads at once."""
    pages = {h: contents(h) for h in range(20, 26)}
    cuts = [0, 1, 4097, PAGE_BYTES]

    def parts(memory):
        return [memory[a:b] for a, b in itertools.pairwise(cuts)]

    with open_tier(path, encryption_key=KEY) as tier:
        before = {h: bytes(page) for h, page in pages.items()}
        items = [(slot, h, parts(page)) for slot, (h, page) in enumerate(pages.items())]
        assert tier.write_many(items) == [None] * 6
        assert {h: bytes(page) for h, page in pages.items()} == before, "written blocks change"
    with open_tier(path, encryption_key=KEY) as tier:
        into = {h: memoryview(bytearray(PAGE_BYTES)) for h in pages}
        items = [(slot, h, parts(into[h])) for slot, h in enumerate(pages)]
        assert tier.read_many(items) == [True] * 6
        assert into == pages


# --- A system that fails --------------------------------------------------------------------------


def blocks_written(path, monkeypatch, seed):
    """Write over a flushed file; return its bytes then, every later write, and its blocks then."""
    rng = np.random.default_rng(seed)
    before = filled(path, BLOCKS, num_slots=3)
    writes = []
    real = os.pwritev

    def pwritev(descriptor, parts, offset):
        writes.append((offset, b"".join(parts)))
        return real(descriptor, parts, offset)

    touched = set()
    with monkeypatch.context() as patch, open_tier(path, 3) as tier:
        patch.setattr(os, "pwritev", pwritev)
        for block_hash in range(20, 24):
            slot = int(rng.integers(2))  # slot 2 stays as it was
            touched.add(slot)
            write(tier, slot, block_hash)
    return before, writes, BLOCKS.keys() - touched


def lose_power(before, writes, rng):
    """Return the file if of each 4096 bytes any state that they ever had reached the disk."""
    states = {}
    now = bytearray(before)
    for offset, data in writes:
        now[offset : offset + len(data)] = data
        for block in range(offset // 4096, (offset + len(data) - 1) // 4096 + 1):
            start = block * 4096
            first = [before[start : start + 4096]]
            states.setdefault(start, first).append(bytes(now[start : start + 4096]))
    image = bytearray(before)
    for start, choices in states.items():
        image[start : start + 4096] = choices[rng.integers(len(choices))]
    return bytes(image)


def count_after_power_loss(path, monkeypatch):
    """Return how many blocks were served in how many openings; a wrong one is an AssertionError."""
    good = missed = 0
    for seed in range(8):
        path.unlink(missing_ok=True)
        before, writes, untouched = blocks_written(path, monkeypatch, seed)
        rng = np.random.default_rng(seed)
        for _ in range(40):
            path.write_bytes(lose_power(before, writes, rng))
            with open_tier(path, 3, num_threads=1) as tier:
                entries = tier.entries()
                assert untouched <= {slot for _, slot in entries}
                for block_hash, slot in entries:
                    whole = reads(tier, slot, block_hash)
                    assert whole or slot not in untouched
                    good, missed = good + whole, missed + (not whole)
    return good, missed


def test_whatever_a_power_loss_leaves_no_wrong_block_is_served(path, monkeypatch):
    good, missed = count_after_power_loss(path, monkeypatch)
    assert good > 320 and missed > 100  # it did tear, and whole blocks stayed


def test_control_without_checksums_power_loss_gives_wrong_blocks(path, monkeypatch):
    monkeypatch.setattr(disk_format, "checksum", lambda *_: bytes(16))
    with pytest.raises(AssertionError):
        count_after_power_loss(path, monkeypatch)
