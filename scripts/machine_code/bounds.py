"""Bounds on the speed of the hot kernels on GPUs that need not be present.

A bound from the code, not a measurement. Each row is a call of an operation: it is planned as for a
GPU of the architecture, its kernel is compiled, and `sass` reads the instructions that a warp
issues on one pass through the loop, or the kernel, that does the work. Counted against the
published rates of a chip, they give a ceiling for each of its resources; the lowest binds.

Where the Params of the launch decide a branch (and on a pass through a whole kernel the number of a
thread and valid indices), the branch is followed. Where data decides, the cheapest way that does
all of the work is counted, and the dearest beside it: the truth lies between the two. Not counted
are bank conflicts, cache misses, barriers, the beginning and end of blocks around the loop, the
last wave of blocks, and clocks that fall under load. So a GPU stays below these figures, and a
kernel that passes may still be slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import ceil, prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvcupy import formats
from kvcupy.arrays import ArrayView, strides_of
from kvcupy.config import shared_bytes
from kvcupy.devices import nvrtc
from kvcupy.devices.protocol import Device
from kvcupy.errors import CompileError
from kvcupy.kernels import Specialisation
from kvcupy.ops.attention import paged_attention
from kvcupy.ops.launch import unverified
from kvcupy.ops.merge import merge_states
from kvcupy.ops.pages import copy_pages
from kvcupy.ops.rope import rope_store_kv
from kvcupy.ops.store import gather_kv, store_kv
from kvcupy.ops.transfer_kernels import LayerPages, default_blocks, launches

from . import cubin, nvdisasm, paths, sass
from .chips import CHIPS, LINK_LATENCY_NS, Chip
from .constants import FirstThread, constant_bank
from .pieces import busy_share, heads_of, pieces_of, tiles_of

_REGISTERS_PER_SM, _REGISTERS_STEP = 65536, 256
_SHARED_STEP_BYTES = 128
_SCHEDULERS = 4
_LOCAL_BYTES_PER_CLOCK = 128  # of L1 and shared memory, per SM

# --- Calls, planned without a GPU -----------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A launch that an operation asked for."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    params: bytes

    @property
    def warps_per_block(self) -> int:
        return -(-prod(self.block) // 32)


class _Stream:
    """The one stream of a `PlannedDevice`, which has nothing to wait for."""

    name, priority, capturing, retains_owners, capture_id = "planned", 0, False, True, None

    def __init__(self, device: PlannedDevice) -> None:
        self.device = device

    def wait(self, other: Any) -> None:
        pass


class PlannedDevice:
    """A GPU as far as plans see it: arrays are addresses, and launches are written down.

    Attributes
    ----------
    launches : in the order of issue
    """

    kind, warp_lanes, has_copy_engine, torch_name = "cuda", 32, True, "cuda:0"
    fault_pointer = 1 << 32

    def __init__(self, arch: str) -> None:
        chip = CHIPS[arch]
        self.name = self.model = chip.name
        self.arch, self.sm_count, self.shared_bytes = arch, chip.sm_count, shared_bytes(arch)
        self.launches: list[Planned] = []
        self._next = 1 << 40
        self._stream = _Stream(self)

    def array(self, *shape: int, format: str) -> ArrayView:
        """Return an array of this device, which no memory stands behind."""
        strides = strides_of(shape, format)
        # Operations look a device up by what an array says: a name, or the device itself.
        v = ArrayView(self._next, shape, strides, format, cast(str, self), library="cupy")
        self._next += -(-v.num_bytes // 256) * 256
        return v

    def allocate(
        self, shape: tuple[int, ...], dtype: Any, stream: Any, *, zeroed: bool
    ) -> ArrayView:
        return self.array(*shape, format=formats.tag(np.dtype(dtype)))

    def release(self, owners: list[Any]) -> None:
        owners.clear()

    def run(self, function: Callable[[], object], stream: Any, keep: Sequence[object] = ()) -> None:
        """Run nothing: what counts are launches."""

    def as_stream(self, stream: Any, library: str = "", name: str = "stream") -> _Stream:
        return self._stream

    def address(self, view: ArrayView) -> int:
        return view.pointer

    def load(self, specialisation: Specialisation) -> Specialisation:
        return specialisation

    def launch(
        self, function: Specialisation, grid: tuple[int, int, int], block: tuple[int, int, int],
        smem_bytes: int, params: bytes, stream: Any, keep: Sequence[object] = (),
    ) -> None:  # fmt: skip
        self.launches.append(Planned(function, grid, block, smem_bytes, bytes(params)))


# --- Rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A call whose kernel is looked at.

    Attributes
    ----------
    name : of the row, unique
    call : issues the operation on a device
    kernel : how the name of its kernel begins; other launches of the call are left out
    unit : what `unit_bytes` are the bytes of
    unit_bytes : that the memory, or the link, must move for a unit, however often a kernel asks
    asked_bytes : that the lanes of a launch load and store for a unit: rows padded to whole warps,
        second passes over a row, rope tables
    num_units : of the call, where a pass is one through the whole kernel; None: a pass is one
        through the loop that moves most
    block : the block whose first thread is followed through the whole kernel
    sharing : blocks of a launch that work on the same units, so that they count once
    pieces : the keys of each block of a KV head, of attention whose keys are cut
    word_bytes : narrower accesses are not of the work, but to indices, scales or masks
    of_products : the ceiling is of products, as a share of the tensor cores' peak
    over_link : the memory that is read or written lies behind PCIe
    slack : the fraction by which a row may get worse
    asked_slack : the fraction by which the code may differ from `asked_bytes`
    """

    name: str
    call: Callable[[PlannedDevice], None]
    kernel: str
    unit: str
    unit_bytes: float
    asked_bytes: Callable[[Planned], float]
    num_units: float | None = None
    block: Callable[[Planned], int] = lambda _: 0
    sharing: Callable[[Planned], float] = lambda _: 1
    pieces: Callable[[Planned], list[float]] = lambda _: []
    word_bytes: int = 16
    of_products: bool = False
    over_link: bool = False
    slack: float = 0.03
    asked_slack: float = 0.01


