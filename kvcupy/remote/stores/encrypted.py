"""Encryption around any backend: AES-256-GCM, with a subkey for each block."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...extras import install
from .backend import Backend, Block, num_bytes_of

_SECRET_BYTES, _NONCE_BYTES = 32, 12
SEAL_BYTES = _NONCE_BYTES + 16  # nonce and tag of a sealed block
_EXTRACT_SALT = b"kvcupy block encryption, version 1"


class BlockCipher:
    """Encrypts and authenticates blocks, each under a name such as its hash.

    A block is encrypted under the subkey HKDF-SHA256(key, context and name), with a random nonce of
    96 bits, and context and name as associated data. The context is the digest of a `PoolIdentity`.
    Only the key's owners can derive names of blocks, by `name_key`.

    Why no nonce repeats under one key: GCM with random nonces is safe for 2**32 messages per key
    (NIST SP 800-38D, 8.3). Here a key is a subkey, and its messages are the blocks that were sealed
    under one name, so the bound holds for each block by itself, however many there are: after
    2**20 writes of one block the chance that two had the same nonce is 2**-57. No counter has to
    survive a crash, a fork or a second process, and a copy of a file repeats only what it has.

    >>> cipher = BlockCipher(bytes(range(32)), bytes(16))
    >>> page, sealed = memoryview(b"key and value"), memoryview(bytearray(13))
    >>> seal = cipher.seal(b"name", [page], sealed)
    >>> cipher.open(b"other name", seal, [memoryview(bytearray(sealed))])
    False
    >>> cipher.open(b"name", seal, [sealed]), bytes(sealed)
    (True, b'key and value')
    """

    def __init__(self, key: Any, context: bytes) -> None:
        if not isinstance(key, bytes):  # errors do not contain the key
            raise TypeError(f"encryption_key: expected bytes, got {type(key).__name__}")
        if len(key) != _SECRET_BYTES:
            raise ValueError(f"encryption_key: expected {_SECRET_BYTES} bytes, got {len(key)}")
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
        """Encrypt a block into `out`; return its nonce and tag, to be stored with the block."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        context = self._gcm_of(name, nonce, None).encryptor()
        context.authenticate_additional_data(self._context + name)
        start = 0
        for part in parts:
            start += context.update_into(part, out[start:])
        context.finalize()
        return nonce + bytes(context.tag)

    def open(self, name: bytes, seal: bytes, parts: Sequence[memoryview]) -> bool:
        """Decrypt a block in place; return whether it is authentic."""
        context = self._gcm_of(name, seal[:_NONCE_BYTES], seal[_NONCE_BYTES:]).decryptor()
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


class EncryptedBackend:
    """Blocks that another backend keeps encrypted, each with its seal in front.

    The header of a block is encrypted with it. A block that does not authenticate is dropped, and
    is "failed". A put encrypts into a buffer, and a get decrypts in place.
    """

    def __init__(self, backend: Backend, cipher: BlockCipher) -> None:
        self._backend, self._cipher = backend, cipher
        self.blocks_per_call, self.num_threads = backend.blocks_per_call, backend.num_threads
        self.exists, self.discard, self.clear = backend.exists, backend.discard, backend.clear
        self.close = backend.close
        self._buffers: list[bytearray] = []  # not in use
        self._counts: Counter[str] = Counter(unauthentic=0)

    def __repr__(self) -> str:
        return f"<encrypted {self._backend!r}>"

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        buffers = [
            self._buffers.pop() if self._buffers else bytearray(num_bytes_of(block))
            for block in blocks
        ]
        sealed = []
        for key, block, buffer in zip(keys, blocks, buffers, strict=True):
            out = memoryview(buffer)
            seal = self._cipher.seal(key, block, out)
            sealed.append([memoryview(bytearray(seal)), out])
        outcomes = self._backend.put(keys, sealed, used_ns, deadline)
        self._buffers += buffers
        return outcomes

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool | None]:  # fmt: skip
        seals = [bytearray(SEAL_BYTES) for _ in keys]
        sealed = [[memoryview(seal), *block] for seal, block in zip(seals, blocks, strict=True)]
        arrived = self._backend.get(keys, sealed, used_ns, deadline)
        damaged = [
            i for i, whole in enumerate(arrived)
            if whole and not self._cipher.open(keys[i], bytes(seals[i]), blocks[i])
        ]  # fmt: skip
        for i in damaged:
            arrived[i] = None
        if damaged:
            self._counts["unauthentic"] += len(damaged)
            self._backend.discard([keys[i] for i in damaged], deadline)
        return arrived

    def stats(self) -> dict[str, Any]:
        """Also count blocks that did not authenticate (`unauthentic`)."""
        return {**self._backend.stats(), **self._counts}
