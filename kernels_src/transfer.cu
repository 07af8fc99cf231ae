// Move pages between pools: any layout to any layout, GPU memory and pinned host memory alike.
//
// The grid is small, so that the model keeps its SMs, and a link with microseconds of latency is
// kept busy by what each thread has in flight: four words of K and four of V, all loaded before the
// first is stored. They lie in one row where rows are long, in four rows where they are short.
// Neighbouring lanes move neighbouring words, so a link sees full transactions. Pages are not read
// again soon: loads and stores are streaming.
//
// Bytes: each row is read once and written once, plus two page numbers per piece.
#include "four_bit.cuh"
#include "transfer_rows.cuh"

constexpr int kTransferThreads = 512;
constexpr int kConvertThreads = 256;
constexpr int kConvertBlocksPerSm = 2;  // 128 registers: what counts is what a thread has in flight

struct TransferCopyParams {
  const char* src_k;      // [src_num_pages, rows by strides, k_words]
  const char* src_v;      // [src_num_pages, rows by strides, v_words]
  char* dst_k;            // [dst_num_pages, rows by strides, k_words]
  char* dst_v;            // [dst_num_pages, rows by strides, v_words]
  const char* src_pages;  // [num_pairs] int32 or int64
  const char* dst_pages;  // [num_pairs] int32 or int64
  FaultRecord* faults;
  TransferStrides src_k_strides;
  TransferStrides src_v_strides;
  TransferStrides dst_k_strides;
  TransferStrides dst_v_strides;
  TransferRows rows;
  i64 k_words;  // per row
  i64 v_words;  // per row; 0: there is no V
  int piece_words;
  int src_is_table;  // of kTables: src_k and src_v are [layers] addresses, by axis 0
  int dst_is_table;
};

template <bool kTables>
__device__ __forceinline__ char* array_of(const char* array, int is_table,
                                          const TransferPlace& at) {
  if (!kTables || !is_table) return const_cast<char*>(array);
  return reinterpret_cast<char*>(reinterpret_cast<const u64*>(array)[at.axis_0]);
}

__device__ __forceinline__ int words_of_piece(i64 row_words, const TransferPlace& at,
                                              int piece_words) {
  const i64 left = row_words - i64{at.piece} * piece_words;
  return static_cast<int>(left < 0 ? 0 : left < piece_words ? left : piece_words);
}

// grid: at most max_blocks, block: kTransferThreads, smem: 0
template <int kWordBytes, int kRows, bool kTables = false>
__global__ void __launch_bounds__(kTransferThreads)
    transfer_copy(const __grid_constant__ TransferCopyParams p) {
  using W = Word<kWordBytes>;
  constexpr int kInFlight = 4;  // words of K, and of V, per thread
  constexpr int kWords = kInFlight / kRows;
  const int lanes = 1 << p.rows.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 groups = gridDim.x * (blockDim.x >> p.rows.lane_shift);
  const u32 group =
      blockIdx.x * (blockDim.x >> p.rows.lane_shift) + (threadIdx.x >> p.rows.lane_shift);

  for (u32 first = group; first < p.rows.num_pieces; first += groups * kRows) {
    const char* k_from[kRows];
    const char* v_from[kRows];
    char* k_to[kRows];
    char* v_to[kRows];
    int k_words[kRows];
    int v_words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const TransferPlace at =
          find_piece(p.rows, p.src_pages, p.dst_pages, p.faults, first + r * groups, lane == 0);
      const bool live = at.src_page >= 0;
      const i64 src = live ? at.src_page : 0;
      const i64 dst = live ? at.dst_page : 0;
      const i64 skipped = i64{at.piece} * p.piece_words * kWordBytes;
      k_from[r] = array_of<kTables>(p.src_k, p.src_is_table, at) +
                  offset_of(p.src_k_strides, src, at) + skipped;
      v_from[r] = array_of<kTables>(p.src_v, p.src_is_table, at) +
                  offset_of(p.src_v_strides, src, at) + skipped;
      k_to[r] = array_of<kTables>(p.dst_k, p.dst_is_table, at) +
                offset_of(p.dst_k_strides, dst, at) + skipped;
      v_to[r] = array_of<kTables>(p.dst_v, p.dst_is_table, at) +
                offset_of(p.dst_v_strides, dst, at) + skipped;
      k_words[r] = live ? words_of_piece(p.k_words, at, p.piece_words) : 0;
      v_words[r] = live ? words_of_piece(p.v_words, at, p.piece_words) : 0;
    }

    for (int word = lane; word < p.piece_words; word += lanes * kWords) {
      W k[kInFlight];
      W v[kInFlight];
      // Load
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int r = i / kWords;
        const int w = word + i % kWords * lanes;
        if (w < k_words[r]) k[i] = load_streaming(reinterpret_cast<const W*>(k_from[r]) + w);
        if (w < v_words[r]) v[i] = load_streaming(reinterpret_cast<const W*>(v_from[r]) + w);
      }
      // Store
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int r = i / kWords;
        const int w = word + i % kWords * lanes;
        if (w < k_words[r]) store_streaming(reinterpret_cast<W*>(k_to[r]) + w, k[i]);
        if (w < v_words[r]) store_streaming(reinterpret_cast<W*>(v_to[r]) + w, v[i]);
      }
    }
  }
}

