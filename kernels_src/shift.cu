// Move cached keys to other positions: rotate each by the difference, in place or onto other pages.
//
// A row is the key of one (page, layer, offset, head), found as in transfer_rows.cuh, and a group
// of `lanes` neighbouring threads takes one. A rotation by delta is the table's row |delta|, its
// sines negated where delta is negative. An attention factor of the table is in the key already: it
// is the cosine of position 0, by which the row is divided. A quantised row is dequantised, rotated
// in float32, and quantised as a store would, with a new scale where the pool has scales: it
// is read twice, the second time from L1. A static scale cancels.
// Onto other pages the rest of each row is copied, and its value.
//
// Bytes: the rotated part of each key is read once and written once, onto other pages all of the
// key and the value; cos and sin of a page stay in L1.
#include "four_bit.cuh"
#include "transfer_rows.cuh"

constexpr int kShiftThreads = 128;  // of a block, at most

struct ShiftParams {
  char* keys;             // [num_pages, rows by three strides, width]
  char* values;           // [num_pages, rows by strides, value_bytes], or null: they stay
  char* key_scales;       // [num_pages, rows by strides] float32, or null: static scales
  char* value_scales;     // likewise
  const char* src_pages;  // [num_pairs] int32 or int64
  const char* dst_pages;  // [num_pairs] int32 or int64; src_pages itself: in place
  const char* deltas;     // [num_pairs] int32 or int64, or null: delta
  const char* table;      // [max_positions, rotary_dim] float32, [cos | sin]
  FaultRecord* faults;
  TransferStrides key_strides;
  TransferStrides value_strides;
  TransferStrides key_scale_strides;
  TransferStrides value_scale_strides;
  TransferRows rows;
  KVOperand key;  // group scales of four-bit keys
  i64 delta;
  i64 delta_stride_bytes;
  i64 delta_operation;  // for the fault record
  i64 table_row_bytes;
  i64 max_positions;
  int delta_index_bytes;
  int width;  // elements of a key
  int start;  // the first that is rotated
  int rotary_dim;
  int interleaved;
  int value_bytes;
  int value_word_bytes;  // in which values are copied: 16, 8, 4, or any other for 1
};

// --- Angles --------------------------------------------------------------------------------------

// The rotation of a page. `row` is null where the table has no such row.
struct PageShift {
  const char* row;
  float sign;
};

// Find the rotation of the page of a row; a fault, once for each page, if the table lacks it.
__device__ __forceinline__ PageShift find_shift(const ShiftParams& p, u32 number, int lane) {
  const u32 position = divide(number, p.rows.pieces_per_page);
  i64 delta = p.delta;
  if (p.deltas) {
    delta = load_index(p.deltas + position * p.delta_stride_bytes, p.delta_index_bytes);
  }
  const u64 distance = delta < 0 ? u64{0} - static_cast<u64>(delta) : static_cast<u64>(delta);
  if (distance >= static_cast<u64>(p.max_positions)) {
    const bool first_of_page = number == position * p.rows.pieces_per_page.divisor && lane == 0;
    if (first_of_page) report_fault(p.faults, p.delta_operation, position, delta);
    return {nullptr, 0.0f};
  }
  return {p.table + static_cast<i64>(distance) * p.table_row_bytes, delta < 0 ? -1.0f : 1.0f};
}

// cos and sin of pairs i .. i + kCount - 1, without the attention factor.
template <int kCount>
__device__ __forceinline__ void load_angles(const ShiftParams& p, const PageShift& shift, int i,
                                            Pack<float, kCount>& cosine,
                                            Pack<float, kCount>& sine) {
  constexpr int kFloatBytes = sizeof(float);
  const int half = p.rotary_dim / 2;
  Pack<float, kCount> factor;
  cosine.load(shift.row + i * kFloatBytes);
  sine.load(shift.row + (half + i) * kFloatBytes);
  factor.load(p.table + i * kFloatBytes);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (factor.values[j] != 1.0f) {
      cosine.values[j] = __fdiv_rn(cosine.values[j], factor.values[j]);
      sine.values[j] = __fdiv_rn(sine.values[j], factor.values[j]);
    }
    sine.values[j] *= shift.sign;
  }
}

