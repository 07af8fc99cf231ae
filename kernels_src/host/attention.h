// Attention by one thread per tile, on this processor.
//
// Keys are taken in blocks. Scores of a block, and what its values add to the rows, are products of
// small matrices: a few rows by a few keys, or by a few vectors of values, are summed in registers
// while each number that is loaded serves all of them. Between the two, the online softmax works on
// whole vectors of scores. Few rows read K and V where they lie. Where there are more, or K must
// be rotated, a block is first converted to float32, once for all rows.
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
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kProductRows = 2;
#else
constexpr int kLanes = 4;
constexpr int kProductRows = 4;
#endif
constexpr int kProductKeys = 4;
constexpr int kProductVectors = 4;
constexpr int kLineBytes = 64;

using Vector = float __attribute__((vector_size(4 * kLanes)));
using VectorBits = unsigned __attribute__((vector_size(4 * kLanes)));

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
  return bits_as<Vector>(__builtin_convertvector(codes, VectorBits) << 16);
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

// Add `count` rows of V, times weights, to kRows rows of values: kVectors vectors of each, from
// element `first` on.
template <typename T, int kRows, int kVectors>
inline void multiply_values(const float* weights, int weight_stride, const char* const* rows,
                            int count, int first, float* values, int value_stride) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      sums[r][c] = load_vector(values + r * value_stride + first + c * kLanes);
    }
  }
  for (int n = 0; n < count; ++n) {
    const char* row = rows[n] + first * static_cast<int>(sizeof(T));
    Vector v[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      v[c] = load_lanes<T>(row + c * kLanes * static_cast<int>(sizeof(T)));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vector weight = spread(weights[r * weight_stride + n]);
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

// --- A tile --------------------------------------------------------------------------------------

// A row of a cache, as `Elements` loads it.
template <typename TCache>
using CachedRow = SelectType<kFourBit<TCache>, ScaledRow<TCache>, const char*>;

// Some keys that follow one another in a split, and where they lie.
template <typename TCache, int kKeys>
struct KeyBlock {
  bool complete;                    // all keys are there
  i64 keys[kKeys];                  // ascending; negative: not there, and rows are zeros
  CachedRow<TCache> k_rows[kKeys];  // in the cache, of keys that are there
  CachedRow<TCache> v_rows[kKeys];
  const char* k[kKeys];  // as products read them
  const char* v[kKeys];
  float k_scales[kKeys];
  float v_scales[kKeys];
};

template <typename TCache, int kRows, int kSteps, bool kRotateKeys>
struct HostTile {
  static constexpr int kPack = 8;
  static constexpr int kWidth = round_up(kSteps * kPack, kLanes);
  static constexpr int kKeys = kSteps <= 32 ? 32 : 16;
  static_assert(kKeys <= 32, "holes are the bits of a word");
  using Block = KeyBlock<TCache, kKeys>;

  const AttentionParams& p;
  AttentionTile t;
  int kv_head;
  bool reports;
  i64 first_tree;
  RowLimits limits[kRows];
  float largest[kRows];   // logit, base 2
  unsigned holes[kRows];  // keys of the block that a row does not see
  Vector sums[kRows];     // of weights, against the largest
  alignas(64) float query[kRows][kWidth];
  alignas(64) float values[kRows][kWidth];
  alignas(64) float scores[kRows][kKeys];  // then weights
  alignas(64) float staged_k[kKeys][kWidth];
  alignas(64) float staged_v[kKeys][kWidth];
  alignas(64) char zeros[kWidth * 4];
  Block blocks[2];

  explicit HostTile(const AttentionParams& params) : p(params) {}

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

  void start() {
    first_tree = first_tree_key(p, t);
    memset(zeros, 0, sizeof zeros);
    for (int r = 0; r < t.num_rows; ++r) {
      const char* row = query_row(p, t, r, kv_head);
      for (int i = 0; i < kWidth; i += kPack) {
        Elements<AnyFormat, kPack> elements;
        elements.load(row, i, p.k.width, p.query_format);
        elements.pack.store(reinterpret_cast<char*>(query[r] + i));
      }
      rotate(query[r], p.k.group_scales);
      memset(values[r], 0, sizeof values[r]);
      sums[r] = Vector{};
      largest[r] = -kInfinity;
      const i64 position = position_of(p, t, r);
      limits[r] = limits_of(p, t, position, position);
    }
  }

  // Find keys `first` to before `end` of the split.
  void locate(Block& block, i64 first, i64 end) {
    block.complete = true;
    i64 entry = -1;
    i64 page = -1;
    for (int n = 0; n < kKeys; ++n) {
      const i64 key = key_of(p, t, first + n);
      if (first + n < end && is_in_view(p, t, key)) {
        const i64 place = place_of(p, t, key);
        if (entry_of(p, place) != entry) {
          entry = entry_of(p, place);
          page = page_of(p, t, place, reports);
        }
        if (page >= 0) {
          const i64 offset = offset_in_page(p, place);
          block.keys[n] = key;
          block.k_rows[n] = cached_row<TCache>(p.k_cache, p.k_scale, p.k, page, offset, kv_head);
          block.v_rows[n] = cached_row<TCache>(p.v_cache, p.v_scale, p.v, page, offset, kv_head);
          if constexpr (kFourBit<TCache>) {  // the steps of their groups have the scales
            block.k_scales[n] = block.v_scales[n] = 1.0f;
          } else {
            const i64 slot = page * p.page_size + offset;
            block.k[n] = block.k_rows[n];
            block.v[n] = block.v_rows[n];
            block.k_scales[n] = scale_of_row(p.k_scale, p.k_scale_cache, p.k, slot, kv_head);
            block.v_scales[n] = scale_of_row(p.v_scale, p.v_scale_cache, p.v, slot, kv_head);
          }
          continue;
        }
      }
      block.complete = false;
      block.keys[n] = -1;
      block.k[n] = block.v[n] = zeros;
      block.k_scales[n] = block.v_scales[n] = 0.0f;
    }
  }

  static void fetch(const CachedRow<TCache>& row, int width) {
    const auto fetch_bytes = [](const char* from, int bytes) {
      for (int i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
    };
    if constexpr (kFourBit<TCache>) {
      fetch_bytes(row.codes, width / 2);
      fetch_bytes(row.scales, (width >> row.group_shift) * kGroupScaleBytes<TCache>);
    } else if constexpr (!kSameType<TCache, AnyFormat>) {
      fetch_bytes(row, width * static_cast<int>(sizeof(TCache)));
    }
  }

  void fetch(const Block& block, int n) const {
    if (block.keys[n] < 0) return;
    fetch(block.k_rows[n], p.k.width);
    fetch(block.v_rows[n], p.v.width);
  }

  // Convert a block to float32.
  void stage(Block& block, const Block* ahead) {
    for (int n = 0; n < kKeys; ++n) {
      if (ahead) fetch(*ahead, n);
      if (block.keys[n] < 0) continue;  // rows are zeros, of float32 too
      const float* angles = nullptr;
      if constexpr (kRotateKeys) angles = angles_of(p, t, block.keys[n]);
      for (int i = 0; i < kWidth; i += kPack) {
        Elements<TCache, kPack> k;
        k.load(block.k_rows[n], i, p.k.width, p.k_format);
        Pack<float, kPack> floats = k.floats();
        if constexpr (kRotateKeys) {
          const auto partners = load_partners<TCache, kPack>(p, block.k_rows[n], i, p.k.width);
          floats = rotated(p, k, partners, angles, i);
        }
        floats.store(reinterpret_cast<char*>(staged_k[n] + i));
        Elements<TCache, kPack> v;
        v.load(block.v_rows[n], i, p.v.width, p.v_format);
        v.floats().store(reinterpret_cast<char*>(staged_v[n] + i));
      }
      block.k[n] = reinterpret_cast<const char*>(staged_k[n]);
      block.v[n] = reinterpret_cast<const char*>(staged_v[n]);
    }
  }

  // Scores of all rows; rows of K hold T.
  template <typename T>
  void score(const Block& block, const Block* ahead) {
    const int width = round_up(p.k.width, kLanes);
    for (int n = 0; n < kKeys; n += kProductKeys) {
      if (ahead) {
        for (int i = 0; i < kProductKeys; ++i) fetch(*ahead, n + i);
      }
      for_rows<kRows>(t.num_rows, [&](int r, auto rows) {
        multiply_keys<T, decltype(rows)::kCount>(query[r], kWidth, block.k + n, width,
                                                 scores[r] + n, kKeys);
      });
    }
  }

  // Turn the scores of a row into weights, and raise its maximum.
  void weigh(const Block& block, int r) {
    float* row = scores[r];
    for (int n = 0; n < kKeys; n += kLanes) {
      store_vector(row + n, load_vector(row + n) * load_vector(block.k_scales + n) * p.score_scale);
    }
    if (p.soft_cap > 0.0f) {
      for (int n = 0; n < kKeys; ++n) row[n] = p.cap_scale * tanhf(row[n] * p.inverse_cap);
    }
    if (!block.complete || block.keys[0] < limits[r].start ||
        block.keys[kKeys - 1] >= limits[r].end) {
      for (int n = 0; n < kKeys; ++n) {
        if (!is_seen(r, block.keys[n])) row[n] = -kInfinity;
      }
    }
    Vector most = spread(largest[r]);
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
    if (top > largest[r]) {
      const Vector rescale = spread(exp2f(largest[r] - top));  // 0 where nothing was seen before
      largest[r] = top;
      sums[r] *= rescale;
      for (int i = 0; i < p.v.width; i += kLanes) {
        store_vector(values[r] + i, load_vector(values[r] + i) * rescale);
      }
    }
    const Vector origin = spread(top == -kInfinity ? 0.0f : top);
    for (int n = 0; n < kKeys; n += kLanes) {
      const Vector weights = exp2_of(load_vector(row + n) - origin);
      sums[r] += weights;
      store_vector(row + n, weights * load_vector(block.v_scales + n));
    }
  }

  // As `sees`, whose limits are known.
  bool is_seen(int r, i64 key) const {
    if (key < 0) return false;
    if (key < limits[r].end) return key >= limits[r].start || key < p.sink_keys;
    return key >= first_tree && sees(p, t, r, key);
  }

  // Add the values of a block, times weights; its rows of V hold T.
  template <typename T>
  void accumulate(const Block& block) {
    const int width = round_up(p.v.width, kLanes);
    bool known = false;
    bool finite = false;
    for_rows<kRows>(t.num_rows, [&](int r, auto rows) {
      constexpr int kCount = decltype(rows)::kCount;
      unsigned masked = 0;
      for (int i = 0; i < kCount; ++i) masked |= holes[r + i];
      if (masked && !known) {
        known = true;
        finite = is_finite<T>(block, width);
      }
      if (masked && !finite) {
        for (int i = r; i < r + kCount; ++i) accumulate_seen<T>(block, i, width);
        return;
      }
      int first = 0;
      for (; first + kProductVectors * kLanes <= width; first += kProductVectors * kLanes) {
        multiply_values<T, kCount, kProductVectors>(scores[r], kKeys, block.v, kKeys, first,
                                                    values[r], kWidth);
      }
      for (; first < width; first += kLanes) {
        multiply_values<T, kCount, 1>(scores[r], kKeys, block.v, kKeys, first, values[r], kWidth);
      }
    });
  }

  // A masked key adds nothing, whatever its value is: products with a weight of 0 do that for
  // numbers alone.
  template <typename T>
  void accumulate_seen(const Block& block, int r, int width) {
    for (int n = 0; n < kKeys; ++n) {
      if (holes[r] >> n & 1) continue;
      for (int i = 0; i < width; i += kLanes) {
        multiply_values<T, 1, 1>(scores[r] + n, kKeys, block.v + n, 1, i, values[r], kWidth);
      }
    }
  }

  template <typename T>
  bool is_finite(const Block& block, int width) const {
    Vector zero{};
    for (int n = 0; n < kKeys; ++n) {
      for (int i = 0; i < width; i += kLanes) {
        zero += load_lanes<T>(block.v[n] + i * static_cast<int>(sizeof(T))) * 0.0f;
      }
    }
    return sum_of(zero) == 0.0f;
  }

  template <typename T>
  void attend(const Block& block, const Block* ahead) {
    score<T>(block, ahead);
    for (int r = 0; r < t.num_rows; ++r) weigh(block, r);
    accumulate<T>(block);
  }

  void walk(KeyRange range) {
    bool direct = false;
    if constexpr (kReadsLanes<TCache> && !kRotateKeys) {
      direct = t.num_rows <= kProductRows && p.k.width % kLanes == 0 && p.v.width % kLanes == 0;
    }
    locate(blocks[0], range.begin, range.end);
    for (int n = 0; n < kKeys; ++n) fetch(blocks[0], n);
    int current = 0;
    for (i64 first = range.begin; first < range.end; first += kKeys) {
      Block& block = blocks[current];
      current = 1 - current;
      Block* ahead = nullptr;
      if (first + kKeys < range.end) {
        ahead = &blocks[current];
        locate(*ahead, first + kKeys, range.end);
      }
      if constexpr (kReadsLanes<TCache> && !kRotateKeys) {
        if (direct) {
          attend<TCache>(block, ahead);
          continue;
        }
      }
      stage(block, ahead);
      attend<float>(block, nullptr);
    }
  }

  template <typename T>
  void write(char* to, int r, float inverse) {
    int i = 0;
    for (; i + kPack <= p.v.width; i += kPack) {
      Pack<float, kPack> floats;
      floats.load(reinterpret_cast<const char*>(values[r] + i));
      const Pack<T, kPack> pack = from_floats<T>(products(floats, inverse));
      memcpy(to + i * static_cast<int>(sizeof(T)), pack.values, sizeof pack.values);
    }
    for (; i < p.v.width; ++i) {
      reinterpret_cast<T*>(to)[i] = from_float<T>(values[r][i] * inverse);
    }
  }

  void finish() {
    for (int r = 0; r < t.num_rows; ++r) {
      const RowEnd end = end_of_row(p, t, r, kv_head, largest[r], sum_of(sums[r]));
      const float inverse = end.divisor != 0.0f ? 1.0f / end.divisor : 0.0f;
      rotate(values[r], p.v.group_scales);
      switch (end.format) {
        case 0:
          write<float>(end.out, r, inverse);
          break;
        case 1:
          write<half>(end.out, r, inverse);
          break;
        default:
          write<bfloat16>(end.out, r, inverse);
      }
      if (end.lse) *end.lse = end.lse_value;
    }
  }
};

// Everything that the block of one thread does.
template <typename TCache, int kRows, int kSteps, bool kRotateKeys>
inline void attend(const AttentionParams& p) {
  HostTile<TCache, kRows, kSteps, kRotateKeys> tile(p);
  tile.kv_head = blockIdx.x;
  tile.reports = tile.kv_head == 0;
  const AttentionPiece piece = piece_of(p, number_of_block(), kRows, tile.reports);
  tile.t = find_tile(p, piece, kRows, tile.reports);
  if (tile.t.num_rows == 0) return;
  tile.start();
  tile.walk(keys_of(piece, tile.t, 1));
  tile.finish();
}

}  // namespace kvcupy_host
