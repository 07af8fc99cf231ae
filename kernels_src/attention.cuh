// Paged attention: what its kernels share. Which queries a block has, which keys they see, and
// where those lie in the cache.
//
// The query heads of one KV head are `group` rows of each token, so that loaded K and V serve all
// of them: packed row r of a sequence is its new token r / group, head r % group. A tile is some
// packed rows of one sequence and KV head. Keys are numbered by position; what a tile can see of
// them is the kept first keys (sinks) and a range, walked through as one list that several pieces
// of a tile share. With a key block, the list has places for whole blocks of keys, so that those
// that a row sees are summed in one order whichever rows share its tile. A key lies at the slot of
// its position, or further on where a span of the sequence's pages was evicted: only `place_of`
// knows.
#pragma once

#include "kv_operand.cuh"

struct AttentionParams {
  const char* query;          // [num_tokens, H * group, k.width]
  const char* k_cache;        // [num_pages, page_size, H, k.width] by strides
  const char* v_cache;        // [num_pages, page_size, H, v.width] by strides
  const char* block_table;    // [num_sequences, max_pages] int32 or int64
  const char* seq_lens;       // [num_sequences] int32 or int64, the new tokens included
  const char* cu_query_lens;  // [num_sequences + 1] int32, or null: one new token each
  const char* k_scale;        // [H] float32, or null: k.scale
  const char* v_scale;        // [H] float32, or null: v.scale
  const char* k_scale_cache;  // [num_slots, H] float32, or null: static scales
  const char* v_scale_cache;  // [num_slots, H] float32, or null: static scales
  const char* sinks;          // [H * group] float32 logits, or null
  const char* tree_mask;      // [num_tokens, columns] bool, or null
  const char* tree_lens;  // [num_sequences] int32: keys that the mask is about, or null: new ones
  const char* evicted_starts;  // [num_sequences] int32, or null: nothing evicted
  const char* evicted_lens;    // [num_sequences] int32
  const char* key_starts;      // [num_sequences] int32: the first key read, or null: 0
  const char* rope_table;      // [max_positions, rotary_dim] float32, or null: keys are not rotated
  const char*
      tree_positions;  // [num_sequences, tree_position_columns] int32: of tree keys, or null
  char* out;           // [num_tokens, H * group, v.width]
  char* lse;           // [num_tokens, H * group] float32, or null
  char* pieces;        // [num_pieces] AttentionPiece, or null: a piece for each tile
  char* split_tiles;   // [num_split_tiles] SplitTile, for the merge kernel; or null
  char* partial_out;   // [states, H, state_rows, v.width] float32
  char* partial_lse;   // [states, H, state_rows] float32
  char* counters;      // [states, H] uint32, for merge_parts; or null: a kernel merges
  FaultRecord* faults;
  KVOperand k;  // of the cache: strides, scale, width
  KVOperand v;
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
  i64 tree_len_bytes;  // strides between entries, as the next three
  i64 evicted_start_bytes;
  i64 evicted_len_bytes;
  i64 key_start_bytes;
  i64 rope_row_bytes;
  i64 tree_position_row_bytes;
  i64 tree_position_column_bytes;
  i64 max_positions;
  i64 num_pages;
  i64 max_pages;
  i64 window;           // most keys that a query sees, itself included; 0: all
  i64 sink_keys;        // keys at positions before this are seen past the window
  i64 table_operation;  // for the fault record
  i64 length_operation;
  i64 starts_operation;  // negative: attention_starts has checked cu_query_lens
  float score_scale;     // sm_scale, times log2(e) where there is no soft cap
  float soft_cap;        // 0: none
  float cap_scale;       // soft_cap * log2(e)
  float inverse_cap;     // 1 / soft_cap
  int num_tokens;
  int num_sequences;
  int num_tiles;  // this and the next seven: of attention_schedule
  int num_pieces;
  int num_split_tiles;
  int tile_rows;
  int num_running;  // pieces of one head that run at a time
  int most_rounds;  // of pieces of long sequences
  int least_keys;   // of a piece of them
  int min_keys;     // of a piece
  int state_rows;   // rows of a state that may be used
  int key_block;    // numbers of keys are their positions, modulo this; 0: any
  int num_heads;    // of the query
  int group;        // query heads per KV head
  int page_size;
  int page_shift;
  int table_index_bytes;
  int length_index_bytes;
  int mask_columns;
  int tree_position_columns;
  int rotary_start;  // first rotary element of a row of K
  int rotary_dim;
  int interleaved;  // pairs are neighbours, not halves apart
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
  int state;        // where the piece leaves its rows, to be merged; negative: `out`
  i64 seq_len;
  i64 num_keys;   // that the table has pages for
  i64 sinks;      // so many keys from the first that is looked at come first,
  i64 first_key;  // then first_key to first_key + (num_visible - sinks) - 1
  i64 num_visible;
  i64 sinks_end;  // of the keys that are listed, the tile sees those before this,
  i64 seen_from;  // and from here on
};

