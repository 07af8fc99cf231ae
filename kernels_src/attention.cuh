// Paged attention: what its kernels share. Which queries a block has, which keys they see, and
// where those lie in the cache.
//
// The query heads of one KV head are `group` rows of each token, so that loaded K and V serve all
// of them: packed row r of a sequence is its new token r / group, head r % group. A tile is some
// packed rows of one sequence and KV head. Keys are numbered by position; what a tile can see of
// them is the kept first keys (sinks) and a range, walked through as one list that several splits
// share.
#pragma once

#include "cache_side.cuh"

struct AttentionParams {
  const char* query;          // [num_tokens, H * group, k.width]
  const char* k_cache;        // [num_pages, page_size, H, k.width] by strides
  const char* v_cache;        // [num_pages, page_size, H, v.width] by strides
  const char* block_table;    // [num_sequences, max_pages] int32 or int64
  const char* seq_lens;       // [num_sequences] int32 or int64, the new tokens included
  const char* query_starts;   // [num_sequences + 1] int32, or null: one new token each
  const char* k_scale;        // [H] float32, or null: k.scale
  const char* v_scale;        // [H] float32, or null: v.scale
  const char* k_scale_cache;  // [num_slots, H] float32, or null: static scales
  const char* v_scale_cache;  // [num_slots, H] float32, or null: static scales
  const char* sinks;          // [H * group] float32 logits, or null
  const char* tree_mask;      // [num_tokens, columns] bool, or null
  char* out;                  // [num_tokens, H * group, v.width]
  char* lse;                  // [num_tokens, H * group] float32, or null
  char* partial_out;          // [num_splits, num_tokens, H * group, v.width] float32, or null: out
  char* partial_lse;          // [num_splits, num_tokens, H * group] float32
  FaultRecord* faults;
  CacheSide k;  // of the cache: strides, scale, width
  CacheSide v;
  i64 query_token_bytes;
  i64 query_head_bytes;
  i64 out_token_bytes;
  i64 out_head_bytes;
  i64 lse_token_bytes;
  i64 lse_head_bytes;
  i64 table_row_bytes;
  i64 table_entry_bytes;
  i64 seq_len_bytes;  // between lengths
  i64 sink_bytes;     // between learned logits
  i64 mask_row_bytes;
  i64 mask_column_bytes;
  i64 num_pages;
  i64 max_pages;
  i64 window;           // keys a query sees at most, itself included; 0: all
  i64 sink_keys;        // the first keys, seen past the window
  i64 table_operation;  // for the fault record
  i64 length_operation;
  float score_scale;  // sm_scale, times log2(e) where there is no soft cap
  float soft_cap;     // 0: none
  float cap_scale;    // soft_cap * log2(e)
  int num_tokens;
  int num_sequences;
  int num_splits;
  int num_heads;  // of the query
  int group;      // query heads a KV head
  int page_size;
  int page_shift;
  int table_index_bytes;
  int length_index_bytes;
  int mask_columns;
  int causal;
  int query_format;  // see load_any
  int k_format;
  int v_format;
  int out_format;
  int lane_shift;  // log2(threads that share a key), decode only
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Formats by number: 0 fp32, 1 fp16, 2 bf16, 3 fp8_e4m3, 4 fp8_e5m2, 5 int8.
__device__ __forceinline__ float load_any(const char* row, i64 i, int format) {
  switch (format) {
    case 0:
      return reinterpret_cast<const float*>(row)[i];
    case 1:
      return to_float(reinterpret_cast<const half*>(row)[i]);
    case 2:
      return to_float(reinterpret_cast<const bfloat16*>(row)[i]);
    case 3:
      return to_float(reinterpret_cast<const fp8_e4m3*>(row)[i]);
    case 4:
      return to_float(reinterpret_cast<const fp8_e5m2*>(row)[i]);
    default:
      return to_float(reinterpret_cast<const int8*>(row)[i]);
  }
}

__device__ __forceinline__ void store_any(char* row, i64 i, int format, float value) {
  if (format == 0) {
    reinterpret_cast<float*>(row)[i] = value;
  } else if (format == 1) {
    reinterpret_cast<half*>(row)[i] = from_float<half>(value);
  } else {
    reinterpret_cast<bfloat16*>(row)[i] = from_float<bfloat16>(value);
  }
}

// --- Tiles ---------------------------------------------------------------------------------------

// Some packed rows of one sequence. num_rows 0: nothing to do.
struct AttentionTile {
  int sequence;
  int first_token;  // of the sequence, in `query`
  int num_new;      // its new tokens
  int first_row;    // packed
  int num_rows;     // in the tile
  i64 seq_len;
  i64 num_keys;   // that the table has pages for
  i64 sinks;      // keys 0 to sinks - 1 come first,
  i64 first_key;  // then first_key to first_key + (num_visible - sinks) - 1
  i64 num_visible;
};

__device__ __forceinline__ i64 seq_len_of(const AttentionParams& p, int sequence) {
  return load_index(p.seq_lens + sequence * p.seq_len_bytes, p.length_index_bytes);
}

// The first tile of a sequence. There is room for all: a whole number of rows, and one tile more.
__device__ __forceinline__ int first_tile(const AttentionParams& p, int sequence, int rows_a_tile) {
  const int start = reinterpret_cast<const int*>(p.query_starts)[sequence];
  return static_cast<int>(i64{start} * p.group / rows_a_tile) + sequence;
}

// Position of the query of a packed row.
__device__ __forceinline__ i64 position_of(const AttentionParams& p, const AttentionTile& t,
                                           int row) {
  return t.seq_len - t.num_new + (t.first_row + row) / p.group;
}

// `reports`: whether this thread notes a sequence that is longer than its table.
__device__ __forceinline__ AttentionTile find_tile(const AttentionParams& p, int number,
                                                   int rows_a_tile, bool reports) {
  AttentionTile t{};
  int within;
  if (p.query_starts) {
    int low = 0;
    int high = p.num_sequences;  // the sequence is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile(p, middle, rows_a_tile) <= number) {
        low = middle;
      } else {
        high = middle;
      }
    }
    t.sequence = low;
    within = number - first_tile(p, low, rows_a_tile);
    const int* starts = reinterpret_cast<const int*>(p.query_starts);
    t.first_token = starts[low];
    t.num_new = starts[low + 1] - t.first_token;
  } else {
    const int tiles = (p.group + rows_a_tile - 1) / rows_a_tile;
    t.sequence = number / tiles;
    within = number - t.sequence * tiles;
    t.first_token = t.sequence;
    t.num_new = 1;
  }
  t.first_row = within * rows_a_tile;
  const int there = min(t.num_new, p.num_tokens - t.first_token);
  t.num_rows = min(there * p.group - t.first_row, rows_a_tile);
  if (t.sequence >= p.num_sequences || t.num_rows <= 0) {
    t.num_rows = 0;
    return t;
  }
  const i64 length = seq_len_of(p, t.sequence);
  t.seq_len = length < 0 ? -1 : length;  // whose positions are negative, and see nothing
  const i64 most = p.max_pages * p.page_size;
  t.num_keys = length < 0 ? 0 : length;
  if (t.num_keys > most) {
    if (reports && within == 0) {
      report_fault(p.faults, p.length_operation, t.sequence, t.seq_len);
    }
    t.num_keys = most;
  }
  i64 end = t.num_keys;
  if (p.causal && !p.tree_mask) {
    const i64 last = position_of(p, t, t.num_rows - 1) + 1;
    end = last < 0 ? 0 : last < end ? last : end;
  }
  if (p.window) {
    i64 first = position_of(p, t, 0) - p.window + 1;
    // What a tree mask decides, the window does not.
    if (p.tree_mask && first > t.seq_len - t.num_new) first = t.seq_len - t.num_new;
    t.first_key = first < 0 ? 0 : first < end ? first : end;
    t.sinks = p.sink_keys < t.first_key ? p.sink_keys : t.first_key;
  }
  t.num_visible = t.sinks + end - t.first_key;
  return t;
}

