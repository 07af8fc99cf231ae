// Number formats of 16 and 8 bits, for a C++ compiler: their types, decoding, and rounding from
// float32.
//
// A format is a sign, an exponent with a bias, and `kMantissa` bits after the leading one; the
// exponent zero means subnormal numbers, which have no leading one. A conversion is written once,
// in integers of 32 bits, for a number and for a vector of them alike (packs.h): F is float or a
// vector of floats, I is int or a vector of as many.
#pragma once

// Strict builds convert with integers alone: they are compiled by the hundred, and parsing the
// header of the vector instructions takes longer than all the rest of compiling one.
#if defined(__F16C__) && !defined(KVCUPY_STRICT)
#define KVCUPY_F16C 1
#include <immintrin.h>
#endif

struct half {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};
struct fp8_e4m3 {
  unsigned char bits;
};
struct fp8_e5m2 {
  unsigned char bits;
};

namespace kvcupy_host {

template <typename To, typename From>
constexpr To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  if (__builtin_is_constant_evaluated()) return __builtin_bit_cast(To, from);
  To to{};  // GCC keeps a memcpy in registers, but sends a bit_cast through memory
  memcpy(&to, &from, sizeof to);
  return to;
}

// kOverflow: the code of numbers past the largest, and of infinities. A NaN is stored as kNan,
// whatever its sign and payload, as on a GPU.
template <typename T>
struct FormatOf;
template <>
struct FormatOf<half> {
  static constexpr int kBits = 16;
  static constexpr int kMantissa = 10;
  static constexpr int kBias = 15;
  static constexpr int kOverflow = 0x7c00;  // infinity
  static constexpr int kNan = 0x7fff;
};
template <>
struct FormatOf<bfloat16> {
  static constexpr int kBits = 16;
  static constexpr int kMantissa = 7;
  static constexpr int kBias = 127;
  static constexpr int kOverflow = 0x7f80;  // infinity
  static constexpr int kNan = 0x7fff;
};
template <>
struct FormatOf<fp8_e4m3> {  // its largest exponent has numbers too, and one code for NaN
  static constexpr int kBits = 8;
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr int kOverflow = 0x7e;  // 448
  static constexpr int kNan = 0x7f;
};
template <>
struct FormatOf<fp8_e5m2> {  // the upper half of an fp16
  static constexpr int kBits = 8;
  static constexpr int kMantissa = 2;
  static constexpr int kBias = 15;
  static constexpr int kOverflow = 0x7b;  // 57344
  static constexpr int kNan = 0x7f;
};

constexpr int kFloatInfinity = 0x7f800000;
constexpr int kQuietNan = 0x7fc00000;

constexpr float power_of_two(int exponent) { return bits_as<float>((127 + exponent) << 23); }

template <typename F, typename I>
constexpr F to_real(const I& x) {
  if constexpr (sizeof(F) == sizeof(float)) {
    return static_cast<F>(x);
  } else {
    return __builtin_convertvector(x, F);
  }
}

// The codes of x, rounded once, to nearest even.
template <typename T, typename I, typename F>
constexpr I encode(const F& x) {
  using Format = FormatOf<T>;
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr int kRebias = (127 - Format::kBias) << 23;
  constexpr int kLimit = (Format::kOverflow << kDropped) + kRebias;
  const I bits = bits_as<I>(x);
  const I magnitude = bits & 0x7fffffff;
  const I bounded = magnitude < kLimit ? magnitude : I{} + kLimit;
  // Half a unit more, less the least bit if the code is even; a carry goes into the exponent.
  const I odd = bounded >> kDropped & 1;
  I code = (bounded - kRebias + ((1 << (kDropped - 1)) - 1) + odd) >> kDropped;
  if constexpr (Format::kBias != 127) {
    // Beside a number whose last bit is worth the smallest subnormal, the sum is a whole number of
    // those.
    constexpr int kSmallestNormal = kRebias + (1 << 23);
    constexpr float kAligner = power_of_two(1 - Format::kBias + kDropped);
    const I subnormal = bits_as<I>(bits_as<F>(bounded) + kAligner) - bits_as<int>(kAligner);
    code = bounded < kSmallestNormal ? subnormal : code;
  }
  code |= bits >> 31 & 1 << (Format::kBits - 1);
  return magnitude > kFloatInfinity ? I{} + Format::kNan : code;
}