constexpr i64 kNoTree = i64{1} << 62;  // past every key, and differences to it are numbers still

// An entry of an int32 array with one a sequence, at least 0.
__device__ __forceinline__ int count_of(const char* counts, i64 entry_bytes, int sequence) {
  const int count = *reinterpret_cast<const int*>(counts + sequence * entry_bytes);
  return count < 0 ? 0 : count;
}

__device__ __forceinline__ i64 seq_len_of(const AttentionParams& p, int sequence) {
  return load_index(p.seq_lens + sequence * p.seq_len_bytes, p.length_index_bytes);
}

// Where the new tokens of a sequence begin in `query`, and where the tokens before them end.
// Entries of cu_query_lens may be anything, so they are clamped to the rows of the query.
__device__ __forceinline__ int query_start(const AttentionParams& p, int sequence) {
  const int start = reinterpret_cast<const int*>(p.cu_query_lens)[sequence];
  return min(max(start, 0), p.num_tokens);
}

// The first tile of a sequence: each sequence may round up to one tile more than its rows fill.
__device__ __forceinline__ i64 first_tile(const AttentionParams& p, int sequence,
                                          int rows_per_tile) {
  return i64{query_start(p, sequence)} * p.group / rows_per_tile + sequence;
}

// The work of a block: some of the keys of a tile.
struct alignas(16) AttentionPiece {
  int sequence;          // negative: nothing to do
  int first_row;         // of the tile: packed, of the sequence
  unsigned short part;   // of `parts` that the keys are cut into, equal but for rounding
  unsigned short parts;  // with more than one, each leaves a state
  int state;
};

__device__ __forceinline__ const char* query_row(const AttentionParams& p, const AttentionTile& t,
                                                 int row, int kv_head) {
  const int packed = t.first_row + row;
  const i64 token = t.first_token + packed / p.group;
  const i64 head = i64{kv_head} * p.group + packed % p.group;
  return p.query + token * p.query_token_bytes + head * p.query_head_bytes;
}

// Optional inputs of a sequence are loaded where they are needed: few calls have any of them, and
// none should hold registers for them.

// The first key that the tree mask covers.
__device__ __forceinline__ i64 first_tree_key(const AttentionParams& p, const AttentionTile& t) {
  if (!p.tree_mask) return kNoTree;
  const int nodes = p.tree_lens ? count_of(p.tree_lens, p.tree_len_bytes, t.sequence) : t.num_new;
  return nodes > 0 ? t.seq_len - nodes : kNoTree;
}

// The position of a key: its number, unless it is a node of a tree whose positions are given.
__device__ __forceinline__ i64 key_position(const AttentionParams& p, const AttentionTile& t,
                                            i64 key, i64 first_tree) {
  const i64 column = key - first_tree;
  if (!p.tree_positions || column < 0 || column >= p.tree_position_columns) return key;
  return *reinterpret_cast<const int*>(p.tree_positions + t.sequence * p.tree_position_row_bytes +
                                       column * p.tree_position_column_bytes);
}

// The number of the key that came with the query of a packed row.
__device__ __forceinline__ i64 own_key(const AttentionParams& p, const AttentionTile& t, int row) {
  return t.seq_len - t.num_new + (t.first_row + row) / p.group;
}

// Whether windows are about positions in a tree, which rise and fall from row to row.
__device__ __forceinline__ bool windows_in_tree(const AttentionParams& p, i64 first_tree) {
  return p.window && p.tree_positions && first_tree != kNoTree;
}

// The position of the query of a packed row, for windows. A node's lies in its tree, whatever
// `tree_positions` claims: the bounds below rely on that.
__device__ __forceinline__ i64 position_of(const AttentionParams& p, const AttentionTile& t,
                                           int row) {
  const i64 key = own_key(p, t, row);
  const i64 first_tree = first_tree_key(p, t);
  if (!windows_in_tree(p, first_tree) || key < first_tree || key < 0) return key;
  const i64 lowest = first_tree < 0 ? 0 : first_tree;
  const i64 position = key_position(p, t, key, first_tree);
  return position < lowest ? lowest : min(position, t.seq_len - 1);
}

