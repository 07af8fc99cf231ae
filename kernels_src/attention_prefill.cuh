// Shared memory of attention_prefill.cu: tiles of rows, which keys they hold, and which rows of the
// query see them; and scores that become weights.
//
// Widths are padded with zeros up to kWidth and kWidthV.
#pragma once

#include "attention_dequantise.cuh"

constexpr int kPrefillThreads = 128;
constexpr int kPrefillWarps = kPrefillThreads / 32;

constexpr int max_of(int a, int b) { return a > b ? a : b; }

template <int kCount, bool kRotateKeys, typename Scales>
struct KeyTable : Scales {
  const char* k[kCount];  // rows in the cache; null: not visible
  const char* v[kCount];
  const float* angles[kRotateKeys ? kCount : 1];
  u32 present[kCount / 32];  // a bit per key: whether it is not null
};

// Entries of the block table for the keys of two tiles. Each is copied and read by one thread.
template <int kCount>
struct PageEntries {
  i64 of[2][kCount];  // int32 or int64, as the block table
};

// Tiles of keys, by number.
struct TileRange {
  int begin;
  int end;
};

// Rarely read, so kept out of registers.
template <int kRows>
struct PrefillTile {
  AttentionTile tile;
  RowLimits limits[kRows];            // but for kept keys and trees
  TileRange unmasked[kPrefillWarps];  // of keys that the rows of each warp all see
  i64 begin;                          // the visible keys of the piece
  i64 end;
  int num_key_tiles;
  u32 visible[kRows / kPrefillWarps / 16][kPrefillThreads];  // scores of each thread that count
};

// The layout of dynamic shared memory. Queries that move on to registers share their place with the
// first values, unless those arrive with the first keys. Of quantised caches keys and values have
// one place by turns, and another where they arrive.
template <int kWidth, int kWidthV, bool kRotateKeys, int kRows, int kStages, bool kQuantised>
struct PrefillShape {
  static_assert(!kQuantised || (kStages == 1 && !kRotateKeys), "what Python asks for");
  static_assert(kWidth % 64 == 0 && kWidthV % 64 == 0, "rows are whole groups of 128 bytes");
  static_assert(kRows == 64 || (kRows == 128 && kWidthV <= 128), "sums are held in registers");
  static constexpr int kRowTiles = kRows / kPrefillWarps / 16;  // of 16 rows, per warp
  static constexpr bool kQueryInRegisters = kWidth * kRowTiles <= 192;
  static constexpr int kKeys = kWidth <= 192 ? 64 : 32;
  static constexpr int kBlocks = kWidth * kRowTiles <= 64 ? 3 : 2;  // per SM, as registers allow
  static constexpr int kTables = kStages + 1;
  using Scales = SelectType<kQuantised, TileScales<kKeys, kWidth, kWidthV>, NoScales>;
  using Table = KeyTable<kKeys, kRotateKeys, Scales>;
  static constexpr int kKeyBytes = kKeys * kWidth * 2;
  static constexpr int kValueBytes = kKeys * kWidthV * 2;
  static constexpr int kQueryBytes = kRows * kWidth * 2;
  static constexpr int kValuesAt = kQuantised ? 0 : kStages * kKeyBytes;
  static constexpr int kValuesEnd = max_of(kValuesAt + kStages * kValueBytes, kStages* kKeyBytes);
  static constexpr int kQueryAt = kQueryInRegisters && kStages == 1 ? kValuesAt : kValuesEnd;
  static constexpr int kQueryEnd = kQueryAt + kQueryBytes;
  static constexpr int kPackedAt = max_of(kQueryEnd, kValuesEnd);
  static constexpr int kPackedBytes = kQuantised ? kKeys * max_of(kWidth, kWidthV) : 0;
  static constexpr int kTablesAt = kPackedAt + kPackedBytes;
  static constexpr int kEntriesAt = kTablesAt + kTables * static_cast<int>(sizeof(Table));
  static constexpr int kTileAt = kEntriesAt + static_cast<int>(sizeof(PageEntries<kKeys>));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(PrefillTile<kRows>));
};

// Where a lane's part of four matrices begins, `row` rows and `chunk` chunks, of which one has
// multiples of 8 and of 2, from the first four: those have it `at` bytes into the tile.
template <int kWidth>
__device__ __forceinline__ const char* matrix_at(const char* tile, int at, int row, int chunk) {
  const char* in_first_rows = tile + ((at ^ chunk % 8 * 16) + chunk / 8 * 128);
  return in_first_rows + row * kWidth * 2;
}

