// Paged attention of few packed rows on tensor cores: decode with grouped heads, and caches of 8
// and 4 bits.
//
// A block takes 16 or 8 packed rows of one sequence, KV head and piece, which its warps share. The
// keys are dealt to the warps in tiles of 16, or of 32 where rows are narrow. Each warp has its own
// shared memory, so that they synchronise only at the end. A warp looks up a page one tile ahead of
// its use, and rows come in 16-byte copies, kStages tiles ahead:
//
//   keys(n) arrive | Q K^T -> scores | values(n) arrive | weights, O += P V | keys(n + 1) ...
//                    look up, fetch keys(n + kStages)     fetch values(n + kStages)
//
// Elements of 8 bits become float16 in registers, exactly, after `ldmatrix` has brought four
// neighbours to a lane. In a key they are depth 4t to 4t + 3 of 16, so the query is permuted the
// same way; in a value they are columns of two products that interleave. Each row of such a query
// is scaled by a power of two, which is divided out of its scores. A static scale of V is applied
// to the output, one per key to its weight, relative to the largest so far. Elements of 4 bits:
// attention_decode_four_bit.cuh.
//
// Keys that no row sees are zero in shared memory, as in attention_prefill.cu.
//
// Eight rows are the right factor of products with values, whose columns are then rows of the sums:
// half as many products and sums, so that an SM runs more blocks.
//
// Bytes: visible K and V once per tile; Q and the output once.
#include "attention_decode_four_bit.cuh"
#include "attention_merge.cuh"

