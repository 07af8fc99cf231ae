// The CUDA names that the kernels use, for a C++ compiler. With it the .cu files of this folder's
// parent run on this processor, one OS thread per block (see runner.h).
#pragma once

// C's own math.h: what libstdc++ wraps around it takes longer to parse than a kernel to compile.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stddef.h>
#include <string.h>

#include "vectors.h"

#define __host__
#define __device__
#define __global__ static inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace kvcupy_host {

// The identity of this thread. Its address comes from a const function, so that a compiler looks it
// up once and not at every access, as it would for a thread_local variable in a shared library.
struct Indices {
  uint3 thread;
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
};
#ifdef KVCUPY_STRICT  // the runner's (strict.cpp)
#ifndef KVCUPY_RUNNER
__attribute__((const))
#endif
Indices* indices();
#else
static thread_local Indices indices_of_thread;
__attribute__((const, noinline)) static Indices* indices() { return &indices_of_thread; }
#endif

}  // namespace kvcupy_host

#define threadIdx (kvcupy_host::indices()->thread)
#define blockIdx (kvcupy_host::indices()->block)
#define blockDim (kvcupy_host::indices()->block_size)
#define gridDim (kvcupy_host::indices()->grid_size)
constexpr int warpSize = 32;

namespace kvcupy_host {

// Collective operations of a warp. Only a warp barrier orders accesses to memory.
enum class WarpCall : unsigned char { kBarrier, kShuffle, kVote, kProduct, kLoadMatrices };

// Where the source has a barrier.
struct Site {
  const char* file;
  int line;
};

// Supplied by the runner. Each ends the launch with an error if it cannot be done.
void block_barrier(Site site);
void warp_barrier(unsigned mask, WarpCall call);
[[noreturn]] void trap();
void* shared_memory();
unsigned long long* warp_exchange();  // 32 values, one per lane of the calling thread's warp
unsigned lanes_left(unsigned mask);   // lanes of mask that exist and have not returned

inline unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % warpSize;
}

#ifdef KVCUPY_STRICT
void require_lane(unsigned mask, unsigned source);  // the calling thread's warp has it, and mask
#else
inline void require_lane(unsigned, unsigned) {}
#endif

template <typename T>
inline T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(unsigned long long), "a shuffle moves at most 8 bytes");
  unsigned long long* slots = warp_exchange();
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  slots[lane()] = bits;
  warp_barrier(mask, WarpCall::kShuffle);
  require_lane(mask, source);
  bits = slots[source];
  warp_barrier(mask, WarpCall::kShuffle);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace kvcupy_host

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  kvcupy_host::block_barrier({file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  kvcupy_host::warp_barrier(mask, kvcupy_host::WarpCall::kBarrier);
}
[[noreturn]] inline void __trap() { kvcupy_host::trap(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// --- Warp shuffles and votes ---------------------------------------------------------------------
// A lane whose source is outside its segment of `width` keeps its own value. The hardware uses
// five bits of a lane offset.

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int first = kvcupy_host::lane() / width * width;
  return kvcupy_host::exchange(mask, value, first + (source & (width - 1)));
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize) {
  const int self = kvcupy_host::lane();
  const int source = self ^ (lanes & 31);
  return kvcupy_host::exchange(mask, value, source < (self / width + 1) * width ? source : self);
}

template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int self = kvcupy_host::lane();
  const int source = self + static_cast<int>(delta & 31);
  return kvcupy_host::exchange(mask, value, source < (self / width + 1) * width ? source : self);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int self = kvcupy_host::lane();
  const int source = self - static_cast<int>(delta & 31);
  return kvcupy_host::exchange(mask, value, source >= self / width * width ? source : self);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned long long* slots = kvcupy_host::warp_exchange();
  slots[kvcupy_host::lane()] = predicate != 0;
  kvcupy_host::warp_barrier(mask, kvcupy_host::WarpCall::kVote);
  unsigned votes = 0;
  const unsigned voters = kvcupy_host::lanes_left(mask);
  for (int i = 0; i < warpSize; ++i) {
    if (voters >> i & 1u) votes |= static_cast<unsigned>(slots[i]) << i;
  }
  kvcupy_host::warp_barrier(mask, kvcupy_host::WarpCall::kVote);
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// --- Atomics -------------------------------------------------------------------------------------

namespace kvcupy_host {

// A parameter from which T is not deduced: as in CUDA, the address decides the type.
template <typename T>
struct Same {
  using type = T;
};
template <typename T>
using Value = typename Same<T>::type;

}  // namespace kvcupy_host

template <typename T>
inline T atomicExch(T* address, kvcupy_host::Value<T> value) {
  T old;
  __atomic_exchange(address, &value, &old, __ATOMIC_SEQ_CST);
  return old;
}

template <typename T>
inline T atomicCAS(T* address, kvcupy_host::Value<T> compare, kvcupy_host::Value<T> value) {
  __atomic_compare_exchange(address, &compare, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return compare;
}

namespace kvcupy_host {

template <typename T, typename Combine>
inline T atomic_update(T* address, Combine combine) {
  T old;
  __atomic_load(address, &old, __ATOMIC_SEQ_CST);
  T desired = combine(old);
  while (!__atomic_compare_exchange(address, &old, &desired, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST)) {
    desired = combine(old);
  }
  return old;
}

}  // namespace kvcupy_host

template <typename T>
inline T atomicAdd(T* address, kvcupy_host::Value<T> value) {
  return kvcupy_host::atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
inline unsigned atomicInc(unsigned* address, unsigned most) {
  return kvcupy_host::atomic_update(address,
                                    [=](unsigned old) { return old >= most ? 0 : old + 1; });
}
template <typename T>
inline T atomicMax(T* address, kvcupy_host::Value<T> value) {
  return kvcupy_host::atomic_update(address, [=](T old) { return old < value ? value : old; });
}
template <typename T>
inline T atomicMin(T* address, kvcupy_host::Value<T> value) {
  return kvcupy_host::atomic_update(address, [=](T old) { return value < old ? value : old; });
}
template <typename T>
inline T atomicAnd(T* address, kvcupy_host::Value<T> value) {
  return __atomic_fetch_and(address, value, __ATOMIC_SEQ_CST);
}
template <typename T>
inline T atomicOr(T* address, kvcupy_host::Value<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}

// --- Arithmetic ----------------------------------------------------------------------------------

inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
// Four of the eight bytes of x and y, by the lower three bits of the selector's four-bit digits.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = x | static_cast<unsigned long long>(y) << 32;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    chosen |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return chosen;
}
template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
// Of a NaN and a number, the number. The C library differs for signalling NaN: it returns NaN,
// which would drop the maximum so far.
namespace kvcupy_host {
template <typename T>
constexpr T smaller_number(T a, T b) {
  return a < b || b != b ? a : b;
}
template <typename T>
constexpr T larger_number(T a, T b) {
  return a > b || b != b ? a : b;
}
}  // namespace kvcupy_host
#define fminf(a, b) kvcupy_host::smaller_number<float>(a, b)
#define fmaxf(a, b) kvcupy_host::larger_number<float>(a, b)
#define fmin(a, b) kvcupy_host::smaller_number<double>(a, b)
#define fmax(a, b) kvcupy_host::larger_number<double>(a, b)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
