// Tiles of four-bit rows on tensor cores, for attention_decode_mma.cu: how codes become fragments,
// and where their scales come in.
//
// `ldmatrix` brings a lane eight codes at a time, which become four pairs of fp16 by arithmetic:
// pair j is elements j and 4 + j. Of a key those are depth 8t + j and 8t + 4 + j of 32: two
// fragments, to which the query is permuted. Transposed they are column 4g + j of two neighbouring
// keys: four products that interleave. E2M1 stays 2**-14 times what it is; scores and values take
// that back.
//
// Scales of groups of 16 (nvfp4) multiply the codes in fp16, exactly: seven bits of mantissa, never
// below 2**-24. Larger groups hold all of a chunk of 32 elements. Their scales meet the keys as
// float32, on the sums of a chunk, so that scores are exact. On values they are fp16: exactly with
// powers of two (mxfp4), taken relative to the largest so far of the 32 columns, and with one
// rounding to fp16 with integers.
//
// Rows whose scales are not whole words begin anywhere in a word, one after another: their copies
// begin with that word, and each lane moves the row of its key when it has arrived.
#pragma once

#include "attention_decode_mma.cuh"

// --- Codes ---------------------------------------------------------------------------------------

// Ratio of what `spread_codes` returns to the values of codes.
template <typename TCache>
constexpr float kCodeUnit = kE2m1<TCache> ? 0x1p-14f : 1.0f;

// Eight codes as fp16: pair j is codes j, in the lower half, and 4 + j, times kCodeUnit.
template <typename TCache>
__device__ __forceinline__ EightHalves spread_codes(u32 codes) {
  if constexpr (kE2m1<TCache>) {
    // Sign, exponent and mantissa are the upper bytes of fp16, s000eem0.
    const u32 even = (codes << 1 & 0x0e0e0e0e) | (codes << 4 & 0x80808080);
    const u32 odd = (codes >> 3 & 0x0e0e0e0e) | (codes & 0x80808080);
    return {__byte_perm(even, 0, 0x2404), __byte_perm(odd, 0, 0x2404), even & 0xff00ff00,
            odd & 0xff00ff00};
  } else {
    // The codes plus 8 are the last bits of 1024, or stand four bits further up.
    constexpr u32 kAligner = 0x64006400;
    constexpr u32 kOffset = 0xe408e408;       // -1032
    constexpr u32 kSixteenth = 0x2c002c00;    // 1 / 16
    constexpr u32 kOffsetAbove = 0xd480d480;  // -72
    const u32 lower = codes ^ 0x88888888;
    const u32 upper = lower >> 8;
    return {add_halves((lower & 0x000f000f) | kAligner, kOffset),
            multiply_add_halves((lower & 0x00f000f0) | kAligner, kSixteenth, kOffsetAbove),
            add_halves((upper & 0x000f000f) | kAligner, kOffset),
            multiply_add_halves((upper & 0x00f000f0) | kAligner, kSixteenth, kOffsetAbove)};
  }
}

// Four bytes of e4m3 as two pairs of fp16.
__device__ __forceinline__ void widen_scales(u32 bytes, u32& lower, u32& upper) {
  lower = kArch >= 890 ? halves_of_e4m3(bytes) : decode_e4m3_pair(lower_pair(bytes));
  upper = kArch >= 890 ? halves_of_e4m3(bytes >> 16) : decode_e4m3_pair(upper_pair(bytes));
}

// --- Scales --------------------------------------------------------------------------------------

// Start copying the group scales of a key; zeros where it is missing.
template <int kBytes>
__device__ __forceinline__ void fetch_scales(char* to, const char* from, int num_bytes,
                                             const char* anywhere) {
#pragma unroll
  for (int at = 0; at < kBytes; at += 4) {
    const bool exist = from && at < num_bytes;
    copy_word_async<4>(to + at, exist ? from + at : anywhere, exist);
  }
}

// Whether rows may lie at any address: codes, and right behind them their scales.
template <bool kUnaligned>
__device__ __forceinline__ bool rows_are_unaligned(const KVOperand& operand) {
  return kUnaligned && operand.group_scales.code_word_bytes < 4;
}

