// Four-bit formats: two codes a byte, element 2i in the low nibble of byte i, and a scale for each
// group of elements. value = code * step, where step = group scale * scale of the tensor or head.
//
// A thread takes 16 elements, which are 8 bytes of codes. A larger group is held by neighbouring
// threads, which share its largest magnitude by shuffles. Codes are decoded by arithmetic alone:
// their bits, put where fp16 has its own, are numbers that a product or a difference sets right.
#pragma once

#include "fp8.cuh"
#include "kv_operand.cuh"

// The formats of a cache; int4x2 has two's complement codes, from -7 to 7.
struct nvfp4 {};
struct mxfp4 {};
struct int4x2 {};

template <typename T>
constexpr bool kE2m1 = kSameType<T, nvfp4> || kSameType<T, mxfp4>;
template <typename T>
constexpr bool kFourBit = kE2m1<T> || kSameType<T, int4x2>;
template <typename T>
constexpr float kLargestCode = kE2m1<T> ? 6.0f : 7.0f;
template <typename T>
constexpr int kGroupScaleBytes = kE2m1<T> ? 1 : 2;

constexpr int kCodesPerThread = 16;

// log2 of the elements that share a scale.
template <typename TFormat>
__device__ __forceinline__ int group_shift(const KVOperand& operand) {
  static_assert(kFourBit<TFormat>, "a format of groups");
  if constexpr (kSameType<TFormat, nvfp4>) return 4;
  if constexpr (kSameType<TFormat, mxfp4>) return 5;
  return operand.group_scales.group_shift;
}

// A row of the cache: codes and group scales.
struct FourBitRow {
  char* codes;
  char* scales;
};

__device__ __forceinline__ FourBitRow four_bit_row(char* cache, const KVOperand& operand,
                                                   const SlotPlace& place, int head) {
  const GroupScales& scales = operand.group_scales;
  return {cache + offset_bytes(operand.cache, place) + head * operand.cache.head_bytes,
          cache + scales.offset_bytes + offset_bytes(scales.strides, place) +
              head * scales.strides.head_bytes};
}

// --- Decoding ------------------------------------------------------------------------------------

// Eight elements as fp16, or as bf16: pair i is elements 2i, in the lower half, and 2i + 1.
struct EightHalves {
  u32 pairs[4];
};

// Bytes 0 and 1, or 2 and 3, of two words by turns.
__device__ __forceinline__ u32 interleave_lower(u32 even, u32 odd) {
  return __byte_perm(even, odd, 0x5140);
}
__device__ __forceinline__ u32 interleave_upper(u32 even, u32 odd) {
  return __byte_perm(even, odd, 0x7362);
}

// Eight codes of E2M1. Sign, exponent and mantissa go to the upper byte of an fp16, s000eem0: that
// is the number times 2**-14, subnormal ones too.
__device__ __forceinline__ EightHalves decode_e2m1x8(u32 codes) {
  constexpr u32 kRebias = 0x74007400;  // 2**14
  const u32 even = (codes << 1 & 0x0e0e0e0e) | (codes << 4 & 0x80808080);
  const u32 odd = (codes >> 3 & 0x0e0e0e0e) | (codes & 0x80808080);
  const u32 lower = interleave_lower(even, odd);
  const u32 upper = interleave_upper(even, odd);
  return {multiply_halves(lower_pair(lower), kRebias), multiply_halves(upper_pair(lower), kRebias),
          multiply_halves(lower_pair(upper), kRebias), multiply_halves(upper_pair(upper), kRebias)};
}

// Eight codes of integers. The last bit of an fp16 between 1024 and 2048 is worth 1.
__device__ __forceinline__ EightHalves decode_int4x8(u32 codes) {
  constexpr u32 kAligner = 0x64646464;   // upper bytes of 1024
  constexpr u32 kOffset = 0xe408e408;    // -1032
  const u32 above = codes ^ 0x88888888;  // two's complement plus 8
  const u32 even = above & 0x0f0f0f0f;
  const u32 odd = above >> 4 & 0x0f0f0f0f;
  const u32 lower = interleave_lower(even, odd);
  const u32 upper = interleave_upper(even, odd);
  return {add_halves(__byte_perm(lower, kAligner, 0x4140), kOffset),
          add_halves(__byte_perm(lower, kAligner, 0x4342), kOffset),
          add_halves(__byte_perm(upper, kAligner, 0x4140), kOffset),
          add_halves(__byte_perm(upper, kAligner, 0x4342), kOffset)};
}

