// Tensor-core products, and asynchronous copies into shared memory: PTX under the name of what it
// does.
//
// A warp multiplies a 16 x 16 matrix A by a 16 x 8 matrix B and adds to a 16 x 8 matrix C, all
// three spread over its lanes. With g = lane / 4 and t = lane % 4 a lane has, in pairs of 16 bits,
//   a[0]: row g,     columns 2t and 2t + 1     a[2]: row g,     columns 2t + 8 and 2t + 9
//   a[1]: row g + 8, columns 2t and 2t + 1     a[3]: row g + 8, columns 2t + 8 and 2t + 9
//   b0: column g, rows 2t and 2t + 1           b1: column g, rows 2t + 8 and 2t + 9
// and in float32
//   c[0], c[1]: row g, columns 2t and 2t + 1   c[2], c[3]: row g + 8, columns 2t and 2t + 1
// So C of one product is half of A of another, once it is rounded.
#pragma once

#include "numeric.cuh"

#ifndef __CUDACC__
#include "host/mma.h"
#endif

// --- Pairs of 16-bit floats ----------------------------------------------------------------------

// x in the lower half, y in the upper, each rounded once.
template <typename T>
__device__ __forceinline__ u32 pack_pair(float x, float y) {
#ifdef __CUDACC__  // one instruction, where the chip has it
  if constexpr (kSameType<T, half>) {
    const half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const u32*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const u32*>(&pair);
  }
#else
  return kvcupy_host::bits_as<u32>(Pack<T, 2>{from_float<T>(x), from_float<T>(y)});
#endif
}

template <typename T>
__device__ __forceinline__ float lower_of(u32 pair) {
  return to_float(reinterpret_cast<const T*>(&pair)[0]);
}

template <typename T>
__device__ __forceinline__ float upper_of(u32 pair) {
  return to_float(reinterpret_cast<const T*>(&pair)[1]);
}

// Four quantised elements in float16, exactly: elements 0 and 2 in `even`, 1 and 3 in `odd`.
template <typename T>
__device__ __forceinline__ void to_half_pairs(u32 four, u32& even, u32& odd) {
#ifndef __CUDACC__
  const T* elements = reinterpret_cast<const T*>(&four);
  even = pack_pair<half>(to_float(elements[0]), to_float(elements[2]));
  odd = pack_pair<half>(to_float(elements[1]), to_float(elements[3]));
#else
  const auto as_half2 = [](u32 pair) { return *reinterpret_cast<const half2*>(&pair); };
  const auto as_bits = [](half2 pair) { return *reinterpret_cast<const u32*>(&pair); };
  if constexpr (kSameType<T, int8>) {
    // x + 128 as the lowest bits of 1024 is 1152 + x.
    const u32 shifted = four ^ 0x80808080u;
    const half2 origin = as_half2(0x64806480u);
    even = as_bits(__hsub2(as_half2(__byte_perm(shifted, 0x64646464u, 0x4240)), origin));
    odd = as_bits(__hsub2(as_half2(__byte_perm(shifted, 0x64646464u, 0x4341)), origin));
  } else if constexpr (kSameType<T, fp8_e5m2>) {  // the upper byte of a half
    even = __byte_perm(four, 0, 0x2404);
    odd = four & 0xff00ff00u;
  } else {
    static_assert(kSameType<T, fp8_e4m3>, "formats of 8 bits");
#if __CUDA_ARCH__ >= 890
    const u32 sorted = __byte_perm(four, 0, 0x3120);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(even) : "h"(static_cast<unsigned short>(sorted)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(odd) : "h"(static_cast<unsigned short>(sorted >> 16)));
#else
    // With its exponent moved into place an element is 256 times too small. A NaN, all ones, must
    // become one: one more carries into the highest bit of the exponent.
    const half2 unit = as_half2(0x5c005c00u);
    const auto widen = [&](u32 upper_bytes) {
      const u32 magnitude = upper_bytes >> 1 & 0x3f803f80u;
      const u32 nan = (magnitude + 0x00800080u) & 0x40004000u;
      return as_bits(__hmul2(as_half2((upper_bytes & 0x80008000u) | magnitude | nan), unit));
    };
    even = widen(four << 8);
    odd = widen(four);
#endif
  }
#endif
}

// --- Products ------------------------------------------------------------------------------------