// Start copying rows; `find(row)` is where one lies, or null. Eight threads share a row.
template <int kWidth, int kCount, typename Find>
__device__ __forceinline__ void fetch_rows(char* tile, int width, Find find) {
  constexpr int kRowsAtOnce = kPrefillThreads / 8;
  static_assert(kRowsAtOnce % 8 == 0, "chunks of a thread are permuted alike in all of its rows");
  const int thread = find_again(threadIdx.x);
  const int first = thread / 8;
  const int column = thread % 8;
  char* to = tile + chunk_offset<kWidth>(first, column);
  const char* rows[kCount / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kCount / kRowsAtOnce; ++i) rows[i] = find(first + i * kRowsAtOnce);
#pragma unroll
  for (int i = 0; i < kCount / kRowsAtOnce; ++i) {
    // Not read if the row is null.
    const auto* from = reinterpret_cast<const char*>(reinterpret_cast<u64>(rows[i]) + column * 16);
#pragma unroll
    for (int j = 0; j < kWidth / 64; ++j) {
      const bool exist = rows[i] && column * 8 + j * 64 < width;
      copy_async(to + i * kRowsAtOnce * kWidth * 2 + j * 128, from + j * 128, exist);
    }
  }
}

// Start copying what the block table says of kCount visible keys from the one numbered `first` on,
// of those before `end`.
template <int kCount>
__device__ __forceinline__ void request_pages(i64 (&entries)[kCount], const AttentionParams& p,
                                              const AttentionTile& t, i64 first, i64 end) {
  const int i = find_again(threadIdx.x);
  if (i >= kCount || first + i >= end) return;
  const i64 place = place_of(p, t, key_of(p, t, first + i));
  const char* row = p.block_table + t.sequence * p.table_row_bytes;
  const char* entry = row + entry_of(p, place) * p.table_entry_bytes;
  char* to = reinterpret_cast<char*>(&entries[i]);
  if (p.table_index_bytes == 8) {
    copy_word_async<8>(to, entry, true);
  } else {
    copy_word_async<4>(to, entry, true);
  }
}

// Find the rows of the keys whose pages were requested, once those copies have been waited for, and
// start copying their scales.
template <int kCount, bool kRotateKeys, typename Scales>
__device__ __forceinline__ void look_up(KeyTable<kCount, kRotateKeys, Scales>& table,
                                        const i64 (&entries)[kCount], const AttentionParams& p,
                                        const AttentionTile& t, i64 first, i64 end) {
  const int i = find_again(threadIdx.x);
  if (i >= kCount) return;
  const int kv_head = blockIdx.y;
  i64 page = -1;
  i64 offset = 0;
  if (first + i < end) {
    const i64 key = key_of(p, t, first + i);
    if (seen_by_any(p, t, key)) {
      const i64 place = place_of(p, t, key);
      const char* entry = reinterpret_cast<const char*>(&entries[i]);
      offset = offset_in_page(p, place);
      page = check_page(p, t, place, load_index(entry, p.table_index_bytes), kv_head == 0);
      if constexpr (kRotateKeys) table.angles[i] = angles_of(p, t, key);
    }
  }
  table.k[i] = page < 0 ? nullptr : row_of(p.k_cache, p.k, page, offset, kv_head);
  table.v[i] = page < 0 ? nullptr : row_of(p.v_cache, p.v, page, offset, kv_head);
  if constexpr (!kSameType<Scales, NoScales>) {
    const bool exists = page >= 0;
    const SlotPlace place = {exists ? page : 0, offset};
    const i64 slot = place.page * p.page_size + offset;
    fetch_scales_of_key(&table.k_scales[i], table.k_groups[i], p.k_cache, p.k_scale_cache, p.k,
                        p.k_format, place, slot, kv_head, exists);
    fetch_scales_of_key(&table.v_scales[i], table.v_groups[i], p.v_cache, p.v_scale_cache, p.v,
                        p.v_format, place, slot, kv_head, exists);
  }
  const u32 present = __ballot_sync(kAllLanes, page >= 0);
  if (i % 32 == 0) table.present[i / 32] = present;
}

// The tiles of keys, from the visible key numbered `first` on, that lie within `all`.
template <int kKeys>
__device__ __forceinline__ TileRange tiles_within(const AttentionParams& p, const AttentionTile& t,
                                                  const RowLimits& all, i64 first) {
  const i64 kept = p.window ? p.sink_keys : 0;  // keys before these are seen past the window
  const i64 start = (all.start > kept ? all.start : kept) - t.first_key;
  const i64 begin = (start > 0 ? start : 0) + t.sinks - first;
  const i64 end = all.end - t.first_key + t.sinks - first;
  TileRange range;
  range.begin = static_cast<int>(begin > 0 ? (begin + kKeys - 1) / kKeys : 0);
  range.end = static_cast<int>(end > 0 ? end / kKeys : 0);
  return range;
}