// The bytes of a word that lie before an address in it.
__device__ __forceinline__ int bytes_before(const char* address) {
  return static_cast<int>(reinterpret_cast<u64>(address)) & 3;
}

// Likewise of rows at any address. The first word has the last codes too, if any are in it.
template <int kBytes>
__device__ __forceinline__ void fetch_unaligned_scales(char* to, const char* from, int num_bytes,
                                                       const char* anywhere) {
  const int before = bytes_before(from);
  const int present = from ? before + num_bytes : 0;
#pragma unroll
  for (int at = 0; at < kBytes; at += 4) {
    const int left = min(max(present - at, 0), 4);
    copy_part_async(to + at, left ? from - before + at : anywhere, left);
  }
}

template <typename TCache>
__device__ __forceinline__ int group_scale_bytes(const KVOperand& operand) {
  return (operand.width >> group_shift<TCache>(operand)) * kGroupScaleBytes<TCache>;
}

template <typename TCache, int kWidth, bool kUnaligned>
__device__ __forceinline__ void fetch_scales_of(char (&to)[group_bytes<TCache>(kWidth)],
                                                const char* from, const KVOperand& operand,
                                                const char* anywhere) {
  constexpr int kBytes = group_bytes<TCache>(kWidth);
  const int num_bytes = group_scale_bytes<TCache>(operand);
  if (rows_are_unaligned<kUnaligned>(operand)) {
    fetch_unaligned_scales<kBytes>(to, from, num_bytes, anywhere);
  } else {
    fetch_scales<kBytes>(to, from, num_bytes, anywhere);
  }
}

// Where the group scales of a lane's own key lie; null: there is no key.
struct OwnScales {
  const char* k;
  const char* v;
};

// The arrays that have the strides of the codes of K, and are addressed with them.
struct SharedStrides {
  int bits;  // in one register: the loop has none to spare

  __device__ __forceinline__ bool k_scales() const { return bits & 1; }
  __device__ __forceinline__ bool v_codes() const { return bits & 2; }
  __device__ __forceinline__ bool v_scales() const { return bits & 4; }
};

__device__ __forceinline__ bool have_same_strides(const CacheStrides& a, const CacheStrides& b) {
  return a.page_bytes == b.page_bytes && a.offset_bytes == b.offset_bytes &&
         a.head_bytes == b.head_bytes;
}

__device__ __forceinline__ SharedStrides shared_strides(const AttentionParams& p) {
  return {have_same_strides(p.k.cache, p.k.group_scales.strides) +
          2 * have_same_strides(p.k.cache, p.v.cache) +
          4 * have_same_strides(p.k.cache, p.v.group_scales.strides)};
}

// Write the rows of a tile to its table. Every lane must call it. Codes of a missing key may be
// any: with scales of zero they are zeros.
template <typename Table>
__device__ __forceinline__ OwnScales set_four_bit_rows(Table& table, int stage,
                                                       const AttentionParams& p,
                                                       const AttentionTile& t,
                                                       const SharedStrides& as_codes,
                                                       const KeyPlace& found) {
  const int key = threadIdx.x % 32;
  const int kv_head = blockIdx.x;
  const i64 page = check_page(p, t, found.place, found.page, kv_head == 0);
  const bool exists = page >= 0;
  const SlotPlace place = {exists ? page : 0, offset_in_page(p, found.place)};
  const auto distance = [&](const CacheStrides& strides) {
    return exists ? offset_bytes(strides, place) + kv_head * strides.head_bytes : 0;
  };
  const i64 codes = distance(p.k.cache);
  table.k[stage][key] = p.k_cache + codes;
  table.v[stage][key] = p.v_cache + (as_codes.v_codes() ? codes : distance(p.v.cache));
  const u32 present = __ballot_sync(kAllLanes, exists);
  if (key == 0) table.present[stage] = present;
  __syncwarp();  // the table is written
  if (!exists) return {nullptr, nullptr};
  const GroupScales& k = p.k.group_scales;
  const GroupScales& v = p.v.group_scales;
  return {p.k_cache + k.offset_bytes + (as_codes.k_scales() ? codes : distance(k.strides)),
          p.v_cache + v.offset_bytes + (as_codes.v_scales() ? codes : distance(v.strides))};
}

