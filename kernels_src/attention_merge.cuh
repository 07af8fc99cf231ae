// The end of a tile whose keys were cut: the last of its blocks to finish merges their states, so
// that nothing is launched for it.
//
// Blocks count up in memory as they finish. Parts are added in their order, whichever block is
// last, so that results do not vary. A block reads at the pace of one SM: many parts are merged in
// groups first, each by the last of its blocks, into the state of its first part.
//
// Bytes: each state of a split tile once, and the state of a group again.
#pragma once

#include "attention_end.cuh"
#include "mma.cuh"

// Parts that are merged at once, and their bytes: to read more takes longer than to count again.
constexpr int kMostMerged = 64;
constexpr int kMergedBytes = 256 << 10;
constexpr int kStatesInFlight = 8;                             // of a thread
constexpr int kLanesOfState = 8;                               // that weigh the parts of a row
constexpr int kWeightsInFlight = kMostMerged / kLanesOfState;  // of a lane

// Add 1 to a counter, or set it to 0 where it is `most`, and return what it was. What this thread
// wrote or knows of by a barrier is visible to a thread that counts later, and behind its next
// barrier to its block. Fence and atomic are of one thread: fences of all threads before the
// barrier release nothing for the thread that counts.
__device__ __forceinline__ u32 count_in_order(u32* counter, u32 most) {
#ifdef __CUDACC__
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(most)
               : "memory");
  return before;
#else
  return atomicInc(counter, most);
#endif
}

// Parts that one block merges: `count` of them, every `step`-th from state `first` on.
struct PartGroup {
  int first;
  int step;
  int count;
};

// Merge the rows of some parts, into the output if they are all, else into the first of them.
// Rows are whole words of 16 bytes, zeros in a part that saw no key. A block has kLanesOfState
// threads for each row, and room in shared memory for a float of each row and part.
__device__ __forceinline__ void merge_group(const AttentionParams& p, const AttentionTile& t,
                                            int kv_head, int thread, const PartGroup& group,
                                            bool is_all) {
  const i64 heads = p.num_heads / p.group;
  const i64 first = (group.first * heads + kv_head) * p.state_rows;  // of rows of all states
  const i64 step = group.step * heads * p.state_rows;
  const auto token_of = [&](int row) { return t.first_token + i64{t.first_row + row} / p.group; };
  const auto head_of = [&](int row) { return kv_head * p.group + (t.first_row + row) % p.group; };
  float* scales = dynamic_shared<float>() + 1;               // [rows]
  float* all_weights = scales + blockDim.x / kLanesOfState;  // [rows, count]

  // Weights
  const int own_row = thread / kLanesOfState;
  const int lane = thread % kLanesOfState;
  const bool has_row = own_row < t.num_rows;
  const int own_count = has_row ? group.count : 0;
  float* own_lse = reinterpret_cast<float*>(p.partial_lse) + first + own_row;
  float* own_weights = all_weights + own_row * group.count;
  float sink = -kInfinity;
  if (is_all && has_row && p.sinks) {
    sink = *reinterpret_cast<const float*>(p.sinks + head_of(own_row) * p.sink_bytes);
  }
  float largest = sink;
  for (int begin = lane; begin < own_count; begin += kMostMerged) {
    float lses[kWeightsInFlight];
#pragma unroll
    for (int j = 0; j < kWeightsInFlight; ++j) {  // the last again, not a predicate per load
      lses[j] = own_lse[min(begin + j * kLanesOfState, own_count - 1) * step];
    }
#pragma unroll
    for (int j = 0; j < kWeightsInFlight; ++j) {
      const int part = begin + j * kLanesOfState;
      if (part < own_count) own_weights[part] = lses[j];
      largest = fmaxf(largest, lses[j]);
    }
  }
  largest = max_within_warp(largest, kLanesOfState);
  const float origin = largest == -kInfinity ? 0.0f : largest;
  float total = 0.0f;
  for (int part = lane; part < own_count; part += kLanesOfState) {
    own_weights[part] = expf(own_weights[part] - origin);
    total += own_weights[part];
  }
  total = sum_within_warp(total, kLanesOfState) + expf(sink - origin);
  if (lane == 0 && has_row) scales[own_row] = total == 0.0f ? 0.0f : __fdiv_rn(1.0f, total);
  __syncthreads();  // weights are there, and no lse of a part is needed any more
  if (lane == 0 && has_row) {
    const float lse = origin + logf(total);
    if (!is_all) {
      *own_lse = lse;
    } else if (p.lse) {
      *reinterpret_cast<float*>(p.lse + token_of(own_row) * p.lse_token_bytes +
                                head_of(own_row) * p.lse_head_bytes) = lse;
    }
  }

  // Values
  const int width = p.v.width;
  const int packs = width / 4;
  for (int i = thread; i < t.num_rows * packs; i += blockDim.x) {
    const int row = i / packs;
    const int column = (i - row * packs) * 4;
    const float* weights = all_weights + row * group.count;
    char* state = p.partial_out + ((first + row) * width + column) * 4;
    Pack<float, 4> sum{};
#pragma unroll 1
    for (int part = 0; part < group.count; part += kStatesInFlight) {
      Pack<float, 4> values[kStatesInFlight];
      float factors[kStatesInFlight];
#pragma unroll
      for (int j = 0; j < kStatesInFlight; ++j) {
        const int nth = min(part + j, group.count - 1);
        values[j].load(state + nth * step * width * 4);
        factors[j] = weights[nth] * scales[row];
      }
#pragma unroll
      for (int j = 0; j < kStatesInFlight; ++j) {
        if (part + j >= group.count) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum.values[k] = __fmaf_rn(factors[j], values[j].values[k], sum.values[k]);
        }
      }
    }
    if (!is_all) {
      sum.store(state);
      continue;
    }
    char* out = p.out + token_of(row) * p.out_token_bytes + head_of(row) * p.out_head_bytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) store_any(out, column + k, p.out_format, sum.values[k]);
  }
}

