// Decode over a paged cache, and the plain path of all other attention.
//
// A block takes a tile of up to kRows packed rows, one KV head and one piece of the keys. Keys are
// dealt round-robin to groups of neighbouring lanes: a group's lanes load a row of K and of V in
// 16-byte words, several keys before the first is used, and every packed row uses what was loaded.
// Each group keeps an online softmax (Milakov and Gimelshein, 2018) in registers; at the end the
// block merges them, and merge.cu merges the pieces of a tile.
//
// Bytes: each visible K and V row once per tile, which in decode is once for all heads of its
// group. When keys are rotated on read, also the other half of the rotary part, from L1, and a row
// of the table.
//
// On a processor, where a block is one thread, host/attention.h does this for blocks of keys.
#include "attention_end.cuh"
#include "attention_rows.cuh"

// The online softmax of one group of lanes over its keys, for every row of the tile. A lane holds
// kSteps packs of a row: elements (step * lanes + lane) * 8 and on.
template <int kRows, int kSteps>
struct Softmax {
  static constexpr int kCount = 8;
  float largest[kRows];  // logit, base 2
  float sum[kRows];      // of weights, against the largest
  Pack<float, kCount> values[kRows][kSteps];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = -kInfinity;
      sum[r] = 0.0f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) values[r][s] = Pack<float, kCount>{};
    }
  }

  // Raise the maximum to `logit`, and rescale what was summed.
  __device__ __forceinline__ void raise(int r, float logit) {
    if (logit <= largest[r]) return;
    const float rescale = exp2f(largest[r] - logit);  // 0 where nothing was seen before
    largest[r] = logit;
    sum[r] *= rescale;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[r][s].values[j] *= rescale;
    }
  }
};

// Merge the groups of a block and write the tile's rows. Every thread must call it.
template <int kRows, int kSteps>
__device__ __forceinline__ void finish_tile(const AttentionParams& p, const AttentionTile& t,
                                            Softmax<kRows, kSteps>& own, int kv_head, int lane,
                                            int lanes) {
  constexpr int kCount = 8;
  const int groups = blockDim.x / lanes;
  if (groups == 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= t.num_rows) continue;
      const RowEnd end = end_of_row(p, t, r, kv_head, own.largest[r], own.sum[r]);
      const float inverse = end.divisor != 0.0f ? 1.0f / end.divisor : 0.0f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int first = (s * lanes + lane) * kCount;
        for (int j = 0; j < kCount && first + j < p.v.width; ++j) {
          store_any(end.out, first + j, end.format, own.values[r][s].values[j] * inverse);
        }
      }
      if (lane == 0 && end.lse) *end.lse = end.lse_value;
    }
    return;
  }
  const int group = threadIdx.x / lanes;
  const int width = lanes * kCount * kSteps;
  float* tops = dynamic_shared<float>();  // [groups, kRows]
  float* sums = tops + groups * kRows;    // [groups, kRows]
  float* values = sums + groups * kRows;  // [groups, kRows, width]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0) {
      tops[group * kRows + r] = own.largest[r];
      sums[group * kRows + r] = own.sum[r];
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      own.values[r][s].store(reinterpret_cast<char*>(values + i64{group * kRows + r} * width +
                                                     (s * lanes + lane) * kCount));
    }
  }
  __syncthreads();  // the groups have written theirs
  if (const int r = threadIdx.x; r < t.num_rows) {
    // The tops of a row become weights; its sum and its top take the places of two sums.
    float largest = -kInfinity;
    for (int g = 0; g < groups; ++g) largest = fmaxf(largest, tops[g * kRows + r]);
    float sum = 0.0f;
    for (int g = 0; g < groups; ++g) {
      const float top = tops[g * kRows + r];
      const float weight = top == -kInfinity ? 0.0f : exp2f(top - largest);
      if (weight != 0.0f) sum += sums[g * kRows + r] * weight;
      tops[g * kRows + r] = weight;
    }
    sums[r] = sum;
    sums[kRows + r] = largest;
  }
  __syncthreads();  // the weights of groups are there
  for (int r = 0; r < t.num_rows; ++r) {
    const RowEnd end = end_of_row(p, t, r, kv_head, sums[kRows + r], sums[r]);
    const float inverse = end.divisor != 0.0f ? 1.0f / end.divisor : 0.0f;
    for (int i = threadIdx.x; i < p.v.width; i += blockDim.x) {
      float value = 0.0f;
      for (int g = 0; g < groups; ++g) {
        const float weight = tops[g * kRows + r];
        if (weight != 0.0f) value += values[i64{g * kRows + r} * width + i] * weight;
      }
      store_any(end.out, i, end.format, value * inverse);
    }
    if (threadIdx.x == 0 && end.lse) *end.lse = end.lse_value;
  }
}

