// Rotate query and key by position, and store key and value into a cache, in one launch.
//
// A group of `lanes` neighbouring threads (a power of two, up to a warp) takes a few heads of one
// token: of its query, its key or its value. In a rotated row a thread owns both elements of each
// of its pairs, so that rotating in place needs no exchange: pair i is elements (i, i + rotary_dim
// / 2), or (2i, 2i + 1) when interleaved. The rest of the row is copied. A key row, rounded to its
// own format, is written to the live key and to the cache; a value row only to the cache.
//
// The rows of all heads of a group are loaded beside the token's position and slot, which say where
// the angles lie and where the rows go: two round trips to memory, with up to 64 bytes per thread
// in flight. The angles serve all heads of the group.
//
// RMSNorm before the rotation and dynamic scales need a whole row at once: those launches (kReduce)
// take one head per group, and read the row up to three times, from L1 after the first. So do the
// groups of a four-bit cache, whose rotated keys pass through shared memory: a thread encodes 16
// neighbouring elements.
//
// Bytes: each row is read once and written once per destination; cos and sin of a token stay in L1.
#include "four_bit.cuh"

// How pairs choose among three positions per token (mrope).
constexpr int kNoSections = 0;           // one position per token
constexpr int kSections = 1;             // consecutive sections of pairs
constexpr int kSectionsInterleaved = 2;  // pair i takes axis i % 3 while that axis has pairs left

constexpr int kReportPositions = 1;
constexpr int kReportSlots = 2;

// Whether a group goes through whole rows, one after the other, as is best on a processor.
#ifdef KVCUPY_HOST_VARIANTS
constexpr bool kWholeRows = true;
#else
constexpr bool kWholeRows = false;
#endif

constexpr int kRopeThreads = 128;  // of a block, at most

// Heads whose rows a thread holds at once: two packs of each, 64 bytes in all.
template <typename T>
constexpr int kHeldHeads = 4 / static_cast<int>(sizeof(T));

// Of an SM, at least: 72 registers per thread. Four heads with 96 took as long on an H100, and 13 %
// longer to fp8. With a reduction 96, or 128 where rows are float32, which takes a few more on some
// GPUs.
template <typename T, typename TCache, bool kReduce>
constexpr int kResidentBlocks =
    kReduce                                                          ? (sizeof(T) == 4 ? 4 : 5)
    : sizeof(T) == 2 && sizeof(TCache) == 2 && !kSameType<T, TCache> ? 6
                                                                     : 7;

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
  int num_groups;   // num_tokens * (q_groups + k_groups + v_groups)
  int num_stored;   // tokens that have a slot
  int num_q_heads;  // heads of a token; each may be 0
  int num_k_heads;
  int num_v_heads;
  int q_groups;  // groups of a token: of its query, then of its key, then of its value
  int k_groups;
  int v_groups;
  int group_heads;       // of a group, at most: the last one of a token may have fewer
  int rotated_segments;  // of a query or key row, then those that are not rotated
  int row_segments;      // of a query or key row
  int v_segments;
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

// An int32 or int64 of an index array, loaded but not awaited: whatever is computed with it, were
// it only its sign, waits for the load, so that other loads go first.
struct PendingIndex {
  u32 lower = 0;
  u32 upper = 0;

  __device__ __forceinline__ void load(const char* address, int index_bytes) {
    lower = *reinterpret_cast<const u32*>(address);
    if (index_bytes == 8) upper = *reinterpret_cast<const u32*>(address + 4);
  }
  __device__ __forceinline__ i64 value(int index_bytes) const {
    return index_bytes == 8 ? static_cast<i64>(u64{upper} << 32 | lower) : static_cast<int>(lower);
  }
};

struct TokenIndices {
  PendingIndex positions[3];  // one, or one for each axis
  PendingIndex slot;
};

