// Paged attention of many new tokens, on tensor cores (FlashAttention-2, Dao 2023).
//
// A block takes 64 or 128 packed rows of one sequence and KV head, 16 or 32 per warp, and walks
// over its keys in tiles. With 32 rows each matrix of K and V that a warp loads from shared memory
// is multiplied twice: of its bandwidth, products of 16 rows would need all there is. Rows come
// from the cache in 16-byte copies, each key's through the block table, whose entries are copied a
// tile ahead of the rows. With one stage, keys of the next tile are on their way while weights meet
// values, and values while queries meet keys:
//
//   keys(n) arrive | Q K^T -> scores | values(n) arrive | weights, O += P V | keys(n + 1) ...
//   fetch values(n)                    fetch keys(n + 1)
//
// With two, keys and values of the next tile are on their way meanwhile, and a tile takes one
// barrier.
//
// Keys that no row of the block sees are zero in shared memory, whatever the cache holds; keys that
// one row does not see have weight 0 in it. A NaN or infinite value that one row sees does reach
// the other rows of its block.
//
// Keys that are cached raw are rotated in place in shared memory, once all have arrived.
//
// Packed rows of 8- and 4-bit caches are copied first, and dequantised into the place of the tile's
// keys, then of its values (attention_dequantise.cuh):
//
//   keys(n) arrive, dequantise | Q K^T -> scores | values(n) arrive, dequantise | weights, O += P V
//                     fetch values(n)                                fetch keys(n + 1)
//
// Bytes: visible K and V once per tile of rows; Q and the output once.
#include "attention_prefill.cuh"

// Whether 32 rows per warp and a loop that is unrolled whole fit into registers. Compilers since
// CUDA 13.1 spill some.
#if defined(__CUDACC_VER_MAJOR__)
constexpr bool kFitsUnrolled = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ <= 1300;
#else
constexpr bool kFitsUnrolled = true;
#endif

// Write a lane's part of one row: the pairs `values` of all products, two of each four.
template <typename T, int kProducts>
__device__ __forceinline__ void write_row(const AttentionParams& p, const AttentionTile& tile,
                                          const RowEnd& end, bool exists, float value_scale,
                                          const float (&o)[kProducts][4], int half_of) {
  const bool zero = end.divisor == 0.0f;
  const float scale = value_scale / end.divisor;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kProducts; n += 2) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = zero ? 0.0f : o[n + i / 2][half_of * 2 + i % 2] * scale;
    }
    if (tile.state >= 0 || p.out_format == 0) {  // float32
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (n + i) * 8 + t * 2;
        if (!exists || column >= p.v.width) continue;
        reinterpret_cast<float2*>(end.out)[column / 2] = make_float2(x[2 * i], x[2 * i + 1]);
      }
    } else {
      // Two lanes make four neighbours of two pairs each: the even one of the first product.
      const u32 pairs[2] = {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3])};
      const bool odd = t % 2;
      const u32 got = __shfl_xor_sync(kAllLanes, odd ? pairs[0] : pairs[1], 1);
      const int column = (n + odd) * 8 + t / 2 * 4;
      if (!exists || column >= p.v.width) continue;
      reinterpret_cast<uint2*>(end.out)[column / 4] =
          odd ? make_uint2(got, pairs[1]) : make_uint2(pairs[0], got);
    }
  }
}

// T: format of queries, cache unless that is quantised, and, unless that is float32, output.
// kRotateKeys: keys are cached raw and rotated on read, by `rope_table`.
// kRows: packed rows per tile.
// kStages: tiles of keys and of values that shared memory holds.
// kQuantised: K and V have 8 or 4 bits each, in any formats.
// grid: (pieces, H), block: 128, smem: PrefillShape::kBytes
template <typename T, int kWidth, int kWidthV, bool kRotateKeys, int kRows, int kStages,
          bool kQuantised>
