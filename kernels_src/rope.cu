// Rotate query and key by position, and store key and value into a cache, in one launch.
//
// A group of `lanes` neighbouring threads (a power of two, up to a warp) takes one row: a query
// head, a key head or a value head of one token. In a rotated row a thread owns both elements of
// each of its pairs, so that rotating in place needs no exchange: pair i is elements (i, i +
// rotary_dim / 2), or (2i, 2i + 1) when interleaved. The rest of the row is copied. A key row,
// rounded to its own format, is written to the live key and to the cache; a value row only to the
// cache.
//
// RMSNorm before the rotation and dynamic scales need a whole row at once: those launches (kReduce)
// read the row up to three times, from L1 after the first. So do the groups of a four-bit cache,
// whose rotated keys pass through shared memory: a thread encodes 16 neighbouring elements.
//
// Bytes: each row is read once and written once per destination; cos and sin of a token stay in L1.
#include "four_bit.cuh"

// How pairs choose among three positions per token (mrope).
constexpr int kNoSections = 0;           // one position per token
constexpr int kSections = 1;             // consecutive sections of pairs
constexpr int kSectionsInterleaved = 2;  // pair i takes axis i % 3 while that axis has pairs left

constexpr int kReportPositions = 1;
constexpr int kReportSlots = 2;

struct RopeParams {
  const char* query;       // [num_tokens, num_q_heads, head_dim], or null
  char* query_out;         // like query; query itself: in place
  const char* key;         // [num_tokens, num_heads, head_dim]
  char* key_out;           // like key; null: the rotated key goes to the cache alone
  const char* value;       // [num_tokens, num_heads, v.width]
  char* k_cache;           // by strides; null: rotate only
  char* v_cache;           // by strides; null: no value
  const char* table;       // [max_positions, rotary_dim] float32, [cos | sin]
  const char* query_norm;  // [head_dim] weights of RMSNorm, float32 or like query; null: none
  const char* key_norm;    // [head_dim], likewise
  const char* positions;   // [num_tokens], or [3, num_tokens] with sections
  const char* slots;       // [num_stored] int32 or int64
  const char* k_scale;
  const char* v_scale;
  char* k_scale_cache;
  char* v_scale_cache;
  FaultRecord* faults;
  KVOperand k;
  KVOperand v;
  i64 query_token_bytes;
  i64 query_head_bytes;
  i64 query_out_token_bytes;
  i64 query_out_head_bytes;
  i64 key_out_token_bytes;
  i64 key_out_head_bytes;
  i64 table_row_bytes;
  i64 max_positions;
  i64 position_bytes;  // stride between tokens
  i64 axis_bytes;      // stride between the three axes
  i64 slot_stride_bytes;
  i64 num_slots;
  i64 skip_slot;
  i64 position_operation;  // for the fault record
  i64 slot_operation;
  int num_rows;     // num_tokens * (num_q_heads + num_k_heads + num_v_heads)
  int num_stored;   // tokens that have a slot
  int num_q_heads;  // rows of a token: query, then key, then value heads; each may be 0
  int num_k_heads;
  int num_v_heads;
  int reports;  // kReportPositions | kReportSlots, less what another launch of the call reports
  int head_dim;
  int rotary_dim;  // 0: nothing is rotated, a key row is only stored
  int interleaved;
  int sections;       // kNoSections, kSections or kSectionsInterleaved
  int section_end_0;  // kSections: first pair of axis 1, then of axis 2
  int section_end_1;  // kSectionsInterleaved: end of the pairs of axis 1, and of axis 2
  int page_size;
  int page_shift;
  int slot_bytes;      // of an index in slots
  int position_index;  // bytes of an index in positions
  int lane_shift;
  int norm_is_float;  // whether the weights are float32
  float epsilon;
};

// The rows of cos and sin for one token: one for all pairs, or one for each of three axes.
struct Angles {
  const char* first;
  const char* second;
  const char* third;
};

// The row of cos and sin for pair i.
__device__ __forceinline__ const float* row_of_pair(const RopeParams& p, const Angles& angles,
                                                    int i) {
  int axis = (i >= p.section_end_0) + (i >= p.section_end_1);
  if (p.sections == kSectionsInterleaved) {
    axis = i % 3;
    if (i >= (axis == 1 ? p.section_end_0 : p.section_end_1)) axis = 0;
  }
  return reinterpret_cast<const float*>(axis == 0   ? angles.first
                                        : axis == 1 ? angles.second
                                                    : angles.third);
}

// The token's row of the table on one axis; null, and a fault, if its position is outside.
__device__ __forceinline__ const char* find_row(const RopeParams& p, int token, int axis,
                                                bool reports) {
  const char* address = p.positions + axis * p.axis_bytes + token * p.position_bytes;
  const i64 position = load_index(address, p.position_index);
  if (position >= 0 && position < p.max_positions) return p.table + position * p.table_row_bytes;
  if (reports) report_fault(p.faults, p.position_operation, token, position);
  return nullptr;
}