// No row from `row` on has a lower position.
__device__ __forceinline__ i64 lowest_position(const AttentionParams& p, const AttentionTile& t,
                                               int row) {
  const i64 key = own_key(p, t, row);
  const i64 first_tree = first_tree_key(p, t);
  return windows_in_tree(p, first_tree) ? min(key, first_tree) : key;
}

// The first key that is read.
__device__ __forceinline__ int key_start(const AttentionParams& p, const AttentionTile& t) {
  return p.key_starts ? count_of(p.key_starts, p.key_start_bytes, t.sequence) : 0;
}

// Where a key lies, counted in slots along the pages of its block table.
__device__ __forceinline__ i64 place_of(const AttentionParams& p, const AttentionTile& t, i64 key) {
  if (!p.evicted_starts || key < count_of(p.evicted_starts, p.evicted_start_bytes, t.sequence))
    return key;
  return key + count_of(p.evicted_lens, p.evicted_len_bytes, t.sequence);
}

// How many keys lie at places before `most`.
__device__ __forceinline__ i64 keys_before(const AttentionParams& p, const AttentionTile& t,
                                           i64 most) {
  if (!p.evicted_starts) return most;
  const int evicted_start = count_of(p.evicted_starts, p.evicted_start_bytes, t.sequence);
  const i64 after_span = most - count_of(p.evicted_lens, p.evicted_len_bytes, t.sequence);
  const i64 before_span = evicted_start < most ? evicted_start : most;
  return after_span > before_span ? after_span : before_span;
}

// A tile by its number, in one piece. `reports`: whether this thread reports where the queries of
// its sequence begin and end, if no query does.
__device__ __forceinline__ AttentionPiece whole_tile(const AttentionParams& p, int number,
                                                     int rows_per_tile, bool reports) {
  AttentionPiece piece = {0, 0, 0, 1, 0};
  i64 within;
  i64 tokens = 1;
  if (p.cu_query_lens) {
    int low = 0;
    int high = p.num_sequences;  // the sequence is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile(p, middle, rows_per_tile) <= number) {
        low = middle;
      } else {
        high = middle;
      }
    }
    piece.sequence = low;
    within = number - first_tile(p, low, rows_per_tile);
    tokens = query_start(p, low + 1) - query_start(p, low);
    if (reports && p.starts_operation >= 0) {  // given by the caller
      const int* starts = reinterpret_cast<const int*>(p.cu_query_lens);
      const int start = starts[low];
      const int end = starts[low + 1];
      const int before = low > 0 ? starts[low - 1] : 0;
      if (start < max(before, 0) || start > p.num_tokens) {
        report_fault(p.faults, p.starts_operation, low, start);
      }
      if (end < max(start, 0) || end > p.num_tokens) {
        report_fault(p.faults, p.starts_operation, low + 1, end);
      }
    }
  } else {
    const int tiles = (p.group + rows_per_tile - 1) / rows_per_tile;
    piece.sequence = number / tiles;
    within = number - piece.sequence * tiles;
  }
  const i64 first_row = within * rows_per_tile;
  if (piece.sequence >= p.num_sequences || first_row < 0 || first_row >= tokens * p.group) {
    piece.sequence = -1;
  } else {
    piece.first_row = static_cast<int>(first_row);
  }
  return piece;
}

// A block of decode is KV head x and piece y. Heads run fastest, so that blocks which run together
// read adjacent memory: a short row does not fill 32-byte sectors by itself. Pieces that the y
// dimension of a grid has no room for continue in z.
__device__ __forceinline__ int number_of_block() {
  return static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
}

// The piece of a block by its number; without `pieces`, a tile.
__device__ __forceinline__ AttentionPiece piece_of(const AttentionParams& p, int number,
                                                   int rows_per_tile, bool reports) {
  if (p.pieces) return reinterpret_cast<const AttentionPiece*>(p.pieces)[number];
  return whole_tile(p, number, rows_per_tile, reports);
}

