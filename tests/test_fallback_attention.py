"""`paged_attention` and `merge_states` where no kernel can be compiled.

What `tests/ops` asks of the kernels is asked of the array expressions, with the same tolerances.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from attention_cases import AttentionCase
from ops import (
    test_attention,
    test_attention_errors,
    test_attention_formats,
    test_attention_four_bit,
    test_attention_masks,
    test_attention_paged,
    test_attention_paged_errors,
    test_attention_rope,
    test_attention_rotated,
    test_attention_streams,
    test_merge,
)
from test_fallback_operations import again, device, fresh, warnings_are_errors

import kvcupy as kv

__all__ = ["device", "fresh", "warnings_are_errors"]  # fixtures

pytestmark = pytest.mark.again

globals().update(
    again(test_attention, "test_many_heads_share_a_latent")
    | again(test_attention_masks)
    | again(test_attention_formats, "test_offsets_past_two_gigabytes")
    | again(test_attention_four_bit, "test_where_each_thread_takes_rows_of_its_own")
    | again(test_attention_errors)
    | again(test_attention_paged)
    | again(test_attention_paged_errors)
    | again(test_attention_rope)
    | again(test_attention_rotated, "test_where_each_thread_takes_rows_of_its_own")
    | again(test_attention_streams)
    | again(test_merge)
)
del globals()["test_attention_paged_sums_of_query_lens_that_are_none"]  # only kernels read the sums


def attend(device):
    case = AttentionCase(device, 1)
    case.attend(case.arguments([9, 6], [4, 2]))


def merge(device):
    ones = device.asarray(np.ones((2, 1, 4), np.float32))
    kv.merge_states(ones, ones[..., 0].copy(), ones, ones[..., 0].copy())


@pytest.mark.parametrize(("operation", "call"), [("paged_attention", attend),
                                                 ("merge_states", merge)])  # fmt: skip
def test_one_warning_an_operation(fresh, caplog, operation, call):
    caplog.set_level(logging.WARNING, logger="kvcupy")
    for _ in range(2):
        call(fresh)
    (message,) = [r.getMessage() for r in caplog.records if r.name == "kvcupy"]
    assert message.startswith(f"{operation} runs as array expressions, slowly, because ")
    assert "no C++ compiler was found" in message


@pytest.mark.parametrize("call", [attend, merge])
def test_error_raises(fresh, monkeypatch, call):
    monkeypatch.setattr(kv.config, "fallback", "error")
    with pytest.raises(kv.CompileError, match="no C\\+\\+ compiler was found"):
        call(fresh)
