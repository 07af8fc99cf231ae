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

// --- Pairs of fp16 -------------------------------------------------------------------------------

// Four quantised elements in float16, exactly: elements 0 and 2 in `even`, 1 and 3 in `odd`.
template <typename T>
__device__ __forceinline__ void to_half_pairs(u32 four, u32& even, u32& odd) {
  if constexpr (kArch == 0) {
    const T* elements = reinterpret_cast<const T*>(&four);
    even = pack_pair<half>(to_float(elements[0]), to_float(elements[2]));
    odd = pack_pair<half>(to_float(elements[1]), to_float(elements[3]));
  } else if constexpr (kSameType<T, int8>) {
    // x + 128 as the lowest bits of 1024 is 1152 + x.
    constexpr u32 kOrigin = 0x64806480;
    const u32 shifted = four ^ 0x80808080u;
    even = subtract_halves(__byte_perm(shifted, 0x64646464u, 0x4240), kOrigin);
    odd = subtract_halves(__byte_perm(shifted, 0x64646464u, 0x4341), kOrigin);
  } else if constexpr (kSameType<T, fp8_e5m2>) {  // the upper byte of a half
    even = __byte_perm(four, 0, 0x2404);
    odd = four & 0xff00ff00u;
  } else {
    static_assert(kSameType<T, fp8_e4m3>, "formats of 8 bits");
    if constexpr (kArch >= 890) {
      const u32 sorted = __byte_perm(four, 0, 0x3120);
      even = halves_of_e4m3(sorted);
      odd = halves_of_e4m3(sorted >> 16);
    } else {
      // With its exponent moved into place an element is 256 times too small. A NaN, all ones, must
      // become one: one more carries into the highest bit of the exponent.
      const auto widen = [](u32 upper_bytes) {
        const u32 magnitude = upper_bytes >> 1 & 0x3f803f80u;
        const u32 nan = (magnitude + 0x00800080u) & 0x40004000u;
        return multiply_halves((upper_bytes & 0x80008000u) | magnitude | nan, 0x5c005c00u);
      };
      even = widen(four << 8);
      odd = widen(four);
    }
  }
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
  constexpr bool kTuring = kArch != 0 && kArch < 800;  // products half as deep, and no bfloat16
  if constexpr (kTuring && kSameType<T, bfloat16>) {
    multiply_by_shuffles<T>(c, a, b0, b1);
  } else {
#ifndef __CUDACC__
    kvcupy_host::multiply_in_warp<T>(c, a, b0, b1);
#else
    if constexpr (kTuring) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(b0));
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[2]), "r"(a[3]), "r"(b1));
    } else if constexpr (kSameType<T, half>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#endif
  }
}

// x, of which the compiler does not know that it is the same each time: what is found from it is
// found again where it is needed, and holds no register meanwhile.
__device__ __forceinline__ int find_again(int x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
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

constexpr bool kCopiesAreAsync = kArch == 0 || kArch >= 800;

// Start copying kBytes, 4, 8 or 16, from global to shared memory, both at multiples of that; zeros
// if they do not `exist`. They have arrived after `wait_for_copies`; other threads see them after a
// barrier too.
template <int kBytes>
__device__ __forceinline__ void copy_word_async(char* shared, const char* global, bool exist) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async copies");
  if constexpr (!kCopiesAreAsync) {
    Word<kBytes> word = {};
    if (exist) word = __ldg(reinterpret_cast<const Word<kBytes>*>(global));
    *reinterpret_cast<Word<kBytes>*>(shared) = word;
  } else {
#ifndef __CUDACC__
    kvcupy_host::begin_copy(shared, global, exist, kBytes);
#else
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                   "l"(__cvta_generic_to_global(global)), "r"(exist ? 16 : 0)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                   "l"(__cvta_generic_to_global(global)), "n"(kBytes), "r"(exist ? kBytes : 0)
                   : "memory");
    }
#endif
  }
}

// Likewise the first `num_bytes`, up to 4, of a word of 4; zeros for the others.
__device__ __forceinline__ void copy_part_async(char* shared, const char* global, int num_bytes) {
#ifndef __CUDACC__
  for (int at = 0; at < 4; ++at) {
    kvcupy_host::begin_copy(shared + at, global + at, at < num_bytes, 1);
  }
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(num_bytes)
               : "memory");
#else
  for (int at = 0; at < 4; ++at) {
    shared[at] = at < num_bytes ? __ldg(global + at) : char{0};
  }
#endif
}

__device__ __forceinline__ void copy_async(char* shared, const char* global, bool exist) {
  copy_word_async<16>(shared, global, exist);
}

// Likewise one float.
__device__ __forceinline__ void copy_float_async(float* shared, const float* global, bool exist) {
  copy_word_async<4>(reinterpret_cast<char*>(shared), reinterpret_cast<const char*>(global), exist);
}

// Close a group of copies: those that this thread has started since it closed the last.
__device__ __forceinline__ void end_copy_group() {
#ifndef __CUDACC__
  kvcupy_host::commit_copies();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for the copies of this thread except the kLeft groups that were closed last.
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
