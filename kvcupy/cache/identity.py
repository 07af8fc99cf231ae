"""Names for blocks outside one pool: what its bytes mean, and keys made of that and block hashes.

Identities, digests and keys are the same in every process and on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

from .. import checks
from .pages import hash_list
from .pool import MLAPool, Pool

DIGEST_BYTES = 16
KEY_BYTES = 32

_VERSION = 1  # of the wire order and of the fields of PoolIdentity
_MAX_ENCODED_BYTES = 4095
_WORD_MASK = 2**64 - 1


@dataclass(frozen=True)
class PoolIdentity:
    """The meaning of a page's bytes. Pools with equal identities exchange pages without conversion.

    Attributes
    ----------
    kind : "kv" or "mla"
    format : name of the number format, and which elements of a row are stored rotated
    page_size, num_layers, head_dim, v_head_dim : same as the pool's
    head_start, num_kv_heads : first head of the model in the pool, and number of heads in the pool
    total_kv_heads : number of heads of the model
    scales : whether K and V have a float32 scale per token and head
    wire : byte order of an exchanged page: "page_head" for pools of that layout,
        "page_first_direct" for all others
    version : of the wire order and of these attributes
    model : distinguishes models with pools of the same shape: weights, adapter, rotary settings

    Examples
    --------
    >>> import kvcupy as kv
    >>> pool = kv.KVPool(4, 16, 2, 8, 128, device="host")
    >>> one = PoolIdentity.of(pool, head_start=8, total_kv_heads=16, model="m")
    >>> one.difference(PoolIdentity.of(pool, total_kv_heads=16, model="m"))
    'head_start: expected 8, got 0'
    """

    kind: str
    format: str
    page_size: int
    num_layers: int
    head_start: int
    num_kv_heads: int
    total_kv_heads: int
    head_dim: int
    v_head_dim: int
    scales: bool
    wire: str
    version: int
    model: str

    @classmethod
    def of(
        cls, pool: Any, *, head_start: int = 0, total_kv_heads: int | None = None, model: str = ""
    ) -> PoolIdentity:
        """Identify a pool.

        Parameters
        ----------
        pool : a KVPool or an MLAPool
        head_start, total_kv_heads : the pool's first head and the number of heads of the model, if
            several pools share the model's heads. `total_kv_heads` defaults to the pool's heads
        model : as the attribute, at most about 3000 bytes

        Raises
        ------
        TypeError : an argument has the wrong type
        ValueError : the pool's heads exceed `total_kv_heads`, or `model` is too long
        """
        if not isinstance(pool, Pool):
            raise TypeError(f"pool: expected a KVPool or an MLAPool, got {type(pool).__name__}")
        checks.require_int(head_start, "head_start")
        heads = pool.num_kv_heads
        if total_kv_heads is None:
            total_kv_heads = heads
        checks.require_int(total_kv_heads, "total_kv_heads")
        if total_kv_heads < heads:
            raise ValueError(
                f"total_kv_heads: expected at least the {heads} heads of pool, got {total_kv_heads}"
            )
        if not 0 <= head_start <= total_kv_heads - heads:
            raise ValueError(
                f"head_start: expected the first of {heads} of {total_kv_heads} heads "
                f"(total_kv_heads), got {head_start}"
            )
        if not isinstance(model, str):
            raise TypeError(f"model: expected a str, got {type(model).__name__}")
        identity = cls(
            kind="mla" if isinstance(pool, MLAPool) else "kv", format=pool.stored_as,
            page_size=pool.page_size, num_layers=pool.num_layers, head_start=int(head_start),
            num_kv_heads=heads, total_kv_heads=int(total_kv_heads), head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim, scales=bool(pool.scale_parts),
            wire="page_head" if pool.layout == "page_head" else "page_first_direct",
            version=_VERSION, model=model,
        )  # fmt: skip
        if len(identity.encoded()) > _MAX_ENCODED_BYTES:
            raise ValueError(
                f"model: expected less than 4 KiB of JSON, got {len(model)} characters"
            )
        return identity

    def encoded(self) -> bytes:
        """Encode as JSON: sorted names, no spaces, ASCII, less than 4 KiB."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """Hash `encoded` with BLAKE2b, to 16 bytes."""
        return blake2b(self.encoded(), digest_size=DIGEST_BYTES).digest()

    def difference(self, other: PoolIdentity) -> str:
        """Describe the first field that differs from `other`, the received one; "" if equal."""
        for field in fields(self):
            expected, got = getattr(self, field.name), getattr(other, field.name)
            if expected != got:
                return f"{field.name}: expected {expected}, got {got}"
        return ""


# --- Keys ---


class BlockKeys:
    """Makes the keys under which processes share blocks.

    Parameters
    ----------
    identity : a PoolIdentity (`kvcupy.cache.identity.PoolIdentity.of`), or a pool that holds all
        heads of its model
    tenant : str or bytes. While it is secret, other tenants can neither name this tenant's blocks
        nor test whether they exist
    secret : up to 64 bytes, without which no key can be derived, such as `BlockCipher.name_key`

    Attributes
    ----------
    identity
    namespace : 16 bytes, the same for all keys of a tenant, and different for each tenant. It does
        not depend on `secret`

    Raises
    ------
    TypeError : `tenant` is neither str nor bytes, or `identity` neither an identity nor a pool

    Notes
    -----
    A key is BLAKE2b of 32 bytes over the digest of the identity and the hash (128 bits, little
    endian), keyed with BLAKE2b of the tenant; with `secret`, that in turn keyed with `secret`.

    Examples
    --------
    >>> import kvcupy as kv
    >>> keys = BlockKeys(kv.KVPool(4, 16, 2, 8, 128, device="host"), tenant="a")
    >>> [key.hex()[:8] for key in keys.keys(kv.block_hashes(range(32), 16))]
    ['2576f6f1', '3ab7e63e']
    """

    def __init__(self, identity: Any, tenant: str | bytes = "", *, secret: bytes = b"") -> None:
        if isinstance(tenant, str):
            name = tenant.encode("utf-8", "surrogatepass")
        elif isinstance(tenant, bytes):
            name = tenant
        else:
            raise TypeError(f"tenant: expected a str or bytes, got {type(tenant).__name__}")
        if not isinstance(identity, PoolIdentity):
            if not isinstance(identity, Pool):
                kind = type(identity).__name__
                raise TypeError(f"identity: expected a PoolIdentity or a pool, got {kind}")
            identity = PoolIdentity.of(identity)
        self.identity: PoolIdentity = identity
        secret_key = blake2b(name).digest()
        self.namespace = blake2b(digest_size=DIGEST_BYTES, key=secret_key).digest()
        if secret:
            secret_key = blake2b(secret_key, key=secret).digest()
        self._start = blake2b(identity.digest(), digest_size=KEY_BYTES, key=secret_key)

    def __repr__(self) -> str:
        return f"<BlockKeys of {self.identity}>"  # omits the tenant, which may be secret

    def keys(self, hashes: Iterable[int]) -> list[bytes]:
        """Return the keys of blocks, 32 bytes each.

        Parameters
        ----------
        hashes : 128-bit ints, from `block_hashes` or another hash function

        Raises
        ------
        TypeError, ValueError : `hashes` has other values, such as 64-bit hashes
        """
        keys = []
        for hash in hash_list(hashes):
            if hash <= _WORD_MASK:
                raise ValueError(
                    "hashes: expected hashes of 128 bits (kv.block_hashes with bits=128), which "
                    f"processes can share, got one of 64: {hash}"
                )
            key = self._start.copy()
            key.update(hash.to_bytes(16, "little"))
            keys.append(key.digest())
        return keys


def identity_of(pool: Any, model: Any, heads: Any) -> PoolIdentity:
    """Identify the blocks of a pool by the arguments `model` and `heads` of a cache or store."""
    if heads is None:
        return PoolIdentity.of(pool, model=model)
    if not isinstance(heads, tuple) or len(heads) != 2:
        raise TypeError(f"heads: expected (first, total), got {heads!r}")
    for number in heads:
        checks.require_int(number, "heads")
    first, total = map(int, heads)
    if not 0 <= first <= total - pool.num_kv_heads:
        raise ValueError(
            f"heads: expected the first of {pool.num_kv_heads} heads, and the number of all, got "
            f"{heads}"
        )
    return PoolIdentity.of(pool, head_start=first, total_kv_heads=total, model=model)
