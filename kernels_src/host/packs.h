// Arithmetic and conversions of eight numbers at a time, in the vector types of GCC and Clang. They
// give what numeric.cuh gives for one, bit for bit.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvcupy_host {

using Floats = float __attribute__((vector_size(32)));
using Ints = int __attribute__((vector_size(32)));
using Halves = unsigned short __attribute__((vector_size(16)));
using TwiceHalves = unsigned short __attribute__((vector_size(32)));
using Bytes = unsigned char __attribute__((vector_size(8)));
using SignedBytes = signed char __attribute__((vector_size(8)));

// Eight codes widened: GCC 12 would move bytes one by one, and halves in two parts.
inline Ints widened(Bytes bytes) {
#if defined(__AVX2__)
  return bits_as<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<long long>(bytes))));
#else
  return __builtin_convertvector(bytes, Ints);
#endif
}
inline Ints widened(SignedBytes bytes) {
#if defined(__AVX2__)
  return bits_as<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits_as<long long>(bytes))));
#else
  return __builtin_convertvector(bytes, Ints);
#endif
}

inline Ints widened(Halves halves) {
#if defined(__AVX2__)
  return bits_as<Ints>(_mm256_cvtepu16_epi32(bits_as<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Ints);
#endif
}

template <typename T>
inline Ints codes_of(const Pack<T, 8>& pack) {
  if constexpr (sizeof(T) == 2) {
    return widened(bits_as<Halves>(pack));
  } else {
    return widened(bits_as<Bytes>(pack));
  }
}

template <typename T>
inline Pack<T, 8> pack_of(Ints codes) {
  if constexpr (sizeof(T) == 2) {
    return bits_as<Pack<T, 8>>(__builtin_convertvector(codes, Halves));
  } else {
    return bits_as<Pack<T, 8>>(__builtin_convertvector(codes, Bytes));
  }
}

// Eight numbers, their neighbours in pairs of 1, 2 or 4 exchanged.
template <int kDistance>
inline Floats exchanged(Floats x) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, 0 ^ kDistance, 1 ^ kDistance, 2 ^ kDistance, 3 ^ kDistance,
                                 4 ^ kDistance, 5 ^ kDistance, 6 ^ kDistance, 7 ^ kDistance);
#else
  const Ints indices = {0 ^ kDistance, 1 ^ kDistance, 2 ^ kDistance, 3 ^ kDistance,
                        4 ^ kDistance, 5 ^ kDistance, 6 ^ kDistance, 7 ^ kDistance};
  return __builtin_shuffle(x, indices);
#endif
}

// Three stages of a Hadamard rotation: sums and differences at distances of 1, 2 and 4.
inline Floats butterflies_of_eight(Floats x) {
  x = exchanged<1>(x) + x * Floats{1, -1, 1, -1, 1, -1, 1, -1};
  x = exchanged<2>(x) + x * Floats{1, 1, -1, -1, 1, 1, -1, -1};
  return exchanged<4>(x) + x * Floats{1, 1, 1, 1, -1, -1, -1, -1};
}

template <typename T>
inline Pack<T, 8> encode_eight(const Pack<float, 8>& in) {
  return pack_of<T>(encode<T, Ints>(bits_as<Floats>(in)));
}

#if defined(__F16C__)
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif

// Decode eight codes of fp16.
inline Floats halves_as_floats(Halves codes) {
#if defined(__F16C__)
  return bits_as<Floats>(_mm256_cvtph_ps(bits_as<__m128i>(codes)));
#elif defined(__aarch64__)
  const auto halves = bits_as<float16x8_t>(codes);
  const float32x4_t floats[2] = {vcvt_f32_f16(vget_low_f16(halves)),
                                 vcvt_f32_f16(vget_high_f16(halves))};
  return bits_as<Floats>(floats);
#else
  return decode<half, Floats>(__builtin_convertvector(codes, Ints));
#endif
}

}  // namespace kvcupy_host

template <>
inline Pack<float, 8> to_floats<half, 8>(const Pack<half, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(halves_as_floats(bits_as<Halves>(in)));
}
template <>
inline Pack<float, 8> to_floats<bfloat16, 8>(const Pack<bfloat16, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(codes_of(in) << 16);
}
template <>
inline Pack<float, 8> to_floats<fp8_e4m3, 8>(const Pack<fp8_e4m3, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(decode<fp8_e4m3, Floats>(codes_of(in)));
}
template <>
inline Pack<float, 8> to_floats<fp8_e5m2, 8>(const Pack<fp8_e5m2, 8>& in) {
  using namespace kvcupy_host;
  const Halves upper = __builtin_convertvector(codes_of(in), Halves) << 8;
  return bits_as<Pack<float, 8>>(halves_as_floats(upper));
}
template <>
inline Pack<float, 8> to_floats<int8, 8>(const Pack<int8, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(
      __builtin_convertvector(widened(bits_as<SignedBytes>(in)), Floats));
}