_TOKENS, _HEADS, _QUERY_HEADS, _WIDTH = 16384, 8, 32, 128  # of the rows that store and gather
_SEQUENCES, _KEYS, _PAGE = 256, 8192, 16
_LENS = (_KEYS,) * _SEQUENCES
_UNEVEN, _ONE_IS_LONG = (128 << 10, *(2 << 10,) * 63), ", one of 128K among 2K"


def _caches(device: PlannedDevice, format: str, widths: tuple[int, int] = (_WIDTH, _WIDTH), *,
            heads: int = _HEADS, slots: int = 1 << 20,
            rotated: bool = False) -> list[ArrayView]:  # fmt: skip
    caches = [device.array(slots // _PAGE, _PAGE, heads, n, format=format) for n in widths]
    for cache in caches:
        cache.rotated_width = cache.shape[-1] if rotated else 0
    return caches


def _rows(device: PlannedDevice, format: str, heads: int = _HEADS) -> ArrayView:
    return device.array(_TOKENS, heads, _WIDTH, format=format)


def _slots(device: PlannedDevice) -> ArrayView:
    return device.array(_TOKENS, format="int32")


def _store(
    device: PlannedDevice, kv_format: str, *, dynamic: bool = False, rotated: bool = False
) -> None:
    k_cache, v_cache = _caches(device, kv_format, rotated=rotated)
    scales: dict[str, Any] = _scales(kv_format)
    if dynamic:
        shape = k_cache.shape[0] * _PAGE, _HEADS
        scales = {f"{n}_scale_cache": device.array(*shape, format="fp32") for n in "kv"}
    key, value = (_rows(device, "bf16") for _ in "kv")
    store_kv(key, value, k_cache, v_cache, _slots(device), **scales)


def _scales(kv_format: str) -> dict[str, Any]:
    return {"k_scale": 0.5, "v_scale": 0.5} if formats.CACHE_FORMATS[kv_format].quantised else {}


def _gather(device: PlannedDevice, kv_format: str, *, rotated: bool = False) -> None:
    k_cache, v_cache = _caches(device, kv_format, rotated=rotated)
    k_out, v_out = (_rows(device, "bf16") for _ in "kv")
    gather_kv(k_cache, v_cache, _slots(device), k_out=k_out, v_out=v_out, **_scales(kv_format))


def _rope_store(device: PlannedDevice, kv_format: str, *, rotated: bool = False) -> None:
    query, (key, value) = _rows(device, "bf16", _QUERY_HEADS), [_rows(device, "bf16") for _ in "kv"]
    k_cache, v_cache = _caches(device, kv_format, rotated=rotated)
    table, positions = device.array(1 << 17, _WIDTH, format="fp32"), _slots(device)
    rope_store_kv(
        query, key, value, table, positions, k_cache, v_cache, _slots(device), **_scales(kv_format)
    )


def _copy_pages(device: PlannedDevice) -> None:
    pages = [device.array(1024, format="int32") for _ in "sd"]
    copy_pages(_caches(device, "bf16")[0], *pages)


def _transfer(device: PlannedDevice, host_format: str, *, rotated: bool = False) -> None:
    """Load pages of a page-first pool in pinned memory into a layer-first one."""
    shape = 1024, 32, _PAGE, _HEADS, _WIDTH
    pinned = [device.array(*shape, format=host_format) for _ in "kv"]
    for part in pinned:
        part.rotated_width = _WIDTH if rotated else 0
    own = [device.array(*shape, format="bf16") for _ in "kv"]
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
    rotated: bool = False,
) -> None:  # fmt: skip
    sequences, num_pages = len(lens), max(lens) // _PAGE
    slots = sum(lens)
    k_cache, v_cache = _caches(
        device, kv_format, widths, heads=heads[1], slots=slots, rotated=rotated
    )
    if widths[0] > widths[1] and heads[1] == 1:  # MLA: values are part of the latent
        v_cache = k_cache[..., : widths[1]]
    options: dict[str, Any] = {}
    if tokens > 1:
        options["query_lens"] = device.array(sequences, format="int32")
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
        out=device.array(sequences * tokens, heads[0], widths[1], format=query_format), **options,
    )  # fmt: skip


