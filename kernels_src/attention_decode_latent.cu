// Paged attention of few packed rows over wide rows on tensor cores: decode with multi-head latent
// attention, whose values are the first elements of its keys.
//
// A block takes 16 packed rows, and its four warps share each tile of 32 keys: a warp multiplies
// the queries by 8 of the keys, scores meet in shared memory, and then it multiplies the weights of
// all 32, which every warp computes, by 128 columns of the values. So a latent is fetched once and
// serves as key and as value. Where values lie elsewhere they take the place of the keys once those
// have been used, and nobody has fetched them early.
//
//   tile(n) arrives | Q K^T -> scores | all scores are there | weights, O += P V |
//   fetch tile(n + 2)
//
// Formats of 8 bits, scales and masks are as in attention_decode_mma.cu. Codes of four bits come to
// registers, and become a tile once the one before is no longer needed. Of nvfp4 that is of fp16,
// with group scales, exactly. Others have a tile of codes alone, which are exact in bf16, and a
// scale for each 32 elements of a key: it meets the keys on the sums of a chunk, so that scores are
// exact, and the values on the weights, for which bf16 has the range.
//
// Bytes: each visible latent once per 16 rows; Q and the output once.
#include "attention_latent.cuh"
#include "attention_merge.cuh"

constexpr int kLatentKeys = 32;
constexpr int kOwnColumns = kLatentWidthV / kDecodeWarps;
constexpr int kScoreStride = kLatentKeys + 8;        // floats, so that rows differ in their banks
constexpr int kScaleStride = kLatentWidth / 32 + 2;  // likewise of keys; a multiple of four

// Whether tiles are of codes, with their scales aside.
template <typename TCache>
constexpr bool kScalesAside = kFourBit<TCache> && !kSameType<TCache, nvfp4>;

// The layout of dynamic shared memory. In the end weighted values take the place of the tiles.
template <typename TCache>
struct LatentShape {
  using Coded = SelectType<kScalesAside<TCache>, bfloat16, half>;
  using Element = SelectType<kFourBit<TCache>, Coded, TCache>;  // of a tile
  static constexpr int kStages = kFourBit<TCache> ? 1 : 2;
  // Tiles whose rows are known: those in the ring, those whose codes are in registers, and the
  // next.
  static constexpr int kAhead = kStages + kFourBit<TCache>;
  static constexpr int kTables = kAhead + 1;
  using Table = DecodeTable<SelectType<kFourBit<TCache>, int8, TCache>, kTables, kLatentKeys>;
  static constexpr int kRowBytes = kLatentWidth * static_cast<int>(sizeof(Element));
  static constexpr int kScalesAt = kLatentKeys * kRowBytes;  // in a tile
  static constexpr int kScaleBytes = kScalesAside<TCache> ? kLatentKeys * kScaleStride * 4 : 0;
  static constexpr int kTileBytes = kScalesAt + kScaleBytes;
  static constexpr int kOwnBytes = kDecodeRows * (kOwnColumns + kValuePadding) * 4;
  static_assert(kDecodeWarps * kOwnBytes <= kStages * kTileBytes, "values fit into the ring");
  static constexpr int kQueryAt = kStages * kTileBytes;
  static constexpr int kQueryBytes = kDecodeRows * kLatentWidth * 2;
  // What rounding to bf16 left of queries.
  static constexpr int kRestAt = kQueryAt + (kScalesAside<TCache> ? kQueryBytes : 0);
  static constexpr int kScoresAt = kRestAt + kQueryBytes;
  static constexpr int kTableAt = kScoresAt + kDecodeRows * kScoreStride * 4;
  static constexpr int kTileAt = kTableAt + static_cast<int>(sizeof(Table));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(DecodeTile));
};