// Start copying the codes of a tile, in words of kBytes; from the words in which they begin where
// they are unaligned. The rows are known before the first copy, which need not wait for shared
// memory then.
template <int kRowBytes, int kBytes, bool kUnaligned = false>
__device__ __forceinline__ void fetch_codes_by(char* tile, const char* const (&rows)[32],
                                               int row_bytes) {
  constexpr int kWords = kRowBytes / kBytes;
  constexpr int kLanes = kWords % 8 == 0 ? 8 : 4;
  constexpr int kRows = 32 / kLanes;  // at once
  const int first = threadIdx.x % 32 / kLanes;
  const int column = threadIdx.x % kLanes * kBytes;
  constexpr int kAhead = kRowBytes < 128 ? kLanes : 2;  // wider rows leave fewer registers
  const char* from[kAhead];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (i % kAhead == 0) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const char* row = rows[first + (i + j) * kRows];
        from[j] = row + (column - (kUnaligned ? bytes_before(row) : 0));
      }
    }
    constexpr int kPeriod = 8;  // of `chunk_at`, in rows
    const int phase = i * kRows % kPeriod;
#pragma unroll
    for (int j = 0; j < kWords / kLanes; ++j) {
      const int at = column + j * (kLanes * kBytes);
      char* to = tile + chunk_at<kRowBytes>(first + phase, at / 16) + at % 16;
      copy_word_async<kBytes>(to + (i * kRows - phase) * kRowBytes,
                              from[i % kAhead] + j * (kLanes * kBytes), at < row_bytes);
    }
  }
}

template <int kWidth, bool kUnaligned>
__device__ __forceinline__ void fetch_codes(char* tile, const char* const (&rows)[32],
                                            const KVOperand& operand, const AttentionParams& p) {
  const int row_bytes = p.num_pages > 0 ? operand.width / 2 : 0;  // else there is nothing to read
  if (operand.group_scales.code_word_bytes == 8) {
    fetch_codes_by<kWidth / 2, 8>(tile, rows, row_bytes);
  } else if (rows_are_unaligned<kUnaligned>(operand)) {
    fetch_codes_by<kWidth / 2, 4, true>(tile, rows, row_bytes);
  } else {
    fetch_codes_by<kWidth / 2, 4>(tile, rows, row_bytes);
  }
}

// Move the codes of a lane's own key, which came from `before` bytes ahead of them, and their
// scales to where they belong. Other lanes see them after a barrier.
template <int kWidth, int kScaleBytes>
__device__ __forceinline__ void align_row(char* tile, char (&groups)[kScaleBytes], int before,
                                          const KVOperand& operand) {
  if (before == 0) return;
  const u32 bytes_behind = 0x3210 + 0x1111 * before;  // of two words
  const int key = threadIdx.x % 32;
  const int chunks = operand.width / 32;  // of 16 bytes
  u32* scales = reinterpret_cast<u32*>(groups);
  Pack<u32, 4> own;
  own.load(tile + chunk_at<kWidth / 2>(key, 0));
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    char* to = tile + chunk_at<kWidth / 2>(key, chunk);
    Pack<u32, 4> next = {{scales[0]}};
    if (chunk + 1 < chunks) next.load(tile + chunk_at<kWidth / 2>(key, chunk + 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own.values[i] =
          __byte_perm(own.values[i], i < 3 ? own.values[i + 1] : next.values[0], bytes_behind);
    }
    own.store(to);
    own = next;
  }
#pragma unroll
  for (int i = 0; i < kScaleBytes / 4; ++i) {
    scales[i] = __byte_perm(scales[i], i + 1 < kScaleBytes / 4 ? scales[i + 1] : 0, bytes_behind);
  }
}

// Start copying the keys of a tile, or its values, with their scales.
template <typename TCache, int kWidth, bool kUnaligned, typename Table>
__device__ __forceinline__ void fetch_four_bit_keys(char* tile, const AttentionParams& p,
                                                    Table& table, int stage, const OwnScales& own) {
  fetch_scales_of<TCache, kWidth, kUnaligned>(table.k_groups[stage][threadIdx.x % 32], own.k, p.k,
                                              p.k_cache);
  fetch_codes<kWidth, kUnaligned>(tile, table.k[stage], p.k, p);
}

