// Store K and V rows into a cache, both in one launch.
//
// Threads map to rows as in cache_rows.cuh. All loads of K and V are issued before the first
// store, and the first of them beside the load of the slot. MLA is the same kernel: latent and rope
// part are K and V of one cache row.
//
// Bytes: each K and V row is read once, stored or not, and written once, plus one index per token.
#include "cache_rows.cuh"

// Same format in and out: bytes, whatever they mean. A row that arrives already quantised, in a
// cache of dynamic scales, gets the scale 1.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <int kWordBytes>
__global__ void store_copy(const __grid_constant__ CacheRowsParams p) {
  CacheRow row = begin_row(p);
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  copy_rows<kWordBytes>(p, outside_row(p.key, p.k, row), outside_row(p.value, p.v, row),
                        IntoCache{p, row}, {}, lane, lanes);
  if (lane > 0 || row.slot < 0) return;
  if (p.k_scale_cache) *scale_address(p.k_scale_cache, p.k, row.slot, row.head) = 1.0f;
  if (p.v_scale_cache) *scale_address(p.v_scale_cache, p.v, row.slot, row.head) = 1.0f;
}

// Another format, with scales that are known before the launch.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <typename TIn, typename TOut, int kCount>
__global__ void store_convert(const __grid_constant__ CacheRowsParams p) {
  const CacheRow row = find_row(p);
  if (row.slot < 0) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = outside_row(p.key, p.k, row);
  const char* v_in = outside_row(p.value, p.v, row);
  char* k_out = cache_row(p.k_cache, p.k, row, p);
  char* v_out = cache_row(p.v_cache, p.v, row, p);
  const ScaleDivisor k_scale(static_scale(p.k_scale, p.k, row.head));
  const ScaleDivisor v_scale(static_scale(p.v_scale, p.v, row.head));
  constexpr int kInBytes = sizeof(TIn);
  constexpr int kOutBytes = sizeof(TOut);

  for (int i = lane * kCount; i < p.k.width || i < p.v.width; i += lanes * kCount) {
    Pack<TIn, kCount> k;
    Pack<TIn, kCount> v;
    // Load
    if (i < p.k.width) k.load(k_in + i * kInBytes);
    if (i < p.v.width) v.load(v_in + i * kInBytes);
    // Convert, Store
    if (i < p.k.width) convert<TIn, TOut>(k, k_scale).store(k_out + i * kOutBytes);
    if (i < p.v.width) convert<TIn, TOut>(v, v_scale).store(v_out + i * kOutBytes);
  }
}

// The largest magnitude among this lane's elements of a row; NaN does not count.
template <typename TIn, int kCount>
__device__ __forceinline__ float lane_absmax(const char* in, int width, int lane, int lanes) {
  AbsMax<kCount> largest;
  for (int i = lane * kCount; i < width; i += lanes * kCount) {
    Pack<TIn, kCount> pack;
    pack.load(in + i * static_cast<int>(sizeof(TIn)));
    largest.add(pack);
  }
  return largest.value();
}

// Rows that their lanes hold, from their loads to their stores; see store_dynamic.
template <typename TIn, int kCount>
struct HeldRow {
  static constexpr int kHeld = sizeof(TIn) > 2 ? 1 : 2;  // packs of a lane

  Pack<TIn, kCount> packs[kHeld];

  static __device__ __forceinline__ int element(int i, int lane, int lanes) {
    return (i * lanes + lane) * kCount;
  }

  __device__ __forceinline__ void load(const char* in, int width, int lane, int lanes) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = element(i, lane, lanes);
      packs[i] = {};
      if (at < width) packs[i].load(in + at * static_cast<int>(sizeof(TIn)));
    }
  }

  __device__ __forceinline__ float absmax() const {
    AbsMax<kCount> largest;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) largest.add(packs[i]);
    return largest.value();
  }

  template <typename TOut>
  __device__ __forceinline__ void store(char* out, int width, const ScaleDivisor& scale, int lane,
                                        int lanes) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = element(i, lane, lanes);
      if (at >= width) continue;
      quantise<TOut>(to_floats(packs[i]), scale).store(out + at * static_cast<int>(sizeof(TOut)));
    }
  }
};

