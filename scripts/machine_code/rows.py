"""The calls whose kernels are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, gcd, prod
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from kvcupy import formats
from kvcupy.arrays import ArrayView, transposed
from kvcupy.devices.protocol import Device
from kvcupy.kernels import Specialisation
from kvcupy.ops.attention import paged_attention
from kvcupy.ops.attention_kernels import most_scale_bytes
from kvcupy.ops.merge import merge_states
from kvcupy.ops.pages import copy_pages, shift_pages
from kvcupy.ops.rope import rope_store_kv
from kvcupy.ops.states import update_conv_state
from kvcupy.ops.store import gather_kv, store_kv
from kvcupy.ops.transfer_kernels import LayerPages, default_blocks, launches

from .pieces import Piece, pieces_of
from .planned import Planned, PlannedDevice

SECTOR_BYTES = 32


@dataclass(frozen=True)
class Row:
    """A call whose kernel is looked at.

    Attributes
    ----------
    name : of the row, unique
    call : issues the operation on a device
    kernel : how the name of its kernel begins
    unit : what `unit_bytes` are the bytes of
    unit_bytes : that the memory, or the link, must move for a unit, however often a kernel asks
    asked_bytes : that the lanes of a launch load and store for a unit: rows padded to whole warps,
        second passes over a row, rope tables
    num_units : of the call, where a pass is one through the whole kernel; None: a pass is one
        through the loop that moves most
    call_bytes : that the call moves, where neither `num_units` nor `pieces` tell; 0: they do
    block : the block whose first thread is followed through the whole kernel
    unit_sectors : of 32 bytes, that a block reads from L2 for a unit; 0: as many as it asks for
    pieces : of each block of a KV head, of attention
    sequences : of attention; the tiles of one share its units, which count once
    word_bytes : narrower accesses are not of the work, but to indices, scales or masks
    of_products : the ceiling is of products, as a share of the tensor cores' peak
    over_link : the memory that is read or written lies behind PCIe
    measured, peer : cases of `results/attention_h100.json`: of the row, and of FlashInfer
    slack : the fraction by which a row may get worse
    asked_slack : the fraction by which the code may differ from `asked_bytes`
    """

    name: str
    call: Callable[[PlannedDevice], None]
    kernel: str | tuple[str, ...]
    unit: str
    unit_bytes: float
    asked_bytes: Callable[[Planned], float]
    num_units: float | None = None
    call_bytes: float = 0.0
    block: Callable[[Planned], int] = lambda _: 0
    unit_sectors: float = 0.0
    pieces: Callable[[Planned], list[Piece]] = lambda _: []
    sequences: int = 1
    word_bytes: int = 16
    of_products: bool = False
    over_link: bool = False
    measured: str = ""
    peer: str = ""
    slack: float = 0.03
    asked_slack: float = 0.01


_TOKENS, _HEADS, _QUERY_HEADS, _WIDTH = 4096, 8, 32, 128  # of the rows that store and gather
_PAGE = 16
_TRANSFERRED = 1024, 32, _PAGE, _HEADS, _WIDTH  # pages of all layers
_LENS = (8192,) * 64
_ONE_IS_LONG = (128 << 10, *(2 << 10,) * 63)
_LOGNORMAL = tuple(
    round(4096 * exp(NormalDist().inv_cdf((i * 37 % 128 + 0.5) / 128))) for i in range(128)
)
"""The quantiles of a lognormal distribution about 4K, sigma 1, in no order."""


def _caches(device: PlannedDevice, format: str, widths: tuple[int, int] = (_WIDTH, _WIDTH), *,
            heads: int = _HEADS, slots: int = 1 << 20, page: int = _PAGE,
            rotated: bool = False) -> list[ArrayView]:  # fmt: skip
    caches = [device.array(-(-slots // page), page, heads, n, format=format) for n in widths]
    for cache in caches:
        cache.rotated_width = cache.shape[-1] if rotated else 0
    return caches


def _rows(
    device: PlannedDevice, format: str, heads: int = _HEADS, tokens: int = _TOKENS
) -> ArrayView:
    return device.array(tokens, heads, _WIDTH, format=format)


def _slots(device: PlannedDevice, tokens: int = _TOKENS) -> ArrayView:
    return device.array(tokens, format="int32")


def _store(
    device: PlannedDevice, kv_format: str, *, dynamic: bool = False, rotated: bool = False,
    tokens: int = _TOKENS,
) -> None:  # fmt: skip
    k_cache, v_cache = _caches(device, kv_format, rotated=rotated)
    scales: dict[str, Any] = _scales(kv_format)
    if dynamic:
        shape = k_cache.shape[0] * _PAGE, _HEADS
        scales = {f"{n}_scale_cache": device.array(*shape, format="fp32") for n in "kv"}
    key, value = (_rows(device, "bf16", tokens=tokens) for _ in "kv")
    store_kv(key, value, k_cache, v_cache, _slots(device, tokens), **scales)


def _scales(kv_format: str) -> dict[str, Any]:
    return {"k_scale": 0.5, "v_scale": 0.5} if formats.CACHE_FORMATS[kv_format].quantised else {}


def _gather(device: PlannedDevice, kv_format: str, *, rotated: bool = False) -> None:
    k_cache, v_cache = _caches(device, kv_format, rotated=rotated)
    k_out, v_out = (_rows(device, "bf16") for _ in "kv")
    gather_kv(k_cache, v_cache, _slots(device), k_out=k_out, v_out=v_out, **_scales(kv_format))


def _rope_store(
    device: PlannedDevice, kv_format: str, *, rotated: bool = False, tokens: int = _TOKENS
) -> None:
    query = _rows(device, "bf16", _QUERY_HEADS, tokens)
    key, value = (_rows(device, "bf16", tokens=tokens) for _ in "kv")
    k_cache, v_cache = _caches(device, kv_format, rotated=rotated)
    table, positions = device.array(1 << 17, _WIDTH, format="fp32"), _slots(device, tokens)
    rope_store_kv(
        query, key, value, table, positions, k_cache, v_cache, _slots(device, tokens),
        **_scales(kv_format),
    )  # fmt: skip


def _copy_pages(device: PlannedDevice) -> None:
    pages = [device.array(1024, format="int32") for _ in "sd"]
    copy_pages(_caches(device, "bf16")[0], *pages)


def _shift_pages(device: PlannedDevice, kv_format: str) -> None:
    pages = [device.array(1024, format="int32") for _ in "sd"]
    keys, _ = _caches(device, kv_format)
    table = device.array(1 << 17, _WIDTH, format="fp32")
    shift_pages(keys, pages[0], 1000, table, out_pages=pages[1])


_SEQUENCES, _STATE_SLOTS = 256, 512
_CHANNELS, _CONV_INPUTS = 8192, 3
_CONV_BYTES = 2 * 2 * _CONV_INPUTS  # of a channel, in and out


def _update_conv(device: PlannedDevice, *, channels_last: bool) -> None:
    """Move the states of a convolution on by a token of each sequence."""
    shape = (_CONV_INPUTS, _CHANNELS) if channels_last else (_CHANNELS, _CONV_INPUTS)
    cache = device.array(_STATE_SLOTS, *shape, format="bf16")
    update_conv_state(
        device.array(_SEQUENCES, _CHANNELS, format="bf16"),
        transposed(cache, (0, 2, 1)) if channels_last else cache,
        device.array(_SEQUENCES, format="int32"), device.array(_SEQUENCES + 1, format="int32"),
    )  # fmt: skip


def _transfer(device: PlannedDevice, host_format: str, *, rotated: bool = False) -> None:
    """Load pages of a page-first pool in pinned memory into a layer-first one."""
    pinned = [device.array(*_TRANSFERRED, format=host_format) for _ in "kv"]
    for part in pinned:
        part.rotated_width = _WIDTH if rotated else 0
    own = [device.array(*_TRANSFERRED, format="bf16") for _ in "kv"]
    src, dst = LayerPages.of(pinned, (), on_device=False), LayerPages.of(own, (), on_device=True)
    planned = cast(Device, device)
    for launch in launches(
        planned, src, dst, max_blocks=default_blocks(planned, src, dst), reports=True
    ):
        device.launches.append(Planned(
            launch.function, launch.grid, launch.block, launch.smem_bytes,
            _with_addresses(launch.function, launch.constants),
        ))  # fmt: skip


def _with_addresses(specialisation: Specialisation, constants: bytes) -> bytes:
    """Return Params whose addresses are some, for a launch that gets them with the pages."""
    missing = range(specialisation.kernel.params.itemsize // 8 - len(constants) // 8)
    return b"".join((1 << 40 | i << 20).to_bytes(8, "little") for i in missing) + constants


def _merge(device: PlannedDevice, states: int) -> None:
    outs = device.array(states, _TOKENS, _QUERY_HEADS, _WIDTH, format="fp32")
    lse = device.array(states, _TOKENS, _QUERY_HEADS, format="fp32")
    merge_states(
        outs, lse, None, None, out=_rows(device, "bf16", _QUERY_HEADS),
        lse_out=device.array(_TOKENS, _QUERY_HEADS, format="fp32"),
    )  # fmt: skip


def _attend(
    device: PlannedDevice, kv_format: str, *, query_format: str, heads: tuple[int, int],
    widths: tuple[int, int], tokens: int = 1, lens: Sequence[int] = _LENS, scales: str = "",
    rotated: bool = False, page: int = _PAGE, invariant: bool = False,
) -> None:  # fmt: skip
    sequences, num_pages = len(lens), -(-max(lens) // page)
    slots = sum(-(-n // page) * page for n in lens)
    k_cache, v_cache = _caches(
        device, kv_format, widths, heads=heads[1], slots=slots, page=page, rotated=rotated
    )
    if widths[0] > widths[1] and heads[1] == 1:  # MLA: values are part of the latent
        v_cache = k_cache[..., : widths[1]]
    options: dict[str, Any] = {}
    if tokens > 1:
        options["cu_query_lens"] = device.array(sequences + 1, format="int32")
    if scales == "per head":
        options |= {f"{n}_scale": device.array(heads[1], format="fp32") for n in "kv"}
    elif scales == "per token and head":
        shape = slots, heads[1]
        options |= {f"{n}_scale_cache": device.array(*shape, format="fp32") for n in "kv"}
    else:
        options |= _scales(kv_format)
    paged_attention(
        device.array(sequences * tokens, heads[0], widths[0], format=query_format), k_cache,
        v_cache, device.array(sequences, num_pages, format="int32"),
        device.array(sequences, format="int32"),
        out=device.array(sequences * tokens, heads[0], widths[1], format=query_format),
        batch_invariant=invariant, **options,
    )  # fmt: skip


def _asked_of_key(launch: Planned) -> float:
    """Return the bytes of a key and its value that an attention kernel loads, padding included."""
    kernel, arguments = launch.specialisation.kernel, launch.specialisation.arguments
    itemsize = next((f.itemsize for f in formats.FORMATS.values() if f.ctype == arguments[0]), 2)
    is_dequantised = kernel.name == "attention_prefill" and arguments[-1] == "true"
    if is_dequantised:
        itemsize = 1
    four_bit = next((f for f in formats.FOUR_BIT.values() if f.ctype == arguments[0]), None)
    if four_bit is not None and kernel.name in _LOADS_KEYS_ALONE:
        scales = 36 * four_bit.scale_bytes if four_bit.scale_bytes > 1 else 0  # by 16 elements
        # And an entry of the block table by a lane of one warp, as if of four.
        return 576 / 2 + scales + 16
    (record,) = np.frombuffer(launch.params, kernel.params)
    if is_dequantised and (word_bytes := int(record["k"]["group_scales"]["code_word_bytes"])):
        k_width, v_width = (int(record[name]["width"]) for name in "kv")
        # Group scales in words of 4, one for 16 elements, and an entry of the block table; by each
        # thread as if it had a key.
        threads_per_key = 4 if k_width > 192 else 2
        of_thread = 0 if word_bytes == 8 else (k_width + v_width) / 16 + 4
        return (k_width + v_width) / 2 + threads_per_key * of_thread
    if four_bit is not None:
        width = int(record["k"]["width"])
        if kernel.name == "attention_decode":
            return 2 * (width // 2)
        padded = [int(text) for text in arguments[1:3]]
        if _code_word_bytes(four_bit.name, width) == 8:
            return sum(padded) // 2
        scales = sum(most_scale_bytes(four_bit.name, n) for n in padded)
        return sum(padded) // 2 + scales + 4  # and an entry of the block table
    if kernel.name == "attention_decode":  # element type, rows, packs of 8 elements per lane
        return 2 * int(arguments[2]) * (8 << int(record["lane_shift"])) * itemsize
    if kernel.name == "attention_decode_heads":  # element type, keys that as many threads fetch
        lanes = launch.block[0] // int(arguments[1])
        return -(-int(record["k"]["width"]) * itemsize // (16 * lanes)) * 16 * lanes
    # The widths here are those that kernels exist for, so that nothing is padded.
    k_width, v_width = (int(record[name]["width"]) for name in "kv")
    return (k_width + (0 if kernel.name in _LOADS_KEYS_ALONE else v_width)) * itemsize


def _code_word_bytes(kv_format: str, width: int) -> int:
    """Return in which words attention copies the codes of a four-bit format."""
    return 8 if formats.FOUR_BIT[kv_format].row_bytes(width) % 8 == 0 else 4


def _sectors(kv_format: str, width: int) -> float:
    """Return the sectors that a row lies in, on average; rows follow each other without gaps.

    >>> _sectors("bf16", 128), _sectors("nvfp4", 128), _sectors("nvfp4", 576)
    (8.0, 3.0, 11.0)
    """
    four_bit = formats.FOUR_BIT.get(kv_format)
    size = four_bit.row_bytes(width) if four_bit else formats.itemsize(kv_format) * width
    return (size + SECTOR_BYTES - gcd(size, SECTOR_BYTES)) / SECTOR_BYTES


_LOADS_KEYS_ALONE = ("attention_decode_latent",)  # its values are part of them


def _bytes(each: float) -> Callable[[Planned], float]:
    return lambda _: each


def _stored(
    name: str, kv_format: str, asked: float, *, tokens: int = _TOKENS, measured: str = "",
    peer: str = "", **options: Any,
) -> Row:  # fmt: skip
    """Return a row of bf16 K and V that are stored; group scales are not in `asked`."""
    elements, size = 2 * _HEADS * _WIDTH, formats.bytes_per_element(kv_format)
    return Row(
        name, partial(_store, kv_format=kv_format, tokens=tokens, **options), "store_",
        "K and V of a token", elements * (2 + size), _bytes(elements * asked), tokens,
        word_bytes=min(16, 8 * formats.itemsize(kv_format)), measured=measured, peer=peer,
    )  # fmt: skip


def _asked_of_codes(kv_format: str) -> float:
    """Return the bytes per element of codes that are accessed in words of 8; scales never are."""
    return 0.5 if formats.FOUR_BIT[kv_format].row_bytes(_WIDTH) % 8 == 0 else 0


def _gathered(name: str, kv_format: str, **options: Any) -> Row:
    elements, size = 2 * _HEADS * _WIDTH, formats.bytes_per_element(kv_format)
    asked = elements * (2 + (_asked_of_codes(kv_format) if size < 1 else size))
    return Row(
        name, partial(_gather, kv_format=kv_format, **options), "gather_", "K and V of a token",
        elements * (size + 2), _bytes(asked), _TOKENS,
        word_bytes=min(16, 8 * formats.itemsize(kv_format)),
    )  # fmt: skip


def _rope_stored(
    name: str, kv_format: str, *, tokens: int = _TOKENS, measured: str = "", **options: Any
) -> Row:
    """Return a row about a key, which moves most: to the live key and the cache; and its angles,
    which the heads of a group share."""
    size = formats.bytes_per_element(kv_format)
    # Groups are encoded from the row as shared memory has it. On sm_80 to sm_90 NVRTC makes two
    # loads of each that read a value's row or shared memory, of which a predicate skips one.
    stored = 2 + _asked_of_codes(kv_format) if size < 1 else size
    return Row(
        name, partial(_rope_store, kv_format=kv_format, tokens=tokens, **options), "rope_store",
        "head of a key", _WIDTH * (2 + 2 + size),
        lambda launch: _WIDTH * (2 + 2 + 4 / _rope_params(launch)["group_heads"] + stored),
        tokens * (_QUERY_HEADS + 2 * _HEADS),
        call_bytes=tokens * _WIDTH * (4 * _QUERY_HEADS + (4 + 2 + 2 * size) * _HEADS),
        block=_first_key_block, word_bytes=8, asked_slack=0.2 if size < 1 else 0.01,
        measured=measured,
    )  # fmt: skip


def _first_key_block(launch: Planned) -> int:
    """Return the block that begins with the first key of a token, behind its query heads."""
    params = _rope_params(launch)
    return (int(params["q_groups"]) << int(params["lane_shift"])) // launch.block[0]


def _rope_params(launch: Planned) -> Any:
    (record,) = np.frombuffer(launch.params, launch.specialisation.kernel.params)
    return record


def _transferred(name: str, kernel: str, host_format: str, **options: Any) -> Row:
    width, size = 2 * _WIDTH, formats.bytes_per_element(host_format)
    asked = width * (2 + (_asked_of_codes(host_format) if size < 1 else size))
    call = partial(_transfer, host_format=host_format, **options)
    return Row(name, call, kernel, "head of K and V",
               width * size, _bytes(asked), call_bytes=prod(_TRANSFERRED) * 2 * size,
               over_link=True,
               word_bytes=min(16, 8 * formats.itemsize(host_format)))  # fmt: skip


def _merged(states: int) -> Row:
    moved = _WIDTH * (4 * states + 2)
    return Row(
        f"merge_states of {states}", partial(_merge, states=states),
        "merge_states" if states == 2 else "merge_many",
        "head of a token", moved, _bytes(moved), _TOKENS * _QUERY_HEADS, word_bytes=8,
    )  # fmt: skip


def _decode(
    kv_format: str, group: int = 4, suffix: str = "", *, scales: str = "", rotated: bool = False,
    width: int = _WIDTH, lens: tuple[int, ...] = _LENS, page: int = _PAGE, invariant: bool = False,
    measured: str = "", peer: str = "",
) -> Row:  # fmt: skip
    """Return a row of a decode step; a scale per token and head is 4 bytes of K and 4 of V."""
    itemsize = formats.itemsize(kv_format)
    size = formats.bytes_per_element(kv_format)
    call = partial(
        _attend, kv_format=kv_format, query_format=kv_format if itemsize == 2 else "bf16",
        heads=(_HEADS * group, _HEADS), widths=(width, width), scales=scales, rotated=rotated,
        lens=lens, page=page, invariant=invariant,
    )  # fmt: skip
    name = f"decode {kv_format} group {group}" + (f", scales {scales}" if scales else "")
    name += (", rotated" if rotated else "") + (f", {width} wide" if width != _WIDTH else "")
    name += (f", pages of {page}" if page != _PAGE else "") + suffix
    moved = 2 * width * size + (8 if scales == "per token and head" else 0)
    word_bytes = min(16, 8 * itemsize) if size >= 1 else _code_word_bytes(kv_format, width)
    return Row(
        name, call, "attention_decode", "key of a KV head", moved, _asked_of_key,
        unit_sectors=2 * _sectors(kv_format, width), word_bytes=word_bytes,
        pieces=partial(pieces_of, seq_lens=lens), sequences=len(lens), measured=measured, peer=peer,
    )  # fmt: skip


def _mla(
    kv_format: str, heads: int, suffix: str = "", *, lens: tuple[int, ...] = _LENS,
    measured: str = "", peer: str = "",
) -> Row:  # fmt: skip
    call = partial(_attend, kv_format=kv_format, query_format="bf16", heads=(heads, 1),
                   widths=(576, 512), lens=lens, page=64)  # fmt: skip
    size = formats.bytes_per_element(kv_format)
    return Row(
        f"mla {kv_format} {heads} heads{suffix}", call, "attention_decode", "latent of a token",
        576 * size, _asked_of_key, unit_sectors=_sectors(kv_format, 576),
        word_bytes=16 if size >= 1 else 4 if kv_format == "nvfp4" else 2,
        pieces=partial(pieces_of, seq_lens=lens), sequences=len(lens), measured=measured, peer=peer,
    )  # fmt: skip


def _prefill(
    tokens: int, length: int, *, kv_format: str = "bf16", widths: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (_QUERY_HEADS, _HEADS), sequences: int = 1, invariant: bool = False,
    measured: str = "", peer: str = "",
) -> Row:  # fmt: skip
    """Return a row of new tokens of each sequence, the last ones of its keys; few are bound by
    memory."""
    lens = (length,) * sequences
    call = partial(
        _attend, kv_format=kv_format, query_format="bf16", heads=heads, widths=widths,
        tokens=tokens, lens=lens, invariant=invariant,
    )  # fmt: skip
    size = formats.bytes_per_element(kv_format)
    word_bytes = min(16, 8 * int(size)) if size >= 1 else _code_word_bytes(kv_format, widths[0])
    name = f"prefill {kv_format} {widths[0]}x{widths[1]}, {tokens} of {length}"
    name += f", {sequences} sequences" if sequences > 1 else ""
    return Row(
        name + (", batch-invariant" if invariant else ""), call,
        ("attention_prefill", "attention_decode"), "key of a KV head", size * sum(widths),
        _asked_of_key, unit_sectors=sum(_sectors(kv_format, n) for n in widths),
        word_bytes=word_bytes, of_products=tokens >= 64,
        pieces=partial(pieces_of, seq_lens=lens, query_lens=[tokens] * sequences),
        sequences=sequences, measured=measured or f"prefill {tokens} of {length}", peer=peer,
    )  # fmt: skip


_FOUR_BIT = ("nvfp4", "mxfp4", "int4")
_INVARIANT = ", batch-invariant"

ROWS: tuple[Row, ...] = (
    _stored("store bf16", "bf16", 4, measured="store 4096", peer="append bf16 4096 tokens"),
    _stored("store bf16, one token", "bf16", 4, tokens=1, measured="store 1",
            peer="append bf16 1 tokens"),
    _stored("store bf16 to fp8_e4m3", "fp8_e4m3", 3, measured="store fp8 4096"),
    _stored("store bf16 to fp8_e4m3, dynamic scales", "fp8_e4m3", 3, dynamic=True),
    *[_stored(f"store bf16 to {name}", name, 2 + _asked_of_codes(name))
      for name in _FOUR_BIT],
    *[_stored(f"store bf16 to {name}, rotated", name, 2 + _asked_of_codes(name), rotated=True)
      for name in ("nvfp4", "int4")],
    _rope_stored("rope_store bf16", "bf16", measured="rope 4096"),
    _rope_stored("rope_store fp8_e4m3", "fp8_e4m3", measured="rope fp8 4096"),
    _rope_stored("rope_store nvfp4", "nvfp4"),
    _rope_stored("rope_store nvfp4, rotated", "nvfp4", rotated=True),
    _gathered("gather bf16", "bf16"), _gathered("gather fp8_e4m3 to bf16", "fp8_e4m3"),
    *[_gathered(f"gather {name} to bf16", name) for name in _FOUR_BIT],
    *[_gathered(f"gather {name}, rotated, to bf16", name, rotated=True)
      for name in ("nvfp4", "int4")],
    Row("copy_pages bf16", _copy_pages, "copy_pages", "page", 4 * _PAGE * _HEADS * _WIDTH,
        _bytes(4 * _PAGE * _HEADS * _WIDTH), 1024),
    # cos, sin and the factor of each pair come from L1.
    Row("shift_pages bf16", partial(_shift_pages, kv_format="bf16"), "shift_rows", "head of a key",
        4 * _WIDTH, _bytes(4 * _WIDTH + 3 * 2 * _WIDTH), 1024 * _PAGE * _HEADS),
    # A word is 8 channels, or one; each lane reads three indices for its four words.
    *[Row(f"update_conv_state bf16, {name} last",
          partial(_update_conv, channels_last=name == "channels"), "update_conv_state",
          "channel of a sequence", _CONV_BYTES, _bytes(_CONV_BYTES + 3 * 4 / (4 * channels)),
          _SEQUENCES * _CHANNELS, word_bytes=2)
      for name, channels in (("channels", 8), ("inputs", 1))],
    _transferred("load bf16 pages from pinned memory", "transfer_copy", "bf16"),
    _transferred("load fp8_e4m3 pages as bf16", "transfer_convert", "fp8_e4m3"),
    *[_transferred(f"load {name} pages as bf16", "transfer_from_four_bit", name)
      for name in _FOUR_BIT],
    _transferred("load nvfp4 pages, rotated, as bf16", "transfer_from_four_bit", "nvfp4",
                 rotated=True),
    _merged(2), _merged(8),
    # Decode: of each format 64 sequences of 8,192 keys, and smaller, uneven and scattered ones.
    _decode("fp16"),
    _decode("bf16", measured="decode bf16 64x8192", peer="decode bf16 b64 ctx8192"),
    _decode("fp8_e4m3", measured="decode fp8 64x8192", peer="decode fp8 b64 ctx8192"),
    _decode("int8", measured="decode int8 64x8192"),
    _decode("nvfp4", measured="decode nvfp4 64x8192"),
    _decode("mxfp4"),
    _decode("int4", measured="decode int4 64x8192"),
    *[_decode(name, group) for group in (1, 8) for name in ("bf16", "fp8_e4m3", "nvfp4")],
    *[_decode(name, rotated=True) for name in _FOUR_BIT],
    *[_decode(name, scales=scales) for name in ("fp8_e4m3", "int8")
      for scales in ("per head", "per token and head")],
    _decode("bf16", width=64, measured="decode bf16 d64 64x8192"),
    *[_decode(name, width=64) for name in ("fp8_e4m3", "int8", *_FOUR_BIT)],
    *[_decode("bf16", suffix=f", {count} of {length}", lens=(length,) * count,
              measured=f"decode bf16 {count}x{length}", peer=f"decode bf16 b{count} ctx{length}")
      for count, length in ((1, 8192), (1, 32768), (16, 1024), (64, 1024), (16, 8192))],
    _decode("fp8_e4m3", suffix=", 1 of 8192", lens=(8192,), measured="decode fp8 1x8192",
            peer="decode fp8 b1 ctx8192"),
    _decode("nvfp4", suffix=", 1 of 8192", lens=(8192,)),
    _decode("bf16", suffix=", one of 128K among 2K", lens=_ONE_IS_LONG,
            measured="decode bf16 1x128K+63x2K", peer="decode bf16 b64 1x131072+63x2048"),
    *[_decode(name, suffix=", lognormal", lens=_LOGNORMAL) for name in ("bf16", "fp8_e4m3")],
    *[_decode(name, page=1) for name in ("bf16", "fp8_e4m3")],
    _decode("bf16", suffix=_INVARIANT, invariant=True, measured="invariant bf16 64x8192"),
    _decode("bf16", suffix=", 1 of 8192" + _INVARIANT, lens=(8192,), invariant=True,
            measured="invariant bf16 1x8192"),
    _mla("bf16", 16, measured="mla16 64x8192"),
    _mla("bf16", 64),
    _mla("bf16", 128, ", 64 of 4096", lens=(4096,) * 64, measured="mla128 64x4096",
         peer="mla bf16 h128 b64 ctx4096"),
    _mla("bf16", 16, ", 1 of 8192", lens=(8192,), measured="mla16 1x8192"),
    _mla("bf16", 128, ", 1 of 32768", lens=(32768,), measured="mla128 1x32768",
         peer="mla bf16 h128 b1 ctx32768"),
    _mla("bf16", 16, ", one of 128K among 2K", lens=_ONE_IS_LONG),
    *[
        _mla(name, heads) for name in ("fp8_e4m3", "nvfp4", "mxfp4", "int4") for heads in (16, 128)
    ],
    _prefill(2048, 4096, peer="prefill bf16 causal 2048 of 4096"),
    _prefill(8192, 8192),
    _prefill(4096, 4096, widths=(64, 64), measured="prefill d64 4096 of 4096"),
    _prefill(2048, 4096, widths=(192, 128), measured="not measured"),
    _prefill(2048, 4096, widths=(256, 256), heads=(16, 8), measured="prefill d256 2048 of 4096"),
    _prefill(1024, 1024, sequences=8, measured="prefill 8x1024 of 1024"),
    _prefill(128, 8192),
    # Not measured since tiles are dequantised once for all rows of a block.
    *[_prefill(2048, 4096, kv_format=name, measured="not measured")
      for name in ("fp8_e4m3", "nvfp4")],
    *[_prefill(8, 4096, kv_format=name, sequences=16, measured="not measured")
      for name in ("fp8_e4m3", "nvfp4")],
    _prefill(4, 4096, sequences=64, measured="append 64x4 of 4096"),
    _prefill(2048, 4096, invariant=True, measured="invariant prefill 2048 of 4096"),
)  # fmt: skip
"""The rows of the roofline."""