template <typename TCache, int kWidthV, bool kUnaligned, typename Table>
__device__ __forceinline__ void fetch_four_bit_values(char* tile, const AttentionParams& p,
                                                      Table& table, int stage,
                                                      const OwnScales& own) {
  fetch_scales_of<TCache, kWidthV, kUnaligned>(table.v_groups[stage][threadIdx.x % 32], own.v, p.v,
                                               p.v_cache);
  fetch_codes<kWidthV, kUnaligned>(tile, table.v[stage], p.v, p);
}

// The scale of each chunk of 32 elements of a lane's own key, as bits, from its group scales.
template <typename TCache>
__device__ __forceinline__ u32 chunk_scale(const char* scales, int chunk,
                                           const KVOperand& operand) {
  const int group = chunk * 32 >> group_shift<TCache>(operand);
  return load_group_scale<TCache>(scales + group * kGroupScaleBytes<TCache>);
}

// --- Queries -------------------------------------------------------------------------------------

// Pairs of the elements of a row that a lane brings: word e of (i, j) is element 2t + e of chunk j,
// for its i-th block of 16 elements.
template <int kWidth>
struct QueryPairs {
  static constexpr int kBlocks = kWidth / 16;     // per row
  static constexpr int kOwn = (kBlocks + 7) / 8;  // of each of eight lanes that share a row
  Pack<u32, 2> words[kOwn][4];

  __device__ __forceinline__ void store(char* queries) const {
    const int row = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int block = threadIdx.x % 8 + i * 8;
      if (block >= kBlocks) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[i][j].store(queries + chunk_offset<kWidth>(row, block / 2 * 4 + j) + block % 2 * 8);
      }
    }
  }
};

// Bring the queries of a block to shared memory as `multiply_keys_four_bit` takes them: element 8t
// + 4e + j of 32 is element 2t + e of chunk j. They are rotated as the keys are, which needs more
// bits than fp16 has: returned is what its rounding left. Others see them after a barrier.
template <int kWidth, int kRows>
__device__ __forceinline__ QueryPairs<kWidth> load_four_bit_queries(char* queries,
                                                                    DecodeTile& shared,
                                                                    const AttentionParams& p,
                                                                    const AttentionTile& t,
                                                                    int kv_head) {
  constexpr int kOwn = QueryPairs<kWidth>::kOwn;
  const int row = threadIdx.x / 8;
  if (kRows < kDecodeRows && row >= kRows) return {};  // a whole warp
  const int lane = threadIdx.x % 8;
  const bool is_half = p.query_format == 1;
  const char* from = row < t.num_rows ? query_row(p, t, row, kv_head) : nullptr;
  Pack<float, 16> floats[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = (lane + i * 8) * 16 + j * 8;
      Pack<u32, 4> words = {};
      if (from && at < p.k.width) words.load(from + at * 2);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const u32 pair = words.values[n];
        float* two = floats[i].values + j * 8 + n * 2;
        two[0] = is_half ? lower_of<half>(pair) : lower_of<bfloat16>(pair);
        two[1] = is_half ? upper_of<half>(pair) : upper_of<bfloat16>(pair);
      }
    }
  }
  if (p.k.group_scales.rotation_shift) apply_hadamard(floats, p.k.group_scales, lane, 8);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < 16; ++j) largest = fmaxf(largest, fabsf(floats[i].values[j]));
  }
  const float scale = query_scale(max_within_warp(largest, 8));
  const float inverse = inverse_of_power(scale);
  QueryPairs<kWidth> pairs;
  QueryPairs<kWidth> rests;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* x = floats[i].values + e * 8 + j;
        split_pair<half>(x[0] * inverse, x[4] * inverse, pairs.words[i][j].values[e],
                         rests.words[i][j].values[e]);
      }
    }
  }
  pairs.store(queries);
  if (lane == 0) shared.query_scales[row] = scale;
  return rests;
}

// --- Scores --------------------------------------------------------------------------------------

// Where the prepared scale of a key is: those that a lane takes, of keys 8n + 2t and 8n + 2t + 1,
// are next to each other.
__device__ __forceinline__ int place_of_key(int key) {
  return key % 8 / 2 * 8 + key / 8 * 2 + key % 2;
}

