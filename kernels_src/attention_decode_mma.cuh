// Shared memory of attention_decode_mma.cu: the queries of a block, and of each warp some tiles of
// rows and where they lie in the cache.
//
// Widths are padded with zeros up to kWidth and kWidthV.
#pragma once

#include "attention_tiles.cuh"
#include "hadamard.cuh"

constexpr int kDecodeRows = 16;  // at most
constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = kDecodeWarps * 32;
constexpr int kValuePadding =
    8;  // floats after a row of values, so that rows differ in their banks

// Shared memory of an SM, at least, and what the driver takes of it for each block.
constexpr int kSharedBytes = (kArch == 0 || (kArch >= 900 && kArch < 1200) ? 228
                              : kArch == 800 || kArch == 870               ? 164
                              : kArch >= 800                               ? 100
                                                                           : 64)
                             << 10;
constexpr int kReservedBytes = 1024;

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

// Bytes of elements of a cache, next to each other.
template <typename TCache>
constexpr int bytes_of_elements(int count) {
  return kFourBit<TCache> ? count / 2 : count * static_cast<int>(sizeof(TCache));
}

// Where the keys of a ring of tiles lie, and their scales.
template <typename TCache, int kStages, int kKeys, int kWidth = 0, int kWidthV = 0,
          bool kIsFourBit = kFourBit<TCache>>
struct DecodeTable {
  const char* k[kStages][kKeys];  // rows in the cache; null: not visible
  const char* v[kStages][kKeys];
  const float* angles[sizeof(TCache) == 2 ? kStages : 1][sizeof(TCache) == 2 ? kKeys : 1];
  float k_scales[kStages][kKeys];  // where each key has one
  float v_scales[kStages][kKeys];
  u32 present[kStages];  // a bit per key: whether it is visible
};

// Bytes of the group scales of a row, at most, in whole words of 4. Where a row of mxfp4 has an odd
// number of them, up to three bytes of its codes come along in their first word.
template <typename TCache>
constexpr int group_bytes(int width) {
  const int smallest = kSameType<TCache, nvfp4> ? 16 : 32;
  const int more = kSameType<TCache, mxfp4> && width < 256 ? 3 - kGroupScaleBytes<TCache> : 0;
  return (width / smallest * kGroupScaleBytes<TCache> + more + 3) / 4 * 4;
}

