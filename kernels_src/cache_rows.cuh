// Rows of K and V on their way into a cache or out of it, for the kernels that store and gather.
//
// A group of `lanes` neighbouring threads takes the K row and the V row of one (token, head), so
// that lane i moves the words i, i + lanes, ... of a row: neighbouring lanes touch neighbouring
// words, and a warp that covers several short rows still fills whole sectors. Where heads are
// contiguous both outside and in the cache, Python joins them into one row (num_heads = 1). Several
// warps share a row when there are too few rows to fill the device.
#pragma once

#include "index_load.cuh"
#include "kv_operand.cuh"

#ifdef KVCUPY_HOST_VARIANTS
#include "host/copy.h"
#endif

struct CacheRowsParams {
  char* key;            // [num_tokens, num_heads, k.width], outside the cache
  char* value;          // [num_tokens, num_heads, v.width], outside the cache
  char* k_cache;        // [num_pages, page_size, num_heads, k.width] by strides
  char* v_cache;        // [num_pages, page_size, num_heads, v.width] by strides
  const char* slots;    // [num_tokens] int32 or int64
  const char* k_scale;  // [num_heads] float32, or null: k.scale
  const char* v_scale;  // [num_heads] float32, or null: v.scale
  char* k_scale_cache;  // [num_slots, num_heads] float32, or null: static scales
  char* v_scale_cache;  // [num_slots, num_heads] float32, or null: static scales
  FaultRecord* faults;
  KVOperand k;
  KVOperand v;
  i64 slot_stride_bytes;
  i64 num_slots;
  i64 skip_slot;  // a slot never touched; negative: none
  i64 operation;  // for the fault record; negative: another launch of the call reports
  int num_rows;   // num_tokens * num_heads
  int num_heads;
  int page_size;
  int page_shift;
  int index_bytes;
  int lane_shift;      // log2(lanes)
  int zeroed_outputs;  // kZeroedKey | kZeroedValue: of a gather, rows of skipped slots become zeros
};

constexpr int kZeroedKey = 1;
constexpr int kZeroedValue = 2;

// The rows, of K and of V, that this thread works on.
struct CacheRow {
  int token;
  int head;
  i64 slot;  // negative: nothing to do
};

__device__ __forceinline__ int row_number(const CacheRowsParams& p) {
  return blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
}

// A row with its slot as given: `check_slot` must follow. Loads that do not depend on the slot go
// between the two, so that they do not wait for it. Past the last row the slot is negative.
__device__ __forceinline__ CacheRow begin_row(const CacheRowsParams& p) {
  const int row = row_number(p);
  if (row >= p.num_rows) return {0, 0, -1};
  const int token = p.num_heads == 1 ? row : row / p.num_heads;
  const int head = row - token * p.num_heads;
  const u64 slot = begin_index(p.slots + token * p.slot_stride_bytes, p.index_bytes);
  return {token, head, static_cast<i64>(slot)};
}

// Take a slot that is skipped or past the end, which is a fault, for a negative one.
__device__ __forceinline__ void check_slot(const CacheRowsParams& p, CacheRow& row) {
  row.slot = index_of(row.slot, p.index_bytes);
  if (row.slot == p.skip_slot) row.slot = -1;
  if (row.slot < p.num_slots) return;
  const bool first_of_token = row.head == 0 && (threadIdx.x & ((1 << p.lane_shift) - 1)) == 0;
  if (first_of_token && p.operation >= 0) {
    report_fault(p.faults, p.operation, row.token, row.slot);
  }
  row.slot = -1;
}

__device__ __forceinline__ CacheRow find_row(const CacheRowsParams& p) {
  CacheRow row = begin_row(p);
  check_slot(p, row);
  return row;
}

__device__ __forceinline__ char* outside_row(char* base, const KVOperand& operand,
                                             const CacheRow& row) {
  return base + row.token * operand.token_bytes + row.head * operand.head_bytes;
}

__device__ __forceinline__ char* cache_row(char* base, const KVOperand& operand,
                                           const CacheRow& row, const CacheRowsParams& p) {
  return base + slot_offset_bytes(operand.cache, row.slot, p.page_size, p.page_shift) +
         row.head * operand.cache.head_bytes;
}

// K and V of a row that the thread of this one, on a processor, may fetch meanwhile; or null.
struct RowAhead {
  const char* k;
  const char* v;
};

