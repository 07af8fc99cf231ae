// Move pages between pools: any layout to any layout, GPU memory and pinned host memory alike.
//
// The grid is small, so that the model keeps its SMs, and a link with microseconds of latency is
// kept busy by what each thread has in flight: four words of K and four of V, all loaded before the
// first is stored. They lie in one row where rows are long, in four rows where they are short.
// Neighbouring lanes move neighbouring words, so a link sees full transactions. Pages are not read
// again soon: loads and stores are streaming.
//
// Bytes: each row is read once and written once, plus two page numbers per piece.
#include "numeric.cuh"
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
};

__device__ __forceinline__ int words_of_piece(i64 row_words, const TransferPlace& at,
                                              int piece_words) {
  const i64 left = row_words - i64{at.piece} * piece_words;
  return static_cast<int>(left < 0 ? 0 : left < piece_words ? left : piece_words);
}

// grid: at most max_blocks, block: kTransferThreads, smem: 0
template <int kWordBytes, int kRows>
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
      k_from[r] = p.src_k + offset_of(p.src_k_strides, src, at) + skipped;
      v_from[r] = p.src_v + offset_of(p.src_v_strides, src, at) + skipped;
      k_to[r] = p.dst_k + offset_of(p.dst_k_strides, dst, at) + skipped;
      v_to[r] = p.dst_v + offset_of(p.dst_v_strides, dst, at) + skipped;
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
  int k_width;  // elements per row
  int v_width;  // elements per row; 0: there is no V
};

// Convert one row, K or V, by the lanes that share it (at most a warp), of any width: a row that
// needs a scale is read twice. Every thread of the warp must call it.
template <typename TIn, typename TOut, int kCount>
__device__ __forceinline__ void convert_row(const char* from, const char* from_scale, char* to,
                                            char* to_scale, int width, int lane, int lanes) {
  const float factor = width && from_scale ? *reinterpret_cast<const float*>(from_scale) : 1.0f;
  float scale = 1.0f;
  if constexpr (kQuantised<TOut>) {
    if (to_scale) {
      AbsMax<kCount> largest;
      for (int i = lane * kCount; i < width; i += lanes * kCount) {
        Pack<TIn, kCount> in;
        in.load(from + i * static_cast<int>(sizeof(TIn)));
        largest.add(products(to_floats(in), factor));
      }
      scale = dynamic_scale<TOut>(max_within_warp(largest.value(), lanes));
      if (lane == 0 && width) *reinterpret_cast<float*>(to_scale) = scale;
    }
  }
  const ScaleDivisor divisor(scale);
  for (int i = lane * kCount; i < width; i += lanes * kCount) {
    Pack<TIn, kCount> in;
    // Load
    in.load(from + i * static_cast<int>(sizeof(TIn)));
    // Convert, Store
    const Pack<float, kCount> values = products(to_floats(in), factor);
    char* target = to + i * static_cast<int>(sizeof(TOut));
    if constexpr (kQuantised<TOut>) {
      quantise<TOut>(values, divisor).store(target);
    } else {
      from_floats<TOut>(values).store(target);
    }
  }
}

// Packs that a thread holds at a time, of K and of V: those of one row, or one each of as many
// rows, or two each of half as many.
template <typename TIn, int kCount>
constexpr int kHeldPacks = sizeof(TIn) * kCount > 16 ? 2 : 4;

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

// A row is one (layer, offset, head), with a scale of its own where a pool keeps scales. A thread
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
      convert_row<TIn, TOut, kCount>(
          p.src_k + offset_of(p.src_k_strides, src, at),
          scale_of(p.src_k_scale, p.src_k_scale_strides, src, at),
          p.dst_k + offset_of(p.dst_k_strides, dst, at),
          const_cast<char*>(scale_of(p.dst_k_scale, p.dst_k_scale_strides, dst, at)),
          live ? p.k_width : 0, lane, lanes);
      convert_row<TIn, TOut, kCount>(
          p.src_v + offset_of(p.src_v_strides, src, at),
          scale_of(p.src_v_scale, p.src_v_scale_strides, src, at),
          p.dst_v + offset_of(p.dst_v_strides, dst, at),
          const_cast<char*>(scale_of(p.dst_v_scale, p.dst_v_scale_strides, dst, at)),
          live ? p.v_width : 0, lane, lanes);
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
    // Convert, Store. What only scales need is looked up again, and holds no registers meanwhile.
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
