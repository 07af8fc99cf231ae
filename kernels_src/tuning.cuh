// Numbers that were measured on a chip, or that follow from the registers which its compiler needs,
// each with its reason. Those that Python plans with have mirrors there: ops/attention_kernels.py,
// ops/store.py, ops/rope.py and ops/transfer_kernels.py name them.
#pragma once

// --- Copies --------------------------------------------------------------------------------------

// Words of a row that a thread has in flight: 64 bytes of K and of V hide the latency of memory.
constexpr int kCopyWords = 4;

// Packs of a row that a lane of store_dynamic holds: 32 bytes, so that rows of 16 bits need no
// second read, and registers stay below 64.
template <typename T>
constexpr int kHeldPacksOfRow = sizeof(T) > 2 ? 1 : 2;

// --- RoPE ----------------------------------------------------------------------------------------

constexpr int kRopeThreads = 128;  // of a block, at most

// Heads whose rows a thread holds at once: two packs of each, 64 bytes in all. Four heads with 96
// registers took as long on an H100, and 13 % longer to fp8.
template <typename T>
constexpr int kHeldHeads = 4 / static_cast<int>(sizeof(T));

// Blocks of an SM, at least: 72 registers per thread. With a reduction 96, or 128 where rows are
// float32, which takes a few more on some GPUs.
template <typename T, typename TCache, bool kReduce>
constexpr int kRopeBlocks = kReduce ? (sizeof(T) == 4 ? 4 : 5)
                            : sizeof(T) == 2 && sizeof(TCache) == 2 && !kSameType<T, TCache> ? 6
                                                                                             : 7;

// --- Shifts --------------------------------------------------------------------------------------

constexpr int kShiftThreads = 128;  // of a block, at most

// One block, so that ptxas takes what registers it needs: else it aims at more blocks and spills.
constexpr int kShiftBlocks = 1;

// Eight blocks leave 64 registers: by itself ptxas 13.5 takes 48 on sm_100, and spills.
constexpr int kShiftFourBitBlocks = 8;

// --- Transfers -----------------------------------------------------------------------------------

// A link with microseconds of latency is kept busy by what threads have in flight: four words of K
// and of V each.
constexpr int kTransferThreads = 512;
constexpr int kTransferWords = 4;

constexpr int kConvertThreads = 256;
constexpr int kConvertBlocks = 2;  // 128 registers: what counts is what a thread has in flight

// Packs that a thread holds at a time, of K and of V: all of one row, or one each of as many rows,
// or two each of half as many.
template <typename TIn, int kCount>
constexpr int kHeldPacks = sizeof(TIn) * kCount > 16 ? 2 : 4;

// --- Merging -------------------------------------------------------------------------------------

// States whose rows a thread has in flight.
constexpr int kStatesInFlight = 8;
constexpr int kMergeWarps = 8;   // of a block, at most
constexpr int kMergeBlocks = 2;  // 128 registers, for eight states in flight

// Parts that the last block of a tile merges at once, and their bytes: to read more takes longer
// than to count again.
constexpr int kMostMerged = 64;
constexpr int kMergedBytes = 256 << 10;

// --- Attention without tensor cores --------------------------------------------------------------

constexpr int kPlainThreads = 128;
constexpr int kPlainBlocks = 2;  // with three, some specializations would spill

// Keys in flight per subwarp: as many as fit in registers besides `rows` packs of the query, whose
// elements have `bytes` in the cache. Rotated keys take twice the registers.
constexpr int plain_keys_in_flight(int rows, int bytes, bool rotates) {
  if (rotates) bytes *= 2;
  if (bytes > 4) return 1;
  if (rows == 1 && bytes < 4) return 4;
  return rows <= (rotates ? 4 : 8) ? 2 : 1;
}

// --- Decode on tensor cores ----------------------------------------------------------------------

enum class CacheKind { k16Bit, kFp8, kInt8, kNvfp4, kFourBit };

constexpr bool is_four_bit(CacheKind kind) {
  return kind == CacheKind::kNvfp4 || kind == CacheKind::kFourBit;
}

// Shared memory of an SM, at least, and what the driver takes of it for each block.
constexpr int kSharedBytes = (kArch == 0 || (kArch >= 900 && kArch < 1200) ? 228
                              : kArch == 800 || kArch == 870               ? 164
                                                                           : 100)
                             << 10;
constexpr int kReservedBytes = 1024;

// Keys of a tile. Narrow rows come in larger tiles: what is done once per tile is then done half as
// often.
constexpr int decode_tile_keys(int width, int width_v, CacheKind kind) {
  const bool is_narrow = kind != CacheKind::k16Bit && width <= 128 && width_v <= 128;
  return is_four_bit(kind) || is_narrow ? 32 : 16;
}

// Blocks of an SM: as many as registers allow without spills. Eight rows have half as many
// accumulators as 16.
constexpr int decode_blocks(int rows, int width, CacheKind kind) {
  if (rows > 8) return width <= 64 && kind == CacheKind::k16Bit ? 4 : 2;
  if (width <= (kind == CacheKind::kNvfp4 ? 128 : 64)) return 4;
  return is_four_bit(kind) && width == 256 ? 2 : 3;
}

// Tiles that a warp has in flight, at most: more bytes did not read faster on an H100.
constexpr int most_decode_stages(int tile_bytes) {
  return tile_bytes <= 2048 ? 4 : tile_bytes <= 10240 ? 2 : 1;
}

// An A100 converts fp8 and four bits by many instructions, and more blocks hide more of those than
// more tiles do.
constexpr bool prefers_blocks_to_stages(CacheKind kind) {
  return kArch == 800 && kind != CacheKind::k16Bit && kind != CacheKind::kInt8;
}

// --- Latents -------------------------------------------------------------------------------------

constexpr int kLatentBlocks = 2;  // 255 registers

constexpr int kHeadsBlocks = 1;  // of 256 threads: sums of 32 x 128 values stay in registers
constexpr int kHeadsStages = 2;  // whose latents are 72 KB of 16 bits

// Steps of the depth whose queries stay in registers, by the keys of a tile: as many as there are
// registers besides the sums.
template <int kKeys>
constexpr int kHeldSteps = kKeys == 32 ? 3 : 4;

// --- Prefill -------------------------------------------------------------------------------------

constexpr int prefill_tile_keys(int width) { return width <= 192 ? 64 : 32; }

// Whether queries stay in registers, and blocks of an SM, by 16-row tiles of a warp.
constexpr bool holds_prefill_query(int width, int row_tiles) { return width * row_tiles <= 192; }
constexpr int prefill_blocks(int width, int row_tiles) { return width * row_tiles <= 64 ? 3 : 2; }

// Whether 32 rows per warp and a loop that is unrolled whole fit into registers. Compilers since
// CUDA 13.1 spill some.
#if defined(__CUDACC_VER_MAJOR__)
constexpr bool kFitsUnrolled = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ <= 1300;
#else
constexpr bool kFitsUnrolled = true;
#endif

// How often the loop over the depth is unrolled. Wider rows, two stages, or rotation leave too few
// registers for a loop that is unrolled whole.
constexpr int prefill_unroll(int width, int row_tiles, int stages, bool rotates) {
  const bool fits = width <= 128 && stages == 1 && !rotates && (row_tiles == 1 || kFitsUnrolled);
  return holds_prefill_query(width, row_tiles) || fits ? width / 16 : 2;
}
