// Paged attention of many packed rows over wide rows on tensor cores: decode with multi-head latent
// attention, all of whose query heads share one latent.
//
// What attention_decode_latent.cu brings from shared memory to registers feeds one or two products:
// enough where 16 heads share a latent, which memory bounds, but not where 128 do. Here a block
// takes 64 packed rows, in two groups of 32, and each fragment of a latent meets all 32 rows of a
// group. Four warps share a group:
//
//   scores: a warp multiplies 32 rows by all keys of a tile, in a quarter of the depth, and the
//           four quarters meet in shared memory
//   weights: a warp adds up 8 rows, hides keys, and leaves weights in shared memory. With one new
//           token per sequence each is two numbers of 16 bits, so that they keep twice the bits
//   values: a warp multiplies the weights of 32 rows by 128 columns
//
// Sums of 32 x 128 values stay in registers. Of the queries, which no two warps share, some
// fragments do too, and the others lie in shared memory for the lane that reads them.
//
//   tile(n) arrives | Q K^T, in parts | parts are there | sums, weights | they are there | O += P V
//                     fetch tile(n + 1)
//
// Formats of 8 bits, scales and masks are as in attention_decode_mma.cu; values that lie elsewhere
// take the place of the keys, as in attention_decode_latent.cu.
//
// Bytes: each visible latent once per 64 rows; Q and the output once. Per latent of 16 bits and 64
// rows 9.9 KB pass through shared memory, for 50 products (m16n8k16).
#include "attention_latent.cuh"

constexpr int kHeadsRows = 64;
constexpr int kHeadsWarps = 8;
constexpr int kHeadsThreads = kHeadsWarps * 32;
constexpr int kGroupWarps = 4;
constexpr int kGroupRows = 32;
constexpr int kHeadsStages = 2;
constexpr int kHeadsTables = kHeadsStages + 1;  // the next is written while others are in use
constexpr int kDepthSteps = kLatentWidth / 16 / kGroupWarps;  // of a warp
template <int kKeys>
constexpr int kHeldSteps = kKeys == 32 ? 3 : 4;  // of which queries are in registers
constexpr int kWarpColumns = kLatentWidthV / kGroupWarps;
constexpr int kColumnProducts = kWarpColumns / 8;  // products next to each other, per 16 rows

// Rarely read, so kept out of registers.
struct HeadsTile {
  AttentionTile tile;
  KeyRange range;
  RowLimits limits[kHeadsRows];  // but for kept keys and trees
  RowLimits seen_by_all;
  float query_scales[kHeadsRows];
  float rescales[kHeadsRows];  // of values, since the last tile
  float tops[kHeadsRows];      // in the end: the largest logit, and the sum of weights against it
  float sums[kHeadsRows];
};

// The layout of dynamic shared memory. In the end weighted values take the place of all but the
// tables.
template <typename TCache, int kKeys>
struct HeadsShape {
  static_assert(kKeys == 16 || kKeys == 32, "a lane looks up a key");
  using Table = DecodeTable<TCache, kHeadsTables, kKeys>;
  static constexpr int kRowBytes = kLatentWidth * static_cast<int>(sizeof(TCache));
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kWeightBytes = kKeys * 4;  // of a row: 16 bits each, then the rest of each
  static constexpr int kSumBytes = 32 * kKeys;    // 8 rows of float32
  static constexpr int kOwnBytes = 16 * (kWarpColumns + kValuePadding) * 4;  // of values, at once
  static constexpr int kOwnQueryBytes = (kDepthSteps - kHeldSteps<kKeys>)*2 * 512;
  static constexpr int kQueryAt = kHeadsStages * kTileBytes;
  static constexpr int kSumsAt = kQueryAt + kHeadsWarps * kOwnQueryBytes;
  static constexpr int kWeightsAt = kSumsAt + kHeadsWarps * 3 * kSumBytes;
  static constexpr int kTableAt = kWeightsAt + kHeadsRows * kWeightBytes;
  static constexpr int kTileAt = kTableAt + static_cast<int>(sizeof(Table));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(HeadsTile));
  static_assert(kHeadsWarps * kOwnBytes <= kTableAt, "values fit before the tables");
};

// --- Queries -------------------------------------------------------------------------------------

// The queries of a lane: of rows g, g + 8, g + 16 and g + 24 of a group, in a quarter of the depth.
struct OwnQueries {
  const char* rows[4];  // null: no row
  float scales[4];      // what elements of 8 bits meet is divided by these
};