// How rows are stored in a four-bit pool.
struct FourBitPool {
  int group_shift;      // log2 of the elements that share a scale
  int code_word_bytes;  // in which codes are accessed: 1, 2, 4 or 8
  RotatedPart k_rotated;
  RotatedPart v_rotated;
  int four_over_six;  // as in GroupScales
};

struct TransferConvertParams {
  const char* src_k;        // [src_num_pages, rows by strides, k_width]
  const char* src_v;        // [src_num_pages, rows by strides, v_width]
  const char* src_k_scale;  // [src_num_pages, rows by strides] float32, or null: 1
  const char* src_v_scale;
  char* dst_k;
  char* dst_v;
  char* dst_k_scale;  // or null: 1
  char* dst_v_scale;
  const char* src_pages;  // [num_pairs] int32 or int64
  const char* dst_pages;  // [num_pairs] int32 or int64
  FaultRecord* faults;
  TransferStrides src_k_strides;
  TransferStrides src_v_strides;
  TransferStrides src_k_scale_strides;
  TransferStrides src_v_scale_strides;
  TransferStrides dst_k_strides;
  TransferStrides dst_v_strides;
  TransferStrides dst_k_scale_strides;
  TransferStrides dst_v_scale_strides;
  TransferRows rows;
  int k_width;      // elements per row
  int v_width;      // elements per row; 0: there is no V
  FourBitPool src;  // if it is one
  FourBitPool dst;
};

// Packs that a thread holds at a time, of K and of V: all of one row, or one each of as many rows,
// or two each of half as many.
template <typename TIn, int kCount>
constexpr int kHeldPacks = sizeof(TIn) * kCount > 16 ? 2 : 4;

// Convert one row, K or V, by the lanes that share it (at most a warp), of any width. A thread
// holds its first packs, so that they cross the bus once; what lies past them is read again where
// the row needs a scale. Every thread of the warp must call it.
template <typename TIn, typename TOut, int kCount>
__device__ __forceinline__ void convert_row(const char* from, const char* from_scale, char* to,
                                            char* to_scale, int width, int lane, int lanes) {
  constexpr int kHeld = 2 * kHeldPacks<TIn, kCount>;
  const float factor = width && from_scale ? *reinterpret_cast<const float*>(from_scale) : 1.0f;
  const int step = lanes * kCount;
  const auto load = [&](int i) {
    Pack<TIn, kCount> in;
    in.load(from + i * static_cast<int>(sizeof(TIn)));
    return in;
  };
  Pack<TIn, kCount> held[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = lane * kCount + j * step;
    if (i < width) held[j] = load(i);
  }
  const int rest = lane * kCount + kHeld * step;  // the first element that is not held
  float scale = 1.0f;
  if constexpr (kQuantised<TOut>) {
    if (to_scale) {
      AbsMax<kCount> largest;
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        if (lane * kCount + j * step < width) largest.add(products(to_floats(held[j]), factor));
      }
      for (int i = rest; i < width; i += step) largest.add(products(to_floats(load(i)), factor));
      scale = dynamic_scale<TOut>(max_within_warp(largest.value(), lanes));
      if (lane == 0 && width) *reinterpret_cast<float*>(to_scale) = scale;
    }
  }
  const ScaleDivisor divisor(scale);
  const auto convert = [&](const Pack<TIn, kCount>& in, int i) {
    const Pack<float, kCount> values = products(to_floats(in), factor);
    char* target = to + i * static_cast<int>(sizeof(TOut));
    if constexpr (kQuantised<TOut>) {
      quantise<TOut>(values, divisor).store(target);
    } else {
      from_floats<TOut>(values).store(target);
    }
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = lane * kCount + j * step;
    hide_value(held[j]);  // else all of it stays in registers as float32, and spills
    if (i < width) convert(held[j], i);
  }
  for (int i = rest; i < width; i += step) convert(load(i), i);
}