// Find the rows of a token; false if one of its positions is outside the table.
__device__ __forceinline__ bool find_angles(const RopeParams& p, int token, bool reports,
                                            Angles& angles) {
  angles.first = find_row(p, token, 0, reports);
  if (!angles.first || p.sections == kNoSections) return angles.first;
  angles.second = find_row(p, token, 1, reports);
  if (!angles.second) return false;
  angles.third = find_row(p, token, 2, reports);
  return angles.third;
}

// The slot of a token, or -1: padding, none given, the skipped one, or past the end (a fault).
__device__ __forceinline__ i64 find_slot(const RopeParams& p, int token, bool reports) {
  if (token >= p.num_stored) return -1;
  const i64 slot = load_index(p.slots + token * p.slot_stride_bytes, p.slot_bytes);
  if (slot == p.skip_slot) return -1;
  if (slot < p.num_slots) return slot;
  if (reports) report_fault(p.faults, p.slot_operation, token, slot);
  return -1;
}

// One row with a rotary part, and access to its pairs.
template <typename T, int kCount>
struct RotaryRow {
  const RopeParams& p;
  const char* in;
  const Angles& angles;
  const char* norm;  // weights, or null
  float inverse_rms;

  // Where the elements of a pair lie.
  __device__ __forceinline__ int first_of_pair(int i) const { return p.interleaved ? 2 * i : i; }
  __device__ __forceinline__ int second_of_pair(int i) const {
    return p.interleaved ? 2 * i + 1 : i + p.rotary_dim / 2;
  }

  // Pairs i .. i + kCount - 1 of a row of U. One pair alone is two accesses: it may begin at any
  // element.
  template <typename U>
  __device__ __forceinline__ void load_pairs(const char* row, int i, Pack<U, kCount>& x,
                                             Pack<U, kCount>& y) const {
    constexpr int kBytes = sizeof(U);
    if (kCount > 1 && p.interleaved) {
      Pack<U, 2 * kCount> both;
      both.load(row + 2 * i * kBytes);
      split(both, x, y);
    } else {
      x.load(row + first_of_pair(i) * kBytes);
      y.load(row + second_of_pair(i) * kBytes);
    }
  }

  template <typename U>
  __device__ __forceinline__ void store_pairs(char* row, int i, const Pack<U, kCount>& x,
                                              const Pack<U, kCount>& y) const {
    constexpr int kBytes = sizeof(U);
    if (kCount > 1 && p.interleaved) {
      merge(x, y).store(row + 2 * i * kBytes);
    } else {
      x.store(row + first_of_pair(i) * kBytes);
      y.store(row + second_of_pair(i) * kBytes);
    }
  }

  // cos and sin of pairs that take their angles from three rows.
  __device__ __forceinline__ void load_sections(int i, Pack<float, kCount>& cosine,
                                                Pack<float, kCount>& sine) const {
    alignas(32) float values[2 * kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float* row = row_of_pair(p, angles, i + j);
      values[j] = row[i + j];
      values[kCount + j] = row[p.rotary_dim / 2 + i + j];
    }
    cosine.load(reinterpret_cast<const char*>(values));
    sine.load(reinterpret_cast<const char*>(values + kCount));
  }

  // Pairs i .. i + kCount - 1, rotated, rounded once.
  __device__ __forceinline__ void rotate_pairs(int i, Pack<T, kCount>& x,
                                               Pack<T, kCount>& y) const {
    constexpr int kFloatBytes = sizeof(float);
    const int half = p.rotary_dim / 2;
    Pack<float, kCount> cosine;
    Pack<float, kCount> sine;
    if (p.sections == kNoSections) {
      cosine.load(angles.first + i * kFloatBytes);
      sine.load(angles.first + (half + i) * kFloatBytes);
    } else {
      load_sections(i, cosine, sine);
    }
    load_pairs(in, i, x, y);
    Pack<float, kCount> a = to_floats(x);
    Pack<float, kCount> b = to_floats(y);
    if (norm) {
      Pack<float, kCount> a_weight;
      Pack<float, kCount> b_weight;
      if (p.norm_is_float) {
        load_pairs(norm, i, a_weight, b_weight);
      } else {
        load_pairs(norm, i, x, y);
        a_weight = to_floats(x);
        b_weight = to_floats(y);
      }
      a = products(a, inverse_rms, a_weight);
      b = products(b, inverse_rms, b_weight);
    }
    rotate(a, b, cosine, sine, x, y);
  }