// Likewise of four bits, with the group scales as stored in the cache, and as multiplied
// (attention_decode_four_bit.cuh): nvfp4 multiplies the stored ones directly.
template <typename TCache, int kStages, int kKeys, int kWidth, int kWidthV>
struct DecodeTable<TCache, kStages, kKeys, kWidth, kWidthV, true> {
  static constexpr bool kPrepares = !kSameType<TCache, nvfp4>;
  const char* k[kStages][kKeys];
  const char* v[kStages][kKeys];
  alignas(16) char k_groups[kStages][kKeys][group_bytes<TCache>(kWidth)];
  char v_groups[kStages][kKeys][group_bytes<TCache>(kWidthV)];
  alignas(16) float k_chunk_scales[kPrepares ? kWidth / 32 : 1][kPrepares ? kKeys : 1];
  alignas(16) unsigned short v_chunk_scales[kPrepares ? kWidthV / 32 : 1][kPrepares ? kKeys : 2];
  u32 present[kStages];
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
template <typename TCache, int kWidth, int kWidthV, int kRows, int kStagesOfRing>
struct DecodeLayout {
  static_assert(kRows == 8 || kRows == kDecodeRows, "rows or columns of a product");
  static_assert(kWidth % 64 == 0 && kWidthV % 64 == 0, "rows are whole groups of 64 bytes");
  // Narrow rows come in larger tiles: what is done once per tile is then done half as often.
  static constexpr int kKeys =
      kFourBit<TCache> || (sizeof(TCache) == 1 && kWidth <= 128 && kWidthV <= 128) ? 32 : 16;
  static constexpr bool kRowsHaveScales = sizeof(TCache) == 1 && !kFourBit<TCache>;
  static constexpr bool kQueryInRegisters = kRows == 16 && kWidth <= 192;
  // Whether a separate loop fetches the first tiles: else these would spill.
  static constexpr bool kFetchesApart = kFourBit<TCache> && kWidth == 256;
  static constexpr int kKeyRowBytes = bytes_of_elements<TCache>(kWidth);
  static constexpr int kValueRowBytes = bytes_of_elements<TCache>(kWidthV);
  static constexpr int kValuesAt = kKeys * kKeyRowBytes;
  static constexpr int kTileBytes = kKeys * (kKeyRowBytes + kValueRowBytes);
  static constexpr int kStages = kStagesOfRing;
  using Table = DecodeTable<TCache, kStages, kKeys, kWidth, kWidthV>;
  static constexpr int kMergeBytes = kRows * (kWidthV + kValuePadding) * 4;
  static constexpr int kRingBytes =
      kStages * kTileBytes > kMergeBytes ? kStages * kTileBytes : kMergeBytes;
  static constexpr int kQueryAt = kDecodeWarps * kRingBytes;
  static constexpr int kTablesAt = kQueryAt + kRows * kWidth * 2;
  static constexpr int kTileAt = kTablesAt + kDecodeWarps * static_cast<int>(sizeof(Table));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(DecodeTile));
  // Blocks per SM: as many as registers allow without spills, where shared memory has the room.
  static constexpr bool kIsNarrow = kWidth <= (kSameType<TCache, nvfp4> ? 128 : 64);
  static constexpr int kMostOfEight = kIsNarrow ? 4 : kFetchesApart ? 2 : 3;
  static constexpr int kMostOf16 = kWidth <= 64 && sizeof(TCache) == 2 ? 4 : 2;
  static constexpr int kMostBlocks = kRows == 8 ? kMostOfEight : kMostOf16;
  static constexpr int kFitting = kSharedBytes / (kBytes + kReservedBytes);
  static constexpr int kBlocks = kFitting > kMostBlocks ? kMostBlocks : kFitting > 0 ? kFitting : 1;
  // Where keys are rotated: what rounding to 16 bits left of the queries. Of narrow rows it takes
  // the place of queries that have moved on to registers.
  static constexpr bool kRestReplacesQuery = kQueryInRegisters && kWidth <= 128;
  static constexpr int kRestAt = kRestReplacesQuery ? kQueryAt : kBytes;
  static constexpr int kRotatedBytes = kBytes + (kRestReplacesQuery ? 0 : kRows * kWidth * 2);
  static_assert(kRestAt % 16 == 0 || !kFourBit<TCache>, "matrices begin at multiples of 16 bytes");
};

// The tiles that a warp's ring holds: what is fetched ahead. An A100 converts fp8 and four bits by
// many instructions, and more blocks hide more of those than more tiles do.
template <typename TCache, int kWidth, int kWidthV, int kRows>
constexpr int decode_stages() {
  using One = DecodeLayout<TCache, kWidth, kWidthV, kRows, 1>;
  using Two = DecodeLayout<TCache, kWidth, kWidthV, kRows, 2>;
  using Four = DecodeLayout<TCache, kWidth, kWidthV, kRows, 4>;
  constexpr int kMost = One::kTileBytes <= 2048 ? 4 : One::kTileBytes <= 10240 ? 2 : 1;
  if (!kCopiesAreAsync) return 1;
  if (kArch != 800 || sizeof(TCache) == 2 || kSameType<TCache, int8>) return kMost;
  if (kMost == 4 && Four::kFitting >= Four::kMostBlocks) return 4;
  return kMost >= 2 && Two::kFitting >= Two::kMostBlocks ? 2 : 1;
}

