// Tiles of K and V of 8 and 4 bits, for attention_prefill.cu: the cache's own bytes are copied to
// shared memory, and dequantised there once for all rows of a block, into the format that tensor
// cores take. That is exact: elements of 8 bits, and nvfp4 codes times their group scales, are
// numbers of fp16 and of bf16; mxfp4 codes times their scales are numbers of bf16. Products of int4
// codes and scales have too many bits.
//
// Static and dynamic scales are factors of scores, and of the output or the weights.
#pragma once

#include "attention_tiles.cuh"
#include "four_bit.cuh"

// Bytes of the group scales of a row, at most: as many as nvfp4 has.
constexpr int most_group_bytes(int width) { return width / 16; }

// Scales of the keys of a tile: dynamic ones, and the bytes of group scales.
template <int kCount, int kWidth, int kWidthV>
struct TileScales {
  float k_scales[kCount];
  float v_scales[kCount];
  alignas(4) char k_groups[kCount][most_group_bytes(kWidth)];
  alignas(4) char v_groups[kCount][most_group_bytes(kWidthV)];
};
struct NoScales {};  // of 16 bits

// Numbers of formats in the Params: those from kFirstFourBit on have four bits.
constexpr int kFormatE4m3 = 3;
constexpr int kFormatE5m2 = 4;
constexpr int kFormatInt8 = 5;
constexpr int kFormatNvfp4 = 6;
constexpr int kFormatMxfp4 = 7;
constexpr int kFirstFourBit = kFormatNvfp4;

// --- Copies --------------------------------------------------------------------------------------

// Start copying the dynamic scale and the group scales of a key; zeros where it is missing.
template <int kGroupBytes>
__device__ __forceinline__ void fetch_scales_of_key(float* scale, char (&groups)[kGroupBytes],
                                                    const char* cache, const char* scale_cache,
                                                    const KVOperand& operand, int format,
                                                    const SlotPlace& place, i64 slot, int head,
                                                    bool exists) {
  if (scale_cache) {
    char* scales = const_cast<char*>(scale_cache);
    copy_float_async(scale, scale_address(scales, operand, slot, head), exists);
  }
  if (format < kFirstFourBit) return;
  const char* from = four_bit_row(const_cast<char*>(cache), operand, place, head).scales;
  const int num_bytes = operand.width >> operand.group_scales.group_shift;
#pragma unroll
  for (int at = 0; at < kGroupBytes; at += 4) {
    copy_word_async<4>(groups + at, from + at, exists && at < num_bytes);
  }
}

// Start copying rows of bytes in words of kWordBytes, one row every kRowBytes; zeros past
// `row_bytes` and where a row is null. Eight of kThreads threads share a row.
template <int kWordBytes, int kRowBytes, int kThreads, int kCount>
__device__ __forceinline__ void fetch_packed_by(char* tile, const char* const (&rows)[kCount],
                                                int row_bytes) {
  const int thread = find_again(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kCount * 8 / kThreads; ++i) {
    const int row = thread / 8 + i * (kThreads / 8);
    const char* from = rows[row];
#pragma unroll
    for (int at = 0; at < kRowBytes; at += 8 * kWordBytes) {
      const int column = at + thread % 8 * kWordBytes;
      if (column >= kRowBytes) continue;
      const auto* word = reinterpret_cast<const char*>(reinterpret_cast<u64>(from) + column);
      copy_word_async<kWordBytes>(tile + row * kRowBytes + column, word,
                                  from && column < row_bytes);  // not read otherwise
    }
  }
}

// Likewise of kWidth elements of a format.
template <int kWidth, int kThreads, int kCount>
__device__ __forceinline__ void fetch_packed(char* tile, const char* const (&rows)[kCount],
                                             const KVOperand& operand, int format) {
  if (format < kFirstFourBit) {
    fetch_packed_by<16, kWidth, kThreads>(tile, rows, operand.width);
  } else if (operand.group_scales.code_word_bytes == 8) {
    fetch_packed_by<8, kWidth / 2, kThreads>(tile, rows, operand.width / 2);
  } else {
    fetch_packed_by<4, kWidth / 2, kThreads>(tile, rows, operand.width / 2);
  }
}

// --- Conversion ----------------------------------------------------------------------------------

// Eight elements, a chunk of 16 bytes as T.
template <typename TCache, typename T>
__device__ __forceinline__ Pack<u32, 4> dequantise_chunk(const char* packed,
                                                         [[maybe_unused]] const char* group) {
  Pack<float, 8> x;
  if constexpr (kFourBit<TCache>) {
    const u32 codes = *reinterpret_cast<const u32*>(packed);
    x = decode_codes<TCache>(codes, group_scale<TCache>(load_group_scale<TCache>(group)));
  } else {
    Pack<TCache, 8> codes;
    codes.load(packed);
    x = to_floats(codes);
  }
  Pack<u32, 4> pairs;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs.values[i] = pack_pair<T>(x.values[2 * i], x.values[2 * i + 1]);
  }
  return pairs;
}

template <typename TCache, typename T, int kWidth, int kThreads, int kCount, int kGroupBytes>
__device__ __forceinline__ void dequantise_as(char* tile, const char* packed,
                                              const char (&groups)[kCount][kGroupBytes]) {
  constexpr int kBytes = kFourBit<TCache> ? 4 : 8;    // of a chunk
  constexpr int kLanes = kWidth % 128 == 0 ? 16 : 8;  // that share a row
  constexpr int kRows = kThreads / kLanes;            // at once
  constexpr int kChunksPerGroup = kSameType<TCache, mxfp4> ? 4 : 2;
  static_assert(kRows % 8 == 0, "chunks of a thread are permuted alike in all of its rows");
  const int thread = find_again(threadIdx.x);
  const int first = thread / kLanes;
  const int column = thread % kLanes;
  const char* from = packed + (first * (kWidth / 8) + column) * kBytes;
  const char* group = groups[first] + column / kChunksPerGroup;
  char* to = tile + chunk_offset<kWidth>(first, column);
#pragma unroll 2
  for (int i = 0; i < kCount / kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += kLanes) {
      const Pack<u32, 4> chunk =
          dequantise_chunk<TCache, T>(from + (i * kRows * (kWidth / 8) + j) * kBytes,
                                      group + i * kRows * kGroupBytes + j / kChunksPerGroup);
      chunk.store(to + i * kRows * kWidth * 2 + j * 16);
    }
  }
}

// Dequantise the rows of a tile to T, but for static and dynamic scales. All threads must call it;
// others see the result after a barrier.
template <typename T, int kWidth, int kThreads, int kCount, int kGroupBytes>
__device__ __forceinline__ void dequantise(char* tile, const char* packed,
                                           const char (&groups)[kCount][kGroupBytes], int format) {
  switch (format) {
    case kFormatE4m3:
      return dequantise_as<fp8_e4m3, T, kWidth, kThreads>(tile, packed, groups);
    case kFormatE5m2:
      return dequantise_as<fp8_e5m2, T, kWidth, kThreads>(tile, packed, groups);
    case kFormatInt8:
      return dequantise_as<int8, T, kWidth, kThreads>(tile, packed, groups);
    case kFormatNvfp4:
      return dequantise_as<nvfp4, T, kWidth, kThreads>(tile, packed, groups);
    default:
      return dequantise_as<mxfp4, T, kWidth, kThreads>(tile, packed, groups);
  }
}