__global__ void __launch_bounds__(
    kPrefillThreads,
    PrefillShape<kWidth, kWidthV, kRotateKeys, kRows, kStages, kQuantised>::kBlocks)
    attention_prefill(const __grid_constant__ AttentionParams p) {
  using Shape = PrefillShape<kWidth, kWidthV, kRotateKeys, kRows, kStages, kQuantised>;
  using Table = typename Shape::Table;
  constexpr int kRowTiles = Shape::kRowTiles;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kTables = Shape::kTables;
  constexpr int kSteps = kWidth / 16;
  // Wider rows, two stages, or rotation leave too few registers for a loop that is unrolled whole.
  constexpr bool kUnrolled =
      Shape::kQueryInRegisters ||
      (kWidth <= 128 && kStages == 1 && !kRotateKeys && (kRowTiles == 1 || kFitsUnrolled));
  constexpr int kUnroll = kUnrolled ? kSteps : 2;
  constexpr int kKeyGroups = kKeys / 16;
  const int kv_head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_row = warp * kRowTiles * 16;
  char* all_keys = dynamic_shared<char>();
  char* all_values = all_keys + Shape::kValuesAt;
  char* queries = all_keys + Shape::kQueryAt;
  [[maybe_unused]] char* packed = all_keys + Shape::kPackedAt;
  auto* tables = reinterpret_cast<Table*>(all_keys + Shape::kTablesAt);
  auto& entries = *reinterpret_cast<PageEntries<kKeys>*>(all_keys + Shape::kEntriesAt);
  auto& shared = *reinterpret_cast<PrefillTile<kRows>*>(all_keys + Shape::kTileAt);
  AttentionTile& t = shared.tile;
  if (threadIdx.x == 0) {
    // With a causal mask the last tiles of a sequence take longest: they come first. Pieces are
    // in this order.
    const int number = static_cast<int>(p.pieces ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const AttentionPiece piece = piece_of(p, number, kRows, kv_head == 0);
    t = find_tile(p, piece, kRows, kv_head == 0);
    const KeyRange range = keys_of(piece, t, kKeys);
    shared.begin = range.begin;
    shared.end = range.end;
    shared.num_key_tiles = static_cast<int>((range.end - range.begin + kKeys - 1) / kKeys);
  }
  __syncthreads();  // the tile is known
  if (t.num_rows == 0) return;
  const bool has_rows = first_row < t.num_rows;

  RowSum rows[kRowTiles][2];  // g and g + 8
  float o[kRowTiles][kWidthV / 8][4] = {};

  // Others see these after the barriers of the first tile.
  if (threadIdx.x < kRows) {
    const i64 position = position_of(p, t, threadIdx.x);
    shared.limits[threadIdx.x] = limits_of(p, t, position, position);
  }
  if (lane == 0) {
    const int last_row = first_row + kRowTiles * 16 - 1;
    const RowLimits all = limits_of_rows(p, t, first_row, last_row);
    shared.unmasked[warp] = tiles_within<kKeys>(p, t, all, shared.begin);
  }

  // Where this lane's part of four matrices is: of queries and values the second matrix is of the
  // next rows, and of keys of the next chunk.
  const auto row_of_matrix = [](int lane) { return lane % 8 + lane / 8 % 2 * 8; };
  const int query_at = chunk_offset<kWidth>(first_row + row_of_matrix(lane), lane / 16);
  const int key_at = chunk_offset<kWidth>(lane % 8 + lane / 16 * 8, lane / 8 % 2);

  const auto request = [&](int number) {
    request_pages(entries.of[number % 2], p, t, shared.begin + i64{number} * kKeys, shared.end);
  };
  const auto find_rows = [&](int number) {
    look_up(tables[number % kTables], entries.of[number % 2], p, t,
            shared.begin + i64{number} * kKeys, shared.end);
  };
  const auto fetch_keys = [&](int number) {
    const Table& table = tables[number % kTables];
    if constexpr (kQuantised) {
      fetch_packed<kWidth, kPrefillThreads>(packed, table.k, p.k, p.k_format);
      return;
    }
    fetch_rows<kWidth, kKeys>(all_keys + number % kStages * Shape::kKeyBytes, p.k.width,
                              [&](int row) { return table.k[row]; });
  };
  const auto fetch_values = [&](int number) {
    const Table& table = tables[number % kTables];
    if constexpr (kQuantised) {
      fetch_packed<kWidthV, kPrefillThreads>(packed, table.v, p.v, p.v_format);
      return;
    }
    fetch_rows<kWidthV, kKeys>(all_values + number % kStages * Shape::kValueBytes, p.v.width,
                               [&](int row) { return table.v[row]; });
  };

  const auto load_queries = [&](u32(&to)[kRowTiles][4], int step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      load_matrices<false>(to[m], matrix_at<kWidth>(queries, query_at, m * 16, step * 2));
    }
  };

  u32 query[Shape::kQueryInRegisters ? kSteps : 1][kRowTiles][4];
  if (shared.num_key_tiles > 0) {
    fetch_rows<kWidth, kRows>(queries, p.k.width, [&](int row) {
      return row < t.num_rows ? query_row(p, t, row, kv_head) : nullptr;
    });
    request(0);
    request(1);
    wait_for_copies();
    find_rows(0);
    if constexpr (kStages == 2) find_rows(1);
    __syncthreads();  // queries have arrived, and the first tables are written
    fetch_keys(0);
    if constexpr (kStages == 2) {
      fetch_values(0);
      request(2);
    }
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_queries(query[k], k);
    }
  }

  float factor = p.score_scale;  // of scores
  if constexpr (kQuantised) {
    if (!p.k_scale_cache) factor *= static_scale(p.k_scale, p.k, kv_head);
  }
  const bool is_scaled = p.soft_cap > 0.0f || !(factor > 0.0f);  // before the maximum
  if (is_scaled) factor = 1.0f;
  float value_scale = 1.0f;  // of sums of weighted values
  if constexpr (kQuantised) {
    value_scale = p.v_scale_cache ? kSmallestScale : static_scale(p.v_scale, p.v, kv_head);
  }
  for (int number = 0; number < shared.num_key_tiles; ++number) {
    const Table& table = tables[number % kTables];
    char* keys = all_keys + number % kStages * Shape::kKeyBytes;
    char* values = all_values + number % kStages * Shape::kValueBytes;
    wait_for_copies();
    __syncthreads();  // keys have arrived, and the values of the last tile are no longer needed
    if constexpr (kQuantised) {
      dequantise<T, kWidth, kPrefillThreads>(keys, packed, table.k_groups, p.k_format);
      __syncthreads();  // keys are dequantised
    }
    if constexpr (kStages == 1) {
      fetch_values(number);
    } else if (number + 1 < shared.num_key_tiles) {
      fetch_keys(number + 1);
      fetch_values(number + 1);
    }
    if (number + kStages < shared.num_key_tiles) {
      find_rows(number + kStages);
      request(number + kStages + 1);
    }
    if constexpr (kRotateKeys) {
      rotate_keys<T, kWidth, kKeys, kPrefillThreads>(p, keys, table.k, table.angles, threadIdx.x);
      __syncthreads();  // all keys are rotated
    }

    // Which scores count, while registers are free
    const TileRange unmasked = shared.unmasked[warp];
    bool masked = number < unmasked.begin || number >= unmasked.end;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) masked = masked || table.present[i] != kAllLanes;
    if (has_rows && masked) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        shared.visible[m][threadIdx.x] =
            visible_keys<kKeys / 8>(table.present, shared.limits, p, t, first_row + m * 16,
                                    shared.begin + i64{number} * kKeys);
      }
    }

    // Scores
    float s[kRowTiles][kKeys / 8][4] = {};
    if (has_rows) {
      // The next matrices are on their way while these are multiplied. In a loop, after the last
      // come the first ones again, which nobody needs: a branch would wait for them.
      u32 a[2][kRowTiles][4];
      u32 b[2][4];
      if constexpr (!Shape::kQueryInRegisters) load_queries(a[0], 0);
      load_matrices<false>(b[0], matrix_at<kWidth>(keys, key_at, 0, 0));
#pragma unroll kUnroll
      for (int k = 0; k < kSteps; ++k) {
        const int next = k + 1 < kSteps ? k + 1 : 0;
#pragma unroll
        for (int n = 0; n < kKeyGroups; ++n) {
          // Matrices: keys 0 to 7 of either chunk, then keys 8 to 15: what a product takes lies in
          // neighbouring registers.
          const bool last = n + 1 == kKeyGroups;
          if (!last || !kUnrolled || k + 1 < kSteps) {
            load_matrices<false>(
                b[(n + 1) % 2],
                matrix_at<kWidth>(keys, key_at, last ? 0 : (n + 1) * 16, (last ? next : k) * 2));
          }
          if constexpr (!Shape::kQueryInRegisters) {
            if (last && (!kUnrolled || k + 1 < kSteps)) load_queries(a[(k + 1) % 2], next);
          }
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            const u32(&rows_of_query)[4] =
                Shape::kQueryInRegisters ? query[Shape::kQueryInRegisters ? k : 0][m] : a[k % 2][m];
            mma_m16n8k16<T>(s[m][2 * n], rows_of_query, b[n % 2][0], b[n % 2][1]);
            mma_m16n8k16<T>(s[m][2 * n + 1], rows_of_query, b[n % 2][2], b[n % 2][3]);
          }
        }
      }
    }
    if constexpr (kStages == 1) {
      wait_for_copies();
      __syncthreads();  // values and the next table have arrived, and the keys are no longer needed
      if constexpr (kQuantised) {
        dequantise<T, kWidthV, kPrefillThreads>(values, packed, table.v_groups, p.v_format);
        __syncthreads();  // values are dequantised
      }
      if (number + 1 < shared.num_key_tiles) fetch_keys(number + 1);
    }

    if (!has_rows) continue;

    // Weights
    const float* value_scales = nullptr;
    float value_rescale = 1.0f;
    float unit = 1.0f;
    if constexpr (kQuantised) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (p.k_scale_cache) {
          scale_scores(s[m], table.k_scales);
        } else if (is_scaled) {
          scale_scores(s[m], static_scale(p.k_scale, p.k, kv_head));
        }
      }
      if (p.v_scale_cache) {
        value_scales = table.v_scales;
        value_rescale = raise_value_scale(table.v_scales, value_scale);
        unit = inverse_of_power(value_scale);
      }
    }
    if (is_scaled) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) to_logits(p, s[m]);
    }
    if (masked) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const u32 visible = shared.visible[m][threadIdx.x];
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          if (!(visible >> i & 1u)) s[m][i / 4][i % 4] = -kInfinity;
        }
      }
    }
    u32 weights[kRowTiles][kKeys / 16][4];
    float rescale[kRowTiles][2];
    bool rises = value_rescale != 1.0f;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      rises |= weigh_scores<T>(weights[m], s[m], factor, rows[m], rescale[m], value_scales, unit);
      rescale[m][0] *= value_rescale;
      rescale[m][1] *= value_rescale;
    }

    // Values
    const int value_lane = find_again(lane);
    const int value_at = chunk_offset<kWidthV>(row_of_matrix(value_lane), value_lane / 16);
    if (rises) {
#pragma unroll
      for (int i = 0; i < kRowTiles * kWidthV / 2; ++i) {
        const int m = i / (kWidthV / 2);
        o[m][i / 4 % (kWidthV / 8)][i % 4] *= rescale[m][i % 4 / 2];
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kWidthV / 16; ++n) {
        u32 b[4];
        load_matrices<true>(b, matrix_at<kWidthV>(values, value_at, k * 16, n * 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(o[m][2 * n], weights[m][k], b[0], b[1]);
          mma_m16n8k16<T>(o[m][2 * n + 1], weights[m][k], b[2], b[3]);
        }
      }
    }
  }

  // Store
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = sum_within_warp(rows[m][h].sum, 4);
      const int row = first_row + m * 16 + lane / 4 + h * 8;
      RowEnd row_end{};
      if (row < t.num_rows) row_end = end_of_row(p, t, row, kv_head, rows[m][h].base, total);
      write_row<T>(p, t, row_end, row < t.num_rows, value_scale, o[m], h);
      if (row < t.num_rows && lane % 4 == 0 && row_end.lse) *row_end.lse = row_end.lse_value;
    }
  }
}
