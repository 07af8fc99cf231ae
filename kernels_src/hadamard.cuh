// Products of rows with an orthonormal Hadamard matrix, which is its own inverse: how four-bit
// caches may be rotated. Here of the rows that attention has in registers: queries that meet
// rotated keys, and sums of rotated values.
//
// The first `rotated_width` elements of a row are rotated, in blocks of the largest power of two
// that divides their number. The elements of a block meet in pairs 1, 2, 4, ... apart, each of
// which becomes its sum and its difference; at last they are divided by the root of the block.
#pragma once

#include "kv_operand.cuh"

// 1 / sqrt(2**shift), rounded to float32.
__device__ __forceinline__ float hadamard_scale(int shift) {
  const float power = __uint_as_float((127 - shift / 2) << 23);
  return shift % 2 ? power * 0.70710678f : power;
}

// Rotate a row that `lanes` neighbouring threads hold, a power of two: pack s of lane i is elements
// (s * lanes + i) * kCount and on. Blocks hold whole packs. Every thread of the warp must call it.
template <int kCount, int kSteps>
__device__ __forceinline__ void apply_hadamard(Pack<float, kCount> (&row)[kSteps],
                                               const GroupScales& rotation, int lane, int lanes) {
  const int block = 1 << rotation.rotation_shift;
  const float scale = hadamard_scale(rotation.rotation_shift);
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

// Rotate a row in memory, by one thread.
inline __device__ void apply_hadamard(float* row, const GroupScales& rotation) {
  const int block = 1 << rotation.rotation_shift;
  const float scale = hadamard_scale(rotation.rotation_shift);
  for (int first = 0; first < rotation.rotated_width; first += block) {
    float* own = row + first;
    for (int distance = 1; distance < block; distance *= 2) {
      for (int start = 0; start < block; start += 2 * distance) {
        for (int i = start; i < start + distance; ++i) {
          const float x = own[i];
          const float y = own[i + distance];
          own[i] = x + y;
          own[i + distance] = x - y;
        }
      }
    }
    for (int i = 0; i < block; ++i) own[i] *= scale;
  }
}