// A scale for each (token, head), from its largest magnitude, stored beside the row. Lanes hold a
// row if kHeld packs each are all of it; a longer one is read twice, and hits L1 the second time.
// No thread exits before the reductions are done. grid: (rows / (block / lanes)), block: (a
// multiple of lanes and of 32), smem: block / 32 floats
template <typename TIn, typename TOut, int kCount>
__global__ void store_dynamic(const __grid_constant__ CacheRowsParams p) {
  CacheRow row = begin_row(p);
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = outside_row(p.key, p.k, row);
  const char* v_in = outside_row(p.value, p.v, row);
  constexpr int kInBytes = sizeof(TIn);
  constexpr int kOutBytes = sizeof(TOut);
  const bool held = max(p.k.width, p.v.width) <= HeldRow<TIn, kCount>::kHeld * lanes * kCount;

  // Load: also rows that turn out to be stored nowhere
  const int k_width = p.k.width;
  const int v_width = p.v.width;
  float* scratch = dynamic_shared<float>();
  HeldRow<TIn, kCount> k_row;
  HeldRow<TIn, kCount> v_row;
  float k_absmax;
  float v_absmax;
  if (held) {
    k_row.load(k_in, k_width, lane, lanes);
    v_row.load(v_in, v_width, lane, lanes);
    k_absmax = k_row.absmax();
    v_absmax = v_row.absmax();
  } else {
    k_absmax = lane_absmax<TIn, kCount>(k_in, k_width, lane, lanes);
    v_absmax = lane_absmax<TIn, kCount>(v_in, v_width, lane, lanes);
  }
  if (lanes > 32) {
    k_absmax = max_over_lanes(k_absmax, lanes, scratch);
    v_absmax = max_over_lanes(v_absmax, lanes, scratch);
  } else {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      k_absmax = fmaxf(k_absmax, __shfl_xor_sync(kAllLanes, k_absmax, distance));
      v_absmax = fmaxf(v_absmax, __shfl_xor_sync(kAllLanes, v_absmax, distance));
    }
  }
  check_slot(p, row);
  if (row.slot < 0) return;
  const float k_scale = dynamic_scale<TOut>(k_absmax);
  const float v_scale = dynamic_scale<TOut>(v_absmax);

  // Convert, Store
  const ScaleDivisor k_divisor(k_scale);
  const ScaleDivisor v_divisor(v_scale);
  char* k_out = cache_row(p.k_cache, p.k, row, p);
  char* v_out = cache_row(p.v_cache, p.v, row, p);
  if (lane == 0 && p.k_scale_cache)
    *scale_address(p.k_scale_cache, p.k, row.slot, row.head) = k_scale;
  if (lane == 0 && p.v_scale_cache)
    *scale_address(p.v_scale_cache, p.v, row.slot, row.head) = v_scale;
  if (held) {
    k_row.template store<TOut>(k_out, k_width, k_divisor, lane, lanes);
    v_row.template store<TOut>(v_out, v_width, v_divisor, lane, lanes);
    return;
  }
  for (int i = lane * kCount; i < k_width || i < v_width; i += lanes * kCount) {
    Pack<TIn, kCount> k;
    Pack<TIn, kCount> v;
    if (i < k_width) k.load(k_in + i * kInBytes);
    if (i < v_width) v.load(v_in + i * kInBytes);
    if (i < k_width) convert<TIn, TOut>(k, k_divisor).store(k_out + i * kOutBytes);
    if (i < v_width) convert<TIn, TOut>(v, v_divisor).store(v_out + i * kOutBytes);
  }
}
