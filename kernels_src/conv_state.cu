// Move the tails of causal convolutions on by the new tokens of a step, in place in their slots.
//
// A slot holds the last `length` inputs of each channel, the oldest first. With n new tokens, input
// j becomes what was input j + n, or, behind the old ones, a new token. A thread moves all inputs
// of a unit, a word of a channel, or of neighbouring channels where they are contiguous in x and in
// the cache. It starts from the oldest, and reads at or ahead of where it writes, so that nothing
// is lost in place. Units are cut into pieces, so that few sequences of many channels occupy the
// device. A group of `lanes` neighbouring threads takes one piece of one sequence, lane i its units
// i, i + lanes, ...: neighbouring lanes touch neighbouring units.
//
// Bytes: each input of a slot is read once, of the slot or of x, and written once, plus three
// indices per piece.
#include "common.cuh"

struct ConvStateParams {
  const char* x;              // [num_tokens, groups of units] by strides
  char* cache;                // [num_slots, groups of units, length] by strides
  const char* slots;          // [num_sequences] int32 or int64
  const char* cu_query_lens;  // [num_sequences + 1] int32 or int64
  FaultRecord* faults;
  i64 token_bytes;  // strides of x
  i64 x_group_bytes;
  i64 slot_bytes;  // strides of the cache
  i64 cache_group_bytes;
  i64 input_bytes;
  i64 slot_stride_bytes;  // strides of the indices
  i64 sum_stride_bytes;
  i64 num_tokens;
  i64 num_slots;
  i64 skip_slot;       // a slot never touched; negative: none
  i64 slot_operation;  // for the fault record
  i64 sum_operation;
  u32 num_pieces;  // num_sequences * pieces_per_sequence, below 2**31
  u32 pieces_per_sequence;
  int length;       // inputs that a slot holds
  int num_units;    // of a sequence
  int group_shift;  // log2 of the units of a channel; 31 where all channels are one group
  int piece_units;
  int slot_index_bytes;
  int sum_index_bytes;
  int lane_shift;
};

// grid: (pieces / (block / lanes)), block: (a multiple of lanes), smem: 0
template <int kWordBytes>
__global__ void update_conv_state(const __grid_constant__ ConvStateParams p) {
  constexpr int kUnroll = 4;  // inputs in flight per thread
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 number = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
  if (number >= p.num_pieces) return;
  const u32 sequence = number / p.pieces_per_sequence;
  const u32 piece = number - sequence * p.pieces_per_sequence;
  const bool reports = piece == 0 && lane == 0;
  const char* sums = p.cu_query_lens + sequence * p.sum_stride_bytes;
  const i64 slot = load_index(p.slots + sequence * p.slot_stride_bytes, p.slot_index_bytes);
  const i64 start = load_index(sums, p.sum_index_bytes);
  const i64 end = load_index(sums + p.sum_stride_bytes, p.sum_index_bytes);
  if (slot < 0 || slot == p.skip_slot) return;
  if (slot >= p.num_slots) {
    if (reports) report_fault(p.faults, p.slot_operation, sequence, slot);
    return;
  }
  const bool starts = start >= 0 && start <= p.num_tokens;
  if (!starts || end < start || end > p.num_tokens) {
    if (reports) report_fault(p.faults, p.sum_operation, sequence + starts, starts ? end : start);
    return;
  }

  const i64 appended = end - start;
  const int kept = appended < p.length ? static_cast<int>(p.length - appended) : 0;
  if (kept == p.length) return;
  const char* tokens = p.x + (end - p.length) * p.token_bytes;  // of input 0, 1, ...
  const int first_unit = static_cast<int>(piece) * p.piece_units;
  const int end_unit = min(first_unit + p.piece_units, p.num_units);
  for (int unit = first_unit + lane; unit < end_unit; unit += lanes) {
    const int group = unit >> p.group_shift;
    const int within_bytes = (unit - (group << p.group_shift)) * kWordBytes;
    char* tail = p.cache + slot * p.slot_bytes + group * p.cache_group_bytes + within_bytes;
    const char* old = tail + (p.length - kept) * p.input_bytes;
    const char* x = tokens + group * p.x_group_bytes + within_bytes;
    for (int first = 0; first < p.length; first += kUnroll) {
      Word<kWordBytes> in_flight[kUnroll];
      // Load
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int j = first + i;
        const char* from = j < kept ? old + j * p.input_bytes : x + j * p.token_bytes;
        if (j < p.length) in_flight[i] = *reinterpret_cast<const Word<kWordBytes>*>(from);
      }
      // Store
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int j = first + i;
        if (j < p.length) {
          *reinterpret_cast<Word<kWordBytes>*>(tail + j * p.input_bytes) = in_flight[i];
        }
      }
    }
  }
}