// Scales of keys for `multiply_keys_four_bit`, of a tile that has arrived. Other lanes see them
// after a barrier.
template <typename TCache, int kWidth, typename Table>
__device__ __forceinline__ void prepare_key_scales(Table& table, int stage, const KVOperand& k) {
  if constexpr (!kSameType<TCache, nvfp4>) {
    const int key = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < kWidth / 32; ++chunk) {
      const u32 bits = chunk_scale<TCache>(table.k_groups[stage][key], chunk, k);
      float scale = group_scale<TCache>(bits);
      // 2**-127 counts as nothing.
      if constexpr (kSameType<TCache, mxfp4>) {
        scale = __uint_as_float(bits == 255 ? 0x7fc00000 : bits << 23);
      }
      table.k_chunk_scales[chunk][place_of_key(key)] = scale;
    }
  }
}

// Scores of the 32 keys of a tile, eight after eight, as `multiply_keys` has them of wider
// elements. kHasRest: queries have a `rest` each.
template <typename TCache, int kWidth, int kRows, bool kHasRest, typename Table>
__device__ __forceinline__ void multiply_keys_four_bit(float (&s)[4][4], const char* keys,
                                                       const char* queries, const u32 (*query)[4],
                                                       const char* rest, const Table& table,
                                                       int stage) {
  using Shape = DecodeShape<TCache, kWidth, kWidth, kRows>;
  constexpr bool kScalesCodes = kSameType<TCache, nvfp4>;
  const int lane = threadIdx.x % 32;
  constexpr bool kInRegisters =
      Shape::kQueryInRegisters && (!kHasRest || Shape::kRestReplacesQuery);
  const auto step = [&](int k, u32(&a)[4]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = query[k][i];
    } else {
      load_matrices<false>(a, queries + chunk_offset<kWidth>(lane % kRows, k * 2 + lane / 16));
    }
  };
  constexpr int kUnroll = kInRegisters ? kWidth / 64 : 1;  // else loads come too early
#pragma unroll kUnroll
  for (int pair = 0; pair < kWidth / 64; ++pair) {  // of chunks
    u32 scales[4][2];
    if constexpr (kScalesCodes) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // Of four groups of a key, this lane's depth is in the even or in the odd ones.
        const char* own = table.k_groups[stage][n * 8 + lane / 4] + pair * 4;
        const u32 four = *reinterpret_cast<const u32*>(own);
        u32 both;
        u32 unused;
        widen_scales(__byte_perm(four, 0, lane & 2 ? 0x4431 : 0x4420), both, unused);
        scales[n][0] = __byte_perm(both, 0, 0x1010);
        scales[n][1] = __byte_perm(both, 0, 0x3232);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = pair * 2 + i;
      u32 b[4];  // of keys 0 to 7, and so on
      load_matrices<false>(b, keys + chunk_at<Shape::kKeyRowBytes>(lane, chunk));
      u32 a[2][4];
      step(chunk * 2, a[0]);
      step(chunk * 2 + 1, a[1]);
      u32 rests[2][4];
      if constexpr (kHasRest) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          load_matrices<false>(
              rests[j], rest + chunk_offset<kWidth>(lane % kRows, chunk * 4 + j * 2 + lane / 16));
        }
      }
      Pack<float, 4> sums_scales[2];
      if constexpr (!kScalesCodes) {
        const char* own = reinterpret_cast<const char*>(&table.k_chunk_scales[chunk][lane % 4 * 8]);
        sums_scales[0].load(own);
        sums_scales[1].load(own + 16);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        EightHalves codes = spread_codes<TCache>(b[n]);
        if constexpr (kScalesCodes) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            codes.pairs[j] = multiply_halves(codes.pairs[j], scales[n][i]);
          mma_m16n8k16<half>(s[n], a[0], codes.pairs[0], codes.pairs[1]);
          mma_m16n8k16<half>(s[n], a[1], codes.pairs[2], codes.pairs[3]);
          if constexpr (kHasRest) {
            mma_m16n8k16<half>(s[n], rests[0], codes.pairs[0], codes.pairs[1]);
            mma_m16n8k16<half>(s[n], rests[1], codes.pairs[2], codes.pairs[3]);
          }
        } else {
          float sums[4] = {};
          mma_m16n8k16<half>(sums, a[0], codes.pairs[0], codes.pairs[1]);
          mma_m16n8k16<half>(sums, a[1], codes.pairs[2], codes.pairs[3]);
          if constexpr (kHasRest) {
            mma_m16n8k16<half>(sums, rests[0], codes.pairs[0], codes.pairs[1]);
            mma_m16n8k16<half>(sums, rests[1], codes.pairs[2], codes.pairs[3]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float scale = sums_scales[n / 2].values[n % 2 * 2 + j % 2];
            s[n][j] = fmaf(sums[j], scale, s[n][j]);
          }
        }
      }
    }
  }
}