// Elements 4t to 4t + 3 of 16, or zeros.
__device__ __forceinline__ void load_four(float (&four)[4], const AttentionParams& p,
                                          const char* row, int depth) {
  const int column = depth + threadIdx.x % 4 * 4;
  Pack<u32, 2> pairs = {};
  if (row && column < p.k.width) pairs.load(row + column * 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 pair = pairs.values[i / 2];
    if (p.query_format == 1) {
      four[i] = i % 2 ? upper_of<half>(pair) : lower_of<half>(pair);
    } else {
      four[i] = i % 2 ? upper_of<bfloat16>(pair) : lower_of<bfloat16>(pair);
    }
  }
}

// The fragment of 16 rows from the m-th on, and 16 elements from `depth` on.
template <typename TCache>
__device__ __forceinline__ void load_fragment(u32 (&a)[4], const AttentionParams& p,
                                              const OwnQueries& queries, int m, int depth) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const char* row = queries.rows[2 * m + h];
    if constexpr (sizeof(TCache) == 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = depth + i * 8 + threadIdx.x % 4 * 2;
        a[2 * i + h] = 0;
        if (row && column < p.k.width)
          a[2 * i + h] = *reinterpret_cast<const u32*>(row + column * 2);
      }
    } else {
      float four[4];
      load_four(four, p, row, depth);
      const float inverse = inverse_of_power(queries.scales[2 * m + h]);
      a[h] = pack_pair<half>(four[0] * inverse, four[2] * inverse);
      a[2 + h] = pack_pair<half>(four[1] * inverse, four[3] * inverse);
    }
  }
}

// The largest magnitude of the elements of a row that this lane and its neighbours have.
__device__ __forceinline__ float largest_of_quarter(const AttentionParams& p, const char* row,
                                                    int depth) {
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < kDepthSteps; ++k) {
    float four[4];
    load_four(four, p, row, depth + k * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(four[i]));
  }
  return max_within_warp(largest, 4);
}

// --- Products ------------------------------------------------------------------------------------

// Start copying the rows of a tile. Threads that share a row copy neighbouring chunks.
template <int kRowBytes, int kKeys>
__device__ __forceinline__ void fetch_rows(char* tile, const char* const (&rows)[kKeys],
                                           int row_bytes, const char* anywhere) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kLanes = kHeadsThreads / kKeys;
  const int row = threadIdx.x / kLanes;
  const char* from = rows[row];
#pragma unroll
  for (int j = 0; j < (kChunks + kLanes - 1) / kLanes; ++j) {
    const int chunk = threadIdx.x % kLanes + j * kLanes;
    if (kChunks % kLanes != 0 && chunk >= kChunks) break;
    const bool exist = from && chunk * 16 < row_bytes;
    copy_async(tile + chunk_at<kRowBytes>(row, chunk), exist ? from + chunk * 16 : anywhere, exist);
  }
}

// Scores of 32 rows and the keys of a tile, in this warp's quarter of the depth: product n of 16
// rows is of keys 8n to 8n + 7.
template <typename TCache, int kKeys>
__device__ __forceinline__ void multiply_depth(float (&s)[2][kKeys / 8][4], const char* keys,
                                               const u32 (&query)[kHeldSteps<kKeys>][2][4],
                                               const char* queries, int quarter) {
  using T = MmaFormat<TCache>;
  constexpr int kRowBytes = HeadsShape<TCache, kKeys>::kRowBytes;
  constexpr int kHeld = kHeldSteps<kKeys>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepthSteps; ++k) {
    u32 a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (k < kHeld) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = query[k < kHeld ? k : 0][m][i];
      } else {
        Pack<u32, 4> own;
        own.load(queries + ((k - kHeld) * 2 + m) * 512 + lane * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = own.values[i];
      }
    }
    if constexpr (sizeof(TCache) == 2) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        u32 b[4];  // both chunks of keys 0 to 7, then of keys 8 to 15
        load_matrices<false>(
            b, keys + chunk_at<kRowBytes>(n * 16 + lane % 8 + lane / 16 * 8,
                                          (quarter * kDepthSteps + k) * 2 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_m16n8k16<T>(s[m][2 * n], a[m], b[0], b[1]);
          mma_m16n8k16<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    } else {
      u32 b[4];  // one chunk of 32 keys, or of 16 keys twice
      load_matrices<false>(b, keys + chunk_at<kRowBytes>(lane % kKeys, quarter * kDepthSteps + k));
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        u32 even;
        u32 odd;
        to_half_pairs<TCache>(b[n], even, odd);
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16<T>(s[m][n], a[m], even, odd);
      }
    }
  }
}

