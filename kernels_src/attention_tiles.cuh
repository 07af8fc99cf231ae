// Tiles of queries and keys in shared memory, and scores in registers: what the kernels on tensor
// cores share.
//
// The 16-byte chunks of a row are permuted by its number, so that the same chunk of eight rows lies
// in all banks.
#pragma once

#include "attention_end.cuh"
#include "attention_rope.cuh"
#include "mma.cuh"

// Where chunk `chunk` of row `row` begins, in a tile of rows of kRowBytes.
template <int kRowBytes>
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  static_assert(kRowBytes % 32 == 0, "four rows are whole groups of 128 bytes");
  const int permuted = kRowBytes % 128 == 0  ? chunk ^ (row & 7)
                       : kRowBytes % 64 == 0 ? chunk ^ (row / 2 & 3)
                                             : chunk ^ (row / 4 & 1);
  return row * kRowBytes + permuted * 16;
}

// Likewise of kWidth elements of 16 bits.
template <int kWidth>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return chunk_at<kWidth * 2>(row, chunk);
}

// Whether any row of the tile sees a key: with a tree mask, a key of the tile may be no row's.
__device__ __forceinline__ bool seen_by_any(const AttentionParams& p, const AttentionTile& t,
                                            i64 key) {
  if (!p.tree_mask || key < first_tree_key(p, t)) return true;
  for (int row = 0; row < t.num_rows - 1; row += p.group) {
    if (sees(p, t, row, key)) return true;
  }
  return sees(p, t, t.num_rows - 1, key);
}

// Which of a lane's scores count: bit kOwn * n + i of element i of product n. The slow way, for
// trees and for keys that are kept past the window.
template <int kScores, int kOwn>
__device__ __forceinline__ u32 visible_scores(const AttentionParams& p, const AttentionTile& t,
                                              int first_row, i64 first) {
  const int lane = threadIdx.x % 32;
  u32 visible = 0;
#pragma unroll 1
  for (int j = 0; j < kScores * kOwn; ++j) {
    const int row = first_row + lane / 4 + j % kOwn / 2 * 8;
    const i64 number = first + j / kOwn * 8 + lane % 4 * 2 + j % 2;
    if (row < t.num_rows && sees(p, t, row, key_of(p, t, number))) visible |= 1u << j;
  }
  return visible;
}

// Take the scores of keys that a row does not see for minus infinity. The first key has number
// `first`, and `present` a bit for each; `limits` are of the tile's rows, of which this warp's
// begin with `first_row`, and `all` of what this warp's rows all see. Of each product a lane has
// kOwn scores: of row g, and if there are four, of row g + 8.
template <int kScores, int kOwn>
__device__ __forceinline__ void hide_keys(float (&s)[kScores][kOwn],
                                          const u32 (&present)[(kScores + 3) / 4],
                                          const RowLimits* limits, const RowLimits& all,
                                          const AttentionParams& p, const AttentionTile& t,
                                          int first_row, i64 first) {
  constexpr int kKeys = kScores * 8;
  constexpr u32 kComplete = kAllLanes >> (kKeys < 32 ? 32 - kKeys : 0);
  bool complete = true;
#pragma unroll
  for (int i = 0; i < (kScores + 3) / 4; ++i) complete = complete && present[i] == kComplete;
  const i64 first_key = key_of(p, t, first);
  const bool in_order = !p.window || (first >= t.sinks && first_key >= p.sink_keys);
  const bool before_tree = !p.tree_mask || first_key + kKeys <= first_tree_key(p, t);
  if (complete && in_order && first_key >= all.start && first_key + kKeys <= all.end) return;
  const int lane = threadIdx.x % 32;
  if (in_order && before_tree) {
    const auto column_of = [&](i64 key) {
      const i64 column = key - first_key;
      return static_cast<int>(column < 0 ? 0 : column < kKeys ? column : kKeys);
    };
#pragma unroll
    for (int h = 0; h < kOwn / 2; ++h) {
      const RowLimits own = limits[first_row + lane / 4 + h * 8];
      const int start = column_of(own.start);
      const int end = max(start, column_of(own.end));
#pragma unroll
      for (int i = 0; i < kScores * 2; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        const bool seen = static_cast<u32>(column - start) < static_cast<u32>(end - start);
        if (!seen) s[i / 2][h * 2 + i % 2] = -kInfinity;
      }
    }
  } else {
    const u32 visible = visible_scores<kScores, kOwn>(p, t, first_row, first);
#pragma unroll
    for (int i = 0; i < kScores * kOwn; ++i) {
      if (!(visible >> i & 1u)) s[i / kOwn][i % kOwn] = -kInfinity;
    }
  }
  if (complete) return;
#pragma unroll
  for (int i = 0; i < kScores * kOwn; ++i) {
    const int column = i / kOwn * 8 + lane % 4 * 2 + i % 2;
    if (!(present[column / 32] >> column % 32 & 1u)) s[i / kOwn][i % kOwn] = -kInfinity;
  }
}

