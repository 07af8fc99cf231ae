"""The host device's number formats: every code and every kind of rounding as in ml_dtypes, and the
four-bit formats as in the reference, bit for bit."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvcupy import ops, reference
from kvcupy.devices import cxx
from kvcupy.reference import FOUR_BIT

SOURCE = Path(__file__).with_name("conversions.cpp")
# Of each format: its type, what it saturates at, the code of a NaN.
FORMATS = {
    "fp16": (np.float16, None, 0x7FFF),
    "bf16": (ml_dtypes.bfloat16, None, 0x7FFF),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F),
}
PATHS = ("one", "eight")
BYTES = ("fp8_e4m3", "fp8_e5m2", "int8")
# "four" is what GPUs without instructions for fp8 run.
CONVERSIONS = [(fmt, path) for fmt in (*FORMATS, "int8") for path in PATHS] + [
    (fmt, "four") for fmt in BYTES
]
# Without the conversion instructions of newer processors, and without their wider vectors.
PROCESSORS = {"native": None, "x86-64": None, "x86-64-v3": "avx2"}


def codes_type(fmt):
    return np.uint8 if fmt.startswith(("fp8", "int8")) else np.uint16


def runs_here(march):
    if march == "native":
        return True
    needs = PROCESSORS[march]
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return needs is None or (cpuinfo.is_file() and needs in cpuinfo.read_text().split())


def build(target, *flags):
    """Compile conversions.cpp as kernels are compiled, with `flags`, and load it."""
    compiler = cxx.find_compiler()
    assert compiler is not None
    cxx._compile(compiler, f'#include "{SOURCE}"\n', (*cxx._FLAGS, *flags), target)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module", params=PROCESSORS)
def library(request, tmp_path_factory):
    if not runs_here(request.param):
        pytest.skip(f"this processor does not run code for {request.param}")
    march = cxx._native() if request.param == "native" else f"-march={request.param}"
    if cxx.find_compiler().is_zig:
        march = march.replace("x86-64-v", "x86_64_v").replace("x86-64", "x86_64")
    return build(tmp_path_factory.mktemp("numbers") / f"{request.param}.so", march)


def call(library, name, source, target):
    """Convert `source` into `target`, arrays of a whole number of packs."""
    assert source.size == target.size and source.size % 8 == 0
    function = getattr(library, name)
    function(
        source.ctypes.data_as(ctypes.c_void_p), target.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(source.size),
    )  # fmt: skip
    return target


def aligned(array):
    """The same numbers at an address that vectors may have, repeated to a whole number of packs."""
    array = np.ascontiguousarray(array)
    size = -(-array.size // 8) * 8
    raw = np.empty(size * array.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + size * array.itemsize].view(array.dtype)
    copy[:] = np.resize(array, size)
    return copy


def all_codes(fmt):
    return aligned(np.arange(2 ** (8 * codes_type(fmt)().itemsize), dtype=codes_type(fmt)))


def midpoints(fmt):
    """Every number of a format, the middles between neighbours, one beyond the largest, and of each
    the float32 next to it on either side."""
    with np.errstate(invalid="ignore"):  # signalling NaN among them
        values = all_codes(fmt).view(FORMATS[fmt][0]).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    beyond = 2 * values[-1] - values[-2]
    values = np.concatenate([values, [beyond]])
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    with np.errstate(over="ignore"):
        exact = exact.astype(np.float32)
    near = [np.nextafter(exact, np.float32(towards)) for towards in (-np.inf, np.inf)]
    found = np.concatenate([exact, *near])
    return np.concatenate([found, -found])


def float_classes():
    """Every sign and exponent of float32 with mantissas of few, many and no bits."""
    tops = np.arange(512, dtype=np.uint32) << 23
    mantissas = np.array(
        [0, 1, 2, 3, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001, 0x555555, 0x2AAAAA]
        + [1 << i for i in range(23)] + [(1 << i) - 1 for i in range(23)]
        + [0x7FFFFF ^ (1 << i) for i in range(23)],
        np.uint32,
    )  # fmt: skip
    return (tops[:, None] | mantissas).ravel().view(np.float32)


def random_bits(count=3_000_000):
    return np.random.default_rng(12).integers(0, 2**32, count, np.uint32).view(np.float32)


def narrow_numbers():
    """All numbers of 16 bits."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN among them
        return np.concatenate(
            [codes.view(np.float16).astype(np.float32), codes.astype(np.uint32) << 16],
            dtype=np.float32, casting="unsafe",
        )  # fmt: skip