// --- Values --------------------------------------------------------------------------------------

template <int kBytes>
__device__ __forceinline__ void copy_words(const char* from, char* to, int bytes, int lane,
                                           int lanes) {
  for (int i = lane * kBytes; i < bytes; i += lanes * kBytes) {
    *reinterpret_cast<Word<kBytes>*>(to + i) = *reinterpret_cast<const Word<kBytes>*>(from + i);
  }
}

// Copy the value of a row, and its scale.
__device__ __forceinline__ void copy_value(const ShiftParams& p, const TransferPlace& at, int lane,
                                           int lanes) {
  if (!p.values) return;
  const char* from = p.values + offset_of(p.value_strides, at.src_page, at);
  char* to = p.values + offset_of(p.value_strides, at.dst_page, at);
  if (p.value_word_bytes == 16) {
    copy_words<16>(from, to, p.value_bytes, lane, lanes);
  } else if (p.value_word_bytes == 8) {
    copy_words<8>(from, to, p.value_bytes, lane, lanes);
  } else if (p.value_word_bytes == 4) {
    copy_words<4>(from, to, p.value_bytes, lane, lanes);
  } else {
    copy_words<1>(from, to, p.value_bytes, lane, lanes);
  }
  if (p.value_scales && lane == 0) {
    copy_words<4>(p.value_scales + offset_of(p.value_scale_strides, at.src_page, at),
                  p.value_scales + offset_of(p.value_scale_strides, at.dst_page, at), 4, 0, 1);
  }
}

// --- Rows of whole bytes per element -------------------------------------------------------------

// A key on its way to another position.
template <typename T, int kCount>
struct ShiftedRow {
  const ShiftParams& p;
  const PageShift& shift;
  const char* in;
  float factor;  // its scale

  static constexpr int kBytes = sizeof(T);

  __device__ __forceinline__ Pack<float, kCount> values(const Pack<T, kCount>& x) const {
    if constexpr (kQuantised<T>) return products(to_floats(x), factor);
    return to_floats(x);
  }

  // Pairs i .. i + kCount - 1, rotated. One pair alone is two accesses: it may begin at any
  // element.
  __device__ __forceinline__ void rotated(int i, Pack<float, kCount>& x,
                                          Pack<float, kCount>& y) const {
    Pack<T, kCount> first;
    Pack<T, kCount> second;
    const char* part = in + p.start * kBytes;
    if (kCount > 1 && p.interleaved) {
      Pack<T, 2 * kCount> both;
      both.load(part + 2 * i * kBytes);
      split(both, first, second);
    } else {
      first.load(part + first_of_pair(i) * kBytes);
      second.load(part + second_of_pair(i) * kBytes);
    }
    Pack<float, kCount> cosine;
    Pack<float, kCount> sine;
    load_angles(p, shift, i, cosine, sine);
    rotate(values(first), values(second), cosine, sine, x, y);
  }

  __device__ __forceinline__ void store_pairs(char* out, int i, const Pack<T, kCount>& x,
                                              const Pack<T, kCount>& y) const {
    char* part = out + p.start * kBytes;
    if (kCount > 1 && p.interleaved) {
      merge(x, y).store(part + 2 * i * kBytes);
    } else {
      x.store(part + first_of_pair(i) * kBytes);
      y.store(part + second_of_pair(i) * kBytes);
    }
  }

  // The i-th element of those that are not rotated.
  __device__ __forceinline__ int passing(int i) const { return i < p.start ? i : i + p.rotary_dim; }

  __device__ __forceinline__ Pack<T, kCount> pass(int i) const {
    Pack<T, kCount> x;
    x.load(in + passing(i) * kBytes);
    return x;
  }

