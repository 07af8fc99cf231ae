// Number formats of 16 bits, and what a GPU does by an instruction: a function each, with a plain
// version beside it for a processor.
//
// The plain versions follow the PTX ISA: NaN results are 0x7fff, and subnormal numbers are kept
// unless a comment says that they are flushed. A pair is two fp16 or two bf16 in a word, the first
// in the lower half.
#pragma once

#include "common.cuh"

template <typename T>
__device__ __forceinline__ T from_float(float x);

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using bfloat16 = __nv_bfloat16;
using fp8_e4m3 = __nv_fp8_e4m3;
using fp8_e5m2 = __nv_fp8_e5m2;

__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
#else
#include "host/numbers.h"
#endif

template <typename T>
__device__ __forceinline__ u32 bits_of(const T& x) {
  return *reinterpret_cast<const Word<sizeof(T)>*>(&x);
}
template <typename T>
__device__ __forceinline__ T of_bits(u32 bits) {
  T x;
  *reinterpret_cast<Word<sizeof(T)>*>(&x) = static_cast<Word<sizeof(T)>>(bits);
  return x;
}

// --- Approximations ------------------------------------------------------------------------------

#ifndef __CUDACC__
namespace kvcupy_host {

// What an instruction may return for `exact`, in builds of a GPU's branches: zero where that is
// below the normal numbers, else a number up to `ulps` units off, which depends on the input `x`.
inline float approximation(float exact, [[maybe_unused]] float x, [[maybe_unused]] int ulps) {
  if constexpr (kArch == 0) return exact;
  constexpr float kSmallestNormal = power_of_two(-126);
  if (fabsf(exact) < kSmallestNormal) return copysignf(0.0f, exact);
  if (exact - exact != 0.0f) return exact;
  const u32 hash = (__float_as_uint(x) * 2654435761u) >> 16;
  const float near = __uint_as_float(__float_as_uint(exact) + hash % (2 * ulps + 1) - ulps);
  return fabsf(near) < kSmallestNormal || near - near != 0.0f ? exact : near;
}

}  // namespace kvcupy_host
#endif

// 1 / x to within an ulp, for an x that is not subnormal; an infinity for a zero, and the reverse.
__device__ __forceinline__ float approximate_reciprocal(float x) {
#ifdef __CUDACC__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return kvcupy_host::approximation(1.0f / x, x, 1);
#endif
}

// 2 to the x within two units; on a GPU 0 where that is below the normal numbers.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDACC__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return kvcupy_host::approximation(exp2f(x), x, 2);
#endif
}

// --- Conversions ---------------------------------------------------------------------------------

// x in the lower half, y in the upper, each rounded once.
template <typename T>
__device__ __forceinline__ u32 pack_pair(float x, float y) {
#ifdef __CUDACC__  // one instruction, where the chip has it
  if constexpr (kSameType<T, half>) {
    return bits_of(__floats2half2_rn(x, y));
  } else {
    return bits_of(__floats2bfloat162_rn(x, y));
  }
#else
  return u32{from_float<T>(x).bits} | u32{from_float<T>(y).bits} << 16;
#endif
}

template <typename T>
__device__ __forceinline__ float lower_of(u32 pair) {
  return to_float(reinterpret_cast<const T*>(&pair)[0]);
}
template <typename T>
__device__ __forceinline__ float upper_of(u32 pair) {
  return to_float(reinterpret_cast<const T*>(&pair)[1]);
}

template <typename T = half>
__device__ __forceinline__ float2 floats_of_pair(u32 pair) {
  if constexpr (kSameType<T, bfloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  } else {
    static_assert(kSameType<T, half>, "formats of 16 bits");
#ifdef __CUDACC__
    return __half22float2(of_bits<half2>(pair));
#else
    return {lower_of<half>(pair), upper_of<half>(pair)};
#endif
  }
}

// The two codes of e4m3 in the lower half of a word as a pair of fp16. For sm_89 and newer.
__device__ __forceinline__ u32 halves_of_e4m3(u32 codes) {
#ifdef __CUDACC__
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
  return pair;
#else
  return pack_pair<half>(kvcupy_host::kByteValues<fp8_e4m3>.of[codes & 0xff],
                         kvcupy_host::kByteValues<fp8_e4m3>.of[codes >> 8 & 0xff]);
#endif
}

// The codes of x and y in the bytes of a half word, T fp8_e4m3 or fp8_e5m2, each rounded once.
// They saturate, infinities too, and the code of a NaN is 0x7f. For sm_89 and newer.
template <typename T>
__device__ __forceinline__ u32 codes_of_floats(float x, float y) {
#ifdef __CUDACC__
  return __nv_cvt_float2_to_fp8x2({x, y}, __NV_SATFINITE,
                                  kSameType<T, fp8_e4m3> ? __NV_E4M3 : __NV_E5M2);
#else
  return kvcupy_host::encode<T, int>(x) | kvcupy_host::encode<T, int>(y) << 8;
#endif
}

// --- Arithmetic of pairs -------------------------------------------------------------------------

__device__ __forceinline__ u32 multiply_halves(u32 x, u32 y) {
#ifdef __CUDACC__
  return bits_of(__hmul2(of_bits<half2>(x), of_bits<half2>(y)));
#else  // exact as float32
  return pack_pair<half>(lower_of<half>(x) * lower_of<half>(y),
                         upper_of<half>(x) * upper_of<half>(y));
#endif
}