template <typename TCache, int kWidth, int kWidthV, int kRows = kDecodeRows>
using DecodeShape =
    DecodeLayout<TCache, kWidth, kWidthV, kRows, decode_stages<TCache, kWidth, kWidthV, kRows>()>;

// Find the rows and the keys of a block, and return whether there are any rows. Every thread must
// call it.
template <int kKeys, int kRows = kDecodeRows, typename Tile>
__device__ __forceinline__ bool begin_block(Tile& shared, const AttentionParams& p, int kv_head) {
  if (threadIdx.x == 0) {
    const AttentionPiece piece = piece_of(p, number_of_block(), kRows, kv_head == 0);
    shared.tile = find_tile(p, piece, kRows, kv_head == 0);
    shared.range = keys_of(piece, shared.tile, kKeys);
  }
  __syncthreads();  // the tile is known
  return shared.tile.num_rows != 0;
}

// --- Keys ----------------------------------------------------------------------------------------

// A key on its way into a tile.
struct KeyPlace {
  i64 key;
  i64 place;
  i64 page;  // as the block table has it; -1: no key
};

// Where the key numbered `number` lies, if it is before `end`. Lanes past a tile find none.
template <int kKeys>
__device__ __forceinline__ KeyPlace look_up(const AttentionParams& p, const AttentionTile& t,
                                            i64 number, i64 end) {
  KeyPlace found = {0, 0, -1};
  if (threadIdx.x % 32 >= kKeys || number >= end) return found;
  found.key = key_of(p, t, number);
  if (!is_in_view(p, t, found.key) || !seen_by_any(p, t, found.key)) return found;
  found.place = place_of(p, t, found.key);
  found.page = load_page(p, t, found.place);
  return found;
}

// Write the rows of a tile to its table, and start copying their scales. Every lane must call it.
template <typename TCache, int kStages, int kKeys, int kWidth, int kWidthV>
__device__ __forceinline__ void set_rows(
    DecodeTable<TCache, kStages, kKeys, kWidth, kWidthV, false>& table, int stage,
    const AttentionParams& p, const AttentionTile& t, const KeyPlace& found) {
  const int i = threadIdx.x % 32;
  const int kv_head = blockIdx.x;
  const i64 page = check_page(p, t, found.place, found.page, kv_head == 0);
  const bool exists = page >= 0;
  if (i < kKeys) {
    const i64 offset = offset_in_page(p, found.place);
    table.k[stage][i] = exists ? row_of(p.k_cache, p.k, page, offset, kv_head) : nullptr;
    table.v[stage][i] = exists ? row_of(p.v_cache, p.v, page, offset, kv_head) : nullptr;
    if constexpr (sizeof(TCache) == 2) {
      if (p.rope_table) table.angles[stage][i] = angles_of(p, t, found.key);
    }
    if constexpr (sizeof(TCache) == 1) {
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
  }
  const u32 present = __ballot_sync(kAllLanes, exists);
  if (i == 0) table.present[stage] = present;
  __syncwarp();  // the table is written
}

// Start copying the rows of a tile: `thread` of kThreads, which must all call it. Threads that
// share a row copy neighbouring chunks.
template <int kRowBytes, int kThreads, int kKeys>
__device__ __forceinline__ void fetch_tile(char* tile, const char* const (&rows)[kKeys],
                                           int row_bytes, const char* anywhere, int thread) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kLanes = kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : 4;
  static_assert(kKeys * kLanes % kThreads == 0, "all threads copy alike");
#pragma unroll
  for (int i = 0; i < kKeys * kLanes / kThreads; ++i) {
    const int row = thread / kLanes + i * (kThreads / kLanes);
    const char* from = rows[row];
#pragma unroll
    for (int j = 0; j < kChunks / kLanes; ++j) {
      const int chunk = thread % kLanes + j * kLanes;
      const bool exist = from && chunk * 16 < row_bytes;
      copy_async(tile + chunk_at<kRowBytes>(row, chunk), exist ? from + chunk * 16 : anywhere,
                 exist);
    }
  }
}

