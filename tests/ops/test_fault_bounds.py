"""What an `IndexFault` says was expected: for every index argument of every operation."""

from __future__ import annotations

import numpy as np
import pytest
from devices.fake_cuda.kernels import open_device
from valid_calls import EXAMPLES

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call as op_call
from kvcupy.ops.attention import LayerArrays, StepAttention, check_options

# Operation, argument, its elements, which of them is wrong, and the bound. Sizes: `valid_calls`.
# Other arguments that the argument excludes or needs are in `OTHERS`.
FAULTS = [
    ("store_kv", "slot_mapping", [7, 8, -1], 1, "0 to 7"),
    ("store_mla", "slot_mapping", [7, 8, -1], 1, "0 to 7"),
    ("gather_kv", "slots", [7, -1, 99], 2, "0 to 7"),
    ("apply_rope", "positions", [0, -1, 15], 1, "0 to 15"),
    ("rope_store_kv", "positions", [0, 16, 15], 1, "0 to 15"),
    ("rope_store_kv", "slot_mapping", [7, 8, -1], 1, "0 to 7"),
    ("rope_store_mla", "positions", [0, 16, 15], 1, "0 to 15"),
    ("rope_store_mla", "slot_mapping", [7, 8, -1], 1, "0 to 7"),
    ("paged_attention", "block_table", [[0, 2], [1, 0]], 1, "0 to 1"),
    ("paged_attention", "seq_lens", [9, 8], 0, "0 to 8"),
    ("paged_attention", "query_lens", [1, 3], 1, "0 to 2 in all"),
    ("paged_attention", "cu_query_lens", [0, 1, 4], 2, "0 to 2, not decreasing"),
    ("copy_pages", "src_pages", [4, 0], 0, "0 to 3"),
    ("copy_pages", "dst_pages", [2, 4], 1, "0 to 3"),
    ("shift_pages", "pages", [4, 0], 0, "0 to 3"),
    ("shift_pages", "out_pages", [3, 4], 1, "0 to 3"),
    ("shift_pages", "delta", [1, -16], 1, "-15 to 15"),
    ("slot_mapping", "append_lens", [1, -1], 1, "0 to 8 in all"),
    ("slot_mapping", "seq_lens", [9, 8], 0, "append_lens to 8"),
    ("store_state", "slots", [7, 8, -1], 1, "0 to 7"),
    ("gather_state", "slots", [7, 8, -1], 1, "0 to 7"),
    ("update_conv_state", "slots", [7, 8], 1, "0 to 7"),
    ("update_conv_state", "cu_query_lens", [0, 2, 4], 2, "0 to 3, not decreasing"),
]
OTHERS = {"append_lens": {"seq_lens": [6, 3]}}
MODES = ["kernels", "stand-in", "strict", "reference"]


@pytest.fixture(params=MODES)
def device(request, monkeypatch):
    """A device whose faults stay on record, or in strict mode are raised at the call."""
    monkeypatch.setattr(op_call, "_plans", {})
    if request.param == "stand-in":
        yield open_device(monkeypatch)
        return
    if request.param == "strict":
        monkeypatch.setattr(kv.config, "_strict_index_faults", "raise")
        monkeypatch.setattr(kv.config, "_strict", True)
    if request.param == "reference":
        monkeypatch.setattr(cxx, "find_compiler", lambda: None)
        monkeypatch.setattr(kv.config, "_fallback", "warn")
    device = HostDevice()
    monkeypatch.setitem(devices._devices, "host", device)
    yield device


def raised(device, work):
    with pytest.raises(kv.IndexFault) as caught:
        work()
        kv.check_faults(device)
    kv.check_faults(device)
    return caught.value


def test_every_operation_with_faults_is_in_the_table():
    assert {name for name, *_ in FAULTS} == EXAMPLES.keys() - {"merge_states"}


@pytest.mark.parametrize(
    "operation, argument, values, position, bound", FAULTS, ids=[" ".join(f[:2]) for f in FAULTS]
)
def test_a_fault_has_its_bound(device, operation, argument, values, position, bound):
    call = EXAMPLES[operation](device)
    arrays = {argument: values, **OTHERS.get(argument, {})}
    if operation == "update_conv_state" or argument not in call:
        arrays = {name: np.array(v, np.int32) for name, v in arrays.items()}
    call |= {name: device.asarray(np.array(v)) for name, v in arrays.items()}
    fault = raised(device, lambda: getattr(kv, operation)(**call))
    got = np.ravel(values)[position]
    assert fault.bound == bound
    expected = f"{operation}: {argument}[{position}]: expected {bound}, got {got}; it was skipped"
    assert str(fault).startswith(expected)


def test_a_fault_of_a_sequence_with_an_evicted_span_has_its_bound(device):
    cache, query = device.zeros((2, 4, 1, 8), "fp32"), device.zeros((1, 1, 8), "fp32")
    tables = {"block_table": [[0, 1]], "seq_lens": [7], "evicted_starts": [1], "evicted_lens": [2]}
    step = StepAttention(**{
        name: device.asarray(np.array(values, np.int32)) for name, values in tables.items()
    })  # fmt: skip
    options = check_options("NHD", None, True, None, None, None)
    layer = LayerArrays(cache, cache)
    fault = raised(device, lambda: step.run(layer, query, device.zeros((1, 1, 8), "fp32"), options))
    assert fault.bound == "0 to 8 less evicted_lens"
    assert str(fault).startswith("paged_attention: seq_lens[0]: expected 0 to 8 less evicted_lens,")


@pytest.mark.parametrize("method", ["kernel", "copy", "staged"])
@pytest.mark.parametrize("lists, argument, bound", [
    (([1, 8], [2, 3]), "src_pages", "0 to 7"), (([1, 2], [3, 12]), "dst_pages", "0 to 11"),
], ids=["src", "dst"])  # fmt: skip
def test_a_fault_of_a_transfer_has_its_bound(device, method, lists, argument, bound):
    src, dst = (
        kv.KVPool(n, 2, 3, 2, 4, dtype="fp16", layout=layout, placement=placement, device=device)
        for n, layout, placement in (
            (8, "layer_first", "device"), (12, "page_first", "pinned"),
        )
    )  # fmt: skip
    fault = raised(device, lambda: kv.transfer_pages(src, dst, *lists, method=method))
    assert fault.bound == bound
    assert str(fault).startswith(f"transfer_pages: {argument}[1]: expected {bound}, got ")
