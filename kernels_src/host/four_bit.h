// Rows of four bits by one thread, which holds all blocks of a row: a processor's threads do not
// exchange values.
#pragma once

#ifdef KVCUPY_HOST_VARIANTS
namespace kvcupy_host {

// Eight codes by vectors, bit for bit as four_bit.cuh.
template <typename TFormat>
inline Pack<float, 8> decode_eight_codes(u32 codes, float step) {
  const Ints shifts = {0, 4, 8, 12, 16, 20, 24, 28};
  const Ints nibbles = (Ints{} + static_cast<int>(codes)) >> shifts & 15;
  if constexpr (!kE2m1<TFormat>) {
    const Floats values = __builtin_convertvector((nibbles ^ 8) - 8, Floats);
    return bits_as<Pack<float, 8>>(values * step);
  } else {
    // Exponent and mantissa where float32 has them, but for 0 and 0.5.
    const Ints magnitudes = nibbles & 7;
    const Ints normal = (magnitudes << 22) + (126 << 23);
    const Ints small = bits_as<Ints>(__builtin_convertvector(magnitudes, Floats) * 0.5f);
    const Ints are_small = magnitudes < 2;
    const Ints bits = (are_small & small) | (~are_small & normal) | (nibbles & 8) << 28;
    return bits_as<Pack<float, 8>>(bits_as<Floats>(bits) * step);
  }
}

}  // namespace kvcupy_host

template <>
inline Pack<float, 8> decode_codes<nvfp4>(u32 codes, float step) {
  return kvcupy_host::decode_eight_codes<nvfp4>(codes, step);
}
template <>
inline Pack<float, 8> decode_codes<mxfp4>(u32 codes, float step) {
  return kvcupy_host::decode_eight_codes<mxfp4>(codes, step);
}
template <>
inline Pack<float, 8> decode_codes<int4x2>(u32 codes, float step) {
  return kvcupy_host::decode_eight_codes<int4x2>(codes, step);
}
#endif

