// Shuffles, votes and warp barriers.
#include "common.cuh"

struct WarpsParams {
  const int* in;         // [threads]
  const unsigned* mask;  // [threads] the mask that each thread names; 0: it takes no part
  int* out;              // [threads]
  int operand;           // lane, or distance
  int kind;              // index, up, down, xor
  int width;
};

// One shuffle of every thread that takes part.
// grid: 1, block: any, smem: 0
template <typename T>
__global__ void shuffle(const __grid_constant__ WarpsParams p) {
  const int self = threadIdx.x;
  const unsigned mask = p.mask[self];
  if (mask == 0) return;
  // In the upper half of wide types, so that all bits must travel.
  constexpr T kFactor = static_cast<T>(sizeof(T) == 8 ? 1u << 31 : 1);
  const T value = static_cast<T>(p.in[self]) * kFactor;
  T got = 0;
  if (p.kind == 0) got = __shfl_sync(mask, value, p.operand, p.width);
  if (p.kind == 1) got = __shfl_up_sync(mask, value, p.operand, p.width);
  if (p.kind == 2) got = __shfl_down_sync(mask, value, p.operand, p.width);
  if (p.kind == 3) got = __shfl_xor_sync(mask, value, p.operand, p.width);
  p.out[self] = static_cast<int>(got / kFactor);
}

// A ballot, any and all of the lowest bit of `in`, three numbers a thread. Threads without a mask
// leave before, or wait elsewhere.
// grid: 1, block: any, smem: 0
template <int kResults>
__global__ void vote(const __grid_constant__ WarpsParams p) {
  const int self = threadIdx.x;
  const unsigned mask = p.mask[self];
  if (mask == 0) return;
  const int predicate = (p.in[self] & 1) * 64;  // not zero counts, whatever it is
  int* out = p.out + self * kResults;
  out[0] = static_cast<int>(__ballot_sync(mask, predicate));
  out[1] = __any_sync(mask, predicate);
  out[2] = __all_sync(mask, predicate);
}

// Groups of `operand` lanes hand a value round, each group at its own pace.
// grid: 1, block: kBlock, smem: 0
template <int kBlock>
__global__ void pass_round(const __grid_constant__ WarpsParams p) {
  __shared__ int tile[kBlock];
  const int self = threadIdx.x;
  const int first = self / p.operand * p.operand;
  const int group = self / p.operand;
  int value = p.in[self];
  for (int turn = 0; turn <= group % 3; ++turn) {
    tile[self] = value;
    __syncwarp(p.mask[self]);  // every lane of the group has written
    value = tile[first + (self - first + 1) % p.operand];
    __syncwarp(p.mask[self]);  // every lane of the group has read
  }
  p.out[self] = value;
}