#ifdef KVCUPY_NO_BARRIERS
#include "host/attention.h"
#endif

// kRotateKeys: keys are cached raw and rotated on read, by `rope_table`.
// Two blocks per SM: with three, some specialisations would spill.
// grid: (H, pieces), block: (whole groups of lanes), smem: what `finish_tile` lays out,
// 0 for one group
template <typename TCache, int kRows, int kSteps, bool kRotateKeys>
__global__ void __launch_bounds__(128, 2)
    attention_decode(const __grid_constant__ AttentionParams p) {
#ifdef KVCUPY_NO_BARRIERS  // on a processor: a block is one thread
  kvcupy_host::attend<TCache, kRows, kSteps, kRotateKeys>(p);
#else
  constexpr int kCount = 8;
  constexpr int kBytes = Elements<TCache, kCount>::kBytes * (kRotateKeys ? 2 : 1);
  // Keys in flight per group: as many as fit in registers beside the rows. Rotated rows of four
  // bits in three steps would spill with NVRTC 13 on sm_100 and sm_120.
  constexpr bool kIsLarge = kBytes > 4 || (kFourBit<TCache> && kRotateKeys && kSteps > 2);
  constexpr int kKeys = kIsLarge                                  ? 1
                        : kRows * kSteps == 1 && kBytes < 4       ? 4
                        : kRows * kSteps <= (kRotateKeys ? 4 : 8) ? 2
                                                                  : 1;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int groups = blockDim.x / lanes;
  const int kv_head = blockIdx.x;
  const bool reports = kv_head == 0 && lane == 0;
  const bool is_first = reports && threadIdx.x == 0;
  const AttentionPiece piece = piece_of(p, number_of_block(), kRows, is_first);
  const AttentionTile t = find_tile(p, piece, kRows, is_first);
  if (t.num_rows == 0) return;
  const KeyRange range = keys_of(piece, t, 1);

  // Load the queries
  Pack<float, kCount> query[kRows][kSteps];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool exists = r < t.num_rows;
    const char* row = query_row(p, t, exists ? r : 0, kv_head);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Elements<AnyFormat, kCount> elements;
      elements.load(row, (s * lanes + lane) * kCount, exists ? p.k.width : 0, p.query_format);
      query[r][s] = elements.floats();
    }
    if constexpr (kFourBit<TCache>) {
      if (p.k.group_scales.rotation_shift) {
        apply_hadamard(query[r], p.k.group_scales, lane, lanes);
      }
    }
  }

  Softmax<kRows, kSteps> own;
  own.clear();
  const i64 end = range.end;
  const RowLimits all = seen_by_all(p, t);
  const int group = threadIdx.x / lanes;
  const int of_warp = lanes < 32 ? group & (32 / lanes - 1) : 0;

  // The loop is warp-uniform: lanes exchange values.
  for (i64 first = range.begin + i64{group - of_warp} * kKeys; first < end;
       first += groups * kKeys) {
    const i64 mine = first + of_warp * kKeys;
    Elements<TCache, kCount> k[kKeys][kSteps];
    Elements<TCache, kCount> v[kKeys][kSteps];
    Partners<TCache, kCount> partners[kRotateKeys ? kKeys : 1][kRotateKeys ? kSteps : 1];
    i64 keys[kKeys];
    float k_scales[kKeys];
    float v_scales[kKeys];
    // Load
#pragma unroll
    for (int n = 0; n < kKeys; ++n) {
      keys[n] = mine + n < end ? key_of(p, t, mine + n) : -1;
      i64 offset = 0;
      i64 page = -1;
      if (keys[n] >= 0 && !is_in_view(p, t, keys[n])) keys[n] = -1;
      if (keys[n] >= 0) {
        const i64 place = place_of(p, t, keys[n]);
        offset = offset_in_page(p, place);
        page = page_of(p, t, place, reports);
        if (page < 0) keys[n] = -1;
      }
      const bool there = keys[n] >= 0;
      if (!there) page = 0;
      const auto k_row = cached_row<TCache>(p.k_cache, p.k_scale, p.k, page, offset, kv_head);
      const auto v_row = cached_row<TCache>(p.v_cache, p.v_scale, p.v, page, offset, kv_head);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int i = (s * lanes + lane) * kCount;
        k[n][s].load(k_row, i, there ? p.k.width : 0, p.k_format);
        if constexpr (kRotateKeys) {
          partners[n][s] = load_partners<TCache, kCount>(p, k_row, i, there ? p.k.width : 0);
        }
        v[n][s].load(v_row, i, there ? p.v.width : 0, p.v_format);
      }
      if constexpr (kFourBit<TCache>) {  // the steps of their groups have them
        k_scales[n] = v_scales[n] = 1.0f;
      } else {
        const i64 slot = page * p.page_size + offset;
        k_scales[n] = there ? scale_of_row(p.k_scale, p.k_scale_cache, p.k, slot, kv_head) : 0.0f;
        v_scales[n] = there ? scale_of_row(p.v_scale, p.v_scale_cache, p.v, slot, kv_head) : 0.0f;
      }
    }

    // Scores
    float logits[kRows][kKeys];
