// Rows that are wider than tensor-core decode else takes them, such as the latents of multi-head
// latent attention, whose values are the first elements of its keys.
#pragma once

#include "attention_decode_mma.cuh"

constexpr int kLatentWidth = 576;
constexpr int kLatentWidthV = 512;

// Whether a row of V, or its end alone, lies elsewhere than in the row of K. Without a branch, so
// that it stays in a predicate.
__device__ __forceinline__ bool values_lie_elsewhere(const AttentionParams& p) {
  const i64 addresses = reinterpret_cast<i64>(p.v_cache) ^ reinterpret_cast<i64>(p.k_cache);
  const i64 pages = p.v.cache.page_bytes - p.k.cache.page_bytes;
  const i64 offsets = p.v.cache.offset_bytes - p.k.cache.offset_bytes;
  const i64 heads = p.v.cache.head_bytes - p.k.cache.head_bytes;
  const i64 past_end = p.v.width > p.k.width;
  const i64 scales = p.v.group_scales.offset_bytes - p.k.group_scales.offset_bytes;
  return (addresses | pages | offsets | heads | past_end | scales) != 0;
}
