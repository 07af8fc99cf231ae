// Number formats: the one place where rounding is decided.
//
// Arithmetic is float32. from_float rounds once, to nearest even. The quantised formats saturate
// (infinities too) and keep NaN (int8, which has none, gives 0); fp16 and bf16 overflow to
// infinity.
#pragma once

#include "common.cuh"

using int8 = signed char;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(int8 x) { return static_cast<float>(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ int8 from_float<int8>(float x) {
  // fminf and fmaxf drop a NaN, so it is decided first.
  return x != x ? int8{0} : static_cast<int8>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)));
}

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using bfloat16 = __nv_bfloat16;
using fp8_e4m3 = __nv_fp8_e4m3;
using fp8_e5m2 = __nv_fp8_e5m2;

__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp8_e4m3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E4M3)));
}
__device__ __forceinline__ float to_float(fp8_e5m2 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E5M2)));
}

template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ fp8_e4m3 from_float<fp8_e4m3>(float x) {
  fp8_e4m3 result;
  result.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return result;
}
template <>
__device__ __forceinline__ fp8_e5m2 from_float<fp8_e5m2>(float x) {
  fp8_e5m2 result;
  result.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
  return result;
}
#else
#include "host/numbers.h"
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

template <typename A, typename B>
constexpr bool kSameType = false;
template <typename A>
constexpr bool kSameType<A, A> = true;

constexpr float kFloatMax = 3.402823466e+38f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// The scale of a row whose largest magnitude is `absmax`, for a quantised T.
template <typename T>
__device__ __forceinline__ float dynamic_scale(float absmax) {
  return __fdiv_rn(fmaxf(fminf(absmax, kFloatMax), 1e-6f), kLimit<T>);
}

// a * b + c * d to within an ulp and a half of float32, where plain arithmetic would cancel
// (Kahan). Where it overflows on the way, the plain result.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) {
  const float cd = __fmul_rn(c, d);
  const float rough = __fmaf_rn(a, b, cd);
  const float exact = __fadd_rn(rough, __fmaf_rn(c, d, -cd));
  return exact == exact ? exact : rough;
}

// --- Packs ---------------------------------------------------------------------------------------

template <typename T, int kCount>
__device__ __forceinline__ Pack<float, kCount> to_floats(const Pack<T, kCount>& in) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = to_float(in.values[i]);
  return out;
}

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> from_floats(const Pack<float, kCount>& in) {
  Pack<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = from_float<T>(in.values[i]);
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

// a / scale, element by element.
template <int kCount>
__device__ __forceinline__ Pack<float, kCount> quotients(const Pack<float, kCount>& a,
                                                         float scale) {
  Pack<float, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = __fdiv_rn(a.values[i], scale);
  return out;
}

// x / scale, rounded to T. A true division: multiplying by the reciprocal rounds twice.
template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> quantise(const Pack<float, kCount>& x, float scale) {
  return from_floats<T>(quotients(x, scale));
}

// The largest magnitude of the elements added so far; NaN does not count.
template <int kCount>
struct AbsMax {
  float largest = 0.0f;

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

#if !defined(__CUDACC__) && !defined(KVCUPY_STRICT)
#include "host/packs.h"
#endif