template <typename TCache, int kWidth, typename Table>
__device__ __forceinline__ void fetch_keys(char* tile, const AttentionParams& p, const Table& table,
                                           int stage) {
  constexpr int kBytes = sizeof(TCache);
  fetch_tile<kWidth * kBytes, 32>(tile, table.k[stage], p.k.width * kBytes, p.k_cache,
                                  threadIdx.x % 32);
}

template <typename TCache, int kWidthV, typename Table>
__device__ __forceinline__ void fetch_values(char* tile, const AttentionParams& p,
                                             const Table& table, int stage) {
  constexpr int kBytes = sizeof(TCache);
  fetch_tile<kWidthV * kBytes, 32>(tile, table.v[stage], p.v.width * kBytes, p.v_cache,
                                   threadIdx.x % 32);
}

// --- Queries -------------------------------------------------------------------------------------

// What the elements of a query are divided by before they are rounded to fp16: a power of two, such
// that the largest becomes 2**14 to 2**15, if it is a normal number at all. fp16 holds all bits of
// a bfloat16 down to 2**-14, so elements are exact down to 2**-29 of the largest, and no error is
// above 2**-39 of it.
__device__ __forceinline__ float query_scale(float largest) {
  constexpr float kRoom = __builtin_bit_cast(float, 0x38800000);  // 2 to the -14
  const float power = __uint_as_float(__float_as_uint(largest) & 0x7f800000u);
  return fminf(fmaxf(power * kRoom, kSmallestScale), kLargestScale * kRoom * 2.0f);
}

// Bring the queries of a block to shared memory as `multiply_keys` takes them; eight lanes share a
// row. Others see them after a barrier. Of four bits: `load_four_bit_queries`.
template <typename TCache, int kWidth, int kRows = kDecodeRows>
__device__ __forceinline__ void load_queries(char* queries, DecodeTile& shared,
                                             const AttentionParams& p, const AttentionTile& t,
                                             int kv_head) {
  constexpr int kBlocks = kWidth / 16;     // of 16 elements, per row
  constexpr int kOwn = (kBlocks + 7) / 8;  // of a lane
  const int row = threadIdx.x / 8;
  if (kRows < kDecodeRows && row >= kRows) return;  // a whole warp
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
    scale = query_scale(max_within_warp(largest, 8));
    const float inverse = inverse_of_power(scale);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* four = floats[i].values + 4 * j;
        // Four bytes of a key become two pairs of every other element; four bits are in order.
        constexpr bool kInOrder = kFourBit<TCache>;
        const float* x = kInOrder ? floats[i].values + 2 * j : four;
        const float* y = kInOrder ? x + 8 : four + 1;
        constexpr int kStep = kInOrder ? 1 : 2;
        words[i][0].values[j] = pack_pair<half>(x[0] * inverse, x[kStep] * inverse);
        words[i][1].values[j] = pack_pair<half>(y[0] * inverse, y[kStep] * inverse);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int block = threadIdx.x % 8 + i * 8;
    if (block >= kBlocks) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      words[i][j].store(queries + chunk_offset<kWidth>(row, block * 2 + j));
    }
  }
  if (threadIdx.x % 8 == 0) shared.query_scales[row] = scale;
}

// --- Masks ---------------------------------------------------------------------------------------

// Find which keys the rows see. Others see the result after a barrier.
template <int kRows = kDecodeRows, typename Tile>
__device__ __forceinline__ void set_limits(Tile& shared, const AttentionParams& p,
                                           const AttentionTile& t) {
  const int row = threadIdx.x;
  if (row < kRows) {
    const i64 position = position_of(p, t, row);
    shared.limits[row] = limits_of(p, t, position, position);
  } else if (row == kRows) {
    shared.seen_by_all = seen_by_all(p, t);
  }
}

// --- Values --------------------------------------------------------------------------------------

