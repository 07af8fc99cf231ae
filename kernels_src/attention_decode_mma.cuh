// Shared memory of attention_decode_mma.cu: the queries of a block, and of each warp some tiles of
// rows and where they lie in the cache.
//
// Widths are padded with zeros up to kWidth and kWidthV.
#pragma once

#include "attention_tiles.cuh"

constexpr int kDecodeRows = 16;
constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = kDecodeWarps * 32;
constexpr int kTileKeys = 16;
constexpr int kValuePadding =
    8;  // floats after a row of values, so that rows differ in their banks
constexpr float kSmallestScale = __builtin_bit_cast(float, 0x00800000);  // 2 to the -126
constexpr float kLargestScale = __builtin_bit_cast(float, 0x7e800000);   // 2 to the 126

template <typename TCache>
struct MmaFormatOf {
  using type = half;
};
template <>
struct MmaFormatOf<bfloat16> {
  using type = bfloat16;
};

// The format that tensor cores take elements of a cache in.
template <typename TCache>
using MmaFormat = typename MmaFormatOf<TCache>::type;

// Where the keys of the tiles of a warp lie, and their scales.
template <typename TCache, int kStages>
struct DecodeTable {
  const char* k[kStages][kTileKeys];  // rows in the cache; null: not visible
  const char* v[kStages][kTileKeys];
  const float* angles[sizeof(TCache) == 2 ? kStages : 1][kTileKeys];
  float k_scales[kStages][kTileKeys];  // where each key has one
  float v_scales[kStages][kTileKeys];
  u32 present[kStages];  // a bit per key: whether it is visible
};

// What the warps have of each row: the largest logit, and the sum of weights against it.
struct DecodeMerge {
  float tops[kDecodeWarps][kDecodeRows];
  float sums[kDecodeWarps][kDecodeRows];
};

// Rarely read, so kept out of registers.
struct DecodeTile {
  AttentionTile tile;
  KeyRange range;
  RowLimits limits[kDecodeRows];  // but for kept keys and trees
  RowLimits seen_by_all;
  DecodeMerge merge;
  float query_scales[kDecodeRows];
};

// The layout of dynamic shared memory: a ring of tiles per warp, whose place the weighted values
// take in the end; then what is per block.
template <typename TCache, int kWidth, int kWidthV>
struct DecodeShape {
  static_assert(kWidth % 64 == 0 && kWidthV % 64 == 0, "rows are whole groups of 64 bytes");
  static constexpr bool kQueryInRegisters = kWidth <= 192;
  static constexpr int kBlocks = kWidth <= 64 ? 3 : 2;  // per SM, as registers allow
  static constexpr int kKeyRowBytes = kWidth * static_cast<int>(sizeof(TCache));
  static constexpr int kValueRowBytes = kWidthV * static_cast<int>(sizeof(TCache));
  static constexpr int kValuesAt = kTileKeys * kKeyRowBytes;
  static constexpr int kTileBytes = kTileKeys * (kKeyRowBytes + kValueRowBytes);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr int kStages = 1;  // copies are not asynchronous there
#else
  static constexpr int kStages = kTileBytes <= 2048 ? 4 : kTileBytes <= 10240 ? 2 : 1;
#endif
  static constexpr int kMergeBytes = kDecodeRows * (kWidthV + kValuePadding) * 4;
  static constexpr int kRingBytes =
      kStages * kTileBytes > kMergeBytes ? kStages * kTileBytes : kMergeBytes;
  static constexpr int kQueryAt = kDecodeWarps * kRingBytes;
  static constexpr int kTablesAt = kQueryAt + kDecodeRows * kWidth * 2;
  static constexpr int kTileAt =
      kTablesAt + kDecodeWarps * static_cast<int>(sizeof(DecodeTable<TCache, kStages>));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(DecodeTile));
};

// --- Keys ----------------------------------------------------------------------------------------

// A key on its way into a tile.
struct KeyPlace {
  i64 key;
  i64 place;
  i64 page;  // as the block table has it; -1: no key
};

