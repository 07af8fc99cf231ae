// Attention by one thread per block, on this processor.
//
// Keys are taken in blocks. Scores of a block, and what its values add to the rows, are products of
// small matrices: a few vectors by a few numbers are summed in registers while each number that is
// loaded serves all of them. Between the two, the online softmax works on whole vectors of scores.
//
// Few rows, as in decode, read K and V where they lie, and a vector holds elements of one key. A
// block of the grid takes several heads, since the rows of neighbouring heads are neighbours in
// memory: read one head at a time, they take twice as long. Many rows have their queries
// transposed, so that a vector holds an element of several rows: scores need no sums over a vector,
// and K and V no transposition. There a block of keys is converted to float32 once for all rows.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "packs.h"

namespace kvcupy_host {

// Vectors of floats as wide as a register, and how many rows of a product fit in registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kProductRows = 4;
constexpr int kRowVectors = 4;
constexpr int kRowSums = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kProductRows = 2;
constexpr int kRowVectors = 2;
constexpr int kRowSums = 8;
#else
constexpr int kLanes = 4;
constexpr int kProductRows = 4;
constexpr int kRowVectors = 2;
constexpr int kRowSums = 8;
#endif
constexpr int kProductKeys = 4;
constexpr int kProductVectors = 4;
constexpr int kRowKeys = 8;
constexpr int kLineBytes = 64;

using Vector = float __attribute__((vector_size(4 * kLanes)));
using VectorBits = unsigned __attribute__((vector_size(4 * kLanes)));
using VectorInts = int __attribute__((vector_size(4 * kLanes)));

// GCC drops calls of functions that do nothing else, so those must be inlined.
__forceinline__ void fetch_bytes(const char* from, int bytes) {
  for (int i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(from + i);
}

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

__forceinline__ Vector spread(float x) { return x - Vector{}; }

__forceinline__ Vector load_vector(const void* from) {
  Vector to;
  memcpy(&to, from, sizeof to);
  return to;
}

__forceinline__ void store_vector(float* to, Vector vector) { memcpy(to, &vector, sizeof vector); }

// GCC 12 warns of undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// Elements of a cache as float32, `kLanes` of them.
template <typename T>
__forceinline__ Vector load_lanes(const char* from) {
  static_assert(kSameType<T, float>, "as it is");
  return load_vector(from);
}
template <>
__forceinline__ Vector load_lanes<bfloat16>(const char* from) {
  unsigned short codes __attribute__((vector_size(2 * kLanes)));
  memcpy(&codes, from, sizeof codes);
#if defined(__AVX512F__)  // GCC 12 would widen each half by itself
  return bits_as<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits_as<__m256i>(codes)), 16));
#elif defined(__AVX2__)
  return bits_as<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits_as<__m128i>(codes)), 16));
#else
  return bits_as<Vector>(__builtin_convertvector(codes, VectorBits) << 16);
#endif
}
#if defined(__F16C__)
template <>
__forceinline__ Vector load_lanes<half>(const char* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}
#endif

// Whether rows of a cache can be read where they lie.
template <typename T>
constexpr bool kReadsLanes = kSameType<T, float> || kSameType<T, bfloat16>;
#if defined(__F16C__)
template <>
constexpr bool kReadsLanes<half> = true;
#endif

// a * b + c, rounded once where the processor can.
__forceinline__ Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