def numbers_for(fmt):
    found = [float_classes(), random_bits(), narrow_numbers()]
    if fmt in FORMATS:
        found.append(midpoints(fmt))
    else:  # int8: all halves
        halves = np.arange(-260, 261, dtype=np.float32) / 2
        found += [halves, *(np.nextafter(halves, np.float32(x)) for x in (-np.inf, np.inf))]
    return aligned(np.concatenate(found))


def rounded(numbers, fmt):
    """The codes that numbers become, by ml_dtypes, which does not saturate, and NumPy."""
    if fmt == "int8":
        with np.errstate(invalid="ignore"):
            whole = np.rint(np.clip(numbers, -127, 127))
        return np.where(np.isnan(whole), 0, whole).astype(np.int8).view(np.uint8)
    kind, limit, nan = FORMATS[fmt]
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = numbers if limit is None else np.clip(numbers, -limit, limit)
        codes = bounded.astype(kind).view(codes_type(fmt))
    return np.where(np.isnan(numbers), codes.dtype.type(nan), codes)


def require_same_codes(fmt, numbers, got, want):
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        first = wrong[0]
        bits = numbers.view(np.uint32)[first]
        pytest.fail(
            f"{fmt}: {wrong.size} of {numbers.size} wrong, first {numbers[first]!r} ({bits:#010x}):"
            f" got {got[first]:#x}, expected {want[first]:#x}"
        )


@pytest.mark.parametrize(("fmt", "path"), CONVERSIONS)
def test_every_code_means_what_ml_dtypes_says(library, fmt, path):
    codes = all_codes(fmt)
    got = call(library, f"{path}_{fmt}_decode", codes, aligned(np.zeros(codes.size, np.float32)))
    kind = np.int8 if fmt == "int8" else FORMATS[fmt][0]
    want = codes.view(kind).astype(np.float32)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~known)
    np.testing.assert_array_equal(got[known].view(np.uint32), want[known].view(np.uint32))


@pytest.mark.parametrize(("fmt", "path"), CONVERSIONS)
def test_every_kind_of_rounding_is_that_of_ml_dtypes(library, fmt, path):
    numbers = numbers_for(fmt)
    codes = aligned(np.zeros(numbers.size, codes_type(fmt)))
    got = call(library, f"{path}_{fmt}_encode", numbers, codes)
    require_same_codes(fmt, numbers, got, rounded(numbers, fmt))


def test_the_largest_magnitude_passes_over_nan(library):
    library.absmax_of_packs.restype = ctypes.c_float
    rng = np.random.default_rng(5)
    for place in range(16):
        numbers = aligned(rng.uniform(-1, 1, 16).astype(np.float32))
        numbers[place] = -3.0
        numbers.view(np.uint32)[(place + 3) % 16] = 0x7F800001 + place  # signalling
        numbers[(place + 7) % 16] = -np.nan
        found = library.absmax_of_packs(numbers.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(16))
        assert found == 3.0, (place, numbers)


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def mantissas(exponent):
    """All numbers of one exponent, as float32 has it."""
    return (np.arange(1 << 23, dtype=np.uint32) | np.uint32(exponent << 23)).view(np.float32)


@pytest.mark.parametrize("ulps", (-1, 0, 1))
def test_a_refined_reciprocal_is_rounded_once(library, ulps):
    """From an approximation that is off by an ulp, for every mantissa."""
    numbers = mantissas(127)
    got = np.empty_like(numbers)
    library.refine(pointer(numbers), pointer(got), ctypes.c_long(numbers.size), ulps)
    np.testing.assert_array_equal(got, np.float32(1) / numbers)


def require_same_quotients(library, numbers, scales, ulps):
    """Quotients are float32's, and those that are no number of some format become its codes."""
    got = np.empty_like(numbers)
    library.divide(
        pointer(numbers), pointer(scales), pointer(got), ctypes.c_long(numbers.size), ulps
    )
    with np.errstate(all="ignore"):
        want = numbers / scales
        same = got.view(np.uint32) == want.view(np.uint32)
        extreme = ~((abs(want) >= 2.0**-20) & (abs(want) <= 2.0**20))
        same |= extreme & (np.isnan(want) == np.isnan(got))
        wrong = np.flatnonzero(~same)
        assert wrong.size == 0, [
            (float(x[wrong[0]]).hex(), wrong.size) for x in (numbers, scales, want, got)
        ]
        for fmt in BYTES:
            require_same_codes(
                fmt, numbers, rounded(got[extreme], fmt), rounded(want[extreme], fmt)
            )
    some = slice(None, None, max(1, numbers.size >> 18))
    require_same_fours(library, numbers[some].copy(), scales[some].copy(), got[some], ulps)


