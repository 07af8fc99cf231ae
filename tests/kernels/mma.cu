// What mma.cuh gives, one warp at a time.
#include "mma.cuh"

struct MmaParams {
  const char* a;  // [16, 16] of T
  const char* b;  // [16, 8] of T; for `load` [32, 8] of any 16 bits
  float* c;       // [16, 8]; for `load` [4, 32, 2] of 16 bits
  int rows;       // for `load`: how many of the 32 exist
};

template <typename T>
__device__ __forceinline__ u32 pair_at(const char* matrix, int first, int second) {
  const T* elements = reinterpret_cast<const T*>(matrix);
  return pack_pair<T>(to_float(elements[first]), to_float(elements[second]));
}

// C += A B of fragments as the header describes them; kByShuffles: without tensor cores.
// grid: 1, block: (32, warps), smem: 0
template <typename T, bool kByShuffles>
__global__ void multiply(const __grid_constant__ MmaParams p) {
  const int lane = threadIdx.x;
  const int g = lane / 4;
  const int t = lane % 4;
  const char* a_matrix = p.a + threadIdx.y * 512;
  const char* b_matrix = p.b + threadIdx.y * 256;
  u32 a[4];
  for (int i = 0; i < 4; ++i) {
    const int at = (g + i % 2 * 8) * 16 + i / 2 * 8 + 2 * t;
    a[i] = pair_at<T>(a_matrix, at, at + 1);
  }
  u32 b[2];
  for (int i = 0; i < 2; ++i) {
    const int at = (i * 8 + 2 * t) * 8 + g;
    b[i] = pair_at<T>(b_matrix, at, at + 8);
  }
  float* c_matrix = p.c + threadIdx.y * 128;
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = c_matrix[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  if constexpr (kByShuffles) {
    multiply_by_shuffles<T>(c, a, b[0], b[1]);
  } else {
    mma_m16n8k16<T>(c, a, b[0], b[1]);
  }
  for (int i = 0; i < 4; ++i) c_matrix[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

// Four 8 x 8 matrices through shared memory: copied in, zeros from row `rows` on, and loaded.
// grid: 1, block: 32, smem: 512
template <bool kTransposed>
__global__ void load(const __grid_constant__ MmaParams p) {
  const int lane = threadIdx.x;
  char* shared = dynamic_shared<char>();
  copy_async(shared + lane * 16, p.b + lane * 16, lane < p.rows);
  wait_for_copies();
  __syncthreads();
  u32 got[4];
  load_matrices<kTransposed>(got, shared + lane * 16);
  for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(p.c)[i * 32 + lane] = got[i];
}
