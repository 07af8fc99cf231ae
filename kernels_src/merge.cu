// Merge states of attention: outputs over different keys and the logarithms (lse) of their weights.
//
// A row is one (token, head) of all states. A group of `lanes` neighbouring threads (a power of
// two, up to a warp) takes one: lane i sums the packs i, i + lanes, ... of it over the states, so
// that an output may be written where a state was read. The lse of a row are shared out to its
// lanes for their largest and for the sum of weights against it; each lane finds the weights again
// in L1. The rows of kStates states are loaded before the first is used. A state that saw no key
// (lse minus infinity) is not read: its row may hold anything. States past the last that saw one,
// such as the splits that a short sequence leaves without keys, cost no more than their lse.
//
// Bytes: each row of a state that saw a key is read once, each row of out is written once, plus one
// lse per row and state.
#include "numeric.cuh"

// Strides of rows by token and head.
struct RowStrides {
  i64 token_bytes;
  i64 head_bytes;
};

struct MergeParams {
  const char* out_a;      // [num_tokens, num_heads, width] of state 0
  const char* lse_a;      // [num_tokens, num_heads] float32 of state 0
  const char* out_b;      // of state 1; null: the states lie state_bytes apart from state 0 on
  const char* lse_b;      // likewise
  const char* sinks;      // [num_heads] float32: an lse that brings no output; or null
  const char* num_valid;  // [1] int32, tokens whose rows are written; null: all
  char* out;              // [num_tokens, num_heads, width]
  char* lse;              // [num_tokens, num_heads] float32, or null
  FaultRecord* faults;    // part of every Params; nothing is reported
  RowStrides out_a_rows;
  RowStrides lse_a_rows;
  RowStrides out_b_rows;
  RowStrides lse_b_rows;
  RowStrides out_rows;
  RowStrides lse_rows;
  i64 out_state_bytes;
  i64 lse_state_bytes;
  i64 sink_bytes;  // stride between heads
  int num_states;
  int num_rows;  // num_tokens * num_heads
  int num_heads;
  int width;
  int base_two;  // whether lse are to base 2, else natural
  int lane_shift;
};

// Where one row is in each state.
struct StateRows {
  const char* first;
  const char* second;
  i64 state_bytes;  // from the second on

  __device__ __forceinline__ const char* at(int state) const {
    return state == 0 ? first : second + (state - 1) * state_bytes;
  }
};

__device__ __forceinline__ i64 row_offset(const RowStrides& rows, int token, int head) {
  return token * rows.token_bytes + head * rows.head_bytes;
}

__device__ __forceinline__ StateRows find_states(const char* a, const RowStrides& a_rows,
                                                 const char* b, const RowStrides& b_rows,
                                                 i64 state_bytes, int token, int head) {
  const char* first = a + row_offset(a_rows, token, head);
  return {first, b ? b + row_offset(b_rows, token, head) : first + state_bytes, state_bytes};
}

// The lse of kStates states from `first` on; past the last one, as of one that saw no key.
template <int kStates>
__device__ __forceinline__ void load_lse(const StateRows& rows, int first, int num_states,
                                         float (&lse)[kStates]) {
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    const bool exists = first + i < num_states;
    lse[i] = exists ? *reinterpret_cast<const float*>(rows.at(first + i)) : -kInfinity;
  }
}

__device__ __forceinline__ float power(float exponent, int base_two) {
  return base_two ? exp2f(exponent) : expf(exponent);
}

// For kStates states: whether they saw a key, and their weights.
template <int kStates>
struct Weights {
  bool counts[kStates];
  float factors[kStates];
};

template <int kStates>
__device__ __forceinline__ Weights<kStates> weigh(const float (&lse)[kStates], const MergeParams& p,
                                                  float origin) {
  Weights<kStates> weights;
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    weights.counts[i] = lse[i] != -kInfinity;
    weights.factors[i] = weights.counts[i] ? power(lse[i] - origin, p.base_two) : 0.0f;
  }
  return weights;
}