__device__ __forceinline__ u32 add_halves(u32 x, u32 y) {
#ifdef __CUDACC__
  return bits_of(__hadd2(of_bits<half2>(x), of_bits<half2>(y)));
#else  // float32 has more than twice the bits of fp16, so that rounding twice does no harm
  return pack_pair<half>(lower_of<half>(x) + lower_of<half>(y),
                         upper_of<half>(x) + upper_of<half>(y));
#endif
}

// Of two bf16 each.
__device__ __forceinline__ u32 add_bfloat16s(u32 x, u32 y) {
#ifdef __CUDACC__
  return bits_of(__hadd2(of_bits<__nv_bfloat162>(x), of_bits<__nv_bfloat162>(y)));
#else
  return pack_pair<bfloat16>(lower_of<bfloat16>(x) + lower_of<bfloat16>(y),
                             upper_of<bfloat16>(x) + upper_of<bfloat16>(y));
#endif
}

__device__ __forceinline__ u32 subtract_halves(u32 x, u32 y) {
#ifdef __CUDACC__
  return bits_of(__hsub2(of_bits<half2>(x), of_bits<half2>(y)));
#else
  return pack_pair<half>(lower_of<half>(x) - lower_of<half>(y),
                         upper_of<half>(x) - upper_of<half>(y));
#endif
}

#ifndef __CUDACC__
namespace kvcupy_host {

// x * y + z of fp16 numbers as a float32 whose last bit is 1 where it is not exact: to round that
// to fp16 is to round once.
inline float sum_rounded_to_odd(float x, float y, float z) {
  const double sum = static_cast<double>(x) * y + z;
  const float near = static_cast<float>(sum);
  const u32 bits = __float_as_uint(near);
  if (near == sum || near - near != 0.0f || bits & 1) return near;
  return __uint_as_float(fabs(sum) > fabs(static_cast<double>(near)) ? bits + 1 : bits - 1);
}

}  // namespace kvcupy_host
#endif

// x * y + z, rounded once.
__device__ __forceinline__ u32 multiply_add_halves(u32 x, u32 y, u32 z) {
#ifdef __CUDACC__
  return bits_of(__hfma2(of_bits<half2>(x), of_bits<half2>(y), of_bits<half2>(z)));
#else
  using kvcupy_host::sum_rounded_to_odd;
  return pack_pair<half>(
      sum_rounded_to_odd(lower_of<half>(x), lower_of<half>(y), lower_of<half>(z)),
      sum_rounded_to_odd(upper_of<half>(x), upper_of<half>(y), upper_of<half>(z)));
#endif
}

// Ones in each half of a word in which x is larger than y.
__device__ __forceinline__ u32 where_halves_exceed(u32 x, u32 y) {
#ifdef __CUDACC__
  return __hgt2_mask(of_bits<half2>(x), of_bits<half2>(y));
#else
  return (lower_of<half>(x) > lower_of<half>(y) ? 0xffffu : 0u) |
         (upper_of<half>(x) > upper_of<half>(y) ? 0xffff0000u : 0u);
#endif
}

// --- Largest and smallest of pairs ---------------------------------------------------------------
// T half or bfloat16. A positive zero is larger than a negative one.

#ifdef __CUDACC__
template <typename T>
struct PairType {};
template <>
struct PairType<half> {
  using type = __half2;
};
template <>
struct PairType<bfloat16> {
  using type = __nv_bfloat162;
};
template <typename T>
using PairOf = typename PairType<T>::type;
#else
namespace kvcupy_host {

enum class Nan { kIgnored, kKept };  // beside a number

// The code of the larger of two numbers, T half or bfloat16.
template <typename T, Nan kNan>
inline u32 larger_code(u32 x, u32 y) {
  const auto is_nan = [](u32 code) { return (code & 0x7fff) > FormatOf<T>::kOverflow; };
  const auto order = [](u32 code) { return code & 0x8000 ? 0xffff - code : code + 0x8000; };
  if (is_nan(x) && is_nan(y)) return FormatOf<T>::kNan;
  if (is_nan(x)) return kNan == Nan::kIgnored ? y : u32{FormatOf<T>::kNan};
  if (is_nan(y)) return kNan == Nan::kIgnored ? x : u32{FormatOf<T>::kNan};
  return order(x) > order(y) ? x : y;
}

template <typename T, Nan kNan>
inline u32 larger_codes(u32 x, u32 y) {
  return larger_code<T, kNan>(x & 0xffff, y & 0xffff) | larger_code<T, kNan>(x >> 16, y >> 16)
                                                            << 16;
}

}  // namespace kvcupy_host
#endif

template <typename T>
__device__ __forceinline__ u32 magnitudes_of_pair(u32 pair) {
#ifdef __CUDACC__
  return bits_of(__habs2(of_bits<PairOf<T>>(pair)));
#else
  return pair & 0x7fff7fff;
#endif
}

// Of a NaN and a number, the number. For sm_80 and newer.
template <typename T>
__device__ __forceinline__ u32 larger_of_pairs(u32 x, u32 y) {
#ifdef __CUDACC__
  return bits_of(__hmax2(of_bits<PairOf<T>>(x), of_bits<PairOf<T>>(y)));
#else
  return kvcupy_host::larger_codes<T, kvcupy_host::Nan::kIgnored>(x, y);
#endif
}

// Of a NaN and a number, a NaN. For sm_80 and newer.
template <typename T>
__device__ __forceinline__ u32 larger_or_nan(u32 x, u32 y) {
#ifdef __CUDACC__
  return bits_of(__hmax2_nan(of_bits<PairOf<T>>(x), of_bits<PairOf<T>>(y)));
#else
  return kvcupy_host::larger_codes<T, kvcupy_host::Nan::kKept>(x, y);
#endif
}
