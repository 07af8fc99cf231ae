"""Arrays of any library: views by address, signatures of arguments, and number formats.

This package stands below `devices/`, whose methods take arrays of any library.
"""

from .encodings import four_bit_array, four_bit_encoding, view_as, with_rotation
from .probes import (
    TensorMatcher,
    address_of,
    note_written,
    noting_written,
    probe,
    probe_arguments,
    taking,
    tensor_matcher,
    wait_for_producers,
)
from .views import (
    STREAMED_TYPES,
    TORCH_TYPES,
    ArrayView,
    Memory,
    array_at,
    bytes_of,
    columns,
    contiguous_strides,
    cupy_array_at,
    describe,
    first_overlap,
    four_bit_view,
    is_pinned,
    memory_of,
    overlap,
    overlaps_itself,
    pinned_at,
    recast,
    require_no_gradient,
    reshaped,
    strides_of,
    tensor_of,
    transposed,
    view,
)

__all__ = [
    "STREAMED_TYPES", "TORCH_TYPES", "ArrayView", "Memory", "TensorMatcher", "address_of",
    "array_at", "bytes_of", "columns", "contiguous_strides", "cupy_array_at", "describe",
    "first_overlap", "four_bit_array", "four_bit_encoding", "four_bit_view", "is_pinned",
    "memory_of", "note_written", "noting_written", "overlap", "overlaps_itself", "pinned_at",
    "probe", "probe_arguments", "recast", "require_no_gradient", "reshaped", "strides_of",
    "taking", "tensor_matcher", "tensor_of", "transposed", "view", "view_as",
    "wait_for_producers", "with_rotation",
]  # fmt: skip
