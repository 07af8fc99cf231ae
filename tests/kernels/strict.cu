// What a GPU would punish, a kernel for each kind; beside it the same without the fault.
#include "mma.cuh"

struct StrictParams {
  const char* in;  // [count] bytes
  char* out;       // [count] bytes
  int count;
  int who;  // the thread, or byte, at which something is wrong; -1: nowhere
};

// Commit groups, which mma.cuh has no use for.
__device__ __forceinline__ void commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  kvcupy_host::commit_copies();
#endif
}
template <int kLeft>
__device__ __forceinline__ void wait_for_all_but() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#else
  kvcupy_host::wait_for_groups(kLeft);
#endif
}

// --- Alignment -----------------------------------------------------------------------------------

// Each thread copies a word of kBytes; `who` is how many bytes the source is moved by.
// grid: 1, block: any, smem: 0
template <int kBytes>
__global__ void copy_words(const __grid_constant__ StrictParams p) {
  using T = Word<kBytes>;
  const int i = threadIdx.x;
  reinterpret_cast<T*>(p.out)[i] = reinterpret_cast<const T*>(p.in + p.who)[i];
}

// As copy_words, but it is the target that is moved.
template <int kBytes>
__global__ void copy_words_away(const __grid_constant__ StrictParams p) {
  using T = Word<kBytes>;
  const int i = threadIdx.x;
  reinterpret_cast<T*>(p.out + p.who)[i] = reinterpret_cast<const T*>(p.in)[i];
}

// --- Lanes and barriers --------------------------------------------------------------------------

// Thread `who` exits; the others act together. kWhat: 0 __syncwarp, 1 shuffle, 2 vote, 3 mma,
// 4 ldmatrix.
// grid: 1, block: 32, smem: 512
template <int kWhat>
__device__ __forceinline__ int act(const StrictParams& p, u32 mask) {
  const int lane = threadIdx.x % 32;
  if constexpr (kWhat == 0) {
    __syncwarp(mask);
    return 0;
  } else if constexpr (kWhat == 1) {
    return __shfl_sync(mask, p.in[lane], lane);
  } else if constexpr (kWhat == 2) {
    return __any_sync(mask, p.in[lane] != 0);
  } else if constexpr (kWhat == 3) {
    float c[4] = {};
    const u32 a[4] = {};
    mma_m16n8k16<half>(c, a, 0, 0);
    return c[0] != 0.0f;
  } else {
    char* row = dynamic_shared<char>() + threadIdx.x * 16;
    *reinterpret_cast<uint4*>(row) = uint4{};
    __syncwarp(mask);
    u32 to[4];
    load_matrices<false>(to, row);
    return to[0];
  }
}

template <int kWhat>
__global__ void exits_before(const __grid_constant__ StrictParams p) {
  if (static_cast<int>(threadIdx.x) == p.who) return;
  p.out[threadIdx.x] = act<kWhat>(p, kAllLanes);
}

// Thread `who` never comes: it waits for the block first.
template <int kWhat>
__global__ void waits_elsewhere(const __grid_constant__ StrictParams p) {
  if (static_cast<int>(threadIdx.x) == p.who) __syncthreads();
  p.out[threadIdx.x] = act<kWhat>(p, kAllLanes);
  if (static_cast<int>(threadIdx.x) != p.who) __syncthreads();
}

// Lane `who` names all but itself.
template <int kWhat>
__global__ void forgets_itself(const __grid_constant__ StrictParams p) {
  const u32 mask = kAllLanes;
  const bool wrong = static_cast<int>(threadIdx.x) == p.who;
  p.out[threadIdx.x] = act<kWhat>(p, wrong ? mask & ~(1u << threadIdx.x % 32) : mask);
}

// Halves of a warp at their own pace; lane `who` reads from the other half.
template <int kLanes>
__global__ void shuffles_in_halves(const __grid_constant__ StrictParams p) {
  const int lane = threadIdx.x % kLanes;
  const u32 mask = lane < 16 ? 0xffffu : 0xffff0000u;
  const int from = lane == p.who ? lane ^ 16 : lane ^ 1;
  int value = p.in[threadIdx.x];
  if (lane < 16) value = __shfl_sync(mask, value, from);
  p.out[threadIdx.x] = __shfl_sync(mask, value, from);
}

// A barrier that thread `who` does not reach, since it waits at another.
template <int kThreads>
__global__ void two_barriers(const __grid_constant__ StrictParams p) {
  if (static_cast<int>(threadIdx.x) == p.who) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  p.out[threadIdx.x] = 1;
}

// Threads from `count` on exit before the barrier, which a GPU allows.
template <int kThreads>
__global__ void barrier_of_the_rest(const __grid_constant__ StrictParams p) {
  if (static_cast<int>(threadIdx.x) >= p.count) return;
  __syncthreads();
  p.out[threadIdx.x] = 1;
}

// --- Shared memory -------------------------------------------------------------------------------

template <bool kStatic>
__device__ __forceinline__ char* shared_bytes() {
  if constexpr (kStatic) {
    alignas(16) __shared__ char memory[2048];
    return memory;
  } else {
    return dynamic_shared<char>();
  }
}