__device__ __forceinline__ TokenIndices begin_indices(const RopeParams& p, int token) {
  TokenIndices indices;
  const char* position = p.positions + token * p.position_bytes;
  indices.positions[0].load(position, p.position_index);
  if (token < p.num_stored) {
    indices.slot.load(p.slots + token * p.slot_stride_bytes, p.slot_bytes);
  }
  if (p.sections != kNoSections) {
    indices.positions[1].load(position + p.axis_bytes, p.position_index);
    indices.positions[2].load(position + 2 * p.axis_bytes, p.position_index);
  }
  return indices;
}

// The token's row of the table on one axis; null, and a fault, if its position is outside.
__device__ __forceinline__ const char* find_row(const RopeParams& p, int token,
                                                const PendingIndex& loaded, bool reports) {
  const i64 position = loaded.value(p.position_index);
  if (position >= 0 && position < p.max_positions) return p.table + position * p.table_row_bytes;
  if (reports) report_fault(p.faults, p.position_operation, token, position);
  return nullptr;
}

// Find the rows of a token; false if one of its positions is outside the table.
__device__ __forceinline__ bool find_angles(const RopeParams& p, int token,
                                            const TokenIndices& indices, bool reports,
                                            Angles& angles) {
  angles.first = find_row(p, token, indices.positions[0], reports);
  if (!angles.first || p.sections == kNoSections) return angles.first;
  angles.second = find_row(p, token, indices.positions[1], reports);
  if (!angles.second) return false;
  angles.third = find_row(p, token, indices.positions[2], reports);
  return angles.third;
}

// The slot of a token, or -1: padding, none given, the skipped one, or past the end (a fault).
__device__ __forceinline__ i64 find_slot(const RopeParams& p, int token,
                                         const TokenIndices& indices, bool reports) {
  if (token >= p.num_stored) return -1;
  const i64 slot = indices.slot.value(p.slot_bytes);
  if (slot == p.skip_slot) return -1;
  if (slot < p.num_slots) return slot;
  if (reports) report_fault(p.faults, p.slot_operation, token, slot);
  return -1;
}

// cos and sin of pairs i .. i + kCount - 1.
template <int kCount>
__device__ __forceinline__ void load_angles(const RopeParams& p, const Angles& angles, int i,
                                            Pack<float, kCount>& cosine,
                                            Pack<float, kCount>& sine) {
  constexpr int kFloatBytes = sizeof(float);
  const int half = p.rotary_dim / 2;
  if (p.sections == kNoSections) {
    cosine.load(angles.first + i * kFloatBytes);
    sine.load(angles.first + (half + i) * kFloatBytes);
    return;
  }
  alignas(32) float values[2 * kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float* row = row_of_pair(p, angles, i + j);
    values[j] = row[i + j];
    values[kCount + j] = row[half + i + j];
  }
  cosine.load(reinterpret_cast<const char*>(values));
  sine.load(reinterpret_cast<const char*>(values + kCount));
}

// --- Heads ---------------------------------------------------------------------------------------

// What a group of lanes takes: a segment of the rows of some heads of a token, which lie a stride
// apart.
struct HeadGroup {
  int token;
  int head;     // the first
  int count;    // of heads; 0 past the last group
  int segment;  // of a row
  int reports;
  bool is_query;
  bool is_value;

  __device__ __forceinline__ explicit HeadGroup(const RopeParams& p) {
    const int group = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
    const int groups_per_token = p.q_groups + p.k_groups + p.v_groups;
    token = static_cast<u32>(group) / static_cast<u32>(groups_per_token);
    const int of_token = group - token * groups_per_token;
    is_query = of_token < p.q_groups;
    is_value = of_token >= p.q_groups + p.k_groups;
    const int of_kind = of_token - (is_query ? 0 : p.q_groups + (is_value ? p.k_groups : 0));
    const int segments = is_value ? p.v_segments : p.row_segments;
    const int of_segment =
        segments == 1 ? of_kind : static_cast<u32>(of_kind) / static_cast<u32>(segments);
    segment = of_kind - of_segment * segments;
    head = of_segment * p.group_heads;
    const int num_heads = is_query ? p.num_q_heads : is_value ? p.num_v_heads : p.num_k_heads;
    count = group < p.num_groups ? min(p.group_heads, num_heads - head) : 0;
    const int lane = threadIdx.x & ((1 << p.lane_shift) - 1);
    reports = of_token == 0 && lane == 0 ? p.reports : 0;
  }

