"""Hashes that identify blocks: of their token ids, each chained to the block before."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from ...ops import checks

_MASK = 2**64 - 1


def block_hashes(token_ids: Any, block_tokens: int, *, parent: int = 0) -> list[int]:
    """Hash the full blocks of a sequence; equal hashes mean equal tokens from the start on.

    Parameters
    ----------
    token_ids : list of ints, or array (T,) of an integer type on the host
    block_tokens : tokens per block; a last block that is not full has no hash
    parent : hash of the block before the first one; 0 at the start of a sequence, or another number
        for sequences that must not share blocks, such as those of another model or adapter

    Returns
    -------
    list of int, (T // block_tokens,), each from 0 to 2**64 - 1

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    A hash is BLAKE2b of 8 bytes over the parent's hash and the token ids, all as 64-bit
    little-endian numbers; so it is the same on every machine and in every process.

    Examples
    --------
    >>> first, second = block_hashes(range(10), 4)
    >>> block_hashes([4, 5, 6, 7], 4, parent=first) == [second]
    True
    """
    checks.require_int(block_tokens, "block_tokens")
    if block_tokens < 1:
        raise ValueError(f"block_tokens: expected at least 1, got {block_tokens}")
    checks.require_int(parent, "parent")
    if not -(2**63) <= parent < 2**64:
        raise ValueError(f"parent: expected an int of 64 bits, got {parent}")
    data = _token_array(token_ids).astype("<i8").tobytes()
    block_bytes = 8 * int(block_tokens)
    before = (int(parent) & _MASK).to_bytes(8, "little")
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        before = blake2b(before + data[start : start + block_bytes], digest_size=8).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


def hash_list(hashes: Any) -> list[int]:
    """Return hashes as ints from 0 to 2**64 - 1; a negative one has the same 64 bits."""
    if isinstance(hashes, np.ndarray):
        if hashes.ndim != 1 or (hashes.size and hashes.dtype.kind not in "iu"):
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
    if numbers and (min(numbers) < 0 or max(numbers) > _MASK):
        outside = [hash for hash in numbers if not -(2**63) <= hash <= _MASK]
        if outside:
            raise ValueError(f"hashes: expected ints of 64 bits, got {outside[0]}")
        numbers = [hash & _MASK for hash in numbers]
    return numbers


def _token_array(token_ids: Any) -> np.ndarray[Any, Any]:
    if isinstance(token_ids, (str, bytes)):
        raise TypeError(f"token_ids: expected ints, got {type(token_ids).__name__}")
    try:
        array = np.asarray(list(token_ids) if isinstance(token_ids, range) else token_ids)
    except TypeError as error:  # it is on a GPU
        raise TypeError(f"token_ids: expected a list or an array of the host, {error}") from None
    if array.ndim != 1:
        raise ValueError(f"token_ids: expected one dimension, got {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"token_ids: expected ints, got {array.dtype}")
    if array.dtype == np.uint64 and array.max() > 2**63 - 1:
        raise ValueError(f"token_ids: expected 64-bit ints, got {array.max()}")
    return array
