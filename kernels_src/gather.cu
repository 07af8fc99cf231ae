// Gather rows of K and V out of a cache, dequantised on request, both in one launch.
//
// The inverse of store.cu: threads map to rows as in cache_rows.cuh. A skipped slot leaves its row
// of the output as it was, or makes it zeros where nothing was there before.
//
// Bytes: each K and V row is read once and written once, plus one index per token.
#include "cache_rows.cuh"

// Same format in and out: bytes.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <int kWordBytes>
__global__ void gather_copy(const __grid_constant__ CacheRowsParams p) {
  const CacheRow row = find_row(p);
  if (row.slot < 0) {
    zero_skipped<kWordBytes>(p, row, 1);
    return;
  }
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  copy_rows<kWordBytes>(p, cache_row(p.k_cache, p.k, row, p), cache_row(p.v_cache, p.v, row, p),
                        OutOfCache{p, row}, cache_row_ahead(p, row), lane, lanes);
}

// The scale of a row of the cache: its own, or its head's.
__device__ __forceinline__ float scale_of(const char* scale, char* scale_cache,
                                          const KVOperand& operand, const CacheRow& row) {
  return scale_cache ? *scale_address(scale_cache, operand, row.slot, row.head)
                     : static_scale(scale, operand, row.head);
}

template <typename TCache, typename TOut, int kCount>
__device__ __forceinline__ Pack<TOut, kCount> dequantise(const Pack<TCache, kCount>& in,
                                                         float scale) {
  if constexpr (kQuantised<TCache>) return from_floats<TOut>(products(to_floats(in), scale));
  return from_floats<TOut>(to_floats(in));
}

// Another format: float32 arithmetic, one rounding.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <typename TCache, typename TOut, int kCount>
__global__ void gather_convert(const __grid_constant__ CacheRowsParams p) {
  constexpr int kInBytes = sizeof(TCache);
  constexpr int kOutBytes = sizeof(TOut);
  const CacheRow row = find_row(p);
  if (row.slot < 0) {
    zero_skipped<kCount * kOutBytes>(p, row, kOutBytes);
    return;
  }
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = cache_row(p.k_cache, p.k, row, p);
  const char* v_in = cache_row(p.v_cache, p.v, row, p);
  char* k_out = outside_row(p.key, p.k, row);
  char* v_out = outside_row(p.value, p.v, row);
  const float k_scale = p.k.width ? scale_of(p.k_scale, p.k_scale_cache, p.k, row) : 1.0f;
  const float v_scale = p.v.width ? scale_of(p.v_scale, p.v_scale_cache, p.v, row) : 1.0f;

  for (int i = lane * kCount; i < p.k.width || i < p.v.width; i += lanes * kCount) {
    Pack<TCache, kCount> k;
    Pack<TCache, kCount> v;
    // Load
    if (i < p.k.width) k.load(k_in + i * kInBytes);
    if (i < p.v.width) v.load(v_in + i * kInBytes);
    // Convert, Store
    if (i < p.k.width) dequantise<TCache, TOut>(k, k_scale).store(k_out + i * kOutBytes);
    if (i < p.v.width) dequantise<TCache, TOut>(v, v_scale).store(v_out + i * kOutBytes);
  }
}