// Rotate the keys of a tile and round them to T, as if they had been cached rotated: `thread` of
// kThreads, which must all call it. `rows` are null, and `angles` nothing, where a key is missing.
// Other threads see the result after a barrier.
template <typename T, int kWidth, int kCount, int kThreads>
__device__ __forceinline__ void rotate_keys(const AttentionParams& p, char* tile,
                                            const char* const (&rows)[kCount],
                                            const float* const (&angles)[kCount], int thread) {
  const int half = p.rotary_dim / 2;
  const int packs = half / (p.interleaved ? 4 : 8);  // of a row; one has pairs for a thread
  const int first = p.rotary_start / 8;
  for (int i = thread; i < kCount * packs; i += kThreads) {
    const int row = i / packs;
    const int pack = i - row * packs;
    if (!rows[row]) continue;
    const float* cosines = angles[row];
    const float* sines = cosines + half;
    char* near = tile + chunk_offset<kWidth>(row, first + pack);
    if (p.interleaved) {
      rotate_interleaved<T>(near, cosines + pack * 4, sines + pack * 4);
    } else {
      char* far = tile + chunk_offset<kWidth>(row, first + half / 8 + pack);
      rotate_halves<T>(near, far, cosines + pack * 8, sines + pack * 8);
    }
  }
}

template <int kScores>
__device__ __forceinline__ void to_logits(const AttentionParams& p, float (&s)[kScores][4]) {
  if (p.soft_cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = logit_of(p, s[n][i]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= p.score_scale;
    }
  }
}

// Turn a lane's scores into weights relative to the running maximum of row g, and of row g + 8 if
// there are four of each product, and rescale the sums of weights and of weighted values where one
// of the warp rises. Values of eight rows alone have the rows as columns. Every lane must call it.
template <int kScores, int kOwn, int kValues>
__device__ __forceinline__ void weigh(float (&s)[kScores][kOwn], float (&largest)[kOwn / 2],
                                      float (&sum)[kOwn / 2], float (&o)[kValues][4]) {
  float rescale[2] = {1.0f, 1.0f};
#pragma unroll
  for (int h = 0; h < kOwn / 2; ++h) {
    float top = largest[h];
#pragma unroll
    for (int n = 0; n < kScores; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top = max_within_warp(top, 4);
    const float base = top == -kInfinity ? 0.0f : top;  // nothing seen: all weights are 0
    rescale[h] = power_of_two(largest[h] - base);
    largest[h] = top;
    sum[h] *= rescale[h];
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        s[n][i] = power_of_two(s[n][i] - base);
        sum[h] += s[n][i];
      }
    }
  }
  if (!__any_sync(kAllLanes, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
  constexpr bool kRowsAreColumns = kOwn == 2;
  if constexpr (kRowsAreColumns) {
    const float own = rescale[0];
    const int first = threadIdx.x % 4 * 2 * 4;  // the lane of row 2t
#pragma unroll
    for (int i = 0; i < 2; ++i) rescale[i] = __shfl_sync(kAllLanes, own, first + i * 4);
  }
#pragma unroll
  for (int n = 0; n < kValues; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] *= rescale[kRowsAreColumns ? i % 2 : i / 2];
  }
}

// --- Powers of two -------------------------------------------------------------------------------

constexpr float kSmallestScale = __builtin_bit_cast(float, 0x00800000);  // 2 to the -126
constexpr float kLargestScale = __builtin_bit_cast(float, 0x7e800000);   // 2 to the 126

// A power of two, normal as its inverse is, so that the largest of some magnitudes is from 1 to 4
// times as large, if it is a normal number at all.
__device__ __forceinline__ float power_of_two_below(float largest) {
  const float power = __uint_as_float(__float_as_uint(largest) & 0x7f800000u);
  return fminf(fmaxf(power, kSmallestScale), kLargestScale);
}

__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}
