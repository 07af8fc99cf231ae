"""Blocks encrypted before they leave the process: AES-256-GCM, with a subkey for each block."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Any

from ..extras import install

KEY_BYTES = 32
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
    key_id : 16 hexadecimal digits that distinguish keys, and reveal nothing about them
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
        for name, value, size in (("key", key, KEY_BYTES), ("context", context, CONTEXT_BYTES)):
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
        self.key_id = self._expand(b"key id")[:8].hex()
        self.name_key = self._expand(b"name key")

    def __repr__(self) -> str:
        return f"<BlockCipher of key {self.key_id}>"

    def seal(
        self, name: bytes, parts: Sequence[memoryview], out: memoryview,
        *, nonce: bytes | None = None,
    ) -> bytes:  # fmt: skip
        """Encrypt a block into `out`.

        Parameters
        ----------
        parts : the block as bytes, in order
        out : writable bytes, as many as all parts have
        nonce : None, or the nonce of a block just sealed under another name, to store it once

        Returns
        -------
        bytes of `SEAL_BYTES` : the nonce and the tag, to be stored beside the block
        """
        if nonce is None:
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
        seal : as returned by `seal`, or without its last 4 bytes, where space is short
        parts : writable bytes, with the encrypted block. Undefined after False
        """
        decryption = self.decryption(name, seal)
        for part in parts:
            decryption.update(part)
        return decryption.is_authentic()

    def decryption(self, name: bytes, seal: bytes) -> Decryption:
        """Start to decrypt a block part by part, such as while it is copied."""
        context = self._gcm_of(name, seal[:NONCE_BYTES], seal[NONCE_BYTES:]).decryptor()
        context.authenticate_additional_data(self._context + name)
        return Decryption(context, self._invalid)

    def _gcm_of(self, name: bytes, nonce: bytes, tag: bytes | None) -> Any:
        subkey = self._expand(self._context + name)
        return self._cipher(self._aes(subkey), self._gcm(nonce, tag, min_tag_length=12))

    def _expand(self, info: bytes) -> bytes:
        """Return 32 bytes of HKDF-Expand; a context makes `info` longer than "name key"."""
        return hmac.digest(self._key, info + b"\1", "sha256")


class Decryption:
    """A block that is being decrypted in place, made by `BlockCipher.decryption`."""

    def __init__(self, context: Any, invalid: type[Exception]) -> None:
        self._context, self._invalid = context, invalid

    def update(self, part: Any) -> None:
        """Decrypt the next part of the block, a writable buffer of bytes."""
        self._context.update_into(part, part)

    def is_authentic(self) -> bool:
        """Return whether the block is authentic; called once, after all parts."""
        try:
            self._context.finalize()
        except self._invalid:
            return False
        return True


def key_for(encryption_key: Any, tenant: str | bytes = "") -> bytes:
    """Return the key of a tenant; `encryption_key` is the key, or a function from tenant to key.

    Raises
    ------
    TypeError, ValueError : the key is not 32 bytes, or the function raised. The message contains
        neither the key nor the tenant

    Examples
    --------
    >>> key_for(lambda tenant: {"a": bytes(32)}[tenant], "a") == bytes(32)
    True
    """
    key = encryption_key
    if callable(encryption_key):
        try:
            key = encryption_key(tenant)
        except Exception as error:
            kind = type(error).__name__
            raise ValueError(
                f"encryption_key: expected a key, but the function raised {kind}"
            ) from error
    if not isinstance(key, bytes):
        kind = type(key).__name__
        raise TypeError(f"encryption_key: expected bytes, or a function to bytes, got {kind}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"encryption_key: expected {KEY_BYTES} bytes, got {len(key)}")
    return key
