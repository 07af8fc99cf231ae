// store_four_bit.cu by one thread per row.
#pragma once

namespace kvcupy_host {

template <typename TIn, typename TFormat, int kCount>
__global__ void store_four_bit(CacheRowsParams p) {
  const CacheRow row = find_row(p);
  if (row.slot < 0) return;
  const SlotPlace place = place_of(row.slot, p.page_size, p.page_shift);
  const auto store = [&](char* rows, char* cache, const char* scale, const KVOperand& operand) {
    if (operand.width == 0) return;
    store_row_alone<TIn, TFormat, kCount>(outside_row(rows, operand, row),
                                          static_scale(scale, operand, row.head), operand.width,
                                          four_bit_row(cache, operand, place, row.head), operand);
  };
  store(p.key, p.k_cache, p.k_scale, p.k);
  store(p.value, p.v_cache, p.v_scale, p.v);
}

}  // namespace kvcupy_host
