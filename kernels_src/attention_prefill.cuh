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
  u32 present[kCount / 32];  // a bit per key: whether it is not null
};

// Rarely read, so kept out of registers.
struct PrefillTile {
  AttentionTile tile;
  RowLimits limits[kPrefillRows];               // but for kept keys and trees
  RowLimits seen_by_all[kPrefillThreads / 32];  // by the rows of each warp
  i64 begin;                                    // the visible keys of the piece
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
  const u32 present = __ballot_sync(kAllLanes, page >= 0);
  if (i % 32 == 0) table.present[i / 32] = present;
}