  __device__ __forceinline__ const KVOperand& operand(const RopeParams& p) const {
    return is_value ? p.v : p.k;
  }
  __device__ __forceinline__ i64 row_stride(const RopeParams& p) const {
    return is_query ? p.query_head_bytes : operand(p).head_bytes;
  }
  __device__ __forceinline__ const char* first_row(const RopeParams& p) const {
    const char* rows = is_query ? p.query : is_value ? p.value : p.key;
    const i64 token_bytes = is_query ? p.query_token_bytes : operand(p).token_bytes;
    return rows + token * token_bytes + head * row_stride(p);
  }
  __device__ __forceinline__ i64 live_stride(const RopeParams& p) const {
    return is_query ? p.query_out_head_bytes : p.key_out_head_bytes;
  }
  // Null: rows go to the cache alone.
  __device__ __forceinline__ char* first_live(const RopeParams& p) const {
    char* live = is_query ? p.query_out : is_value ? nullptr : p.key_out;
    const i64 token_bytes = is_query ? p.query_out_token_bytes : p.key_out_token_bytes;
    return live ? live + token * token_bytes + head * live_stride(p) : nullptr;
  }
  // Null, for a negative slot: rows are not stored.
  __device__ __forceinline__ char* first_cached(const RopeParams& p, i64 slot) const {
    const CacheStrides& cache = operand(p).cache;
    if (slot < 0) return nullptr;
    return (is_value ? p.v_cache : p.k_cache) +
           slot_offset_bytes(cache, slot, p.page_size, p.page_shift) + head * cache.head_bytes;
  }
  __device__ __forceinline__ float scale(const RopeParams& p, int i) const {
    return static_scale(is_value ? p.v_scale : p.k_scale, operand(p), head + i);
  }
};

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

  // Pairs i .. i + kCount - 1, rotated, rounded once.
  __device__ __forceinline__ void rotate_pairs(int i, Pack<T, kCount>& x,
                                               Pack<T, kCount>& y) const {
    Pack<float, kCount> cosine;
    Pack<float, kCount> sine;
    load_angles(p, angles, i, cosine, sine);
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

// One head whose whole row must be known first: it is normalised, has a dynamic scale,
// or is stored in groups.
template <typename T, typename TCache, int kCount>
__device__ __forceinline__ void rotate_head(const RopeParams& p, const HeadGroup& group) {
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int token = group.token;
  const int head = group.head;
  const bool is_query = group.is_query;
  const bool is_value = group.is_value;

  // Guards. A thread without work still takes part in the reductions of its warp.
  Angles angles = {};
  bool active = group.count > 0;
  i64 slot = -1;
  if (active) {
    const TokenIndices indices = begin_indices(p, token);
    active = find_angles(p, token, indices, group.reports & kReportPositions, angles);
    if (active) slot = find_slot(p, token, indices, group.reports & kReportSlots);
  }
  if (is_query) slot = -1;
  if (is_value && slot < 0) active = false;

  const KVOperand& operand = group.operand(p);
  const char* in = group.first_row(p);
  char* live = group.first_live(p);
  const char* scale_array = is_value ? p.v_scale : p.k_scale;
  char* scale_cache = is_value ? p.v_scale_cache : p.k_scale_cache;
  float scale = is_query ? 1.0f : static_scale(scale_array, operand, head);

  const int width = !active ? 0 : is_value ? p.v.width : p.head_dim;
  const int pairs = is_value || !active ? 0 : p.rotary_dim / 2;
  const int passing = 2 * pairs;  // the first element that is not rotated
  const char* norm = is_value ? nullptr : is_query ? p.query_norm : p.key_norm;
  RotaryRow<T, kCount> rotary{p, in, angles, norm, 1.0f};

  const float squares =
      sum_within_warp(norm ? sum_of_squares<T, kCount>(in, width, lane, lanes) : 0.0f, lanes);
  if (norm) rotary.inverse_rms = 1.0f / sqrtf(squares / p.head_dim + p.epsilon);
  AbsMax<kCount> largest;
  if (kQuantised<TCache> && scale_cache && slot >= 0) {
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
    if (scale_cache && slot >= 0) {
      scale = dynamic_scale<TCache>(absmax);
      if (lane == 0) *scale_address(scale_cache, operand, slot, head) = scale;
    }
  }

  char* cached = group.first_cached(p, slot);
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

// Two packs that lie side by side, as one.
template <typename T, int kCount>
__device__ __forceinline__ Pack<T, 2 * kCount> adjacent(const Pack<T, kCount>& a,
                                                        const Pack<T, kCount>& b) {
  Pack<T, 2 * kCount> both;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    both.values[i] = a.values[i];
    both.values[kCount + i] = b.values[i];
  }
  return both;
}

// Both elements of pairs out of a row of T, or into one; interleaved, they are neighbours.
template <bool kInterleaved, typename T, int kCount>
__device__ __forceinline__ void load_pairs(const char* row, int distance, Pack<T, kCount>& x,
                                           Pack<T, kCount>& y) {
  if constexpr (kInterleaved) {
    Pack<T, 2 * kCount> both;
    both.load(row);
    split(both, x, y);
  } else {
    x.load(row);
    y.load(row + distance * static_cast<int>(sizeof(T)));
  }
}

template <bool kInterleaved, typename T, int kCount>
__device__ __forceinline__ void store_pairs(char* row, int distance, const Pack<T, kCount>& x,
                                            const Pack<T, kCount>& y) {
  if constexpr (kInterleaved) {
    merge(x, y).store(row);
  } else {
    x.store(row);
    y.store(row + distance * static_cast<int>(sizeof(T)));
  }
}

// The rows of a group, one after the other, as is best on a processor.
template <bool kInterleaved, typename T, typename TCache, int kCount>
__device__ __forceinline__ void rotate_rows(const RopeParams& p, const HeadGroup& group) {
  if (group.count <= 0 || group.segment > 0) return;
  constexpr int kBytes = sizeof(T);
  constexpr int kCacheBytes = sizeof(TCache);
  const int token = group.token;
  const TokenIndices indices = begin_indices(p, token);
  Angles angles = {};
  if (!find_angles(p, token, indices, group.reports & kReportPositions, angles)) return;
  const i64 slot = find_slot(p, token, indices, group.reports & kReportSlots);
  const char* in = group.first_row(p);
  char* live = group.first_live(p);
  char* cached = group.first_cached(p, group.is_query ? -1 : slot);
  if (group.is_value && !cached) return;  // there may be no row
  const i64 stride = group.row_stride(p);
  const i64 live_stride = group.live_stride(p);
  const i64 cached_stride = group.operand(p).cache.head_bytes;
  const int width = group.is_value ? p.v.width : p.head_dim;
  const int pairs = group.is_value ? 0 : p.rotary_dim / 2;
  const int element_step = p.interleaved ? 2 : 1;
  const int distance = p.interleaved ? kCount : pairs;
  const bool has_sections = p.sections != kNoSections;
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);

  for (int head = 0; head < group.count; ++head) {
    const ScaleDivisor divisor(kQuantised<TCache> && !group.is_query ? group.scale(p, head) : 1.0f);
    const bool copies = live && live != in;
    for (int pair = lane * kCount; pair < pairs; pair += lanes * kCount) {
      const int element = element_step * pair;
      Pack<float, kCount> cosine;
      Pack<float, kCount> sine;
      if (has_sections) {
        load_angles(p, angles, pair, cosine, sine);
      } else {  // what the stores below cannot change stays in registers
        cosine.load(angles.first + pair * static_cast<int>(sizeof(float)));
        sine.load(angles.first + (pairs + pair) * static_cast<int>(sizeof(float)));
      }
      Pack<T, kCount> x;
      Pack<T, kCount> y;
      load_pairs<kInterleaved>(in + element * kBytes, distance, x, y);
      rotate(to_floats(x), to_floats(y), cosine, sine, x, y);
      if constexpr (kInterleaved && kSameType<T, TCache>) {
        const Pack<T, 2 * kCount> both = merge(x, y);
        if (live) both.store(live + element * kBytes);
        if (cached) both.store(cached + element * kBytes);
        continue;
      }
      if (live) store_pairs<kInterleaved>(live + element * kBytes, distance, x, y);
      if (cached) {
        store_pairs<kInterleaved>(cached + element * kCacheBytes, distance,
                                  to_cache<T, TCache>(x, divisor), to_cache<T, TCache>(y, divisor));
      }
    }
    for (int i = lane * kCount; 2 * pairs + i < width; i += lanes * kCount) {
      const int element = 2 * pairs + i;
      Pack<T, kCount> x;
      x.load(in + element * kBytes);
      if (copies) x.store(live + element * kBytes);
      if (cached) to_cache<T, TCache>(x, divisor).store(cached + element * kCacheBytes);
    }
    in += stride;
    if (live) live += live_stride;
    if (cached) cached += cached_stride;
  }
}

