"""Blocks encrypted before they leave the process: AES-256-GCM, with a subkey for each block."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Any

from ...extras import install

SECRET_BYTES = 32
CONTEXT_BYTES = 16
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16  # nonce and tag of a sealed block

_EXTRACT_SALT = b"kvcupy block encryption, version 1"


class BlockCipher:
    """Encrypts and authenticates blocks, each under a name such as its hash.

    Parameters
    ----------
    key : 32 bytes, secret and uniformly random
    context : 16 bytes, such as the digest of a `PoolIdentity`; a block opens only in the context
        in which it was sealed

    Attributes
    ----------
    name_key : 32 bytes, from which only the key's owners can derive names of blocks

    Raises
    ------
    TypeError, ValueError : `key` or `context` has another type or length
    ImportError : the package cryptography is missing

    Notes
    -----
    A block is encrypted with AES-256-GCM under the subkey HKDF-SHA256(key, context and name), with
    a random nonce of 96 bits, and context and name as associated data. The ciphertext is as long as
    the block.

    Why no nonce repeats under one key: GCM with random nonces is safe for 2**32 messages per key
    (NIST SP 800-38D, 8.3). Here a key is a subkey, and its messages are the blocks that were sealed
    under one name, so the bound holds for each block by itself, however many there are: after
    2**20 writes of one block the chance that two had the same nonce is 2**-57. No counter has to
    survive a crash, a fork or a second process, and a copy of a file repeats only what it has.

    Threads may share a cipher.

    Examples
    --------
    >>> cipher = BlockCipher(bytes(range(32)), bytes(16))
    >>> page, sealed = memoryview(b"key and value"), memoryview(bytearray(13))
    >>> seal = cipher.seal(b"name", [page], sealed)
    >>> cipher.open(b"other name", seal, [memoryview(bytearray(sealed))])
    False
    >>> cipher.open(b"name", seal, [sealed]), bytes(sealed)
    (True, b'key and value')
    """

    def __init__(self, key: bytes, context: bytes) -> None:
        for name, value, size in (("key", key, SECRET_BYTES), ("context", context, CONTEXT_BYTES)):
            if not isinstance(value, bytes):
                raise TypeError(f"{name}: expected bytes, got {type(value).__name__}")
            if len(value) != size:
                raise ValueError(f"{name}: expected {size} bytes, got {len(value)}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise ImportError(f"encryption_key needs: {install('crypto')}") from error
        self._cipher, self._aes, self._gcm = Cipher, algorithms.AES, modes.GCM
        self._invalid: type[Exception] = InvalidTag
        self._key = hmac.digest(_EXTRACT_SALT, key, "sha256")  # HKDF-Extract
        self._context = context
        self.name_key = self._expand(b"name key")

    def seal(self, name: bytes, parts: Sequence[memoryview], out: memoryview) -> bytes:
        """Encrypt a block into `out`.

        Parameters
        ----------
        parts : the block as bytes, in order
        out : writable bytes, as many as all parts have

        Returns
        -------
        bytes of `SEAL_BYTES` : the nonce and the tag, to be stored with the block
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        context = self._gcm_of(name, nonce, None).encryptor()
        context.authenticate_additional_data(self._context + name)
        start = 0
        for part in parts:
            start += context.update_into(part, out[start:])
        context.finalize()
        return nonce + bytes(context.tag)

    def open(self, name: bytes, seal: bytes, parts: Sequence[memoryview]) -> bool:
        """Decrypt a block in place; return whether it is authentic.

        Parameters
        ----------
        seal : as returned by `seal`
        parts : writable bytes, with the encrypted block. Undefined after False
        """
        context = self._gcm_of(name, seal[:NONCE_BYTES], seal[NONCE_BYTES:]).decryptor()
        context.authenticate_additional_data(self._context + name)
        for part in parts:
            context.update_into(part, part)
        try:
            context.finalize()
        except self._invalid:
            return False
        return True

    def _gcm_of(self, name: bytes, nonce: bytes, tag: bytes | None) -> Any:
        subkey = self._expand(self._context + name)
        return self._cipher(self._aes(subkey), self._gcm(nonce, tag))

    def _expand(self, info: bytes) -> bytes:
        """Return 32 bytes of HKDF-Expand; a context makes `info` longer than "name key"."""
        return hmac.digest(self._key, info + b"\1", "sha256")
