// What runs before attention: where the rows of each sequence begin in a ragged query, and which
// pieces of which tiles the blocks take.
//
// Blocks get pieces of about equal length, whatever the lengths of sequences: a long one is cut,
// and short ones are not. The grid is as large as any lengths may need, so that a captured launch
// serves all of them; blocks without a piece return at once. Everything here is integers in a fixed
// order, so equal lengths give equal pieces.
//
// Bytes: the lengths of all sequences, several times, and each piece once.
#include "attention.cuh"
#include "split_tile.cuh"

// Exclusive prefix sum of query lengths: where the rows of each sequence begin in a ragged query,
// and where the last ends. One warp scans all lengths.
struct AttentionStartsParams {
  const char* query_lens;  // [num_sequences] int32 or int64
  int* starts;             // [num_sequences + 1]
  FaultRecord* faults;
  i64 length_bytes;
  i64 operation;  // for the fault record
  int num_sequences;
  int num_tokens;
  int index_bytes;
};

// grid: (1), block: (kLanes), smem: 0
template <int kLanes>
__global__ void attention_starts(const __grid_constant__ AttentionStartsParams p) {
  static_assert(kLanes == 32 || kLanes == 1, "one warp, or one thread");
  constexpr i64 kMost = 0x7fffffff;
  const int lane = threadIdx.x;
  i64 before = 0;
  for (int first = 0; first < p.num_sequences; first += kLanes) {
    const int sequence = first + lane;
    const bool active = sequence < p.num_sequences;
    i64 query_len = 0;
    if (active) query_len = load_index(p.query_lens + sequence * p.length_bytes, p.index_bytes);
    const i64 length = max(i64{0}, min(query_len, kMost));  // so that no sum of them overflows
    i64 end = length;
    if constexpr (kLanes == 32) {
      for (int distance = 1; distance < 32; distance *= 2) {
        const i64 other = __shfl_up_sync(kAllLanes, end, distance);
        if (lane >= distance) end += other;
      }
    }
    const i64 start = before + end - length;
    if (active) p.starts[sequence] = static_cast<int>(start < kMost ? start : kMost);
    if (active && (query_len < 0 || before + end > p.num_tokens)) {
      report_fault(p.faults, p.operation, sequence, query_len);
    }
    if constexpr (kLanes == 32) {
      before += __shfl_sync(kAllLanes, end, 31);
    } else {
      before += end;
    }
  }
  if (lane == 0) {
    p.starts[p.num_sequences] = static_cast<int>(before < kMost ? before : kMost);
  }
}

// --- Pieces --------------------------------------------------------------------------------------

constexpr int kCandidates = 32;    // lengths of pieces that are tried
constexpr int kSteps = 8;          // of them that double the length
constexpr int kKnownTiles = 2048;  // whose keys stay in shared memory

// A tile by its number, which may be past all of them.
__device__ __forceinline__ AttentionTile tile_of(const AttentionParams& p, int number,
                                                 bool reports = false) {
  if (number >= p.num_tiles) return {};
  return find_tile(p, whole_tile(p, number, p.tile_rows, reports), p.tile_rows, false);
}

__device__ __forceinline__ i64 visible_keys(const AttentionTile& t) {
  return t.num_rows == 0 ? -1 : t.num_visible;
}

__device__ __forceinline__ i64 divide_up(i64 dividend, i64 divisor) {
  return (dividend + divisor - 1) / divisor;
}

__device__ __forceinline__ int parts_of(i64 keys, i64 piece_keys) {
  if (keys < 0) return 0;
  return max(1, static_cast<int>(divide_up(keys, piece_keys)));
}

template <int kLanes>
__device__ __forceinline__ void wait_for_block() {
  if constexpr (kLanes == 32) __syncthreads();
}