// o += weights * values of the keys of a tile, for 32 rows and the columns from chunk `first_chunk`
// on. Columns of values of 8 bits are as in `multiply_values`. kParts: numbers that a weight is.
template <typename TCache, int kKeys, int kParts>
__device__ __forceinline__ void multiply_columns(float (&o)[2 * kColumnProducts][4],
                                                 const char* weights, const char* values,
                                                 int first_chunk) {
  using T = MmaFormat<TCache>;
  using Shape = HeadsShape<TCache, kKeys>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    u32 a[2][kParts][4];  // weights of 16 rows, and what their rounding lost
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        load_matrices<false>(
            a[m][i], weights + chunk_at<Shape::kWeightBytes>(m * 16 + lane % 16,
                                                             i * (kKeys / 8) + k * 2 + lane / 16));
      }
    }
    const auto multiply = [&](int n, u32 b0, u32 b1) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16<T>(o[m * kColumnProducts + n], a[m][i], b0, b1);
      }
    };
#pragma unroll
    for (int n = 0; n < kColumnProducts * static_cast<int>(sizeof(TCache)) / 4; ++n) {
      u32 b[4];  // of either chunk, keys 0 to 7 and 8 to 15
      load_matrices<true>(b, values + chunk_at<Shape::kRowBytes>(k * 16 + lane % 16,
                                                                 first_chunk + n * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (sizeof(TCache) == 2) {
          multiply(2 * n + i, b[2 * i], b[2 * i + 1]);
        } else {
          u32 even[2];
          u32 odd[2];
          to_half_pairs<TCache>(b[2 * i], even[0], odd[0]);
          to_half_pairs<TCache>(b[2 * i + 1], even[1], odd[1]);
          __syncwarp();  // otherwise NVRTC 13 hoists the conversions and spills
          multiply(4 * n + 2 * i, even[0], even[1]);
          multiply(4 * n + 2 * i + 1, odd[0], odd[1]);
        }
      }
    }
  }
}

// --- Sums of scores ------------------------------------------------------------------------------

// Leave a warp's part of the scores to those that own the rows, 8 each, and keep its own.
template <int kKeys>
__device__ __forceinline__ void leave_scores(float (&own)[kKeys / 8][2],
                                             const float (&s)[2][kKeys / 8][4], char* sums,
                                             int quarter) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int owner = 0; owner < kGroupWarps; ++owner) {
    char* to = sums + (owner * 3 + ((quarter - owner - 1) & 3)) * (32 * kKeys) + lane * 16;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      const float (&first)[4] = s[owner / 2][n];
      const float (&second)[4] = s[owner / 2][n + 1];
      const int h = owner % 2 * 2;
      if (owner == quarter) {
        own[n][0] = first[h];
        own[n][1] = first[h + 1];
        own[n + 1][0] = second[h];
        own[n + 1][1] = second[h + 1];
      } else {
        const Pack<float, 4> four = {{first[h], first[h + 1], second[h], second[h + 1]}};
        four.store(to + n / 2 * 512);
      }
    }
  }
}

// Add what the other warps left.
template <int kKeys>
__device__ __forceinline__ void add_scores(float (&own)[kKeys / 8][2], const char* sums,
                                           int owner) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      Pack<float, 4> four;
      four.load(sums + (owner * 3 + i) * (32 * kKeys) + n / 2 * 512 + lane * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) own[n + j / 2][j % 2] += four.values[j];
    }
  }
}

// --- The kernel ----------------------------------------------------------------------------------

