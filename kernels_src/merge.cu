// Merge states of attention: outputs over different keys and the logarithms (lse) of their weights.
//
// A row is one (token, head) of all states. Lane i of a row takes its packs i, i + lanes, ..., so
// that an output may be written where a state was read. Two states: a group of up to a warp takes a
// row. More: the states of a row may be dealt out to several stripes of lanes, which have a block
// to themselves; their sums are added in order, so that results do not vary. Each lane finds the
// weights of states again in L1. A state that saw no key (lse minus infinity) is not read: its row
// may hold anything. States past the last that saw one cost no more than their lse.
//
// Or the states are of tiles of attention whose keys were cut: as many for each tile as it has
// parts, one after another.
//
// Bytes: each row of a state that saw a key is read once, each row of out is written once, plus one
// lse per row and state.
#include "numeric.cuh"
#include "split_tile.cuh"

// Strides of rows by token and head.
struct RowStrides {
  i64 token_bytes;
  i64 head_bytes;
};

struct MergeParams {
  const char* out_a;        // [num_tokens, num_heads, width] of state 0
  const char* lse_a;        // [num_tokens, num_heads] float32 of state 0
  const char* out_b;        // of state 1; null: the states lie state_bytes apart from state 0 on
  const char* lse_b;        // likewise
  const char* sinks;        // [num_heads] float32: an lse that brings no output; or null
  const char* split_tiles;  // [tiles] SplitTile, whose states a has; null: all states of all rows
  char* out;                // [num_tokens, num_heads, width]
  char* lse;                // [num_tokens, num_heads] float32, or null
  FaultRecord* faults;      // part of every Params; nothing is reported
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
  int num_rows;  // num_tokens * num_heads; or tiles * H * state_rows
  int num_heads;
  int group;       // query heads per KV head, of tiles, as the next
  int state_rows;  // per tile and KV head
  int width;
  int base_two;  // whether lse are to base 2, else natural
  int lane_shift;
  int stripe_shift;  // log2(stripes of lanes that a row has), of more than two states
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

// A row of the output: its states, and where it is written.
struct MergedRow {
  int token;
  int head;
  int num_states;    // 0: no row
  bool is_past_all;  // nor any row of a higher number
  StateRows in;
  StateRows in_lse;
  float sink;
  char* out;

  __device__ __forceinline__ MergedRow(const MergeParams& p, int row) : is_past_all(false) {
    if (p.split_tiles) {
      find_in_tile(p, row);
      if (num_states == 0) return;
    } else {
      token = row / p.num_heads;
      head = row - token * p.num_heads;
      num_states = p.num_states;
      in =
          find_states(p.out_a, p.out_a_rows, p.out_b, p.out_b_rows, p.out_state_bytes, token, head);
      in_lse =
          find_states(p.lse_a, p.lse_a_rows, p.lse_b, p.lse_b_rows, p.lse_state_bytes, token, head);
    }
    sink = p.sinks ? *reinterpret_cast<const float*>(p.sinks + head * p.sink_bytes) : -kInfinity;
    out = p.out + row_offset(p.out_rows, token, head);
  }

  __device__ __forceinline__ void find_in_tile(const MergeParams& p, int row) {
    const int num_kv_heads = p.num_heads / p.group;
    const int of_heads = row / p.state_rows;
    const int of_tile = row - of_heads * p.state_rows;
    const int number = of_heads / num_kv_heads;
    const int kv_head = of_heads - number * num_kv_heads;
    const SplitTile tile = reinterpret_cast<const SplitTile*>(p.split_tiles)[number];
    num_states = of_tile < tile.num_rows ? tile.parts : 0;
    is_past_all = tile.num_rows == 0;
    const int packed = tile.first_row + of_tile;
    token = packed / p.group;
    head = kv_head * p.group + packed - token * p.group;
    const i64 at = (i64{tile.state} * num_kv_heads + kv_head) * p.state_rows + of_tile;
    const char* first = p.out_a + at * p.out_a_rows.head_bytes;
    const char* first_lse = p.lse_a + at * p.lse_a_rows.head_bytes;
    in = {first, first + p.out_state_bytes, p.out_state_bytes};
    in_lse = {first_lse, first_lse + p.lse_state_bytes, p.lse_state_bytes};
  }