// Every thread writes its byte and, after a barrier, reads its neighbour's; thread `who` writes
// nothing.
// grid: any, block: any, smem: a byte a thread
template <bool kStatic>
__global__ void reads_unwritten(const __grid_constant__ StrictParams p) {
  char* bytes = shared_bytes<kStatic>();
  const int i = threadIdx.x;
  if (i != p.who) bytes[i] = p.in[i];
  __syncthreads();
  p.out[i] = bytes[(i + 1) % blockDim.x];
}

// A block does not see what the previous block left.
template <bool kStatic>
__global__ void reads_of_the_block_before(const __grid_constant__ StrictParams p) {
  char* bytes = shared_bytes<kStatic>();
  if (p.who < 0 || blockIdx.x == 0) bytes[threadIdx.x] = p.in[threadIdx.x];
  p.out[threadIdx.x] = bytes[threadIdx.x];
}

// A byte past the end of what the block has, by thread `who`.
template <int kThreads>
__global__ void past_the_end(const __grid_constant__ StrictParams p) {
  char* bytes = dynamic_shared<char>();
  const int i = threadIdx.x;
  bytes[i == p.who ? kThreads : i] = 1;
}

// Neighbours at `count` threads exchange bytes, or both write them. kBarrier: 0 none, 1 of the
// warp, 2 of the block.
template <bool kStatic, bool kTwoWrites, int kBarrier>
__global__ void races(const __grid_constant__ StrictParams p) {
  char* bytes = shared_bytes<kStatic>();
  const int i = threadIdx.x;
  const int other = i ^ p.count;
  bytes[i] = 0;
  __syncthreads();
  bytes[i] = p.in[i];
  if constexpr (kBarrier == 1) __syncwarp();
  if constexpr (kBarrier == 2) __syncthreads();
  if constexpr (kTwoWrites) {
    bytes[other] = 1;
  } else {
    p.out[i] = bytes[other];
  }
}

// One word for all threads: counted atomically, then read by each.
template <bool kBarrier>
__global__ void counts(const __grid_constant__ StrictParams p) {
  int* word = dynamic_shared<int>();
  if (threadIdx.x == 0) *word = 0;
  __syncthreads();
  atomicAdd(word, 1);
  if constexpr (kBarrier) __syncthreads();
  p.out[threadIdx.x] = static_cast<char>(*word);
}

// --- Asynchronous copies -------------------------------------------------------------------------

// Each thread copies 16 bytes and reads them. kFault: 0 none, 1 no wait, 2 wait for too few, 3 no
// barrier after the wait, 4 written meanwhile, 5 no wait but a barrier.
// grid: 1, block: any, smem: 32 bytes a thread
template <int kFault>
__global__ void copies(const __grid_constant__ StrictParams p) {
  const int i = threadIdx.x;
  const int threads = blockDim.x;
  char* shared = dynamic_shared<char>();
  reinterpret_cast<uint4*>(shared)[i] = reinterpret_cast<uint4*>(shared)[threads + i] = uint4{};
  __syncthreads();
  char* first = shared + i * 16;
  char* second = shared + (threads + i) * 16;
  copy_async(first, p.in + i * 16, true);
  commit();
  copy_async(second, p.in + i * 16, i % 2);
  commit();
  if constexpr (kFault == 4) *reinterpret_cast<uint4*>(second) = uint4{};
  if constexpr (kFault == 2) {
    wait_for_all_but<1>();
  } else if constexpr (kFault != 1 && kFault != 5) {
    wait_for_all_but<0>();
  }
  if constexpr (kFault != 3) __syncthreads();
  const int other = kFault == 3 ? threads - 1 - i : i;
  const uint4 word = reinterpret_cast<const uint4*>(shared)[other];
  const uint4 more = reinterpret_cast<const uint4*>(shared)[threads + other];
  reinterpret_cast<uint4*>(p.out)[i] = i % 2 ? more : word;
}

// Of two groups the first is read while the second is on its way.
// grid: 1, block: any, smem: 32 bytes a thread
template <int kGroups>
__global__ void copies_in_groups(const __grid_constant__ StrictParams p) {
  const int i = threadIdx.x;
  char* shared = dynamic_shared<char>() + i * 32;
  for (int g = 0; g < 2; ++g) {
    copy_async(shared + g * 16, p.in + i * 16, true);
    commit();
  }
  wait_for_all_but<kGroups>();
  reinterpret_cast<uint4*>(p.out)[i] = *reinterpret_cast<const uint4*>(shared + p.who * 16);
  wait_for_copies();
}

// --- Launch bounds -------------------------------------------------------------------------------

template <int kThreads>
__global__ void __launch_bounds__(min(64, 128), 2) bounded(const __grid_constant__ StrictParams p) {
  p.out[threadIdx.x] = 1;
}

constexpr int kBound = 96;
template <int kThreads>
__global__ void __launch_bounds__(kBound) bounded_by_name(const __grid_constant__ StrictParams p) {
  p.out[threadIdx.x] = 1;
}

// --- Orders --------------------------------------------------------------------------------------

// Who came as the how-manieth.
// grid: any, block: any, smem: 0
template <int kThreads>
__global__ void draws_numbers(const __grid_constant__ StrictParams p) {
  int* const counter = reinterpret_cast<int*>(p.out);
  int* const numbers = counter + 1;
  numbers[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1);
}
