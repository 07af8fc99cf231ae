// One store of bf16 rows into an fp8_e4m3 cache, as a program for another processor: rows on
// standard input, then cache and scales on standard output. test_compilers.py compiles it with
// RUNNER and KERNEL.
#include <stdio.h>

#include "host/runner.h"
#include "store.cu"

KVCUPY_HOST_KERNEL(RUNNER, CacheRowsParams, KERNEL)

constexpr int kTokens = 6;
constexpr int kHeads = 2;
constexpr int kWidth = 64;
constexpr int kSlots = 8;

alignas(64) static bfloat16 rows[kTokens][kHeads][kWidth];
alignas(64) static fp8_e4m3 cache[kSlots][kHeads][kWidth];
static float scales[kSlots][kHeads];
static i64 slots[kTokens] = {3, -1, 0, 7, kSlots, 5};  // one skipped, one past the end
static FaultRecord faults;

int main() {
  if (fread(rows, sizeof rows, 1, stdin) != 1) return 2;
  CacheRowsParams p{};
  p.key = p.value = reinterpret_cast<char*>(rows);
  p.k_cache = p.v_cache = reinterpret_cast<char*>(cache);
  p.k_scale_cache = reinterpret_cast<char*>(scales);
  p.slots = reinterpret_cast<const char*>(slots);
  p.faults = &faults;
  p.k.token_bytes = sizeof rows[0];
  p.k.head_bytes = sizeof rows[0][0];
  p.k.cache.page_bytes = sizeof cache[0];
  p.k.cache.head_bytes = sizeof cache[0][0];
  p.k.scale_cache_slot_bytes = sizeof scales[0];
  p.k.scale_cache_head_bytes = sizeof scales[0][0];
  p.k.scale = 0.3f;
  p.k.width = kWidth;
  p.slot_stride_bytes = sizeof slots[0];
  p.num_slots = kSlots;
  p.skip_slot = -1;
  p.num_rows = kTokens * kHeads;
  p.num_heads = kHeads;
  p.page_size = 1;
  p.index_bytes = sizeof slots[0];
  p.lane_shift = 3;

  kvcupy_host::Config config{};
  config.grid[0] = 3;
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.block[0] = 32;
  config.smem_bytes = 4;
  config.max_workers = 1;
  config.seed = 7;
  if (const int status = kvcupy_launch(&p, &config)) return status;
  if (faults.count != 1 || faults.value != kSlots) return 3;
  fwrite(cache, sizeof cache, 1, stdout);
  fwrite(scales, sizeof scales, 1, stdout);
}
