// Store K and V rows into a cache of a four-bit format, both in one launch.
//
// Threads map to rows as in cache_rows.cuh: a thread takes 16 elements of K and 16 of V at a time,
// and the neighbours that hold a group share its largest magnitude, from which its scale follows.
// MLA is the same kernel, as in store.cu.
//
// Bytes: each K and V row is read once, and its codes and group scales are written once, plus one
// index per token.
#include "cache_rows.cuh"
#include "four_bit.cuh"

// No thread exits before the last exchange.
// grid: (rows / (block / lanes)), block: (a multiple of lanes and of 32), smem: 0
template <typename TIn, typename TFormat, int kCount>
__global__ void store_four_bit(const __grid_constant__ CacheRowsParams p) {
  const CacheRow row = find_row(p);
  const bool active = row.slot >= 0;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = outside_row(p.key, p.k, row);
  const char* v_in = outside_row(p.value, p.v, row);
  const SlotPlace place = place_of(row.slot, p.page_size, p.page_shift);
  const FourBitRow k_out = four_bit_row(p.k_cache, p.k, place, row.head);
  const FourBitRow v_out = four_bit_row(p.v_cache, p.v, place, row.head);
  const float k_scale = p.k.width ? static_scale(p.k_scale, p.k, row.head) : 1.0f;
  const float v_scale = p.v.width ? static_scale(p.v_scale, p.v, row.head) : 1.0f;
#if !KVCUPY_ARCH
  if (lanes == 1) {
    if (!active) return;
    store_row_alone<TIn, TFormat, kCount>(k_in, k_scale, p.k.width, k_out, p.k);
    store_row_alone<TIn, TFormat, kCount>(v_in, v_scale, p.v.width, v_out, p.v);
    return;
  }
#endif
  constexpr int kInBytes = sizeof(TIn);

  // The loop is warp-uniform: lanes exchange values.
  const auto store_packs = [&](const auto& store) __attribute__((always_inline)) {
    for (int first = 0; first < max(p.k.width, p.v.width); first += lanes * kCodesPerThread) {
      const int at = first + lane * kCodesPerThread;
      const bool has_k = at < p.k.width;
      const bool has_v = at < p.v.width;
      Pack<TIn, kCodesPerThread> k;
      Pack<TIn, kCodesPerThread> v;
      // Load: threads without elements load another thread's
      if (p.k.width) k = load_sixteen<TIn, kCount>(k_in + (has_k ? at : 0) * kInBytes);
      if (p.v.width) v = load_sixteen<TIn, kCount>(v_in + (has_v ? at : 0) * kInBytes);
      // Convert, Store
      if (p.k.width) store(k, k_scale, at, active && has_k, k_out, p.k);
      if (p.v.width) store(v, v_scale, at, active && has_v, v_out, p.v);
    }
  };
  if (!is_stored_plainly(p.k) || !is_stored_plainly(p.v)) {
    store_packs([](const auto& x, float scale, int at, bool has, const FourBitRow& row,
                   const KVOperand& operand) __attribute__((always_inline)) {
      rotate_in_group<TFormat>(x, scale, at, has, row, operand, rotation_of(operand));
    });
  } else {
    store_packs([](const auto& x, float scale, int at, bool has, const FourBitRow& row,
                   const KVOperand& operand) __attribute__((always_inline)) {
      store_in_group<TFormat>(x, scale, at, has, row, operand);
    });
  }
}
