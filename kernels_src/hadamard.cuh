// The rotation of four-bit rows (four_bit.cuh), of rows that attention has in registers: queries
// that meet rotated keys, and sums of rotated values. Of a row the first `rotated_width` elements
// are rotated, whole blocks.
#pragma once

#include "four_bit.cuh"

// Rotate a row that `lanes` neighbouring threads hold, a power of two: pack s of lane i is elements
// (s * lanes + i) * kCount and on. Blocks hold whole packs. Every thread of the warp must call it.
template <int kCount, int kSteps>
__device__ __forceinline__ void apply_hadamard(Pack<float, kCount> (&row)[kSteps],
                                               const GroupScales& rotation, int lane, int lanes) {
  const int block = 1 << rotation.rotation_shift;
  const float scale = rotation_scale(rotation.rotation_shift);
  const auto is_rotated = [&](int step) {
    return (step * lanes + lane) * kCount < rotation.rotated_width;
  };
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (!is_rotated(s)) continue;
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j & distance) continue;
        const float x = row[s].values[j];
        const float y = row[s].values[j + distance];
        row[s].values[j] = x + y;
        row[s].values[j + distance] = x - y;
      }
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance >= lanes || distance * kCount >= block) break;  // for all threads alike
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float own = row[s].values[j];
        const float other = __shfl_xor_sync(kAllLanes, own, distance);
        if (is_rotated(s)) row[s].values[j] = lane & distance ? other - own : own + other;
      }
    }
  }
#pragma unroll
  for (int distance = 1; distance < kSteps; distance *= 2) {
    if (distance * lanes * kCount >= block) break;
#pragma unroll
    for (int s = 0; s + distance < kSteps; ++s) {
      if (s & distance || !is_rotated(s)) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float x = row[s].values[j];
        const float y = row[s + distance].values[j];
        row[s].values[j] = x + y;
        row[s + distance].values[j] = x - y;
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (is_rotated(s)) row[s].values[j] *= scale;
    }
  }
}