#if defined(__AVX__)
__forceinline__ __m128 quarter_sums(__m256 x) {
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
#endif
#if defined(__AVX512F__)
__forceinline__ __m256 upper_half(__m512 x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
#endif

// The sums of the elements of four vectors.
__forceinline__ void store_sums(float* to, const Vector (&v)[4]) {
#if defined(__AVX512F__)
  const auto pairs = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  };
  const __m512 sums = pairs(pairs(v[0], v[1]), pairs(v[2], v[3]));
  _mm_storeu_ps(to, quarter_sums(_mm256_add_ps(_mm512_castps512_ps256(sums), upper_half(sums))));
#elif defined(__AVX__)
  const auto pairs = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  };
  _mm_storeu_ps(to, quarter_sums(pairs(pairs(v[0], v[1]), pairs(v[2], v[3]))));
#elif defined(__aarch64__)
  vst1q_f32(to, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
#else
  for (int i = 0; i < 4; ++i) to[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}
#pragma GCC diagnostic pop

__forceinline__ float sum_of(Vector v) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// 2^x to within an ulp, for an x of at most 0: a polynomial for what lies between powers of two.
// 0 where the result would be subnormal; NaN stays NaN.
__forceinline__ Vector exp2_of(Vector x) {
  constexpr float kAligner = 12582912.0f;  // 1.5 * 2**23: its last bit is worth 1
  constexpr unsigned kBias = 127;
  const Vector aligned = x + kAligner;
  const Vector rest = x - (aligned - kAligner);
  Vector power = spread(1.5345812e-4f);
  power = multiply_add(power, rest, spread(1.3399931e-3f));
  power = multiply_add(power, rest, spread(9.618489e-3f));
  power = multiply_add(power, rest, spread(5.5503286e-2f));
  power = multiply_add(power, rest, spread(2.4022646e-1f));
  power = multiply_add(power, rest, spread(6.9314718e-1f));
  power = multiply_add(power, rest, spread(1.0f));
  const auto exponents = bits_as<VectorBits>(aligned) - bits_as<unsigned>(kAligner) + kBias;
  const Vector result = power * bits_as<Vector>(exponents << 23);
  return x < -126.0f ? Vector{} : result;
}

// --- Products ------------------------------------------------------------------------------------

// Scores of kRows rows of the query by four keys: `width` is whole vectors.
template <typename T, int kRows>
inline void multiply_keys(const float* query, int query_stride, const char* const* keys, int width,
                          float* scores, int score_stride) {
  Vector sums[kRows][kProductKeys] = {};
  for (int i = 0; i < width; i += kLanes) {
    Vector k[kProductKeys];
#pragma GCC unroll 4
    for (int n = 0; n < kProductKeys; ++n) {
      k[n] = load_lanes<T>(keys[n] + i * static_cast<int>(sizeof(T)));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vector q = load_vector(query + r * query_stride + i);
#pragma GCC unroll 4
      for (int n = 0; n < kProductKeys; ++n) sums[r][n] = multiply_add(q, k[n], sums[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) store_sums(scores + r * score_stride, sums[r]);
}

// Elements of a key in float32, one after another.
struct SingleElements {
  using Element = float;
  static constexpr int kElements = 1;

  static __forceinline__ Vector add(Vector query, float key, Vector sums) {
    return multiply_add(query, spread(key), sums);
  }
};

#if defined(__AVX512BF16__)
// Pairs of elements in bf16, as they lie. Products are exact, and sums are float32; subnormal
// numbers count as zero.
struct PairsOfBfloat16 {
  using Element = unsigned;
  static constexpr int kElements = 2;

  static __forceinline__ Vector add(Vector query, unsigned key, Vector sums) {
    return _mm512_dpbf16_ps(sums, bits_as<__m512bh>(query), bits_as<__m512bh>(VectorBits{} + key));
  }
};
#endif

// Scores of kVectors vectors of rows by kKeys keys. The query has an element, or a pair, of all
// rows side by side.
template <typename Form, int kVectors, int kKeys>
inline void multiply_rows(const float* query, int query_stride, const char* const* keys, int width,
                          float* scores, int score_stride) {
  using Element = typename Form::Element;
  Vector sums[kKeys][kVectors] = {};
  for (int i = 0; i < width; i += Form::kElements) {
    Vector q[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) q[c] = load_vector(query + c * kLanes);
    query += query_stride;
#pragma GCC unroll 8
    for (int n = 0; n < kKeys; ++n) {
      Element k;
      memcpy(&k, keys[n] + i / Form::kElements * static_cast<int>(sizeof k), sizeof k);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sums[n][c] = Form::add(q[c], k, sums[n][c]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kKeys; ++n) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      store_vector(scores + n * score_stride + c * kLanes, sums[n][c]);
    }
  }
}

// The weights of rows for keys, from the weight of the first row for the first key on.
template <int kRowStride, int kKeyStride>
struct Weights {
  const float* first;

  __forceinline__ float of(int row, int key) const {
    return first[row * kRowStride + key * kKeyStride];
  }
  __forceinline__ Weights from(int row, int key) const {
    return {first + row * kRowStride + key * kKeyStride};
  }
};

struct FetchNothing {
  void operator()(int) const {}
};

// Add `count` rows of V, times weights, to kRows rows of values: kVectors vectors of each, from
// element `first` on. Meanwhile `fetch(n)` is called for each n of them.
template <typename T, int kRows, int kVectors, typename Weights, typename Fetch = FetchNothing>
inline void multiply_values(Weights weights, const char* const* rows, int count, int first,
                            float* values, int value_stride, const Fetch& fetch = {}) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      sums[r][c] = load_vector(values + r * value_stride + first + c * kLanes);
    }
  }
  for (int n = 0; n < count; ++n) {
    fetch(n);
    const char* row = rows[n] + first * static_cast<int>(sizeof(T));
    Vector v[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      v[c] = load_lanes<T>(row + c * kLanes * static_cast<int>(sizeof(T)));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vector weight = spread(weights.of(r, n));
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sums[r][c] = multiply_add(weight, v[c], sums[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      store_vector(values + r * value_stride + first + c * kLanes, sums[r][c]);
    }
  }
}

template <int kRows>
struct Rows {
  static constexpr int kCount = kRows;
};

// Call `product` for all of `count` rows, at most kMost: with the first of some, and Rows<n>.
template <int kMost, typename Product>
inline void for_rows(int count, const Product& product) {
  int r = 0;
  if constexpr (kMost >= kProductRows) {
    for (; r + kProductRows <= count; r += kProductRows) product(r, Rows<kProductRows>{});
  }
  if constexpr (kMost > 2 && kProductRows > 2) {
    if (r + 2 <= count) {
      product(r, Rows<2>{});
      r += 2;
    }
  }
  if (r < count) product(r, Rows<1>{});
}

// Add elements `first` to before `width` of rows of V to kRows rows of values.
template <typename T, int kRows, typename Weights, typename Fetch = FetchNothing>
inline void multiply_wide_values(Weights weights, const char* const* rows, int count, int first,
                                 int width, float* values, int value_stride,
                                 const Fetch& fetch = {}) {
  if (first + kProductVectors * kLanes <= width) {
    multiply_values<T, kRows, kProductVectors>(weights, rows, count, first, values, value_stride,
                                               fetch);
    first += kProductVectors * kLanes;
  }
  for (; first + kProductVectors * kLanes <= width; first += kProductVectors * kLanes) {
    multiply_values<T, kRows, kProductVectors>(weights, rows, count, first, values, value_stride);
  }
  for (; first < width; first += kLanes) {
    multiply_values<T, kRows, 1>(weights, rows, count, first, values, value_stride);
  }
}

template <typename T>
inline bool are_finite(const char* const* rows, int count, int width) {
  Vector zero{};
  for (int n = 0; n < count; ++n) {
    for (int i = 0; i < width; i += kLanes) {
      zero += load_lanes<T>(rows[n] + i * static_cast<int>(sizeof(T))) * 0.0f;
    }
  }
  return sum_of(zero) == 0.0f;
}

// --- Keys ----------------------------------------------------------------------------------------

// A row of a cache, as `Elements` loads it.
template <typename TCache>
using CachedRow = SelectType<kFourBit<TCache>, ScaledRow<TCache>, const char*>;

// Some keys that follow one another in a piece, and where they lie.
template <int kKeys>
struct KeyBlock {
  int count;        // of keys
  bool present;     // all of them are in the cache
  i64 keys[kKeys];  // ascending; negative: not in the cache, or past the last
  i64 pages[kKeys];
  i64 offsets[kKeys];  // within the page
  i64 k_bytes[kKeys];  // from the start of the cache to the row of head 0
  i64 v_bytes[kKeys];
};

// The part that all tiles have: keys of a piece in blocks, whose rows it finds, fetches and
// converts.
template <typename TCache, int kBlockKeys, int kSteps, bool kRotateKeys>
struct HostTile {
  static constexpr int kPack = 8;
  static constexpr int kWidth = round_up(kSteps * kPack, kLanes);
  static constexpr int kKeys = kBlockKeys;
  using Block = KeyBlock<kKeys>;

  const AttentionParams& p;
  const AttentionTile& t;
  bool reports;
  i64 first_tree;
  Block blocks[2];
  // The rows of a block in one head
  const char* k[kKeys];  // as products read them; zeros where there is no key
  const char* v[kKeys];
  alignas(64) float k_scales[kKeys];
  alignas(64) float v_scales[kKeys];
  alignas(64) float staged_k[kKeys][kWidth];
  alignas(64) float staged_v[kKeys][kWidth];
  alignas(64) char zeros[kWidth * 4];

  HostTile(const AttentionParams& params, const AttentionTile& tile, bool reports)
      : p(params), t(tile), reports(reports), first_tree(first_tree_key(params, tile)) {
    memset(zeros, 0, sizeof zeros);
  }

  // Rotate a row in the way that rows of a four-bit cache are rotated.
  static void rotate(float* row, const GroupScales& rotation) {
    const int block = 1 << rotation.rotation_shift;
    const float scale = rotation_scale(rotation.rotation_shift);
    for (int half = 1; half < block; half *= 2) {
      for (int first = 0; first < rotation.rotated_width; first += 2 * half) {
        for (int i = first; i < first + half; ++i) {
          const float x = row[i];
          const float y = row[i + half];
          row[i] = x + y;
          row[i + half] = x - y;
        }
      }
    }
    for (int i = 0; i < rotation.rotated_width; ++i) row[i] *= scale;
  }

  template <typename T>
  int load_packs(const char* from, float* to) const {
    int i = 0;
    for (; i + kPack <= p.k.width; i += kPack) {
      Pack<T, kPack> pack;
      pack.load(from + i * static_cast<int>(sizeof(T)));
      to_floats(pack).store(reinterpret_cast<char*>(to + i));
    }
    return i;
  }

  // Load the query of a row, with zeros behind it.
  void load_query(int r, int kv_head, float* to) const {
    const char* from = query_row(p, t, r, kv_head);
    int i = p.query_format == 0   ? load_packs<float>(from, to)
            : p.query_format == 1 ? load_packs<half>(from, to)
                                  : load_packs<bfloat16>(from, to);
    for (; i < kWidth; ++i) to[i] = i < p.k.width ? load_any(from, i, p.query_format) : 0.0f;
    rotate(to, p.k.group_scales);
  }

  // Find keys `first` to before `end` of the piece.
  void locate(Block& block, i64 first, i64 end) const {
    block.count = end - first < kKeys ? static_cast<int>(end - first) : kKeys;
    block.present = true;
    for (int n = 0; n < block.count;) {
      const i64 key = key_of(p, t, first + n);
      const i64 place = place_of(p, t, key);
      const i64 offset = offset_in_page(p, place);
      const i64 page = is_in_view(p, t, key) ? page_of(p, t, place, reports) : -1;
      const i64 most = min(i64{block.count - n}, p.page_size - offset);
      const int alike = keys_alike(key, first + n, most);
      const i64 k_bytes = page * p.k.cache.page_bytes + offset * p.k.cache.offset_bytes;
      const i64 v_bytes = page * p.v.cache.page_bytes + offset * p.v.cache.offset_bytes;
      for (int i = 0; i < alike; ++i) {
        block.keys[n + i] = page < 0 ? -1 : key + i;
        block.pages[n + i] = page;
        block.offsets[n + i] = offset + i;
        block.k_bytes[n + i] = k_bytes + i * p.k.cache.offset_bytes;
        block.v_bytes[n + i] = v_bytes + i * p.v.cache.offset_bytes;
      }
      block.present &= page >= 0;
      n += alike;
    }
    for (int n = block.count; n < kKeys; ++n) block.keys[n] = -1;
  }

  // How many keys from number `i` of the list on, at most `most`, follow one another in the cache
  // and are in view or not as the first.
  int keys_alike(i64 key, i64 i, i64 most) const {
    const auto stop_at = [&](i64 boundary) {
      if (boundary > key && boundary - key < most) most = boundary - key;
    };
    if (i < t.sinks) stop_at(key + t.sinks - i);
    if (p.evicted_starts) stop_at(count_of(p.evicted_starts, p.evicted_start_bytes, t.sequence));
    if (p.key_block) {
      stop_at(key_start(p, t));
      stop_at(t.sinks_end);
      stop_at(t.seen_from);
    }
    return static_cast<int>(most);
  }

  CachedRow<TCache> k_row(const Block& block, int n, int head) const {
    if constexpr (kFourBit<TCache>) {
      return cached_row<TCache>(p.k_cache, p.k_scale, p.k, block.pages[n], block.offsets[n], head);
    } else {
      return p.k_cache + block.k_bytes[n] + head * p.k.cache.head_bytes;
    }
  }
  CachedRow<TCache> v_row(const Block& block, int n, int head) const {
    if constexpr (kFourBit<TCache>) {
      return cached_row<TCache>(p.v_cache, p.v_scale, p.v, block.pages[n], block.offsets[n], head);
    } else {
      return p.v_cache + block.v_bytes[n] + head * p.v.cache.head_bytes;
    }
  }

  // Bytes of a row that are fetched: of four bits the codes alone, whose neighbours the scales are.
  static constexpr int bytes_of(int width) {
    if constexpr (kSameType<TCache, AnyFormat>) return 0;
    if constexpr (kFourBit<TCache>) return width / 2;
    return width * static_cast<int>(sizeof(TCache));
  }
  __forceinline__ void fetch_k(const Block& block, int n, int head) const {
    if (block.keys[n] < 0) return;
    fetch_bytes(p.k_cache + block.k_bytes[n] + head * p.k.cache.head_bytes, bytes_of(p.k.width));
  }
  __forceinline__ void fetch_v(const Block& block, int n, int head) const {
    if (block.keys[n] < 0) return;
    fetch_bytes(p.v_cache + block.v_bytes[n] + head * p.v.cache.head_bytes, bytes_of(p.v.width));
  }

  void find_scales(const Block& block, int head) {
    const float k_scale = kFourBit<TCache> ? 1.0f : static_scale(p.k_scale, p.k, head);
    const float v_scale = kFourBit<TCache> ? 1.0f : static_scale(p.v_scale, p.v, head);
    for (int n = 0; n < kKeys; ++n) {
      k_scales[n] = k_scale;
      v_scales[n] = v_scale;
    }
    if (!p.k_scale_cache && !p.v_scale_cache) return;
    for (int n = 0; n < block.count; ++n) {
      if (block.keys[n] < 0) continue;
      const i64 slot = block.pages[n] * p.page_size + block.offsets[n];
      k_scales[n] = scale_of_row(p.k_scale, p.k_scale_cache, p.k, slot, head);
      v_scales[n] = scale_of_row(p.v_scale, p.v_scale_cache, p.v, slot, head);
    }
  }

  // Let products read the rows of a block, K and V each where they lie or as float32.
  template <bool kStagesK, bool kStagesV>
  __attribute__((noinline)) void point(const Block& block, int head) {
    find_scales(block, head);
    for (int n = 0; n < kKeys; ++n) {
      if (block.keys[n] < 0) {
        k[n] = v[n] = zeros;
        continue;
      }
      if constexpr (kStagesK) {
        stage_key(k_row(block, n, head), block.keys[n], staged_k[n]);
        k[n] = reinterpret_cast<const char*>(staged_k[n]);
      } else {
        k[n] = k_row(block, n, head);
      }
      if constexpr (kStagesV) {
        stage(v_row(block, n, head), p.v.width, p.v_format, staged_v[n]);
        v[n] = reinterpret_cast<const char*>(staged_v[n]);
      } else {
        v[n] = v_row(block, n, head);
      }
    }
  }

  static __forceinline__ void stage(const CachedRow<TCache>& row, int width, int format,
                                    float* to) {
    if constexpr (kReadsLanes<TCache>) {
      if (width % kLanes == 0) {
        for (int i = 0; i < width; i += kLanes) {
          store_vector(to + i, load_lanes<TCache>(row + i * static_cast<int>(sizeof(TCache))));
        }
        return;
      }
    }
    for (int i = 0; i < kWidth; i += kPack) {
      Elements<TCache, kPack> elements;
      elements.load(row, i, width, format);
      elements.floats().store(reinterpret_cast<char*>(to + i));
    }
  }

  __forceinline__ void stage_key(const CachedRow<TCache>& row, i64 key, float* to) const {
    if constexpr (!kRotateKeys) {
      stage(row, p.k.width, p.k_format, to);
    } else {
      const float* angles = angles_of(p, t, key);
      for (int i = 0; i < kWidth; i += kPack) {
        Elements<TCache, kPack> elements;
        elements.load(row, i, p.k.width, p.k_format);
        const auto partners = load_partners<TCache, kPack>(p, row, i, p.k.width);
        const Pack<float, kPack> floats = rotated(p, elements, partners, angles, i);
        floats.store(reinterpret_cast<char*>(to + i));
      }
    }
  }

  // As `sees`, whose limits are known.
  bool is_seen(const RowLimits& limits, int r, i64 key) const {
    if (key < 0) return false;
    if (key < limits.end) return key >= limits.start || key < p.sink_keys;
    return key >= first_tree && sees(p, t, r, key);
  }

  // Call `attend(block, ahead)` for all blocks of keys; `ahead` is the next, or null.
  template <typename Attend>
  void walk(KeyRange range, const Attend& attend) {
    locate(blocks[0], range.begin, range.end);
    int current = 0;
    for (i64 first = range.begin; first < range.end; first += kKeys) {
      const Block& block = blocks[current];
      current = 1 - current;
      const Block* ahead = nullptr;
      if (first + kKeys < range.end) {
        locate(blocks[current], first + kKeys, range.end);
        ahead = &blocks[current];
      }
      attend(block, ahead);
    }
  }

  template <typename T>
  static void write(const float* values, int width, float inverse, char* to) {
    int i = 0;
    for (; i + kPack <= width; i += kPack) {
      Pack<float, kPack> floats;
      floats.load(reinterpret_cast<const char*>(values + i));
      const Pack<T, kPack> pack = from_floats<T>(products(floats, inverse));
      memcpy(to + i * static_cast<int>(sizeof(T)), pack.values, sizeof pack.values);
    }
    for (; i < width; ++i) reinterpret_cast<T*>(to)[i] = from_float<T>(values[i] * inverse);
  }

  // Write a row, from the sum of its weighted values.
  void finish_row(int r, int kv_head, float largest, float sum, float* values) const {
    const RowEnd end = end_of_row(p, t, r, kv_head, largest, sum);
    const float inverse = end.divisor != 0.0f ? 1.0f / end.divisor : 0.0f;
    rotate(values, p.v.group_scales);
    switch (end.format) {
      case 0:
        write<float>(values, p.v.width, inverse, end.out);
        break;
      case 1:
        write<half>(values, p.v.width, inverse, end.out);
        break;
      default:
        write<bfloat16>(values, p.v.width, inverse, end.out);
    }
    if (end.lse) *end.lse = end.lse_value;
  }
};

// --- Few rows ------------------------------------------------------------------------------------

constexpr int kFewRows = 8;

// A tile of few rows, of each of several heads.
template <typename TCache, int kRows, int kHeads, int kSteps, bool kRotateKeys>
struct FewRows : HostTile<TCache, (kSteps <= 32 ? 32 : 16), kSteps, kRotateKeys> {
  using Base = HostTile<TCache, (kSteps <= 32 ? 32 : 16), kSteps, kRotateKeys>;
  using Base::kKeys, Base::kWidth, Base::p, Base::t, Base::k, Base::v;
  using typename Base::Block;

  int first_head;
  int num_heads;
  RowLimits limits[kRows];
  unsigned holes[kRows];         // keys of the block that a row does not see
  float largest[kHeads][kRows];  // logit, base 2
  Vector sums[kHeads][kRows];    // of weights, against the largest
  alignas(64) float query[kHeads][kRows][kWidth];
  alignas(64) float values[kHeads][kRows][kWidth];
  alignas(64) float scores[kRows][kKeys];  // then weights

  FewRows(const AttentionParams& p, const AttentionTile& t, int first_head, int num_heads)
      : Base(p, t, first_head == 0), first_head(first_head), num_heads(num_heads) {
    for (int r = 0; r < t.num_rows; ++r) {
      const i64 position = position_of(p, t, r);
      limits[r] = limits_of(p, t, position, position);
      for (int h = 0; h < num_heads; ++h) {
        this->load_query(r, first_head + h, query[h][r]);
        memset(values[h][r], 0, sizeof values[h][r]);
        sums[h][r] = Vector{};
        largest[h][r] = -kInfinity;
      }
    }
  }

  // Rows of all heads are fetched in the order of memory: K while scores are computed, V while
  // values are. Any other order takes longer.
  struct Place {
    int key;
    int head;
  };
  Place next_place(Place place) const {
    const bool last = place.head + 1 == num_heads;
    return {place.key + last, last ? 0 : place.head + 1};
  }

  // Scores of all rows of a head; rows of K hold T.
  template <typename T>
  void score(const Block& block, int h, const Block* ahead) {
    const int width = round_up(p.k.width, kLanes);
    Place place{h * kKeys / num_heads, h * kKeys % num_heads};
    for (int n = 0; n < block.count; n += kProductKeys) {
      for (int i = 0; ahead && i < kProductKeys; ++i, place = next_place(place)) {
        this->fetch_k(*ahead, place.key, first_head + place.head);
      }
      for_rows<kRows>(t.num_rows, [&](int r, auto rows) {
        multiply_keys<T, decltype(rows)::kCount>(query[h][r], kWidth, k + n, width, scores[r] + n,
                                                 kKeys);
      });
    }
  }

  // Turn the scores of a row into weights, and raise its maximum.
  void weigh(const Block& block, int h, int r) {
    float* row = scores[r];
    for (int n = 0; n < kKeys; n += kLanes) {
      const Vector scaled = load_vector(row + n) * load_vector(this->k_scales + n);
      store_vector(row + n, scaled * p.score_scale);
    }
    if (p.soft_cap > 0.0f) {
      for (int n = 0; n < kKeys; ++n) row[n] = p.cap_scale * tanhf(row[n] * p.inverse_cap);
    }
    if (!block.present || block.count < kKeys || block.keys[0] < limits[r].start ||
        block.keys[kKeys - 1] >= limits[r].end) {
      for (int n = 0; n < kKeys; ++n) {
        if (!this->is_seen(limits[r], r, block.keys[n])) row[n] = -kInfinity;
      }
    }
    Vector most = spread(largest[h][r]);
    Vector least = spread(0.0f);
    for (int n = 0; n < kKeys; n += kLanes) {
      const Vector logits = load_vector(row + n);
      most = logits > most ? logits : most;
      least = logits < least ? logits : least;
    }
    float top = most[0];
    bool full = true;
    for (int i = 0; i < kLanes; ++i) {
      top = most[i] > top ? most[i] : top;
      full &= least[i] != -kInfinity;
    }
    holes[r] = 0;
    if (!full) {
      for (int n = 0; n < kKeys; ++n) holes[r] |= unsigned{row[n] == -kInfinity} << n;
    }
    if (top > largest[h][r]) {
      const Vector rescale = spread(exp2f(largest[h][r] - top));  // 0 where nothing was seen before
      largest[h][r] = top;
      sums[h][r] *= rescale;
      for (int i = 0; i < p.v.width; i += kLanes) {
        store_vector(values[h][r] + i, load_vector(values[h][r] + i) * rescale);
      }
    }
    const Vector origin = spread(top == -kInfinity ? 0.0f : top);
    for (int n = 0; n < kKeys; n += kLanes) {
      const Vector weights = exp2_of(load_vector(row + n) - origin);
      sums[h][r] += weights;
      store_vector(row + n, weights * load_vector(this->v_scales + n));
    }
  }

  // Add the values of a block, times weights; its rows of V hold T. A masked key adds nothing,
  // whatever its value is: products with a weight of 0 do that for numbers alone.
  template <typename T>
  void accumulate(int h, const Block* ahead) {
    const int width = round_up(p.v.width, kLanes);
    unsigned masked = 0;
    for (int r = 0; r < t.num_rows; ++r) masked |= holes[r];
    if (masked && !are_finite<T>(v, kKeys, width)) {
      for (int r = 0; r < t.num_rows; ++r) {
        for (int n = 0; n < kKeys; ++n) {
          if (holes[r] >> n & 1) continue;
          multiply_wide_values<T, 1>(WeightsOf{scores[r] + n}, v + n, 1, 0, width, values[h][r],
                                     kWidth);
        }
      }
      return;
    }
    Place place{h * kKeys / num_heads, h * kKeys % num_heads};
    for_rows<kRows>(t.num_rows, [&](int r, auto rows) {
      multiply_wide_values<T, decltype(rows)::kCount>(
          WeightsOf{scores[r]}, v, kKeys, 0, width, values[h][r], kWidth,
          [&](int) __attribute__((always_inline)) {
            if (!ahead || r > 0) return;
            this->fetch_v(*ahead, place.key, first_head + place.head);
            place = next_place(place);
          });
    });
  }
  using WeightsOf = Weights<kKeys, 1>;

  template <typename T, bool kStages>
  void attend(const Block& block, const Block* ahead) {
    for (int h = 0; h < num_heads; ++h) {
      this->template point<kStages, kStages>(block, first_head + h);
      score<T>(block, h, ahead);
      for (int r = 0; r < t.num_rows; ++r) weigh(block, h, r);
      accumulate<T>(h, ahead);
    }
  }

  void fetch_all(const Block& block) const {
    for (Place place{0, 0}; place.key < block.count; place = next_place(place)) {
      this->fetch_k(block, place.key, first_head + place.head);
    }
    for (Place place{0, 0}; place.key < block.count; place = next_place(place)) {
      this->fetch_v(block, place.key, first_head + place.head);
    }
  }

  void run(KeyRange range) {
    bool first = true;
    this->walk(range, [&](const Block& block, const Block* ahead) {
      if (first) fetch_all(block);
      first = false;
      if constexpr (kReadsLanes<TCache> && !kRotateKeys) {
        if (p.k.width % kLanes == 0 && p.v.width % kLanes == 0) {
          attend<TCache, false>(block, ahead);
          return;
        }
      }
      attend<float, true>(block, ahead);
    });
    for (int h = 0; h < num_heads; ++h) {
      for (int r = 0; r < t.num_rows; ++r) {
        this->finish_row(r, first_head + h, largest[h][r], sum_of(sums[h][r]), values[h][r]);
      }
    }
  }
};

// --- Many rows -----------------------------------------------------------------------------------

// A tile of many rows of one head. A vector holds an element of the queries of several rows, or
// their scores for a key.
template <typename TCache, int kRows, int kSteps, bool kRotateKeys>
struct ManyRows : HostTile<TCache,
                           (kSteps <= 16   ? 64
                            : kSteps <= 32 ? 32
                                           : 16),
                           kSteps, kRotateKeys> {
  using Base = HostTile<TCache, (kSteps <= 16 ? 64 : kSteps <= 32 ? 32 : 16), kSteps, kRotateKeys>;
  using Base::kKeys, Base::kWidth, Base::p, Base::t, Base::k, Base::v;
  using typename Base::Block;
  static constexpr int kVectors = kRows / kLanes;
  // Two blocks of float32 are larger than a first-level cache.
  static constexpr bool kFetches = !kSameType<TCache, float>;
  static_assert(kKeys % kRowKeys == 0 && kKeys <= 64, "whole products; holes are bits of a word");
  using WeightsOf = Weights<1, kRows>;

  int head;
  int num_vectors;  // that have rows
  RowLimits all;    // what all rows see
  RowLimits limits[kRows];
  bool leaves_out;                  // whether values of the block must be left out by `holes`
  unsigned long long holes[kRows];  // keys of the block that a row does not see
  Vector largest[kVectors];         // logits, base 2
  Vector sums[kVectors];            // of weights, against the largest
  alignas(64) float query[kWidth][kRows];
  alignas(64) float values[kRows][kWidth];
  alignas(64) float scores[kKeys][kRows];  // then weights

  ManyRows(const AttentionParams& p, const AttentionTile& t, int head)
      : Base(p, t, head == 0),
        head(head),
        num_vectors((t.num_rows + kLanes - 1) / kLanes),
        all(::seen_by_all(p, t)) {
    for (int r = 0; r < num_vectors * kLanes; ++r) {
      const bool exists = r < t.num_rows;
      const i64 position = position_of(p, t, exists ? r : 0);
      limits[r] = limits_of(p, t, position, position);
      alignas(64) float row[kWidth] = {};
      if (exists) this->load_query(r, head, row);
      for (int i = 0; i < kWidth; ++i) query[i][r] = row[i];
      memset(values[r], 0, sizeof values[r]);
    }
    for (int c = 0; c < num_vectors; ++c) {
      sums[c] = Vector{};
      largest[c] = spread(-kInfinity);
    }
    if (takes_pairs()) pair_queries();
  }

  bool takes_pairs() const {
#if defined(__AVX512BF16__)
    return kSameType<TCache, bfloat16> && !kRotateKeys && p.query_format == 2 && p.k.width % 2 == 0;
#else
    return false;
#endif
  }

  // Put two elements of bf16 where one of float32 is.
  void pair_queries() {
    for (int i = 0; i < kWidth / 2; ++i) {
      for (int r = 0; r < kRows; r += kLanes) {
        const auto even = bits_as<VectorBits>(load_vector(query[2 * i] + r));
        const auto odd = bits_as<VectorBits>(load_vector(query[2 * i + 1] + r));
        store_vector(query[i] + r, bits_as<Vector>(odd | even >> 16));
      }
    }
  }

  // Scores of kCount vectors of rows for kRowKeys keys from `n` on.
  template <typename Form, int kCount>
  void score_keys(int c, int n) {
    constexpr int kAtOnce = kRowSums / kCount < kRowKeys ? kRowSums / kCount : kRowKeys;
    for (int i = n; i < n + kRowKeys; i += kAtOnce) {
      multiply_rows<Form, kCount, kAtOnce>(query[0] + c * kLanes, kRows, k + i, p.k.width,
                                           scores[i] + c * kLanes, kRows);
    }
  }

  template <typename Form>
  void score(const Block& block, const Block* ahead) {
    for (int n = 0; n < block.count; n += kRowKeys) {
      for (int i = n; kFetches && ahead && i < n + kRowKeys; ++i) this->fetch_k(*ahead, i, head);
      int c = 0;
      for (; c + kRowVectors <= num_vectors; c += kRowVectors) score_keys<Form, kRowVectors>(c, n);
      for (; c + 2 <= num_vectors; c += 2) score_keys<Form, 2>(c, n);
      if (c < num_vectors) score_keys<Form, 1>(c, n);
    }
  }

  void cap(const Block& block, int c) {
    for (int n = 0; n < block.count; ++n) {
      for (int r = c * kLanes; r < (c + 1) * kLanes; ++r) {
        scores[n][r] = p.cap_scale * tanhf(scores[n][r] * p.inverse_cap);
      }
    }
  }

  // Let rows not see keys of the block that they must not see.
  void mask(const Block& block, int c) {
    const int first_row = c * kLanes;
    const i64 last = block.keys[block.count - 1];
    const i64 first = block.keys[0];
    if (block.present && last - first == block.count - 1 && first >= p.sink_keys &&
        last < this->first_tree) {
      VectorInts starts;
      VectorInts ends;
      for (int i = 0; i < kLanes; ++i) {
        const RowLimits& own = limits[first_row + i];
        starts[i] = static_cast<int>(max(i64{0}, min(own.start - first, i64{kKeys})));
        ends[i] = static_cast<int>(max(i64{0}, min(own.end - first, i64{kKeys})));
      }
      for (int n = 0; n < block.count; ++n) {
        const VectorInts at = VectorInts{} + n;
        float* logits = scores[n] + first_row;
        const Vector masked = spread(-kInfinity);
        const auto seen = (at >= starts) & (at < ends);
        store_vector(logits, seen ? load_vector(logits) : masked);
      }
      return;
    }
    for (int n = 0; n < block.count; ++n) {
      for (int r = first_row; r < first_row + kLanes; ++r) {
        const int row = min(r, t.num_rows - 1);
        if (!this->is_seen(limits[row], row, block.keys[n])) scores[n][r] = -kInfinity;
      }
    }
  }

  // Turn scores into weights, and raise the maxima.
  void weigh(const Block& block) {
    leaves_out = false;
    bool knows_values = false;
    const bool by_all =
        block.present && block.keys[0] >= all.start && block.keys[block.count - 1] < all.end;
    for (int c = 0; c < num_vectors; ++c) {
      float* logits = scores[0] + c * kLanes;
      Vector most = largest[c];
      Vector least{};
      const auto compare = [&](Vector own) {
        most = own > most ? own : most;
        least = own < least ? own : least;
      };
      for (int n = 0; n < block.count; ++n) {
        const Vector scaled = load_vector(logits + n * kRows) * this->k_scales[n] * p.score_scale;
        store_vector(logits + n * kRows, scaled);
        if (by_all && p.soft_cap <= 0.0f) compare(scaled);
      }
      if (!by_all || p.soft_cap > 0.0f) {
        if (p.soft_cap > 0.0f) cap(block, c);
        if (!by_all) mask(block, c);
        for (int n = 0; n < block.count; ++n) compare(load_vector(logits + n * kRows));
      }
      bool full = true;
      for (int i = 0; i < kLanes; ++i) full &= least[i] != -kInfinity;
      if (!full) {
        if (!knows_values) {
          knows_values = true;
          leaves_out = !are_finite<float>(v, block.count, round_up(p.v.width, kLanes));
        }
        for (int i = 0; leaves_out && i < kLanes; ++i) {
          auto& own = holes[c * kLanes + i] = 0;
          for (int n = 0; n < block.count; ++n) {
            own |= static_cast<unsigned long long>(logits[n * kRows + i] == -kInfinity) << n;
          }
        }
      } else {
        for (int i = 0; i < kLanes; ++i) holes[c * kLanes + i] = 0;
      }
      const Vector origin = most == -kInfinity ? Vector{} : most;
      raise(c, most, exp2_of(largest[c] - origin));
      Vector sum{};
      for (int n = 0; n < block.count; ++n) {
        const Vector weights = exp2_of(load_vector(logits + n * kRows) - origin);
        sum += weights;
        store_vector(logits + n * kRows, weights * this->v_scales[n]);
      }
      sums[c] += sum;
    }
  }

  void raise(int c, Vector most, Vector rescale) {
    largest[c] = most;
    sums[c] *= rescale;
    for (int i = 0; i < kLanes; ++i) {
      if (rescale[i] == 1.0f) continue;
      float* row = values[c * kLanes + i];
      for (int j = 0; j < p.v.width; j += kLanes) {
        store_vector(row + j, load_vector(row + j) * rescale[i]);
      }
    }
  }

  // Add the values of a block, times weights, as for few rows.
  void accumulate(const Block& block, const Block* ahead) {
    const int width = round_up(p.v.width, kLanes);
    if (leaves_out) {
      for (int r = 0; r < t.num_rows; ++r) {
        for (int n = 0; n < block.count; ++n) {
          if (holes[r] >> n & 1) continue;
          multiply_wide_values<float, 1>(WeightsOf{scores[n] + r}, v + n, 1, 0, width, values[r],
                                         kWidth);
        }
      }
      return;
    }
    for (int n = 0; kFetches && ahead && n < kKeys; ++n) this->fetch_v(*ahead, n, head);
    constexpr int kWide = kProductVectors * kLanes;
    for (int first = 0; first < width; first += kWide) {
      for (int r = 0; r < t.num_rows; r += kProductRows) {
        multiply_wide_values<float, kProductRows>(WeightsOf{scores[0] + r}, v, block.count, first,
                                                  min(first + kWide, width), values[r], kWidth);
      }
    }
  }

  void run(KeyRange range) {
    this->walk(range, [&](const Block& block, const Block* ahead) {
#if defined(__AVX512BF16__)
      if constexpr (kSameType<TCache, bfloat16> && !kRotateKeys) {
        if (takes_pairs()) {
          this->template point<false, true>(block, head);
          score<PairsOfBfloat16>(block, ahead);
          weigh(block);
          accumulate(block, ahead);
          return;
        }
      }
#endif
      this->template point<!kSameType<TCache, float> || kRotateKeys, true>(block, head);
      score<SingleElements>(block, ahead);
      weigh(block);
      accumulate(block, ahead);
    });
    for (int r = 0; r < t.num_rows; ++r) {
      const int c = r / kLanes;
      this->finish_row(r, head, largest[c][r % kLanes], sums[c][r % kLanes], values[r]);
    }
  }
};

// --- Blocks of the grid --------------------------------------------------------------------------

constexpr int kRowsTogether = 32;  // of several heads
constexpr int kManyBlocks = 16;
constexpr int kPieceStep = 32;  // pieces begin at whole blocks of keys

// How many heads a block of the grid takes: several where there are enough blocks besides.
template <int kHeads>
inline int heads_together(const AttentionParams& p) {
  const bool few_blocks = p.key_block && gridDim.y * gridDim.z < kManyBlocks;
  return few_blocks ? 1 : kHeads;
}

// Everything that the block of one thread does. The first block of several heads does their work.
template <typename TCache, int kRows, int kSteps, bool kRotateKeys>
inline void attend(const AttentionParams& p) {
  constexpr bool kIsFew = kRows <= kFewRows;
  constexpr int kHeads = kIsFew ? kRowsTogether / kRows : 1;
  // The tiles of a head follow one another where rows are many: its keys may still be in a cache.
  const int num_pieces = static_cast<int>(gridDim.y * gridDim.z);
  const int number = number_of_block() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int head = kIsFew ? static_cast<int>(blockIdx.x) : number / num_pieces;
  const int together = heads_together<kHeads>(p);
  if (head % together != 0) return;
  const AttentionPiece piece =
      piece_of(p, kIsFew ? number_of_block() : number % num_pieces, kRows, head == 0);
  const AttentionTile t = find_tile(p, piece, kRows, head == 0);
  if (t.num_rows == 0) return;
  const KeyRange range = keys_of(piece, t, kPieceStep);
  if constexpr (kIsFew) {
    const int num_heads = min(together, p.num_heads / p.group - head);
    FewRows<TCache, kRows, kHeads, kSteps, kRotateKeys>(p, t, head, num_heads).run(range);
  } else if (!p.key_block && t.num_rows <= kFewRows) {
    FewRows<TCache, kFewRows, 1, kSteps, kRotateKeys>(p, t, head, 1).run(range);
  } else {
    ManyRows<TCache, kRows, kSteps, kRotateKeys>(p, t, head).run(range);
  }
}

}  // namespace kvcupy_host