template <typename TFormat>
__device__ __forceinline__ EightHalves decode_eight(u32 codes) {
  if constexpr (kE2m1<TFormat>) return decode_e2m1x8(codes);
  return decode_int4x8(codes);
}

// The same codes as bf16, which every one of them fits. A float32 of the fp16 loses nothing in its
// upper half.
__device__ __forceinline__ EightHalves as_bfloat16(const EightHalves& halves) {
  EightHalves result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = floats_of_pair(halves.pairs[i]);
    result.pairs[i] = __byte_perm(__float_as_uint(values.x), __float_as_uint(values.y), 0x7632);
  }
  return result;
}

// The value of a group scale, from its bits.
template <typename TFormat>
__device__ __forceinline__ float group_scale(u32 bits) {
  if constexpr (kSameType<TFormat, nvfp4>) {
    return to_float(of_bits<fp8_e4m3>(bits));
  } else if constexpr (kSameType<TFormat, mxfp4>) {
    const u32 power = bits << 23;  // 2**-127 is subnormal, and 255 is NaN
    return __uint_as_float(bits == 0 ? 0x00400000 : bits == 255 ? 0x7fc00000 : power);
  } else {
    return floats_of_pair(bits).x;
  }
}

// The step of a group: what its codes are multiplied by.
template <typename TFormat>
__device__ __forceinline__ float group_step(u32 scale_bits, float scale) {
  return __fmul_rn(group_scale<TFormat>(scale_bits), scale);
}

// The bits of a group scale in memory, at a multiple of its size.
template <typename TFormat>
__device__ __forceinline__ u32 load_group_scale(const char* address) {
  return *reinterpret_cast<const Word<kGroupScaleBytes<TFormat>>*>(address);
}

// --- Encoding ------------------------------------------------------------------------------------

// The bits of the scale of a group whose largest magnitude is `absmax`, finite: absmax / divisor
// rounded to float32, and then to nearest even, or up to a power of two. At least the smallest
// positive scale, but for a group of zeros.
template <typename TFormat>
__device__ __forceinline__ u32 encode_group_scale(float absmax, float divisor) {
  const float quotient = __fdiv_rn(absmax, divisor);
  if constexpr (kSameType<TFormat, mxfp4>) {
    const u32 bits = __float_as_uint(quotient);
    if (bits <= 0x00400000) return 0;  // up to 2**-127
    return min((bits + 0x007fffff) >> 23, u32{254});
  } else {
    u32 bits;
    if constexpr (kSameType<TFormat, nvfp4>) {
      bits = bits_of(from_float<fp8_e4m3>(quotient));
    } else {
      bits = bits_of(from_float<half>(fminf(quotient, 65504.0f)));
    }
    return absmax > 0.0f ? max(bits, u32{1}) : 0;
  }
}

// The codes of eight magnitudes over a step, without signs, in a word; of infinities the largest.
// Next to a power of two whose last bit is worth 1 a sum is a whole number, rounded once. E2M1
// counts its codes by halves up to 2, by ones up to 4 and by twos up to 6: the least of three
// lines. The sums end with the codes, and what is above those adds up to a constant.
template <typename TFormat>
__device__ __forceinline__ u32 encode_magnitudes(const float* x, const ScaleDivisor& step) {
  constexpr float kAligner = 8388608.0f;  // 2**23, whose bits are kAbove
  constexpr u32 kAbove = 0x4b000000;
  constexpr u32 kAllAbove = kAbove * 0x11111111u;
  u32 word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    float rough;
    float exact;  // NaN where it is out of range: fminf drops that
    step.divide(x[i], rough, exact);
    float code = __fadd_rn(exact, kAligner);
    if constexpr (kE2m1<TFormat>) {
      code = fminf(__fmaf_rn(exact, 2.0f, kAligner), __fadd_rn(exact, kAligner + 2.0f));
      code = fminf(code, __fmaf_rn(exact, 0.5f, kAligner + 4.0f));
    }
    word = word * 16 + __float_as_uint(fminf(code, kAligner + 7.0f));
  }
  return word - kAllAbove;
}

