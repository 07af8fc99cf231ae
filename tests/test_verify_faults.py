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
    "Off by one, it asks for another length of pieces, and any gives the same sums.": (
        "attention_schedule.cu: sum_of_lanes",
        "attention_schedule.cu: most_of_lanes",
        "attention_schedule.cu: least_piece_keys",
        "attention_schedule.cu: candidate",
    ),
    "A power of two that keys are divided by, and scores multiplied by: a factor of 4 cancels.": (
        "attention_decode_four_bit.cuh: power_of_chunks",
    ),
    "It returns what the rounding of queries to fp16 left: less than the tolerance.": (
        "attention_decode_four_bit.cuh: load_four_bit_queries",
    ),
    "A processor accesses words at any address.": ("four_bit.cuh: is_aligned",),
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
