// Matrix products of a warp and asynchronous copies (mma.cuh), on this processor.
//
// Lanes are fibers of one OS thread, so they exchange fragments through a variable of that thread.
#pragma once

namespace kvcupy_host {

constexpr int kMostThreads = 1024;

inline unsigned thread_of_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

// The elements that one lane has of A and B, as numbers.
struct Fragment {
  float a[4][2];
  float b[2][2];
};
#ifdef KVCUPY_STRICT                  // the runner's (strict.cpp)
void* fragment_memory(size_t bytes);  // the same at each call
inline Fragment* fragments_of_block() {
  return static_cast<Fragment*>(fragment_memory(kMostThreads * sizeof(Fragment)));
}
void require_matrix_row(const char* row);
// The exchange buffer is not memory of the kernel.
#define KVCUPY_UNWATCHED __attribute__((no_sanitize("thread"), no_sanitize("alignment")))
#else
static thread_local Fragment fragments_of_threads[kMostThreads];
inline Fragment* fragments_of_block() { return fragments_of_threads; }
inline void require_matrix_row(const char*) {}
#define KVCUPY_UNWATCHED
#endif

inline Fragment* fragments_of_warp() {
  return fragments_of_block() + thread_of_block() / warpSize * warpSize;
}

template <typename T>
KVCUPY_UNWATCHED inline void unpack(u32 pair, float (&numbers)[2]) {
  T elements[2];
  memcpy(elements, &pair, sizeof pair);
  numbers[0] = to_float(elements[0]);
  numbers[1] = to_float(elements[1]);
}

// Products are exact in float32; they are summed one after another, as a GPU may not do.
template <typename T>
KVCUPY_UNWATCHED inline void multiply_in_warp(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Fragment* fragments = fragments_of_warp();
  const int self = lane();
  for (int i = 0; i < 4; ++i) unpack<T>(a[i], fragments[self].a[i]);
  unpack<T>(b0, fragments[self].b[0]);
  unpack<T>(b1, fragments[self].b[1]);
  warp_barrier(0xffffffffu, WarpCall::kProduct);  // the fragments of all lanes are there
  const Fragment* row = fragments + self / 4 * 4;
  for (int i = 0; i < 4; ++i) {
    const int below = i / 2;  // rows g + 8 are in the odd pairs of A
    const Fragment* column = fragments + (self % 4 * 2 + i % 2) * 4;
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2;
      c[i] += row[owner].a[k / 8 * 2 + below][k % 2] * column[owner].b[k / 8][k % 2];
    }
  }
  warp_barrier(0xffffffffu, WarpCall::kProduct);  // and no longer needed
}

KVCUPY_UNWATCHED inline void load_matrices_in_warp(u32 (&to)[4], const char* row, bool transposed) {
  unsigned long long* rows = warp_exchange();
  const int self = lane();
  require_matrix_row(row);
  memcpy(&rows[self], &row, sizeof row);
  warp_barrier(0xffffffffu, WarpCall::kLoadMatrices);  // the rows of all lanes are named
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned short pair[2];
    for (int i = 0; i < 2; ++i) {
      const int r = transposed ? self % 4 * 2 + i : self / 4;
      const int column = transposed ? self / 4 : self % 4 * 2 + i;
      const char* start;
      memcpy(&start, &rows[matrix * 8 + r], sizeof start);
      memcpy(&pair[i], start + column * 2, sizeof pair[i]);
    }
    memcpy(&to[matrix], pair, sizeof pair);
  }
  warp_barrier(0xffffffffu, WarpCall::kLoadMatrices);  // and have been read
}

// --- Copies --------------------------------------------------------------------------------------
// Copies are made when the thread waits for them: a read before that sees the old contents.

#ifdef KVCUPY_STRICT  // the runner's (strict.cpp)
void begin_copy(char* to, const char* from, bool exist, int bytes);
void commit_copies();
void wait_for_groups(unsigned left);
void finish_copies();
#else
struct Copy {
  char* to;
  const char* from;  // null: zeros
  unsigned group;
  int bytes;
};
struct Copies {
  static constexpr int kMost = 32;  // more are made at once
  unsigned group;                   // the one that the next copy belongs to
  int count;
  Copy begun[kMost];
};
static thread_local Copies copies_of_block[kMostThreads];

inline void make_copy(const Copy& copy) {
  if (copy.from) {
    memcpy(copy.to, copy.from, copy.bytes);
  } else {
    memset(copy.to, 0, copy.bytes);
  }
}

inline void begin_copy(char* to, const char* from, bool exist, int bytes) {
  Copies& copies = copies_of_block[thread_of_block()];
  const Copy copy{to, exist ? from : nullptr, copies.group, bytes};
  if (copies.count == Copies::kMost) {
    make_copy(copy);
  } else {
    copies.begun[copies.count++] = copy;
  }
}

inline void commit_copies() { ++copies_of_block[thread_of_block()].group; }

// Make all copies except the `left` groups that were committed last.
inline void wait_for_groups(unsigned left) {
  Copies& copies = copies_of_block[thread_of_block()];
  int kept = 0;
  for (int i = 0; i < copies.count; ++i) {
    const Copy copy = copies.begun[i];
    if (copy.group + left >= copies.group) {
      copies.begun[kept++] = copy;
    } else {
      make_copy(copy);
    }
  }
  copies.count = kept;
}

inline void finish_copies() {
  commit_copies();
  wait_for_groups(0);
}
#endif

}  // namespace kvcupy_host