// Let the list of a tile's keys begin with a whole block, and have another behind its sinks.
__device__ __forceinline__ void list_whole_blocks(const AttentionParams& p, AttentionTile& t) {
  t.first_key = t.first_key / p.key_block * p.key_block;
  if (t.sinks == 0) return;
  t.sinks = (t.sinks_end + p.key_block - 1) / p.key_block * p.key_block;
  if (t.first_key <= t.sinks) t.first_key = t.sinks = 0;  // no gap between them
}

// `reports`: whether this thread reports a sequence that is longer than its block table.
__device__ __forceinline__ AttentionTile find_tile(const AttentionParams& p,
                                                   const AttentionPiece& piece, int rows_per_tile,
                                                   bool reports) {
  AttentionTile t{};
  if (piece.sequence < 0) return t;
  t.state = piece.parts > 1 ? piece.state : -1;
  t.sequence = piece.sequence;
  t.first_token = t.sequence;
  t.num_new = 1;
  if (p.cu_query_lens) {
    t.first_token = query_start(p, t.sequence);
    t.num_new = query_start(p, t.sequence + 1) - t.first_token;
  }
  const i64 rows = i64{t.num_new} * p.group;
  t.first_row = piece.first_row;
  if (t.first_row >= rows) return t;
  t.num_rows = static_cast<int>(min(rows - t.first_row, i64{rows_per_tile}));
  const i64 length = seq_len_of(p, t.sequence);
  t.seq_len = length < 0 ? -1 : length;  // whose positions are negative, and which has no keys
  const i64 most = keys_before(p, t, p.max_pages * p.page_size);
  t.num_keys = length < 0 ? 0 : length;
  if (t.num_keys > most) {
    if (reports && t.first_row == 0 && piece.part == 0) {
      report_fault(p.faults, p.length_operation, t.sequence, t.seq_len);
    }
    t.num_keys = most;
  }
  i64 end = t.num_keys;
  const i64 first_tree = first_tree_key(p, t);
  if (p.causal && first_tree == kNoTree) {
    const i64 last = own_key(p, t, t.num_rows - 1) + 1;
    end = last < 0 ? 0 : last < end ? last : end;
  }
  const i64 start = key_start(p, t);
  t.first_key = start < end ? start : end;
  if (p.window) {
    i64 first = lowest_position(p, t, 0) - p.window + 1;
    if (first > first_tree) first = first_tree;  // the window does not apply where the mask does
    if (first > t.first_key) t.first_key = first < end ? first : end;
    const i64 kept = (p.sink_keys < t.first_key ? p.sink_keys : t.first_key) - start;
    t.sinks = kept < 0 ? 0 : kept;
  }
  t.sinks_end = start + t.sinks;
  t.seen_from = t.first_key;
  if (p.key_block) list_whole_blocks(p, t);
  t.num_visible = t.sinks + end - t.first_key;
  return t;
}

// Whether a key that is listed is one that the tile sees.
__device__ __forceinline__ bool is_in_view(const AttentionParams& p, const AttentionTile& t,
                                           i64 key) {
  if (!p.key_block) return true;
  return key >= key_start(p, t) && (key < t.sinks_end || key >= t.seen_from);
}

// The visible keys of a piece, by number: from `begin` to before `end`.
struct KeyRange {
  i64 begin;
  i64 end;
};

// Parts begin at whole steps of `step` keys.
__device__ __forceinline__ KeyRange keys_of(const AttentionPiece& piece, const AttentionTile& t,
                                            int step) {
  if (piece.parts <= 1) return {0, t.num_visible};
  const i64 steps = (t.num_visible + step - 1) / step;
  KeyRange range;
  range.begin = steps * piece.part / piece.parts * step;
  range.end = min(steps * (piece.part + 1) / piece.parts * step, t.num_visible);
  return range;
}

__device__ __forceinline__ i64 key_of(const AttentionParams& p, const AttentionTile& t, i64 i) {
  if (i >= t.sinks) return i - t.sinks + t.first_key;
  return p.key_block ? i : i + key_start(p, t);
}

// Whether a query of negative position sees no key. Without a mask, all queries see all keys.
__device__ __forceinline__ bool position_counts(const AttentionParams& p, i64 first_tree) {
  return p.causal || p.window || first_tree != kNoTree;
}

// Keys from `start` to before `end`.
struct RowLimits {
  i64 start;
  i64 end;
};