#pragma unroll
    for (int n = 0; n < kKeys; ++n) {
      Pack<float, kCount> dots[kRows];
      const float* angles = nullptr;
      if constexpr (kRotateKeys) angles = angles_of(p, t, keys[n]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        Pack<float, kCount> floats;
        if constexpr (kRotateKeys) {
          floats = rotated(p, k[n][s], partners[n][s], angles, (s * lanes + lane) * kCount);
        } else {
          floats = k[n][s].floats();
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (s == 0) dots[r] = Pack<float, kCount>{};
          multiply_add(query[r][s], floats, dots[r]);
        }
      }
      const bool by_all = keys[n] >= all.start && keys[n] < all.end;
      u32 rows[(kRows + 31) / 32] = {};  // bits of those that see the key, unless all do
      if (!by_all && keys[n] >= 0) {
#pragma unroll 1  // few keys, and registers are scarce
        for (int r = 0; r < t.num_rows; ++r) {
          if (sees(p, t, r, keys[n])) rows[kRows <= 32 ? 0 : r / 32] |= 1u << r % 32;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float dot = sum_of_lanes(sum_of(dots[r]), lanes) * k_scales[n];
        const bool row_sees = by_all || (rows[r / 32] >> r % 32 & 1u) != 0;
        const bool seen = keys[n] >= 0 && r < t.num_rows && row_sees;
        logits[r][n] = seen ? logit_of(p, dot) : -kInfinity;
      }
    }

    // Weights and values
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float largest = logits[r][0];
#pragma unroll
      for (int n = 1; n < kKeys; ++n) largest = fmaxf(largest, logits[r][n]);
      own.raise(r, largest);
    }
#pragma unroll
    for (int n = 0; n < kKeys; ++n) {
      float weights[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        // A NaN score propagates, and a masked key adds nothing, whatever its value is.
        weights[r] = logits[r][n] == -kInfinity ? 0.0f : exp2f(logits[r][n] - own.largest[r]);
        own.sum[r] += weights[r];
        weights[r] *= v_scales[n];
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const Pack<float, kCount> floats = v[n][s].floats();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (logits[r][n] != -kInfinity) multiply_add(weights[r], floats, own.values[r][s]);
        }
      }
    }
  }
  if constexpr (kFourBit<TCache>) {  // of each group, before they are merged
    if (p.v.group_scales.rotation_shift) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        apply_hadamard(own.values[r], p.v.group_scales, lane, lanes);
      }
    }
  }
  finish_tile(p, t, own, kv_head, lane, lanes);
#endif
}