// Eight codes, from their magnitudes and the signs, which are the upper bits of four each.
template <typename TFormat>
__device__ __forceinline__ u32 codes_with_signs(u32 magnitudes, u32 signs) {
  if constexpr (kE2m1<TFormat>) return magnitudes | signs;
  const u32 ones = signs >> 3;  // two's complement: inverted, plus one, without a carry
  const u32 inverted = magnitudes ^ ones * 15;
  return ((inverted & 0x77777777) + ones) ^ (inverted & 0x88888888);
}

// The signs of eight numbers, the uppermost bits of bytes: of 0, 2, 4, 6 and of 1, 3, 5, 7.
__device__ __forceinline__ u32 interleave_signs(u32 even, u32 odd) {
  return (even >> 4 & 0x08080808) | (odd & 0x80808080);
}

// --- Rotation ------------------------------------------------------------------------------------
//
// Rows may be multiplied by an orthonormal Hadamard matrix as they are stored, and again as they
// are read, in blocks of a power of two, from 16 to 512 elements. A thread does the butterflies
// within its 16 elements, and exchanges them with the others that hold the block: a part of a warp.

using Sixteen = Pack<float, kCodesPerThread>;

constexpr float kRotatedLimit = 5.192296858534828e33f;  // 2**112: sums stay finite

// How a warp rotates. Its threads may hold parts of different rows.
struct Rotation {
  int shift;       // log2 of the block that this thread holds a part of; 0: it keeps its elements
  int most_shift;  // the same for all threads of the warp: no less than any of theirs
};

__device__ __forceinline__ Rotation rotation_of(const KVOperand& operand) {
  return {operand.group_scales.rotation_shift, operand.group_scales.rotation_shift};
}

// 1 / sqrt(1 << shift), rounded once.
__device__ __forceinline__ float rotation_scale(int shift) {
  constexpr float kRootOfHalf = 0.70710678118654752f;
  const float power = __uint_as_float(static_cast<u32>(127 - (shift >> 1)) << 23);
  return __fmul_rn(power, shift & 1 ? kRootOfHalf : 1.0f);
}

// Clamp elements that are rotated before they are stored to the limit of magnitude.
__device__ __forceinline__ void bound_sixteen(Sixteen& x) {
#pragma unroll
  for (int i = 0; i < kCodesPerThread; ++i) {
    x.values[i] = fminf(fmaxf(x.values[i], -kRotatedLimit), kRotatedLimit);
  }
}

// Every thread of the warp must call it, with consecutive parts of a block in neighbouring threads.
__device__ __forceinline__ void rotate_sixteen(Sixteen& x, const Rotation& rotation) {
  if (rotation.shift) {
#pragma unroll
    for (int half = 1; half < kCodesPerThread; half *= 2) {
#pragma unroll
      for (int i = 0; i < kCodesPerThread; ++i) {
        if (i & half) continue;
        const float first = x.values[i];
        const float second = x.values[i + half];
        x.values[i] = __fadd_rn(first, second);
        x.values[i + half] = __fadd_rn(first, -second);
      }
    }
  }
  const int lanes = (1 << rotation.shift) / kCodesPerThread;
  for (int distance = 1; distance < (1 << rotation.most_shift) / kCodesPerThread; distance *= 2) {
    const float sign = threadIdx.x & distance ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kCodesPerThread; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x.values[i], distance);
      if (distance < lanes) x.values[i] = __fmaf_rn(x.values[i], sign, other);
    }
  }
  const float scale = rotation.shift ? rotation_scale(rotation.shift) : 1.0f;
#pragma unroll
  for (int i = 0; i < kCodesPerThread; ++i) x.values[i] = __fmul_rn(x.values[i], scale);
}

// The first elements of rows, which are stored rotated, and log2 of what rotates together; or
// zeros.
struct RotatedPart {
  int width;
  int shift;
};

__device__ __forceinline__ Rotation rotation_at(const RotatedPart& part, int element) {
  return {element < part.width ? part.shift : 0, part.shift};
}

