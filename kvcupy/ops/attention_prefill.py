"""The kernel of prefill and append on tensor cores: `kernels_src/attention_prefill.cu`."""

from __future__ import annotations

from ..devices.protocol import Device
from ..kernels import Kernel, Specialisation
from . import geometry
from .attention_checks import Call
from .attention_params import PARAMS, Tiling

PREFILL = Kernel(
    "attention_prefill.cu", "attention_prefill", PARAMS, "AttentionParams", barriers=True
)

# kPrefillRows and kPrefillThreads of the kernel.
ROWS_A_TILE = 64
THREADS = 128

WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths of K and V that there are kernels for; others are padded to the first that has room."""

FORMATS = {"fp16": "half", "bf16": "bfloat16"}

_ALIGNMENT = 16  # bytes: rows are copied in words of so many
_PACK = 8  # elements in a word
_ROWS_A_SEQUENCE = 16  # fewer leave most of a product of a tensor core to nothing
_TURING_SMEM_BYTES = 64 * 1024
_TILE_BYTES = 144  # a PrefillTile


def specialisations() -> list[Specialisation]:
    """Return every specialisation that there is."""
    return [PREFILL.specialise(name, *widths) for name in FORMATS.values() for widths in WIDTHS]


def padded_widths(k_width: int, v_width: int) -> tuple[int, int] | None:
    """Return the smallest widths of a kernel with room for rows of K and V; None if there is none.

    >>> padded_widths(80, 80), padded_widths(192, 128), padded_widths(576, 512)
    ((128, 128), (192, 128), None)
    """
    return next((w for w in WIDTHS if k_width <= w[0] and v_width <= w[1]), None)


def specialisation_for(format_name: str, k_width: int, v_width: int) -> Specialisation:
    """Return the kernel for a format and rows of such widths, which it must have room for."""
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {WIDTHS[-1]}")
    return PREFILL.specialise(FORMATS[format_name], *widths)


def smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `PrefillShape::kBytes` of the kernel."""
    k_width, v_width = map(int, specialisation.arguments[1:])
    in_registers = k_width <= 192  # the queries
    keys = 64 if in_registers else 32
    k_bytes, v_bytes, query_bytes = (2 * n for n in (keys * k_width, keys * v_width, 64 * k_width))
    values = max(v_bytes, query_bytes) if in_registers else v_bytes + query_bytes
    table_bytes = -(-(16 * keys + 4 * (keys // 32)) // 8) * 8
    return k_bytes + values + 2 * table_bytes + _TILE_BYTES


def suits(device: Device, call: Call, alignment: int) -> bool:
    """Return whether a call may take the kernel.

    Parameters
    ----------
    call : `query` and `out` are of one format
    alignment : of the addresses of query, caches and output, as `plan.alignment` gives it

    Notes
    -----
    It may where lanes step together, everything is fp16 or bf16 of one kind and unscaled, rows are
    whole words at aligned addresses, and sequences have rows enough on average, as far as shapes
    tell. On Turing, which has little shared memory, the widest rows take the plain path, and so
    does bf16, which its tensor cores do not know.
    """
    query, out = call.view("query"), call.view("out")
    assert query is not None and out is not None
    names = {query.format, out.format, call.k.cache_format.name, call.v.cache_format.name}
    widths = padded_widths(call.k.cache.width, call.v.cache.width)
    if device.warp_lanes != 32 or len(names) != 1 or query.format not in FORMATS or widths is None:
        return False
    scales = ("k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
    if any(call.given.get(name) is not None for name in scales):
        return False
    strides = [n for one in (call.k, call.v) for n in one.cache_strides]
    strides += [*query.strides[:2], *out.strides[:2]]
    whole = call.k.cache.width % _PACK == 0 and call.v.cache.width % _PACK == 0
    if not whole or geometry.widest((alignment, *map(abs, strides))) < _ALIGNMENT:
        return False
    if getattr(device, "arch", None) == "sm_75":
        needed = smem_bytes(specialisation_for(query.format, *widths))
        if query.format == "bf16" or needed > _TURING_SMEM_BYTES:
            return False
    rows = call.num_tokens * call.group
    return rows >= _ROWS_A_SEQUENCE * max(1, call.num_sequences)


def prefill_tiling(call: Call) -> Tiling:
    """Lay the kernel over a call that it suits. Of `Tiling`, `lanes` means nothing to it."""
    query = call.view("query")
    assert query is not None
    chosen = specialisation_for(query.format, call.k.cache.width, call.v.cache.width)
    return Tiling(chosen, ROWS_A_TILE, 1, THREADS, smem_bytes(chosen))
