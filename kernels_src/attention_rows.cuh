// Rows of K and V as a lane of the plain path has them in registers: packs of eight elements of any
// format, which are loaded early and become float32 late.
#pragma once

#include "attention_rope.cuh"

// Any format, chosen at run time, and rows of any alignment.
struct AnyFormat {};

template <typename T, int kCount>
struct Elements {
  static constexpr int kBytes = sizeof(T);
  Pack<T, kCount> pack;

  __device__ __forceinline__ void load(const char* row, int i, int width, int) {
    if (i < width) {
      pack.load(row + i * static_cast<int>(sizeof(T)));
    } else {
      pack = Pack<T, kCount>{};
    }
  }
  __device__ __forceinline__ Pack<float, kCount> floats() const { return to_floats(pack); }
};

template <int kCount>
struct Elements<AnyFormat, kCount> {
  static constexpr int kBytes = 8;  // takes as many registers as if
  Pack<float, kCount> pack;

  template <typename T>
  __device__ __forceinline__ void load_as(const char* row, int i, int width) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      pack.values[j] = i + j < width ? to_float(reinterpret_cast<const T*>(row)[i + j]) : 0.0f;
    }
  }

  __device__ __forceinline__ void load(const char* row, int i, int width, int format) {
    switch (format) {
      case 0:
        return load_as<float>(row, i, width);
      case 1:
        return load_as<half>(row, i, width);
      case 2:
        return load_as<bfloat16>(row, i, width);
      case 3:
        return load_as<fp8_e4m3>(row, i, width);
      case 4:
        return load_as<fp8_e5m2>(row, i, width);
      default:
        return load_as<int8>(row, i, width);
    }
  }
  __device__ __forceinline__ Pack<float, kCount> floats() const { return pack; }
};

// The partners of elements i to i + 7 of a row of K, as `rotate_element` and `rotate_pack` take
// them.
template <typename TCache, int kCount>
__device__ __forceinline__ Elements<TCache, kCount> load_partners(const AttentionParams& p,
                                                                  const char* row, int i,
                                                                  int width) {
  Elements<TCache, kCount> partners;
  if constexpr (kSameType<TCache, AnyFormat>) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int other = partner_of(p, i + j);
      const bool there = other >= 0 && other < width;
      partners.pack.values[j] = there ? load_any(row, other, p.k_format) : 0.0f;
    }
  } else {
    const int other = p.interleaved ? -1 : partner_of(p, i);
    partners.load(row, other < 0 ? width : other, width, 0);
  }
  return partners;
}

template <typename TCache, int kCount>
__device__ __forceinline__ Pack<float, kCount> rotated(const AttentionParams& p,
                                                       const Elements<TCache, kCount>& k,
                                                       const Elements<TCache, kCount>& partners,
                                                       const float* angles, int i) {
  if constexpr (kSameType<TCache, AnyFormat>) {
    Pack<float, kCount> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      result.values[j] =
          rotate_element(p, k.pack.values[j], partners.pack.values[j], angles, i + j);
    }
    return result;
  } else {
    return rotate_pack(p, k.floats(), partners.floats(), angles, i);
  }
}

// sums += a * b, element by element.
template <int kCount>
__device__ __forceinline__ void multiply_add(const Pack<float, kCount>& a,
                                             const Pack<float, kCount>& b,
                                             Pack<float, kCount>& sums) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums.values[j] = fmaf(a.values[j], b.values[j], sums.values[j]);
}

template <int kCount>
__device__ __forceinline__ void multiply_add(float a, const Pack<float, kCount>& b,
                                             Pack<float, kCount>& sums) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums.values[j] = fmaf(a, b.values[j], sums.values[j]);
}

// The sum of the values of `lanes` neighbouring threads, known to each of them. Every thread of the
// warp must call it.
__device__ __forceinline__ float sum_of_lanes(float value, int lanes) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance < lanes) value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

template <int kCount>
__device__ __forceinline__ float sum_of(const Pack<float, kCount>& pack) {
  float sum = pack.values[0];
#pragma unroll
  for (int j = 1; j < kCount; ++j) sum += pack.values[j];
  return sum;
}
