// Rows of K and V as a lane of the plain path has them in registers: packs of eight elements of any
// format, which are loaded early and become float32 late.
#pragma once

#include "attention_rope.cuh"
#include "hadamard.cuh"

// Any format, chosen at run time, and rows of any alignment.
struct AnyFormat {};

template <typename T, int kCount, bool kIsFourBit = kFourBit<T>>
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
struct Elements<AnyFormat, kCount, false> {
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

// A row of a four-bit cache, and what its group scales are multiplied by.
template <typename T>
struct ScaledRow {
  const char* codes;
  const char* scales;
  float scale;
  int group_shift;
  int word_bytes;

  __device__ __forceinline__ float step(u32 scale_bits) const {
    return group_step<T>(scale_bits, scale);
  }
  __device__ __forceinline__ u32 scale_bits(int i) const {
    return load_group_scale<T>(scales + (i >> group_shift) * kGroupScaleBytes<T>);
  }
};

// A row as `Elements` loads it. `scale` is of the tensor or head; only four-bit rows have a use for
// it.
template <typename T>
__device__ __forceinline__ auto cached_row(const char* cache, const char* scale,
                                           const KVOperand& operand, i64 page, i64 offset,
                                           int head) {
  if constexpr (kFourBit<T>) {
    const FourBitRow row = four_bit_row(const_cast<char*>(cache), operand, {page, offset}, head);
    return ScaledRow<T>{row.codes, row.scales, static_scale(scale, operand, head),
                        group_shift<T>(operand), operand.group_scales.code_word_bytes};
  } else {
    return row_of(cache, operand, page, offset, head);
  }
}

// Eight elements of four bits are of one group.
template <typename T>
struct Elements<T, 8, true> {
  static constexpr int kBytes = 1;
  u32 codes;
  u32 scale_bits;
  float scale;

  __device__ __forceinline__ void load(const ScaledRow<T>& row, int i, int width, int) {
    codes = 0;
    scale_bits = 0;
    scale = row.scale;
    if (i >= width) return;
    codes = load_eight_codes(row.codes + i / 2, row.word_bytes);
    scale_bits = row.scale_bits(i);
  }
  __device__ __forceinline__ Pack<float, 8> floats() const {
    return decode_codes<T>(codes, group_step<T>(scale_bits, scale));
  }
};

// One element of a four-bit row.
template <typename T>
__device__ __forceinline__ float load_element(const ScaledRow<T>& row, int i) {
  const u32 codes = static_cast<unsigned char>(row.codes[i / 2]);
  const u32 code = codes >> i % 2 * 4 & 15;
  return decode_codes<T>(code, row.step(row.scale_bits(i))).values[0];
}

// In what the partners of rotated elements are loaded.
template <typename T, int kCount>
using Partners = Elements<SelectType<kFourBit<T>, AnyFormat, T>, kCount>;

// The partners of elements i to i + 7 of a row of K, as `rotate_element` and `rotate_pack` take
// them.
template <typename TCache, int kCount, typename Row>
__device__ __forceinline__ Partners<TCache, kCount> load_partners(const AttentionParams& p,
                                                                  const Row& row, int i,
                                                                  int width) {
  Partners<TCache, kCount> partners;
  if constexpr (kSameType<TCache, AnyFormat> || kFourBit<TCache>) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int other = partner_of(p, i + j);
      const bool there = other >= 0 && other < width;
      if constexpr (kFourBit<TCache>) {
        partners.pack.values[j] = there ? load_element(row, other) : 0.0f;
      } else {
        partners.pack.values[j] = there ? load_any(row, other, p.k_format) : 0.0f;
      }
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
                                                       const Partners<TCache, kCount>& partners,
                                                       const float* angles, int i) {
  if constexpr (kSameType<TCache, AnyFormat> || kFourBit<TCache>) {
    const Pack<float, kCount> own = k.floats();
    Pack<float, kCount> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      result.values[j] = rotate_element(p, own.values[j], partners.pack.values[j], angles, i + j);
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