// The packs of K, or of V, that a thread holds, from their loads to their stores.
template <typename TIn, typename TOut, int kCount>
struct HeldPacks {
  static constexpr int kHeld = kHeldPacks<TIn, kCount>;

  Pack<TIn, kCount> packs[kHeld];
  float factors[kHeld];

  __device__ __forceinline__ void load(int i, const char* from, const char* from_scale) {
    packs[i].load(from);
    factors[i] = from_scale ? *reinterpret_cast<const float*>(from_scale) : 1.0f;
  }

  __device__ __forceinline__ Pack<float, kCount> values(int i) const {
    return products(to_floats(packs[i]), factors[i]);
  }
};

// The same by threads that hold all their packs of `kHeld >> shift` rows, and have found where each
// goes: null, nowhere. `elements` are the first of each pack in its row, and `scale_at` returns
// where the scale of a pack's row goes. Every thread of the warp must call it.
template <typename TIn, typename TOut, int kCount, int kHeld, typename ScaleAt>
__device__ __forceinline__ void convert_held(const HeldPacks<TIn, TOut, kCount>& held,
                                             char* const (&targets)[kHeld],
                                             const int (&elements)[kHeld], int shift, int lanes,
                                             bool scaled, const ScaleAt& scale_at) {
  float scales[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) scales[i] = 1.0f;
  if constexpr (kQuantised<TOut>) {
    if (scaled) {
      float largest[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        AbsMax<kCount> of_pack;
        if (targets[i]) of_pack.add(held.values(i));
        largest[i] = of_pack.value();
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        float of_row = largest[i];
        if (shift > 0) of_row = fmaxf(of_row, largest[i ^ 1]);
        if (kHeld > 2 && shift > 1) {
          of_row = fmaxf(of_row, fmaxf(largest[(i ^ 2) % kHeld], largest[(i ^ 3) % kHeld]));
        }
        scales[i] = dynamic_scale<TOut>(max_within_warp(of_row, lanes));
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (targets[i] && elements[i] == 0) *scale_at(i) = scales[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!targets[i]) continue;
    if constexpr (kQuantised<TOut>) {
      quantise<TOut>(held.values(i), ScaleDivisor(scales[i])).store(targets[i]);
    } else {
      from_floats<TOut>(held.values(i)).store(targets[i]);
    }
  }
}

// Where the scale of a row is; null if there are none.
__device__ __forceinline__ const char* scale_of(const char* scales, const TransferStrides& strides,
                                                i64 page, const TransferPlace& at) {
  return scales ? scales + offset_of(strides, page, at) : nullptr;
}

// A row is one (layer, offset, head), and has its own scale where a pool keeps scales. A thread
// loads all its packs of several rows, K and V, and holds them until they are stored, so that each
// byte crosses a link once. Rows too long for that are converted one after the other.
// grid: at most max_blocks, block: kConvertThreads, smem: 0
template <typename TIn, typename TOut, int kCount>
__global__ void __launch_bounds__(kConvertThreads, kConvertBlocksPerSm)
    transfer_convert(const __grid_constant__ TransferConvertParams p) {
  constexpr int kHeld = kHeldPacks<TIn, kCount>;
  const int lanes = 1 << p.rows.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 groups = gridDim.x * (blockDim.x >> p.rows.lane_shift);
  const u32 group =
      blockIdx.x * (blockDim.x >> p.rows.lane_shift) + (threadIdx.x >> p.rows.lane_shift);
  const u32 of_warp = group & (32 / lanes - 1);
  const int packs_per_row = 1 + (max(p.k_width, p.v_width) - 1) / (lanes * kCount);

  // The loops are warp-uniform: lanes exchange values.
  if (packs_per_row > kHeld) {
    for (u32 first = group - of_warp; first < p.rows.num_pieces; first += groups) {
      const TransferPlace at =
          find_piece(p.rows, p.src_pages, p.dst_pages, p.faults, first + of_warp, lane == 0);
      const bool live = at.src_page >= 0;
      const i64 src = live ? at.src_page : 0;
      const i64 dst = live ? at.dst_page : 0;
      // One copy of the code serves both: two of them spill on sm_120 with NVRTC 13.
#pragma unroll 1
      for (int operand = 0; operand < 2; ++operand) {
        const bool is_v = operand == 1;
        const char* from = is_v ? p.src_v : p.src_k;
        const char* from_scale = is_v ? p.src_v_scale : p.src_k_scale;
        char* to = is_v ? p.dst_v : p.dst_k;
        char* to_scale = is_v ? p.dst_v_scale : p.dst_k_scale;
        const auto& from_strides = is_v ? p.src_v_strides : p.src_k_strides;
        const auto& to_strides = is_v ? p.dst_v_strides : p.dst_k_strides;
        const auto& from_scale_strides = is_v ? p.src_v_scale_strides : p.src_k_scale_strides;
        const auto& to_scale_strides = is_v ? p.dst_v_scale_strides : p.dst_k_scale_strides;
        const int width = is_v ? p.v_width : p.k_width;
        convert_row<TIn, TOut, kCount>(
            from + offset_of(from_strides, src, at),
            scale_of(from_scale, from_scale_strides, src, at), to + offset_of(to_strides, dst, at),
            const_cast<char*>(scale_of(to_scale, to_scale_strides, dst, at)), live ? width : 0,
            lane, lanes);
      }
    }
    return;
  }

  const int shift = packs_per_row > 2 ? 2 : packs_per_row - 1;
  for (u32 first = group - of_warp; first < p.rows.num_pieces; first += groups * (kHeld >> shift)) {
    HeldPacks<TIn, TOut, kCount> k;
    HeldPacks<TIn, TOut, kCount> v;
    char* k_targets[kHeld];
    char* v_targets[kHeld];
    int elements[kHeld];
    const auto place_of = [&](int i, bool reports) {
      return find_piece(p.rows, p.src_pages, p.dst_pages, p.faults,
                        first + of_warp + (i >> shift) * groups, reports);
    };
    // Load
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int pack = i & ((1 << shift) - 1);
      elements[i] = (pack * lanes + lane) * kCount;
      k_targets[i] = v_targets[i] = nullptr;
      const TransferPlace at = place_of(i, elements[i] == 0);
      if (at.src_page < 0) continue;
      const i64 skipped = elements[i] * static_cast<int>(sizeof(TIn));
      const i64 moved = elements[i] * static_cast<int>(sizeof(TOut));
      if (elements[i] < p.k_width) {
        k.load(i, p.src_k + offset_of(p.src_k_strides, at.src_page, at) + skipped,
               scale_of(p.src_k_scale, p.src_k_scale_strides, at.src_page, at));
        k_targets[i] = p.dst_k + offset_of(p.dst_k_strides, at.dst_page, at) + moved;
      }
      if (elements[i] < p.v_width) {
        v.load(i, p.src_v + offset_of(p.src_v_strides, at.src_page, at) + skipped,
               scale_of(p.src_v_scale, p.src_v_scale_strides, at.src_page, at));
        v_targets[i] = p.dst_v + offset_of(p.dst_v_strides, at.dst_page, at) + moved;
      }
    }
    // Convert, Store. The places of scales are looked up again, and hold no registers meanwhile.
    const auto scale_at = [&](char* scales, const TransferStrides& strides, int i) {
      const TransferPlace at = place_of(i, false);
      return reinterpret_cast<float*>(scales + offset_of(strides, at.dst_page, at));
    };
    convert_held<TIn, TOut>(k, k_targets, elements, shift, lanes, p.dst_k_scale, [&](int i) {
      return scale_at(p.dst_k_scale, p.dst_k_scale_strides, i);
    });
    convert_held<TIn, TOut>(
        v, v_targets, elements, shift, lanes, p.dst_v_scale && p.v_width,
        [&](int i) { return scale_at(p.dst_v_scale, p.dst_v_scale_strides, i); });
  }
}

// --- Four-bit pools ------------------------------------------------------------------------------

// A row of a pool: codes, and the group scales behind them.
__device__ __forceinline__ FourBitRow packed_row(char* row, int width) {
  return {row, row + width / 2};
}

// What four_bit.cuh asks of an operand whose rows have been found.
__device__ __forceinline__ KVOperand groups_of(const FourBitPool& pool) {
  KVOperand operand{};
  operand.group_scales.group_shift = pool.group_shift;
  operand.group_scales.code_word_bytes = pool.code_word_bytes;
  operand.group_scales.four_over_six = pool.four_over_six;
  return operand;
}

// Sixteen elements of a row, times its scale if it is quantised.
template <typename TIn>
__device__ __forceinline__ auto scaled_sixteen(const Pack<TIn, kCodesPerThread>& x, float factor) {
  if constexpr (kQuantised<TIn>) {
    return products(to_floats(x), factor);
  } else {
    return x;
  }
}

// Chosen before the loop, so that other rows keep their machine code.
struct NotRotated {};

// The codes of 16 elements, and their group's scale; of none, zeros.
template <typename TFormat>
struct HeldCodes {
  SixteenCodes codes;
  u32 scale_bits;

  __device__ __forceinline__ void load(const char* row, int width, int element, bool live,
                                       const KVOperand& operand) {
    codes.words[0] = codes.words[1] = scale_bits = 0;
    if (live && element < width) {
      const FourBitRow packed = packed_row(const_cast<char*>(row), width);
      load_in_group<TFormat>(packed, element, operand, codes, scale_bits);
    }
  }

  // Every thread of the warp must call what follows: lanes exchange what was rotated.
  __device__ __forceinline__ Sixteen values(float, const Rotation& rotation) const {
    return values(rotation);
  }

  __device__ __forceinline__ Sixteen values(const Rotation& rotation) const {
    Sixteen x = decode_codes<TFormat>(codes, group_step<TFormat>(scale_bits, 1.0f));
    if (rotation.most_shift) rotate_sixteen(x, rotation);
    return x;
  }

  __device__ __forceinline__ Sixteen values(NotRotated) const {
    return decode_codes<TFormat>(codes, group_step<TFormat>(scale_bits, 1.0f));
  }

  template <typename TRotation>
  __device__ __forceinline__ float absmax(const TRotation& rotation) const {
    AbsMax<kCodesPerThread> largest;
    largest.add(values(rotation));
    return largest.value();
  }

  template <typename TOut, int kCount>
  __device__ __forceinline__ void store(char* target, float scale, bool has,
                                        const Rotation& rotation) const {
    const Sixteen x = values(rotation);
    if (has) store_values<TOut, kCount>(x, target, scale);
  }

  // Of a row that is not rotated: by the threads that have elements.
  template <typename TOut, int kCount>
  __device__ __forceinline__ void store(char* target, float scale, bool has, NotRotated) const {
    if (has) store_values<TOut, kCount>(values(NotRotated{}), target, scale);
  }

 private:
  template <typename TOut, int kCount>
  static __device__ __forceinline__ void store_values(const Sixteen& x, char* target, float scale) {
    if constexpr (kQuantised<TOut>) {
      store_sixteen<TOut, kCount>(quantise<TOut>(x, ScaleDivisor(scale)), target);
    } else {
      store_sixteen<TOut, kCount>(from_floats<TOut>(x), target);
    }
  }
};

// Sixteen elements of a pool of another format, times the scale of their row; of none, zeros.
template <typename TIn, int kCount>
struct HeldElements {
  Pack<TIn, kCodesPerThread> elements;

  __device__ __forceinline__ void load(const char* row, int width, int element, bool live,
                                       const KVOperand&) {
    elements = {};
    if (!live || element >= width) return;
    elements = load_sixteen<TIn, kCount>(row + element * static_cast<int>(sizeof(TIn)));
  }

  __device__ __forceinline__ auto values(float factor, const Rotation&) const {
    return scaled_sixteen(elements, factor);
  }
};

#if !KVCUPY_ARCH
// Encode a row by one thread, which holds every group.
template <typename TIn, typename TFormat, int kCount>
inline void encode_row_alone(const char* from, float factor, int width, char* to,
                             const KVOperand& source, const RotatedPart& source_rotated,
                             const KVOperand& operand, const RotatedPart& rotated) {
  const FourBitRow row = packed_row(to, width);
  if constexpr (!kQuantised<TIn> && !kFourBit<TIn>) {
    if (rotated.shift == 0) {
      store_row_alone<TIn, TFormat, kCount>(from, 1.0f, width, row, operand);
      return;
    }
  }
  alignas(64) float x[kElementsAlone];
  for (int first = 0; first < width; first += kElementsAlone) {
    const int count = min(kElementsAlone, width - first);
    if constexpr (kFourBit<TIn>) {
      const FourBitRow packed = packed_row(const_cast<char*>(from), width);
      decode_alone<TIn>(packed, 1.0f, first, count, source, source_rotated, x);
    } else {
      for (int i = 0; i < count; ++i) {
        x[i] = to_float(reinterpret_cast<const TIn*>(from)[first + i]);
        if constexpr (kQuantised<TIn>) x[i] *= factor;
      }
    }
    encode_alone<TFormat>(x, 1.0f, first, count, row, operand, rotated);
  }
}
#endif

// Into a four-bit pool: a thread takes 16 elements of K and 16 of V, of as many rows at a time as
// it has registers for. A group is a part of a row, which neighbouring lanes share; they number at
// least a group's packs. The source may be another four-bit pool.
// grid: at most max_blocks, block: kConvertThreads, smem: 0
template <typename TIn, typename TFormat, int kCount>
__global__ void __launch_bounds__(kConvertThreads, kConvertBlocksPerSm)
    transfer_to_four_bit(const __grid_constant__ TransferConvertParams p) {
  using Held = SelectType<kFourBit<TIn>, HeldCodes<TIn>, HeldElements<TIn, kCount>>;
  constexpr int kRows = sizeof(TIn) > 2 ? 1 : 2;
  const KVOperand source = groups_of(p.src);
  const KVOperand operand = groups_of(p.dst);
  const int lanes = 1 << p.rows.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 groups = gridDim.x * (blockDim.x >> p.rows.lane_shift);
  const u32 group =
      blockIdx.x * (blockDim.x >> p.rows.lane_shift) + (threadIdx.x >> p.rows.lane_shift);
  const u32 of_warp = group & (32 / lanes - 1);

  // The loops are warp-uniform: lanes exchange values.
  for (u32 first = group - of_warp; first < p.rows.num_pieces; first += groups * kRows) {
    const char* k_from[kRows];
    const char* v_from[kRows];
    char* k_to[kRows];
    char* v_to[kRows];
    float k_factors[kRows];
    float v_factors[kRows];
    bool live[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const TransferPlace at = find_piece(p.rows, p.src_pages, p.dst_pages, p.faults,
                                          first + of_warp + r * groups, lane == 0);
      live[r] = at.src_page >= 0;
      const i64 src = live[r] ? at.src_page : 0;
      const i64 dst = live[r] ? at.dst_page : 0;
      k_from[r] = p.src_k + offset_of(p.src_k_strides, src, at);
      v_from[r] = p.src_v + offset_of(p.src_v_strides, src, at);
      k_to[r] = p.dst_k + offset_of(p.dst_k_strides, dst, at);
      v_to[r] = p.dst_v + offset_of(p.dst_v_strides, dst, at);
      k_factors[r] = v_factors[r] = 1.0f;
      if constexpr (kQuantised<TIn>) {
        const char* k_scale = scale_of(p.src_k_scale, p.src_k_scale_strides, src, at);
        const char* v_scale = scale_of(p.src_v_scale, p.src_v_scale_strides, src, at);
        if (live[r] && k_scale) k_factors[r] = *reinterpret_cast<const float*>(k_scale);
        if (live[r] && v_scale) v_factors[r] = *reinterpret_cast<const float*>(v_scale);
      }
    }
#if !KVCUPY_ARCH
    if (lanes == 1) {
      for (int r = 0; r < kRows; ++r) {
        if (!live[r]) continue;
        encode_row_alone<TIn, TFormat, kCount>(k_from[r], k_factors[r], p.k_width, k_to[r], source,
                                               p.src.k_rotated, operand, p.dst.k_rotated);
        encode_row_alone<TIn, TFormat, kCount>(v_from[r], v_factors[r], p.v_width, v_to[r], source,
                                               p.src.v_rotated, operand, p.dst.v_rotated);
      }
      continue;
    }
#endif

    for (int start = 0; start < max(p.k_width, p.v_width); start += lanes * kCodesPerThread) {
      const int element = start + lane * kCodesPerThread;
      const bool has_k = element < p.k_width;
      const bool has_v = element < p.v_width;
      Held k[kRows];
      Held v[kRows];
      // Load
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        k[r].load(k_from[r], p.k_width, element, live[r], source);
        v[r].load(v_from[r], p.v_width, element, live[r], source);
      }
      // Convert, Store
      const auto store = [&](const auto& x, char* to, int width, bool has,
                             const RotatedPart& rotated) __attribute__((always_inline)) {
        const FourBitRow row = packed_row(to, width);
        if (rotated.shift == 0 && is_stored_plainly(operand)) {
          store_in_group<TFormat>(x, 1.0f, element, has, row, operand);
        } else {
          rotate_in_group<TFormat>(x, 1.0f, element, has, row, operand,
                                   rotation_at(rotated, element));
        }
      };
      const Rotation of_k = rotation_at(p.src.k_rotated, element);
      const Rotation of_v = rotation_at(p.src.v_rotated, element);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        store(k[r].values(k_factors[r], of_k), k_to[r], p.k_width, live[r] && has_k,
              p.dst.k_rotated);
        if (p.v_width) {
          store(v[r].values(v_factors[r], of_v), v_to[r], p.v_width, live[r] && has_v,
                p.dst.v_rotated);
        }
      }
    }
  }
}

