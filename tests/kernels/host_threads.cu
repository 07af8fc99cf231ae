// Threads of a block and what they share: indices, barriers, shared memory, early exits, failures.
#include "common.cuh"

struct ThreadsParams {
  const int* in;      // [count]
  int* out;           // [count]
  u64* shared_start;  // [blocks]
  int count;
  int who;  // the thread that does something else
};

__device__ __forceinline__ int thread_in_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

__device__ __forceinline__ int block_in_grid() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

// Twelve numbers a thread, at the place that the indices give.
// grid: any, block: any, smem: 0
template <int kFields>
__global__ void write_indices(const __grid_constant__ ThreadsParams p) {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  int* out = p.out + (block_in_grid() * threads + thread_in_block()) * kFields;
  const unsigned values[] = {threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x,
                             blockIdx.y,  blockIdx.z,  blockDim.x,  blockDim.y,
                             blockDim.z,  gridDim.x,   gridDim.y,   gridDim.z};
  for (int i = 0; i < kFields; ++i) out[i] += static_cast<int>(values[i]);
}

// Every block turns its kBlock numbers around, through static shared memory.
// grid: (count / kBlock), block: kBlock, smem: 0
template <int kBlock>
__global__ void reverse_static(const __grid_constant__ ThreadsParams p) {
  __shared__ int tile[kBlock];
  const int first = blockIdx.x * kBlock;
  tile[threadIdx.x] = p.in[first + threadIdx.x];
  __syncthreads();  // tile is complete
  p.out[first + threadIdx.x] = tile[kBlock - 1 - threadIdx.x];
}

// Every block sums its numbers, in a tree in dynamic shared memory.
// grid: (count / kBlock), block: kBlock, smem: kBlock ints
template <int kBlock>
__global__ void tree_sum(const __grid_constant__ ThreadsParams p) {
  int* sums = dynamic_shared<int>();
  sums[threadIdx.x] = p.in[blockIdx.x * kBlock + threadIdx.x];
  for (int half = kBlock / 2; half > 0; half /= 2) {
    __syncthreads();  // the level below is complete
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.out[blockIdx.x] = sums[0];
}

// Keeps its worker busy, and says by an address which worker that was.
// grid: any, block: 1, smem: 0
template <int kSpins>
__global__ void name_worker(const __grid_constant__ ThreadsParams p) {
  __shared__ int mine;
  volatile int spins = 0;
  while (spins < kSpins) spins = spins + 1;
  mine = blockIdx.x;
  p.out[blockIdx.x] += mine + spins;
  p.shared_start[blockIdx.x] = reinterpret_cast<u64>(&mine);
}

// Thread `who` of the grid traps.
// grid: any, block: any, smem: 0
template <int kMark>
__global__ void trap_one(const __grid_constant__ ThreadsParams p) {
  const int self = blockIdx.x * blockDim.x + threadIdx.x;
  if (self == p.who) __trap();
  if (self < p.count) p.out[self] = kMark;
}

// As trap_one, with arrays on the stack of every thread and a barrier on either side.
// grid: any, block: any, smem: 0
template <int kMark>
__global__ void trap_between_barriers(const __grid_constant__ ThreadsParams p) {
  const int self = blockIdx.x * blockDim.x + threadIdx.x;
  volatile int local[8];
  for (int i = 0; i < 8; ++i) local[i] = kMark;
  __syncthreads();
  if (self == p.who) __trap();
  __syncthreads();
  if (self < p.count) p.out[self] = local[self % 8];
}

// Thread `who` of each block waits for its warp, all the others for the block.
// grid: any, block: any, smem: 0
template <int kMark>
__global__ void diverge(const __grid_constant__ ThreadsParams p) {
  if (static_cast<int>(threadIdx.x) == p.who) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = kMark;
}

// A shuffle, which needs the other threads.
// grid: any, block: any, smem: 0
template <int kMark>
__global__ void shuffle_once(const __grid_constant__ ThreadsParams p) {
  p.out[threadIdx.x] = __shfl_xor_sync(kAllLanes, p.in[threadIdx.x], 1) + kMark;
}