// Where the key numbered `number` lies, if it is before `end`. Lanes past a tile find none.
__device__ __forceinline__ KeyPlace look_up(const AttentionParams& p, const AttentionTile& t,
                                            i64 number, i64 end) {
  KeyPlace found = {0, 0, -1};
  if (threadIdx.x % 32 >= kTileKeys || number >= end) return found;
  found.key = key_of(p, t, number);
  if (!seen_by_any(p, t, found.key)) return found;
  found.place = place_of(p, t, found.key);
  found.page = load_page(p, t, found.place);
  return found;
}

// Write the rows of a tile to its table, and start copying their scales. Every lane must call it.
template <typename TCache, int kStages>
__device__ __forceinline__ void set_rows(DecodeTable<TCache, kStages>& table, int stage,
                                         const AttentionParams& p, const AttentionTile& t,
                                         const KeyPlace& found) {
  const int i = threadIdx.x % 32;
  const int kv_head = blockIdx.y;
  const i64 page = check_page(p, t, found.place, found.page, kv_head == 0);
  const bool exists = page >= 0;
  if (i < kTileKeys) {
    const i64 offset = offset_in_page(p, found.place);
    table.k[stage][i] = exists ? row_of(p.k_cache, p.k, page, offset, kv_head) : nullptr;
    table.v[stage][i] = exists ? row_of(p.v_cache, p.v, page, offset, kv_head) : nullptr;
    if constexpr (sizeof(TCache) == 2) {
      if (p.rope_table) table.angles[stage][i] = angles_of(p, t, found.key);
    }
    const i64 slot = exists ? page * p.page_size + offset : 0;
    if (p.k_scale_cache) {
      char* scales = const_cast<char*>(p.k_scale_cache);
      copy_float_async(&table.k_scales[stage][i], scale_address(scales, p.k, slot, kv_head),
                       exists);
    }
    if (p.v_scale_cache) {
      char* scales = const_cast<char*>(p.v_scale_cache);
      copy_float_async(&table.v_scales[stage][i], scale_address(scales, p.v, slot, kv_head),
                       exists);
    }
  }
  const u32 present = __ballot_sync(kAllLanes, exists);
  if (i == 0) table.present[stage] = present;
  __syncwarp();  // the table is written
}

// Start copying the 16 rows of a tile; lanes that share a row copy neighbouring chunks.
template <int kRowBytes>
__device__ __forceinline__ void fetch_tile(char* tile, const char* const (&rows)[kTileKeys],
                                           int row_bytes, const char* anywhere) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kLanes = kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : 4;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTileKeys * kLanes / 32; ++i) {
    const int row = lane / kLanes + i * (32 / kLanes);
    const char* from = rows[row];
#pragma unroll
    for (int j = 0; j < kChunks / kLanes; ++j) {
      const int chunk = lane % kLanes + j * kLanes;
      const bool exist = from && chunk * 16 < row_bytes;
      copy_async(tile + chunk_at<kRowBytes>(row, chunk), exist ? from + chunk * 16 : anywhere,
                 exist);
    }
  }
}

template <typename TCache, int kWidth, int kStages>
__device__ __forceinline__ void fetch_keys(char* tile, const AttentionParams& p,
                                           const DecodeTable<TCache, kStages>& table, int stage) {
  constexpr int kBytes = sizeof(TCache);
  fetch_tile<kWidth * kBytes>(tile, table.k[stage], p.k.width * kBytes, p.k_cache);
}

template <typename TCache, int kWidthV, int kStages>
__device__ __forceinline__ void fetch_values(char* tile, const AttentionParams& p,
                                             const DecodeTable<TCache, kStages>& table, int stage) {
  constexpr int kBytes = sizeof(TCache);
  fetch_tile<kWidthV * kBytes>(tile, table.v[stage], p.v.width * kBytes, p.v_cache);
}

// --- Queries -------------------------------------------------------------------------------------

// A power of two, normal as its inverse is, so that the largest of some magnitudes is from 1 to 4
// times as large, if it is a normal number at all.
__device__ __forceinline__ float power_of_two_below(float largest) {
  const float power = __uint_as_float(__float_as_uint(largest) & 0x7f800000u);
  return fminf(fmaxf(power, kSmallestScale), kLargestScale);
}

__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}