__device__ __forceinline__ RowAhead cache_row_ahead([[maybe_unused]] const CacheRowsParams& p,
                                                    [[maybe_unused]] const CacheRow& row) {
#ifdef KVCUPY_HOST_VARIANTS
  const int rows = max(1, kvcupy_host::kFetchedBytes / max(1, p.k.width + p.v.width));
  const i64 number = i64{row.token} * p.num_heads + row.head + rows;
  if (number >= p.num_rows) return {};
  CacheRow ahead{static_cast<int>(number / p.num_heads), static_cast<int>(number % p.num_heads), 0};
  ahead.slot = load_index(p.slots + ahead.token * p.slot_stride_bytes, p.index_bytes);
  if (ahead.slot < 0 || ahead.slot >= p.num_slots) return {};
  return {cache_row(p.k_cache, p.k, ahead, p), cache_row(p.v_cache, p.v, ahead, p)};
#else
  return {};
#endif
}

template <int kWordBytes>
__device__ __forceinline__ void zero_row(char* row, int bytes, int lane, int lanes) {
  const Word<kWordBytes> zero = {};
  for (int i = lane * kWordBytes; i < bytes; i += lanes * kWordBytes) {
    *reinterpret_cast<Word<kWordBytes>*>(row + i) = zero;
  }
}

// Zero the rows outside the cache whose slot is skipped, where Python asks for it.
template <int kPackBytes>
__device__ __forceinline__ void zero_skipped(const CacheRowsParams& p, const CacheRow& row,
                                             int element_bytes) {
  if (p.zeroed_outputs == 0 || row_number(p) >= p.num_rows) return;
  constexpr int kWordBytes = kPackBytes < 16 ? kPackBytes : 16;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  if (p.zeroed_outputs & kZeroedKey) {
    zero_row<kWordBytes>(outside_row(p.key, p.k, row), p.k.width * element_bytes, lane, lanes);
  }
  if (p.zeroed_outputs & kZeroedValue) {
    zero_row<kWordBytes>(outside_row(p.value, p.v, row), p.v.width * element_bytes, lane, lanes);
  }
}

// Where copied rows go: `find` looks the place up, and says whether there is one; `k` and `v` then
// return it.
struct IntoCache {
  const CacheRowsParams& p;
  CacheRow& row;

  __device__ __forceinline__ bool find() const {
    check_slot(p, row);
    return row.slot >= 0;
  }
  __device__ __forceinline__ char* k() const { return cache_row(p.k_cache, p.k, row, p); }
  __device__ __forceinline__ char* v() const { return cache_row(p.v_cache, p.v, row, p); }
};

struct OutOfCache {
  const CacheRowsParams& p;
  const CacheRow& row;

  __device__ __forceinline__ bool find() const { return true; }
  __device__ __forceinline__ char* k() const { return outside_row(p.key, p.k, row); }
  __device__ __forceinline__ char* v() const { return outside_row(p.value, p.v, row); }
};

// Copy the words of two rows, all loads of both before the first store. `to.find()` is called
// once, after the first loads, by lanes that have words.
template <int kWordBytes, typename Target>
__device__ __forceinline__ void copy_rows(const CacheRowsParams& p, const char* k_from,
                                          const char* v_from, const Target& to,
                                          [[maybe_unused]] RowAhead ahead, int lane, int lanes) {
#ifdef KVCUPY_HOST_VARIANTS
  if (lanes == 1) {
    if (!to.find()) return;
    const bool streamed = p.num_rows * (i64{p.k.width} + p.v.width) >= kvcupy_host::kStreamedBytes;
    kvcupy_host::copy_row(to.k(), k_from, ahead.k, p.k.width, streamed);
    kvcupy_host::copy_row(to.v(), v_from, ahead.v, p.v.width, streamed);
    return;
  }
#endif
  constexpr int kUnroll = 4;  // words of each row in flight per thread
  const int k_words = p.k.width / kWordBytes;
  const int v_words = p.v.width / kWordBytes;
  const auto* k_in = reinterpret_cast<const Word<kWordBytes>*>(k_from);
  const auto* v_in = reinterpret_cast<const Word<kWordBytes>*>(v_from);
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
    if (first == lane && !to.find()) return;
    auto* k_out = reinterpret_cast<Word<kWordBytes>*>(to.k());
    auto* v_out = reinterpret_cast<Word<kWordBytes>*>(to.v());
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int word = first + i * lanes;
      if (word < k_words) k_out[word] = k[i];
      if (word < v_words) v_out[word] = v[i];
    }
  }
}