template <>
inline Pack<half, 8> from_floats<half, 8>(const Pack<float, 8>& in) {
  using namespace kvcupy_host;
#if defined(__F16C__)
  const auto bits = bits_as<Ints>(in);
  const Ints known = (bits & 0x7fffffff) > kFloatInfinity ? Ints{} + 0x7fffffff : bits;
  return bits_as<Pack<half, 8>>(_mm256_cvtps_ph(bits_as<__m256>(known), kNearest));
#else
  return encode_eight<half>(in);
#endif
}
template <>
inline Pack<bfloat16, 8> from_floats<bfloat16, 8>(const Pack<float, 8>& in) {
  return kvcupy_host::encode_eight<bfloat16>(in);
}
template <>
inline Pack<fp8_e4m3, 8> from_floats<fp8_e4m3, 8>(const Pack<float, 8>& in) {
  return kvcupy_host::encode_eight<fp8_e4m3>(in);
}
template <>
inline Pack<fp8_e5m2, 8> from_floats<fp8_e5m2, 8>(const Pack<float, 8>& in) {
  return kvcupy_host::encode_eight<fp8_e5m2>(in);
}
template <>
inline Pack<int8, 8> from_floats<int8, 8>(const Pack<float, 8>& in) {
  using namespace kvcupy_host;
  return pack_of<int8>(encode_int8<Ints>(bits_as<Floats>(in)));
}

// --- Even and odd elements -----------------------------------------------------------------------

