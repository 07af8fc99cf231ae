// Shared memory of attention_prefill.cu: tiles of rows, which keys they hold, and which rows of the
// query see them.
//
// Widths are padded with zeros up to kWidth and kWidthV.
#pragma once

#include "attention_tiles.cuh"

constexpr int kPrefillRows = 64;
constexpr int kPrefillThreads = 128;

template <int kCount, bool kRotateKeys>
struct KeyTable {
  const char* k[kCount];  // rows in the cache; null: not visible
  const char* v[kCount];
  const float* angles[kRotateKeys ? kCount : 1];
  int missing[kCount / 32];  // whether some of each 32 are null
};

// Rarely read, so kept out of registers.
struct PrefillTile {
  AttentionTile tile;
  i64 lowest[kPrefillThreads / 32];  // positions of the queries of each warp
  i64 highest[kPrefillThreads / 32];
  i64 begin;  // the visible keys of this split
  i64 end;
};

// The layout of dynamic shared memory. Queries that move on to registers share their place with the
// first values.
template <int kWidth, int kWidthV, bool kRotateKeys>
struct PrefillShape {
  static_assert(kWidth % 64 == 0 && kWidthV % 64 == 0, "rows are whole groups of 128 bytes");
  static constexpr bool kQueryInRegisters = kWidth <= 192;
  static constexpr int kKeys = kWidth <= 192 ? 64 : 32;
  static constexpr int kBlocks = kWidth <= 64 ? 3 : 2;  // per SM, as registers allow
  static constexpr int kKeyBytes = kKeys * kWidth * 2;
  static constexpr int kValueBytes = kKeys * kWidthV * 2;
  static constexpr int kQueryBytes = kPrefillRows * kWidth * 2;
  static constexpr int kValuesAt = kKeyBytes;
  static constexpr int kQueryAt = kQueryInRegisters ? kValuesAt : kValuesAt + kValueBytes;
  static constexpr int kQueryEnd = kQueryAt + kQueryBytes;
  static constexpr int kValuesEnd = kValuesAt + kValueBytes;
  static constexpr int kTablesAt = kQueryEnd > kValuesEnd ? kQueryEnd : kValuesEnd;
  static constexpr int kTileAt =
      kTablesAt + 2 * static_cast<int>(sizeof(KeyTable<kKeys, kRotateKeys>));
  static constexpr int kBytes = kTileAt + static_cast<int>(sizeof(PrefillTile));
};

// Start copying rows; `find(row)` is where one lies, or null. Eight threads share a row.
template <int kWidth, int kCount, typename Find>
__device__ __forceinline__ void fetch_rows(char* tile, int width, const char* anywhere, Find find) {
  constexpr int kRowsAtOnce = kPrefillThreads / 8;
  const int first = threadIdx.x / 8;
#pragma unroll
  for (int i = 0; i < kCount / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce;
    const char* from = find(row);
#pragma unroll
    for (int j = 0; j < kWidth / 64; ++j) {
      const int chunk = threadIdx.x % 8 + j * 8;
      const bool exist = from && chunk * 8 < width;
      copy_async(tile + chunk_offset<kWidth>(row, chunk), exist ? from + chunk * 16 : anywhere,
                 exist);
    }
  }
}

// Find the rows of kCount visible keys from the one numbered `first` on, of those before `end`.
template <int kCount, bool kRotateKeys>
__device__ __forceinline__ void look_up(KeyTable<kCount, kRotateKeys>& table,
                                        const AttentionParams& p, const AttentionTile& t, i64 first,
                                        i64 end) {
  const int i = threadIdx.x;
  if (i >= kCount) return;
  const int kv_head = blockIdx.y;
  i64 page = -1;
  i64 offset = 0;
  if (first + i < end) {
    const i64 key = key_of(p, t, first + i);
    if (seen_by_any(p, t, key)) {
      const i64 place = place_of(p, t, key);
      offset = offset_in_page(p, place);
      page = page_of(p, t, place, kv_head == 0);
      if constexpr (kRotateKeys) table.angles[i] = angles_of(p, t, key);
    }
  }
  table.k[i] = page < 0 ? nullptr : row_of(p.k_cache, p.k, page, offset, kv_head);
  table.v[i] = page < 0 ? nullptr : row_of(p.v_cache, p.v, page, offset, kv_head);
  const int missing = __any_sync(kAllLanes, page < 0);
  if (i % 32 == 0) table.missing[i / 32] = missing;
}

// Whether rows at positions from `lowest` to `highest` see all kCount keys from the one numbered
// `first` on. Kept keys are below the window of every row of the tile, so they fail its test.
template <int kCount, bool kRotateKeys>
__device__ __forceinline__ bool all_visible(const KeyTable<kCount, kRotateKeys>& table,
                                            const AttentionParams& p, const AttentionTile& t,
                                            i64 lowest, i64 highest, i64 first) {
#pragma unroll
  for (int i = 0; i < kCount / 32; ++i) {
    if (table.missing[i]) return false;
  }
  const i64 first_tree = first_tree_key(p, t);
  if (lowest < 0 && position_counts(p, first_tree)) return false;
  const i64 key = key_of(p, t, first);
  const i64 last = key + kCount - 1;
  if (last >= first_tree || (p.causal && last > lowest)) return false;
  return !p.window || key > highest - p.window;
}

// Which of a lane's scores count: bit n * 4 + i says it of element i of the n-th product.
template <int kCount, bool kRotateKeys>
__device__ __forceinline__ u32 visible_scores(const KeyTable<kCount, kRotateKeys>& table,
                                              const AttentionParams& p, const AttentionTile& t,
                                              int first_row, i64 first) {
  static_assert(kCount <= 64, "two columns and two rows of each product, a bit each");
  const int lane = threadIdx.x % 32;
  u32 visible = 0;
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + i * 8;
    if (row >= t.num_rows) continue;
#pragma unroll 1
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
      if (table.k[column] && sees(p, t, row, key_of(p, t, first + column))) {
        visible |= 1u << (j / 2 * 4 + i * 2 + j % 2);
      }
    }
  }
  return visible;
}
