// Formats of a byte by the arithmetic of every processor, without a branch: fp8 as GPUs before
// sm_89 convert it, which have no instructions for that, and int8.
#pragma once

#include "instructions.cuh"

// Bytes 0 and 1 of a word, or 2 and 3, in the upper bytes of two half words.
__device__ __forceinline__ u32 lower_pair(u32 bytes) { return __byte_perm(bytes, 0, 0x1404); }
__device__ __forceinline__ u32 upper_pair(u32 bytes) { return __byte_perm(bytes, 0, 0x3424); }

// Two codes of e4m3, in the upper bytes of half words, as two fp16. No sign of a NaN is kept.
__device__ __forceinline__ u32 decode_e4m3_pair(u32 codes) {
  constexpr u32 kRebias = 0x5c005c00;   // 2**8: the biases are 7 and 15
  constexpr u32 kLargest = 0x3f003f00;  // 448 before that
  constexpr u32 kNan = 0x7fff7fff;
  // Where fp16 has exponent and mantissa. Subnormal numbers stay what they are.
  const u32 magnitudes = (codes & 0x7f007f00) >> 1;
  const u32 values = multiply_halves(magnitudes | (codes & 0x80008000), kRebias);
  const u32 nan = where_halves_exceed(magnitudes, kLargest);
  return (values & ~nan) | (kNan & nan);
}

// The code of x, rounded once, to nearest even. Saturates, infinities too; keeps NaN, without sign.
// The lowest seven bits of `encode_magnitude` are the code of its magnitude, below other bits; NaN
// is the largest there.
//
// The sum of a number and a power of two whose last bit is worth a unit of the number's code is
// rounded to that unit, and ends with how many there are: a mantissa with its leading one, or what
// a carry has made of it. Above it belongs the exponent, in units of 2**kMantissa, less one if
// there is a leading one, and with another bias. Subnormal numbers have the unit of the smallest
// normal one. Bits past the seventh are not looked at, so the difference of the biases is kBias -
// 128.
template <int kMantissa, int kBias>
__device__ __forceinline__ u32 encode_magnitude(float x, float largest) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr float kSmallestNormal = __builtin_bit_cast(float, (128 - kBias) << 23);
  constexpr float kAligner = (1 << kDropped) + kBias;
  const float magnitude = fminf(fabsf(x), largest);
  const u32 power = __float_as_uint(fmaxf(magnitude, kSmallestNormal)) & 0x7f800000;
  const u32 aligned = __float_as_uint(__fmaf_rn(__uint_as_float(power), kAligner, magnitude));
  return aligned + (power >> kDropped);
}

template <int kMantissa, int kBias>
__device__ __forceinline__ u32 encode_fp8(float x, float largest) {
  const u32 magnitude = encode_magnitude<kMantissa, kBias>(x, largest);
  const u32 code = (magnitude & 0x7f) | (__float_as_uint(x) >> 24 & 0x80);
  return x == x ? code : 0x7f;
}

// The codes of four numbers, in a word: of the magnitudes of `x`, with the signs of `signs`, and
// NaN where that is NaN, whose sign is lost.
template <int kMantissa, int kBias>
__device__ __forceinline__ u32 encode_four_fp8(const float (&x)[4], const float (&signs)[4],
                                               float largest) {
  u32 codes[4];
  u32 tops[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 magnitude = encode_magnitude<kMantissa, kBias>(x[i], largest);
    codes[i] = signs[i] == signs[i] ? magnitude : 0x7f;
    tops[i] = signs[i] == signs[i] ? __float_as_uint(signs[i]) : 0;
  }
  const u32 magnitudes = __byte_perm(__byte_perm(codes[0], codes[1], 0x0040),
                                     __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
  const u32 upper = __byte_perm(__byte_perm(tops[0], tops[1], 0x0073),
                                __byte_perm(tops[2], tops[3], 0x0073), 0x5410);
  return (magnitudes & 0x7f7f7f7f) | (upper & 0x80808080);
}

// Four codes of int8, in a word. A float32 whose last bit is worth 1 ends with the number.
__device__ __forceinline__ float4 decode_four_int8(u32 codes) {
  constexpr u32 kAligner = 0x4b000000;   // 2**23
  constexpr float kOffset = 8388736.0f;  // 2**23 + 128
  const u32 unsigned_codes = codes ^ 0x80808080;
  return {__uint_as_float(__byte_perm(unsigned_codes, kAligner, 0x7440)) - kOffset,
          __uint_as_float(__byte_perm(unsigned_codes, kAligner, 0x7441)) - kOffset,
          __uint_as_float(__byte_perm(unsigned_codes, kAligner, 0x7442)) - kOffset,
          __uint_as_float(__byte_perm(unsigned_codes, kAligner, 0x7443)) - kOffset};
}