// The power of two that the elements of two chunks of a key are relative to where they are rotated.
template <typename Table>
__device__ __forceinline__ float power_of_chunks(const Table& table, const int (&chunks)[2],
                                                 int column) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    largest = fmaxf(largest, fabsf(table.k_chunk_scales[chunks[i]][column]));
  }
  return power_of_two_below(largest);
}

// Likewise where keys are rotated on their way and rounded to fp16. The elements of a pair are a
// lane's own: neighbours, or at the same place of two chunks. Scales of larger groups are taken
// relative to a power of two, which scores take back.
template <typename TCache, int kWidth, int kRows, typename Table>
__device__ __forceinline__ void multiply_rotated_four_bit(float (&s)[4][4], const char* keys,
                                                          const char* queries,
                                                          const AttentionParams& p,
                                                          const AttentionTile& t, i64 first,
                                                          const Table& table, int stage) {
  constexpr int kRowBytes = DecodeShape<TCache, kWidth, kWidth, kRows>::kKeyRowBytes;
  constexpr bool kScalesCodes = kSameType<TCache, nvfp4>;
  const int lane = threadIdx.x % 32;
  const int half_dim = p.rotary_dim / 2;
#pragma unroll 1
  for (int c = 0; c < kWidth / 32; ++c) {
    const int at = c * 32 - p.rotary_start;
    const bool rotary = at >= 0 && at < p.rotary_dim;
    const bool apart = rotary && !p.interleaved;
    if (apart && at >= half_dim) continue;  // the first half takes it along
    const int chunks[2] = {c, apart ? c + half_dim / 32 : c};
    constexpr bool kHoldsQueries = kWidth <= 192 && kRows == 16;  // else registers are too few
    u32 a[2][2][4];
    u32 b[2][4];
    const auto load_query = [&](int i, int j) {
      load_matrices<false>(
          a[i][j], queries + chunk_offset<kWidth>(lane % kRows, chunks[i] * 4 + j * 2 + lane / 16));
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (kHoldsQueries) load_query(i, j);
      }
      load_matrices<false>(b[i], keys + chunk_at<kRowBytes>(lane, chunks[i]));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int key = n * 8 + lane / 4;
      const float* angles = angles_of(p, t, key_of(p, t, first + key));
      float scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kScalesCodes) {
          const int group = chunks[i] * 2 + (lane & 2) / 2;
          scales[i] =
              group_scale<TCache>(static_cast<unsigned char>(table.k_groups[stage][key][group]));
        } else {
          scales[i] = table.k_chunk_scales[chunks[i]][place_of_key(key)];
        }
      }
      if constexpr (!kScalesCodes) {
        const float inverse = inverse_of_power(power_of_chunks(table, chunks, place_of_key(key)));
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] *= inverse;
      }
      float x[2][8];  // depth 8t to 8t + 7 of either chunk
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const EightHalves codes = spread_codes<TCache>(b[i][n]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[i][j] = lower_of<half>(codes.pairs[j]) * (1.0f / kCodeUnit<TCache>)*scales[i];
          x[i][4 + j] = upper_of<half>(codes.pairs[j]) * (1.0f / kCodeUnit<TCache>)*scales[i];
        }
      }
      if (apart) {
        Pack<float, 8> cosines;
        Pack<float, 8> sines;
        cosines.load(reinterpret_cast<const char*>(angles + at + lane % 4 * 8));
        sines.load(reinterpret_cast<const char*>(angles + half_dim + at + lane % 4 * 8));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float near = x[0][j];
          x[0][j] = fmaf(near, cosines.values[j], -x[1][j] * sines.values[j]);
          x[1][j] = fmaf(x[1][j], cosines.values[j], near * sines.values[j]);
        }
      } else if (rotary) {
        Pack<float, 4> cosines;
        Pack<float, 4> sines;
        cosines.load(reinterpret_cast<const char*>(angles + at / 2 + lane % 4 * 4));
        sines.load(reinterpret_cast<const char*>(angles + half_dim + at / 2 + lane % 4 * 4));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float even = x[0][2 * j];
          x[0][2 * j] = fmaf(even, cosines.values[j], -x[0][2 * j + 1] * sines.values[j]);
          x[0][2 * j + 1] = fmaf(x[0][2 * j + 1], cosines.values[j], even * sines.values[j]);
        }
      }
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !apart) break;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (!kHoldsQueries) load_query(i, j);
          mma_m16n8k16<half>(sums, a[i][j], pack_pair<half>(x[i][2 * j], x[i][2 * j + 4]),
                             pack_pair<half>(x[i][2 * j + 1], x[i][2 * j + 5]));
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float power = 1.0f;
        if constexpr (!kScalesCodes) {
          power = power_of_chunks(table, chunks, place_of_key(n * 8 + lane % 4 * 2 + j % 2));
        }
        s[n][j] = fmaf(sums[j] * kCodeUnit<TCache>, power, s[n][j]);
      }
    }
  }
}

