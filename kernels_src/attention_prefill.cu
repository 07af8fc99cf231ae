// Paged attention of many new tokens, on tensor cores (FlashAttention-2, Dao 2023).
//
// A block takes 64 packed rows of one sequence and KV head, 16 per warp, and walks over its keys in
// tiles. Rows come from the cache in 16-byte copies, each key's through the block table; keys of
// the next tile are on their way while weights meet values, and values while queries meet keys:
//
//   keys(n) arrive | Q K^T -> scores | values(n) arrive | weights, O += P V | keys(n + 1) ...
//   fetch values(n)                    fetch keys(n + 1)
//
// Keys that no row of the block sees are zero in shared memory, whatever the cache holds; keys that
// one row does not see have weight 0 in it. A NaN or infinite value that one row sees does reach
// the other rows of its block.
//
// Keys that are cached raw are rotated in place in shared memory, once all have arrived.
//
// Bytes: visible K and V once per tile of 64 rows; Q and the output once.
#include "attention_prefill.cuh"

// Write a lane's part of one row: the pairs `values` of all products, two of each four.
template <typename T, int kProducts>
__device__ __forceinline__ void write_row(const AttentionParams& p, const AttentionTile& tile,
                                          const RowEnd& end, bool exists,
                                          const float (&o)[kProducts][4], int half_of) {
  const bool zero = end.divisor == 0.0f;
  const float scale = 1.0f / end.divisor;
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

// T: format of queries, cache and, unless that is float32, output.
// kRotateKeys: keys are cached raw and rotated on read, by `rope_table`.
// grid: (pieces, H), block: 128, smem: PrefillShape::kBytes
template <typename T, int kWidth, int kWidthV, bool kRotateKeys>
__global__ void __launch_bounds__(kPrefillThreads,
                                  PrefillShape<kWidth, kWidthV, kRotateKeys>::kBlocks)
    attention_prefill(const __grid_constant__ AttentionParams p) {
  using Shape = PrefillShape<kWidth, kWidthV, kRotateKeys>;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kSteps = kWidth / 16;
  constexpr int kUnroll = Shape::kQueryInRegisters ? kSteps : 4;  // else loads come too early
  const int kv_head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_row = warp * 16;
  char* keys = dynamic_shared<char>();
  char* values = keys + Shape::kValuesAt;
  char* queries = keys + Shape::kQueryAt;
  auto* tables = reinterpret_cast<KeyTable<kKeys, kRotateKeys>*>(keys + Shape::kTablesAt);
  auto& shared = *reinterpret_cast<PrefillTile*>(keys + Shape::kTileAt);
  AttentionTile& t = shared.tile;
  if (threadIdx.x == 0) {
    // With a causal mask the last tiles of a sequence take longest: they come first. Pieces are
    // in this order.
    const int number = static_cast<int>(p.pieces ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const AttentionPiece piece = piece_of(p, number, kPrefillRows, kv_head == 0);
    t = find_tile(p, piece, kPrefillRows, kv_head == 0);
    const KeyRange range = keys_of(piece, t, kKeys);
    shared.begin = range.begin;
    shared.end = range.end;
  }
  __syncthreads();  // the tile is known
  if (t.num_rows == 0) return;
  const bool has_rows = first_row < t.num_rows;
  const int num_key_tiles = static_cast<int>((shared.end - shared.begin + kKeys - 1) / kKeys);

  float largest[2] = {-kInfinity, -kInfinity};  // of rows g and g + 8: logit, base 2
  float sum[2] = {};                            // of this lane's weights, against the largest
  float o[kWidthV / 8][4] = {};

  // Others see these after the barriers of the first tile.
  if (threadIdx.x < kPrefillRows) {
    const i64 position = position_of(p, t, threadIdx.x);
    shared.limits[threadIdx.x] = limits_of(p, t, position, position);
  }
  if (lane == 0) {
    shared.seen_by_all[warp] =
        limits_of(p, t, position_of(p, t, first_row), position_of(p, t, first_row + 15));
  }

  // Where this lane's row of four matrices begins, and which of two chunks it is of: of queries and
  // values, and of keys.
  const int matrix_row = lane % 8 + lane / 8 % 2 * 8;
  const int matrix_chunk = lane / 16;
  const int key_row = lane % 8 + lane / 16 * 8;
  const int key_chunk = lane / 8 % 2;

  u32 query[Shape::kQueryInRegisters ? kSteps : 1][4];
  if (num_key_tiles > 0) {
    fetch_rows<kWidth, kPrefillRows>(queries, p.k.width, p.query, [&](int row) {
      return row < t.num_rows ? query_row(p, t, row, kv_head) : nullptr;
    });
    look_up(tables[0], p, t, shared.begin, shared.end);
    __syncthreads();  // the table is written
    fetch_rows<kWidth, kKeys>(keys, p.k.width, p.k_cache,
                              [&](int row) { return tables[0].k[row]; });
    if constexpr (Shape::kQueryInRegisters) {
      wait_for_copies();
      __syncthreads();  // and so are the queries
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        load_matrices<false>(
            query[s], queries + chunk_offset<kWidth>(first_row + matrix_row, s * 2 + matrix_chunk));
      }
    }
  }

  for (int number = 0; number < num_key_tiles; ++number) {
    const KeyTable<kKeys, kRotateKeys>& table = tables[number % 2];
    KeyTable<kKeys, kRotateKeys>& next_table = tables[(number + 1) % 2];
    const bool last = number + 1 == num_key_tiles;
    wait_for_copies();
    __syncthreads();  // keys have arrived, and the values of the last tile are no longer needed
    fetch_rows<kWidthV, kKeys>(values, p.v.width, p.v_cache, [&](int row) { return table.v[row]; });
    if constexpr (kRotateKeys) {
      rotate_keys<T, kWidth, kKeys, kPrefillThreads>(p, keys, table.k, table.angles, threadIdx.x);
      __syncthreads();  // all keys are rotated
    }

    // Scores
    float s[kKeys / 8][4] = {};
    if (has_rows) {
#pragma unroll kUnroll
      for (int k = 0; k < kSteps; ++k) {
        u32 fresh[4];
        if constexpr (!Shape::kQueryInRegisters) {
          load_matrices<false>(
              fresh, queries + chunk_offset<kWidth>(first_row + matrix_row, k * 2 + matrix_chunk));
        }
        const u32(&a)[4] =
            Shape::kQueryInRegisters ? query[Shape::kQueryInRegisters ? k : 0] : fresh;
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          u32 b[4];
          // Matrices: keys 0 to 7 of either chunk, then keys 8 to 15: what a product takes lies in
          // neighbouring registers.
          load_matrices<false>(b, keys + chunk_offset<kWidth>(n * 16 + key_row, k * 2 + key_chunk));
          mma_m16n8k16<T>(s[2 * n], a, b[0], b[1]);
          mma_m16n8k16<T>(s[2 * n + 1], a, b[2], b[3]);
        }
      }
    }
    const i64 first = shared.begin + i64{number} * kKeys;
    if (!last) look_up(next_table, p, t, first + kKeys, shared.end);
    wait_for_copies();
    __syncthreads();  // values and the next table have arrived, and the keys are no longer needed
    if (!last) {
      fetch_rows<kWidth, kKeys>(keys, p.k.width, p.k_cache,
                                [&](int row) { return next_table.k[row]; });
    }

    if (!has_rows) continue;

    // Weights
    to_logits(p, s);
    hide_keys(s, table.present, shared.limits, shared.seen_by_all[warp], p, t, first_row, first);
    weigh(s, largest, sum, o);

    // Values
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const u32 a[4] = {pack_pair<T>(s[2 * k][0], s[2 * k][1]),
                        pack_pair<T>(s[2 * k][2], s[2 * k][3]),
                        pack_pair<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                        pack_pair<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kWidthV / 16; ++n) {
        u32 b[4];
        load_matrices<true>(
            b, values + chunk_offset<kWidthV>(k * 16 + matrix_row, n * 2 + matrix_chunk));
        mma_m16n8k16<T>(o[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(o[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  // Store
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = sum_within_warp(sum[h], 4);
    const int row = first_row + lane / 4 + h * 8;
    RowEnd row_end{};
    if (row < t.num_rows) row_end = end_of_row(p, t, row, kv_head, largest[h], total);
    write_row<T>(p, t, row_end, row < t.num_rows, o, h);
    if (row < t.num_rows && lane % 4 == 0 && row_end.lse) *row_end.lse = row_end.lse_value;
  }
}
