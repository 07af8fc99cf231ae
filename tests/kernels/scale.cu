// Multiply floats: a kernel that is right, for the tests of compiling and launching.
#include "factor.cuh"

struct ScaleParams {
  const float* in;  // [count]
  float* out;       // [count]
  int count;
  float factor;
};

// grid: (count / kBlock), block: kBlock, smem: any
template <int kBlock>
__global__ void scale(const __grid_constant__ ScaleParams p) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < p.count) p.out[i] = p.in[i] * p.factor * kFactor;
}

// Every block spins for `count` clock ticks of its multiprocessor, then adds 1 to out[0].
template <int kBlock>
__global__ void delay(const __grid_constant__ ScaleParams p) {
  const long long start = clock64();
  while (clock64() - start < static_cast<long long>(p.count) * 1000) {
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) p.out[0] += 1.0f;
}

// Writes through whatever pointer it is given.
template <int kBlock>
__global__ void crash(const __grid_constant__ ScaleParams p) {
  p.out[threadIdx.x] = p.factor;
}
