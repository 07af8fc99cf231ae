"""Index arrays that hold garbage: what is out of range is skipped or a fault, never written past.

Other operations have this in `test_every_operation.py`. Attention, whose lengths may claim billions
of tokens, has its own checks: nothing outside its outputs changes.
"""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import INDEX_DTYPE, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv

FAR = (2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1)
GARBAGE = sorted({sign * far for far in FAR for sign in (1, -1)} | {-(2**31), -(2**63), -1})


def of_dtype(values, dtype):
    """Clamp `values` to what an index array can hold."""
    info = np.iinfo(INDEX_DTYPE[dtype])
    return np.array([min(max(int(v), info.min), info.max) for v in values], np.int64)


def numbers(end, count):
    """Lists of `count` indices below `end`, garbage among them."""
    one = st.one_of(st.integers(0, end - 1), st.integers(0, end - 1), st.sampled_from(GARBAGE),
                    st.sampled_from([end, end + 1]))  # fmt: skip
    return st.lists(one, min_size=count, max_size=count)


many = settings(max_examples=examples(60), deadline=None, database=None)
dtypes = st.sampled_from(["int32", "int64"])


# Attention -------------------------------------------------------------------------------------


def attend_anyhow(device, heads, lens, seq_lens, table, dtype, fmt, max_rows):
    """Attend, with any `lens` (or None), `seq_lens` and `table`."""
    case = AttentionCase(device, 6)
    rows = len(seq_lens) if lens is None else max_rows
    case_args = {
        "query": case.queries(fmt, rows, heads[0], 16),
        "k_cache": case.input(fmt, (6, 4, heads[1], 16)),
        "v_cache": case.input(fmt, (6, 4, heads[1], 16)),
        "block_table": case.table(table, "int32"),
        "seq_lens": case.slots(of_dtype(seq_lens, dtype), dtype),
    }
    if lens is not None:
        case_args["query_lens"] = case.slots(of_dtype(lens, dtype), dtype)
    out, lse = case.results(case_args)
    case.issue(case_args, out, lse)
    try:
        kv.check_faults(device)
        faults = ""
    except kv.IndexFault as fault:
        faults = str(fault)
    for result in (out, lse):
        result.view[...] = result.live()
    for buffer in case.buffers:
        buffer.check()
    return faults


@many
@given(
    lens=st.lists(st.one_of(st.integers(0, 5), st.sampled_from(GARBAGE)), min_size=3, max_size=3),
    seq_lens=numbers(20, 3), table=st.lists(numbers(6, 5), min_size=3, max_size=3),
    dtype=dtypes, fmt=st.sampled_from(["fp16", "fp32"]), group=st.sampled_from([1, 2, 128]),
    decode=st.booleans(),
)  # fmt: skip
def test_attention(device, lens, seq_lens, table, dtype, fmt, group, decode):
    table = np.stack([of_dtype(row, "int32") for row in table])
    attend_anyhow(device, (2 * group, 2), None if decode else lens, seq_lens, table, dtype, fmt, 7)


@pytest.mark.parametrize("fmt", ["fp16", "fp32"], ids=["tensor cores", "plain"])
@pytest.mark.parametrize("lens", [[10**9, 1], [1, 10**9], [2**62, 2**62], [2**63 - 1] * 2])
def test_query_lens_that_claim_billions_of_tokens(device, fmt, lens):
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    faults = attend_anyhow(device, (128, 1), lens, [9, 7], table, "int64", fmt, 4)
    # Any thread whose sequence ends past the tokens may be the first to report.
    past = [
        f"query_lens[{b}]: expected 0 to 4 in all, got {n};"
        for b, n in enumerate(lens) if sum(lens[: b + 1]) > 4
    ]  # fmt: skip
    assert any(text in faults for text in past)
