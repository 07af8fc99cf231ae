"""`kv.verify` notices a fault in each device function, but for those that are listed here."""

from __future__ import annotations

import pytest
from mutants import KERNELS
from verify_faults import plant, survey

_REASONS = {
    "GPUs before sm_89 call it, sm_90 has an instruction.": (
        "fp8.cuh: decode_e4m3_pair",
        "fp8.cuh: encode_magnitude",
        "fp8.cuh: encode_fp8",
        "fp8.cuh: encode_four_fp8",
        "instructions.cuh: where_halves_exceed",
        "mma.cuh: multiply_by_shuffles",
        "numeric.cuh: quantise_by_arithmetic",
    ),
    "Only a processor calls it, or it does nothing on a GPU.": (
        "rope.cu: load_pairs",
        "rope.cu: rotate_rows",
        "cache_rows.cuh: cache_row_ahead",
    ),
    "It is for the compiler of a GPU alone.": ("transfer_rows.cuh: hide_value",),
    "Nothing calls it.": ("four_bit.cuh: as_bfloat16",),
    "Supposed, not shown: it decides how keys are cut into pieces, not what their sum is.": (
        "attention_schedule.cu: divide_up",
        "attention_schedule.cu: sum_of_lanes",
        "attention_schedule.cu: most_of_lanes",
        "attention_schedule.cu: lanes_where",
        "attention_schedule.cu: least_piece_keys",
        "attention_schedule.cu: candidate",
        "attention.cuh: list_whole_blocks",
    ),
    "Supposed, not shown: a barrier: only a strict build misses it.": (
        "attention_schedule.cu: wait_for_block",
    ),
    "Supposed, not shown: another value costs time: more keys are masked, or sums rescaled by 1.": (
        "attention.cuh: limits_of_rows",
        "attention.cuh: seen_by_all",
        "attention_prefill.cuh: tiles_within",
        "attention_prefill.cuh: weigh_scores",
    ),
    "Supposed, not shown: another origin or power of two cancels.": (
        "merge.cu: origin_of",
        "attention_decode_four_bit.cuh: power_of_chunks",
        "attention_decode_four_bit.cuh: ValueUnits::is_large",
        "attention_decode_heads.cu: largest_of_quarter",
    ),
    "No case yet: lengths past the table, and windows over tree positions.": (
        "attention.cuh: keys_before",
        "attention.cuh: windows_in_tree",
        "attention.cuh: position_counts",
    ),
    "No case yet: values that move with shifted keys.": (
        "shift.cu: copy_value",
        "shift.cu: copy_words",
    ),
    "No case yet: codes that are transferred into other codes, rows at odd addresses.": (
        "transfer.cu: groups_of",
        "transfer.cu: HeldCodes::values",
        "transfer.cu: HeldCodes::values #2",
        "transfer.cu: HeldCodes::store",
        "transfer.cu: HeldElements::load",
        "four_bit.cuh: is_aligned",
    ),
    "No case yet, not looked into.": (
        "attention_decode_four_bit.cuh: SharedStrides::k_scales",
        "attention_decode_four_bit.cuh: shared_strides",
        "attention_decode_four_bit.cuh: load_four_bit_queries",
        "attention_prefill.cuh: scale_scores",
        "numeric.cuh: decode_four #2",
    ),
}
UNNOTICED = {name: reason for reason, names in _REASONS.items() for name in names}
"""By the name of a function, why no case of `kv.verify` notices the fault in it on `ARCH`."""


def test_listed_functions_exist(tmp_path):
    names = plant(tmp_path)
    assert UNNOTICED.keys() <= set(names)
    code = "".join(path.read_text() for path in KERNELS.glob("*.cu*"))
    assert 400 < len(names) <= code.count("__device__") + code.count("__global__")


@pytest.mark.slow
def test_a_fault_in_each_function_is_noticed(tmp_path):
    noticed = survey(tmp_path)
    assert {name for name, case in noticed.items() if not case} == UNNOTICED.keys()
