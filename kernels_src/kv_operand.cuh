// K or V of a cache, as the kernels that write or read it see it.
#pragma once

#include "numeric.cuh"

// Where the group scales of a four-bit cache lie (four_bit.cuh): behind the codes of each row, or
// in a separate array.
struct GroupScales {
  i64 offset_bytes;      // from the codes of the first row to its scales
  CacheStrides strides;  // between scales, as the strides of the cache are between codes
  int group_shift;       // log2 of the elements that share one
  int code_word_bytes;   // in which codes are accessed: 1, 2, 4 or 8
  int rotation_shift;    // log2 of the elements that are rotated together; 0: none are
  int rotated_width;     // of the first elements of a row, which are rotated: whole such blocks
  int four_over_six;     // of nvfp4: scales are chosen by the error of their group; 0: they are not
};

// Strides of the rows outside the cache and of the cache; scales; width. A width of 0 leaves K or
// V out of a launch.
struct KVOperand {
  i64 token_bytes;             // rows: stride between tokens
  i64 head_bytes;              // rows: stride between heads
  CacheStrides cache;          // cache: strides of pages, of offsets within a page, of heads
  i64 scale_head_bytes;        // stride of scale [num_heads]; 0: one scale for all heads
  i64 scale_cache_slot_bytes;  // strides of scale_cache [num_slots, num_heads]
  i64 scale_cache_head_bytes;
  GroupScales group_scales;  // of a four-bit cache
  float scale;               // where no scale array is given
  int width;                 // elements per row; bytes where rows are copied as they are
};

// The scale of a head, known before the launch.
__device__ __forceinline__ float static_scale(const char* scale, const KVOperand& operand,
                                              int head) {
  return scale ? *reinterpret_cast<const float*>(scale + head * operand.scale_head_bytes)
               : operand.scale;
}

// Where the dynamic scale of a (slot, head) is kept.
__device__ __forceinline__ float* scale_address(char* scale_cache, const KVOperand& operand,
                                                i64 slot, int head) {
  return reinterpret_cast<float*>(scale_cache + slot * operand.scale_cache_slot_bytes +
                                  head * operand.scale_cache_head_bytes);
}

template <typename TIn, typename TOut, int kCount>
__device__ __forceinline__ Pack<TOut, kCount> convert(const Pack<TIn, kCount>& in,
                                                      const ScaleDivisor& scale) {
  if constexpr (kQuantised<TOut>) return quantise<TOut>(to_floats(in), scale);
  return from_floats<TOut>(to_floats(in));
}
