// Atomics of many blocks on the same words.
#include "common.cuh"

struct AtomicsParams {
  const char* in;  // [threads] of T
  char* out;       // [words] of T
  int* old;        // [threads] what an operation returned, as an index
  int words;
};

// Each kernel: thread i works on word i % words.
// grid: any, block: any, smem: 0

template <typename T>
__device__ __forceinline__ T* word_of(const AtomicsParams& p, int self) {
  return reinterpret_cast<T*>(p.out) + self % p.words;
}

__device__ __forceinline__ int thread_in_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }

template <typename T>
__global__ void add(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  atomicAdd(word_of<T>(p, self), reinterpret_cast<const T*>(p.in)[self]);
}

template <typename T>
__global__ void largest(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  atomicMax(word_of<T>(p, self), reinterpret_cast<const T*>(p.in)[self]);
}

template <typename T>
__global__ void smallest(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  atomicMin(word_of<T>(p, self), reinterpret_cast<const T*>(p.in)[self]);
}

template <typename T>
__global__ void all_bits(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  atomicAnd(word_of<T>(p, self), reinterpret_cast<const T*>(p.in)[self]);
}

template <typename T>
__global__ void any_bits(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  atomicOr(word_of<T>(p, self), reinterpret_cast<const T*>(p.in)[self]);
}

// Every thread draws a different number; the literal 1 takes the type of the word.
template <typename T>
__global__ void draw_numbers(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  p.old[self] = static_cast<int>(atomicAdd(word_of<T>(p, self), 1));
}

// Every thread leaves its own number and takes what was there.
template <typename T>
__global__ void pass_on(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  p.old[self] = static_cast<int>(atomicExch(word_of<T>(p, self), static_cast<T>(self + 1)));
}

// Adds with compare-and-swap.
template <typename T>
__global__ void add_by_swapping(const __grid_constant__ AtomicsParams p) {
  const int self = thread_in_grid();
  T* word = word_of<T>(p, self);
  const T value = reinterpret_cast<const T*>(p.in)[self];
  T seen = *reinterpret_cast<volatile T*>(word);
  for (T expected = seen + 1; seen != expected;) {
    expected = seen;
    seen = atomicCAS(word, expected, static_cast<T>(expected + value));
  }
}