// Scores of the keys of a tile, eight after eight. `query` has the fragments of the queries, where
// they fit into registers.
template <typename TCache, int kWidth, int kRows, int kScores>
__device__ __forceinline__ void multiply_keys(float (&s)[kScores][4], const char* keys,
                                              const char* queries, const u32 (*query)[4]) {
  using T = MmaFormat<TCache>;
  using Shape = DecodeShape<TCache, kWidth, kWidth, kRows>;
  constexpr int kRowBytes = Shape::kKeyRowBytes;
  const int lane = threadIdx.x % 32;
  const auto step = [&](int k, u32(&a)[4]) {
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = query[k][i];
    } else {
      load_matrices<false>(a, queries + chunk_offset<kWidth>(lane % kRows, k * 2 + lane / 16));
    }
  };
  if constexpr (sizeof(TCache) == 2) {
    static_assert(kScores == 2, "tiles of 16 keys");
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      u32 a[4];
      step(k, a);
      u32 b[4];  // both chunks of keys 0 to 7, then of keys 8 to 15
      load_matrices<false>(
          b, keys + chunk_at<kRowBytes>(lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
      mma_m16n8k16<T>(s[0], a, b[0], b[1]);
      mma_m16n8k16<T>(s[1], a, b[2], b[3]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kWidth / 16; k += 2) {
      u32 b[kScores / 2][4];  // of either chunk, eight keys and the next eight
#pragma unroll
      for (int n = 0; n < kScores / 2; ++n) {
        load_matrices<false>(b[n], keys + chunk_at<kRowBytes>(n * 16 + lane % 16, k + lane / 16));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 a[4];
        step(k + i, a);
#pragma unroll
        for (int n = 0; n < kScores; ++n) {
          u32 even;
          u32 odd;
          to_half_pairs<TCache>(b[n / 2][2 * i + n % 2], even, odd);
          mma_m16n8k16<T>(s[n], a, even, odd);
        }
      }
    }
  }
}

// Likewise where keys of 8 bits are rotated on their way. The elements of a pair are a lane's own:
// neighbours, or at the same place of two chunks. Rotated they are rounded to float16, e5m2 after
// division by two, as its largest ones would overflow. `first` is the number of the first key.
template <typename TCache, int kWidth, int kRows, int kScores>
__device__ __forceinline__ void multiply_rotated_keys(float (&s)[kScores][4], const char* keys,
                                                      const char* queries, const AttentionParams& p,
                                                      const AttentionTile& t, i64 first) {
  constexpr int kRowBytes = DecodeShape<TCache, kWidth, kWidth>::kKeyRowBytes;
  constexpr float kUnit = kSameType<TCache, fp8_e5m2> ? 0.5f : 1.0f;
  const int lane = threadIdx.x % 32;
  const int half_dim = p.rotary_dim / 2;
  const float* angles[kScores];
#pragma unroll
  for (int n = 0; n < kScores; ++n) {
    angles[n] = angles_of(p, t, key_of(p, t, first + n * 8 + lane / 4));
  }
#pragma unroll 1
  for (int k = 0; k < kWidth / 16; ++k) {
    const int at = k * 16 - p.rotary_start;
    const bool rotary = at >= 0 && at < p.rotary_dim;
    const bool apart = rotary && !p.interleaved;
    if (apart && at >= half_dim) continue;  // the first half takes it along
    const int chunks[2] = {k, apart ? k + half_dim / 16 : k};
    Pack<float, 4> cosines[kScores];  // of this lane's pairs; of neighbours, two
    Pack<float, 4> sines[kScores];
    const auto load_angles = [&](int n) {
      if (!rotary) return;
      const float* own = angles[n] + (apart ? at + lane % 4 * 4 : at / 2 + lane % 4 * 2);
      if (apart) {
        cosines[n].load(reinterpret_cast<const char*>(own));
        sines[n].load(reinterpret_cast<const char*>(own + half_dim));
      } else {
        Pack<float, 2> two[2];
        two[0].load(reinterpret_cast<const char*>(own));
        two[1].load(reinterpret_cast<const char*>(own + half_dim));
        cosines[n] = {{two[0].values[0], two[0].values[1]}};
        sines[n] = {{two[1].values[0], two[1].values[1]}};
      }
    };
    constexpr bool kAhead = kWidth <= 192;  // wider rows leave no registers for it
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if (kAhead) load_angles(n);
    }
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices<false>(a[i],
                           queries + chunk_offset<kWidth>(lane % kRows, chunks[i] * 2 + lane / 16));
    }
    u32 b[kScores / 2][4];  // of either chunk, eight keys and the next eight
#pragma unroll
    for (int n = 0; n < kScores / 2; ++n) {
      load_matrices<false>(
          b[n], keys + chunk_at<kRowBytes>(n * 16 + lane % 16, lane < 16 ? chunks[0] : chunks[1]));
    }
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if (!kAhead) load_angles(n);
      Pack<float, 4> x[2];  // elements 4 * (lane % 4) and so on of either chunk
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 even;
        u32 odd;
        to_half_pairs<TCache>(b[n / 2][2 * i + n % 2], even, odd);
        x[i] = {
            {lower_of<half>(even), lower_of<half>(odd), upper_of<half>(even), upper_of<half>(odd)}};
      }
      Pack<float, 4> rotated[2] = {x[0], x[1]};
      if (apart) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float c = cosines[n].values[i];
          const float sine = sines[n].values[i];
          rotated[0].values[i] = fmaf(x[0].values[i], c, -x[1].values[i] * sine);
          rotated[1].values[i] = fmaf(x[1].values[i], c, x[0].values[i] * sine);
        }
      } else if (rotary) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const float c = cosines[n].values[i / 2];
          const float sine = sines[n].values[i / 2];
          rotated[0].values[i] = fmaf(x[0].values[i], c, -x[0].values[i + 1] * sine);
          rotated[0].values[i + 1] = fmaf(x[0].values[i + 1], c, x[0].values[i] * sine);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !apart) break;
        const float (&r)[4] = rotated[i].values;
        mma_m16n8k16<half>(s[n], a[i], pack_pair<half>(r[0] * kUnit, r[2] * kUnit),
                           pack_pair<half>(r[1] * kUnit, r[3] * kUnit));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kScores; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] *= 1.0f / kUnit;
  }
}

