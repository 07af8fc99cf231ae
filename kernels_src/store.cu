// Store K and V rows into a cache, both in one launch.
//
// A group of `lanes` neighbouring threads takes the K row and the V row of one (token, head), so
// that lane i moves the words i, i + lanes, ... of a row: neighbouring lanes touch neighbouring
// words, and a warp that covers several short rows still fills whole sectors. All loads of K and V
// are issued before the first store. Where heads are contiguous in a token and in the cache, Python
// joins them into one row (num_heads = 1). Several warps share a row when there are too few rows to
// fill the device. MLA is the same kernel: latent and rope part are the two "sides" of one cache
// row.
//
// Bytes: each K and V row is read once and written once, plus one index a token.
#include "numeric.cuh"

// One side: K or V. width is 0 when a launch leaves this side out.
struct StoreSide {
  i64 token_bytes;             // input: stride between tokens
  i64 head_bytes;              // input: stride between heads
  CacheStrides cache;          // cache: strides of pages, of offsets within a page, of heads
  i64 scale_head_bytes;        // stride of scale [num_heads]; 0: one scale for all heads
  i64 scale_cache_slot_bytes;  // strides of scale_cache [num_slots, num_heads]
  i64 scale_cache_head_bytes;
  float scale;  // where no scale array is given
  int width;    // elements a row; bytes in store_copy
};

struct StoreParams {
  const char* key;      // [num_tokens, num_heads, k.width]
  const char* value;    // [num_tokens, num_heads, v.width]
  char* k_cache;        // [num_pages, page_size, num_heads, k.width] by strides
  char* v_cache;        // [num_pages, page_size, num_heads, v.width] by strides
  const char* slots;    // [num_tokens] int32 or int64
  const char* k_scale;  // [num_heads] float32, or null: k.scale
  const char* v_scale;  // [num_heads] float32, or null: v.scale
  char* k_scale_cache;  // [num_slots, num_heads] float32, or null: static scales
  char* v_scale_cache;  // [num_slots, num_heads] float32, or null: static scales
  FaultRecord* faults;
  StoreSide k;
  StoreSide v;
  i64 slot_stride_bytes;
  i64 num_slots;
  i64 skip_slot;  // a slot never written; negative: none
  i64 operation;  // for the fault record
  int num_rows;   // num_tokens * num_heads
  int num_heads;
  int page_size;
  int page_shift;
  int index_bytes;
  int lane_shift;  // log2(lanes)
};

// The row that this thread works on.
struct StoreRow {
  int token;
  int head;
  i64 slot;  // negative: nothing to store
};

__device__ __forceinline__ StoreRow find_row(const StoreParams& p) {
  const int row = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
  if (row >= p.num_rows) return {0, 0, -1};
  const int token = p.num_heads == 1 ? row : row / p.num_heads;
  const int head = row - token * p.num_heads;
  i64 slot = load_index(p.slots + token * p.slot_stride_bytes, p.index_bytes);
  if (slot >= p.num_slots) {
    const bool first_of_token = head == 0 && (threadIdx.x & ((1 << p.lane_shift) - 1)) == 0;
    if (first_of_token) report_fault(p.faults, p.operation, token, slot);
    slot = -1;
  }
  if (slot == p.skip_slot) slot = -1;
  return {token, head, slot};
}

__device__ __forceinline__ const char* input_row(const char* base, const StoreSide& side,
                                                 const StoreRow& row) {
  return base + row.token * side.token_bytes + row.head * side.head_bytes;
}

__device__ __forceinline__ char* cache_row(char* base, const StoreSide& side, const StoreRow& row,
                                           const StoreParams& p) {
  return base + slot_offset_bytes(side.cache, row.slot, p.page_size, p.page_shift) +
         row.head * side.cache.head_bytes;
}

__device__ __forceinline__ float static_scale(const char* scale, const StoreSide& side, int head) {
  return scale ? *reinterpret_cast<const float*>(scale + head * side.scale_head_bytes) : side.scale;
}

__device__ __forceinline__ void record_scale(char* scale_cache, const StoreSide& side,
                                             const StoreRow& row, float scale) {
  *reinterpret_cast<float*>(scale_cache + row.slot * side.scale_cache_slot_bytes +
                            row.head * side.scale_cache_head_bytes) = scale;
}

