// What every kernel shares: index types, vector words, byte-stride addressing, slots and faults.
//
// Kernels move rows of bytes. A row is found by byte strides, so a layout (NHD, HND, packed QKV,
// K/V interleaved) is a set of strides and never a separate kernel.
#pragma once

#ifndef __CUDACC__
#include "host/cuda_names.h"
#endif

// The architecture whose branches are compiled; 0 is a processor. A host build that defines it, as
// 750 to 1000, runs the branches of that GPU, by the plain versions of instructions.cuh.
#ifdef __CUDA_ARCH__
#define KVCUPY_ARCH __CUDA_ARCH__
#elif !defined(KVCUPY_ARCH)
#define KVCUPY_ARCH 0
#endif
constexpr int kArch = KVCUPY_ARCH;

// Whether a processor does as a whole, in another way, what it does faster so (host/).
#if !KVCUPY_ARCH && !defined(KVCUPY_STRICT)
#define KVCUPY_HOST_VARIANTS
#endif

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;

template <typename A, typename B>
constexpr bool kSameType = false;
template <typename A>
constexpr bool kSameType<A, A> = true;

template <bool kFirst, typename A, typename B>
struct TypeSelection {
  using type = A;
};
template <typename A, typename B>
struct TypeSelection<false, A, B> {
  using type = B;
};
template <bool kFirst, typename A, typename B>
using SelectType = typename TypeSelection<kFirst, A, B>::type;

// --- Words: the unit of one memory access --------------------------------------------------------

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = unsigned char;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
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

#ifndef KVCUPY_HOST_VARIANTS
constexpr int kWidestWord = 16;
#else
constexpr int kWidestWord = 32;  // still at multiples of 16
template <>
struct WordOf<32> {
  typedef unsigned int type __attribute__((vector_size(32), aligned(16)));
};
#endif

// 1, 2, 4, 8 or 16 bytes; an address of one must be a multiple of its size.
template <int kBytes>
using Word = typename WordOf<kBytes>::type;

// Streaming access, to data that is not needed again soon: first to be evicted from the caches.
template <typename T>
__device__ __forceinline__ T load_streaming(const T* source) {
#ifdef __CUDACC__
  return __ldcs(source);
#else
  return *source;
#endif
}

template <typename T>
__device__ __forceinline__ void store_streaming(T* target, const T& value) {
#ifdef __CUDACC__
  __stcs(target, value);
#else
  *target = value;
#endif
}

// `kCount` values of T that are loaded and stored in the widest words.
template <typename T, int kCount>
struct Pack {
  static constexpr int kBytes = sizeof(T) * kCount;
  static constexpr int kWordBytes = kBytes < kWidestWord ? kBytes : kWidestWord;
  static constexpr int kWords = kBytes / kWordBytes;
  static_assert(kWords * kWordBytes == kBytes, "a pack is a whole number of words");

  alignas(kWordBytes) T values[kCount];

  __device__ __forceinline__ void load(const char* source) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<Word<kWordBytes>*>(values)[i] =
          reinterpret_cast<const Word<kWordBytes>*>(source)[i];
    }
  }

  __device__ __forceinline__ void store(char* target) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<Word<kWordBytes>*>(target)[i] =
          reinterpret_cast<const Word<kWordBytes>*>(values)[i];
    }
  }
};

// --- Indices, slots and faults -------------------------------------------------------------------

// An int32 or int64 from an index array.
__device__ __forceinline__ i64 load_index(const char* address, int index_bytes) {
  return index_bytes == 8 ? *reinterpret_cast<const i64*>(address)
                          : *reinterpret_cast<const int*>(address);
}

// The device's fault record: the first fault since it was last cleared, and how many there were.
struct FaultRecord {
  u64 count;
  i64 operation;  // an id that the Python side knows (kvcupy/faults.py)
  i64 position;   // in the index array
  i64 value;
};

__device__ __forceinline__ void report_fault(FaultRecord* faults, i64 operation, i64 position,
                                             i64 value) {
  if (atomicAdd(&faults->count, u64{1}) == 0) {
    faults->operation = operation;
    faults->position = position;
    faults->value = value;
  }
}

// Where a slot lies: slot = page * page_size + offset.
struct CacheStrides {
  i64 page_bytes;
  i64 offset_bytes;
  i64 head_bytes;
};

// The page of a slot, and where in it.
struct SlotPlace {
  i64 page;
  i64 offset;
};

// page_shift is log2(page_size), or -1 when page_size is no power of two.
__device__ __forceinline__ SlotPlace place_of(i64 slot, int page_size, int page_shift) {
  const i64 page = page_shift >= 0 ? slot >> page_shift : slot / page_size;
  return {page, slot - page * page_size};
}

__device__ __forceinline__ i64 offset_bytes(const CacheStrides& strides, const SlotPlace& place) {
  return place.page * strides.page_bytes + place.offset * strides.offset_bytes;
}

__device__ __forceinline__ i64 slot_offset_bytes(const CacheStrides& strides, i64 slot,
                                                 int page_size, int page_shift) {
  return offset_bytes(strides, place_of(slot, page_size, page_shift));
}

// --- Shared memory and reductions ----------------------------------------------------------------

// The dynamic shared memory of the block.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ uint4 shared_words[];
  return reinterpret_cast<T*>(shared_words);
#else
  return reinterpret_cast<T*>(kvcupy_host::shared_memory());
#endif
}

constexpr u32 kAllLanes = 0xffffffffu;

// The sum, or the largest, of the values of `lanes` neighbouring threads (a power of two, up to a
// warp), known to each of them. Every thread of the warp must call it.
__device__ __forceinline__ float sum_within_warp(float value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

__device__ __forceinline__ float max_within_warp(float value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// The largest value of `lanes` neighbouring threads (a power of two), known to each of them. Every
// thread of the block must call it. `scratch` holds one float per warp, used past 32 lanes.
__device__ __forceinline__ float max_over_lanes(float value, int lanes, float* scratch) {
  value = max_within_warp(value, lanes < 32 ? lanes : 32);
  if (lanes > 32) {
    const int warp = threadIdx.x / 32;
    const int warps = lanes / 32;
    const int first_warp = warp / warps * warps;
    if (threadIdx.x % 32 == 0) scratch[warp] = value;
    __syncthreads();
    for (int i = 0; i < warps; ++i) value = fmaxf(value, scratch[first_warp + i]);
    __syncthreads();
  }
  return value;
}