def _asked_of_key(launch: Planned) -> float:
    """Return the bytes of a key and its value that an attention kernel loads, padding included."""
    kernel, arguments = launch.specialisation.kernel, launch.specialisation.arguments
    itemsize = next((f.itemsize for f in formats.FORMATS.values() if f.ctype == arguments[0]), 2)
    four_bit = next((f for f in formats.FOUR_BIT.values() if f.ctype == arguments[0]), None)
    if four_bit is not None and kernel.name in _LOADS_KEYS_ALONE:
        return 576 / 2 + 16  # and an entry of the block table by a lane of one warp, as if of four
    if four_bit is not None:  # on tensor cores
        if _code_word_bytes(four_bit.name) == 8:
            return 2 * (_WIDTH // 2)
        return 2 * four_bit.row_bytes(_WIDTH) + 4  # scales, and an entry of the block table
    (record,) = np.frombuffer(launch.params, kernel.params)
    if kernel.name == "attention_decode":  # element type, rows, packs of 8 elements per lane
        return 2 * int(arguments[2]) * (8 << int(record["lane_shift"])) * itemsize
    if kernel.name == "attention_decode_heads":  # element type, keys that as many threads fetch
        lanes = launch.block[0] // int(arguments[1])
        return -(-int(record["k"]["width"]) * itemsize // (16 * lanes)) * 16 * lanes
    # The widths here are those that kernels exist for, so that nothing is padded.
    k_width, v_width = (int(record[name]["width"]) for name in "kv")
    return (k_width + (0 if kernel.name in _LOADS_KEYS_ALONE else v_width)) * itemsize


def _code_word_bytes(kv_format: str) -> int:
    """Return in which words attention copies the codes of a four-bit format."""
    return 8 if formats.FOUR_BIT[kv_format].row_bytes(_WIDTH) % 8 == 0 else 4


_LOADS_KEYS_ALONE = ("attention_decode_latent",)  # its values are part of them


def _bytes(each: float) -> Callable[[Planned], float]:
    return lambda _: each


def _stored(name: str, kv_format: str, asked: float, **options: Any) -> Row:
    """Return a row of bf16 K and V that are stored; group scales are not in `asked`."""
    elements, size = 2 * _HEADS * _WIDTH, formats.bytes_per_element(kv_format)
    return Row(
        name, partial(_store, kv_format=kv_format, **options), "store_", "K and V of a token",
        elements * (2 + size), _bytes(elements * asked), _TOKENS,
        word_bytes=min(16, 8 * formats.itemsize(kv_format)),
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


def _rope_stored(name: str, kv_format: str, **options: Any) -> Row:
    """Return a row about a key, which moves most: to the live key and the cache; and its angles,
    which the heads of a group share."""
    size = formats.bytes_per_element(kv_format)
    # Groups are encoded from the row as shared memory has it. On sm_80 to sm_90 NVRTC makes two
    # loads of each that read a value's row or shared memory, of which a predicate skips one.
    stored = 2 + _asked_of_codes(kv_format) if size < 1 else size
    return Row(
        name, partial(_rope_store, kv_format=kv_format, **options), "rope_store",
        "head of a key", _WIDTH * (2 + 2 + size),
        lambda launch: _WIDTH * (2 + 2 + 4 / _rope_params(launch)["group_heads"] + stored),
        _TOKENS * (_QUERY_HEADS + 2 * _HEADS),
        block=_first_key_block, word_bytes=8, asked_slack=0.2 if size < 1 else 0.01,
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
               width * size, _bytes(asked), over_link=True,
               word_bytes=min(16, 8 * formats.itemsize(host_format)))  # fmt: skip


def _merged(states: int) -> Row:
    moved = _WIDTH * (4 * states + 2)
    return Row(
        f"merge_states of {states}", partial(_merge, states=states),
        "merge_states" if states == 2 else "merge_many",
        "head of a token", moved, _bytes(moved), _TOKENS * _QUERY_HEADS, word_bytes=8,
    )  # fmt: skip


def _decode(
    kv_format: str, group: int, scales: str = "", *, rotated: bool = False, width: int = _WIDTH,
    lens: tuple[int, ...] = _LENS, suffix: str = "",
) -> Row:  # fmt: skip
    """Return a row of a decode step; a scale per token and head is 4 bytes of K and 4 of V."""
    itemsize = formats.itemsize(kv_format)
    size = formats.bytes_per_element(kv_format)
    call = partial(
        _attend, kv_format=kv_format, query_format=kv_format if itemsize == 2 else "bf16",
        heads=(_HEADS * group, _HEADS), widths=(width, width), scales=scales, rotated=rotated,
        lens=lens,
    )  # fmt: skip
    name = f"decode {kv_format} group {group}" + (f", scales {scales}" if scales else "")
    name += (", rotated" if rotated else "") + (f", {width} wide" if width != _WIDTH else "")
    name += suffix
    moved = 2 * width * size + (8 if scales == "per token and head" else 0)
    word_bytes = min(16, 8 * itemsize) if size >= 1 else _code_word_bytes(kv_format)
    return Row(name, call, "attention_", "key of a KV head", moved, _asked_of_key,
               sharing=partial(_tiles_per_sequence, sequences=len(lens)), word_bytes=word_bytes,
               pieces=partial(pieces_of, seq_lens=lens))  # fmt: skip


def _mla(kv_format: str, heads: int, lens: tuple[int, ...] = _LENS, suffix: str = "") -> Row:
    call = partial(_attend, kv_format=kv_format, query_format="bf16", heads=(heads, 1),
                   widths=(576, 512), lens=lens)  # fmt: skip
    size = formats.bytes_per_element(kv_format)
    return Row(
        f"mla {kv_format} {heads} heads{suffix}", call, "attention_", "latent of a token",
        576 * size, _asked_of_key,
        word_bytes=16 if size >= 1 else 4,
        sharing=partial(_tiles_per_sequence, sequences=len(lens)),
        pieces=partial(pieces_of, seq_lens=lens),
    )  # fmt: skip


def _tiles_per_sequence(launch: Planned, sequences: int) -> float:
    """Return how many blocks of a KV head read each key."""
    return tiles_of(launch) / sequences


def _prefill(k_width: int, v_width: int, kv_format: str = "bf16") -> Row:
    call = partial(_attend, kv_format=kv_format, query_format="bf16", heads=(_QUERY_HEADS, _HEADS),
                   widths=(k_width, v_width), tokens=1024, lens=_LENS[:4])  # fmt: skip
    itemsize = formats.itemsize(kv_format)
    return Row(f"prefill {kv_format} {k_width}x{v_width}", call, "attention_", "key of a KV head",
               itemsize * (k_width + v_width), _asked_of_key, of_products=True,
               word_bytes=min(16, 8 * itemsize),
               pieces=partial(pieces_of, seq_lens=_LENS[:4], query_lens=[1024] * 4))  # fmt: skip


_FOUR_BIT = ("nvfp4", "mxfp4", "int4")

ROWS: tuple[Row, ...] = (
    _stored("store bf16", "bf16", 4), _stored("store bf16 to fp8_e4m3", "fp8_e4m3", 3),
    _stored("store bf16 to fp8_e4m3, dynamic scales", "fp8_e4m3", 3, dynamic=True),
    *[_stored(f"store bf16 to {name}", name, 2 + _asked_of_codes(name))
      for name in _FOUR_BIT],
    *[_stored(f"store bf16 to {name}, rotated", name, 2 + _asked_of_codes(name), rotated=True)
      for name in ("nvfp4", "int4")],
    *[_rope_stored(f"rope_store {name}", name) for name in ("bf16", "fp8_e4m3", "nvfp4")],
    _rope_stored("rope_store nvfp4, rotated", "nvfp4", rotated=True),
    _gathered("gather bf16", "bf16"), _gathered("gather fp8_e4m3 to bf16", "fp8_e4m3"),
    *[_gathered(f"gather {name} to bf16", name) for name in _FOUR_BIT],
    *[_gathered(f"gather {name}, rotated, to bf16", name, rotated=True)
      for name in ("nvfp4", "int4")],
    Row("copy_pages bf16", _copy_pages, "copy_pages", "page", 4 * _PAGE * _HEADS * _WIDTH,
        _bytes(4 * _PAGE * _HEADS * _WIDTH), 1024),
    _transferred("load bf16 pages from pinned memory", "transfer_copy", "bf16"),
    _transferred("load fp8_e4m3 pages as bf16", "transfer_convert", "fp8_e4m3"),
    *[_transferred(f"load {name} pages as bf16", "transfer_from_four_bit", name)
      for name in _FOUR_BIT],
    _transferred("load nvfp4 pages, rotated, as bf16", "transfer_from_four_bit", "nvfp4",
                 rotated=True),
    _merged(2), _merged(8),
    *[_decode(name, group) for name in ("fp16", "bf16", "fp8_e4m3", "int8") for group in (1, 4, 8)],
    *[_decode(name, group) for name in _FOUR_BIT for group in (1, 4, 8)],
    *[_decode(name, 4, rotated=True) for name in _FOUR_BIT],
    *[_decode(name, 4, scales) for name in ("fp8_e4m3", "int8")
      for scales in ("per head", "per token and head")],
    *[_decode(name, 8, width=64) for name in ("bf16", "fp8_e4m3")],
    *[_mla(name, heads) for name in ("bf16", "fp8_e4m3") for heads in (16, 64, 128)],
    *[_mla("nvfp4", heads) for heads in (16, 128)],
    *[_mla("bf16", heads, (_KEYS,), ", one sequence") for heads in (16, 128)],
    _decode("bf16", 4, lens=_UNEVEN, suffix=_ONE_IS_LONG), _mla("bf16", 16, _UNEVEN, _ONE_IS_LONG),
    *[_prefill(*widths) for widths in ((64, 64), (128, 128), (192, 128), (256, 256))],
    _prefill(128, 128, "fp8_e4m3"),
)  # fmt: skip
"""The rows of the roofline."""

# --- The model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One row on one chip.

    Attributes
    ----------
    registers : per thread
    shared_bytes : per block
    warps_per_sm : that an SM holds at once, of the launch
    asked_bytes : that a warp loads and stores on a pass
    counted : bytes of them that the memory must move; or, `of_products`, two per multiply-add
    instructions, dearest : that a warp issues on a pass, on the cheapest and the dearest way
    uncounted_loops : inner loops on the way that are counted once, as nothing says how often
    pipes : instructions by pipe, on the cheapest way
    bytes_in_flight : loaded by a warp at once, at most
    bytes_needed : in flight per SM, for the peak of the memory or the link: latency times bandwidth
        (Little's law). `warps_per_sm` times `bytes_in_flight` should be more
    ceilings : GB/s, or GFLOPS, that each resource allows; "memory" (or "link", "tensor peak") is
        the published peak
    binds : the lowest of them
    share : of the peak, as the cheapest way allows; at most 1
    dearest_share : as the dearest way allows
    dearest_ceiling : the lowest ceiling on the dearest way, the published peak left out
    busy : of the time until the last block ends, the share at which places for blocks are taken,
        as if a block ran no faster when others have ended. Not in the shares
    problems : what does not fit what the row declares
    """

    row: str
    arch: str
    chip: str
    kernel: str
    registers: int
    shared_bytes: int
    warps_per_sm: int
    asked_bytes: float
    counted: float
    instructions: int
    dearest: int
    uncounted_loops: int
    pipes: dict[str, int]
    bytes_in_flight: int
    bytes_needed: int
    ceilings: dict[str, float]
    binds: str
    share: float
    dearest_share: float
    dearest_ceiling: float
    busy: float
    slack: float
    problems: list[str] = field(default_factory=list)


def clocks_of(path: paths.Path, chip: Chip) -> dict[str, float]:
    r"""Return the clocks of an SM that a warp keeps each of its resources busy on a pass.

    An instruction that is predicated off takes its issue slot, and no more.

    Examples
    --------
    >>> code, _ = sass.parse("  /*0000*/ FFMA R1, R2, R3, R1 ;\n  /*0010*/ IADD3 R4, R4, R5, RZ ;")
    >>> clocks_of(paths.Path(tuple(code)), CHIPS["sm_80"])
    {'issue': 0.5, 'fma': 0.5, 'alu': 0.5}
    """
    lanes = chip.lanes_per_clock
    clocks: dict[str, float] = {}

    def add(resource: str, amount: float) -> None:
        clocks[resource] = clocks.get(resource, 0.0) + amount

    for one in path.code:
        add("issue", 1 / _SCHEDULERS)
        if one.address in path.inactive:
            continue
        pipe = sass.pipe_of(one)
        if pipe in ("fma", "fma2", "imad"):
            add("fma", (64 if pipe == "fma2" else 32) / lanes["fma"])
            if pipe == "imad":
                add("imad", 32 / lanes["imad"])
        elif pipe in ("alu", "add"):
            add("alu", 32 / lanes[pipe])
        elif pipe in ("half", "xu", "fp64"):
            add(pipe, 32 / lanes[pipe])
        elif pipe == "tensor":
            add("tensor", sass.products_of(one) / chip.products_per_clock)
        elif pipe in ("global", "shared"):
            add("lsu", max(1.0, 32 * one.access_bytes / _LOCAL_BYTES_PER_CLOCK))
        elif pipe == "shuffle":
            add("lsu", 1.0)
    return clocks


def warps_per_sm(
    resources: cubin.Resources, warps_per_block: int, smem_bytes: int, chip: Chip
) -> int:
    """Return how many warps an SM holds at once, by registers, shared memory and its limits.

    Examples
    --------
    >>> taken = cubin.Resources(registers=128, static_bytes=0, params_start=0)
    >>> warps_per_sm(taken, 4, 0, CHIPS["sm_90"]), warps_per_sm(taken, 4, 100 << 10, CHIPS["sm_90"])
    (16, 8)
    """
    per_warp = _rounded(resources.registers * 32, _REGISTERS_STEP)
    shared = _rounded(smem_bytes + max(resources.static_bytes, chip.reserved_bytes),
                      _SHARED_STEP_BYTES)  # fmt: skip
    # A register file per scheduler, and a warp stays at one of them.
    by_registers = _REGISTERS_PER_SM // _SCHEDULERS // max(1, per_warp) * _SCHEDULERS
    blocks = min(
        chip.blocks, chip.warps // warps_per_block, by_registers // warps_per_block,
        chip.shared_bytes // shared if shared else chip.blocks,
    )  # fmt: skip
    return blocks * warps_per_block


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


_PASSES = 16  # of which the second half counts: copies that earlier passes began are on their way


def pass_clocks(
    path: paths.Path, word_bytes: int, memory_clocks: float, cache_clocks: float
) -> tuple[float, int]:
    """Return the clocks that a warp alone takes for a pass, and its most bytes in flight per lane.

    It issues an instruction a clock, in order, and stops where one needs what has not arrived:
    registers of a load, or copies to shared memory that it waits for. Loads of the work take
    `memory_clocks`, narrower ones `cache_clocks`; all else is immediate.
    """
    ready: dict[str, float] = {}
    groups: list[list[float]] = [[]]  # of copies; the last one is open
    flying: list[tuple[float, int]] = []
    clock, start, most = 0.0, 0.0, 0
    for number in range(_PASSES):
        if number == _PASSES // 2:
            start = clock
        for one in path.code:
            clock = max([clock + 1, *[ready[r] for r in one.reads if r in ready]])
            if one.address in path.inactive:
                continue
            if one.name == "LDGDEPBAR":
                groups.append([])
            elif one.name == "DEPBAR":
                allowed = int(one.operands[-1], 16) if one.operands[-1][:2] == "0x" else 0
                done = groups[: max(0, len(groups) - 1 - allowed)]
                clock = max([clock, *[arrival for group in done for arrival in group]])
                groups = groups[len(done) :]
            arrival = 0.0
            if one.loads_global or one.name in ("ATOM", "ATOMG"):
                of_work = one.access_bytes >= word_bytes
                arrival = clock + (memory_clocks if of_work else cache_clocks)
                if one.name == "LDGSTS":
                    groups[-1].append(arrival)
                if of_work:
                    flying = [(at, size) for at, size in flying if at > clock]
                    flying.append((arrival, one.access_bytes))
                    most = max(most, sum(size for _, size in flying))
            for register in one.writes:
                ready.pop(register, None)
                if arrival:
                    ready[register] = arrival
    return (clock - start) / (_PASSES - _PASSES // 2), most


_SMALL = ("attention_starts", "attention_schedule")


def examine(row: Row, arch: str) -> Entry:
    """Return a row's entry on an architecture.

    Raises
    ------
    CompileError : NVRTC or nvdisasm is missing or fails
    ValueError : the call does not launch one kernel of the row's
    """
    device = PlannedDevice(arch)
    with unverified():
        row.call(device)
    names = [str(launch.specialisation) for launch in device.launches]
    chosen = [
        launch for launch in device.launches
        if launch.specialisation.kernel.name.startswith(row.kernel)
        and launch.specialisation.kernel.name not in _SMALL
    ]  # fmt: skip
    if len(chosen) != 1:
        raise ValueError(f"{row.name} {arch}: expected one launch of {row.kernel}*, got {names}")
    return _bound(row, chosen[0], arch)


def _bound(row: Row, launch: Planned, arch: str) -> Entry:
    chip = CHIPS[arch]
    image, name = _compiled(launch.specialisation, arch)
    resources = cubin.resources(image, name)
    constants = constant_bank(launch.params, resources.params_start, launch.block, launch.grid)
    thread = None
    if row.num_units is not None:
        thread = FirstThread(row.block(launch), row.word_bytes)
    code = paths.Code(_listing(image, name), constants, thread)
    loop = _busiest_loop(code, row.word_bytes) if row.num_units is None else None
    fast, slow = (code.path(loop, row.word_bytes, dearest=dearest) for dearest in (False, True))
    if fast is None or slow is None or (loop is None and row.num_units is None):
        raise CompileError(
            f"{launch.specialisation} {arch}: no way through its code moves data", ""
        )

    # A pass
    asked = 32 * (fast.bytes_loaded(row.word_bytes) + fast.bytes_stored(row.word_bytes))
    units = asked / row.asked_bytes(launch)
    pieces = row.pieces(launch)
    blocks, problems = len(pieces) * heads_of(launch) if pieces else prod(launch.grid), []
    if row.num_units is None:
        per_block = units * launch.warps_per_block
        if per_block < 1 or per_block % 1:
            problems.append(f"a block asks for {per_block:.3f} x {row.unit} on a pass")
    else:
        declared = row.num_units / (blocks * launch.warps_per_block)
        if abs(units - declared) > row.asked_slack * declared:
            problems.append(f"a warp asks for {units:.3f} x {row.unit}, {declared:.3f} declared")
        units = declared
    counted = units * row.unit_bytes / row.sharing(launch)
    if row.of_products:
        counted = 2.0 * sum(map(sass.products_of, fast.active()))

    # The chip
    sms = min(chip.sm_count, blocks)
    warps = min(warps_per_sm(resources, launch.warps_per_block, launch.smem_bytes, chip),
                ceil(blocks / sms) * launch.warps_per_block)  # fmt: skip
    memory_clocks = LINK_LATENCY_NS * chip.clock_mhz * 1e-3 if row.over_link else chip.memory_clocks
    busy = 1.0
    if pieces:
        places = sms * warps // launch.warps_per_block // heads_of(launch)
        busy = busy_share(pieces, places)
    _, in_flight = pass_clocks(fast, row.word_bytes, memory_clocks, chip.cache_clocks)
    moved_gb_s = chip.link_gb_s if row.over_link else chip.memory_gb_s
    needed = memory_clocks / (chip.clock_mhz * 1e-3) * moved_gb_s / sms
    gigaclocks = sms * chip.clock_mhz * 1e-3  # of all SMs that the launch uses, per second
    name_of_peak, peak = _peak(row, chip)

    def ceilings_of(path: paths.Path) -> dict[str, float]:
        alone, _ = pass_clocks(path, row.word_bytes, memory_clocks, chip.cache_clocks)
        clocks = {**clocks_of(path, chip), "latency": alone / warps}
        return {**{r: counted / c * gigaclocks for r, c in clocks.items()}, name_of_peak: peak}

    ceilings = ceilings_of(fast)
    binds = min(ceilings, key=lambda resource: ceilings[resource])
    dearest = ceilings_of(slow)
    return Entry(
        row.name, arch, chip.name, launch.specialisation.expression, resources.registers,
        launch.smem_bytes + resources.static_bytes, warps, asked, round(counted, 1),
        len(fast.code), len(slow.code), fast.uncounted,
        dict(Counter(map(sass.pipe_of, fast.code)).most_common()), 32 * in_flight, round(needed),
        {r: round(c, 1) for r, c in sorted(ceilings.items(), key=lambda item: item[1])},
        binds, round(ceilings[binds] / peak, 4),
        round(min(dearest.values()) / peak, 4),
        round(min(c for r, c in dearest.items() if r != name_of_peak), 1), round(busy, 3),
        row.slack, problems,
    )  # fmt: skip


def _peak(row: Row, chip: Chip) -> tuple[str, float]:
    if row.of_products:
        return "tensor peak", 1e3 * chip.tensor_tflops
    return ("link", chip.link_gb_s) if row.over_link else ("memory", chip.memory_gb_s)


def _busiest_loop(code: paths.Code, word_bytes: int) -> paths.Loop | None:
    """Return the loop that moves most in a pass, the innermost of those that move as much."""
    best, most = None, 0
    for loop in code.loops():
        path = code.path(loop, word_bytes)
        moved = 0 if path is None else path.bytes_loaded(word_bytes) + path.bytes_stored(word_bytes)
        if moved > most:
            best, most = loop, moved
    return best


def _compiled(specialisation: Specialisation, arch: str) -> tuple[bytes, str]:
    compiled = nvrtc.compile_cubin(specialisation, arch)
    if not compiled.target.startswith("sm_"):
        raise CompileError(f"{specialisation}: this NVRTC is older than {arch}", "")
    return compiled.image, compiled.lowered_name


@lru_cache(maxsize=16)
def _listing(image: bytes, name: str) -> str:
    return nvdisasm.sections_of(nvdisasm.disassemble(disassembler(), image))[name]


def disassembler() -> Path:
    path = nvdisasm.find()
    if path is None:
        raise CompileError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm", "")
    return path