  __device__ __forceinline__ int first_of_pair(int i) const { return p.interleaved ? 2 * i : i; }
  __device__ __forceinline__ int second_of_pair(int i) const {
    return p.interleaved ? 2 * i + 1 : i + p.rotary_dim / 2;
  }
};

// No thread exits before the reduction is done.
// One block is asked for, so that ptxas takes what registers it needs: else it aims at more blocks
// and spills.
// grid: (rows / (block / lanes)), block: (a multiple of lanes and of 32), smem: 0
template <typename T, int kCount>
__global__ void __launch_bounds__(kShiftThreads, 1)
    shift_rows(const __grid_constant__ ShiftParams p) {
  const int lanes = 1 << p.rows.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 number =
      blockIdx.x * (blockDim.x >> p.rows.lane_shift) + (threadIdx.x >> p.rows.lane_shift);

  // Guards
  const TransferPlace at =
      find_piece(p.rows, p.src_pages, p.dst_pages, p.faults, number, lane == 0);
  PageShift shift = {nullptr, 0.0f};
  if (at.src_page >= 0) shift = find_shift(p, number, lane);
  const bool active = shift.row != nullptr;
  const bool scaled = kQuantised<T> && p.key_scales;
  if (!active && !scaled) return;
  const i64 src = active ? at.src_page : 0;
  const i64 dst = active ? at.dst_page : 0;
  const char* in = p.keys + offset_of(p.key_strides, src, at);
  char* out = p.keys + offset_of(p.key_strides, dst, at);
  const int pairs = active ? p.rotary_dim / 2 : 0;
  const int passing = active ? p.width - p.rotary_dim : 0;
  ShiftedRow<T, kCount> row{p, shift, in, 1.0f};

  float scale = 1.0f;
  if constexpr (kQuantised<T>) {
    if (scaled) {
      AbsMax<kCount> largest;
      if (active) {
        row.factor =
            *reinterpret_cast<const float*>(p.key_scales + offset_of(p.key_scale_strides, src, at));
      }
      for (int i = lane * kCount; i < pairs; i += lanes * kCount) {
        Pack<float, kCount> x;
        Pack<float, kCount> y;
        row.rotated(i, x, y);
        largest.add(x);
        largest.add(y);
      }
      for (int i = lane * kCount; i < passing; i += lanes * kCount) {
        largest.add(row.values(row.pass(i)));
      }
      scale = dynamic_scale<T>(max_within_warp(largest.value(), lanes));
      if (!active) return;
      if (lane == 0) {
        *reinterpret_cast<float*>(p.key_scales + offset_of(p.key_scale_strides, dst, at)) = scale;
      }
    }
  }

  // Rotate, Convert, Store
  const ScaleDivisor divisor(scale);
  const auto stored = [&](const Pack<float, kCount>& x) {
    if constexpr (kQuantised<T>) {
      if (scaled) return quantise<T>(x, divisor);
    }
    return from_floats<T>(x);
  };
  for (int i = lane * kCount; i < pairs; i += lanes * kCount) {
    Pack<float, kCount> x;
    Pack<float, kCount> y;
    row.rotated(i, x, y);
    row.store_pairs(out, i, stored(x), stored(y));
  }
  if (scaled || in != out) {
    for (int i = lane * kCount; i < passing; i += lanes * kCount) {
      const Pack<T, kCount> x = row.pass(i);
      const Pack<T, kCount> y = scaled ? stored(row.values(x)) : x;
      y.store(out + row.passing(i) * static_cast<int>(sizeof(T)));
    }
  }
  copy_value(p, at, lane, lanes);
}

// --- Four-bit rows -------------------------------------------------------------------------------

