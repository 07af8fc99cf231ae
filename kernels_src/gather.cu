// Gather rows of K and V out of a cache, dequantised on request, both in one launch.
//
// The inverse of store.cu: threads map to rows as in cache_rows.cuh, and a skipped slot leaves its
// row of the output as it was.
//
// Bytes: each K and V row is read once and written once, plus one index per token.
#include "cache_rows.cuh"
#include "four_bit.cuh"

// Same format in and out: bytes.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <int kWordBytes>
__global__ void gather_copy(const __grid_constant__ CacheRowsParams p) {
  const CacheRow row = find_row(p);
  if (row.slot < 0) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  copy_rows<kWordBytes>(p, cache_row(p.k_cache, p.k, row, p), outside_row(p.key, p.k, row),
                        cache_row(p.v_cache, p.v, row, p), outside_row(p.value, p.v, row),
                        cache_row_ahead(p, row), lane, lanes);
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
  const CacheRow row = find_row(p);
  if (row.slot < 0) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = cache_row(p.k_cache, p.k, row, p);
  const char* v_in = cache_row(p.v_cache, p.v, row, p);
  char* k_out = outside_row(p.key, p.k, row);
  char* v_out = outside_row(p.value, p.v, row);
  const float k_scale = p.k.width ? scale_of(p.k_scale, p.k_scale_cache, p.k, row) : 1.0f;
  const float v_scale = p.v.width ? scale_of(p.v_scale, p.v_scale_cache, p.v, row) : 1.0f;
  constexpr int kInBytes = sizeof(TCache);
  constexpr int kOutBytes = sizeof(TOut);

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

// From a four-bit format: a thread takes 16 elements of K and 16 of V at a time.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <typename TFormat, typename TOut, int kCount>
__global__ void gather_four_bit(const __grid_constant__ CacheRowsParams p) {
  const CacheRow row = find_row(p);
  if (row.slot < 0) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const SlotPlace place = place_of(row.slot, p.page_size, p.page_shift);
  const FourBitRow k_in = four_bit_row(p.k_cache, p.k, place, row.head);
  const FourBitRow v_in = four_bit_row(p.v_cache, p.v, place, row.head);
  char* k_out = outside_row(p.key, p.k, row);
  char* v_out = outside_row(p.value, p.v, row);
  const float k_scale = p.k.width ? static_scale(p.k_scale, p.k, row.head) : 1.0f;
  const float v_scale = p.v.width ? static_scale(p.v_scale, p.v, row.head) : 1.0f;
  constexpr int kOutBytes = sizeof(TOut);

  for (int at = lane * kCodesPerThread; at < p.k.width || at < p.v.width;
       at += lanes * kCodesPerThread) {
    SixteenCodes k;
    SixteenCodes v;
    u32 k_bits = 0;
    u32 v_bits = 0;
    // Load
    if (at < p.k.width) load_in_group<TFormat>(k_in, at, p.k, k, k_bits);
    if (at < p.v.width) load_in_group<TFormat>(v_in, at, p.v, v, v_bits);
    // Convert, Store
    if (at < p.k.width) {
      const auto step = group_step<TFormat>(k_bits, k_scale);
      store_sixteen<TOut, kCount>(from_floats<TOut>(decode_codes<TFormat>(k, step)),
                                  k_out + at * kOutBytes);
    }
    if (at < p.v.width) {
      const auto step = group_step<TFormat>(v_bits, v_scale);
      store_sixteen<TOut, kCount>(from_floats<TOut>(decode_codes<TFormat>(v, step)),
                                  v_out + at * kOutBytes);
    }
  }
}