// Where rows of neighbouring heads go; null: nowhere.
struct HeadTargets {
  char* live;
  char* cached;
  i64 live_stride;
  i64 cached_stride;
};

// Rotate what a lane holds of `count` heads, and store it.
template <bool kInterleaved, typename TCache, int kHeads, typename T, int kCount>
__device__ __forceinline__ void rotate_held(const Pack<T, kCount> (&first)[kHeads],
                                            const Pack<T, kCount> (&second)[kHeads],
                                            const Pack<float, kCount>& cosine,
                                            const Pack<float, kCount>& sine,
                                            const float (&scales)[kHeads], int count, int distance,
                                            HeadTargets to) {
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= count) continue;
    Pack<T, kCount> x = first[i];
    Pack<T, kCount> y = second[i];
    if constexpr (kInterleaved) split(adjacent(first[i], second[i]), x, y);
    rotate(to_floats(x), to_floats(y), cosine, sine, x, y);
    if (to.live) store_pairs<kInterleaved>(to.live + i * to.live_stride, distance, x, y);
    if (to.cached) {
      const ScaleDivisor divisor(kQuantised<TCache> ? scales[i] : 1.0f);
      store_pairs<kInterleaved>(to.cached + i * to.cached_stride, distance,
                                to_cache<T, TCache>(x, divisor), to_cache<T, TCache>(y, divisor));
    }
  }
}

