// Launches from several threads at once, each with helpers of the one pool: what the thread
// sanitizer looks at. Exit status 2 if a result is wrong.
//
// Fibers are stacks of one OS thread, of which the sanitizer need not know: it is told of no
// function's begin and end, and memory that moves between OS threads is handed over under locks.
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <vector>

#include "host/runner.h"

#include "host/pool.cpp"
#include "host_atomics.cu"
#include "host_threads.cu"
#include "pages.cu"

namespace {

constexpr int kLaunchers = 3;
constexpr int kRounds = 20;
constexpr int kBlocks = 48;
constexpr int kThreads = 64;
constexpr int kCount = kBlocks * kThreads;
constexpr int kFaulty = 32;  // one of so many copies goes to a page that is not there

FaultRecord faults;
int total;  // that all launches add to

void check(bool right, const char* what) {
  if (right) return;
  fprintf(stderr, "wrong result: %s\n", what);
  _exit(2);
}

template <typename Params>
int launch(const Params& params, int (*run_block)(const void*, unsigned long long),
           unsigned smem_bytes, unsigned long long seed) {
  const kvcupy_host::Config config = {{kBlocks, 1, 1},    {kThreads, 1, 1}, smem_bytes, 4, seed,
                                      kvcupy_run_together};
  kvcupy_host::Grid grid{&params, &config, run_block, kBlocks};
  return kvcupy_host::run_grid(grid);
}

void launch_threads(const std::vector<int>& in, std::vector<int>& out, unsigned long long seed) {
  using namespace kvcupy_host;
  const ThreadsParams params = {in.data(), out.data(), nullptr, kCount, 3 * kThreads + 7};
  check(
      launch(params, run_fiber_block<ThreadsParams, tree_sum<kThreads>>, 4 * kThreads, seed) == kOk,
      "status of sums");
  for (int block = 0; block < kBlocks; ++block) {
    int sum = 0;
    for (int i = 0; i < kThreads; ++i) sum += in[block * kThreads + i];
    check(out[block] == sum, "sums");
  }
  check(launch(params, run_fiber_block<ThreadsParams, reverse_static<kThreads>>, 0, seed) == kOk,
        "status of reversed blocks");
  for (int i = 0; i < kCount; ++i) {
    const int block = i / kThreads, thread = i % kThreads;
    check(out[i] == in[block * kThreads + kThreads - 1 - thread], "reversed blocks");
  }
  check(
      launch(params, run_fiber_block<ThreadsParams, trap_between_barriers<7>>, 0, seed) == kTrapped,
      "status of a trap");
}

void launch_atomics(const std::vector<int>& in) {
  using namespace kvcupy_host;
  const AtomicsParams params = {reinterpret_cast<const char*>(in.data()),
                                reinterpret_cast<char*>(&total), nullptr, 1};
  check(launch(params, run_plain_block<AtomicsParams, add<int>>, 0, 0) == kOk, "status of sums");
}

void launch_copies(std::vector<char>& cache) {
  constexpr int kPages = 2 * kCount;
  std::vector<int> src(kCount), dst(kCount);
  for (int i = 0; i < kCount; ++i) {
    src[i] = i;
    dst[i] = i % kFaulty ? kCount + i : kPages;
    cache[16 * i] = static_cast<char>(i % 101);
  }
  CopyPagesParams params = {};
  params.cache = cache.data();
  params.src_pages = reinterpret_cast<const char*>(src.data());
  params.dst_pages = reinterpret_cast<const char*>(dst.data());
  params.faults = &faults;
  params.page_bytes = 16;
  params.num_pages = kPages;
  params.src_stride_bytes = params.dst_stride_bytes = 4;
  params.row_words = params.piece_words = 1;
  params.num_pieces = kCount;
  params.pieces_per_row = params.rows_per_page = params.rows_1 = params.rows_2 = 1;
  params.src_index_bytes = params.dst_index_bytes = 4;
  check(launch(params, kvcupy_host::run_plain_block<CopyPagesParams, copy_pages<16>>, 0, 0) ==
            kvcupy_host::kOk,
        "status of copies");
  for (int i = 0; i < kCount; ++i) {
    check(cache[16 * (kCount + i)] == (i % kFaulty ? i % 101 : 0), "copies");
  }
}

void* run(void* number) {
  const auto first = static_cast<int>(reinterpret_cast<size_t>(number));
  std::vector<int> in(kCount), out(kCount);
  std::vector<char> cache(32 * kCount);
  for (int i = 0; i < kCount; ++i) in[i] = first + i % 13;
  for (int round = 0; round < kRounds; ++round) {
    launch_threads(in, out, first + round);
    launch_atomics(in);
    launch_copies(cache);
  }
  return nullptr;
}

}  // namespace

int main() {
  pthread_t threads[kLaunchers];
  int expected = 0;
  for (size_t i = 0; i < kLaunchers; ++i) {
    pthread_create(&threads[i], nullptr, run, reinterpret_cast<void*>(i));
    for (int k = 0; k < kCount; ++k) expected += kRounds * (static_cast<int>(i) + k % 13);
  }
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  check(total == expected, "the sum of all launches");
  check(faults.count == kLaunchers * kRounds * kCount / kFaulty, "the faults");
  puts("all done");
  return 0;
}
