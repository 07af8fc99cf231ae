// shift_four_bit of shift.cu by one thread per row.
#pragma once

namespace kvcupy_host {

template <typename TFormat, int kCount>
__global__ void shift_four_bit(ShiftParams p) {
  const u32 number = blockIdx.x * blockDim.x + threadIdx.x;
  const TransferPlace at = find_piece(p.rows, p.src_pages, p.dst_pages, p.faults, number, true);
  if (at.src_page < 0) return;
  const PageShift shift = find_shift(p, number, 0);
  if (!shift.row) return;
  const BlockScales& scales = p.key.block_scales;
  const RotatedPart rotated = {scales.rotated_width, scales.rotation_shift};
  const auto row_of = [&](i64 page) {
    char* row = p.keys + offset_of(p.key_strides, page, at);
    return FourBitRow{row, row + p.width / 2};
  };
  const FourBitRow in = row_of(at.src_page);
  const FourBitRow out = row_of(at.dst_page);
  float* staged = dynamic_shared<float>() + i64{threadIdx.x} * p.width;
  for (int first = 0; first < p.width; first += kElementsAlone) {
    const int count = min(kElementsAlone, p.width - first);
    decode_alone<TFormat>(in, 1.0f, first, count, p.key, rotated, staged + first);
  }
  rotate_staged(p, shift, staged, 0, 1);
  for (int first = 0; first < p.width; first += kElementsAlone) {
    const int count = min(kElementsAlone, p.width - first);
    encode_alone<TFormat>(staged + first, 1.0f, first, count, out, p.key, rotated);
  }
  copy_value(p, at, 0, 1);
}

}  // namespace kvcupy_host