  __device__ __forceinline__ void store_lse(const MergeParams& p, float origin, float total) const {
    if (!p.lse) return;
    *reinterpret_cast<float*>(p.lse + row_offset(p.lse_rows, token, head)) =
        origin + (p.base_two ? log2f(total) : logf(total));
  }
};

// Where nobody saw a key, any origin of the weights will do but minus infinity.
__device__ __forceinline__ float origin_of(float largest) {
  return largest == -kInfinity ? 0.0f : largest;
}

__device__ __forceinline__ float inverse_of(float total) {
  return total == 0.0f ? 0.0f : __fdiv_rn(1.0f, total);
}

// Add the packs of kStates states from `first` on to `sum`, times their weights and `scale`.
template <typename TIn, int kCount, int kStates>
__device__ __forceinline__ void add_states(Pack<float, kCount>& sum, const StateRows& in, int first,
                                           int element, const Weights<kStates>& weights,
                                           float scale) {
  Pack<TIn, kCount> packs[kStates];
#pragma unroll
  for (int j = 0; j < kStates; ++j) {
    if (weights.counts[j]) packs[j].load(in.at(first + j) + element * sizeof(TIn));
  }
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

__device__ __forceinline__ u32 lanes_of_row(int lanes) {
  return (kAllLanes >> (32 - lanes)) << (threadIdx.x % 32 & ~(lanes - 1));
}

// Two states. TIn is TOut or float. kCount elements of TIn are a 16-byte word, or one element where
// that does not fit.
// grid: (rows / (block / lanes)), block: (a multiple of lanes and of 32), smem: 0
template <typename TIn, typename TOut, int kCount>
__global__ void merge_states(const __grid_constant__ MergeParams p) {
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int number = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
  if (number >= p.num_rows) return;
  const MergedRow row(p, number);
  if (row.num_states == 0) return;

  float lse[2];
  load_lse(row.in_lse, 0, row.num_states, lse);
  const float origin = origin_of(fmaxf(row.sink, fmaxf(lse[0], lse[1])));
  const Weights<2> weights = weigh(lse, p, origin);
  const float total =
      weights.factors[0] + weights.factors[1] + power(row.sink - origin, p.base_two);
  const float scale = inverse_of(total);
  for (int i = lane * kCount; i < p.width; i += lanes * kCount) {
    Pack<float, kCount> sum{};
    add_states<TIn>(sum, row.in, 0, i, weights, scale);
    from_floats<TOut>(sum).store(row.out + i * sizeof(TOut));
  }

  // The lse may overwrite a state's: all lanes must have read it first. Other rows of the warp may
  // have no lanes left, so this waits for the lanes of this row only.
  if (lanes > 1) __syncwarp(lanes_of_row(lanes));
  if (lane == 0) row.store_lse(p, origin, total);
}

// Any number of states, of which a thread has kStates in flight.
constexpr int kStates = 8;
constexpr int kMostWarps = 8;

// Partial results of the warps of a row.
struct RowShares {
  float largest[kMostWarps];
  int used[kMostWarps];
  float totals[kMostWarps];
};

// Up to a warp of threads takes a row; or all of a block, kBlock, `lanes` times `stripes` of them.
template <typename TIn, typename TOut, int kCount, bool kBlock>
__device__ __forceinline__ void merge_row(const MergeParams& p, const MergedRow& row) {
  const int lanes = 1 << p.lane_shift;
  const int stripes = kBlock ? 1 << p.stripe_shift : 1;
  const int threads = lanes * stripes;
  const int thread = threadIdx.x & (threads - 1);
  const int lane = thread & (lanes - 1);
  const int stripe = thread >> p.lane_shift;
  // Without kBlock there is no shared memory.
  [[maybe_unused]] RowShares* const shares = kBlock ? dynamic_shared<RowShares>() : nullptr;
  [[maybe_unused]] float* const sums =  // [stripes, lanes * kCount]
      kBlock ? reinterpret_cast<float*>(shares + 1) : nullptr;
  const int of_warp = kBlock ? 32 : lanes;
  const u32 row_lanes = lanes_of_row(of_warp);
  [[maybe_unused]] const int warp = threadIdx.x / 32;
  [[maybe_unused]] const int warps = threads / 32;

  // The largest lse, and how many states there are up to the last that saw a key, at least one.
  float largest = row.sink;
  int used = 1;
#pragma unroll 1
  for (int state = thread; state < row.num_states; state += threads) {
    const float own = *reinterpret_cast<const float*>(row.in_lse.at(state));
    largest = fmaxf(largest, own);
    if (own != -kInfinity) used = state + 1;
  }
  for (int distance = of_warp / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(row_lanes, largest, distance));
    used = max(used, __shfl_xor_sync(row_lanes, used, distance));
  }
  if constexpr (kBlock) {
    if (threadIdx.x % 32 == 0) {
      shares->largest[warp] = largest;
      shares->used[warp] = used;
    }
    __syncthreads();  // the shares of all warps are there
    for (int i = 0; i < warps; ++i) {
      largest = fmaxf(largest, shares->largest[i]);
      used = max(used, shares->used[i]);
    }
  }

  // The sum of weights
  const float origin = origin_of(largest);
  float total = 0.0f;
#pragma unroll 1
  for (int state = thread; state < used; state += threads) {
    const float own = *reinterpret_cast<const float*>(row.in_lse.at(state));
    if (own != -kInfinity) total += power(own - origin, p.base_two);
  }
  for (int distance = of_warp / 2; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(row_lanes, total, distance);
  }
  if constexpr (kBlock) {
    if (threadIdx.x % 32 == 0) shares->totals[warp] = total;
    __syncthreads();  // the totals of all warps are there
    total = 0.0f;
    for (int i = 0; i < warps; ++i) total += shares->totals[i];
  }
  total += power(row.sink - origin, p.base_two);
  const float scale = inverse_of(total);

  for (int first = 0; first < p.width; first += lanes * kCount) {
    const int element = first + lane * kCount;
    Pack<float, kCount> sum{};
    if (element < p.width) {
#pragma unroll 1
      for (int state = stripe * kStates; state < used; state += stripes * kStates) {
        float lse[kStates];
        load_lse(row.in_lse, state, row.num_states, lse);
        add_states<TIn>(sum, row.in, state, element, weigh(lse, p, origin), scale);
      }
    }
    if constexpr (kBlock) {
      if (first > 0) __syncthreads();  // the sums of the last elements are no longer needed
      sum.store(reinterpret_cast<char*>(sums + thread * kCount));
      __syncthreads();  // all stripes have read the row and left their sums
      if (stripe == 0) {
        for (int i = 1; i < stripes; ++i) {
          Pack<float, kCount> other;
          other.load(reinterpret_cast<const char*>(sums + (i * lanes + lane) * kCount));
#pragma unroll
          for (int k = 0; k < kCount; ++k) sum.values[k] += other.values[k];
        }
      }
    }
    if (stripe == 0 && element < p.width) {
      from_floats<TOut>(sum).store(row.out + element * sizeof(TOut));
    }
  }

  // As above: all lanes must have read the lse.
  if (!kBlock && lanes > 1) __syncwarp(row_lanes);
  if (thread == 0) row.store_lse(p, origin, total);
}

// Of tiles, whose parts only the GPU knows, most may have no rows, and those come last.
// grid: (rows with kBlock; else any), block: (a multiple of threads and of 32), smem: with kBlock
// RowShares, and a float32 for each element that a thread holds
template <typename TIn, typename TOut, int kCount, bool kBlock>
__global__ void __launch_bounds__(kMostWarps * 32, 2)
    merge_many(const __grid_constant__ MergeParams p) {
  const int rows = kBlock ? 1 : blockDim.x >> p.lane_shift;  // of a block
  const i64 step = i64{gridDim.x} * rows;
  i64 number = i64{blockIdx.x} * rows + (kBlock ? 0 : threadIdx.x >> p.lane_shift);
  for (; number < p.num_rows; number += step) {
    const MergedRow row(p, static_cast<int>(number));
    if (row.is_past_all) return;
    if (row.num_states > 0) merge_row<TIn, TOut, kCount, kBlock>(p, row);
    if constexpr (kBlock) return;  // there is a block for each row
  }
}