// TCache: as of attention_decode_mma. kKeys: per tile, as shared memory allows. K rows of at most
// 576 elements, V rows of at most 512.
// grid: (H, pieces), block: 256, smem: HeadsShape::kBytes
template <typename TCache, int kKeys>
__global__ void __launch_bounds__(kHeadsThreads, 1)
    attention_decode_heads(const __grid_constant__ AttentionParams p) {
  using Shape = HeadsShape<TCache, kKeys>;
  using T = MmaFormat<TCache>;
  constexpr int kHeld = kHeldSteps<kKeys>;
  constexpr int kScores = kKeys / 8;
  constexpr int kBytes = sizeof(TCache);
  const int kv_head = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int quarter = warp % kGroupWarps;  // of the depth, of a group's rows, and of the columns
  const int group_row = warp / kGroupWarps * kGroupRows;
  const int warp_row = warp * 8;
  char* ring = dynamic_shared<char>();
  char* queries = ring + Shape::kQueryAt + warp * Shape::kOwnQueryBytes;
  char* sums = ring + Shape::kSumsAt + warp / kGroupWarps * (kGroupWarps * 3 * Shape::kSumBytes);
  char* weights = ring + Shape::kWeightsAt + group_row * Shape::kWeightBytes;
  auto& table = *reinterpret_cast<typename Shape::Table*>(ring + Shape::kTableAt);
  auto& shared = *reinterpret_cast<HeadsTile*>(ring + Shape::kTileAt);
  if (!begin_block<kKeys, kHeadsRows>(shared, p, kv_head)) return;
  const AttentionTile& t = shared.tile;
  const i64 begin = shared.range.begin;
  const i64 end = shared.range.end;
  const int num_tiles = static_cast<int>((end - begin + kKeys - 1) / kKeys);
  const bool has_rows = group_row < t.num_rows;
  const auto fetch = [&](int number) {
    fetch_rows<Shape::kRowBytes>(ring + number % kHeadsStages * Shape::kTileBytes,
                                 table.k[number % kHeadsTables], p.k.width * kBytes, p.k_cache);
  };

  // Queries
  if (warp == 0) {
    for (int number = 0; number < kHeadsStages; ++number) {
      set_rows(table, number, p, t, look_up<kKeys>(p, t, begin + number * kKeys + lane, end));
    }
  }
  set_limits<kHeadsRows>(shared, p, t);
  const int depth = quarter * (kDepthSteps * 16);
  OwnQueries own_queries;
  float* query_tops = reinterpret_cast<float*>(ring + Shape::kSumsAt);  // [quarters, rows]
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = group_row + i * 8 + lane / 4;
    own_queries.rows[i] = row < t.num_rows ? query_row(p, t, row, kv_head) : nullptr;
    own_queries.scales[i] = 1.0f;
    if constexpr (kBytes == 1) {
      const float largest = largest_of_quarter(p, own_queries.rows[i], depth);
      if (lane % 4 == 0) query_tops[quarter * kHeadsRows + row] = largest;
    }
  }
  __syncthreads();  // the first tables and limits are there, and what quarters of queries reach
  if (num_tiles > 0) fetch(0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = group_row + i * 8 + lane / 4;
    if constexpr (kBytes == 1) {
      float largest = 0.0f;
#pragma unroll
      for (int j = 0; j < kGroupWarps; ++j) {
        largest = fmaxf(largest, query_tops[j * kHeadsRows + row]);
      }
      own_queries.scales[i] = query_scale(largest);
    }
    if (quarter == i && lane % 4 == 0) shared.query_scales[row] = own_queries.scales[i];
  }
  u32 query[kHeld][2][4];
#pragma unroll
  for (int k = 0; k < kDepthSteps; ++k) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      Pack<u32, 4> a;
      load_fragment<TCache>(a.values, p, own_queries, m, depth + k * 16);
      if (k < kHeld) {
#pragma unroll
        for (int i = 0; i < 4; ++i) query[k < kHeld ? k : 0][m][i] = a.values[i];
      } else {
        a.store(queries + ((k - kHeld) * 2 + m) * 512 + lane * 16);
      }
    }
  }
  __syncwarp();  // the scales of its rows are there

  const bool fetches_values = values_lie_elsewhere(p);
  const float k_scale = p.k_scale_cache ? 1.0f : static_scale(p.k_scale, p.k, kv_head);
  const float factor = shared.query_scales[warp_row + lane / 4] * (p.score_scale * k_scale);
  float largest = -kInfinity;           // of row g of this warp's 8: logit, base 2
  float sum = 0.0f;                     // of this lane's weights, against the largest
  const bool rounds = p.cu_query_lens;  // weights, as prefill does
  float o[2 * kColumnProducts][4] = {};
  float value_scale = p.v_scale_cache ? kSmallestScale : static_scale(p.v_scale, p.v, kv_head);

  for (int number = 0; number < num_tiles; ++number) {
    char* tile = ring + number % kHeadsStages * Shape::kTileBytes;
    const int entry = number % kHeadsTables;
    const i64 first = begin + i64{number} * kKeys;
    wait_for_copies();
    __syncthreads();  // the tile has arrived, and the last is no longer needed
    if (number + 1 < num_tiles) fetch(number + 1);

    // Scores
    float own[kScores][2] = {};
    if (has_rows) {
      float s[2][kScores][4] = {};
      multiply_depth<TCache, kKeys>(s, tile, query, queries, quarter);
      leave_scores<kKeys>(own, s, sums, quarter);
    }
    __syncthreads();  // all parts of scores are there, and the keys are no longer needed
    if (fetches_values) {
      fetch_rows<Shape::kRowBytes>(tile, table.v[entry], p.v.width * kBytes, p.v_cache);
      wait_for_copies();
    }

    // Weights
    if (has_rows) {
      add_scores<kKeys>(own, sums, quarter);
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          own[n][i] *= factor;
          if (p.k_scale_cache) own[n][i] *= table.k_scales[entry][n * 8 + lane % 4 * 2 + i];
          if (p.soft_cap > 0.0f) own[n][i] = p.cap_scale * tanhf(own[n][i] * p.inverse_cap);
        }
      }
      const u32 present[1] = {table.present[entry]};
      hide_keys(own, present, shared.limits, shared.seen_by_all, p, t, warp_row, first);
      float top = largest;
