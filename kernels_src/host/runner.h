// Runs a grid on this processor: KVCUPY_HOST_KERNEL exports one kernel for the host device to call.
//
// A kernel without barriers is a plain loop over the threads of a block, which the compiler sees
// whole. A kernel with barriers runs as fibers (fibers.h). Blocks are taken from a shared counter;
// long launches get more OS threads.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <time.h>

#include <new>

#define KVCUPY_RUNNER
#include "cuda_names.h"
#include "fibers.h"
#ifdef KVCUPY_STRICT
#include "watch.h"
#endif

namespace kvcupy_host {

// As `_CONFIG` in kvcupy/devices/host.py packs it.
struct Config {
  unsigned grid[3];
  unsigned block[3];
  unsigned smem_bytes;
  unsigned max_workers;
  unsigned long long seed;  // order of the threads of a block; 0: by index
  void (*run_together)(void (*work)(void*), void* argument, int helpers);  // pool.cpp's, or null
};

enum Status : int {
  kOk = 0,
  kTrapped = 1,
  kBarriersDiverge = 2,
  kBarrierInPlainKernel = 3,
  kNoMemory = 4,
  kRefused = 5,  // strict.cpp, which says why
};

constexpr long long kHelpAfterNanoseconds = 4'000;
constexpr long long kLongNanoseconds = 4 * kHelpAfterNanoseconds;

// Whether the kernel's last launch was long: then the next asks for help before its first block,
// which may take long by itself.
static bool expects_long;

struct Grid {
  const void* params;
  const Config* config;
  int (*run_block)(const void* params, unsigned long long seed);
  unsigned long long blocks;
  unsigned long long next = 0;
  int status = kOk;
#ifdef KVCUPY_STRICT
  Report* report;
#endif
};

// State of an OS thread that runs blocks. Workers are pooled between launches: allocating their
// stacks and shared memory takes longer than a small launch.
struct Worker {
  BlockRunner runner;
  BlockRunner* fibers = nullptr;  // null while a kernel without barriers runs
  char* shared = nullptr;
  size_t shared_bytes = 0;
  jmp_buf plain_exit;
  Worker* next_idle = nullptr;
#ifdef KVCUPY_STRICT
  Indices indices;
  Watch watch;
#endif
};
static thread_local Worker* worker;

static Worker* idle_workers;
static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;

inline Worker* acquire_worker() {
  pthread_mutex_lock(&idle_lock);
  Worker* taken = idle_workers;
  if (taken) idle_workers = taken->next_idle;
  pthread_mutex_unlock(&idle_lock);
  if (taken) return taken;
  void* memory = aligned_alloc(64, (sizeof(Worker) + 63) / 64 * 64);
  return memory ? new (memory) Worker : nullptr;
}

inline void release_worker(Worker* idle) {
  pthread_mutex_lock(&idle_lock);
  idle->next_idle = idle_workers;
  idle_workers = idle;
  pthread_mutex_unlock(&idle_lock);
}

[[noreturn]] inline void leave_plain(int status) { longjmp(worker->plain_exit, status); }

#ifdef KVCUPY_STRICT
void require_mask(unsigned mask, WarpCall call);
#endif

void block_barrier(Site site) {
  if (!worker->fibers) leave_plain(kBarrierInPlainKernel);
  worker->fibers->block_barrier(site);
}
void warp_barrier(unsigned mask, WarpCall call) {
  if (!worker->fibers) leave_plain(kBarrierInPlainKernel);
#ifdef KVCUPY_STRICT
  require_mask(mask, call);
#endif
  worker->fibers->warp_barrier(mask, call);
}
void trap() {
  if (!worker->fibers) leave_plain(kTrapped);
  worker->fibers->trap();
}
void* shared_memory() { return worker->shared; }
unsigned long long* warp_exchange() {
  if (!worker->fibers) leave_plain(kBarrierInPlainKernel);
  return worker->fibers->warp_exchange();
}

unsigned lanes_left(unsigned mask) {
  if (!worker->fibers) leave_plain(kBarrierInPlainKernel);
  return worker->fibers->lanes_left(mask);
}

#ifdef KVCUPY_STRICT
bool prepare_watch(size_t bytes);
unsigned long long block_in_order(const Grid& grid, unsigned long long number);
#endif

inline long long now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// Give the block its dynamic shared memory, filled with NaN patterns: it holds nothing yet.
inline bool prepare_shared(size_t bytes) {
#ifdef KVCUPY_STRICT
  return prepare_watch(bytes);
#else
  if (bytes > worker->shared_bytes) {
    free(worker->shared);
    worker->shared = static_cast<char*>(aligned_alloc(128, (bytes + 127) / 128 * 128));
    worker->shared_bytes = worker->shared ? bytes : 0;
    if (!worker->shared) return false;
  }
  if (bytes) memset(worker->shared, 0xff, bytes);
  return true;
#endif
}

#ifndef KVCUPY_STRICT
template <typename Params, void (*kKernel)(const Params)>
__attribute__((noinline)) void run_plain_threads(const Params& p) {
  for (unsigned z = 0; z < blockDim.z; ++z) {
    for (unsigned y = 0; y < blockDim.y; ++y) {
      for (unsigned x = 0; x < blockDim.x; ++x) {
        threadIdx = {x, y, z};
        kKernel(p);
      }
    }
  }
}

template <typename Params, void (*kKernel)(const Params)>
int run_plain_block(const void* params, unsigned long long) {
  worker->fibers = nullptr;
  if (const int status = setjmp(worker->plain_exit)) return status;
  run_plain_threads<Params, kKernel>(*static_cast<const Params*>(params));
  return kOk;
}

static thread_local const void* fiber_params;

template <typename Params, void (*kKernel)(const Params)>
void fiber_entry() {
#ifdef KVCUPY_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &worker->fibers->scheduler_bottom_,
                                  &worker->fibers->scheduler_bytes_);
#endif
  kKernel(*static_cast<const Params*>(fiber_params));
  worker->fibers->leave();
}

