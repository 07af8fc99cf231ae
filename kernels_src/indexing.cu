// The slots of the tokens that a step appends to each of its sequences.
//
// One warp per sequence. It sums what the sequences before it append, which is where its slots
// begin, and then its lanes write them. The warp of the last sequence fills the rest of the output
// with padding, as does the only warp where there is no sequence. Lengths may be garbage: a
// negative append counts as zero, sums saturate at the end of the output, and none overflows.
//
// Bytes: a length for each pair of sequences, out of L2; a table entry and a slot per token.
#include "common.cuh"

struct SlotMappingParams {
  const char* block_table;  // [num_sequences, max_pages] int32 or int64
  const char* seq_lens;     // [num_sequences] int32 or int64, the appended tokens included
  const char* append_lens;  // [num_sequences] int32 or int64
  i64* out;                 // [num_slots_out]
  FaultRecord* faults;
  i64 table_row_bytes;
  i64 table_entry_bytes;
  i64 seq_len_bytes;
  i64 append_len_bytes;
  i64 num_out;
  i64 max_pages;
  i64 seq_len_operation;  // for the fault record
  i64 append_len_operation;
  int num_sequences;
  int page_size;
  int table_index_bytes;
  int seq_len_index_bytes;
  int append_len_index_bytes;
};

// The sum over a warp of counts from 0 to `most`, or `most` where that is less.
__device__ __forceinline__ i64 bounded_sum_within_warp(i64 count, i64 most) {
  for (int distance = 16; distance > 0; distance /= 2) {
    count = min(count + __shfl_xor_sync(kAllLanes, count, distance), most);
  }
  return count;
}

// The slot of a token, past the end of every cache where it is too large for an int64.
__device__ __forceinline__ i64 slot_of(i64 page, i64 offset, int page_size) {
  constexpr i64 kLargest = 0x7fffffffffffffff;
  if (page < 0) return -1;
  return page > (kLargest - offset) / page_size ? kLargest : page * page_size + offset;
}

// grid: (max(1, num_sequences)), block: (kLanes), smem: 0
template <int kLanes>
__global__ void slot_mapping(const __grid_constant__ SlotMappingParams p) {
  static_assert(kLanes == 32 || kLanes == 1, "one warp a sequence, or one thread");
  const int sequence = blockIdx.x;
  const int lane = threadIdx.x;
  i64 before = 0;
  for (int other = lane; other < sequence; other += kLanes) {
    const i64 count =
        load_index(p.append_lens + other * p.append_len_bytes, p.append_len_index_bytes);
    before = min(before + max(i64{0}, min(count, p.num_out)), p.num_out);
  }
  if constexpr (kLanes == 32) before = bounded_sum_within_warp(before, p.num_out);
  i64 append_len = 0;
  i64 seq_len = 0;
  if (sequence < p.num_sequences) {
    append_len =
        load_index(p.append_lens + sequence * p.append_len_bytes, p.append_len_index_bytes);
    seq_len = load_index(p.seq_lens + sequence * p.seq_len_bytes, p.seq_len_index_bytes);
  }
  const i64 appended = max(i64{0}, min(append_len, p.num_out - before));
  // Of a sequence of negative length every token is one before its first.
  const i64 first = max(seq_len, i64{-1}) - max(append_len, i64{0});
  const char* row = p.block_table + sequence * p.table_row_bytes;

  if (lane == 0 && append_len != appended) {
    report_fault(p.faults, p.append_len_operation, sequence, append_len);
  }
  for (i64 i = lane; i < appended; i += kLanes) {
    const i64 token = first + i;
    const i64 entry = token / p.page_size;
    i64 slot = -1;
    if (token >= 0 && entry < p.max_pages) {
      const i64 page = load_index(row + entry * p.table_entry_bytes, p.table_index_bytes);
      slot = slot_of(page, token % p.page_size, p.page_size);
    } else {
      report_fault(p.faults, p.seq_len_operation, sequence, seq_len);
    }
    p.out[before + i] = slot;
  }
  if (sequence < p.num_sequences - 1) return;
  for (i64 i = before + appended + lane; i < p.num_out; i += kLanes) p.out[i] = -1;
}
