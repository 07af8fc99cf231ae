"""Encryption around any backend: AES-256-GCM, with a subkey for each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .backend import Backend, Block, num_bytes_of
from .cipher import SEAL_BYTES, BlockCipher


class EncryptedBackend:
    """Blocks that another backend keeps encrypted, each with its seal in front.

    Parameters
    ----------
    backend : keeps blocks that are `SEAL_BYTES` longer
    cipher : of the user's key

    Notes
    -----
    The header of a block is encrypted with it. A block that does not authenticate is dropped, and
    is "failed". Bytes: a put encrypts into a buffer, and a get decrypts in place.
    """

    def __init__(self, backend: Backend, cipher: BlockCipher) -> None:
        self._backend, self._cipher = backend, cipher
        self.blocks_per_call, self.num_threads = backend.blocks_per_call, backend.num_threads
        self._buffers: list[bytearray] = []  # not in use
        self._counts: Counter[str] = Counter(unauthentic=0)

    def __repr__(self) -> str:
        return f"<encrypted {self._backend!r}>"

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self._backend.exists(keys, deadline)

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        buffers = [self._buffer(num_bytes_of(block)) for block in blocks]
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

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._backend.discard(keys, deadline)

    def clear(self, deadline: float) -> None:
        self._backend.clear(deadline)

    def close(self) -> None:
        self._backend.close()

    def stats(self) -> dict[str, Any]:
        """Also count blocks that did not authenticate (`unauthentic`)."""
        return {**self._backend.stats(), **self._counts}

    def _buffer(self, num_bytes: int) -> bytearray:
        try:
            return self._buffers.pop()
        except IndexError:
            return bytearray(num_bytes)
