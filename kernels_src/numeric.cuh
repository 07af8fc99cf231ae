// Number formats: the one place where rounding is decided.
//
// Arithmetic is float32. from_float rounds once, to nearest even. The quantised formats saturate
// (infinities too) and keep NaN (int8, which has none, gives 0); fp16 and bf16 overflow to
// infinity.
#pragma once

#include "fp8.cuh"

using int8 = signed char;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(int8 x) { return static_cast<float>(x); }

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ int8 from_float<int8>(float x) {
  constexpr float kAligner = 12582912.0f;  // 1.5 * 2**23: its last bit is worth 1
  const u32 code = __float_as_uint(__fadd_rn(fminf(fmaxf(x, -127.0f), 127.0f), kAligner));
  return x == x ? static_cast<int8>(code) : int8{0};
}

#if KVCUPY_ARCH  // a processor's own: host/numbers.h
__device__ __forceinline__ float to_float(fp8_e4m3 x) {
  const u32 pair = kArch >= 890 ? halves_of_e4m3(bits_of(x)) : decode_e4m3_pair(bits_of(x) << 8);
  return lower_of<half>(pair);
}
__device__ __forceinline__ float to_float(fp8_e5m2 x) {  // the upper half of an fp16
  return lower_of<half>(bits_of(x) << 8);
}

template <>
__device__ __forceinline__ fp8_e4m3 from_float<fp8_e4m3>(float x) {
  return of_bits<fp8_e4m3>(kArch >= 890 ? codes_of_floats<fp8_e4m3>(x, 0.0f)
                                        : encode_fp8<3, 7>(x, 448.0f));
}
template <>
__device__ __forceinline__ fp8_e5m2 from_float<fp8_e5m2>(float x) {
  return of_bits<fp8_e5m2>(kArch >= 890 ? codes_of_floats<fp8_e5m2>(x, 0.0f)
                                        : encode_fp8<2, 15>(x, 57344.0f));
}
#endif

// The largest magnitude of a quantised format; 0 for the others.
template <typename T>
constexpr float kLimit = 0.0f;
template <>
constexpr float kLimit<fp8_e4m3> = 448.0f;
template <>
constexpr float kLimit<fp8_e5m2> = 57344.0f;
template <>
constexpr float kLimit<int8> = 127.0f;

template <typename T>
constexpr bool kQuantised = kLimit<T> != 0.0f;

constexpr float kFloatMax = 3.402823466e+38f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// --- Division ------------------------------------------------------------------------------------
//
// An IEEE division is a dozen instructions, and a call where exponents are extreme. Where many
// numbers are divided by one, a product with its reciprocal is corrected by what remains, which is
// exact.

// The scale of a row whose largest magnitude is `absmax`, for a quantised T: absmax / kLimit<T>,
// rounded once.
template <typename T>
__device__ __forceinline__ float dynamic_scale(float absmax) {
  constexpr float kReciprocal = 1.0f / kLimit<T>;
  const float largest = fmaxf(fminf(absmax, kFloatMax), 1e-6f);
  const float quotient = __fmul_rn(largest, kReciprocal);
  const float remainder = __fmaf_rn(-quotient, kLimit<T>, largest);
  return __fmaf_rn(remainder, kReciprocal, quotient);
}

// 1 / x rounded once, from an approximation to an ulp or better; that itself for a zero, an
// infinity or a NaN. A step of Newton's falls short of it, but by less than a unit.
__device__ __forceinline__ float refine_reciprocal(float x, float approximation) {
  const float error = __fmaf_rn(-x, approximation, 1.0f);
  const float refined = __fmaf_rn(error, approximation, approximation);
  const float next = __uint_as_float(__float_as_uint(refined) + 1);
  if (fabsf(__fmaf_rn(-x, next, 1.0f)) < fabsf(__fmaf_rn(-x, refined, 1.0f))) return next;
  return refined == refined ? refined : approximation;
}

// What numbers are divided by to be quantised. Both sides of the division are multiplied by a power
// of two that leaves between 2**-23 and 4 of the scale, or zero, an infinity or NaN. Then quotients
// between 2**-20 and 2**20 are x / scale rounded once, and where that is smaller, larger or NaN, so
// are they.
struct ScaleDivisor {
  float power;
  float divisor;     // scale * power; 0 for an infinity, whose quotients nothing corrects
  float reciprocal;  // of the divisor

