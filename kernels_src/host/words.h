// Words of 8 and more bytes, for common.cuh.
#pragma once

// Whether packs are converted in vector registers, and rows are copied by memcpy: not in strict
// builds, nor where the branches of a GPU are compiled.
#if !KVCUPY_ARCH && !defined(KVCUPY_STRICT)
#define KVCUPY_HOST_VARIANTS
#endif

#ifdef KVCUPY_STRICT  // Clang does not check how a copied struct is aligned
template <>
struct WordOf<8> {
  typedef unsigned int type __attribute__((vector_size(8)));
};
template <>
struct WordOf<16> {
  typedef unsigned int type __attribute__((vector_size(16)));
};
#else
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};
#endif

#ifdef KVCUPY_HOST_VARIANTS
constexpr int kWidestWord = 32;  // still at multiples of 16
template <>
struct WordOf<32> {
  typedef unsigned int type __attribute__((vector_size(32), aligned(16)));
};
#else
constexpr int kWidestWord = 16;
#endif