def require_same_fours(library, numbers, scales, quotients, ulps):
    """What GPUs without instructions for fp8 store are the codes of the quotients."""
    for is_e4m3, fmt in enumerate(("fp8_e5m2", "fp8_e4m3")):
        codes = np.empty(numbers.size, np.uint8)
        library.quantise_by_fours(
            pointer(numbers), pointer(scales), pointer(codes), ctypes.c_long(numbers.size), ulps,
            is_e4m3,
        )  # fmt: skip
        require_same_codes(fmt, quotients, codes, rounded(quotients, fmt))


def hardest_quotients(scales):
    """Numbers whose quotients by odd scales are as near the middle of two numbers as can be.

    Of number * 2**bits = scale * middle +- 1, in integers, where the middle has a bit more than a
    float32.
    """
    odd = scales.view(np.uint32).astype(np.int64) & 0x7FFFFF | 0x800001
    inverse = odd.copy()
    for _ in range(4):  # doubles the bits that are right, at first three
        inverse = inverse * (2 - odd * inverse % (1 << 25)) % (1 << 25)
    numbers, divisors = [], []
    for bits in (24, 25):
        for sign in (1, -1):
            middle = sign * inverse % (1 << bits) | (1 << 24 if bits == 24 else 0)
            number = (odd * middle - sign) >> bits
            fits = (number >= 1 << 23) & (number < 1 << 24) & (middle >= 1 << 24)
            numbers.append(number[fits].astype(np.float32))
            divisors.append(odd[fits].astype(np.float32))
    return np.concatenate(numbers), np.concatenate(divisors)


def powers(count, low, high):
    return np.exp2(np.random.default_rng(3).integers(low, high, count)).astype(np.float32)


@pytest.mark.covering
@pytest.mark.parametrize("ulps", (-1, 0, 1))
def test_quotients_are_those_of_a_division(library, ulps):
    random = random_bits(1 << 20)
    numbers, scales = hardest_quotients(random)
    ones = np.float32(1 - 2.0**-24)  # whose reciprocal is nearest to the middle of two
    require_same_quotients(library, mantissas(127), np.full(1 << 23, ones), ulps)
    assert numbers.size > 1 << 19
    exponents = powers(numbers.size, -100, 100)
    near_one = powers(numbers.size, -20, 20)
    with np.errstate(over="ignore"):
        require_same_quotients(library, numbers * exponents * near_one, scales * exponents, ulps)
    require_same_quotients(library, random_bits(1 << 20), random[::-1].copy(), ulps)
    classes = float_classes()
    extremes = np.array(
        [0.0, np.inf, np.nan, 1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, 2.0**127, 2.0**126,
         2.0**125, 1.0, 0.1, 1.0000001, 0.99999994, 1.9999999], np.float32,
    )  # fmt: skip
    for scale in np.concatenate([extremes, -extremes]):
        require_same_quotients(library, classes, np.full_like(classes, scale), ulps)
    for number in np.concatenate([extremes, -extremes]):
        require_same_quotients(library, np.full_like(classes, number), classes, ulps)
    for fmt in ("fp8_e4m3", "fp8_e5m2"):
        ties = midpoints(fmt)
        for scale in (0.1, 3.0, 0.7, 1e-3, 2.0**-140, 3e38):
            with np.errstate(all="ignore"):
                products = (ties * np.float32(scale)).astype(np.float32)
            require_same_quotients(library, products, np.full_like(ties, scale), ulps)


def extreme_quotients(library):
    classes = float_classes()
    for scale in (np.inf, -0.1, 0.0):
        require_same_quotients(library, classes, np.full_like(classes, scale), 0)


@pytest.mark.parametrize(("number", "fmt", "limit"), [(0, *FORMATS["fp8_e4m3"][:2]),
                                                      (1, *FORMATS["fp8_e5m2"][:2]),
                                                      (2, np.int8, 127.0)])  # fmt: skip