// Decode fp16 or fp8_e4m3. No NaN is signalling.
template <typename T, typename F, typename I>
constexpr F decode(const I& code) {
  using Format = FormatOf<T>;
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr int kRebias = (127 - Format::kBias) << 23;
  constexpr int kSign = 1 << (Format::kBits - 1);
  const I magnitude = code & (kSign - 1);
  const F subnormal = to_real<F>(magnitude) * power_of_two(1 - Format::kBias - Format::kMantissa);
  I bits = (magnitude << kDropped) + kRebias;
  bits = magnitude < 1 << Format::kMantissa ? bits_as<I>(subnormal) : bits;
  if constexpr (Format::kOverflow == Format::kNan - 1) {
    bits = magnitude == Format::kNan ? I{} + kQuietNan : bits;
  } else {
    bits = magnitude < Format::kOverflow ? bits : bits | kFloatInfinity;
    bits = magnitude > Format::kOverflow ? bits | kQuietNan : bits;
  }
  return bits_as<F>(bits | (code & kSign) << (32 - Format::kBits));
}

// x, which is at most 127 either way after this, rounded to nearest even; 0 for a NaN.
template <typename I, typename F>
constexpr I encode_int8(const F& x) {
  constexpr float kAligner = 1.5f * power_of_two(23);  // its last bit is worth 1
  const F above = x < -127.0f ? F{} - 127.0f : x;
  const F bounded = above > 127.0f ? F{} + 127.0f : above;
  const I code = bits_as<I>(bounded + kAligner) - bits_as<int>(kAligner);
  return x == x ? code : I{};
}

// The values of the 256 codes of a format.
template <typename T>
struct ByteValues {
  float of[256];

  constexpr ByteValues() : of{} {
    for (int i = 0; i < 256; ++i) {
      if constexpr (FormatOf<T>::kBias == FormatOf<half>::kBias) {
        of[i] = decode<half, float>(i << 8);
      } else {
        of[i] = decode<T, float>(i);
      }
    }
  }
};
template <typename T>
constexpr ByteValues<T> kByteValues;

}  // namespace kvcupy_host

// --- One by one ----------------------------------------------------------------------------------

inline float to_float(half x) {
#if defined(KVCUPY_F16C)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return kvcupy_host::bits_as<__fp16>(x.bits);
#else
  return kvcupy_host::decode<half, float>(static_cast<int>(x.bits));
#endif
}
inline float to_float(bfloat16 x) {
  return kvcupy_host::bits_as<float>(static_cast<unsigned>(x.bits) << 16);
}

template <>
inline half from_float<half>(float x) {
#if defined(KVCUPY_F16C)
  return {x == x ? _cvtss_sh(x, 0) : static_cast<unsigned short>(0x7fff)};
#else
  return {static_cast<unsigned short>(kvcupy_host::encode<half, int>(x))};
#endif
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {
  return {static_cast<unsigned short>(kvcupy_host::encode<bfloat16, int>(x))};
}

#if !KVCUPY_ARCH  // a GPU's: numeric.cuh
inline float to_float(fp8_e4m3 x) { return kvcupy_host::kByteValues<fp8_e4m3>.of[x.bits]; }
inline float to_float(fp8_e5m2 x) { return kvcupy_host::kByteValues<fp8_e5m2>.of[x.bits]; }
template <>
inline fp8_e4m3 from_float<fp8_e4m3>(float x) {
  return {static_cast<unsigned char>(kvcupy_host::encode<fp8_e4m3, int>(x))};
}
template <>
inline fp8_e5m2 from_float<fp8_e5m2>(float x) {
  return {static_cast<unsigned char>(kvcupy_host::encode<fp8_e5m2, int>(x))};
}
#endif