// The scale that a row gets in a quantised pool, from its lanes' largest magnitude.
template <typename TOut>
__device__ __forceinline__ float scale_of_row(float absmax, int lanes) {
  if constexpr (kQuantised<TOut>) return dynamic_scale<TOut>(max_within_warp(absmax, lanes));
  return 1.0f;
}

// The same of a row that its lanes read in several steps.
template <typename TFormat, typename TOut, typename TRotation>
__device__ __forceinline__ float scale_of_long_row(char* row, int width, bool live, int lane,
                                                   int lanes, const KVOperand& operand,
                                                   const RotatedPart& rotated,
                                                   const TRotation& rotation_of_part) {
  float absmax = 0.0f;
  for (int start = 0; start < width; start += lanes * kCodesPerThread) {
    const int element = start + lane * kCodesPerThread;
    HeldCodes<TFormat> held;
    held.load(row, width, element, live, operand);
    absmax = fmaxf(absmax, held.absmax(rotation_of_part(rotated, element)));
  }
  return scale_of_row<TOut>(absmax, lanes);
}

#if !KVCUPY_ARCH
// Restore a row by one thread, and store its scale, if it gets one.
template <typename TFormat, typename TOut, int kCount>
inline void restore_row_alone(char* from, int width, char* to, float* scale_to,
                              const KVOperand& operand, const RotatedPart& rotated) {
  const FourBitRow row = packed_row(from, width);
  alignas(64) float x[kElementsAlone];
  AbsMax<kCodesPerThread> largest;
  for (int pass = scale_to ? 0 : 1; pass < 2; ++pass) {
    const bool stores = pass == 1;
    const float scale = scale_of_row<TOut>(largest.value(), 1);
    if (stores && scale_to) *scale_to = scale;
    for (int first = 0; first < width; first += kElementsAlone) {
      const int count = min(kElementsAlone, width - first);
      decode_alone<TFormat>(row, 1.0f, first, count, operand, rotated, x);
      for (int i = 0; i < count; i += kCodesPerThread) {
        Sixteen values;
        values.load(reinterpret_cast<const char*>(x + i));
        char* target = to + (first + i) * static_cast<int>(sizeof(TOut));
        if (!stores) {
          largest.add(values);
        } else if constexpr (kQuantised<TOut>) {
          const ScaleDivisor divisor(scale_to ? scale : 1.0f);
          store_sixteen<TOut, kCount>(quantise<TOut>(values, divisor), target);
        } else {
          store_sixteen<TOut, kCount>(from_floats<TOut>(values), target);
        }
      }
    }
  }
}
#endif

