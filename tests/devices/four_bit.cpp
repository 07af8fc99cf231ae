// The conversions of four_bit.cuh as functions on arrays, for test_host_numbers.py.
#include "four_bit.cuh"

// One of the two fp16 numbers of a word.
float number_of(u32 pair, int i) { return i ? upper_of<half>(pair) : lower_of<half>(pair); }

template <typename TFormat>
void decode(const u32* codes, float* numbers, float* bfloats, long count) {
  for (long i = 0; i < count; ++i) {
    const EightHalves halves = decode_eight<TFormat>(codes[i]);
    const EightHalves others = as_bfloat16(halves);
    for (int j = 0; j < 8; ++j) {
      numbers[8 * i + j] = number_of(halves.pairs[j / 2], j % 2);
      bfloats[8 * i + j] = __uint_as_float(others.pairs[j / 2] >> 16 * (j % 2) << 16);
    }
  }
}

template <typename TFormat>
void scales(const u32* bits, float* numbers, long count) {
  for (long i = 0; i < count; ++i) numbers[i] = group_scale<TFormat>(bits[i]);
}

// Quotients by `divisor`, and their bits.
template <typename TFormat>
void encode_scales(const float* absmax, u32* bits, long count, float divisor) {
  for (long i = 0; i < count; ++i) bits[i] = encode_group_scale<TFormat>(absmax[i], divisor);
}

template <typename TFormat, typename T>
void encode(const T* numbers, const float* steps, u32* codes, long count) {
  for (long i = 0; i < count; ++i) {
    Pack<T, kCodesPerThread> pack;
    for (int j = 0; j < kCodesPerThread; ++j) pack.values[j] = numbers[kCodesPerThread * i + j];
    const float absmax = clear_nan(pack);
    const SixteenCodes result = encode_codes<TFormat>(pack, absmax, steps[i]);
    codes[2 * i] = result.words[0];
    codes[2 * i + 1] = result.words[1];
  }
}

#define EXPORT __attribute__((visibility("default")))
#define FORMAT(name, TFormat)                                                                   \
  EXPORT void decode_##name(const u32* codes, float* numbers, float* bfloats, long count) {     \
    decode<TFormat>(codes, numbers, bfloats, count);                                            \
  }                                                                                             \
  EXPORT void scales_##name(const u32* bits, float* numbers, long count) {                      \
    scales<TFormat>(bits, numbers, count);                                                      \
  }                                                                                             \
  EXPORT void encode_scales_##name(const float* absmax, u32* bits, long count, float divisor) { \
    encode_scales<TFormat>(absmax, bits, count, divisor);                                       \
  }                                                                                             \
  EXPORT void encode_##name(const float* numbers, const float* steps, u32* codes, long count) { \
    encode<TFormat>(numbers, steps, codes, count);                                              \
  }                                                                                             \
  EXPORT void encode_halves_##name(const half* numbers, const float* steps, u32* codes,         \
                                   long count) {                                                \
    encode<TFormat>(numbers, steps, codes, count);                                              \
  }

extern "C" {
FORMAT(nvfp4, nvfp4)
FORMAT(mxfp4, mxfp4)
FORMAT(int4, int4x2)
}
