// Paged attention of few packed rows over wide rows on tensor cores: decode with multi-head latent
// attention, whose values are the first elements of its keys.
//
// A block takes 16 packed rows, and its four warps share each tile of 32 keys: a warp multiplies
// the queries by 8 of the keys, scores meet in shared memory, and then it multiplies the weights of
// all 32, which every warp computes, by 128 columns of the values. So a latent is fetched once and
// serves as key and as value. Where values are stored elsewhere they take the place of the keys
// once those have been used, and nobody has fetched them early.
//
//   tile(n) arrives | Q K^T -> scores | all scores are there | weights, O += P V |
//   fetch tile(n + 2)
//
// Formats of 8 bits, scales and masks are as in attention_decode_mma.cu. Codes of nvfp4 come to
// registers, and become a tile once the one before is no longer needed: of fp16, with block scales,
// exactly.
//
// Bytes: each visible latent once per 16 rows; Q and the output once.
#include "attention_latent.cuh"
#include "attention_merge.cuh"

constexpr int kLatentKeys = 32;
constexpr int kOwnColumns = kLatentWidthV / kDecodeWarps;
constexpr int kScoreStride = kLatentKeys + 8;  // floats, so that rows differ in their banks
// The layout of dynamic shared memory. In the end weighted values take the place of the tiles.
template <typename TCache>
struct LatentShape {
  static_assert(!kFourBit<TCache> || kSameType<TCache, nvfp4>, "exact in fp16");
  using Element = SelectType<kFourBit<TCache>, half, TCache>;  // of a tile
  static constexpr int kStages = kFourBit<TCache> ? 1 : 2;
  // Tiles whose rows are known: those in the ring, those whose codes are in registers, and the
  // next.
  static constexpr int kAhead = kStages + kFourBit<TCache>;
  static constexpr int kTables = kAhead + 1;
  using Table = DecodeTable<SelectType<kFourBit<TCache>, int8, TCache>, kTables, kLatentKeys>;
  static constexpr int kRowBytes = kLatentWidth * static_cast<int>(sizeof(Element));
  static constexpr int kTileBytes = kLatentKeys * kRowBytes;
  static constexpr int kOwnBytes = kDecodeRows * (kOwnColumns + kValuePadding) * 4;
  static_assert(kDecodeWarps * kOwnBytes <= kStages * kTileBytes, "values fit into the ring");
  static constexpr int kQueryAt = kStages * kTileBytes;
  static constexpr int kScoresAt = kQueryAt + kDecodeRows * kLatentWidth * 2;
  static constexpr int kTableAt = kScoresAt + kDecodeRows * kScoreStride * 4;
  static constexpr int kTileAt = kTableAt + static_cast<int>(sizeof(Table));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(DecodeTile));
};

// Sixteen codes of a row, at a multiple of 4 bytes, and their scale.
template <typename TCache>
struct CodedSixteen {
  u32 words[2];
  u32 scale_bits;

  // `row` is null where there is no key, and then the elements are zeros.
  __device__ __forceinline__ void load(const char* row, int sixteen, const KVOperand& operand) {
    scale_bits = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = 0;
    if (!row || sixteen * 16 >= operand.width) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = reinterpret_cast<const u32*>(row)[sixteen * 2 + i];
    }
    const int block = sixteen * 16 >> block_shift<TCache>(operand);
    scale_bits = load_block_scale<TCache>(row + operand.block_scales.offset_bytes +
                                          block * kBlockScaleBytes<TCache>);
  }

  __device__ __forceinline__ void store(char* tile, int row, int sixteen) const {
    const u32 pair =
        kArch >= 890 ? halves_of_e4m3(scale_bits) : decode_e4m3_pair(lower_pair(scale_bits));
    const u32 scale = __byte_perm(pair, 0, 0x1010);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const EightHalves eight = decode_e2m1x8(words[i]);
      Pack<u32, 4> pairs;
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs.values[j] = multiply_halves(eight.pairs[j], scale);
      pairs.store(tile + chunk_offset<kLatentWidth>(row, sixteen * 2 + i));
    }
  }
};

// What a thread has of the codes of a tile: neighboring threads have neighboring codes.
template <typename TCache>
struct CodedTile {
  static constexpr int kSixteens = kLatentWidth / 16;  // per row
  static constexpr int kOwn = kLatentKeys * kSixteens / kDecodeThreads;
  static_assert(kLatentKeys * kSixteens % kDecodeThreads == 0, "threads have equal shares");
  CodedSixteen<TCache> sixteens[kOwn];

  __device__ __forceinline__ void load(const char* const* rows, const KVOperand& operand) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int number = threadIdx.x + i * kDecodeThreads;
      sixteens[i].load(rows[number / kSixteens], number % kSixteens, operand);
    }
  }

  __device__ __forceinline__ void store(char* tile) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int number = threadIdx.x + i * kDecodeThreads;
      sixteens[i].store(tile, number / kSixteens, number % kSixteens);
    }
  }
};

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

// TCache: as of attention_decode_mma. K rows of at most 576 elements, V rows of at most 512.
// grid: (H, pieces), block: 128, smem: LatentShape::kBytes
template <typename TCache>
__global__ void __launch_bounds__(kDecodeThreads, kLatentBlocks)
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
  const bool fetches_values = has_separate_values(p);
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
  load_queries<TCache, kLatentWidth>(queries, shared, p, t, kv_head);
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
    float logits[1][4];
    multiply_latents<TCache>(logits, tile, queries);
    const int column = warp * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      logits[0][i] *= factors[i / 2];
      if (p.k_scale_cache) logits[0][i] *= table.k_scales[entry][column + i % 2];
      if (p.soft_cap > 0.0f) logits[0][i] = p.cap_scale * tanhf(logits[0][i] * p.inverse_cap);
    }
    const u32 present[1] = {table.present[entry] >> warp * 8 & 0xffu};
    hide_keys(logits, present, shared.limits, shared.seen_by_all, p, t, 0, first + warp * 8);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float2*>(scores + (lane / 4 + h * 8) * kScoreStride + column) =
          make_float2(logits[0][2 * h], logits[0][2 * h + 1]);
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
    multiply_values<Element, Shape::kRowBytes>(o, s, tile, warp * kOwnColumns * kBytes / 16);
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
