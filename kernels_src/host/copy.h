// A row copied by one thread, in one piece.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace kvcupy_host {

// A launch that writes this much would leave little else in a last-level cache. It uses
// non-temporal stores, which save reading the memory that is overwritten. They are visible once
// this thread executes a locked instruction, as the runner does to take its next block.
constexpr long long kStreamedBytes = 12 << 20;

// How far ahead of the row that is copied rows are fetched that are in no order.
constexpr int kFetchedBytes = 4096;

// Copy a row, and meanwhile fetch another that is as long. `ahead` may be null: no fetch.
template <bool kStreamed>
inline void copy_and_fetch(char* to, const char* from, const char* ahead, long long bytes) {
  long long i = 0;
#if defined(__AVX__)
  for (; i + 128 <= bytes; i += 128) {
    if (ahead) {
      __builtin_prefetch(ahead + i);
      __builtin_prefetch(ahead + i + 64);
    }
    const auto* source = reinterpret_cast<const __m256i*>(from + i);
    auto* target = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2);
    const __m256i d = _mm256_loadu_si256(source + 3);
    if constexpr (kStreamed) {
      _mm256_stream_si256(target, a);
      _mm256_stream_si256(target + 1, b);
      _mm256_stream_si256(target + 2, c);
      _mm256_stream_si256(target + 3, d);
    } else {
      _mm256_storeu_si256(target, a);
      _mm256_storeu_si256(target + 1, b);
      _mm256_storeu_si256(target + 2, c);
      _mm256_storeu_si256(target + 3, d);
    }
  }
#endif
  if (i < bytes) memcpy(to + i, from + i, bytes - i);
}

inline void copy_row(char* to, const char* from, const char* ahead, long long bytes,
                     bool streamed) {
  if (streamed && reinterpret_cast<size_t>(to) % 32 == 0) {
    copy_and_fetch<true>(to, from, ahead, bytes);
  } else if (ahead) {
    copy_and_fetch<false>(to, from, ahead, bytes);
  } else if (bytes) {
    memcpy(to, from, bytes);
  }
}

}  // namespace kvcupy_host