// Merge what the warps left of a row, and write it, its rotation undone. Every lane of a warp must
// call it.
template <typename TCache, int kWidthV>
__device__ __forceinline__ void finish_row(const AttentionParams& p, const AttentionTile& t,
                                           const DecodeMerge& merge, const char* values_of_warps,
                                           int bytes_per_warp, int row, int kv_head) {
  float largest = -kInfinity;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) largest = fmaxf(largest, merge.tops[w][row]);
  float weights[kDecodeWarps];
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) {
    // A warp that saw no key has sum 0 and adds nothing; one that saw a NaN has a nonzero sum.
    const float own = merge.sums[w][row];
    weights[w] = own != 0.0f ? exp2f(merge.tops[w][row] - largest) : 0.0f;
    if (own != 0.0f) sum += own * weights[w];
  }
  const RowEnd end = end_of_row(p, t, row, kv_head, largest, sum);
  const int lane = threadIdx.x % 32;
  const auto total_of = [&](int column) {
    Pack<float, 4> total = {};
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      Pack<float, 4> own;
      own.load(values_of_warps + w * bytes_per_warp +
               (row * (kWidthV + kValuePadding) + column) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (weights[w] != 0.0f) total.values[i] += own.values[i] * weights[w];
      }
    }
    return total;
  };
  bool is_rotated = false;
  if constexpr (kFourBit<TCache>) is_rotated = p.v.group_scales.rotation_shift != 0;
  if (is_rotated) {
    Pack<float, 4> totals[(kWidthV + 127) / 128] = {};
#pragma unroll
    for (int i = 0; i < (kWidthV + 127) / 128; ++i) {
      const int column = lane * 4 + i * 128;
      if (column < p.v.width) totals[i] = total_of(column);
    }
    apply_hadamard(totals, p.v.group_scales, lane, 32);
#pragma unroll
    for (int i = 0; i < (kWidthV + 127) / 128; ++i) {
      const int column = lane * 4 + i * 128;
      if (column < p.v.width) store_four(end, column, totals[i]);
    }
  } else {
    for (int column = lane * 4; column < p.v.width; column += 128) {
      store_four(end, column, total_of(column));
    }
  }
  if (lane == 0 && end.lse) *end.lse = end.lse_value;
}

// TCache: format of the cache, and, if it has 16 bits, of queries and, unless that is float32,
// output; else those are of 16 bits. kRows: packed rows per tile. kUnaligned: rows of four bits may
// lie at any address. grid: (H, pieces), block: 128, smem: DecodeShape::kBytes, or kRotatedBytes
// where four-bit keys are rotated
template <typename TCache, int kWidth, int kWidthV, int kRows, bool kUnaligned = false>
__global__ void __launch_bounds__(kDecodeThreads,
                                  DecodeShape<TCache, kWidth, kWidthV, kRows>::kBlocks)
    attention_decode_mma(const __grid_constant__ AttentionParams p) {
  using Shape = DecodeShape<TCache, kWidth, kWidthV, kRows>;
  constexpr int kOwn = kRows / 4;  // scores of a lane, of each product
  constexpr int kKeys = Shape::kKeys;
  constexpr int kStages = Shape::kStages;
  constexpr int kSteps = kWidth / 16;
  constexpr int kPending = 2 * kStages - 1;  // copy groups that may be on their way
  const int kv_head = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  char* shared_bytes = dynamic_shared<char>();
  char* ring = shared_bytes + warp * Shape::kRingBytes;
  char* queries = shared_bytes + Shape::kQueryAt;
  [[maybe_unused]] char* rest = shared_bytes + Shape::kRestAt;  // of rotated queries
  auto& table = reinterpret_cast<typename Shape::Table*>(shared_bytes + Shape::kTablesAt)[warp];
  auto& shared = *reinterpret_cast<DecodeTile*>(shared_bytes + Shape::kTileAt);
  if (!begin_block<kKeys, kRows>(shared, p, kv_head)) return;
  const AttentionTile& t = shared.tile;
  const KeyRange& range = shared.range;  // looked up a tile at a time, and not held in registers
  const int num_key_tiles = static_cast<int>((range.end - range.begin + kKeys - 1) / kKeys);
  const int own_tiles = (num_key_tiles - warp + kDecodeWarps - 1) / kDecodeWarps;
  const auto first_of = [&](int number) {
    return range.begin + (i64{number} * kDecodeWarps + warp) * kKeys;
  };

  OwnScales own_scales = {};  // of four bits, of the tile that is fetched
  [[maybe_unused]] const SharedStrides as_codes = shared_strides(p);
  const auto begin_keys = [&](int stage, char* keys,
                              const KeyPlace& place) __attribute__((always_inline)) {
    if constexpr (kFourBit<TCache>) {
      own_scales = set_four_bit_rows(table, stage, p, t, as_codes, place);
      fetch_four_bit_keys<TCache, kWidth, kUnaligned>(keys, p, table, stage, own_scales);
    } else {
      set_rows(table, stage, p, t, place);
      fetch_keys<TCache, kWidth>(keys, p, table, stage);
    }
  };
  const auto begin_values = [&](int stage, char* values) __attribute__((always_inline)) {
    if constexpr (kFourBit<TCache>) {
      fetch_four_bit_values<TCache, kWidthV, kUnaligned>(values, p, table, stage, own_scales);
    } else {
      fetch_values<TCache, kWidthV>(values, p, table, stage);
    }
  };

  KeyPlace next = look_up<kKeys>(p, t, first_of(0) + lane, range.end);
  [[maybe_unused]] QueryPairs<kWidth> rests;
  if constexpr (kFourBit<TCache>) {
    rests = load_four_bit_queries<kWidth, kRows>(queries, shared, p, t, kv_head);
  } else {
    load_queries<TCache, kWidth, kRows>(queries, shared, p, t, kv_head);
  }
  set_limits(shared, p, t);
  __syncthreads();  // queries and limits are there

  u32 query[Shape::kQueryInRegisters ? kSteps : 1][4];
  if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load_matrices<false>(query[k],
                           queries + chunk_offset<kWidth>(lane % kRows, k * 2 + lane / 16));
    }
  }
  if constexpr (kFourBit<TCache>) {
    if (p.k.group_scales.rotation_shift) {
      if constexpr (Shape::kRestReplacesQuery) __syncthreads();  // that is in registers
      if (threadIdx.x / 8 < kRows) rests.store(rest);
      __syncthreads();  // the rests are there
    }
  }
  const float k_scale = p.k_scale_cache ? 1.0f : static_scale(p.k_scale, p.k, kv_head);
  float factors[kOwn / 2];  // of the scores of rows g and g + 8
