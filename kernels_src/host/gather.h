// gather_copy of gather.cu by one thread per row.
#pragma once

#include "copy.h"

namespace kvcupy_host {

// How far ahead of the row that is copied rows are fetched, whose slots are in no order: gathering
// 4096 tokens in random order takes two thirds of the time so.
constexpr int kFetchedBytes = 4096;

// K and V of the row that this far ahead is to be copied, or null.
struct RowAhead {
  const char* k;
  const char* v;
};

inline RowAhead row_ahead(const CacheRowsParams& p, const CacheRow& row) {
  const int rows = max(1, kFetchedBytes / max(1, p.k.width + p.v.width));
  const i64 number = i64{row.token} * p.num_heads + row.head + rows;
  if (number >= p.num_rows) return {};
  CacheRow ahead{static_cast<int>(number / p.num_heads), static_cast<int>(number % p.num_heads), 0};
  ahead.slot = load_index(p.slots + ahead.token * p.slot_stride_bytes, p.index_bytes);
  if (ahead.slot < 0 || ahead.slot >= p.num_slots) return {};
  return {cache_row(p.k_cache, p.k, ahead, p), cache_row(p.v_cache, p.v, ahead, p)};
}

template <int kWordBytes>
__global__ void gather_copy(CacheRowsParams p) {
#ifndef KVCUPY_HOST_VARIANTS
  ::gather_copy<kWordBytes>(p);
#else
  if (p.lane_shift) return ::gather_copy<kWordBytes>(p);
  const CacheRow row = find_row(p);
  if (row.slot < 0) {
    zero_skipped<kWordBytes>(p, row, 1);
    return;
  }
  const RowAhead ahead = row_ahead(p, row);
  const bool streamed = is_streamed(p.num_rows * (i64{p.k.width} + p.v.width));
  copy_row(outside_row(p.key, p.k, row), cache_row(p.k_cache, p.k, row, p), ahead.k, p.k.width,
           streamed);
  copy_row(outside_row(p.value, p.v, row), cache_row(p.v_cache, p.v, row, p), ahead.v, p.v.width,
           streamed);
#endif
}

}  // namespace kvcupy_host