// A key in float32, in shared memory: a thread decodes and encodes 16 neighbouring elements, and
// rotates pairs whose elements other threads hold.
__device__ __forceinline__ void rotate_staged(const ShiftParams& p, const PageShift& shift,
                                              float* staged, int lane, int lanes) {
  const int half = p.rotary_dim / 2;
  float* part = staged + p.start;
  for (int i = lane; i < half; i += lanes) {
    Pack<float, 1> cosine;
    Pack<float, 1> sine;
    load_angles(p, shift, i, cosine, sine);
    float& first = part[p.interleaved ? 2 * i : i];
    float& second = part[p.interleaved ? 2 * i + 1 : i + half];
    Pack<float, 1> x;
    Pack<float, 1> y;
    rotate(Pack<float, 1>{first}, Pack<float, 1>{second}, cosine, sine, x, y);
    first = x.values[0];
    second = y.values[0];
  }
}

// No thread exits before the last exchange.
// Eight blocks leave 64 registers: by its own choice ptxas 13.5 takes 48 on sm_100, and spills.
// grid: (rows / (block / lanes)), block: (a multiple of lanes and of 32), smem: a row of floats for
// each row of the block
template <typename TFormat, int kCount>
__global__ void __launch_bounds__(kShiftThreads, 8)
    shift_four_bit(const __grid_constant__ ShiftParams p) {
  const int lanes = 1 << p.rows.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 of_block = threadIdx.x >> p.rows.lane_shift;
  const u32 number = blockIdx.x * (blockDim.x >> p.rows.lane_shift) + of_block;

  // Guards
  const TransferPlace at =
      find_piece(p.rows, p.src_pages, p.dst_pages, p.faults, number, lane == 0);
  PageShift shift = {nullptr, 0.0f};
  if (at.src_page >= 0) shift = find_shift(p, number, lane);
  const bool active = shift.row != nullptr;
  const GroupScales& groups = p.key.group_scales;
  const RotatedPart rotated = {groups.rotated_width, groups.rotation_shift};
  const auto row_of = [&](i64 page) {
    char* row = p.keys + offset_of(p.key_strides, active ? page : 0, at);
    return FourBitRow{row, row + p.width / 2};
  };
  const FourBitRow in = row_of(at.src_page);
  const FourBitRow out = row_of(at.dst_page);
  float* staged = dynamic_shared<float>() + of_block * p.width;

#if !KVCUPY_ARCH
  if (lanes == 1) {
    if (!active) return;
    for (int first = 0; first < p.width; first += kElementsAlone) {
      const int count = min(kElementsAlone, p.width - first);
      decode_alone<TFormat>(in, 1.0f, first, count, p.key, rotated, staged + first);
    }
    rotate_staged(p, shift, staged, 0, 1);
    for (int first = 0; first < p.width; first += kElementsAlone) {
      const int count = min(kElementsAlone, p.width - first);
      encode_alone<TFormat>(staged + first, 1.0f, first, count, out, p.key, rotated);
    }
    copy_value(p, at, 0, 1);
    return;
  }
#endif

  // Load: the loops are warp-uniform, for lanes exchange values
  const int step = lanes * kCodesPerThread;
  for (int element = lane * kCodesPerThread; element - lane * kCodesPerThread < p.width;
       element += step) {
    const bool has = active && element < p.width;
    SixteenCodes codes = {};
    u32 bits = 0;
    if (has) load_in_group<TFormat>(in, element, p.key, codes, bits);
    Sixteen x = decode_codes<TFormat>(codes, group_step<TFormat>(bits, 1.0f));
    const Rotation rotation = rotation_at(rotated, element);
    if (rotation.most_shift) rotate_sixteen(x, rotation);
    if (has) store_sixteen<float, kCount>(x, reinterpret_cast<char*>(staged + element));
  }
  // Rotate
  __syncwarp();
  if (active) rotate_staged(p, shift, staged, lane, lanes);
  __syncwarp();
  // Convert, Store
  for (int element = lane * kCodesPerThread; element - lane * kCodesPerThread < p.width;
       element += step) {
    const bool has = active && element < p.width;
    Sixteen x = {};
    if (has) x = load_sixteen<float, kCount>(reinterpret_cast<const char*>(staged + element));
    rotate_in_group<TFormat>(x, 1.0f, element, has, out, p.key, rotation_at(rotated, element));
  }
  if (active) copy_value(p, at, lane, lanes);
}