// A segment of heads whose elements depend on no others of their row. A lane holds two packs of
// each row: the first and second elements of kCount pairs (interleaved, as they lie), or what it
// copies.
template <typename T, typename TCache, int kCount, int kHeads>
__device__ __forceinline__ void rotate_heads(const RopeParams& p, const HeadGroup& group) {
  if (group.count <= 0) return;
  constexpr int kBytes = sizeof(T);
  constexpr int kCacheBytes = sizeof(TCache);
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const int token = group.token;
  const bool rotates = !group.is_value && group.segment < p.rotated_segments;
  const bool interleaved = p.interleaved && rotates;

  // Where the packs lie in a row
  int pair = 0;  // the first that the lane rotates
  int element;   // of the first pack
  int distance;  // from there to the second, in elements
  bool has_first;
  bool has_second;
  if (rotates) {
    pair = (group.segment * lanes + lane) * kCount;
    element = interleaved ? 2 * pair : pair;
    distance = interleaved ? kCount : p.rotary_dim / 2;
    has_first = has_second = pair < p.rotary_dim / 2;
  } else {
    const int segment = group.segment - (group.is_value ? 0 : p.rotated_segments);
    const int width = group.is_value ? p.v.width : p.head_dim;
    element = (group.is_value ? 0 : p.rotary_dim) + (2 * segment * lanes + lane) * kCount;
    distance = lanes * kCount;
    has_first = element < width;
    has_second = element + distance < width;
  }
  // A token without a slot may have no value row.
  const int count = has_first && (!group.is_value || token < p.num_stored) ? group.count : 0;
  const int second_count = has_second ? count : 0;

  // Load: the indices, and beside them all that does not depend on them
  const TokenIndices indices = begin_indices(p, token);
  const char* in = group.first_row(p) + element * kBytes;
  const i64 stride = group.row_stride(p);
  Pack<T, kCount> first[kHeads];
  Pack<T, kCount> second[kHeads];
  float scales[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < count) first[i].load(in + i * stride);
    if (i < second_count) second[i].load(in + i * stride + distance * kBytes);
  }
  if (kQuantised<TCache> && !group.is_query) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (i < count) scales[i] = group.scale(p, i);
    }
  }

  // Guards
  Angles angles = {};
  if (!find_angles(p, token, indices, group.reports & kReportPositions, angles)) return;
  const i64 slot = find_slot(p, token, indices, group.reports & kReportSlots);
  if (count == 0) return;
  Pack<float, kCount> cosine;
  Pack<float, kCount> sine;
  if (rotates) load_angles(p, angles, pair, cosine, sine);
  HeadTargets to = {group.first_live(p), group.first_cached(p, group.is_query ? -1 : slot),
                    group.live_stride(p), group.operand(p).cache.head_bytes};
  if (to.live) to.live += element * kBytes;
  if (to.cached) to.cached += element * kCacheBytes;

  // Rotate, Convert, Store
  if (rotates) {
    if (kCount > 1 && interleaved) {
      rotate_held<true, TCache>(first, second, cosine, sine, scales, count, distance, to);
    } else {
      rotate_held<false, TCache>(first, second, cosine, sine, scales, count, distance, to);
    }
    return;
  }
  const bool in_place = to.live == in && to.live_stride == stride;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (to.live && !in_place) {
      char* row = to.live + i * to.live_stride;
      if (i < count) first[i].store(row);
      if (i < second_count) second[i].store(row + distance * kBytes);
    }
    if (to.cached) {
      const ScaleDivisor divisor(kQuantised<TCache> ? scales[i] : 1.0f);
      char* row = to.cached + i * to.cached_stride;
      if (i < count) to_cache<T, TCache>(first[i], divisor).store(row);
      if (i < second_count) {
        to_cache<T, TCache>(second[i], divisor).store(row + distance * kCacheBytes);
      }
    }
  }
}

// grid: (groups / (block / lanes)), block: (a multiple of 32), smem: with a four-bit cache a row of
// the key for each row of the block, else 0
template <typename T, typename TCache, int kCount, bool kReduce, int kHeads = kHeldHeads<T>,
          int kBlocks = kResidentBlocks<T, TCache, kReduce>>
__global__ void __launch_bounds__(kRopeThreads, kBlocks)
    rope_store(const __grid_constant__ RopeParams p) {
  HeadGroup group(p);
  if constexpr (kReduce) {
    rotate_head<T, TCache, kCount>(p, group);
  } else if (kWholeRows || (kArch == 0 && p.lane_shift == 0)) {
    if (kCount > 1 && p.interleaved) {
      rotate_rows<true, T, TCache, kCount>(p, group);
    } else {
      rotate_rows<false, T, TCache, kCount>(p, group);
    }
  } else if constexpr (!kWholeRows) {
    rotate_heads<T, TCache, kCount, kHeads>(p, group);
  }
}
