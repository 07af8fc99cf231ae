"""Hashes of the blocks of a sequence, each chained to the block before.

They are the same in every process and on every machine.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from ..ops import checks

_WORD_MASK = 2**64 - 1


def block_hashes(
    token_ids: Any, block_tokens: int, *, parent: int = 0, bits: int = 128
) -> list[int]:
    """Hash the full blocks of a sequence; equal hashes mean equal tokens from the start on.

    Parameters
    ----------
    token_ids : list of ints, or array (T,) of an integer type on the host
    block_tokens : tokens per block; a last block that is not full has no hash
    parent : hash of the block before the first one; 0 at the start of a sequence, or another number
        for sequences that must not share blocks, such as those of another model or adapter
    bits : 128, or 64 for caches of one process: of 10**9 hashes two of 64 bits are equal with a
        probability of 2.7 %, and equal ones can be constructed

    Returns
    -------
    list of int, (T // block_tokens,), each from 0 to 2**bits - 1

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    A hash is BLAKE2b of `bits` over the parent's hash, as little-endian number of as many bits, and
    the token ids, as 64-bit ones; so it is the same on every machine and in every process.

    Examples
    --------
    >>> first, second = block_hashes(range(10), 4)
    >>> block_hashes([4, 5, 6, 7], 4, parent=first) == [second]
    True
    >>> block_hashes(range(4), 4, bits=64)[0].bit_length() <= 64
    True
    """
    checks.require_int(block_tokens, "block_tokens")
    if block_tokens < 1:
        raise ValueError(f"block_tokens: expected at least 1, got {block_tokens}")
    checks.require_int(bits, "bits")
    if bits not in (64, 128):
        raise ValueError(f"bits: expected 64 or 128, got {bits}")
    checks.require_int(parent, "parent")
    if not -(2 ** (bits - 1)) <= parent < 2**bits:
        raise ValueError(f"parent: expected an int of {bits} bits, got {parent}")
    data = _token_array(token_ids).astype("<i8").tobytes()
    block_bytes, hash_bytes = 8 * int(block_tokens), int(bits) // 8
    before = (int(parent) % 2 ** int(bits)).to_bytes(hash_bytes, "little")
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        block = before + data[start : start + block_bytes]
        before = blake2b(block, digest_size=hash_bytes).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


def hash_list(hashes: Any) -> list[int]:
    """Return hashes as ints from 0 to 2**128 - 1; a negative one is that of the same 64 bits."""
    if isinstance(hashes, np.ndarray):
        if hashes.ndim != 1 or (hashes.size and hashes.dtype.kind not in "iuO"):
            raise ValueError(f"hashes: expected integers (n,), got {hashes.dtype} {hashes.shape}")
        hashes = hashes.tolist()
    try:
        numbers = list(hashes)
    except TypeError:
        kind = type(hashes).__name__
        raise TypeError(f"hashes: expected a list of ints, got {kind}") from None
    if not all(type(hash) is int for hash in numbers):
        for hash in numbers:
            checks.require_int(hash, "hashes")
        numbers = [int(hash) for hash in numbers]
    if numbers and (min(numbers) < 0 or max(numbers) > _WORD_MASK):
        outside = [hash for hash in numbers if not -(2**63) <= hash < 2**128]
        if outside:
            raise ValueError(f"hashes: expected ints of 64 or 128 bits, got {outside[0]}")
        numbers = [hash & _WORD_MASK if hash < 0 else hash for hash in numbers]
    return numbers


def _token_array(token_ids: Any) -> np.ndarray[Any, Any]:
    if isinstance(token_ids, (str, bytes)):
        raise TypeError(f"token_ids: expected ints, got {type(token_ids).__name__}")
    try:
        array = np.asarray(list(token_ids) if isinstance(token_ids, range) else token_ids)
    except (TypeError, RuntimeError) as error:  # it is on a GPU, or its bits are not its values
        raise TypeError(f"token_ids: expected a list or an array of the host, {error}") from None
    except ValueError:  # lists of several lengths
        raise ValueError(f"token_ids: expected ints, got {token_ids!r}") from None
    if array.ndim != 1:
        raise ValueError(f"token_ids: expected one dimension, got {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"token_ids: expected ints, got {array.dtype}")
    if array.dtype == np.uint64 and array.max() > 2**63 - 1:
        raise ValueError(f"token_ids: expected 64-bit ints, got {array.max()}")
    return array
