"""kv.block_hashes: chained hashes of full blocks of tokens."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from kvcupy.cache.pages import block_hashes, hash_list

# Of the hashes of 0 to 31 in blocks of 16, and a pool of 2 layers of 8 heads of 128 in bf16.
GOLDEN_KEYS = [
    "2576f6f1b164480bc116fc24c2989ce206a91164ebb1e8a9f9a9ad71dc121a99",
    "3ab7e63ea9ee596250fe01e444a1eccc49fa993ce6a1f3efc8f7e946d34f3fbd",
]


def by_hand(tokens, size, parent=0, num_bytes=8):
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        block = tokens[start : start + size]
        packed = parent.to_bytes(num_bytes, "little") + struct.pack(f"<{size}q", *block)
        parent = int.from_bytes(hashlib.blake2b(packed, digest_size=num_bytes).digest(), "little")
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 17])
def test_one_hash_a_full_block(count):
    tokens = [7 * i - 20 for i in range(count)]
    assert block_hashes(tokens, 4, bits=64) == by_hand(tokens, 4)
    assert block_hashes(tokens, 4) == by_hand(tokens, 4, num_bytes=16)
    assert len(block_hashes(tokens, 4)) == count // 4


def test_the_hash_is_the_same_for_ever():
    assert block_hashes([1, 2, 3, 4], 2, bits=64) == [
        8901564848246840783, 5144891096145841010
    ]  # fmt: skip
    assert block_hashes([1, 2, 3, 4], 2) == [
        23729710943973441516350355176101919131, 77515808601631131430731633927290120027
    ]  # fmt: skip


@pytest.mark.parametrize("seed", ["0", "1"])
def test_hashes_and_keys_are_those_of_every_other_process(seed):
    program = (
        "import kvcupy as kv; pool = kv.KVPool(2, 16, 2, 8, 128, device='host');"
        "hashes = kv.block_hashes(range(32), 16, bits=128);"
        "print(hashes, [k.hex() for k in kv.BlockKeys(pool, tenant='a').keys(hashes)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    hashes = by_hand(list(range(32)), 16, num_bytes=16)
    assert output.strip() == f"{hashes} {GOLDEN_KEYS}"


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_array(dtype):
    tokens = np.arange(100, 110, dtype=dtype)
    assert block_hashes(tokens, 3) == block_hashes(list(range(100, 110)), 3)
    assert block_hashes(tokens[::2], 2) == block_hashes([100, 102, 104, 106, 108], 2)
    assert block_hashes(tokens.astype(">i8"), 3) == block_hashes(tokens, 3)


def test_chained():
    one, two = block_hashes([1, 2, 3, 4], 2)
    assert block_hashes([3, 4], 2, parent=one) == [two]
    assert block_hashes([3, 4], 2) != [two], "what came before counts"
    assert block_hashes([9, 2, 3, 4], 2)[1] != two
    assert block_hashes([1, 2], 2, parent=5) != [one]
    assert block_hashes([1, 2], 2, parent=-1) == block_hashes([1, 2], 2, parent=2**128 - 1)


def test_a_suffix_of_a_block_changes_its_hash_alone():
    a, b = block_hashes([1, 2, 3, 4], 2), block_hashes([1, 2, 3, 5], 2)
    assert a[0] == b[0] and a[1] != b[1]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([1.5], 1), TypeError, "token_ids"),
        (([True], 1), TypeError, "token_ids"),
        (("abc", 1), TypeError, "token_ids"),
        ((b"abc", 1), TypeError, "token_ids"),
        (([[1, 2]], 1), ValueError, "token_ids"),
        ((3, 1), ValueError, "token_ids"),
        (([2**63], 1), ValueError, "token_ids"),
        (([2**70], 1), TypeError, "token_ids"),
        (([1], 0), ValueError, "block_tokens"),
        (([1], 2.0), TypeError, "block_tokens"),
        (([1], True), TypeError, "block_tokens"),
    ],
)
def test_refused(arguments, error, said):
    with pytest.raises(error, match=f"^{said}: expected"):
        block_hashes(*arguments)


def test_chained_with_64_bits():
    one, two = block_hashes([1, 2, 3, 4], 2, bits=64)
    assert block_hashes([3, 4], 2, parent=one, bits=64) == [two]
    assert max(one, two) < 2**64 <= min(block_hashes([1, 2, 3, 4], 2))
    [negative] = block_hashes([1, 2], 2, parent=-1, bits=64)
    assert [negative] == block_hashes([1, 2], 2, parent=2**64 - 1, bits=64)
    with pytest.raises(ValueError, match=r"^parent: expected an int of 64 bits"):
        block_hashes([1], 1, parent=2**64, bits=64)


@pytest.mark.parametrize("bits", [0, 32, 65, 256, -64])
def test_bits_that_are_refused(bits):
    with pytest.raises(ValueError, match=r"^bits: expected 64 or 128"):
        block_hashes([1], 1, bits=bits)


@pytest.mark.parametrize(("parent", "error"), [(2**128, ValueError), (1.0, TypeError)])
def test_parents_that_are_refused(parent, error):
    with pytest.raises(error, match=r"^parent: expected"):
        block_hashes([1], 1, parent=parent)


def test_hashes_with_a_sign_are_the_same_64_bits():
    assert hash_list([0, 2**64 - 1, -1, -(2**63)]) == [0, 2**64 - 1, 2**64 - 1, 2**63]
    assert hash_list(np.array([-1, 3])) == [2**64 - 1, 3]
    assert hash_list(np.array([2**63 + 1], np.uint64)) == [2**63 + 1]
    assert hash_list((np.int64(4), np.uint8(5))) == [4, 5]
    assert hash_list(iter([1, 2])) == [1, 2]
    wide = [2**128 - 1, 2**64]
    assert hash_list(wide) == hash_list(np.array(wide, object)) == wide
    assert hash_list([]) == hash_list(np.array([])) == []


@pytest.mark.parametrize(
    ("hashes", "error"),
    [([1.0], TypeError), ([True], TypeError), (5, TypeError), (["a"], TypeError),
     ([2**128], ValueError), ([-(2**63) - 1], ValueError), (np.zeros((1, 1), int), ValueError),
     (np.ones(2), ValueError)],
)  # fmt: skip
def test_hashes_that_are_refused(hashes, error):
    with pytest.raises(error, match=r"^hashes: expected"):
        hash_list(hashes)