// Bring the queries of a block to shared memory as `multiply_keys` takes them; eight lanes share a
// row. Others see them after a barrier.
template <typename TCache, int kWidth>
__device__ __forceinline__ void load_queries(char* queries, DecodeTile& shared,
                                             const AttentionParams& p, const AttentionTile& t,
                                             int kv_head) {
  constexpr int kBlocks = kWidth / 16;     // of 16 elements, per row
  constexpr int kOwn = (kBlocks + 7) / 8;  // of a lane
  const int row = threadIdx.x / 8;
  const char* from = row < t.num_rows ? query_row(p, t, row, kv_head) : nullptr;
  Pack<u32, 4> words[kOwn][2];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int block = threadIdx.x % 8 + i * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      words[i][j] = {};
      if (from && block * 16 + j * 8 < p.k.width) words[i][j].load(from + (block * 2 + j) * 16);
    }
  }
  float scale = 1.0f;
  if constexpr (sizeof(TCache) == 1) {
    Pack<float, 16> floats[kOwn];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const u32 pair = words[i][j / 4].values[j % 4];
        const bool is_half = p.query_format == 1;
        const float x = is_half ? lower_of<half>(pair) : lower_of<bfloat16>(pair);
        const float y = is_half ? upper_of<half>(pair) : upper_of<bfloat16>(pair);
        floats[i].values[2 * j] = x;
        floats[i].values[2 * j + 1] = y;
        largest = fmaxf(largest, fmaxf(fabsf(x), fabsf(y)));
      }
    }
    scale = power_of_two_below(max_within_warp(largest, 8));
    const float inverse = inverse_of_power(scale);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* four = floats[i].values + 4 * j;
        words[i][0].values[j] = pack_pair<half>(four[0] * inverse, four[2] * inverse);
        words[i][1].values[j] = pack_pair<half>(four[1] * inverse, four[3] * inverse);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int block = threadIdx.x % 8 + i * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (block < kBlocks) words[i][j].store(queries + chunk_offset<kWidth>(row, block * 2 + j));
    }
  }
  if (threadIdx.x % 8 == 0) shared.query_scales[row] = scale;
}

// --- Masks ---------------------------------------------------------------------------------------

// Find which keys the rows see. Others see the result after a barrier.
__device__ __forceinline__ void set_limits(DecodeTile& shared, const AttentionParams& p,
                                           const AttentionTile& t) {
  const int row = threadIdx.x;
  if (row < kDecodeRows) {
    const i64 position = position_of(p, t, row);
    shared.limits[row] = limits_of(p, t, position, position);
  } else if (row == kDecodeRows) {
    shared.seen_by_all = seen_by_all(p, t);
  }
}

// Which of a lane's scores count where a tree is visible: bit 4n + i of element i of product n.
__device__ __forceinline__ u32 visible_in_tree(const AttentionParams& p, const AttentionTile& t,
                                               i64 first) {
  const int lane = threadIdx.x % 32;
  u32 visible = 0;
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    const int column = j / 4 * 8 + lane % 4 * 2 + j % 2;
    const int row = lane / 4 + j / 2 % 2 * 8;
    if (row < t.num_rows && sees(p, t, row, key_of(p, t, first + column))) visible |= 1u << j;
  }
  return visible;
}

// Take the scores of keys that a row does not see for minus infinity. The tile's first key has
// number `first`.
__device__ __forceinline__ void hide_keys(float (&s)[2][4], const DecodeTile& shared,
                                          const AttentionParams& p, const AttentionTile& t,
                                          i64 first, u32 present) {
  const i64 first_key = key_of(p, t, first);
  if (present == (1u << kTileKeys) - 1 && first >= t.sinks &&
      first_key >= shared.seen_by_all.start && first_key + kTileKeys <= shared.seen_by_all.end) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const bool has_tree = p.tree_mask != nullptr;
  const u32 in_tree = has_tree ? visible_in_tree(p, t, first) : 0;
  RowLimits limits[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) limits[h] = shared.limits[lane / 4 + h * 8];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + lane % 4 * 2 + i;
      const i64 key = key_of(p, t, first + column);
      const bool exists = present >> column & 1u;
      const bool kept = key < p.sink_keys;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool in_range = key < limits[h].end && (key >= limits[h].start || kept);
        const bool seen = has_tree ? in_tree >> (n * 4 + h * 2 + i) & 1u : in_range;
        if (!exists || !seen) s[n][h * 2 + i] = -kInfinity;
      }
    }
  }
}