#if !KVCUPY_ARCH
// Rotate a block by one thread: eight elements at a time where the compiler has vectors for that.
inline void rotate_alone(float* x, int shift) {
  const int block = 1 << shift;
  int half = 1;
#ifdef KVCUPY_HOST_VARIANTS
  using namespace kvcupy_host;
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
#endif

// The codes and scale that 16 elements are stored as.
struct SixteenCodes {
  alignas(8) u32 words[2];

  // Words of `word_bytes`, a power of two up to 8 that divides the address.
  __device__ __forceinline__ void store(char* target, int word_bytes) const {
    if (word_bytes == 8) {
      *reinterpret_cast<Word<8>*>(target) = *reinterpret_cast<const Word<8>*>(words);
    } else if (word_bytes == 4) {
      store_words<4>(target);
    } else if (word_bytes == 2) {
      store_words<2>(target);
    } else {
      store_words<1>(target);
    }
  }

  __device__ __forceinline__ void load(const char* source, int word_bytes) {
    if (word_bytes == 8) {
      *reinterpret_cast<Word<8>*>(words) = *reinterpret_cast<const Word<8>*>(source);
    } else if (word_bytes == 4) {
      load_words<4>(source);
    } else if (word_bytes == 2) {
      load_words<2>(source);
    } else {
      load_words<1>(source);
    }
  }

 private:
  template <int kBytes>
  __device__ __forceinline__ void store_words(char* target) const {
#pragma unroll
    for (int i = 0; i < 8 / kBytes; ++i) {
      reinterpret_cast<Word<kBytes>*>(target)[i] =
          static_cast<Word<kBytes>>(words[i * kBytes / 4] >> i * kBytes % 4 * 8);
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void load_words(const char* source) {
    words[0] = words[1] = 0;
#pragma unroll
    for (int i = 0; i < 8 / kBytes; ++i) {
      words[i * kBytes / 4] |= u32{reinterpret_cast<const Word<kBytes>*>(source)[i]}
                               << i * kBytes % 4 * 8;
    }
  }
};

// The codes of eight elements, at a multiple of `word_bytes`, a power of two.
__device__ __forceinline__ u32 load_eight_codes(const char* source, int word_bytes) {
  if (word_bytes >= 4) return *reinterpret_cast<const u32*>(source);
  u32 codes = 0;
  if (word_bytes == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes |= u32{reinterpret_cast<const Word<2>*>(source)[i]} << i * 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes |= u32{reinterpret_cast<const Word<1>*>(source)[i]} << i * 8;
    }
  }
  return codes;
}

// Eight numbers as magnitudes, and their signs as codes_with_signs takes them.
template <typename T>
__device__ __forceinline__ u32 split_signs(const T* numbers, float* magnitudes) {
  u32 tops[4];  // bytes of 0 and 1 uppermost in half words, and so on
  if constexpr (kArch != 0 && sizeof(T) == 2) {
    const u32* words = reinterpret_cast<const u32*>(numbers);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = floats_of_pair<T>(words[i]);
      magnitudes[2 * i] = fabsf(pair.x);
      magnitudes[2 * i + 1] = fabsf(pair.y);
      tops[i] = words[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = to_float(numbers[2 * i]);
      const float second = to_float(numbers[2 * i + 1]);
      magnitudes[2 * i] = fabsf(first);
      magnitudes[2 * i + 1] = fabsf(second);
      tops[i] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    }
  }
  const u32 lower = __byte_perm(tops[0], tops[1], 0x7531);  // the upper bytes of 0, 1, 2, 3
  const u32 upper = __byte_perm(tops[2], tops[3], 0x7531);
  return interleave_signs(__byte_perm(lower, upper, 0x6420), __byte_perm(lower, upper, 0x7531));
}

// Make every NaN a zero, and return the largest magnitude, at most the largest float.
template <typename T>
__device__ __forceinline__ float clear_nan(Pack<T, kCodesPerThread>& pack) {
  if constexpr (kArch >= 800 && sizeof(T) == 2) {  // in pairs; a NaN is rare
    const auto* pairs = reinterpret_cast<const u32*>(pack.values);
    u32 top = magnitudes_of_pair<T>(pairs[0]);
#pragma unroll
    for (int i = 1; i < kCodesPerThread / 2; ++i) {
      top = larger_or_nan<T>(top, magnitudes_of_pair<T>(pairs[i]));
    }
    const float a = lower_of<T>(top);
    const float b = upper_of<T>(top);
    if (a + b == a + b) return fminf(fmaxf(a, b), kFloatMax);
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCodesPerThread; ++i) {
    const float x = to_float(pack.values[i]);
    if (x != x) pack.values[i] = T{};
    largest = fmaxf(largest, fabsf(x));
  }
  return fminf(largest, kFloatMax);
}

// The codes of elements without NaN, of a group with this largest magnitude and step.
template <typename TFormat, typename T>
__device__ __forceinline__ SixteenCodes encode_codes(const Pack<T, kCodesPerThread>& x,
                                                     float absmax, float step) {
  constexpr float kSmallest = __builtin_bit_cast(float, 1);
  const ScaleDivisor divisor(fmaxf(step, kSmallest));
  SixteenCodes codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float magnitudes[8];
    const u32 signs = split_signs(x.values + 8 * i, magnitudes);
    const u32 word =
        codes_with_signs<TFormat>(encode_magnitudes<TFormat>(magnitudes, divisor), signs);
    codes.words[i] = absmax > 0.0f ? word : 0;
  }
  return codes;
}

// The bits of the scale of a group with this largest magnitude, which becomes the largest code;
// `outer` is the scale of the tensor or head.
template <typename TFormat>
__device__ __forceinline__ u32 scale_of_group(float absmax, float outer) {
  return encode_group_scale<TFormat>(absmax, __fmul_rn(kLargestCode<TFormat>, outer));
}

template <typename TFormat>
__device__ __forceinline__ void store_group_scale(char* target, u32 bits) {
  *reinterpret_cast<Word<kGroupScaleBytes<TFormat>>*>(target) =
      static_cast<Word<kGroupScaleBytes<TFormat>>>(bits);
}

// Whether rows are stored without a rotation, with scales that follow from the largest magnitude
// of a group alone.
__device__ __forceinline__ bool is_stored_plainly(const KVOperand& operand) {
  return (operand.group_scales.rotation_shift | operand.group_scales.four_over_six) == 0;
}

template <typename TFormat>
__device__ __forceinline__ Sixteen decode_codes(const SixteenCodes& codes, float step);

// The squares of what codes leave of 16 elements, added in their order.
template <typename TFormat, typename T>
__device__ __forceinline__ float squared_error(const Pack<T, kCodesPerThread>& x,
                                               const SixteenCodes& codes, float step) {
  const Sixteen values = decode_codes<TFormat>(codes, step);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCodesPerThread; ++i) {
    const float error = __fadd_rn(to_float(x.values[i]), -values.values[i]);
    sum = __fadd_rn(sum, __fmul_rn(error, error));
  }
  return sum;
}