def test_a_dynamic_scale_is_the_quotient_of_the_limit(library, number, fmt, limit):
    absmax = np.concatenate(
        [mantissas(exponent) for exponent in (107, 127, 254)]
        + [np.array([0, 1e-45, 1e-6, 3.4028235e38, np.inf], np.float32)]
    )
    got = np.empty_like(absmax)
    library.dynamic_scales(pointer(absmax), pointer(got), ctypes.c_long(absmax.size), number)
    bounded = np.clip(absmax, np.float32(1e-6), np.finfo(np.float32).max)
    np.testing.assert_array_equal(got, bounded / np.float32(limit))


# What is broken in fp8.cuh or numeric.cuh, and the test above that must notice.
MUTATIONS = {
    "subnormal e4m3 decoded as if normal": (
        "fp8.cuh", "0x5c005c00", "0x58005800", lambda x: decodes(x, "fp8_e4m3")),
    "no saturation": (
        "fp8.cuh", "fminf(fabsf(x), largest)", "fabsf(x)", lambda x: encodes(x, "fp8_e5m2")),
    "a reciprocal that falls short": (
        "numeric.cuh", "return next;", "return refined;",
        lambda x: test_a_refined_reciprocal_is_rounded_once(x, -1)),
    "quotients by infinities corrected": (
        "numeric.cuh", "if (divisor == kInfinity || divisor == -kInfinity) divisor = 0.0f;", "",
        extreme_quotients),
}  # fmt: skip


def decodes(library, fmt):
    test_every_code_means_what_ml_dtypes_says(library, fmt, "four")


def encodes(library, fmt):
    test_every_kind_of_rounding_is_that_of_ml_dtypes(library, fmt, "four")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_conversion_is_noticed(kernel_sources, tmp_path, name):
    file, old, new, check = MUTATIONS[name]
    kernel_sources.replace(file, old, new)
    library = build(tmp_path / "broken.so", "-O0", cxx._native())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(library)


@pytest.mark.parametrize("ahead", (None, 3000))
@pytest.mark.parametrize("streamed", (False, True))
@pytest.mark.parametrize("size", (0, 1, 127, 128, 2048, 2049, 4096 + 64))
def test_a_row_is_copied_whole_and_no_more(library, size, streamed, ahead):
    rng = np.random.default_rng(size)
    source = aligned(rng.integers(0, 256, 8192, np.uint8))
    for to, of in ((64, 0), (64, 16), (96, 7), (65, 0), (68, 4)):
        target = aligned(np.full(8192, 0xA5, np.uint8))
        want = target.copy()
        want[to : to + size] = source[of : of + size]
        library.copy_row(
            ctypes.c_void_p(target.ctypes.data + to), ctypes.c_void_p(source.ctypes.data + of),
            ctypes.c_void_p(ahead and source.ctypes.data + ahead), ctypes.c_long(size), streamed,
        )  # fmt: skip
        np.testing.assert_array_equal(target, want)


# Packs in kernels --------------------------------------------------------------------------------
# Strict builds convert one by one.


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


# Four-bit formats --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("native", "baseline"))
def four_bit_library(request, tmp_path_factory):
    """The functions, with the vectors of this processor, or by integers as on any."""
    compiler = cxx.find_compiler()
    assert compiler is not None
    target = tmp_path_factory.mktemp("four_bit") / f"{request.param}.so"
    flags = (cxx._native(),) if request.param == "native" else ()
    cxx._compile(
        compiler,
        f'#include "{Path(__file__).with_name("four_bit.cpp")}"\n',
        (*cxx._FLAGS, *flags),
        target,
    )
    return ctypes.CDLL(str(target))


def call_four_bit(library, name, count, *arguments):
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arguments]
    getattr(library, name)(*pointers, ctypes.c_long(count))