__device__ __forceinline__ i64 key_of(const AttentionTile& t, i64 i) {
  return i < t.sinks ? i : i - t.sinks + t.first_key;
}

// Whether the query of a packed row sees a key that the tile sees.
__device__ __forceinline__ bool sees(const AttentionParams& p, const AttentionTile& t, int row,
                                     i64 key) {
  const int token = (t.first_row + row) / p.group;
  const i64 first_new = t.seq_len - t.num_new;
  const i64 position = first_new + token;
  if (position < 0 || key >= t.num_keys) return false;
  if (p.tree_mask && key >= first_new) {
    const i64 column = key - first_new;
    return column < p.mask_columns &&
           p.tree_mask[(t.first_token + token) * p.mask_row_bytes + column * p.mask_column_bytes];
  }
  if (p.causal && !p.tree_mask && key > position) return false;
  return !p.window || key > position - p.window || key < p.sink_keys;
}

// The page of a key, or -1: its table entry is none. The thread that `reports` notes one past the
// end.
__device__ __forceinline__ i64 page_of(const AttentionParams& p, const AttentionTile& t, i64 key,
                                       bool reports) {
  const i64 entry = p.page_shift >= 0 ? key >> p.page_shift : key / p.page_size;
  const i64 page =
      load_index(p.block_table + t.sequence * p.table_row_bytes + entry * p.table_entry_bytes,
                 p.table_index_bytes);
  if (page >= p.num_pages) {
    if (reports) {
      report_fault(p.faults, p.table_operation, t.sequence * p.max_pages + entry, page);
    }
    return -1;
  }
  return page < 0 ? -1 : page;
}

