// Loops whose instructions are known, for the reader of machine code.
struct LoopsParams {
  const float* in;  // [count, 4 * 32]
  float* out;       // [32, 4]
  int count;
  int bounded;  // whether a sum is replaced by its sine
};

// A pass of the outer loop loads 16 bytes, and has kFmas multiply-adds and three shuffles.
// grid: (1), block: (32), smem: 0
template <int kFmas>
__global__ void loops(const __grid_constant__ LoopsParams p) {
  const int lane = threadIdx.x;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int i = 0; i < p.count; ++i) {
    const float4 x = reinterpret_cast<const float4*>(p.in)[i * 32 + lane];
#pragma unroll
    for (int j = 0; j < kFmas / 4; ++j) {
      sum.x = sum.x * x.x + x.y;
      sum.y = sum.y * x.y + x.z;
      sum.z = sum.z * x.z + x.w;
      sum.w = sum.w * x.w + x.x;
    }
#pragma unroll 1
    for (int distance = 4; distance > 0; distance /= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, distance);
    }
    if (p.bounded) sum.x = __sinf(sum.x);
  }
  reinterpret_cast<float4*>(p.out)[lane] = sum;
}
