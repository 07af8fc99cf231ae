// A row copied by one thread, in one piece.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace kvcupy_host {

// A launch that writes this much fills a core's L2 together with what it reads. Larger launches use
// non-temporal stores, which save reading the memory that is overwritten. They are visible once
// this thread executes a locked instruction, as the runner does to take its next block.
constexpr long long kStreamedBytes = 512 << 10;

inline void copy_row(char* to, const char* from, long long bytes, bool streamed) {
#if defined(__AVX__)
  if (streamed && bytes % 128 == 0 && reinterpret_cast<size_t>(to) % 32 == 0) {
    for (long long i = 0; i < bytes; i += 128) {
      const auto* source = reinterpret_cast<const __m256i*>(from + i);
      auto* target = reinterpret_cast<__m256i*>(to + i);
      const __m256i a = _mm256_loadu_si256(source);
      const __m256i b = _mm256_loadu_si256(source + 1);
      const __m256i c = _mm256_loadu_si256(source + 2);
      const __m256i d = _mm256_loadu_si256(source + 3);
      _mm256_stream_si256(target, a);
      _mm256_stream_si256(target + 1, b);
      _mm256_stream_si256(target + 2, c);
      _mm256_stream_si256(target + 3, d);
    }
    return;
  }
#endif
  if (bytes) memcpy(to, from, bytes);
}

}  // namespace kvcupy_host