// The keys that rows at positions from `lowest` to `highest` all see: no tree's, and none that is
// kept past the window.
__device__ __forceinline__ RowLimits limits_of(const AttentionParams& p, const AttentionTile& t,
                                               i64 lowest, i64 highest) {
  const i64 first_tree = first_tree_key(p, t);
  RowLimits limits = {0, t.num_keys};
  if (p.window) limits.start = highest - p.window + 1;
  if (p.causal && limits.end > lowest + 1) limits.end = lowest + 1;
  if (limits.end > first_tree) limits.end = first_tree;
  if (lowest < 0 && position_counts(p, first_tree)) limits.end = -1;
  return limits;
}

// Likewise of rows from `first` to `last`.
__device__ __forceinline__ RowLimits limits_of_rows(const AttentionParams& p,
                                                    const AttentionTile& t, int first, int last) {
  const bool in_tree = windows_in_tree(p, first_tree_key(p, t));
  const i64 highest = in_tree ? t.seq_len - 1 : own_key(p, t, last);
  return limits_of(p, t, lowest_position(p, t, first), highest);
}

__device__ __forceinline__ RowLimits seen_by_all(const AttentionParams& p, const AttentionTile& t) {
  return limits_of_rows(p, t, 0, t.num_rows - 1);
}

// Whether the query of a packed row sees a key that the tile sees.
__device__ __forceinline__ bool sees(const AttentionParams& p, const AttentionTile& t, int row,
                                     i64 key) {
  const int token = (t.first_row + row) / p.group;
  const i64 own = t.seq_len - t.num_new + token;
  const i64 first_tree = first_tree_key(p, t);
  if (key >= t.num_keys || (own < 0 && position_counts(p, first_tree))) return false;
  if (key >= first_tree) {
    const i64 column = key - first_tree;
    const char* mask = p.tree_mask + (t.first_token + token) * p.mask_row_bytes;
    if (column >= p.mask_columns || !mask[column * p.mask_column_bytes]) return false;
    if (!p.tree_positions) return true;
  } else if (p.causal && key > own) {
    return false;
  }
  if (!p.window) return true;
  const i64 position = key_position(p, t, key, first_tree);
  return position < p.sink_keys || position > position_of(p, t, row) - p.window;
}

__device__ __forceinline__ i64 entry_of(const AttentionParams& p, i64 place) {
  return p.page_shift >= 0 ? place >> p.page_shift : place / p.page_size;
}

// The page of a place as the block table has it.
__device__ __forceinline__ i64 load_page(const AttentionParams& p, const AttentionTile& t,
                                         i64 place) {
  const char* row = p.block_table + t.sequence * p.table_row_bytes;
  return load_index(row + entry_of(p, place) * p.table_entry_bytes, p.table_index_bytes);
}

// A page from the block table, or -1 for an unused entry. The thread that `reports` reports one
// past the end.
__device__ __forceinline__ i64 check_page(const AttentionParams& p, const AttentionTile& t,
                                          i64 place, i64 page, bool reports) {
  if (page >= p.num_pages) {
    if (reports) {
      report_fault(p.faults, p.table_operation, t.sequence * p.max_pages + entry_of(p, place),
                   page);
    }
    return -1;
  }
  return page < 0 ? -1 : page;
}

__device__ __forceinline__ i64 page_of(const AttentionParams& p, const AttentionTile& t, i64 place,
                                       bool reports) {
  return check_page(p, t, place, load_page(p, t, place), reports);
}

__device__ __forceinline__ i64 offset_in_page(const AttentionParams& p, i64 place) {
  return p.page_shift >= 0 ? place & ((i64{1} << p.page_shift) - 1) : place % p.page_size;
}

__device__ __forceinline__ const char* row_of(const char* cache, const KVOperand& operand, i64 page,
                                              i64 offset, int head) {
  return cache + page * operand.cache.page_bytes + offset * operand.cache.offset_bytes +
         head * operand.cache.head_bytes;
}

// The factor of a row's elements.
__device__ __forceinline__ float scale_of_row(const char* scale, const char* scale_cache,
                                              const KVOperand& operand, i64 slot, int head) {
  return scale_cache ? *scale_address(const_cast<char*>(scale_cache), operand, slot, head)
                     : static_scale(scale, operand, head);
}

// A score (q . k, times the scale of k) as a power of two.
__device__ __forceinline__ float logit_of(const AttentionParams& p, float dot) {
  const float score = dot * p.score_scale;
  return p.soft_cap > 0.0f ? p.cap_scale * tanhf(score * p.inverse_cap) : score;
}