// --- Values --------------------------------------------------------------------------------------

// The units of weighted values, for each 32 columns: what sums are to be multiplied by.
template <typename TCache, int kWidthV>
struct ValueUnits {
  __device__ __forceinline__ float of_chunk(int) const { return 1.0f / kCodeUnit<TCache>; }
};

// Of mxfp4 the largest group scale so far, two columns of 16 bits in a word: as its exponent.
template <int kWidthV>
struct ValueUnits<mxfp4, kWidthV> {
  u32 tops[kWidthV / 64] = {};

  __device__ __forceinline__ float of_chunk(int chunk) const {
    const u32 top = tops[chunk / 2] >> chunk % 2 * 16 & 0xffff;
    return top == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(top << 23) * 0.5f;
  }
};

// Of integers 1, or more once a scale could make a value overflow.
template <int kWidthV>
struct ValueUnits<int4x2, kWidthV> {
  static constexpr float kRaised = 8.0f;
  float unit = 1.0f;

  __device__ __forceinline__ float of_chunk(int) const { return unit; }

  // 8192, of which seven still fit.
  static __device__ __forceinline__ bool is_large(u32 scale) { return (scale & 0x7fff) > 0x7000; }
};

__device__ __forceinline__ u32 max_of_halves(u32 x, u32 y) {
  if constexpr (kArch >= 800) return larger_of_pairs<half>(x, y);
  const u32 lower = max(x & 0xffff, y & 0xffff);
  return max(x >> 16, y >> 16) << 16 | lower;
}

