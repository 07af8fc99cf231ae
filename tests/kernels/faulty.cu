// Kernels that the compile check must complain about, and one that it must not.

struct FaultyParams {
  const uint4* in;  // [count]
  uint4* out;       // [count]
  int count;
};

// Right: 16-byte accesses, few registers.
template <int kBlock>
__global__ void wide(const __grid_constant__ FaultyParams p) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < p.count) p.out[i] = p.in[i];
}

// Right but for the promise: 4-byte accesses.
template <int kBlock>
__global__ void narrow(const __grid_constant__ FaultyParams p) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < p.count) reinterpret_cast<int*>(p.out)[i] = reinterpret_cast<const int*>(p.in)[i];
}

// A variable that nobody uses.
template <int kBlock>
__global__ void warns(const __grid_constant__ FaultyParams p) {
  int unused;
  if (p.count > 0) p.out[0] = p.in[0];
}

// More values alive at once than a thread has registers, when those are limited.
template <int kValues>
__global__ void spills(const __grid_constant__ FaultyParams p) {
  unsigned values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = p.in[i * p.count + threadIdx.x].x;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    p.out[i * p.count + threadIdx.x].x = values[i] * values[kValues - 1 - i];
  }
}

// An array that is indexed at run time, and so lies in memory.
template <int kValues>
__global__ void stack(const __grid_constant__ FaultyParams p) {
  unsigned values[kValues];
  for (int i = 0; i < p.count; ++i) values[p.in[i].x % kValues] = p.in[i].y;
  p.out[0].x = values[p.count % kValues];
}

// No such type.
template <int kBlock>
__global__ void broken(const __grid_constant__ FaultyParams p) {
  NoSuchType value;
}