  __device__ __forceinline__ explicit ScaleDivisor(float scale) {
    const u32 exponent = __float_as_uint(scale) >> 23 & 0xff;
    power = __uint_as_float((exponent < 252 ? 253 - exponent : 1) << 23);
    divisor = __fmul_rn(scale, power);
    reciprocal = refine_reciprocal(divisor, approximate_reciprocal(divisor));
    if (divisor == kInfinity || divisor == -kInfinity) divisor = 0.0f;
  }

  // x / scale, all but correct, and corrected. A correction with a zero may have the wrong sign,
  // and one with an infinity is NaN.
  __device__ __forceinline__ void divide(float x, float& rough, float& exact) const {
    const float dividend = __fmul_rn(x, power);
    rough = __fmul_rn(dividend, reciprocal);
    const float remainder = __fmaf_rn(-rough, divisor, dividend);
    exact = __fmaf_rn(remainder, reciprocal, rough);
  }

  __device__ __forceinline__ float quotient(float x) const {
    float rough;
    float exact;
    divide(x, rough, exact);
    return fabsf(exact) > 0.0f ? exact : rough;
  }
};

// a * b + c * d to within an ulp and a half of float32, where plain arithmetic would cancel
// (Kahan). Where it overflows on the way, the plain result.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) {
  const float cd = __fmul_rn(c, d);
  const float rough = __fmaf_rn(a, b, cd);
  const float exact = __fadd_rn(rough, __fmaf_rn(c, d, -cd));
  return exact == exact ? exact : rough;
}

// --- Packs ---------------------------------------------------------------------------------------

// Bytes are converted four at a time: their codes make a word, and instructions take two or more.
__device__ __forceinline__ float4 decode_four(u32 codes, fp8_e4m3) {
  const bool converts = kArch >= 890;
  const u32 lower = converts ? halves_of_e4m3(codes) : decode_e4m3_pair(lower_pair(codes));
  const u32 upper = converts ? halves_of_e4m3(codes >> 16) : decode_e4m3_pair(upper_pair(codes));
  const float2 a = floats_of_pair(lower);
  const float2 b = floats_of_pair(upper);
  return {a.x, a.y, b.x, b.y};
}
__device__ __forceinline__ float4 decode_four(u32 codes, fp8_e5m2) {
  const float2 a = floats_of_pair(lower_pair(codes));
  const float2 b = floats_of_pair(upper_pair(codes));
  return {a.x, a.y, b.x, b.y};
}
__device__ __forceinline__ float4 decode_four(u32 codes, int8) { return decode_four_int8(codes); }

template <typename T>
__device__ __forceinline__ u32 encode_four(float4 x) {
  return codes_of_floats<T>(x.x, x.y) | codes_of_floats<T>(x.z, x.w) << 16;
}

template <typename T, int kCount>
constexpr bool kDecodesFours = kArch != 0 && sizeof(T) == 1 && kCount % 4 == 0;
template <typename T, int kCount>
constexpr bool kFoursOfFp8 = (kSameType<T, fp8_e4m3> || kSameType<T, fp8_e5m2>) && kCount % 4 == 0;
// Whether instructions encode fp8, by fours, or arithmetic does.
template <typename T, int kCount>
constexpr bool kEncodesFours = kArch >= 890 && kFoursOfFp8<T, kCount>;
template <typename T, int kCount>
constexpr bool kEncodesByArithmetic = kArch != 0 && kArch < 890 && kFoursOfFp8<T, kCount>;

template <typename T, int kCount>
__device__ __forceinline__ Pack<float, kCount> to_floats(const Pack<T, kCount>& in) {
  Pack<float, kCount> out;
  if constexpr (kDecodesFours<T, kCount>) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const u32 codes = *reinterpret_cast<const u32*>(in.values + i);
      *reinterpret_cast<float4*>(out.values + i) = decode_four(codes, T{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = to_float(in.values[i]);
  }
  return out;
}

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> from_floats(const Pack<float, kCount>& in) {
  Pack<T, kCount> out;
  if constexpr (kEncodesFours<T, kCount>) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const auto& four = *reinterpret_cast<const float4*>(in.values + i);
      *reinterpret_cast<u32*>(out.values + i) = encode_four<T>(four);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = from_float<T>(in.values[i]);
  }
  return out;
}

// a * scale, element by element.
template <int kCount>
__device__ __forceinline__ Pack<float, kCount> products(const Pack<float, kCount>& a, float scale) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = __fmul_rn(a.values[i], scale);
  return out;
}