  // Elements i .. i + kCount - 1 of the part that is not rotated.
  __device__ __forceinline__ Pack<T, kCount> pass(int i) const {
    Pack<T, kCount> x;
    x.load(in + i * static_cast<int>(sizeof(T)));
    if (!norm) return x;
    Pack<float, kCount> weight;
    if (p.norm_is_float) {
      weight.load(norm + i * static_cast<int>(sizeof(float)));
    } else {
      Pack<T, kCount> narrow;
      narrow.load(norm + i * static_cast<int>(sizeof(T)));
      weight = to_floats(narrow);
    }
    return from_floats<T>(products(to_floats(x), inverse_rms, weight));
  }
};

// To the cache's format; the same format is the same bits.
template <typename TIn, typename TOut, int kCount>
__device__ __forceinline__ Pack<TOut, kCount> to_cache(const Pack<TIn, kCount>& in,
                                                       const ScaleDivisor& scale) {
  if constexpr (kSameType<TIn, TOut>) {
    return in;
  } else {
    return convert<TIn, TOut>(in, scale);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ float sum_of_squares(const char* in, int width, int lane, int lanes) {
  float sum = 0.0f;
  for (int i = lane * kCount; i < width; i += lanes * kCount) {
    Pack<T, kCount> pack;
    pack.load(in + i * static_cast<int>(sizeof(T)));
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float x = to_float(pack.values[j]);
      sum += x * x;
    }
  }
  return sum;
}

// Encode a row into a four-bit cache, by all threads of a warp; a row that is not stored is not
// `active`. `longest` is the width of the longest row of the launch, and `most_shift` what is
// rotated together in its caches, as in Rotation; `plainly` holds for both of them.
template <typename T, typename TFormat, int kCount>
__device__ __forceinline__ void store_groups(const char* in, float scale, int width, int longest,
                                             bool active, const FourBitRow& row,
                                             const KVOperand& operand, int most_shift, bool plainly,
                                             int lane, int lanes) {
  constexpr int kLoads = kCount > 1 ? kCodesPerThread : 1;
#if !KVCUPY_ARCH
  if (lanes == 1) {
    if (active) store_row_alone<T, TFormat, kLoads>(in, scale, width, row, operand);
    return;
  }
#endif
  const auto store_packs = [&](const auto& store) __attribute__((always_inline)) {
    for (int first = 0; first < longest; first += lanes * kCodesPerThread) {
      const int at = first + lane * kCodesPerThread;
      const bool stores = active && at < width;
      Pack<T, kCodesPerThread> x = {};
      if (stores) x = load_sixteen<T, kLoads>(in + at * static_cast<int>(sizeof(T)));
      store(x, at, stores);
    }
  };
  if (!plainly) {
    const Rotation rotation = {rotation_of(operand).shift, most_shift};
    store_packs([&](const auto& x, int at, bool stores) __attribute__((always_inline)) {
      rotate_in_group<TFormat>(x, scale, at, stores, row, operand, rotation);
    });
  } else {
    store_packs([&](const auto& x, int at, bool stores) __attribute__((always_inline)) {
      store_in_group<TFormat>(x, scale, at, stores, row, operand);
    });
  }
}

// grid: (rows / (block / lanes)), block: (a multiple of 32), smem: with a four-bit cache a row of
// the key for each row of the block, else 0
template <typename T, typename TCache, int kCount, bool kReduce>
__global__ void rope_store(const __grid_constant__ RopeParams p) {
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int row = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
  const int rows_per_token = p.num_q_heads + p.num_k_heads + p.num_v_heads;
  const int token = static_cast<u32>(row) / static_cast<u32>(rows_per_token);
  const int row_head = row - token * rows_per_token;
  const bool is_query = row_head < p.num_q_heads;
  const bool is_value = row_head >= p.num_q_heads + p.num_k_heads;
  const int head = row_head - (is_query ? 0 : p.num_q_heads + (is_value ? p.num_k_heads : 0));
  const int reports = row_head == 0 && lane == 0 ? p.reports : 0;

  // Guards. With kReduce a thread without work still takes part in the reductions of its warp.
  Angles angles = {};
  bool active = row < p.num_rows && find_angles(p, token, reports & kReportPositions, angles);
  i64 slot = active ? find_slot(p, token, reports & kReportSlots) : -1;
  if (is_query) slot = -1;
  if (is_value && slot < 0) active = false;
  if (!kReduce && !active) return;

  const KVOperand& operand = is_value ? p.v : p.k;
  const char* in =
      (is_value ? p.value : p.key) + token * operand.token_bytes + head * operand.head_bytes;
  if (is_query) in = p.query + token * p.query_token_bytes + head * p.query_head_bytes;
  char* live = nullptr;
  if (is_query) {
    live = p.query_out + token * p.query_out_token_bytes + head * p.query_out_head_bytes;
  } else if (!is_value && p.key_out) {
    live = p.key_out + token * p.key_out_token_bytes + head * p.key_out_head_bytes;
  }
  char* cached = nullptr;
  if (slot >= 0) {
    cached = (is_value ? p.v_cache : p.k_cache) +
             slot_offset_bytes(operand.cache, slot, p.page_size, p.page_shift) +
             head * operand.cache.head_bytes;
  }
  const char* scale_array = is_value ? p.v_scale : p.k_scale;
  char* scale_cache = is_value ? p.v_scale_cache : p.k_scale_cache;
  float scale = is_query ? 1.0f : static_scale(scale_array, operand, head);

  const int width = !active ? 0 : is_value ? p.v.width : p.head_dim;
  const int pairs = is_value || !active ? 0 : p.rotary_dim / 2;
  const int passing = 2 * pairs;  // the first element that is not rotated
  const char* norm = is_value ? nullptr : is_query ? p.query_norm : p.key_norm;
  RotaryRow<T, kCount> rotary{p, in, angles, norm, 1.0f};

  if constexpr (kReduce) {
    const float squares =
        sum_within_warp(norm ? sum_of_squares<T, kCount>(in, width, lane, lanes) : 0.0f, lanes);
    if (norm) rotary.inverse_rms = 1.0f / sqrtf(squares / p.head_dim + p.epsilon);
    AbsMax<kCount> largest;
    if (kQuantised<TCache> && scale_cache && cached) {
      for (int i = lane * kCount; i < pairs; i += lanes * kCount) {
        Pack<T, kCount> x;
        Pack<T, kCount> y;
        rotary.rotate_pairs(i, x, y);
        largest.add(x);
        largest.add(y);
      }
      for (int i = passing + lane * kCount; i < width; i += lanes * kCount) {
        largest.add(rotary.pass(i));
      }
    }
    const float absmax = max_within_warp(largest.value(), lanes);
    if constexpr (kQuantised<TCache>) {
      if (scale_cache && cached) {
        scale = dynamic_scale<TCache>(absmax);
        if (lane == 0) *scale_address(scale_cache, operand, slot, head) = scale;
      }
    }
  }

  const bool copies = live && (live != in || norm);
  if constexpr (kFourBit<TCache>) {
    char* staged = dynamic_shared<char>() +
                   (threadIdx.x >> p.lane_shift) * p.head_dim * static_cast<int>(sizeof(T));
    for (int i = lane * kCount; i < pairs; i += lanes * kCount) {
      Pack<T, kCount> x;
      Pack<T, kCount> y;
      rotary.rotate_pairs(i, x, y);
      if (live) rotary.store_pairs(live, i, x, y);
      if (cached) rotary.store_pairs(staged, i, x, y);
    }
    for (int i = passing + lane * kCount; i < width && !is_value; i += lanes * kCount) {
      const Pack<T, kCount> x = rotary.pass(i);
      if (copies) x.store(live + i * static_cast<int>(sizeof(T)));
      if (cached) x.store(staged + i * static_cast<int>(sizeof(T)));
    }
    __syncwarp();
    const SlotPlace place = place_of(slot, p.page_size, p.page_shift);
    const int most_shift =
        max(p.k_cache ? rotation_of(p.k).shift : 0, p.v_cache ? rotation_of(p.v).shift : 0);
    const bool plainly =
        (!p.k_cache || is_stored_plainly(p.k)) && (!p.v_cache || is_stored_plainly(p.v));
    store_groups<T, TCache, kCount>(
        is_value ? in : staged, scale, width, max(p.k_cache ? p.head_dim : 0, p.v.width), cached,
        four_bit_row(is_value ? p.v_cache : p.k_cache, operand, place, head), operand, most_shift,
        plainly, lane, lanes);
  } else {
    const ScaleDivisor divisor(scale);
    if (is_value) {
      for (int i = lane * kCount; i < width; i += lanes * kCount) {
        Pack<T, kCount> x;
        x.load(in + i * static_cast<int>(sizeof(T)));
        to_cache<T, TCache>(x, divisor).store(cached + i * static_cast<int>(sizeof(TCache)));
      }
      return;
    }
    for (int i = lane * kCount; i < pairs; i += lanes * kCount) {
      Pack<T, kCount> x;
      Pack<T, kCount> y;
      rotary.rotate_pairs(i, x, y);
      if (live) rotary.store_pairs(live, i, x, y);
      if (cached) {
        rotary.store_pairs(cached, i, to_cache<T, TCache>(x, divisor),
                           to_cache<T, TCache>(y, divisor));
      }
    }
    for (int i = passing + lane * kCount; i < width; i += lanes * kCount) {
      const Pack<T, kCount> x = rotary.pass(i);
      if (copies) x.store(live + i * static_cast<int>(sizeof(T)));
      if (cached)
        to_cache<T, TCache>(x, divisor).store(cached + i * static_cast<int>(sizeof(TCache)));
    }
  }
}