namespace kvcupy_host {

// Deinterleave even and odd elements; and interleave.
inline TwiceHalves part_neighbours(TwiceHalves all) {
#if defined(__clang__)
  return __builtin_shufflevector(all, all, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shuffle(all, TwiceHalves{0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15});
#endif
}
inline TwiceHalves join_neighbours(TwiceHalves all) {
#if defined(__clang__)
  return __builtin_shufflevector(all, all, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shuffle(all, TwiceHalves{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

template <typename T>
struct EvenAndOdd {
  Pack<T, 8> even;
  Pack<T, 8> odd;
};

template <typename T>
inline void split_halves(const Pack<T, 16>& both, Pack<T, 8>& even, Pack<T, 8>& odd) {
  const auto parts = bits_as<EvenAndOdd<T>>(part_neighbours(bits_as<TwiceHalves>(both)));
  even = parts.even;
  odd = parts.odd;
}

template <typename T>
inline Pack<T, 16> merge_halves(const Pack<T, 8>& even, const Pack<T, 8>& odd) {
  const EvenAndOdd<T> parts{even, odd};
  return bits_as<Pack<T, 16>>(join_neighbours(bits_as<TwiceHalves>(parts)));
}

}  // namespace kvcupy_host

template <>
inline void split<bfloat16, 8>(const Pack<bfloat16, 16>& both, Pack<bfloat16, 8>& even,
                               Pack<bfloat16, 8>& odd) {
  kvcupy_host::split_halves(both, even, odd);
}
template <>
inline void split<half, 8>(const Pack<half, 16>& both, Pack<half, 8>& even, Pack<half, 8>& odd) {
  kvcupy_host::split_halves(both, even, odd);
}
template <>
inline Pack<bfloat16, 16> merge<bfloat16, 8>(const Pack<bfloat16, 8>& even,
                                             const Pack<bfloat16, 8>& odd) {
  return kvcupy_host::merge_halves(even, odd);
}
template <>
inline Pack<half, 16> merge<half, 8>(const Pack<half, 8>& even, const Pack<half, 8>& odd) {
  return kvcupy_host::merge_halves(even, odd);
}

// --- Arithmetic ----------------------------------------------------------------------------------

template <>
inline Pack<float, 8> negative<8>(const Pack<float, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(-bits_as<Floats>(in));
}

template <>
inline Pack<float, 8> products<8>(const Pack<float, 8>& a, float scale) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(bits_as<Floats>(a) * scale);
}

template <>
inline Pack<float, 8> products<8>(const Pack<float, 8>& a, float scale, const Pack<float, 8>& b) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(bits_as<Floats>(a) * scale * bits_as<Floats>(b));
}

template <>
inline Pack<float, 8> quotients<8>(const Pack<float, 8>& a, const ScaleDivisor& scale) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(bits_as<Floats>(a) * scale.power / scale.divisor);
}

template <>
struct AbsMax<8> {
  kvcupy_host::Ints largest{};  // bits without signs are ordered as the numbers are

  template <typename T>
  void add(const Pack<T, 8>& pack) {
    add(to_floats(pack));
  }

  void add(const Pack<float, 8>& pack) {
    const auto magnitudes = kvcupy_host::bits_as<kvcupy_host::Ints>(pack) & 0x7fffffff;
    const kvcupy_host::Ints none{};
    const auto numbers = magnitudes > kvcupy_host::kFloatInfinity ? none : magnitudes;
    largest = numbers > largest ? numbers : largest;
  }
  float value() const {
    int most = 0;
    for (int i = 0; i < 8; ++i) most = max(most, largest[i]);
    return kvcupy_host::bits_as<float>(most);
  }
};

#if defined(__FMA__)
template <>
inline Pack<float, 8> sum_of_products<8>(const Pack<float, 8>& pa, const Pack<float, 8>& pb,
                                         const Pack<float, 8>& pc, const Pack<float, 8>& pd) {
  using namespace kvcupy_host;
  const auto a = bits_as<__m256>(pa);
  const auto b = bits_as<__m256>(pb);
  const auto c = bits_as<__m256>(pc);
  const auto d = bits_as<__m256>(pd);
  const __m256 cd = _mm256_mul_ps(c, d);
  const __m256 rough = _mm256_fmadd_ps(a, b, cd);
  const __m256 exact = _mm256_add_ps(rough, _mm256_fmsub_ps(c, d, cd));
  const __m256 known = _mm256_cmp_ps(exact, exact, _CMP_ORD_Q);
  return bits_as<Pack<float, 8>>(_mm256_blendv_ps(rough, exact, known));
}
#endif

// --- Both halves of eight pairs at once ----------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512DQ__)
// GCC 12 warns of undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace kvcupy_host {

inline __m512 side_by_side(__m256 first, __m256 second) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
}

// [a * cosine - b * sine | b * cosine + a * sine], as sum_of_products has it.
inline __m512 rotate_sixteen(__m256 a, __m256 b, __m256 cosine, __m256 sine) {
  const __m512 pairs = side_by_side(a, b);
  const __m512 rotated = side_by_side(_mm256_xor_ps(b, _mm256_set1_ps(-0.0f)), a);
  const __m512 sines = _mm512_broadcast_f32x8(sine);
  const __m512 product = _mm512_mul_ps(rotated, sines);
  const __m512 rough = _mm512_fmadd_ps(pairs, _mm512_broadcast_f32x8(cosine), product);
  const __m512 exact = _mm512_add_ps(rough, _mm512_fmsub_ps(rotated, sines, product));
  const __mmask16 known = _mm512_cmp_ps_mask(exact, exact, _CMP_ORD_Q);
  return _mm512_mask_mov_ps(rough, known, exact);
}

inline __m256i bfloat16_codes(__m512 floats) {
  const __m512i words = _mm512_castps_si512(floats);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(words, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(words, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 unknown = _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, unknown, _mm512_set1_epi32(0x7fff)));
}

template <typename T>
inline void part(__m256i codes, Pack<T, 8>& x, Pack<T, 8>& y) {
  x = bits_as<Pack<T, 8>>(_mm256_castsi256_si128(codes));
  y = bits_as<Pack<T, 8>>(_mm256_extracti128_si256(codes, 1));
}

}  // namespace kvcupy_host

template <>
inline void rotate<bfloat16, 8>(const Pack<float, 8>& a, const Pack<float, 8>& b,
                                const Pack<float, 8>& cosine, const Pack<float, 8>& sine,
                                Pack<bfloat16, 8>& x, Pack<bfloat16, 8>& y) {
  using namespace kvcupy_host;
  const __m512 rotated = rotate_sixteen(bits_as<__m256>(a), bits_as<__m256>(b),
                                        bits_as<__m256>(cosine), bits_as<__m256>(sine));
  part(bfloat16_codes(rotated), x, y);
}

template <>
inline void rotate<half, 8>(const Pack<float, 8>& a, const Pack<float, 8>& b,
                            const Pack<float, 8>& cosine, const Pack<float, 8>& sine,
                            Pack<half, 8>& x, Pack<half, 8>& y) {
  using namespace kvcupy_host;
  const __m512 rotated = rotate_sixteen(bits_as<__m256>(a), bits_as<__m256>(b),
                                        bits_as<__m256>(cosine), bits_as<__m256>(sine));
  const __mmask16 unknown = _mm512_cmp_ps_mask(rotated, rotated, _CMP_UNORD_Q);
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
  part(_mm512_cvtps_ph(_mm512_mask_mov_ps(rotated, unknown, nan), kNearest), x, y);
}
#pragma GCC diagnostic pop
#endif
