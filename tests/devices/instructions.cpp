// The branches of GPUs beside plain arithmetic, for test_instructions.py, which compiles this for
// each architecture. A check takes a word, and gives what a branch makes of it and what it should.
#include "attention_decode_four_bit.cuh"

struct Result {
  u32 got;
  u32 want;
};

static u32 rotated(u32 word, int bits) { return bits ? word << bits | word >> (32 - bits) : word; }

// --- Numbers by integer arithmetic, which no branch uses -----------------------------------------

template <typename T>
static u32 code_of(float x) {
  return kvcupy_host::encode<T, int>(x) & ((1u << kvcupy_host::FormatOf<T>::kBits) - 1);
}

template <typename T>
static float number_of(u32 code) {
  using namespace kvcupy_host;
  if constexpr (kSameType<T, int8>) {
    return static_cast<float>(static_cast<int8>(code));
  } else if constexpr (kSameType<T, bfloat16>) {
    return __uint_as_float(code << 16);
  } else if constexpr (kSameType<T, fp8_e5m2>) {
    return decode<half, float>(static_cast<int>(code << 8 & 0xff00));
  } else {
    return decode<T, float>(static_cast<int>(code & ((1u << FormatOf<T>::kBits) - 1)));
  }
}

// Two codes of 16 bits, every NaN of which is the same.
template <typename T>
static u32 pair_of(float x, float y) {
  return code_of<T>(x) | code_of<T>(y) << 16;
}
static u32 same_nan(u32 pair) {
  return pair_of<half>(number_of<half>(pair), number_of<half>(pair >> 16));
}
static u32 bits_of_float(float x) { return x == x ? __float_as_uint(x) : 0x7fffffff; }

// A digest of several words, so that a result is one.
static u32 mixed(u32 sum, u32 word) { return (sum ^ word) * 16777619u; }

// --- Conversions ---------------------------------------------------------------------------------

template <typename T>
static Result encode_one(u32 word) {
  const float x = __uint_as_float(word);
  return {bits_of(from_float<T>(x)), code_of<T>(x)};
}

template <typename T>
static Result encode_fours(u32 word) {
  Pack<float, 4> x;
  u32 want = 0;
  for (int i = 0; i < 4; ++i) {
    x.values[i] = __uint_as_float(rotated(word, 8 * i));
    want |= code_of<T>(x.values[i]) << 8 * i;
  }
  return {bits_of(from_floats<T>(x)), want};
}

template <typename T>
static Result encode_quotients(u32 word) {
  constexpr float kScales[] = {0.1f, 3.0f, 0.7f, 1e-3f, 0x1p-140f, 3e38f, 1.0f, -0.3f};
  const float scale = kScales[(word ^ word >> 13) % 8];
  Pack<float, 4> x;
  u32 want = 0;
  for (int i = 0; i < 4; ++i) {
    x.values[i] = __uint_as_float(rotated(word, 8 * i));
    want |= code_of<T>(x.values[i] / scale) << 8 * i;
  }
  return {bits_of(quantise<T>(x, ScaleDivisor(scale))), want};
}

static Result divide(u32 word) {
  const float x = __uint_as_float(word);
  const float scale = __uint_as_float(rotated(word * 0x9e3779b9u, 9));
  const float want = x / scale;
  const float got = ScaleDivisor(scale).quotient(x);
  const float magnitude = fabsf(want);
  if (magnitude >= 0x1p-20f && magnitude <= 0x1p20f)
    return {bits_of_float(got), bits_of_float(want)};
  // Else only where it lies counts.
  const auto place = [](float q) {
    return q != q ? 2u : fabsf(q) < 0x1p-20f ? 0u : 1u | (__float_as_uint(q) & 0x80000000);
  };
  return {place(got), place(want)};
}

template <typename T>
static Result decode_one(u32 word) {
  const u32 code = word & ((1u << 8 * sizeof(T)) - 1);
  return {bits_of_float(to_float(of_bits<T>(code))), bits_of_float(number_of<T>(code))};
}

template <typename T>
static Result decode_fours(u32 word) {
  const Pack<float, 4> got = to_floats(of_bits<Pack<T, 4>>(word));
  Result result = {};
  for (int i = 0; i < 4; ++i) {
    result.got = mixed(result.got, bits_of_float(got.values[i]));
    result.want = mixed(result.want, bits_of_float(number_of<T>(word >> 8 * i & 0xff)));
  }
  return result;
}

template <typename T>
static Result half_pairs(u32 word) {
  u32 pairs[2];
  to_half_pairs<T>(word, pairs[0], pairs[1]);
  Result result = {};
  for (int i = 0; i < 2; ++i) {
    const float first = number_of<T>(word >> 8 * i & 0xff);
    const float second = number_of<T>(word >> (8 * i + 16) & 0xff);
    result.got = mixed(result.got, same_nan(pairs[i]));
    result.want = mixed(result.want, pair_of<half>(first, second));
  }
  return result;
}