namespace kvcupy_host {

// Rotate a block by one thread: eight elements at a time where the compiler has vectors for that.
inline void rotate_alone(float* x, int shift) {
  const int block = 1 << shift;
  int half = 1;
#ifdef KVCUPY_HOST_VARIANTS
  const auto load = [](const float* from) {
    Pack<float, 8> eight;
    eight.load(reinterpret_cast<const char*>(from));
    return bits_as<Floats>(eight);
  };
  const auto store = [](Floats eight, float* to) {
    bits_as<Pack<float, 8>>(eight).store(reinterpret_cast<char*>(to));
  };
  for (int i = 0; i < block; i += 8) store(butterflies_of_eight(load(x + i)), x + i);
  for (half = 8; half < block; half *= 2) {
    for (int i = 0; i < block; i += 8) {
      if (i & half) continue;
      const Floats first = load(x + i);
      const Floats second = load(x + i + half);
      store(first + second, x + i);
      store(first - second, x + i + half);
    }
  }
#endif
  for (; half < block; half *= 2) {
    for (int i = 0; i < block; ++i) {
      if (i & half) continue;
      const float first = x[i];
      const float second = x[i + half];
      x[i] = first + second;
      x[i + half] = first - second;
    }
  }
  const float scale = rotation_scale(shift);
  for (int i = 0; i < block; ++i) x[i] *= scale;
}

// Store a row that is not rotated by one thread, which holds every block.
template <typename T, typename TFormat, int kCount>
inline void store_blocks_alone(const char* in, float scale, int width, const FourBitRow& row,
                               const KVOperand& operand) {
  const int block = 1 << block_shift<TFormat>(operand);
  for (int first = 0; first < width; first += block) {
    float absmax = 0.0f;
    for (int at = first; at < first + block; at += kCodesPerThread) {
      auto pack = load_sixteen<T, kCount>(in + at * static_cast<int>(sizeof(T)));
      absmax = fmaxf(absmax, clear_nan(pack));
    }
    u32 bits = scale_of_block<TFormat>(absmax, scale);
    if constexpr (kSameType<TFormat, nvfp4>) {
      if (operand.block_scales.four_over_six) {
        auto pack = load_sixteen<T, kCount>(in + first * static_cast<int>(sizeof(T)));
        clear_nan(pack);
        encode_four_over_six<TFormat>(pack, absmax, bits, scale)
            .store(row.codes + first / 2, operand.block_scales.code_word_bytes);
        store_block_scale<TFormat>(row.scales + first / block, bits);
        continue;
      }
    }
    store_block_scale<TFormat>(row.scales + first / block * kBlockScaleBytes<TFormat>, bits);
    const float step = block_step<TFormat>(bits, scale);
    for (int at = first; at < first + block; at += kCodesPerThread) {
      auto pack = load_sixteen<T, kCount>(in + at * static_cast<int>(sizeof(T)));
      clear_nan(pack);
      encode_codes<TFormat>(pack, absmax, step)
          .store(row.codes + at / 2, operand.block_scales.code_word_bytes);
    }
  }
}

// Elements of a row that a thread rotates by itself at a time: whole blocks and blocks.
constexpr int kElementsAlone = 512;

// Store elements of a row, which are rotated in place, from `first` on, a multiple of so many.
template <typename TFormat>
inline void encode_alone(float* x, float scale, int first, int count, const FourBitRow& row,
                         const KVOperand& operand, const RotatedPart& rotated) {
  for (int i = 0; i < count && first + i < rotated.width && rotated.shift;
       i += 1 << rotated.shift) {
    for (int j = i; j < i + (1 << rotated.shift); j += kCodesPerThread) {
      Sixteen pack;
      pack.load(reinterpret_cast<const char*>(x + j));
      clear_nan(pack);
      bound_sixteen(pack);
      pack.store(reinterpret_cast<char*>(x + j));
    }
    rotate_alone(x + i, rotated.shift);
  }
  const int block = first >> block_shift<TFormat>(operand);
  const FourBitRow part = {row.codes + first / 2, row.scales + block * kBlockScaleBytes<TFormat>};
  const char* values = reinterpret_cast<const char*>(x);
  store_blocks_alone<float, TFormat, kCodesPerThread>(values, scale, count, part, operand);
}

// Store a row by one thread, which holds every block.
template <typename T, typename TFormat, int kCount>
inline void store_row_alone(const char* in, float scale, int width, const FourBitRow& row,
                            const KVOperand& operand) {
  const int shift = operand.block_scales.rotation_shift;
  if (shift == 0) {
    store_blocks_alone<T, TFormat, kCount>(in, scale, width, row, operand);
    return;
  }
  alignas(64) float x[kElementsAlone];
  for (int first = 0; first < width; first += kElementsAlone) {
    const int count = min(kElementsAlone, width - first);
    for (int i = 0; i < count; i += kCodesPerThread) {
      const char* source = in + (first + i) * static_cast<int>(sizeof(T));
      to_floats(load_sixteen<T, kCount>(source)).store(reinterpret_cast<char*>(x + i));
    }
    encode_alone<TFormat>(x, scale, first, count, row, operand, {width, shift});
  }
}

// Restore elements of a row by one thread, from `first` on, a multiple of kElementsAlone.
template <typename TFormat>
inline void decode_alone(const FourBitRow& row, float scale, int first, int count,
                         const KVOperand& operand, const RotatedPart& rotated, float* out) {
  for (int i = 0; i < count; i += kCodesPerThread) {
    SixteenCodes codes;
    u32 bits;
    load_in_block<TFormat>(row, first + i, operand, codes, bits);
    decode_codes<TFormat>(codes, block_step<TFormat>(bits, scale))
        .store(reinterpret_cast<char*>(out + i));
  }
  for (int i = 0; i < count && first + i < rotated.width && rotated.shift;
       i += 1 << rotated.shift) {
    rotate_alone(out + i, rotated.shift);
  }
}

}  // namespace kvcupy_host
