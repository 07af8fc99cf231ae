"""Eight conversions at a time, and one at a time, give what the reference gives: every rounding
boundary of the 16-bit floats, and one unit of float32 to either side of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Case, from_values

import kvcupy as kv
from kvcupy import ops, reference
from kvcupy.devices import cxx

pytestmark = pytest.mark.usefixtures("lenient_host")  # strict builds convert one by one

WIDTHS = {"packs": 512, "one by one": 511}
SIXTEEN_BITS = ("bf16", "fp16")


def boundaries(fmt):
    """All values of a format, the middles between neighbours, and a step to either side."""
    codes = np.arange(0x8000, dtype=np.uint16)
    carrier = codes if fmt == "bf16" else codes.view(np.float16)
    values = reference.decode(carrier, fmt)
    values = values[np.isfinite(values)]
    middles = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    exact = np.concatenate([values.astype(np.float32), middles])
    near = [np.nextafter(exact, np.float32(towards)) for towards in (0, np.inf)]
    odd = np.array([np.inf, np.nan, 3.4028235e38, 1e-45, 65519.996, 65520.0], np.float32)
    found = np.concatenate([exact, *near, odd])
    return np.concatenate([found, -found])


def rows_of(values, width):
    """Rows of a width, the last one filled up."""
    return np.resize(values, (-(-len(values) // width), 1, width))


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("fmt", SIXTEEN_BITS)
def test_rounding(device, fmt, width):
    case = Case(device, 0)
    rows = rows_of(boundaries(fmt), width)
    key = case.place(rows, "fp32")
    caches = [case.output(fmt, rows.shape) for _ in "kv"]
    case.store_kv(key, key, *caches, np.arange(len(rows)))


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("fmt", SIXTEEN_BITS)
def test_widening(device, fmt, width):
    codes = rows_of(np.arange(0x10000, dtype=np.uint16), width)
    cache = kv.view_as(device.asarray(codes), fmt)
    found, _ = kv.gather_kv(cache, cache, device.asarray(np.arange(len(codes))), dtype="fp32")
    want = reference.decode(codes if fmt == "bf16" else codes.view(np.float16), fmt)
    np.testing.assert_array_equal(device.to_numpy(found), want.astype(np.float32))


@pytest.mark.parametrize("fmt", SIXTEEN_BITS)
def test_dynamic_scales(device, fmt):
    """Of rows whose largest magnitude is anywhere, and that hold NaN, which does not count."""
    case = Case(device, 0)
    rows = np.random.default_rng(0).standard_normal((80, 1, 80)).astype(np.float32)
    rows[np.arange(80), 0, np.arange(80)] = np.resize([-9, 9, -700, np.nan], 80)
    key = case.place(from_values(rows, fmt), fmt)
    caches = [case.output("int8", rows.shape) for _ in "kv"]
    scales = [case.output("fp32", (80, 1)) for _ in "kv"]
    case.store_kv(
        key, key, *caches, range(80), k_scale_cache=scales[0], v_scale_cache=scales[1]
    )  # fmt: skip


SPECIALISATIONS = ops.specialisations()


@pytest.mark.parametrize("source", sorted({s.kernel.source for s in SPECIALISATIONS}))
def test_every_specialisation_compiles(monkeypatch, source):
    """Here too, where a template for eight elements may lack what the general one has."""
    monkeypatch.setattr(cxx, "_FLAGS", (*cxx._FLAGS, cxx._native()))
    instances = [
        f"template void {s.expression}({s.kernel.struct});"
        for s in SPECIALISATIONS
        if s.kernel.source == source and "<" in s.expression
    ]
    cxx.check("\n".join([f'#include "{source}"', *dict.fromkeys(instances), ""]))