// Make the scales of the values of a tile what `multiply_values_four_bit` takes. Other lanes see
// them after a barrier. Every lane must call it.
template <typename TCache, int kWidthV, int kValues, typename Table>
__device__ __forceinline__ void prepare_value_scales(Table& table, int stage, const KVOperand& v,
                                                     ValueUnits<TCache, kWidthV>& units,
                                                     float (&o)[kValues][4]) {
  const int key = threadIdx.x % 32;
  const char* own = table.v_groups[stage][key];
  if constexpr (kSameType<TCache, mxfp4>) {
#pragma unroll
    for (int pair = 0; pair < kWidthV / 64; ++pair) {
      const u32 both =
          chunk_scale<TCache>(own, pair * 2, v) | chunk_scale<TCache>(own, pair * 2 + 1, v) << 16;
      u32 top = max_of_halves(both, units.tops[pair]);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        top = max_of_halves(top, __shfl_xor_sync(kAllLanes, top, distance));
      }
      if (top != units.tops[pair]) {  // for all lanes alike
        const u32 rise = top - units.tops[pair];
        units.tops[pair] = top;
        constexpr int kOfPair = kValues / (kWidthV / 64);
#pragma unroll
        for (int n = 0; n < kOfPair; ++n) {
          const u32 exponent = rise >> n / (kOfPair / 2) * 16 & 0xffff;
          const float rescale = exponent < 127 ? __uint_as_float((127 - exponent) << 23) : 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) o[pair * kOfPair + n][i] *= rescale;
        }
      }
      // 2 to the (scale - top + 15), or 0.
      constexpr u32 kLeast = 256 - 30;
      const u32 above = max_of_halves(both + 0x01000100 - top, kLeast << 16 | kLeast);
      const u32 halves = (above - (kLeast << 16 | kLeast)) << 10;
      table.v_chunk_scales[pair * 2][place_of_key(key)] = static_cast<unsigned short>(halves);
      table.v_chunk_scales[pair * 2 + 1][place_of_key(key)] =
          static_cast<unsigned short>(halves >> 16);
    }
  } else if constexpr (!kE2m1<TCache>) {
    using Units = ValueUnits<TCache, kWidthV>;
    u32 scales[kWidthV / 32];
    bool large = false;
#pragma unroll
    for (int chunk = 0; chunk < kWidthV / 32; ++chunk) {
      scales[chunk] = chunk_scale<TCache>(own, chunk, v);
      large = large || Units::is_large(scales[chunk]);
    }
    if (units.unit == 1.0f && __any_sync(kAllLanes, large)) {
      units.unit = Units::kRaised;
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= 1.0f / Units::kRaised;
      }
    }
    const u32 factor = units.unit == 1.0f ? 0x3c003c00 : 0x30003000;
#pragma unroll
    for (int chunk = 0; chunk < kWidthV / 32; ++chunk) {
      table.v_chunk_scales[chunk][place_of_key(key)] =
          static_cast<unsigned short>(multiply_halves(scales[chunk], factor));
    }
  }
}

// o += weights * values of a tile, as `multiply_values` adds wider elements.
template <typename TCache, int kWidthV, int kOwn, int kValues, typename Table>
__device__ __forceinline__ void multiply_values_four_bit(float (&o)[kValues][4],
                                                         const float (&s)[4][kOwn],
                                                         const char* values, const Table& table,
                                                         int stage) {
  constexpr int kRowBytes = kWidthV / 2;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    WeightPairs<kOwn * 4> weights;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float (&pairs)[kOwn] = s[2 * k + i / (kOwn / 2)];
      const int at = i % (kOwn / 2) * 2;
      split_pair<half>(pairs[at], pairs[at + 1], weights.pairs[i], weights.rests[i]);
    }
#pragma unroll
    for (int pair = 0; pair < kWidthV / 64; ++pair) {
      u32 b[4];  // of either chunk, keys 0 to 7 and 8 to 15
      load_matrices<true>(b,
                          values + chunk_at<kRowBytes>(k * 16 + lane % 16, pair * 2 + lane / 16));
      u32 scales[2][2];  // by chunk, then as the keys of b
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = k * 16 + h * 8 + lane % 4 * 2;
        if constexpr (kSameType<TCache, nvfp4>) {
          // Of four groups of either key, this lane's columns are in the even or in the odd ones.
          const u32 first = *reinterpret_cast<const u32*>(table.v_groups[stage][key] + pair * 4);
          const u32 second =
              *reinterpret_cast<const u32*>(table.v_groups[stage][key + 1] + pair * 4);
          widen_scales(__byte_perm(first, second, lane & 16 ? 0x7351 : 0x6240), scales[0][h],
                       scales[1][h]);
        }
      }
      if constexpr (!kSameType<TCache, nvfp4>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Pack<u32, 2> two;
          two.load(reinterpret_cast<const char*>(
              &table.v_chunk_scales[pair * 2 + i][lane % 4 * 8 + k * 4]));
          scales[i][0] = two.values[0];
          scales[i][1] = two.values[1];
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        EightHalves codes[2] = {spread_codes<TCache>(b[2 * i]), spread_codes<TCache>(b[2 * i + 1])};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          __syncwarp();  // else products come too early, and spill
          u32 columns[2][2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              columns[c][h] = multiply_halves(codes[h].pairs[2 * j + c], scales[i][h]);
            }
          }
          add_weighted<half>(o, (pair * 2 + i) * 2 + j, weights, columns[0], columns[1]);
        }
      }
    }
  }
}