template <typename Params, void (*kKernel)(const Params)>
int run_fiber_block(const void* params, unsigned long long seed) {
  worker->fibers = &worker->runner;
  fiber_params = params;
  if (worker->fibers->run(fiber_entry<Params, kKernel>, seed)) return kOk;
  return worker->fibers->trapped() ? kTrapped : kBarriersDiverge;
}

#endif  // strict.cpp has its own

inline void set_block(const Config& config, unsigned long long block) {
  blockDim = dim3(config.block[0], config.block[1], config.block[2]);
  gridDim = dim3(config.grid[0], config.grid[1], config.grid[2]);
  blockIdx.x = static_cast<unsigned>(block % config.grid[0]);
  blockIdx.y = static_cast<unsigned>(block / config.grid[0] % config.grid[1]);
  blockIdx.z = static_cast<unsigned>(block / config.grid[0] / config.grid[1]);
}

// Take one block and run it; false when none is left or the launch has failed.
inline bool take_block(Grid& grid) {
  const unsigned long long block = __atomic_fetch_add(&grid.next, 1, __ATOMIC_RELAXED);
  if (block >= grid.blocks || __atomic_load_n(&grid.status, __ATOMIC_RELAXED) != kOk) return false;
#ifdef KVCUPY_STRICT
  worker->watch.grid = &grid;
  set_block(*grid.config, block_in_order(grid, block));
#else
  set_block(*grid.config, block);
#endif
  int status = kNoMemory;
  if (prepare_shared(grid.config->smem_bytes)) {
    const unsigned long long seed = grid.config->seed;
    status = grid.run_block(grid.params, seed ? seed + block * 0x9e3779b97f4a7c15ULL : 0);
  }
  int before = kOk;
  if (status != kOk) {  // the first failure is reported
    __atomic_compare_exchange_n(&grid.status, &before, status, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
  }
  return true;
}

// Run blocks until none is left, or until `stop_at` (0: never); false if that came first.
inline bool take_blocks(Grid& grid, long long stop_at) {
  worker = acquire_worker();
  if (!worker) {
    __atomic_store_n(&grid.status, kNoMemory, __ATOMIC_RELAXED);
    return true;
  }
  bool left = true;
  while ((left = take_block(grid)) && (!stop_at || now_ns() < stop_at)) {
  }
#ifdef KVCUPY_STRICT
  worker->watch.fixed_start = nullptr;  // of this OS thread
#endif
  release_worker(worker);
  worker = nullptr;
  return !left;
}

inline void help(void* grid) { take_blocks(*static_cast<Grid*>(grid), 0); }

inline int run_grid(Grid& grid) {
  const Config& config = *grid.config;
  const bool can_get_help = config.run_together && config.max_workers > 1 && grid.blocks > 1;
  if (!can_get_help) {
    take_blocks(grid, 0);
    return grid.status;
  }
  const long long start = now_ns();
  const bool waits = !__atomic_load_n(&expects_long, __ATOMIC_RELAXED);
  if (!waits || !take_blocks(grid, start + kHelpAfterNanoseconds)) {
    config.run_together(help, &grid, static_cast<int>(config.max_workers) - 1);
  }
  const bool was_long = now_ns() - start > kLongNanoseconds;
  if (was_long == waits) __atomic_store_n(&expects_long, was_long, __ATOMIC_RELAXED);
  return grid.status;
}

}  // namespace kvcupy_host

#ifndef KVCUPY_STRICT
// Export a kernel as `int kvcupy_launch(params, config)`.
#define KVCUPY_HOST_KERNEL(RUN_BLOCK, PARAMS, ...)                                      \
  extern "C" __attribute__((visibility("default"))) int kvcupy_launch(                  \
      const void* params, const kvcupy_host::Config* config) {                          \
    kvcupy_host::Grid grid{params, config, kvcupy_host::RUN_BLOCK<PARAMS, __VA_ARGS__>, \
                           1ULL * config->grid[0] * config->grid[1] * config->grid[2]}; \
    return kvcupy_host::run_grid(grid);                                                 \
  }
#endif