__device__ __forceinline__ i64 offset_in_page(const AttentionParams& p, i64 key) {
  return p.page_shift >= 0 ? key & ((i64{1} << p.page_shift) - 1) : key % p.page_size;
}

__device__ __forceinline__ const char* row_of(const char* cache, const CacheSide& side, i64 page,
                                              i64 offset, int head) {
  return cache + page * side.cache.page_bytes + offset * side.cache.offset_bytes +
         head * side.cache.head_bytes;
}

// What a row's elements are multiplied by.
__device__ __forceinline__ float scale_of_row(const char* scale, const char* scale_cache,
                                              const CacheSide& side, i64 slot, int head) {
  return scale_cache ? *scale_address(const_cast<char*>(scale_cache), side, slot, head)
                     : static_scale(scale, side, head);
}

// A score (q . k, times the scale of k) as a power of two.
__device__ __forceinline__ float logit_of(const AttentionParams& p, float dot) {
  const float score = dot * p.score_scale;
  return p.soft_cap > 0.0f ? p.cap_scale * tanhf(score / p.soft_cap) : score;
}

// --- The end of a row ----------------------------------------------------------------------------

// What a row of a tile has come to: its largest logit (base 2) and the sum of weights against it.
// `count` elements of the sum of weighted values are written from `first` on, and by one thread
// (`first` 0) the LSE. Learned sinks join here, unless splits are merged later.
struct RowEnd {
  char* out;      // [v.width]
  int format;     // of out
  float* lse;     // or null
  float divisor;  // of the weighted values; 0: no key was seen
  float lse_value;
};

__device__ __forceinline__ RowEnd end_of_row(const AttentionParams& p, const AttentionTile& t,
                                             int row, int kv_head, int split, float largest,
                                             float sum) {
  const int packed = t.first_row + row;
  const i64 token = t.first_token + packed / p.group;
  const i64 head = i64{kv_head} * p.group + packed % p.group;
  RowEnd end;
  const bool seen = sum != 0.0f;  // a NaN was seen too
  if (p.partial_out) {
    const i64 at = (split * i64{p.num_tokens} + token) * p.num_heads + head;
    end.out = p.partial_out + at * p.v.width * 4;
    end.format = 0;
    end.lse = reinterpret_cast<float*>(p.partial_lse) + at;
  } else {
    end.out = p.out + token * p.out_token_bytes + head * p.out_head_bytes;
    end.format = p.out_format;
    end.lse =
        p.lse
            ? reinterpret_cast<float*>(p.lse + token * p.lse_token_bytes + head * p.lse_head_bytes)
            : nullptr;
    const float sink = p.sinks
                           ? *reinterpret_cast<const float*>(p.sinks + head * p.sink_bytes) * kLog2E
                           : -kInfinity;
    if (sink != -kInfinity) {
      const float both = fmaxf(largest, sink);
      const float rescale = seen ? exp2f(largest - both) : 0.0f;
      const float total = sum * rescale + exp2f(sink - both);
      end.divisor = rescale != 0.0f ? total / rescale : 0.0f;
      end.lse_value = (both + log2f(total)) * kLn2;
      return end;
    }
  }
  end.divisor = seen ? sum : 0.0f;
  end.lse_value = seen ? (largest + log2f(sum)) * kLn2 : -kInfinity;
  return end;
}