#pragma unroll
      for (int n = 0; n < kScores; ++n) top = fmaxf(top, fmaxf(own[n][0], own[n][1]));
      top = max_within_warp(top, 4);
      const float base = top == -kInfinity ? 0.0f : top;  // nothing seen: all weights are 0
      const float rescale = power_of_two(largest - base);
      largest = top;
      sum *= rescale;
      if (lane % 4 == 0) shared.rescales[warp_row + lane / 4] = rescale;
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          own[n][i] = power_of_two(own[n][i] - base);
          sum += own[n][i];
        }
      }
      if (p.v_scale_cache) {
        float scales[kScores][2];
#pragma unroll
        for (int n = 0; n < kScores; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scales[n][i] = table.v_scales[entry][n * 8 + lane % 4 * 2 + i];
          }
        }
        const float inverse = raise_value_scale(scales, value_scale, o);
#pragma unroll
        for (int n = 0; n < kScores; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) own[n][i] *= scales[n][i] * inverse;
        }
      }
      char* to = weights + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
        const int row = quarter * 8 + lane / 4;
        u32 pair = pack_pair<T>(own[n][0], own[n][1]);
        u32 rest = 0;
        if (!rounds) split_weights<T>(own[n][0], own[n][1], pair, rest);
        *reinterpret_cast<u32*>(to + chunk_at<Shape::kWeightBytes>(row, n)) = pair;
        *reinterpret_cast<u32*>(to + chunk_at<Shape::kWeightBytes>(row, n + kScores)) = rest;
      }
    }
    KeyPlace next = {};  // on its way while values are multiplied
    if (warp == 0) {
      next = look_up<kKeys>(p, t, first + kHeadsStages * kKeys + lane, end);
    }
    __syncthreads();  // weights are there, and values that lie elsewhere

    // Values
    if (has_rows) {
      float rescales[4];
      bool raised = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rescales[i] = shared.rescales[group_row + i * 8 + lane / 4];
        raised = raised || rescales[i] != 1.0f;
      }
      if (__any_sync(kAllLanes, raised)) {
#pragma unroll
        for (int n = 0; n < 2 * kColumnProducts; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= rescales[n / kColumnProducts * 2 + i / 2];
        }
      }
      const int first_chunk = quarter * kWarpColumns * kBytes / 16;
      if (rounds) {
        multiply_columns<TCache, kKeys, 1>(o, weights, tile, first_chunk);
      } else {
        multiply_columns<TCache, kKeys, 2>(o, weights, tile, first_chunk);
      }
    }
    if (warp == 0) set_rows(table, (number + kHeadsStages) % kHeadsTables, p, t, next);
  }

  // Store
  wait_for_copies();  // of scales, to tables past the last
  sum = sum_within_warp(sum, 4);
  if (lane % 4 == 0) {
    shared.tops[warp_row + lane / 4] = largest;
    shared.sums[warp_row + lane / 4] = sum;
  }
  __syncthreads();  // sums of rows are there, and nothing before the tables is needed
  char* values = ring + warp * Shape::kOwnBytes;
  const int column = quarter * kWarpColumns + lane * 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    leave_values<TCache, kWarpColumns, 16>(
        reinterpret_cast<float*>(values),
        reinterpret_cast<const float (&)[kColumnProducts][4]>(o[m * kColumnProducts]),
        [&](int) { return value_scale; });
    __syncwarp();  // the results of 16 rows are there
    for (int i = 0; i < 16; ++i) {
      const int row = group_row + m * 16 + i;
      if (row >= t.num_rows) break;
      const RowEnd row_end = end_of_row(p, t, row, kv_head, shared.tops[row], shared.sums[row]);
      if (column < p.v.width) {
        Pack<float, 4> four;
        four.load(values + (i * (kWarpColumns + kValuePadding) + lane * 4) * 4);
        store_four(row_end, column, four);
      }
      if (quarter == 0 && lane == 0 && row_end.lse) *row_end.lse = row_end.lse_value;
    }
    __syncwarp();  // and have been written
  }
}