// a / scale, element by element, as far as a quantised format can tell.
template <int kCount>
__device__ __forceinline__ Pack<float, kCount> quotients(const Pack<float, kCount>& a,
                                                         const ScaleDivisor& scale) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = scale.quotient(a.values[i]);
  return out;
}

// x / scale as fp8 by arithmetic. Signs and NaN are taken from the quotient before its correction,
// which is NaN for infinities alone: they saturate.
template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> quantise_by_arithmetic(const Pack<float, kCount>& x,
                                                                  const ScaleDivisor& scale) {
  constexpr bool kE4m3 = kSameType<T, fp8_e4m3>;
  Pack<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float rough[4];
    float exact[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scale.divide(x.values[i + j], rough[j], exact[j]);
    *reinterpret_cast<u32*>(out.values + i) =
        encode_four_fp8<kE4m3 ? 3 : 2, kE4m3 ? 7 : 15>(exact, rough, kLimit<T>);
  }
  return out;
}

// x / scale, rounded to float32 and then to T, as a division is.
template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> quantise(const Pack<float, kCount>& x,
                                                    const ScaleDivisor& scale) {
  if constexpr (kEncodesByArithmetic<T, kCount>) return quantise_by_arithmetic<T>(x, scale);
  return from_floats<T>(quotients(x, scale));
}

// The largest magnitude of the elements added so far; NaN does not count.
template <int kCount>
struct AbsMax {
  float largest = 0.0f;

  // Unscaled elements; pairs of 16 bits are compared at once.
  template <typename T>
  __device__ __forceinline__ void add(const Pack<T, kCount>& pack) {
    if constexpr (kArch >= 800 && sizeof(T) == 2 && kCount % 2 == 0) {
      const auto* pairs = reinterpret_cast<const u32*>(pack.values);
      u32 top = magnitudes_of_pair<T>(pairs[0]);
#pragma unroll
      for (int i = 1; i < kCount / 2; ++i) {
        top = larger_of_pairs<T>(top, magnitudes_of_pair<T>(pairs[i]));
      }
      largest = fmaxf(largest, fmaxf(lower_of<T>(top), upper_of<T>(top)));
      return;
    }
    add(to_floats(pack));
  }

  __device__ __forceinline__ void add(const Pack<float, kCount>& pack) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(pack.values[i]));
  }
  __device__ __forceinline__ float value() const { return largest; }
};

// Elements of even number, and of odd.
template <typename T, int kCount>
__device__ __forceinline__ void split(const Pack<T, 2 * kCount>& both, Pack<T, kCount>& even,
                                      Pack<T, kCount>& odd) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    even.values[i] = both.values[2 * i];
    odd.values[i] = both.values[2 * i + 1];
  }
}

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, 2 * kCount> merge(const Pack<T, kCount>& even,
                                                     const Pack<T, kCount>& odd) {
  Pack<T, 2 * kCount> both;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    both.values[2 * i] = even.values[i];
    both.values[2 * i + 1] = odd.values[i];
  }
  return both;
}

// a * scale * b, element by element.
template <int kCount>
__device__ __forceinline__ Pack<float, kCount> products(const Pack<float, kCount>& a, float scale,
                                                        const Pack<float, kCount>& b) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out.values[i] = __fmul_rn(__fmul_rn(a.values[i], scale), b.values[i]);
  }
  return out;
}

template <int kCount>
__device__ __forceinline__ Pack<float, kCount> negative(const Pack<float, kCount>& in) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = -in.values[i];
  return out;
}

template <int kCount>
__device__ __forceinline__ Pack<float, kCount> sum_of_products(const Pack<float, kCount>& a,
                                                               const Pack<float, kCount>& b,
                                                               const Pack<float, kCount>& c,
                                                               const Pack<float, kCount>& d) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out.values[i] = sum_of_products(a.values[i], b.values[i], c.values[i], d.values[i]);
  }
  return out;
}

// (a, b) rotated by the angles of these cosines and sines, rounded once.
template <typename T, int kCount>
__device__ __forceinline__ void rotate(const Pack<float, kCount>& a, const Pack<float, kCount>& b,
                                       const Pack<float, kCount>& cosine,
                                       const Pack<float, kCount>& sine, Pack<T, kCount>& x,
                                       Pack<T, kCount>& y) {
  x = from_floats<T>(sum_of_products(a, cosine, negative(b), sine));
  y = from_floats<T>(sum_of_products(b, cosine, a, sine));
}

#ifdef KVCUPY_HOST_VARIANTS
#include "host/packs.h"
#endif