// The codes of a group of 16, and the `bits` of its scale: the largest magnitude becomes the code 6
// or 4, whichever leaves less. (Four over six, arXiv 2512.02010.)
template <typename TFormat, typename T>
__device__ __forceinline__ SixteenCodes encode_four_over_six(const Pack<T, kCodesPerThread>& x,
                                                             float absmax, u32& bits, float scale) {
  static_assert(kSameType<TFormat, nvfp4>, "groups of a thread's own");
  const float step_of_six = group_step<TFormat>(bits, scale);
  const SixteenCodes six = encode_codes<TFormat>(x, absmax, step_of_six);
  const u32 other = encode_group_scale<TFormat>(absmax, __fmul_rn(4.0f, scale));
  const float step_of_four = group_step<TFormat>(other, scale);
  const SixteenCodes four = encode_codes<TFormat>(x, absmax, step_of_four);
  const float error_of_six = squared_error<TFormat>(x, six, step_of_six);
  const float error_of_four = squared_error<TFormat>(x, four, step_of_four);
  const bool prefers_four = error_of_four < error_of_six;
  SixteenCodes codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) codes.words[i] = prefers_four ? four.words[i] : six.words[i];
  if (prefers_four) bits = other;
  return codes;
}

// Encode 16 elements without NaN, whose largest magnitude is `absmax`, and store them; plainly, or
// as the operand says.
template <typename TFormat, bool kPlainly, typename T>
__device__ __forceinline__ void encode_in_group(const Pack<T, kCodesPerThread>& x, float absmax,
                                                float scale, int at, bool active,
                                                const FourBitRow& row, const KVOperand& operand) {
  const int shift = group_shift<TFormat>(operand);
  absmax = max_within_warp(absmax, (1 << shift) / kCodesPerThread);
  u32 bits = scale_of_group<TFormat>(absmax, scale);
  SixteenCodes codes;
  bool is_encoded = false;
  if constexpr (!kPlainly && kSameType<TFormat, nvfp4>) {
    is_encoded = operand.group_scales.four_over_six;
    if (is_encoded) codes = encode_four_over_six<TFormat>(x, absmax, bits, scale);
  }
  if (!is_encoded) codes = encode_codes<TFormat>(x, absmax, group_step<TFormat>(bits, scale));
  if (!active) return;
  codes.store(row.codes + at / 2, operand.group_scales.code_word_bytes);
  const int group = at >> shift;
  if (group << shift == at)
    store_group_scale<TFormat>(row.scales + group * kGroupScaleBytes<TFormat>, bits);
}