def bits_equal(got, want):
    np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_codes_are_decoded_in_every_place(four_bit_library, fmt):
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (4096, 4), dtype=np.uint8)
    packed[:256] = np.arange(256)[:, None]
    words = packed.view(np.uint32).reshape(-1)
    halves, bfloats = (np.empty((4096, 8), np.float32) for _ in range(2))
    call_four_bit(four_bit_library, f"decode_{fmt}", 4096, words, halves, bfloats)
    want = reference.decode_codes(packed, FOUR_BIT[fmt].code)
    bits_equal(halves, want)
    bits_equal(bfloats, want)


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_every_group_scale_is_decoded(four_bit_library, fmt):
    carrier = FOUR_BIT[fmt].scale_carrier
    bits = np.arange(2 ** (8 * np.dtype(carrier).itemsize))
    got = np.empty(bits.size, np.float32)
    call_four_bit(four_bit_library, f"scales_{fmt}", bits.size, bits.astype(np.uint32), got)
    want = reference.decode_scales(bits.astype(carrier), fmt)
    known = ~np.isnan(want)
    bits_equal(got[known], want[known])
    assert np.isnan(got[~known]).all()


@pytest.mark.parametrize("divisor", [6.0, 7.0, 1.0, 0.37, 1e-38, 3e38, 1e-45])
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_group_scales_are_encoded_as_the_reference_does(four_bit_library, fmt, divisor):
    rng, form = np.random.default_rng(1), FOUR_BIT[fmt]
    exact = reference.decode_scales(
        np.arange(2 ** (8 * np.dtype(form.scale_carrier).itemsize)).astype(form.scale_carrier), fmt
    )
    exact = exact[np.isfinite(exact) & (exact >= 0)]
    exact = np.unique(exact)
    with np.errstate(over="ignore", under="ignore"):
        middle = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
        quotients = np.concatenate([exact, middle, np.nextafter(middle, np.float32(np.inf)),
                                    np.nextafter(middle, np.float32(0))])  # fmt: skip
        absmax = (quotients.astype(np.float64) * divisor).astype(np.float32)
        any_bits = rng.integers(0, 0x7F800000, 4096, dtype=np.uint32).view(np.float32)
        absmax = np.concatenate([absmax[np.isfinite(absmax)], any_bits, [0.0, 1e-45]])
        absmax = absmax.astype(np.float32)
        quotient = absmax / np.float32(divisor)
    got = np.empty(absmax.size, np.uint32)
    function = getattr(four_bit_library, f"encode_scales_{fmt}")
    function(
        absmax.ctypes.data_as(ctypes.c_void_p), got.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(absmax.size), ctypes.c_float(divisor),
    )  # fmt: skip
    want = reference.encode_scales(quotient, absmax == 0, fmt)
    np.testing.assert_array_equal(got, want)


def hard_rows(rng, count, steps):
    """Rows of elements around every boundary between codes, and of any bits."""
    ratios = rng.choice(np.arange(0, 8.25, 0.25), (count, 16)) * rng.choice([-1, 1], (count, 16))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = (ratios * steps[:, None]).astype(np.float32)
        bits = rows.view(np.uint32) + rng.integers(-2, 3, rows.shape).astype(np.uint32)
        rows = np.where(rng.integers(0, 2, rows.shape), rows, bits.view(np.float32))
    other = rng.integers(0, 2**32, rows.shape, dtype=np.uint32).view(np.float32)
    return np.where(rng.integers(0, 8, rows.shape), rows, other).astype(np.float32)


@pytest.mark.parametrize("rows_format", ["fp32", "fp16"])
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_codes_are_the_references(four_bit_library, fmt, rows_format):
    rng, count = np.random.default_rng(2), 8192
    steps = np.exp2(rng.uniform(-148, 120, count)).astype(np.float32)
    steps[:2048] = rng.choice([1.0, 0.75, 3.0, 0.1], 2048).astype(np.float32)
    steps[-64:] = 1e-45
    steps[-80:-64] = 0.0
    rows = hard_rows(rng, count, steps)
    rows[:8] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        sent = rows.astype(np.float16) if rows_format == "fp16" else rows
        x = np.nan_to_num(sent.astype(np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf)
        quotients = x / np.maximum(steps, reference.four_bit.TINY)[:, None]
    quotients[~np.abs(x).any(axis=1)] = 0
    want = reference.encode_codes(quotients, FOUR_BIT[fmt].code)
    got = np.empty((count, 8), np.uint8)
    name = f"encode_{fmt}" if rows_format == "fp32" else f"encode_halves_{fmt}"
    call_four_bit(four_bit_library, name, count, sent, steps, got)
    wrong = np.argwhere(got != want)
    assert not len(wrong), (wrong[0], rows[wrong[0][0]], steps[wrong[0][0]])
