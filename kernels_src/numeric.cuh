// Number formats: the one place where rounding is decided.
//
// Arithmetic is float32. from_float rounds once, to nearest even. The quantised formats saturate
// (infinities too) and keep NaN (int8, which has none, gives 0); fp16 and bf16 overflow to
// infinity.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "common.cuh"

using bfloat16 = __nv_bfloat16;
using fp8_e4m3 = __nv_fp8_e4m3;
using fp8_e5m2 = __nv_fp8_e5m2;
using int8 = signed char;

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

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp8_e4m3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E4M3)));
}
__device__ __forceinline__ float to_float(fp8_e5m2 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E5M2)));
}
__device__ __forceinline__ float to_float(int8 x) { return static_cast<float>(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
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
template <>
__device__ __forceinline__ int8 from_float<int8>(float x) {
  // fminf and fmaxf drop a NaN, so it is decided first.
  return x != x ? int8{0} : static_cast<int8>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)));
}

// x / scale, rounded to T. A true division: multiplying by the reciprocal rounds twice.
template <typename T>
__device__ __forceinline__ T quantise(float x, float scale) {
  return from_float<T>(__fdiv_rn(x, scale));
}

// The scale of a row whose largest magnitude is `absmax`, for a quantised T.
template <typename T>
__device__ __forceinline__ float dynamic_scale(float absmax) {
  return __fdiv_rn(fmaxf(fminf(absmax, kFloatMax), 1e-6f), kLimit<T>);
}