// Store 16 elements, from element `at` of a row, of a group that neighbouring threads hold; the
// first of them stores its scale, too. `scale` is the tensor's or the head's. Every thread of the
// warp must call it; those that have no elements are not `active`.
template <typename TFormat, typename T>
__device__ __forceinline__ void store_in_group(Pack<T, kCodesPerThread> x, float scale, int at,
                                               bool active, const FourBitRow& row,
                                               const KVOperand& operand) {
  const float absmax = clear_nan(x);
  encode_in_group<TFormat, true>(x, absmax, scale, at, active, row, operand);
}

// The same of elements that are rotated before, or whose scales are chosen by error.
template <typename TFormat, typename T>
__device__ __forceinline__ void rotate_in_group(Pack<T, kCodesPerThread> x, float scale, int at,
                                                bool active, const FourBitRow& row,
                                                const KVOperand& operand,
                                                const Rotation& rotation) {
  const float bound = clear_nan(x);
  Sixteen rotated = to_floats(x);
  if (bound > kRotatedLimit && rotation.shift) bound_sixteen(rotated);
  if (rotation.most_shift) rotate_sixteen(rotated, rotation);
  AbsMax<kCodesPerThread> largest;
  largest.add(rotated);
  const float absmax = fminf(largest.value(), kFloatMax);
  encode_in_group<TFormat, false>(rotated, absmax, scale, at, active, row, operand);
}

__device__ __forceinline__ bool is_aligned(const char* address) {
  return reinterpret_cast<u64>(address) % 16 == 0;
}

// 16 elements of T, in words if kCount is 16, or if they lie so; else one by one. A cache whose
// rows are aligned to less may stand beside rows that are.
template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCodesPerThread> load_sixteen(const char* source) {
  Pack<T, kCodesPerThread> pack;
  if (kCount == kCodesPerThread || is_aligned(source)) {
    pack.load(source);
  } else {
#pragma unroll
    for (int i = 0; i < kCodesPerThread; ++i) {
      pack.values[i] = reinterpret_cast<const T*>(source)[i];
    }
  }
  return pack;
}

template <typename T, int kCount>
__device__ __forceinline__ void store_sixteen(const Pack<T, kCodesPerThread>& pack, char* target) {
  if (kCount == kCodesPerThread || is_aligned(target)) {
    pack.store(target);
  } else {
#pragma unroll
    for (int i = 0; i < kCodesPerThread; ++i) reinterpret_cast<T*>(target)[i] = pack.values[i];
  }
}