// C += A B without tensor cores: every lane fetches the pairs that it needs. Products are exact,
// sums float32, one after another.
template <typename T>
__device__ __forceinline__ void multiply_by_shuffles(float (&c)[4], const u32 (&a)[4], u32 b0,
                                                     u32 b1) {
  const int lane = threadIdx.x % 32;
  const int rows = lane / 4 * 4;         // the lanes that have rows g and g + 8 of A
  const int columns = lane % 4 * 2 * 4;  // those that have column 2t of B; then column 2t + 1
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const u32 b = upper ? b1 : b0;
#pragma unroll 1
    for (int t = 0; t < 4; ++t) {
      const u32 row[2] = {__shfl_sync(kAllLanes, a[2 * upper], rows + t),
                          __shfl_sync(kAllLanes, a[2 * upper + 1], rows + t)};
      const u32 column[2] = {__shfl_sync(kAllLanes, b, columns + t),
                             __shfl_sync(kAllLanes, b, columns + 4 + t)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c[i] = __fmaf_rn(lower_of<T>(row[i / 2]), lower_of<T>(column[i % 2]), c[i]);
        c[i] = __fmaf_rn(upper_of<T>(row[i / 2]), upper_of<T>(column[i % 2]), c[i]);
      }
    }
  }
}

// C += A B of a warp, T half or bfloat16. Every lane must call it. Products are exact, sums
// float32; in what order, and how the sums of a tensor core round, is the processor's own.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(kSameType<T, half> || kSameType<T, bfloat16>, "formats of 16 bits");
#ifndef __CUDACC__
  kvcupy_host::multiply_in_warp<T>(c, a, b0, b1);
#elif __CUDA_ARCH__ >= 800
  if constexpr (kSameType<T, half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else  // Turing: half as deep, and no bfloat16
  if constexpr (kSameType<T, half>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
  } else {
    multiply_by_shuffles<T>(c, a, b0, b1);
  }
#endif
}

// --- Shared memory -------------------------------------------------------------------------------

#ifdef __CUDACC__
__device__ __forceinline__ u32 shared_address(const void* place) {
  return static_cast<u32>(__cvta_generic_to_shared(place));
}
#endif

// Four 8 x 8 matrices of 16-bit elements out of shared memory. Lane l names row l % 8 of matrix
// l / 8, 16 bytes at a multiple of 16. A lane gets of matrix i, in to[i], row g, columns 2t and
// 2t + 1; transposed: column g, rows 2t and 2t + 1. Every lane of the warp must call it.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const char* row) {
#ifndef __CUDACC__
  kvcupy_host::load_matrices_in_warp(to, row, kTransposed);
#else
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
#endif
}

// Start copying 16 bytes from global to shared memory, both at multiples of 16; zeros if they do
// not `exist`. They have arrived after `wait_for_copies`; other threads see them after a barrier
// too.
__device__ __forceinline__ void copy_async(char* shared, const char* global, bool exist) {
#ifndef __CUDACC__
  kvcupy_host::begin_copy(shared, global, exist, 16);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(exist ? 16 : 0)
               : "memory");
#else
  uint4 word = {0, 0, 0, 0};
  if (exist) word = __ldg(reinterpret_cast<const uint4*>(global));
  *reinterpret_cast<uint4*>(shared) = word;
#endif
}

// Likewise a word of 4 or 8 bytes.
template <int kBytes>
__device__ __forceinline__ void copy_word_async(char* shared, const char* global, bool exist) {
  static_assert(kBytes == 4 || kBytes == 8, "what cp.async copies by way of L1");
#ifndef __CUDACC__
  kvcupy_host::begin_copy(shared, global, exist, kBytes);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "n"(kBytes), "r"(exist ? kBytes : 0)
               : "memory");
#else
  Word<kBytes> word = {};
  if (exist) word = __ldg(reinterpret_cast<const Word<kBytes>*>(global));
  *reinterpret_cast<Word<kBytes>*>(shared) = word;
#endif
}

// Likewise one float.
__device__ __forceinline__ void copy_float_async(float* shared, const float* global, bool exist) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(exist ? 4 : 0)
               : "memory");
#else
  *shared = exist ? *global : 0.0f;
#endif
}

// Close a group of copies: those that this thread has started since it closed the last.
__device__ __forceinline__ void end_copy_group() {
#ifndef __CUDACC__
  kvcupy_host::commit_copies();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for the copies of this thread but those of the kLeft groups that were closed last.
template <int kLeft>
__device__ __forceinline__ void wait_for_copy_groups() {
#ifndef __CUDACC__
  kvcupy_host::wait_for_groups(kLeft);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Wait for all copies that this thread has started.
__device__ __forceinline__ void wait_for_copies() {
#ifndef __CUDACC__
  kvcupy_host::finish_copies();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// --- Powers --------------------------------------------------------------------------------------

// 2 to the x within two units, and 0 where that is below the normal numbers.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDACC__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}
