// rope_store of rope.cu by one thread for some heads of a token: it goes through whole rows, which
// takes half as long as the path of whole rows that a warp shares.
#pragma once

namespace kvcupy_host {

struct RowEncoder {
  template <typename T, typename TFormat, int kCount>
  static void store(const char* in, float scale, int width, int, bool active, const FourBitRow& row,
                    const KVOperand& operand, int, bool, int, int) {
    constexpr int kLoads = kCount > 1 ? kCodesPerThread : 1;
    if (active) store_row_alone<T, TFormat, kLoads>(in, scale, width, row, operand);
  }
};

// Load both elements of pairs from a row of T; interleaved, they are neighbors.
template <bool kInterleaved, typename T, int kCount>
inline void load_pairs(const char* row, int distance, Pack<T, kCount>& x, Pack<T, kCount>& y) {
  if constexpr (kInterleaved) {
    Pack<T, 2 * kCount> both;
    both.load(row);
    split(both, x, y);
  } else {
    x.load(row);
    y.load(row + distance * static_cast<int>(sizeof(T)));
  }
}

// The rows of a span of heads, one after another.
template <bool kInterleaved, typename T, typename TCache, int kCount>
inline void rotate_rows(const RopeParams& p, const HeadSpan& span) {
  if (span.count <= 0 || span.segment > 0) return;
  constexpr int kBytes = sizeof(T);
  constexpr int kCacheBytes = sizeof(TCache);
  const int token = span.token;
  const TokenIndices indices = begin_indices(p, token);
  Angles angles = {};
  if (!find_angles(p, token, indices, span.reports & kReportPositions, angles)) return;
  const i64 slot = find_slot(p, token, indices, span.reports & kReportSlots);
  const char* in = span.first_row(p);
  char* live = span.first_live(p);
  char* cached = span.first_cached(p, span.is_query ? -1 : slot);
  if (span.is_value && !cached) return;  // there may be no row
  const i64 stride = span.row_stride(p);
  const i64 live_stride = span.live_stride(p);
  const i64 cached_stride = span.operand(p).cache.head_bytes;
  const int width = span.is_value ? p.v.width : p.head_dim;
  const int pairs = span.is_value ? 0 : p.rotary_dim / 2;
  const int element_step = p.interleaved ? 2 : 1;
  const int distance = p.interleaved ? kCount : pairs;
  const bool has_sections = p.sections != kNoSections;

  for (int head = 0; head < span.count; ++head) {
    const ScaleDivisor divisor(kQuantized<TCache> && !span.is_query ? span.scale(p, head) : 1.0f);
    const bool copies = live && live != in;
    for (int pair = 0; pair < pairs; pair += kCount) {
      const int element = element_step * pair;
      Pack<float, kCount> cosine;
      Pack<float, kCount> sine;
      if (has_sections) {
        load_angles(p, angles, pair, cosine, sine);
      } else {  // what the stores below cannot change stays in registers
        cosine.load(angles.first + pair * static_cast<int>(sizeof(float)));
        sine.load(angles.first + (pairs + pair) * static_cast<int>(sizeof(float)));
      }
      Pack<T, kCount> x;
      Pack<T, kCount> y;
      load_pairs<kInterleaved>(in + element * kBytes, distance, x, y);
      rotate(to_floats(x), to_floats(y), cosine, sine, x, y);
      if constexpr (kInterleaved && kSameType<T, TCache>) {
        const Pack<T, 2 * kCount> both = merge(x, y);
        if (live) both.store(live + element * kBytes);
        if (cached) both.store(cached + element * kBytes);
        continue;
      }
      if (live) store_pairs<kInterleaved>(live + element * kBytes, distance, x, y);
      if (cached) {
        store_pairs<kInterleaved>(cached + element * kCacheBytes, distance,
                                  to_cache<T, TCache>(x, divisor), to_cache<T, TCache>(y, divisor));
      }
    }
    for (int i = 0; 2 * pairs + i < width; i += kCount) {
      const int element = 2 * pairs + i;
      Pack<T, kCount> x;
      x.load(in + element * kBytes);
      if (copies) x.store(live + element * kBytes);
      if (cached) to_cache<T, TCache>(x, divisor).store(cached + element * kCacheBytes);
    }
    in += stride;
    if (live) live += live_stride;
    if (cached) cached += cached_stride;
  }
}

template <typename T, typename TCache, int kCount, bool kReduce>
__global__ void rope_store(RopeParams p) {
  HeadSpan span(p);
  if constexpr (kReduce) {
    rotate_head<T, TCache, kCount, RowEncoder>(p, span);
  } else if (kCount > 1 && p.interleaved) {
    rotate_rows<true, T, TCache, kCount>(p, span);
  } else {
    rotate_rows<false, T, TCache, kCount>(p, span);
  }
}

}  // namespace kvcupy_host
