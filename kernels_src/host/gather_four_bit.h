// gather_four_bit.cu by one thread per row.
#pragma once

namespace kvcupy_host {

// Restore a row, which may be rotated, by one thread.
template <typename TFormat, typename TOut, int kCount>
inline void restore_row_alone(const FourBitRow& row, float scale, const KVOperand& operand,
                              char* out) {
  const RotatedPart rotated = {operand.width, operand.block_scales.rotation_shift};
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

template <typename TFormat, typename TOut, int kCount>
__global__ void gather_four_bit(CacheRowsParams p) {
  const CacheRow row = find_row(p);
  if (row.slot < 0) {
    zero_skipped<kCount* static_cast<int>(sizeof(TOut))>(p, row, sizeof(TOut));
    return;
  }
  const SlotPlace place = place_of(row.slot, p.page_size, p.page_shift);
  const auto restore = [&](char* rows, char* cache, const char* scale, const KVOperand& operand) {
    if (operand.width == 0) return;
    restore_row_alone<TFormat, TOut, kCount>(four_bit_row(cache, operand, place, row.head),
                                             static_scale(scale, operand, row.head), operand,
                                             outside_row(rows, operand, row));
  };
  restore(p.key, p.k_cache, p.k_scale, p.k);
  restore(p.value, p.v_cache, p.v_scale, p.v);
}

}  // namespace kvcupy_host
