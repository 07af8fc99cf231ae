// Keys that are cached raw, and rotated by their positions when they are read.
//
// A row of the table holds cosines, then sines, one each for rotary_dim / 2 pairs. In the rotary
// part of a K row, pair i is elements i and rotary_dim / 2 + i, or 2i and 2i + 1 when interleaved.
// The scale of a key is applied later: rotation and scaling commute.
#pragma once

#include "attention.cuh"

// The row of the table for a key.
__device__ __forceinline__ const float* angles_of(const AttentionParams& p, const AttentionTile& t,
                                                  i64 key) {
  i64 position = key_position(p, t, key, first_tree_key(p, t));
  const i64 last = p.max_positions - 1;
  position = position < 0 ? 0 : position < last ? position : last;
  return reinterpret_cast<const float*>(p.rope_table + position * p.rope_row_bytes);
}

// The element that is paired with element i of a row, or -1: element i is not rotated.
__device__ __forceinline__ int partner_of(const AttentionParams& p, int i) {
  const int at = i - p.rotary_start;
  if (at < 0 || at >= p.rotary_dim) return -1;
  if (p.interleaved) return p.rotary_start + (at ^ 1);
  return at < p.rotary_dim / 2 ? i + p.rotary_dim / 2 : i - p.rotary_dim / 2;
}

// Rotate element i of a row.
__device__ __forceinline__ float rotate_element(const AttentionParams& p, float own, float partner,
                                                const float* angles, int i) {
  const int at = i - p.rotary_start;
  const int half = p.rotary_dim / 2;
  if (at < 0 || at >= p.rotary_dim) return own;
  const bool first = p.interleaved ? at % 2 == 0 : at < half;
  const int pair = p.interleaved ? at / 2 : first ? at : at - half;
  const float other = partner * angles[half + pair];
  return fmaf(own, angles[pair], first ? -other : other);
}

// Rotate elements i to i + 7 of a row, all or none of them rotary; `partners` are half a row apart.
// Angles are at multiples of 16 bytes.
__device__ __forceinline__ Pack<float, 8> rotate_pack(const AttentionParams& p,
                                                      const Pack<float, 8>& own,
                                                      const Pack<float, 8>& partners,
                                                      const float* angles, int i) {
  const int at = i - p.rotary_start;
  const int half = p.rotary_dim / 2;
  if (at < 0 || at >= p.rotary_dim) return own;
  Pack<float, 8> rotated;
  if (p.interleaved) {
    Pack<float, 4> cosines;
    Pack<float, 4> sines;
    cosines.load(reinterpret_cast<const char*>(angles + at / 2));
    sines.load(reinterpret_cast<const char*>(angles + half + at / 2));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = own.values[2 * j];
      const float b = own.values[2 * j + 1];
      rotated.values[2 * j] = fmaf(a, cosines.values[j], -b * sines.values[j]);
      rotated.values[2 * j + 1] = fmaf(b, cosines.values[j], a * sines.values[j]);
    }
    return rotated;
  }
  const bool first = at < half;
  const int pair = first ? at : at - half;
  Pack<float, 8> cosines;
  Pack<float, 8> sines;
  cosines.load(reinterpret_cast<const char*>(angles + pair));
  sines.load(reinterpret_cast<const char*>(angles + half + pair));
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float other = partners.values[j] * sines.values[j];
    rotated.values[j] = fmaf(own.values[j], cosines.values[j], first ? -other : other);
  }
  return rotated;
}

// Rotate eight pairs of a row in memory, half a row apart, and round them to T.
template <typename T>
__device__ __forceinline__ void rotate_halves(char* near, char* far, const float* cosines,
                                              const float* sines) {
  Pack<T, 8> a;
  Pack<T, 8> b;
  Pack<float, 8> cosine;
  Pack<float, 8> sine;
  a.load(near);
  b.load(far);
  cosine.load(reinterpret_cast<const char*>(cosines));
  sine.load(reinterpret_cast<const char*>(sines));
  rotate(to_floats(a), to_floats(b), cosine, sine, a, b);
  a.store(near);
  b.store(far);
}

// Rotate four interleaved pairs.
template <typename T>
__device__ __forceinline__ void rotate_interleaved(char* both, const float* cosines,
                                                   const float* sines) {
  Pack<T, 8> pairs;
  Pack<T, 4> a;
  Pack<T, 4> b;
  Pack<float, 4> cosine;
  Pack<float, 4> sine;
  pairs.load(both);
  split(pairs, a, b);
  cosine.load(reinterpret_cast<const char*>(cosines));
  sine.load(reinterpret_cast<const char*>(sines));
  rotate(to_floats(a), to_floats(b), cosine, sine, a, b);
  merge(a, b).store(both);
}