// Out of a four-bit pool: a thread takes 16 elements of K and 16 of V, of four rows at a time. Rows
// that get a scale are held until it is known, or read twice where they are long.
// grid: at most max_blocks, block: kConvertThreads, smem: 0
template <typename TFormat, typename TOut, int kCount>
__global__ void __launch_bounds__(kConvertThreads, kConvertBlocksPerSm)
    transfer_from_four_bit(const __grid_constant__ TransferConvertParams p) {
  constexpr int kRows = kQuantised<TOut> ? 2 : 4;
  constexpr int kOutBytes = sizeof(TOut);
  const KVOperand operand = groups_of(p.src);
  const int lanes = 1 << p.rows.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 groups = gridDim.x * (blockDim.x >> p.rows.lane_shift);
  const u32 group =
      blockIdx.x * (blockDim.x >> p.rows.lane_shift) + (threadIdx.x >> p.rows.lane_shift);
  const u32 of_warp = group & (32 / lanes - 1);
  const int step = lanes * kCodesPerThread;
#if !KVCUPY_ARCH
  const bool alone = lanes == 1 && (p.src.k_rotated.shift || p.src.v_rotated.shift);
#else
  constexpr bool alone = false;
#endif

  // The loops are warp-uniform: lanes exchange values.
  const auto convert = [&](const auto& rotation_of_part) __attribute__((always_inline)) {
    for (u32 first = group - of_warp; first < p.rows.num_pieces; first += groups * kRows) {
      char* k_from[kRows];
      char* v_from[kRows];
      char* k_to[kRows];
      char* v_to[kRows];
      [[maybe_unused]] float* k_scale_to[kRows];
      [[maybe_unused]] float* v_scale_to[kRows];
      float k_scales[kRows];
      float v_scales[kRows];
      bool live[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const TransferPlace at = find_piece(p.rows, p.src_pages, p.dst_pages, p.faults,
                                            first + of_warp + r * groups, lane == 0);
        live[r] = at.src_page >= 0;
        const i64 src = live[r] ? at.src_page : 0;
        const i64 dst = live[r] ? at.dst_page : 0;
        k_from[r] = const_cast<char*>(p.src_k) + offset_of(p.src_k_strides, src, at);
        v_from[r] = const_cast<char*>(p.src_v) + offset_of(p.src_v_strides, src, at);
        k_to[r] = p.dst_k + offset_of(p.dst_k_strides, dst, at);
        v_to[r] = p.dst_v + offset_of(p.dst_v_strides, dst, at);
        k_scales[r] = v_scales[r] = 1.0f;
        if constexpr (kQuantised<TOut>) {
          k_scale_to[r] = reinterpret_cast<float*>(
              const_cast<char*>(scale_of(p.dst_k_scale, p.dst_k_scale_strides, dst, at)));
          v_scale_to[r] = reinterpret_cast<float*>(
              const_cast<char*>(scale_of(p.dst_v_scale, p.dst_v_scale_strides, dst, at)));
          if (p.dst_k_scale && p.k_width > step && !alone) {
            k_scales[r] =
                scale_of_long_row<TFormat, TOut>(k_from[r], p.k_width, live[r], lane, lanes,
                                                 operand, p.src.k_rotated, rotation_of_part);
          }
          if (p.dst_v_scale && p.v_width > step && !alone) {
            v_scales[r] =
                scale_of_long_row<TFormat, TOut>(v_from[r], p.v_width, live[r], lane, lanes,
                                                 operand, p.src.v_rotated, rotation_of_part);
          }
        }
      }

#if !KVCUPY_ARCH
      if (alone) {
        for (int r = 0; r < kRows; ++r) {
          if (!live[r]) continue;
          float* scales[2] = {};
          if constexpr (kQuantised<TOut>) {
            if (p.dst_k_scale) scales[0] = k_scale_to[r];
            if (p.dst_v_scale && p.v_width) scales[1] = v_scale_to[r];
          }
          restore_row_alone<TFormat, TOut, kCount>(k_from[r], p.k_width, k_to[r], scales[0],
                                                   operand, p.src.k_rotated);
          restore_row_alone<TFormat, TOut, kCount>(v_from[r], p.v_width, v_to[r], scales[1],
                                                   operand, p.src.v_rotated);
        }
        continue;
      }
#endif

      for (int start = 0; start < max(p.k_width, p.v_width); start += step) {
        const int element = start + lane * kCodesPerThread;
        const auto of_k = rotation_of_part(p.src.k_rotated, element);
        constexpr bool kRotates = kSameType<decltype(of_k), const Rotation>;
        const auto of_v = rotation_of_part(p.src.v_rotated, element);
        HeldCodes<TFormat> k[kRows];
        HeldCodes<TFormat> v[kRows];
        // Load
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          k[r].load(k_from[r], p.k_width, element, live[r], operand);
          v[r].load(v_from[r], p.v_width, element, live[r], operand);
        }
        // Convert, Store
        if constexpr (kQuantised<TOut>) {
          if (start == 0 && p.dst_k_scale) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if (p.k_width <= step) k_scales[r] = scale_of_row<TOut>(k[r].absmax(of_k), lanes);
              if (p.v_width <= step) v_scales[r] = scale_of_row<TOut>(v[r].absmax(of_v), lanes);
              if (live[r] && lane == 0) *k_scale_to[r] = k_scales[r];
              if (live[r] && lane == 0 && p.v_width) *v_scale_to[r] = v_scales[r];
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (!kRotates && !live[r]) continue;
          if (kRotates || element < p.k_width) {
            k[r].template store<TOut, kCount>(k_to[r] + element * kOutBytes, k_scales[r],
                                              live[r] && element < p.k_width, of_k);
          }
          if (kRotates || element < p.v_width) {
            v[r].template store<TOut, kCount>(v_to[r] + element * kOutBytes, v_scales[r],
                                              live[r] && element < p.v_width, of_v);
          }
        }
      }
    }
  };
  if (p.src.k_rotated.shift | p.src.v_rotated.shift) {
    convert([](const RotatedPart& part, int element)
                __attribute__((always_inline)) { return rotation_at(part, element); });
  } else {
    convert([](const RotatedPart&, int) __attribute__((always_inline)) { return NotRotated{}; });
  }
}