// TIn is TOut or float. kCount elements of TIn are a 16-byte word, or one element where that does
// not fit. kStates is two, or, where more are to be merged, as many as registers hold. grid: (rows
// / (block / lanes)), block: (a multiple of lanes and of 32), smem: 0
template <typename TIn, typename TOut, int kCount, int kStates>
__global__ void merge_states(const __grid_constant__ MergeParams p) {
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int row = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
  if (row >= p.num_rows) return;
  const int token = row / p.num_heads;
  const int head = row - token * p.num_heads;
  if (p.num_valid && token >= *reinterpret_cast<const int*>(p.num_valid)) return;
  const StateRows in =
      find_states(p.out_a, p.out_a_rows, p.out_b, p.out_b_rows, p.out_state_bytes, token, head);
  const StateRows in_lse =
      find_states(p.lse_a, p.lse_a_rows, p.lse_b, p.lse_b_rows, p.lse_state_bytes, token, head);

  // Load: the largest lse. Every lane reads both of two states; more are shared out to the lanes.
  const float sink =
      p.sinks ? *reinterpret_cast<const float*>(p.sinks + head * p.sink_bytes) : -kInfinity;
  const u32 row_lanes = (kAllLanes >> (32 - lanes)) << (threadIdx.x % 32 & ~(lanes - 1));
  float largest = sink;
  float lse[kStates];
  int used = 1;  // states up to the last that saw a key, at least one
  if constexpr (kStates == 2) {
    load_lse(in_lse, 0, p.num_states, lse);
    largest = fmaxf(largest, fmaxf(lse[0], lse[1]));
  } else {
#pragma unroll 1
    for (int state = lane; state < p.num_states; state += lanes) {
      const float own = *reinterpret_cast<const float*>(in_lse.at(state));
      largest = fmaxf(largest, own);
      if (own != -kInfinity) used = state + 1;
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(row_lanes, largest, distance));
      used = max(used, __shfl_xor_sync(row_lanes, used, distance));
    }
  }

  // Convert: lse to weights. Where nobody saw a key, any origin will do but minus infinity.
  const float origin = largest == -kInfinity ? 0.0f : largest;
  float total = 0.0f;
  Weights<kStates> weights;
  if constexpr (kStates == 2) {
    weights = weigh(lse, p, origin);
    total = weights.factors[0] + weights.factors[1];
  } else {
#pragma unroll 1
    for (int state = lane; state < used; state += lanes) {
      const float own = *reinterpret_cast<const float*>(in_lse.at(state));
      if (own != -kInfinity) total += power(own - origin, p.base_two);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(row_lanes, total, distance);
    }
  }
  total += power(sink - origin, p.base_two);
  const float scale = total == 0.0f ? 0.0f : __fdiv_rn(1.0f, total);

  char* out = p.out + row_offset(p.out_rows, token, head);
  for (int i = lane * kCount; i < p.width; i += lanes * kCount) {
    Pack<float, kCount> sum;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum.values[j] = 0.0f;
    const int end = kStates == 2 ? 1 : used;
#pragma unroll 1
    for (int first = 0; first < end; first += kStates) {
      if constexpr (kStates > 2) {
        load_lse(in_lse, first, p.num_states, lse);
        weights = weigh(lse, p, origin);
      }
      Pack<TIn, kCount> packs[kStates];
      // Load
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        if (weights.counts[j]) packs[j].load(in.at(first + j) + i * sizeof(TIn));
      }
      // Convert
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        if (!weights.counts[j]) continue;
        const Pack<float, kCount> values = to_floats(packs[j]);
        const float weight = weights.factors[j] * scale;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          sum.values[k] = __fmaf_rn(weight, values.values[k], sum.values[k]);
        }
      }
    }
    // Store
    from_floats<TOut>(sum).store(out + i * sizeof(TOut));
  }

  // The lse may overwrite a state's: all lanes must have read it first. Other rows of the warp may
  // have no lanes left, so this waits for the lanes of this row only.
  if (lanes > 1) __syncwarp(row_lanes);
  if (lane == 0 && p.lse) {
    *reinterpret_cast<float*>(p.lse + row_offset(p.lse_rows, token, head)) =
        origin + (p.base_two ? log2f(total) : logf(total));
  }
}
