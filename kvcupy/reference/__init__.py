"""What every operation computes, in NumPy: one function per operation.

This package is the specification that the kernels are tested against. It is written to be read:
number formats are taken apart into their bits, tokens are visited one after another, and there is
one way to do each thing. It imports NumPy alone, and checks no arguments but the `scaling` of
`rope_table`.
"""

from .attention import merge_states, paged_attention, sees
from .formats import FORMAT_OF_DTYPE, LIMIT, bits_of, decode, encode, format_of
from .four_bit import (
    FOUR_BIT,
    FourBitRows,
    decode_codes,
    decode_scales,
    dequantise_rows,
    encode_codes,
    encode_scales,
    hadamard,
    quantise_rows,
)
from .pages import (
    fill_slot_mapping,
    find_duplicate_slots,
    page_table_csr,
    slot_mapping,
    transfer_pages,
)
from .rope import (
    apply_rope,
    cos_sin,
    pair_axes,
    position_faults,
    rope_frequencies,
    rope_rows,
    rope_store_kv,
    rope_store_mla,
    rope_table,
    rotate,
    shift_angles,
    shift_pages,
    shift_rows,
)
from .store import (
    copy_pages,
    divide,
    dynamic_scales,
    gather_kv,
    gather_state,
    num_slots,
    store_kv,
    store_mla,
    store_state,
    update_conv_state,
)

__all__ = [
    "FORMAT_OF_DTYPE", "FOUR_BIT", "LIMIT", "FourBitRows", "apply_rope", "bits_of", "copy_pages",
    "cos_sin", "decode", "decode_codes", "decode_scales", "dequantise_rows",
    "divide", "dynamic_scales", "encode", "encode_codes", "encode_scales",
    "fill_slot_mapping", "find_duplicate_slots", "format_of", "gather_kv", "gather_state",
    "hadamard", "merge_states", "num_slots", "page_table_csr", "paged_attention", "pair_axes",
    "position_faults", "quantise_rows", "rope_frequencies",
    "rope_rows", "rope_store_kv", "rope_store_mla", "rope_table", "rotate", "sees", "shift_angles",
    "shift_pages", "shift_rows", "slot_mapping",
    "store_kv", "store_mla", "store_state", "transfer_pages", "update_conv_state",
]  # fmt: skip