// Merge the parts of a tile if this block is the last of them. Every thread must call it, after it
// has written its share of the block's state; shared memory is overwritten.
__device__ __forceinline__ void merge_parts(const AttentionParams& p, const AttentionTile& t,
                                            int kv_head) {
  if (!p.counters || t.state < 0) return;      // another kernel merges, or the tile is whole
  const int thread = find_again(threadIdx.x);  // the loop over keys keeps nothing for this
  const AttentionPiece piece = reinterpret_cast<const AttentionPiece*>(p.pieces)[number_of_block()];
  const int parts = piece.parts;
  int most = min(kMostMerged, kMergedBytes / (t.num_rows * p.v.width * 4));
  if (parts > most) {  // as few as possible, twice
    for (most = 1; most * most < parts;) ++most;
  }
  bool* is_last = dynamic_shared<bool>();
  for (int step = 1, level = 0;; step *= most, ++level) {
    const int begin = piece.part / (step * most) * (step * most);
    const int count = min(most, (parts - begin + step - 1) / step);
    const bool is_all = step * most >= parts;
    const int state = piece.state - piece.part + begin;
    __syncthreads();  // the state is written
    if (thread == 0) {
      // Of its first state, or, if the group is of groups, of the state behind that.
      u32* counter = reinterpret_cast<u32*>(p.counters) +
                     i64{state + level} * (p.num_heads / p.group) + kv_head;
      // The last leaves 0, for the next layer.
      *is_last = count_in_order(counter, count - 1) == static_cast<u32>(count - 1);
    }
    __syncthreads();  // whether it is the last
    if (!*is_last) return;
    if (count > 1) merge_group(p, t, kv_head, thread, {state, step, count}, is_all);
    if (is_all) return;
  }
}