#pragma unroll
  for (int h = 0; h < kOwn / 2; ++h) {
    factors[h] = shared.query_scales[lane / 4 + h * 8] * (p.score_scale * k_scale);
    if constexpr (kFourBit<TCache>) factors[h] *= 1.0f / kCodeUnit<TCache>;
  }

  float largest[kOwn / 2];  // of rows g and g + 8: logit, base 2
#pragma unroll
  for (int h = 0; h < kOwn / 2; ++h) largest[h] = -kInfinity;
  float sum[kOwn / 2] = {};  // of this lane's weights, against the largest
  float o[kWidthV * kRows / 128][4] = {};
  [[maybe_unused]] ValueUnits<TCache, kWidthV> units;  // of four bits
  float value_scale = p.v_scale_cache ? kSmallestScale : static_scale(p.v_scale, p.v, kv_head);

  // The first tiles are only fetched, by the same code as the others: a block executes most of its
  // instructions once, and a short piece takes as long as it takes to fetch these.
  int stage = 0;
  if constexpr (Shape::kFetchesApart) {
#pragma unroll 1
    for (; stage < kStages; ++stage) {
      char* tile = ring + stage * Shape::kTileBytes;
      if (stage < own_tiles) {
        begin_keys(stage, tile, next);
        next = look_up<kKeys>(p, t, first_of(stage + 1) + lane, range.end);
      }
      end_copy_group();
      if (stage < own_tiles) begin_values(stage, tile + Shape::kValuesAt);
      end_copy_group();
    }
    stage = 0;
  }
  for (int number = Shape::kFetchesApart ? 0 : -kStages; number < own_tiles; ++number) {
    char* keys = ring + stage * Shape::kTileBytes;
    char* values = keys + Shape::kValuesAt;
    const bool more = number + kStages < own_tiles;
    float products[kKeys / 8][4] = {};
    float s[kKeys / 8][kOwn];
    [[maybe_unused]] float v_scales[kKeys / 8][2] = {};
    [[maybe_unused]] int before_values = 0;  // of unaligned rows
    u32 present[1] = {};
    if (Shape::kFetchesApart || number >= 0) {
      present[0] = table.present[stage];
      wait_for_copy_groups<kPending>();
      __syncwarp();  // keys have arrived
      if constexpr (sizeof(TCache) == 2) {
        if (p.rope_table) {
          rotate_keys<TCache, kWidth, kKeys, 32>(p, keys, table.k[stage], table.angles[stage],
                                                 lane);
          __syncwarp();  // all keys are rotated
        }
      }

      // Scores
      if constexpr (kFourBit<TCache>) {
        if (rows_are_unaligned<kUnaligned>(p.v)) before_values = bytes_before(table.v[stage][lane]);
        if (rows_are_unaligned<kUnaligned>(p.k)) {
          align_row<kWidth>(keys, table.k_groups[stage][lane], bytes_before(table.k[stage][lane]),
                            p.k);
          __syncwarp();  // rows are where they belong
        }
        if constexpr (Shape::Table::kPrepares) {
          prepare_key_scales<TCache, kWidth>(table, stage, p.k);
          __syncwarp();  // scales are ready
        }
        if (p.rope_table) {
          multiply_rotated_four_bit<TCache, kWidth, kRows>(products, keys, queries, p, t,
                                                           first_of(number), table, stage);
        } else if (p.k.group_scales.rotation_shift) {
          multiply_keys_four_bit<TCache, kWidth, kRows, true>(products, keys, queries, query, rest,
                                                              table, stage);
        } else {
          multiply_keys_four_bit<TCache, kWidth, kRows, false>(products, keys, queries, query, rest,
                                                               table, stage);
        }
      } else if constexpr (sizeof(TCache) == 1) {
        if (p.rope_table) {
          multiply_rotated_keys<TCache, kWidth, kRows>(products, keys, queries, p, t,
                                                       first_of(number));
        } else {
          multiply_keys<TCache, kWidth, kRows>(products, keys, queries, query);
        }
      } else {
        multiply_keys<TCache, kWidth, kRows>(products, keys, queries, query);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) s[n][i] = products[n][i] * factors[i / 2];
      }
      if constexpr (Shape::kRowsHaveScales) {
        if (p.k_scale_cache) {
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
              s[n][i] *= table.k_scales[stage][n * 8 + lane % 4 * 2 + i % 2];
            }
          }
        }
        if (p.v_scale_cache) {
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              v_scales[n][i] = table.v_scales[stage][n * 8 + lane % 4 * 2 + i];
            }
          }
        }
      }
    }
    __syncwarp();  // keys and their scales are no longer needed
    if (more) {
      begin_keys(stage, keys, next);
      if (number + kStages + 1 < own_tiles) {
        next = look_up<kKeys>(p, t, first_of(number + kStages + 1) + lane, range.end);
      }
    }
    end_copy_group();

    if (Shape::kFetchesApart || number >= 0) {
      // Weights
      if (p.soft_cap > 0.0f) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) s[n][i] = p.cap_scale * tanhf(s[n][i] * p.inverse_cap);
        }
      }
      hide_keys(s, present, shared.limits, shared.seen_by_all, p, t, 0, first_of(number));
      weigh(s, largest, sum, o);
      // Rows of 16 bits have no scales, but spill without this branch.
      if (!kFourBit<TCache> && p.v_scale_cache) {
        const float inverse = raise_value_scale(v_scales, value_scale, o);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) s[n][i] *= v_scales[n][i % 2] * inverse;
        }
      }

      // Values
      wait_for_copy_groups<kPending>();
      __syncwarp();  // values have arrived
      if constexpr (kFourBit<TCache>) {
        if (rows_are_unaligned<kUnaligned>(p.v)) {
          align_row<kWidthV>(values, table.v_groups[stage][lane], before_values, p.v);
          __syncwarp();  // rows are where they belong
        }
        if constexpr (Shape::Table::kPrepares) {
          prepare_value_scales<TCache, kWidthV>(table, stage, p.v, units, o);
          __syncwarp();  // scales are ready
        }
        multiply_values_four_bit<TCache, kWidthV>(o, s, values, table, stage);
      } else {
        multiply_values<TCache, Shape::kValueRowBytes>(o, s, values, 0);
      }
    }
    __syncwarp();  // values are no longer needed
    if (more) begin_values(stage, values);
    end_copy_group();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Store
#pragma unroll
  for (int h = 0; h < kOwn / 2; ++h) {
    const float total = sum_within_warp(sum[h], 4);
    if (lane % 4 == 0) {
      shared.merge.tops[warp][lane / 4 + h * 8] = largest[h];
      shared.merge.sums[warp][lane / 4 + h * 8] = total;
    }
  }
  leave_values<TCache, kWidthV, kRows>(reinterpret_cast<float*>(ring), o, [&](int index) {
    if constexpr (!kFourBit<TCache>) return value_scale;
    return units.of_chunk(index / 2) * value_scale;
  });
  __syncthreads();  // the results of all warps are there
  for (int row = warp; row < t.num_rows; row += kDecodeWarps) {
    finish_row<TCache, kWidthV>(p, t, shared.merge, shared_bytes, Shape::kRingBytes, row, kv_head);
  }
  merge_parts(p, t, kv_head);
}
