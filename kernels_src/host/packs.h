// Conversions of eight small floats at a time, in the vector types of GCC and Clang or by table.
// They give what the conversions of one give, bit for bit but for the payload of a NaN.
#pragma once

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace kvcupy_host {

using Floats = float __attribute__((vector_size(32)));
using Words = unsigned __attribute__((vector_size(32)));
using Halves = unsigned short __attribute__((vector_size(16)));
using TwiceHalves = unsigned short __attribute__((vector_size(32)));

template <typename To, typename From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
inline void split_halves(const Pack<T, 16>& both, Pack<T, 8>& even, Pack<T, 8>& odd) {
  const auto halves = bits_as<TwiceHalves>(both);
  even = bits_as<Pack<T, 8>>(__builtin_shufflevector(halves, halves, 0, 2, 4, 6, 8, 10, 12, 14));
  odd = bits_as<Pack<T, 8>>(__builtin_shufflevector(halves, halves, 1, 3, 5, 7, 9, 11, 13, 15));
}

template <typename T>
inline Pack<T, 16> merge_halves(const Pack<T, 8>& even, const Pack<T, 8>& odd) {
  return bits_as<Pack<T, 16>>(__builtin_shufflevector(bits_as<Halves>(even), bits_as<Halves>(odd),
                                                      0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14,
                                                      7, 15));
}

// What each of the 256 patterns of an 8-bit float is.
template <typename T>
struct ByteValues {
  float of[256];

  ByteValues() {
    for (int i = 0; i < 256; ++i) of[i] = to_float(bits_as<T>(static_cast<unsigned char>(i)));
  }
};

template <typename T>
inline Pack<float, 8> look_up(const Pack<T, 8>& in) {
  static const ByteValues<T> values;
  Pack<float, 8> out;
  for (int i = 0; i < 8; ++i) out.values[i] = values.of[bits_as<unsigned char>(in.values[i])];
  return out;
}

}  // namespace kvcupy_host

template <>
inline Pack<float, 8> to_floats<fp8_e4m3, 8>(const Pack<fp8_e4m3, 8>& in) {
  return kvcupy_host::look_up(in);
}
template <>
inline Pack<float, 8> to_floats<fp8_e5m2, 8>(const Pack<fp8_e5m2, 8>& in) {
  return kvcupy_host::look_up(in);
}

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

template <>
inline Pack<float, 8> to_floats<bfloat16, 8>(const Pack<bfloat16, 8>& in) {
  using namespace kvcupy_host;
  const Words words = __builtin_convertvector(bits_as<Halves>(in.values), Words) << 16;
  return bits_as<Pack<float, 8>>(words);
}

template <>
inline Pack<bfloat16, 8> from_floats<bfloat16, 8>(const Pack<float, 8>& in) {
  using namespace kvcupy_host;
  const auto floats = bits_as<Floats>(in);
  const auto words = bits_as<Words>(in);
  const Words rounded = (words + 0x7fff + (words >> 16 & 1)) >> 16;  // to nearest even
  const auto unknown = bits_as<Words>(floats != floats);
  return bits_as<Pack<bfloat16, 8>>(
      __builtin_convertvector((rounded & ~unknown) | (unknown & 0x7fff), Halves));
}

#if defined(__F16C__)
namespace kvcupy_host {
using Float16s = _Float16 __attribute__((vector_size(16)));
}

template <>
inline Pack<float, 8> to_floats<half, 8>(const Pack<half, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(__builtin_convertvector(bits_as<Float16s>(in.values), Floats));
}

template <>
inline Pack<half, 8> from_floats<half, 8>(const Pack<float, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<half, 8>>(__builtin_convertvector(bits_as<Floats>(in), Float16s));
}
#endif

template <>
inline Pack<float, 8> negative<8>(const Pack<float, 8>& in) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(-bits_as<Floats>(in));
}

template <>
inline Pack<float, 8> products<8>(const Pack<float, 8>& a, float scale, const Pack<float, 8>& b) {
  using namespace kvcupy_host;
  return bits_as<Pack<float, 8>>(bits_as<Floats>(a) * scale * bits_as<Floats>(b));
}

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
// GCC 12 takes the undefined operands inside its own intrinsics for ours.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace kvcupy_host {

inline __m512 side_by_side(__m256 first, __m256 second) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
}

// [a * cosine - b * sine | b * cosine + a * sine], as sum_of_products has it.
inline __m512 rotate_sixteen(__m256 a, __m256 b, __m256 cosine, __m256 sine) {
  const __m512 pairs = side_by_side(a, b);
  const __m512 turned = side_by_side(_mm256_xor_ps(b, _mm256_set1_ps(-0.0f)), a);
  const __m512 sines = _mm512_broadcast_f32x8(sine);
  const __m512 product = _mm512_mul_ps(turned, sines);
  const __m512 rough = _mm512_fmadd_ps(pairs, _mm512_broadcast_f32x8(cosine), product);
  const __m512 exact = _mm512_add_ps(rough, _mm512_fmsub_ps(turned, sines, product));
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
  const __m512 turned = rotate_sixteen(bits_as<__m256>(a), bits_as<__m256>(b),
                                       bits_as<__m256>(cosine), bits_as<__m256>(sine));
  part(bfloat16_codes(turned), x, y);
}

template <>
inline void rotate<half, 8>(const Pack<float, 8>& a, const Pack<float, 8>& b,
                            const Pack<float, 8>& cosine, const Pack<float, 8>& sine,
                            Pack<half, 8>& x, Pack<half, 8>& y) {
  using namespace kvcupy_host;
  const __m512 turned = rotate_sixteen(bits_as<__m256>(a), bits_as<__m256>(b),
                                       bits_as<__m256>(cosine), bits_as<__m256>(sine));
  part(_mm512_cvtps_ph(turned, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), x, y);
}
#pragma GCC diagnostic pop
#endif