// Eight codes as bf16, exactly.
template <typename TCache>
__device__ __forceinline__ EightHalves codes_as_bfloat16(u32 codes) {
  EightHalves result;
  if constexpr (kE2m1<TCache>) {
    // Magnitudes choose from the bytes of 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
    constexpr u32 kUpper[2] = {0x3f3f3f00, 0x40404040};
    constexpr u32 kLower[2] = {0xc0800000, 0xc0804000};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 four = codes >> i * 16;
      const u32 signs = interleave_lower(four << 4, four) & 0x80808080;
      const u32 upper = __byte_perm(kUpper[0], kUpper[1], four & 0x7777) | signs;
      const u32 lower = __byte_perm(kLower[0], kLower[1], four & 0x7777);
      result.pairs[2 * i] = interleave_lower(lower, upper);
      result.pairs[2 * i + 1] = interleave_upper(lower, upper);
    }
  } else {
    // The last bit of a bf16 from 128 to 256 is worth 1.
    constexpr u32 kAligner = 0x43434343;   // upper bytes of 128
    constexpr u32 kOffset = 0xc308c308;    // -136
    const u32 above = codes ^ 0x88888888;  // two's complement plus 8
    const u32 even = above & 0x0f0f0f0f;
    const u32 odd = above >> 4 & 0x0f0f0f0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 four = i ? interleave_upper(even, odd) : interleave_lower(even, odd);
      result.pairs[2 * i] = add_bfloat16s(__byte_perm(four, kAligner, 0x4140), kOffset);
      result.pairs[2 * i + 1] = add_bfloat16s(__byte_perm(four, kAligner, 0x4342), kOffset);
    }
  }
  return result;
}

// Sixteen codes of a row, and the scale of their group. Codes of nvfp4 begin at a multiple of 4
// bytes, others of 2.
template <typename TCache>
struct CodedSixteen {
  using Word = SelectType<kScalesAside<TCache>, unsigned short, u32>;
  static constexpr int kWords = 8 / sizeof(Word);
  Word words[kWords];
  u32 scale_bits;

  // `row` is null where there is no key, and then the elements are zeros.
  __device__ __forceinline__ void load(const char* row, int sixteen, const KVOperand& operand) {
    scale_bits = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (!row || sixteen * 16 >= operand.width) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = reinterpret_cast<const Word*>(row)[sixteen * kWords + i];
    }
    const int group = sixteen * 16 >> group_shift<TCache>(operand);
    scale_bits = load_group_scale<TCache>(row + operand.group_scales.offset_bytes +
                                          group * kGroupScaleBytes<TCache>);
  }

  __device__ __forceinline__ u32 eight_codes(int i) const {
    if constexpr (kWords == 2) return words[i];
    return words[2 * i] | u32{words[2 * i + 1]} << 16;
  }

  __device__ __forceinline__ void store(char* tile, int row, int sixteen) const {
    u32 scale = 0;
    if constexpr (kScalesAside<TCache>) {
      if (sixteen % 2 == 0) {
        float* scales = reinterpret_cast<float*>(tile + LatentShape<TCache>::kScalesAt);
        scales[row * kScaleStride + sixteen / 2] = group_scale<TCache>(scale_bits);
      }
    } else {
      const u32 pair =
          kArch >= 890 ? halves_of_e4m3(scale_bits) : decode_e4m3_pair(lower_pair(scale_bits));
      scale = __byte_perm(pair, 0, 0x1010);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Pack<u32, 4> pairs;
      if constexpr (kScalesAside<TCache>) {
        const EightHalves eight = codes_as_bfloat16<TCache>(eight_codes(i));
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs.values[j] = eight.pairs[j];
      } else {
        const EightHalves eight = decode_e2m1x8(eight_codes(i));
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs.values[j] = multiply_halves(eight.pairs[j], scale);
      }
      pairs.store(tile + chunk_offset<kLatentWidth>(row, sixteen * 2 + i));
    }
  }
};

// What a thread has of the codes of a tile: neighbouring threads have neighbouring codes.
template <typename TCache>
struct CodedTile {
  static constexpr int kSixteens = kLatentWidth / 16;  // per row
  static constexpr int kOwn = kLatentKeys * kSixteens / kDecodeThreads;
  static_assert(kLatentKeys * kSixteens % kDecodeThreads == 0, "threads have equal shares");
  CodedSixteen<TCache> own[kOwn];

  __device__ __forceinline__ void load(const char* const* rows, const KVOperand& operand) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int number = threadIdx.x + i * kDecodeThreads;
      own[i].load(rows[number / kSixteens], number % kSixteens, operand);
    }
  }

  __device__ __forceinline__ void store(char* tile) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int number = threadIdx.x + i * kDecodeThreads;
      own[i].store(tile, number / kSixteens, number % kSixteens);
    }
  }
};

