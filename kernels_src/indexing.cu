// The slots of the tokens that a step appends to each of its sequences.
//
// One warp takes one sequence. It adds up what the sequences before it append, which is where its
// slots begin, and then its lanes write them. The warp of the last sequence marks what is left of
// the output as padding.
//
// Bytes: a length for each pair of sequences, out of L2; a table entry and a slot a token.
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

__device__ __forceinline__ i64 sum_within_warp(i64 value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// grid: (num_sequences), block: (kLanes), smem: 0
template <int kLanes>
__global__ void slot_mapping(const __grid_constant__ SlotMappingParams p) {
  static_assert(kLanes == 32 || kLanes == 1, "one warp a sequence, or one thread");
  const int sequence = blockIdx.x;
  const int lane = threadIdx.x;
  i64 before = 0;
  for (int other = lane; other < sequence; other += kLanes) {
    before += load_index(p.append_lens + other * p.append_len_bytes, p.append_len_index_bytes);
  }
  if constexpr (kLanes == 32) before = sum_within_warp(before);
  const i64 appended =
      load_index(p.append_lens + sequence * p.append_len_bytes, p.append_len_index_bytes);
  const i64 first =
      load_index(p.seq_lens + sequence * p.seq_len_bytes, p.seq_len_index_bytes) - appended;
  const char* row = p.block_table + sequence * p.table_row_bytes;

  if (lane == 0 && before + appended > p.num_out) {
    report_fault(p.faults, p.append_len_operation, sequence, appended);
  }
  for (i64 i = lane; i < appended && before + i < p.num_out; i += kLanes) {
    const i64 token = first + i;
    const i64 entry = token / p.page_size;
    i64 slot = -1;
    if (token >= 0 && entry < p.max_pages) {
      const i64 page = load_index(row + entry * p.table_entry_bytes, p.table_index_bytes);
      slot = page < 0 ? -1 : page * p.page_size + token % p.page_size;
    } else {
      report_fault(p.faults, p.seq_len_operation, sequence, first + appended);
    }
    p.out[before + i] = slot;
  }
  if (sequence != p.num_sequences - 1) return;
  for (i64 i = before + appended + lane; i < p.num_out; i += kLanes) p.out[i] = -1;
}