// Which of a lane's scores count, from the key numbered `first` on, as `visible_scores` has them:
// if a key is `present` and a row sees it. `limits` are of the tile's rows, of which these 16 begin
// with `first_row`.
template <int kScores>
__device__ __forceinline__ u32 visible_keys(const u32 (&present)[kScores / 4],
                                            const RowLimits* limits, const AttentionParams& p,
                                            const AttentionTile& t, int first_row, i64 first) {
  const int lane = threadIdx.x % 32;
  const i64 first_key = key_of(p, t, first);
  const bool in_order = !p.window || (first >= t.sinks && first_key >= p.sink_keys);
  const bool before_tree = !p.tree_mask || first_key + kScores * 8 <= first_tree_key(p, t);
  u32 visible = 0;
  if (in_order && before_tree) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowLimits own = limits[first_row + lane / 4 + h * 8];
      const auto column_of = [&](i64 key) {
        const i64 column = key - first_key;
        return static_cast<int>(column < 0 ? 0 : min(column, i64{kScores * 8}));
      };
      const int start = column_of(own.start);
      const int end = column_of(own.end);
#pragma unroll
      for (int i = 0; i < kScores * 2; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (column >= start && column < end) visible |= 1u << (i / 2 * 4 + h * 2 + i % 2);
      }
    }
  } else {
    visible = visible_scores<kScores, 4>(p, t, first_row, first);
  }
#pragma unroll
  for (int i = 0; i < kScores * 2; ++i) {
    const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if (!(present[column / 32] >> column % 32 & 1u)) visible &= ~(5u << (i / 2 * 4 + i % 2));
  }
  return visible;
}

// --- Weights -------------------------------------------------------------------------------------

// Multiply a lane's scores by one factor, or by a factor for each key.
template <int kScores>
__device__ __forceinline__ void scale_scores(float (&s)[kScores][4], float factor) {
#pragma unroll
  for (int i = 0; i < kScores * 4; ++i) s[i / 4][i % 4] *= factor;
}

template <int kScores>
__device__ __forceinline__ void scale_scores(float (&s)[kScores][4], const float* factors) {
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kScores; ++n) {
    const auto two = *reinterpret_cast<const float2*>(factors + n * 8 + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] *= i % 2 ? two.y : two.x;
  }
}

constexpr float kLowest = -3.402823466e38f;

// The sum of the weights of a row, relative to 2 to the `base`, as far as this lane has them.
struct RowSum {
  float base = kLowest;
  float sum = 0.0f;
};

// A base stays until a logit is larger by this. Weights up to 2 to the 8 lose nothing, and sums of
// weighted values are rescaled seldom.
constexpr float kBaseSlack = 8.0f;

// Weights that meet values are relative to the largest dynamic scale of V so far, a power of two:
// raise it to the largest of a tile, and return the factor of the sums of weighted values.
// Every lane must call it.
template <int kKeys>
__device__ __forceinline__ float raise_value_scale(const float (&scales)[kKeys], float& largest) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeys; i += 32) top = fmaxf(top, fabsf(scales[i + threadIdx.x % 32]));
  top = power_of_two_below(max_within_warp(top, 32));
  if (!(top > largest)) return 1.0f;
  const float rescale = largest * inverse_of_power(top);
  largest = top;
  return rescale;
}

// Turn a lane's scores into weights, A of products by 16 keys: 2 to the scores times `factor`, less
// the bases of their rows. The bases of rows g and g + 8 are raised to their largest logits where
// these are far above; `rescale` is what all that is relative to them has to be multiplied by.
// Returns whether that is not 1 in any row of the warp. Every lane must call it. Unless it is null,
// the weights that meet values, unlike their sums, are multiplied by `value_scales` of their keys
// and by `unit`.
template <typename T, int kSteps>
__device__ __forceinline__ bool weigh_scores(u32 (&a)[kSteps][4], const float (&s)[2 * kSteps][4],
                                             float factor, RowSum (&rows)[2], float (&rescale)[2],
                                             const float* value_scales, float unit) {
  bool rises = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < 2 * kSteps; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top = max_within_warp(top, 4) * factor;
    const float before = rows[h].base;
    if (top > before + kBaseSlack) {
      rows[h].base = top;
      rises = true;
    }
    rescale[h] = power_of_two(before - rows[h].base);
    rows[h].sum *= rescale[h];
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * k + i / 2;
      const int h = i % 2;
      float x = power_of_two(fmaf(s[n][2 * h], factor, -rows[h].base));
      float y = power_of_two(fmaf(s[n][2 * h + 1], factor, -rows[h].base));
      rows[h].sum += x + y;
      if (value_scales) {
        x *= value_scales[n * 8 + threadIdx.x % 4 * 2] * unit;
        y *= value_scales[n * 8 + threadIdx.x % 4 * 2 + 1] * unit;
      }
      a[k][i] = pack_pair<T>(x, y);
    }
  }
  return __any_sync(kAllLanes, rises);
}