// Bring the queries of a block to shared memory as bf16, and what that left of fp16, if they are.
// Others see them after a barrier.
__device__ __forceinline__ void load_queries_as_bfloat16(char* queries, char* rest,
                                                         DecodeTile& shared,
                                                         const AttentionParams& p,
                                                         const AttentionTile& t, int kv_head) {
  const int row = threadIdx.x / 8;
  const char* from = row < t.num_rows ? query_row(p, t, row, kv_head) : nullptr;
#pragma unroll
  for (int i = 0; i < kLatentWidth / 64; ++i) {
    const int chunk = threadIdx.x % 8 + i * 8;
    Pack<u32, 4> pairs = {};
    if (from && chunk * 8 < p.k.width) pairs.load(from + chunk * 16);
    if (p.query_format == 1) {
      Pack<u32, 4> rests;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = floats_of_pair(pairs.values[j]);
        split_pair<bfloat16>(x.x, x.y, pairs.values[j], rests.values[j]);
      }
      rests.store(rest + chunk_offset<kLatentWidth>(row, chunk));
    }
    pairs.store(queries + chunk_offset<kLatentWidth>(row, chunk));
  }
  if (threadIdx.x % 8 == 0) shared.query_scales[row] = 1.0f;
}

// Scores of the 8 keys of this warp.
template <typename TCache>
__device__ __forceinline__ void multiply_latents(float (&s)[1][4], const char* keys,
                                                 const char* queries) {
  using T = MmaFormat<TCache>;
  constexpr int kRowBytes = LatentShape<TCache>::kRowBytes;
  using Element = typename LatentShape<TCache>::Element;
  constexpr int kSteps = sizeof(Element) == 2 ? 2 : 4;  // of depth 16 that four matrices cover
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 8 + lane % 8;
  float sums[2][4] = {};  // so that products do not all wait for one another
#pragma unroll 3
  for (int k = 0; k < kLatentWidth / 16; k += kSteps) {
    u32 b[4];
    load_matrices<false>(b, keys + chunk_at<kRowBytes>(row, k * 4 / kSteps + lane / 8));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      u32 a[4];
      load_matrices<false>(
          a, queries + chunk_offset<kLatentWidth>(lane % 16, (k + i) * 2 + lane / 16));
      if constexpr (sizeof(Element) == 2) {
        mma_m16n8k16<T>(sums[i % 2], a, b[2 * i], b[2 * i + 1]);
      } else {
        u32 even;
        u32 odd;
        to_half_pairs<Element>(b[i], even, odd);
        mma_m16n8k16<T>(sums[i % 2], a, even, odd);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][i] = sums[0][i] + sums[1][i];
}

// Likewise of a tile of codes. Queries are the sum of `num_parts`, one behind another.
template <typename TCache>
__device__ __forceinline__ void multiply_coded_latents(float (&s)[1][4], const char* tile,
                                                       const char* queries, int num_parts) {
  using Shape = LatentShape<TCache>;
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * 8;  // key of this warp
  const float* scales = reinterpret_cast<const float*>(tile + Shape::kScalesAt) +
                        (first + lane % 4 * 2) * kScaleStride;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][i] = 0.0f;
#pragma unroll 1
  for (int part = 0; part < num_parts; ++part, queries += Shape::kQueryBytes) {
#pragma unroll 3
    for (int chunk = 0; chunk < kLatentWidth / 32; ++chunk) {
      u32 b[4];
      load_matrices<false>(
          b, tile + chunk_at<Shape::kRowBytes>(first + lane % 8, chunk * 4 + lane / 8));
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 a[4];
        load_matrices<false>(
            a, queries + chunk_offset<kLatentWidth>(lane % 16, chunk * 4 + i * 2 + lane / 16));
        mma_m16n8k16<bfloat16>(sums, a, b[2 * i], b[2 * i + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[0][i] = fmaf(sums[i], scales[i % 2 * kScaleStride + chunk], s[0][i]);
      }
    }
  }
}

// o += weights * values of the columns of this warp, as `multiply_values` adds other elements.
template <typename TCache>
__device__ __forceinline__ void multiply_coded_values(float (&o)[kOwnColumns / 8][4],
                                                      const float (&s)[kLatentKeys / 8][4],
                                                      const char* tile) {
  using Shape = LatentShape<TCache>;
  constexpr int kChunks = kOwnColumns / 32;  // a scale each
  static_assert(kChunks == 4, "scales of a key are a word of 16 bytes");
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * kChunks;
#pragma unroll
  for (int k = 0; k < kLatentKeys / 16; ++k) {
    Pack<float, kChunks> scales[4];  // of the keys that the weights of this lane belong to
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = k * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2;
      scales[i].load(tile + Shape::kScalesAt + (key * kScaleStride + first) * 4);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      __syncwarp();  // else weights are multiplied too early, and spill
      u32 a[4];
      u32 rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = s[2 * k + i / 2] + i % 2 * 2;
        split_pair<bfloat16>(pair[0] * scales[i / 2 * 2].values[chunk],
                             pair[1] * scales[i / 2 * 2 + 1].values[chunk], a[i], rest[i]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        u32 b[4];  // of 16 columns, keys 0 to 7 and 8 to 15
        load_matrices<true>(
            b, tile + chunk_at<Shape::kRowBytes>(k * 16 + lane % 16,
                                                 (first + chunk) * 4 + n * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float (&sums)[4] = o[chunk * 4 + n * 2 + i];
          mma_m16n8k16<bfloat16>(sums, a, b[2 * i], b[2 * i + 1]);
          mma_m16n8k16<bfloat16>(sums, rest, b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }
}

// TCache: as of attention_decode_mma. K rows of at most 576 elements, V rows of at most 512.
// grid: (H, pieces), block: 128, smem: LatentShape::kBytes
template <typename TCache>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    attention_decode_latent(const __grid_constant__ AttentionParams p) {
  using Shape = LatentShape<TCache>;
  using Element = typename Shape::Element;
  constexpr int kBytes = sizeof(Element);
  constexpr int kAhead = Shape::kAhead;
  constexpr int kStages = Shape::kStages;
  const int kv_head = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  char* ring = dynamic_shared<char>();
  char* queries = ring + Shape::kQueryAt;
  float* scores = reinterpret_cast<float*>(ring + Shape::kScoresAt);
  auto& table = *reinterpret_cast<typename Shape::Table*>(ring + Shape::kTableAt);
  auto& shared = *reinterpret_cast<DecodeTile*>(ring + Shape::kTileAt);
  if (!begin_block<kLatentKeys>(shared, p, kv_head)) return;
  const AttentionTile& t = shared.tile;
  const i64 begin = shared.range.begin;
  const i64 end = shared.range.end;
  const int num_tiles = static_cast<int>((end - begin + kLatentKeys - 1) / kLatentKeys);
  const bool fetches_values = values_lie_elsewhere(p);
  [[maybe_unused]] CodedTile<TCache> coded;
  const auto fetch = [&](int number) {
    char* tile = ring + number % kStages * Shape::kTileBytes;
    if constexpr (kFourBit<TCache>) {
      coded.store(tile);
      if (number + 1 < num_tiles) coded.load(table.k[(number + 1) % Shape::kTables], p.k);
    } else {
      fetch_tile<Shape::kRowBytes, kDecodeThreads>(tile, table.k[number % Shape::kTables],
                                                   p.k.width * kBytes, p.k_cache, threadIdx.x);
    }
  };

  KeyPlace next = {};
  if (warp == 0) {
    for (int number = 0; number < kAhead; ++number) {
      set_rows(table, number, p, t,
               look_up<kLatentKeys>(p, t, begin + number * kLatentKeys + lane, end));
    }
    next = look_up<kLatentKeys>(p, t, begin + kAhead * kLatentKeys + lane, end);
  }
  if constexpr (kScalesAside<TCache>) {
    load_queries_as_bfloat16(queries, ring + Shape::kRestAt, shared, p, t, kv_head);
  } else {
    load_queries<TCache, kLatentWidth>(queries, shared, p, t, kv_head);
  }
  set_limits(shared, p, t);
  __syncthreads();  // the first tables, queries and limits are there
  if constexpr (kFourBit<TCache>) {
    if (num_tiles > 0) coded.load(table.k[0], p.k);
  }
#pragma unroll
  for (int number = 0; number < kStages; ++number) {
    if (number < num_tiles) fetch(number);
    end_copy_group();
  }

  const float k_scale = p.k_scale_cache ? 1.0f : static_scale(p.k_scale, p.k, kv_head);
  float factors[2];  // of the scores of rows g and g + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    factors[h] = shared.query_scales[lane / 4 + h * 8] * (p.score_scale * k_scale);
  }
  float largest[2] = {-kInfinity, -kInfinity};  // of rows g and g + 8: logit, base 2
  float sum[2] = {};                            // of this lane's weights, against the largest
  float o[kOwnColumns / 8][4] = {};
  float value_scale = p.v_scale_cache ? kSmallestScale : static_scale(p.v_scale, p.v, kv_head);

  for (int number = 0; number < num_tiles; ++number) {
    char* tile = ring + number % kStages * Shape::kTileBytes;
    const int entry = number % Shape::kTables;
    const i64 first = begin + i64{number} * kLatentKeys;
    wait_for_copy_groups<kStages - 1>();
    __syncthreads();  // the tile has arrived

    // Scores
    float own[1][4];
    if constexpr (kScalesAside<TCache>) {
      multiply_coded_latents<TCache>(own, tile, queries, p.query_format == 1 ? 2 : 1);
    } else {
      multiply_latents<TCache>(own, tile, queries);
    }
    const int column = warp * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[0][i] *= factors[i / 2];
      if (p.k_scale_cache) own[0][i] *= table.k_scales[entry][column + i % 2];
      if (p.soft_cap > 0.0f) own[0][i] = p.cap_scale * tanhf(own[0][i] * p.inverse_cap);
    }
    const u32 present[1] = {table.present[entry] >> warp * 8 & 0xffu};
    hide_keys(own, present, shared.limits, shared.seen_by_all, p, t, 0, first + warp * 8);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float2*>(scores + (lane / 4 + h * 8) * kScoreStride + column) =
          make_float2(own[0][2 * h], own[0][2 * h + 1]);
    }
    if (warp == 0) {
      set_rows(table, (number + kAhead) % Shape::kTables, p, t, next);
      next = look_up<kLatentKeys>(p, t, first + (kAhead + 1) * kLatentKeys + lane, end);
    }
    __syncthreads();  // all scores are there, and the next table
    if (fetches_values) {
      if constexpr (kFourBit<TCache>) {
        CodedTile<TCache> values_of_tile;
        values_of_tile.load(table.v[entry], p.v);
        values_of_tile.store(tile);
      } else {
        fetch_tile<Shape::kRowBytes, kDecodeThreads>(tile, table.v[entry], p.v.width * kBytes,
                                                     p.v_cache, threadIdx.x);
        wait_for_copies();
      }
      __syncthreads();  // values have taken the place of keys
    }

    // Weights
    float s[kLatentKeys / 8][4];
#pragma unroll
    for (int n = 0; n < kLatentKeys / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = *reinterpret_cast<const float2*>(
            scores + (lane / 4 + h * 8) * kScoreStride + n * 8 + lane % 4 * 2);
        s[n][2 * h] = pair.x;
        s[n][2 * h + 1] = pair.y;
      }
    }
    weigh(s, largest, sum, o);
    if (p.v_scale_cache) {
      float scales[kLatentKeys / 8][2];
#pragma unroll
      for (int n = 0; n < kLatentKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scales[n][i] = table.v_scales[entry][n * 8 + lane % 4 * 2 + i];
        }
      }
      const float inverse = raise_value_scale(scales, value_scale, o);
#pragma unroll
      for (int n = 0; n < kLatentKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= scales[n][i % 2] * inverse;
      }
    }

    // Values
    if constexpr (kScalesAside<TCache>) {
      multiply_coded_values<TCache>(o, s, tile);
    } else {
      multiply_values<Element, Shape::kRowBytes>(o, s, tile, warp * kOwnColumns * kBytes / 16);
    }
    __syncthreads();  // the tile is no longer needed
    if (number + kStages < num_tiles) fetch(number + kStages);
    end_copy_group();
  }

  // Store
  wait_for_copy_groups<0>();  // of scales, to tables past the last
  float* values = reinterpret_cast<float*>(ring + warp * Shape::kOwnBytes);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = sum_within_warp(sum[h], 4);
    if (lane % 4 == 0) {
      shared.merge.tops[warp][lane / 4 + h * 8] = largest[h];
      shared.merge.sums[warp][lane / 4 + h * 8] = total;
    }
  }
  leave_values<Element, kOwnColumns, 16>(values, o, [&](int) { return value_scale; });
  __syncwarp();  // the results of the warp are there
  const int column = warp * kOwnColumns + lane * 4;
  for (int row = 0; row < t.num_rows; ++row) {
    const RowEnd row_end =
        end_of_row(p, t, row, kv_head, shared.merge.tops[warp][row], shared.merge.sums[warp][row]);
    if (column < p.v.width) {
      Pack<float, 4> four;
      four.load(
          reinterpret_cast<const char*>(values + row * (kOwnColumns + kValuePadding) + lane * 4));
      store_four(row_end, column, four);
    }
    if (threadIdx.x == 0 && row_end.lse) *row_end.lse = row_end.lse_value;
  }
  merge_parts(p, t, kv_head);
}