// The sum within groups of kLanes neighbouring threads.
template <int kLanes>
__device__ __forceinline__ i64 sum_of_lanes(i64 value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

template <int kLanes>
__device__ __forceinline__ i64 most_of_lanes(i64 value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// The lanes of the warp where something holds, a bit each.
template <int kLanes>
__device__ __forceinline__ u32 lanes_where(bool holds) {
  if constexpr (kLanes == 32) return __ballot_sync(kAllLanes, holds);
  return holds;
}

template <int kLanes>
__device__ __forceinline__ int from_lane(int value, int lane) {
  if constexpr (kLanes == 32) return __shfl_sync(kAllLanes, value, lane);
  return value;
}

// The least length of pieces that is tried. Few keys are shared out evenly; many are cut finer, as
// whole short sequences beside them leave gaps that small pieces fill.
__device__ __forceinline__ i64 least_piece_keys(const AttentionParams& p, i64 total) {
  const i64 fair = divide_up(total, p.num_running);
  const i64 pieces = i64{p.num_running} * p.most_rounds;
  const i64 keys = fair > p.least_keys ? max(divide_up(total, pieces), i64{p.least_keys}) : fair;
  return max(keys, i64{p.min_keys});
}

// The length of pieces that is tried as number `c`: longer ones need fewer states and merges.
__device__ __forceinline__ i64 candidate(i64 least, int c) {
  return (least + least * (c % kSteps) / kSteps) << (c / kSteps);
}

// grid: (1), block: (kThreads), smem: 0
template <int kThreads>
__global__ void attention_schedule(const __grid_constant__ AttentionParams p) {
  constexpr int kLanes = kThreads == 1 ? 1 : 32;
  constexpr int kWarps = kThreads / kLanes;
  constexpr int kShare = kThreads == 1 ? 1 : kThreads / kCandidates;  // threads of a candidate
  static_assert(kShare == 1 || kShare == 16, "half a warp each, or one thread");
  __shared__ i64 sums[kWarps];
  __shared__ i64 costs[kCandidates];
  __shared__ i64 known_keys[kKnownTiles];
  const int thread = threadIdx.x;
  const int lane = thread % kLanes;
  const int warp = thread / kLanes;

  // All visible keys
  const AttentionTile first_tile = tile_of(p, thread, true);
  i64 total = max(visible_keys(first_tile), i64{0});
  known_keys[thread] = visible_keys(first_tile);
  for (int tile = thread + kThreads; tile < p.num_tiles; tile += kThreads) {
    const i64 keys = visible_keys(tile_of(p, tile, true));
    if (tile < kKnownTiles) known_keys[tile] = keys;
    total += max(keys, i64{0});
  }
  total = sum_of_lanes<kLanes>(total);
  if (lane == 0) sums[warp] = total;
  wait_for_block<kLanes>();  // the sums of all warps are there, and the keys of tiles
  total = 0;
  for (int w = 0; w < kWarps; ++w) total += sums[w];

  // Of several lengths of pieces, the first whose pieces take least time. They run in rounds that
  // take as long as the longest, and no longer than if they were handed out one by one. A piece
  // costs what it reads, and as much as a quarter of the least length to begin, to end and to be
  // merged.
  const i64 least = least_piece_keys(p, total);
  for (int c = thread / kShare; c < kCandidates; c += kThreads / kShare) {
    const i64 keys = candidate(least, c);
    i64 count = 0;
    i64 longest = 0;
    for (int tile = thread % kShare; tile < p.num_tiles; tile += kShare) {
      const i64 own = tile < kKnownTiles ? known_keys[tile] : visible_keys(tile_of(p, tile));
      const int parts = parts_of(own, keys);
      count += parts;
      longest = max(longest, parts > 1 ? divide_up(own, parts) : own);
    }
    count = sum_of_lanes<kShare>(count);
    longest = most_of_lanes<kShare>(longest);
    const i64 rounds = divide_up(count, p.num_running);
    const i64 time = min(rounds * longest, divide_up(total, p.num_running) + longest);
    if (thread % kShare == 0) costs[c] = time + rounds * (p.least_keys / 4);
  }
  wait_for_block<kLanes>();  // the costs are there, and the sums are no longer needed
  int best = 0;
  for (int c = 1; c < kCandidates; ++c) {
    if (costs[c] < costs[best]) best = c;
  }
  const i64 keys = candidate(least, best);

  // Parts of split tiles from the first piece on, whole tiles from the last piece back: with a
  // causal mask the last tiles of a sequence take longest, and should begin first.
  auto* pieces = reinterpret_cast<AttentionPiece*>(p.pieces);
  auto* split_tiles = reinterpret_cast<SplitTile*>(p.split_tiles);
  int num_parts = 0;
  int num_split = 0;
  int num_whole = 0;
  for (int first = 0; first < p.num_tiles; first += kThreads) {
    const AttentionTile t = first == 0 ? first_tile : tile_of(p, first + thread);
    const int parts = parts_of(visible_keys(t), keys);
    // Three counts in one number: split tiles and whole ones are at most kThreads.
    const i64 own = parts > 1 ? (i64{parts} << 32) + (1 << 16) : parts;
    i64 until = own;
    if constexpr (kLanes == 32) {
      for (int distance = 1; distance < 32; distance *= 2) {
        const i64 other = __shfl_up_sync(kAllLanes, until, distance);
        if (lane >= distance) until += other;
      }
      if (lane == 31) sums[warp] = until;
      wait_for_block<kLanes>();  // the sums of all warps are there
    } else {
      sums[0] = own;
    }
    i64 all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) until += sums[w];
      all += sums[w];
    }
    const i64 before = until - own;
    const int state = num_parts + static_cast<int>(before >> 32);
    if (parts > 1) {
      const int number = num_split + static_cast<int>(before >> 16 & 0xffff);
      if (split_tiles) {
        split_tiles[number] = {t.first_token * p.group + t.first_row, t.num_rows, parts, state};
      }
    } else if (parts == 1) {
      const int rank = num_whole + static_cast<int>(before & 0xffff);
      pieces[p.num_pieces - 1 - rank] = {t.sequence, t.first_row, 0, 1, 0};
    }
    u32 cut = lanes_where<kLanes>(parts > 1);
    for (; cut != 0; cut &= cut - 1) {  // a warp writes the parts of each of its tiles
      const int of = __ffs(static_cast<int>(cut)) - 1;
      const int count = from_lane<kLanes>(parts, of);
      const int begin = from_lane<kLanes>(state, of);
      const int sequence = from_lane<kLanes>(t.sequence, of);
      const int first_row = from_lane<kLanes>(t.first_row, of);
      for (int part = lane; part < count; part += kLanes) {
        pieces[begin + part] = {sequence, first_row, static_cast<unsigned short>(part),
                                static_cast<unsigned short>(count), begin + part};
      }
    }
    num_parts += static_cast<int>(all >> 32);
    num_split += static_cast<int>(all >> 16 & 0xffff);
    num_whole += static_cast<int>(all & 0xffff);
    wait_for_block<kLanes>();  // the sums are no longer needed
  }
  for (int i = num_parts + thread; i < p.num_pieces - num_whole; i += kThreads) {
    pieces[i] = {-1, 0, 0, 1, 0};
  }
  for (int i = num_split + thread; split_tiles && i < p.num_split_tiles; i += kThreads) {
    split_tiles[i] = {0, 0, 0, 0};
  }
  // The workspace may hold anything.
  auto* counters = reinterpret_cast<u32*>(p.counters);
  for (int i = thread; counters && i < num_parts * (p.num_heads / p.group); i += kThreads) {
    counters[i] = 0;
  }
}
