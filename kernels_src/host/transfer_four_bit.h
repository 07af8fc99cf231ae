// transfer_to_four_bit and transfer_from_four_bit of transfer.cu by one thread per row.
#pragma once

namespace kvcupy_host {

// Call `convert(place)` for the rows of this thread.
template <typename Convert>
inline void for_each_row(const TransferConvertParams& p, const Convert& convert) {
  const u32 threads = gridDim.x * blockDim.x;
  for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < p.rows.num_pieces; n += threads) {
    const TransferPlace at = find_piece(p.rows, p.src_pages, p.dst_pages, p.faults, n, true);
    if (at.src_page >= 0) convert(at);
  }
}

// Encode a row by one thread, which holds every block.
template <typename TIn, typename TFormat, int kCount>
inline void encode_row_alone(const char* from, float factor, int width, char* to,
                             const KVOperand& source, const RotatedPart& source_rotated,
                             const KVOperand& operand, const RotatedPart& rotated) {
  const FourBitRow row = packed_row(to, width);
  if constexpr (!kQuantized<TIn> && !kFourBit<TIn>) {
    if (rotated.shift == 0) {
      store_row_alone<TIn, TFormat, kCount>(from, 1.0f, width, row, operand);
      return;
    }
  }
  alignas(64) float x[kElementsAlone];
  for (int first = 0; first < width; first += kElementsAlone) {
    const int count = min(kElementsAlone, width - first);
    if constexpr (kFourBit<TIn>) {
      const FourBitRow packed = packed_row(const_cast<char*>(from), width);
      decode_alone<TIn>(packed, 1.0f, first, count, source, source_rotated, x);
    } else {
      for (int i = 0; i < count; ++i) {
        x[i] = to_float(reinterpret_cast<const TIn*>(from)[first + i]);
        if constexpr (kQuantized<TIn>) x[i] *= factor;
      }
    }
    encode_alone<TFormat>(x, 1.0f, first, count, row, operand, rotated);
  }
}

template <typename TIn, typename TFormat, int kCount>
__global__ void transfer_to_four_bit(TransferConvertParams p) {
  const KVOperand source = operand_of(p.src);
  const KVOperand target = operand_of(p.dst);
  const auto factor_of = [](const char* scale) {
    return scale ? *reinterpret_cast<const float*>(scale) : 1.0f;
  };
  for_each_row(p, [&](const TransferPlace& at) {
    float k_factor = 1.0f;
    float v_factor = 1.0f;
    if constexpr (kQuantized<TIn>) {
      k_factor = factor_of(scale_of(p.src_k_scale, p.src_k_scale_strides, at.src_page, at));
      v_factor = factor_of(scale_of(p.src_v_scale, p.src_v_scale_strides, at.src_page, at));
    }
    encode_row_alone<TIn, TFormat, kCount>(p.src_k + offset_of(p.src_k_strides, at.src_page, at),
                                           k_factor, p.k_width,
                                           p.dst_k + offset_of(p.dst_k_strides, at.dst_page, at),
                                           source, p.src.k_rotated, target, p.dst.k_rotated);
    if (p.v_width == 0) return;
    encode_row_alone<TIn, TFormat, kCount>(p.src_v + offset_of(p.src_v_strides, at.src_page, at),
                                           v_factor, p.v_width,
                                           p.dst_v + offset_of(p.dst_v_strides, at.dst_page, at),
                                           source, p.src.v_rotated, target, p.dst.v_rotated);
  });
}

// Restore a row by one thread, and store its scale, if it gets one.
template <typename TFormat, typename TOut, int kCount>
inline void restore_row_alone(char* from, int width, char* to, float* scale_to,
                              const KVOperand& operand, const RotatedPart& rotated) {
  const FourBitRow row = packed_row(from, width);
  alignas(64) float x[kElementsAlone];
  AbsMax<kCodesPerThread> largest;
  for (int pass = scale_to ? 0 : 1; pass < 2; ++pass) {
    const bool stores = pass == 1;
    const float scale = scale_of_row<TOut>(largest.value(), 1);
    if (stores && scale_to) *scale_to = scale;
    for (int first = 0; first < width; first += kElementsAlone) {
      const int count = min(kElementsAlone, width - first);
      decode_alone<TFormat>(row, 1.0f, first, count, operand, rotated, x);
      for (int i = 0; i < count; i += kCodesPerThread) {
        Sixteen values;
        values.load(reinterpret_cast<const char*>(x + i));
        char* target = to + (first + i) * static_cast<int>(sizeof(TOut));
        if (!stores) {
          largest.add(values);
        } else if constexpr (kQuantized<TOut>) {
          const ScaleDivisor divisor(scale_to ? scale : 1.0f);
          store_sixteen<TOut, kCount>(quantize<TOut>(values, divisor), target);
        } else {
          store_sixteen<TOut, kCount>(from_floats<TOut>(values), target);
        }
      }
    }
  }
}

template <typename TFormat, typename TOut, int kCount>
__global__ void transfer_from_four_bit(TransferConvertParams p) {
  const KVOperand operand = operand_of(p.src);
  const auto scale_at = [](const char* scale) {
    return reinterpret_cast<float*>(const_cast<char*>(scale));
  };
  for_each_row(p, [&](const TransferPlace& at) {
    float* k_scale = nullptr;
    float* v_scale = nullptr;
    if constexpr (kQuantized<TOut>) {
      k_scale = scale_at(scale_of(p.dst_k_scale, p.dst_k_scale_strides, at.dst_page, at));
      v_scale = scale_at(scale_of(p.dst_v_scale, p.dst_v_scale_strides, at.dst_page, at));
    }
    restore_row_alone<TFormat, TOut, kCount>(
        const_cast<char*>(p.src_k) + offset_of(p.src_k_strides, at.src_page, at), p.k_width,
        p.dst_k + offset_of(p.dst_k_strides, at.dst_page, at), k_scale, operand, p.src.k_rotated);
    if (p.v_width == 0) return;
    restore_row_alone<TFormat, TOut, kCount>(
        const_cast<char*>(p.src_v) + offset_of(p.src_v_strides, at.src_page, at), p.v_width,
        p.dst_v + offset_of(p.dst_v_strides, at.dst_page, at), v_scale, operand, p.src.v_rotated);
  });
}

}  // namespace kvcupy_host