// Same format in and out: bytes, whatever they mean. A row that arrives already quantised, in a
// cache of dynamic scales, gets the scale 1.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <int kWordBytes>
__global__ void store_copy(const __grid_constant__ StoreParams p) {
  constexpr int kUnroll = 4;  // words of K, and as many of V, in flight a thread
  const StoreRow row = find_row(p);
  if (row.slot < 0) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int k_words = p.k.width / kWordBytes;
  const int v_words = p.v.width / kWordBytes;
  const auto* k_in = reinterpret_cast<const Word<kWordBytes>*>(input_row(p.key, p.k, row));
  const auto* v_in = reinterpret_cast<const Word<kWordBytes>*>(input_row(p.value, p.v, row));
  auto* k_out = reinterpret_cast<Word<kWordBytes>*>(cache_row(p.k_cache, p.k, row, p));
  auto* v_out = reinterpret_cast<Word<kWordBytes>*>(cache_row(p.v_cache, p.v, row, p));

  for (int first = lane; first < k_words || first < v_words; first += lanes * kUnroll) {
    Word<kWordBytes> k[kUnroll];
    Word<kWordBytes> v[kUnroll];
    // Load
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int word = first + i * lanes;
      if (word < k_words) k[i] = k_in[word];
      if (word < v_words) v[i] = v_in[word];
    }
    // Store
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int word = first + i * lanes;
      if (word < k_words) k_out[word] = k[i];
      if (word < v_words) v_out[word] = v[i];
    }
  }
  if (lane == 0 && p.k_scale_cache) record_scale(p.k_scale_cache, p.k, row, 1.0f);
  if (lane == 0 && p.v_scale_cache) record_scale(p.v_scale_cache, p.v, row, 1.0f);
}

template <typename TIn, typename TOut, int kCount>
__device__ __forceinline__ Pack<TOut, kCount> convert(const Pack<TIn, kCount>& in, float scale) {
  Pack<TOut, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kQuantised<TOut>) {
      out.values[i] = quantise<TOut>(to_float(in.values[i]), scale);
    } else {
      out.values[i] = from_float<TOut>(to_float(in.values[i]));
    }
  }
  return out;
}

// Another format, with scales that are known before the launch.
// grid: (rows / (block / lanes)), block: (a multiple of lanes), smem: 0
template <typename TIn, typename TOut, int kCount>
__global__ void store_convert(const __grid_constant__ StoreParams p) {
  const StoreRow row = find_row(p);
  if (row.slot < 0) return;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = input_row(p.key, p.k, row);
  const char* v_in = input_row(p.value, p.v, row);
  char* k_out = cache_row(p.k_cache, p.k, row, p);
  char* v_out = cache_row(p.v_cache, p.v, row, p);
  const float k_scale = static_scale(p.k_scale, p.k, row.head);
  const float v_scale = static_scale(p.v_scale, p.v, row.head);
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

// The largest magnitude that this lane sees of a row; NaN does not count.
template <typename TIn, int kCount>
__device__ __forceinline__ float lane_absmax(const char* in, int width, int lane, int lanes) {
  float largest = 0.0f;
  for (int i = lane * kCount; i < width; i += lanes * kCount) {
    Pack<TIn, kCount> pack;
    pack.load(in + i * static_cast<int>(sizeof(TIn)));
#pragma unroll
    for (int j = 0; j < kCount; ++j) largest = fmaxf(largest, fabsf(to_float(pack.values[j])));
  }
  return largest;
}

// A scale for each (token, head), from its largest magnitude, stored beside the row. The second
// pass over a row finds it in L1. No thread leaves before the reductions are done. grid: (rows /
// (block / lanes)), block: (a multiple of lanes and of 32), smem: block / 32 floats
template <typename TIn, typename TOut, int kCount>
__global__ void store_dynamic(const __grid_constant__ StoreParams p) {
  const StoreRow row = find_row(p);
  const bool active = row.slot >= 0;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const char* k_in = input_row(p.key, p.k, row);
  const char* v_in = input_row(p.value, p.v, row);
  constexpr int kInBytes = sizeof(TIn);
  constexpr int kOutBytes = sizeof(TOut);

  // Load
  const int k_width = active ? p.k.width : 0;
  const int v_width = active ? p.v.width : 0;
  float* scratch = dynamic_shared<float>();
  const float k_absmax =
      max_over_lanes(lane_absmax<TIn, kCount>(k_in, k_width, lane, lanes), lanes, scratch);
  const float v_absmax =
      max_over_lanes(lane_absmax<TIn, kCount>(v_in, v_width, lane, lanes), lanes, scratch);
  if (!active) return;
  const float k_scale = dynamic_scale<TOut>(k_absmax);
  const float v_scale = dynamic_scale<TOut>(v_absmax);

  // Convert, Store
  char* k_out = cache_row(p.k_cache, p.k, row, p);
  char* v_out = cache_row(p.v_cache, p.v, row, p);
  for (int i = lane * kCount; i < k_width || i < v_width; i += lanes * kCount) {
    Pack<TIn, kCount> k;
    Pack<TIn, kCount> v;
    if (i < k_width) k.load(k_in + i * kInBytes);
    if (i < v_width) v.load(v_in + i * kInBytes);
    if (i < k_width) convert<TIn, TOut>(k, k_scale).store(k_out + i * kOutBytes);
    if (i < v_width) convert<TIn, TOut>(v, v_scale).store(v_out + i * kOutBytes);
  }
  if (lane == 0 && p.k_scale_cache) record_scale(p.k_scale_cache, p.k, row, k_scale);
  if (lane == 0 && p.v_scale_cache) record_scale(p.v_scale_cache, p.v, row, v_scale);
}