// Half of an A fragment, and what its rounding lost as another.
template <typename T>
__device__ __forceinline__ void split_pair(float x, float y, u32& pair, u32& rest) {
  pair = pack_pair<T>(x, y);
  rest = pack_pair<T>(x - lower_of<T>(pair), y - upper_of<T>(pair));
}

// Likewise of weights, which are not rounded to nearest, but to numbers below: so neither part is
// zero, nor has another sign, and the product of each with an infinity is that infinity. Of fp16
// that holds of weights from 2**-23 on; smaller ones times an infinity are NaN.
template <typename T>
__device__ __forceinline__ void split_weights(float x, float y, u32& pair, u32& rest) {
  constexpr bool kIsHalf = kSameType<T, half>;
  constexpr float kHalfUnit = kIsHalf ? 0x1p-11f : 0x1p-8f;
  constexpr float kBelow = 1.0f - kHalfUnit * (1.0f + 0x1p-6f);
  constexpr float kSmallest = kIsHalf ? 0x1p-24f : 0.0f;
  // Weights of 0 have no parts, so that keys which a row does not see do not change its sums.
  pair = pack_pair<T>(fmaxf(fmaf(x, kBelow, -kSmallest), 0.0f),
                      fmaxf(fmaf(y, kBelow, -kSmallest), 0.0f));
  rest = pack_pair<T>(x - lower_of<T>(pair), y - upper_of<T>(pair));
}

// Weights of 16 keys and kRows rows, as a left factor of 16 or a right one of eight, and what their
// rounding lost as another.
template <int kRows>
struct WeightPairs {
  u32 pairs[kRows / 4];
  u32 rests[kRows / 4];
};

// o += weights * values of 16 keys and twice eight columns: pairs of two keys. Sums of 16 rows are
// two products with eight columns each; sums of eight, one with the columns as its rows.
template <typename T, int kRows, int kValues>
__device__ __forceinline__ void add_weighted(float (&o)[kValues][4], int index,
                                             const WeightPairs<kRows>& weights,
                                             const u32 (&first)[2], const u32 (&second)[2]) {
  if constexpr (kRows == 16) {
    mma_m16n8k16<T>(o[2 * index], weights.pairs, first[0], first[1]);
    mma_m16n8k16<T>(o[2 * index], weights.rests, first[0], first[1]);
    mma_m16n8k16<T>(o[2 * index + 1], weights.pairs, second[0], second[1]);
    mma_m16n8k16<T>(o[2 * index + 1], weights.rests, second[0], second[1]);
  } else {
    const u32 values[4] = {first[0], second[0], first[1], second[1]};
    mma_m16n8k16<T>(o[index], values, weights.pairs[0], weights.pairs[1]);
    mma_m16n8k16<T>(o[index], values, weights.rests[0], weights.rests[1]);
  }
}

// o += weights * values of the keys of a tile, columns from chunk `first_chunk` on. Weights keep
// twice the bits of T: memory bounds this, and tensor cores have the time.
template <typename TCache, int kRowBytes, int kScores, int kOwn, int kValues>
__device__ __forceinline__ void multiply_values(float (&o)[kValues][4],
                                                const float (&s)[kScores][kOwn], const char* values,
                                                int first_chunk) {
  using T = MmaFormat<TCache>;
  constexpr int kRows = kOwn * 4;
  constexpr int kColumns = kRows == 16 ? 8 : 16;  // of a product
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kScores / 2; ++k) {
    WeightPairs<kRows> weights;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float (&pairs)[kOwn] = s[2 * k + i / (kOwn / 2)];
      const int at = i % (kOwn / 2) * 2;
      split_weights<T>(pairs[at], pairs[at + 1], weights.pairs[i], weights.rests[i]);
    }
