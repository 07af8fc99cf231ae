// store_copy of store.cu by one thread per row.
#pragma once

#include "copy.h"

namespace kvcupy_host {

template <int kWordBytes>
__global__ void store_copy(CacheRowsParams p) {
#ifndef KVCUPY_HOST_VARIANTS
  ::store_copy<kWordBytes>(p);
#else
  if (p.lane_shift) return ::store_copy<kWordBytes>(p);
  const CacheRow row = find_row(p);
  if (row.slot < 0) return;
  const bool streamed = is_streamed(p.num_rows * (i64{p.k.width} + p.v.width));
  copy_row(cache_row(p.k_cache, p.k, row, p), outside_row(p.key, p.k, row), nullptr, p.k.width,
           streamed);
  copy_row(cache_row(p.v_cache, p.v, row, p), outside_row(p.value, p.v, row), nullptr, p.v.width,
           streamed);
  if (p.k_scale_cache) *scale_address(p.k_scale_cache, p.k, row.slot, row.head) = 1.0f;
  if (p.v_scale_cache) *scale_address(p.v_scale_cache, p.v, row.slot, row.head) = 1.0f;
#endif
}

}  // namespace kvcupy_host