#if !KVCUPY_ARCH
// Store a row that is not rotated by one thread, which holds every group.
template <typename T, typename TFormat, int kCount>
inline void store_groups_alone(const char* in, float scale, int width, const FourBitRow& row,
                               const KVOperand& operand) {
  const int group = 1 << group_shift<TFormat>(operand);
  for (int first = 0; first < width; first += group) {
    float absmax = 0.0f;
    for (int at = first; at < first + group; at += kCodesPerThread) {
      auto pack = load_sixteen<T, kCount>(in + at * static_cast<int>(sizeof(T)));
      absmax = fmaxf(absmax, clear_nan(pack));
    }
    u32 bits = scale_of_group<TFormat>(absmax, scale);
    if constexpr (kSameType<TFormat, nvfp4>) {
      if (operand.group_scales.four_over_six) {
        auto pack = load_sixteen<T, kCount>(in + first * static_cast<int>(sizeof(T)));
        clear_nan(pack);
        encode_four_over_six<TFormat>(pack, absmax, bits, scale)
            .store(row.codes + first / 2, operand.group_scales.code_word_bytes);
        store_group_scale<TFormat>(row.scales + first / group, bits);
        continue;
      }
    }
    store_group_scale<TFormat>(row.scales + first / group * kGroupScaleBytes<TFormat>, bits);
    const float step = group_step<TFormat>(bits, scale);
    for (int at = first; at < first + group; at += kCodesPerThread) {
      auto pack = load_sixteen<T, kCount>(in + at * static_cast<int>(sizeof(T)));
      clear_nan(pack);
      encode_codes<TFormat>(pack, absmax, step)
          .store(row.codes + at / 2, operand.group_scales.code_word_bytes);
    }
  }
}

// Elements of a row that a thread rotates by itself at a time: whole groups and blocks.
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
  const int group = first >> group_shift<TFormat>(operand);
  const FourBitRow part = {row.codes + first / 2, row.scales + group * kGroupScaleBytes<TFormat>};
  const char* values = reinterpret_cast<const char*>(x);
  store_groups_alone<float, TFormat, kCodesPerThread>(values, scale, count, part, operand);
}

// Store a row by one thread, which holds every group.
template <typename T, typename TFormat, int kCount>
inline void store_row_alone(const char* in, float scale, int width, const FourBitRow& row,
                            const KVOperand& operand) {
  const int shift = operand.group_scales.rotation_shift;
  if (shift == 0) {
    store_groups_alone<T, TFormat, kCount>(in, scale, width, row, operand);
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
#endif

// Load the codes of 16 elements, from element `at` of a row, and the bits of their group's scale.
template <typename TFormat>
__device__ __forceinline__ void load_in_group(const FourBitRow& row, int at,
                                              const KVOperand& operand, SixteenCodes& codes,
                                              u32& scale_bits) {
  codes.load(row.codes + at / 2, operand.group_scales.code_word_bytes);
  const int group = at >> group_shift<TFormat>(operand);
  scale_bits = load_group_scale<TFormat>(row.scales + group * kGroupScaleBytes<TFormat>);
}

// Eight elements as floats.
#ifdef KVCUPY_HOST_VARIANTS
template <typename TFormat>
inline Pack<float, 8> decode_codes(u32 codes, float step) {
  using namespace kvcupy_host;
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
#else
template <typename TFormat>
__device__ __forceinline__ Pack<float, 8> decode_codes(u32 codes, float step) {
  Pack<float, 8> out;
  const EightHalves values = decode_eight<TFormat>(codes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = floats_of_pair(values.pairs[i]);
    out.values[2 * i] = __fmul_rn(pair.x, step);
    out.values[2 * i + 1] = __fmul_rn(pair.y, step);
  }
  return out;
}
#endif

// Likewise 16.
template <typename TFormat>
__device__ __forceinline__ Sixteen decode_codes(const SixteenCodes& codes, float step) {
  Sixteen out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Pack<float, 8> eight = decode_codes<TFormat>(codes.words[half], step);
#pragma unroll
    for (int i = 0; i < 8; ++i) out.values[half * 8 + i] = eight.values[i];
  }
  return out;
}

#if !KVCUPY_ARCH
// Restore elements of a row by one thread, from `first` on, a multiple of kElementsAlone.
template <typename TFormat>
inline void decode_alone(const FourBitRow& row, float scale, int first, int count,
                         const KVOperand& operand, const RotatedPart& rotated, float* out) {
  for (int i = 0; i < count; i += kCodesPerThread) {
    SixteenCodes codes;
    u32 bits;
    load_in_group<TFormat>(row, first + i, operand, codes, bits);
    decode_codes<TFormat>(codes, group_step<TFormat>(bits, scale))
        .store(reinterpret_cast<char*>(out + i));
  }
  for (int i = 0; i < count && first + i < rotated.width && rotated.shift;
       i += 1 << rotated.shift) {
    rotate_alone(out + i, rotated.shift);
  }
}
#endif