#pragma unroll
    for (int n = 0; n < kValues * kColumns * static_cast<int>(sizeof(TCache)) / 32; ++n) {
      u32 b[4];  // of either chunk, keys 0 to 7 and 8 to 15
      load_matrices<true>(
          b, values + chunk_at<kRowBytes>(k * 16 + lane % 16, first_chunk + n * 2 + lane / 16));
      if constexpr (sizeof(TCache) == 2) {
        add_weighted<T>(o, n, weights, {b[0], b[1]}, {b[2], b[3]});
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 even[2];
          u32 odd[2];
          to_half_pairs<TCache>(b[2 * i], even[0], odd[0]);
          to_half_pairs<TCache>(b[2 * i + 1], even[1], odd[1]);
          if constexpr (kValues > 24) __syncwarp();  // else conversions come too early, and spill
          add_weighted<T>(o, 2 * n + i, weights, even, odd);
        }
      }
    }
  }
}

// The weights that meet values are relative to the largest scale of V so far, a power of two:
// raise that, and return the inverse.
template <int kScores, int kValues>
__device__ __forceinline__ float raise_value_scale(const float (&scales)[kScores][2],
                                                   float& largest, float (&o)[kValues][4]) {
  float top = 0.0f;
#pragma unroll
  for (int n = 0; n < kScores; ++n) {
    top = fmaxf(top, fmaxf(fabsf(scales[n][0]), fabsf(scales[n][1])));
  }
  top = power_of_two_below(max_within_warp(top, 4));
  if (top > largest) {  // for all lanes alike
    const float rescale = largest * inverse_of_power(top);
    largest = top;
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale;
    }
  }
  return inverse_of_power(largest);
}

// Write what a warp has of the weighted values to its part of shared memory. `unit_of(index)` is
// what those that `add_weighted` adds to with an index are multiplied by.
template <typename TCache, int kWidthV, int kRows, typename Units>
__device__ __forceinline__ void leave_values(float* values,
                                             const float (&o)[kWidthV * kRows / 128][4],
                                             const Units& unit_of) {
  constexpr int kStride = kWidthV + kValuePadding;
  constexpr bool kRowsAreColumns = kRows == 8;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < kRows / 8; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_eight = kRowsAreColumns ? g : t * 2 + i;  // of the columns of a product
      float* row = values + (kRowsAreColumns ? t * 2 + i : g + h * 8) * kStride;
#pragma unroll
      for (int n = 0; n < kWidthV / 16; ++n) {
        const float unit = unit_of(n);
        const float first = (kRowsAreColumns ? o[n][i] : o[2 * n][2 * h + i]) * unit;
        const float second = (kRowsAreColumns ? o[n][2 + i] : o[2 * n + 1][2 * h + i]) * unit;
        if constexpr (sizeof(TCache) == 2) {
          row[n * 16 + of_eight] = first;
          row[n * 16 + 8 + of_eight] = second;
        } else {
          const int column =
              kFourBit<TCache> ? n / 2 * 32 + of_eight * 4 + n % 2 * 2 : n * 16 + of_eight * 2;
          *reinterpret_cast<float2*>(row + column) = make_float2(first, second);
        }
      }
    }
  }
}

// Write four neighbouring elements of a row, or zeros where no key was seen.
__device__ __forceinline__ void store_four(const RowEnd& end, int column,
                                           const Pack<float, 4>& values) {
  const float inverse = end.divisor != 0.0f ? __fdiv_rn(1.0f, end.divisor) : 0.0f;
  Pack<float, 4> results;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    results.values[i] = end.divisor != 0.0f ? values.values[i] * inverse : 0.0f;
  }
  if (end.format == 0) {
    results.store(end.out + column * 4);
    return;
  }
  Pack<u32, 2> pairs;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x = results.values[2 * i];
    const float y = results.values[2 * i + 1];
    pairs.values[i] = end.format == 1 ? pack_pair<half>(x, y) : pack_pair<bfloat16>(x, y);
  }
  pairs.store(end.out + column * 2);
}