template <typename T>
static Result pairs(u32 word) {
  const float x = __uint_as_float(word);
  const float y = __uint_as_float(rotated(word, 11));
  return {pack_pair<T>(x, y), pair_of<T>(x, y)};
}

template <typename T>
static Result floats(u32 word) {
  const float2 got = floats_of_pair<T>(word);
  const u32 want =
      mixed(bits_of_float(number_of<T>(word & 0xffff)), bits_of_float(number_of<T>(word >> 16)));
  return {mixed(bits_of_float(got.x), bits_of_float(got.y)), want};
}

// --- Four bits -----------------------------------------------------------------------------------

template <typename TFormat>
static float number_of_code(u32 code) {
  constexpr float kE2m1Numbers[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  code &= 15;
  if constexpr (kE2m1<TFormat>) return code & 8 ? -kE2m1Numbers[code & 7] : kE2m1Numbers[code];
  return static_cast<float>(static_cast<int>(code ^ 8) - 8);
}

template <typename TFormat>
static Result eight(u32 word) {
  const EightHalves halves = decode_eight<TFormat>(word);
  const EightHalves others = as_bfloat16(halves);
  Result result = {};
  for (int i = 0; i < 4; ++i) {
    const float first = number_of_code<TFormat>(word >> 8 * i);
    const float second = number_of_code<TFormat>(word >> (8 * i + 4));
    result.got = mixed(mixed(result.got, halves.pairs[i]), others.pairs[i]);
    result.want =
        mixed(mixed(result.want, pair_of<half>(first, second)), pair_of<bfloat16>(first, second));
  }
  return result;
}

template <typename TFormat>
static Result spread(u32 word) {
  const EightHalves halves = spread_codes<TFormat>(word);
  Result result = {};
  for (int i = 0; i < 4; ++i) {
    const float first = number_of_code<TFormat>(word >> 4 * i) * kCodeUnit<TFormat>;
    const float second = number_of_code<TFormat>(word >> (4 * i + 16)) * kCodeUnit<TFormat>;
    result.got = mixed(result.got, halves.pairs[i]);
    result.want = mixed(result.want, pair_of<half>(first, second));
  }
  return result;
}

static Result widen(u32 word) {
  u32 pairs[2];
  widen_scales(word, pairs[0], pairs[1]);
  Result result = {};
  for (int i = 0; i < 2; ++i) {
    const float first = number_of<fp8_e4m3>(word >> 16 * i & 0xff);
    const float second = number_of<fp8_e4m3>(word >> (16 * i + 8) & 0xff);
    result.got = mixed(result.got, same_nan(pairs[i]));
    result.want = mixed(result.want, pair_of<half>(first, second));
  }
  return result;
}

// Of whole numbers, as prepare_value_scales has them.
static Result larger_exponents(u32 word) {
  const u32 x = word & 0x01ff01ff;
  const u32 y = rotated(word, 9) & 0x01ff01ff;
  return {max_of_halves(x, y), max(x & 0xffff, y & 0xffff) | max(x >> 16, y >> 16) << 16};
}

// --- Ranges of numbers of 16 bits ----------------------------------------------------------------

template <typename T, int kCount>
static Pack<T, kCount> pack_from(u32 word) {
  Pack<T, kCount> pack;
  for (int i = 0; i < kCount; ++i)
    pack.values[i] = of_bits<T>(rotated(word, 16 * i + i / 2) & 0xffff);
  return pack;
}

template <typename T>
static Result absmax(u32 word) {
  const Pack<T, 4> pack = pack_from<T, 4>(word);
  AbsMax<4> largest;
  largest.add(pack);
  float want = 0.0f;
  for (const T& x : pack.values) want = fmaxf(want, fabsf(number_of<T>(bits_of(x))));
  return {bits_of_float(largest.value()), bits_of_float(want)};
}

template <typename T>
static Result without_nan(u32 word) {
  Pack<T, 16> pack = pack_from<T, 16>(word);
  const Pack<T, 16> before = pack;
  const float largest = clear_nan(pack);
  float want = 0.0f;
  Result result = {};
  for (int i = 0; i < 16; ++i) {
    const u32 code = bits_of(before.values[i]);
    const float x = number_of<T>(code);
    if (x == x) want = fmaxf(want, fabsf(x));
    result.got = mixed(result.got, bits_of(pack.values[i]));
    result.want = mixed(result.want, x == x ? code : 0);
  }
  return {mixed(result.got, bits_of_float(largest)),
          mixed(result.want, bits_of_float(fminf(want, kFloatMax)))};
}

template <typename T>
static Result signs(u32 word) {
  const Pack<T, 8> pack = pack_from<T, 8>(word);
  float magnitudes[8];
  Result result = {split_signs(pack.values, magnitudes), 0};
  u32 expected = 0;
  for (int i = 0; i < 8; ++i) {
    const u32 code = bits_of(pack.values[i]);
    const float x = number_of<T>(code);
    // The sign of a NaN, which is cleared before, is any.
    if (x != x) {
      result.got &= ~(8u << 4 * i);
    } else {
      expected |= (code >> 15) << (4 * i + 3);
    }
    result.want = mixed(result.want, bits_of_float(fabsf(x)));
  }
  u32 got = 0;
  for (float x : magnitudes) got = mixed(got, bits_of_float(x));
  return {mixed(got, result.got), mixed(result.want, expected)};
}

// --- Approximations ------------------------------------------------------------------------------

// How many units `got` is off by, if `exact` is a normal number; else it must be that, or zero.
static Result within(float got, float exact, int ulps) {
  if (exact != exact) return {u32{got != got}, 1};
  if (fabsf(exact) < 0x1p-126f) return {__float_as_uint(fabsf(got)), 0};
  const int off = static_cast<int>(__float_as_uint(got) - __float_as_uint(exact));
  return {u32{-ulps <= off && off <= ulps}, 1};
}
static Result reciprocal(u32 word) {
  const float x = __uint_as_float(word);
  return within(approximate_reciprocal(x), 1.0f / x, 1);
}
static Result power(u32 word) {
  const float x = __uint_as_float(word);
  return within(power_of_two(x), static_cast<float>(exp2(static_cast<double>(x))), 3);
}

// --- What Python calls ---------------------------------------------------------------------------

#define FORMATS_OF_BYTES(CHECK) \
  {#CHECK "_fp8_e4m3", CHECK<fp8_e4m3>}, { #CHECK "_fp8_e5m2", CHECK<fp8_e5m2> }
#define HALF_FORMATS(CHECK) \
  {#CHECK "_fp16", CHECK<half>}, { #CHECK "_bf16", CHECK<bfloat16> }
#define FOUR_BIT_FORMATS(CHECK) \
  {#CHECK "_nvfp4", CHECK<nvfp4>}, { #CHECK "_int4", CHECK<int4x2> }

static const struct {
  const char* name;
  Result (*check)(u32 word);
} checks[] = {
    FORMATS_OF_BYTES(encode_one),
    HALF_FORMATS(encode_one),
    FORMATS_OF_BYTES(encode_fours),
    FORMATS_OF_BYTES(encode_quotients),
    {"divide", divide},
    FORMATS_OF_BYTES(decode_one),
    HALF_FORMATS(decode_one),
    FORMATS_OF_BYTES(decode_fours),
    {"decode_fours_int8", decode_fours<int8>},
    FORMATS_OF_BYTES(half_pairs),
    {"half_pairs_int8", half_pairs<int8>},
    HALF_FORMATS(pairs),
    HALF_FORMATS(floats),
    FOUR_BIT_FORMATS(eight),
    FOUR_BIT_FORMATS(spread),
    {"widen", widen},
    {"larger_exponents", larger_exponents},
    HALF_FORMATS(absmax),
    HALF_FORMATS(without_nan),
    HALF_FORMATS(signs),
    {"reciprocal", reciprocal},
    {"power", power},
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* name_of_check(int i) {
  return i < static_cast<int>(sizeof checks / sizeof *checks) ? checks[i].name : nullptr;
}

// Run a check on every word of 16 bits, in either half and in both, and on `count` words, which
// are all of them for 2**32. Returns how many are wrong; `first` is the first, got and expected.
EXPORT u64 count_wrong(int number, u64 count, u32* first) {
  u64 wrong = 0;
  const auto run = [&](u32 word) {
    const Result result = checks[number].check(word);
    if (result.got == result.want) return;
    if (wrong++ == 0) first[0] = word, first[1] = result.got, first[2] = result.want;
  };
  for (u32 i = 0; i < 0x10000; ++i) {
    run(i);
    run(i << 16);
    run(i * 0x10001);
  }
  for (u64 i = 0; i < count; ++i) run(static_cast<u32>(i) * 2654435769u);
  return wrong;
}

using Operation = u32 (*)(u32 x, u32 y, u32 z);
static const Operation operations[] = {
    [](u32 x, u32 y, u32) { return multiply_halves(x, y); },
    [](u32 x, u32 y, u32) { return add_halves(x, y); },
    [](u32 x, u32 y, u32) { return subtract_halves(x, y); },
    [](u32 x, u32 y, u32 z) { return multiply_add_halves(x, y, z); },
    [](u32 x, u32 y, u32) { return where_halves_exceed(x, y); },
    [](u32 x, u32 y, u32) { return larger_of_pairs<half>(x, y); },
    [](u32 x, u32 y, u32) { return larger_or_nan<half>(x, y); },
    [](u32 x, u32 y, u32) { return larger_of_pairs<bfloat16>(x, y); },
    [](u32 x, u32 y, u32) { return larger_or_nan<bfloat16>(x, y); },
};

EXPORT void operate(int number, const u32* x, const u32* y, const u32* z, u32* out, long count) {
  for (long i = 0; i < count; ++i) out[i] = operations[number](x[i], y[i], z[i]);
}
