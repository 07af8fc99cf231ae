// Gather rows of K and V out of a cache of a four-bit format, both in one launch.
//
// The inverse of store_four_bit.cu: threads map to rows as in cache_rows.cuh, a thread takes 16
// elements of K and 16 of V at a time, and a skipped slot leaves its row of the output as
// gather.cu.
//
// Bytes: the codes and group scales of each K and V row are read once, and the row is written once,
// plus one index per token.
#include "cache_rows.cuh"
#include "four_bit.cuh"

// Restore sixteen elements of a row to what they were before the store. Every thread of the warp
// must call it; threads without elements only take part in the exchange.
template <typename TFormat, typename TOut, int kCount>
__device__ __forceinline__ void restore_sixteen(const SixteenCodes& codes, u32 bits, float scale,
                                                const KVOperand& operand, bool has, char* target) {
  const Rotation rotation = rotation_of(operand);
  if (!has && rotation.most_shift == 0) return;
  Sixteen values = decode_codes<TFormat>(codes, group_step<TFormat>(bits, scale));
  if (rotation.most_shift) rotate_sixteen(values, rotation);
  if (has) store_sixteen<TOut, kCount>(from_floats<TOut>(values), target);
}

#if !KVCUPY_ARCH
// Restore a row, which may be rotated, by one thread.
template <typename TFormat, typename TOut, int kCount>
inline void restore_row_alone(const FourBitRow& row, float scale, const KVOperand& operand,
                              char* out) {
  const RotatedPart rotated = {operand.width, operand.group_scales.rotation_shift};
  alignas(64) float x[kElementsAlone];
  for (int first = 0; first < operand.width; first += kElementsAlone) {
    const int count = min(kElementsAlone, operand.width - first);
    decode_alone<TFormat>(row, scale, first, count, operand, rotated, x);
    for (int i = 0; i < count; i += kCodesPerThread) {
      Sixteen values;
      values.load(reinterpret_cast<const char*>(x + i));
      store_sixteen<TOut, kCount>(from_floats<TOut>(values),
                                  out + (first + i) * static_cast<int>(sizeof(TOut)));
    }
  }
}
#endif

// Where rows are rotated no thread exits before the last exchange.
// grid: (rows / (block / lanes)), block: (a multiple of lanes and of 32), smem: 0
template <typename TFormat, typename TOut, int kCount>
__global__ void gather_four_bit(const __grid_constant__ CacheRowsParams p) {
  const CacheRow row = find_row(p);
  constexpr int kOutBytes = sizeof(TOut);
  const bool active = row.slot >= 0;
  if (!active) zero_skipped<kCount * kOutBytes>(p, row, kOutBytes);
  const bool rotates = rotation_of(p.k).shift | rotation_of(p.v).shift;
  if (!active && !rotates) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const SlotPlace place = place_of(row.slot, p.page_size, p.page_shift);
  const FourBitRow k_in = four_bit_row(p.k_cache, p.k, place, row.head);
  const FourBitRow v_in = four_bit_row(p.v_cache, p.v, place, row.head);
  char* k_out = outside_row(p.key, p.k, row);
  char* v_out = outside_row(p.value, p.v, row);
  const float k_scale = p.k.width ? static_scale(p.k_scale, p.k, row.head) : 1.0f;
  const float v_scale = p.v.width ? static_scale(p.v_scale, p.v, row.head) : 1.0f;

#if !KVCUPY_ARCH
  if (lanes == 1 && rotates) {
    if (!active) return;
    restore_row_alone<TFormat, TOut, kCount>(k_in, k_scale, p.k, k_out);
    restore_row_alone<TFormat, TOut, kCount>(v_in, v_scale, p.v, v_out);
    return;
  }
#endif

  // The loop is warp-uniform: lanes exchange values.
  for (int first = 0; first < max(p.k.width, p.v.width); first += lanes * kCodesPerThread) {
    const int at = first + lane * kCodesPerThread;
    const bool has_k = active && at < p.k.width;
    const bool has_v = active && at < p.v.width;
    SixteenCodes k = {};
    SixteenCodes v = {};
    u32 k_bits = 0;
    u32 v_bits = 0;
    // Load
    if (has_k) load_in_group<TFormat>(k_in, at, p.k, k, k_bits);
    if (has_v) load_in_group<TFormat>(v_in, at, p.v, v, v_bits);
    // Convert, Store
    restore_sixteen<TFormat, TOut, kCount>(k, k_bits, k_scale, p.k, has_k, k_out + at * kOutBytes);
    restore_sixteen<TFormat, TOut, kCount>(v, v_bits, v_scale, p.v, has_v, v_out + at * kOutBytes);
  }
}
