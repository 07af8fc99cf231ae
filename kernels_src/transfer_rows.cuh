// Decompose the pages of a transfer into rows, and assign rows to threads.
//
// A page of a pool is up to three nested axes of rows (layers, offsets, heads; what both pools keep
// contiguous has been joined into the row), by the strides of either pool. A row is cut into
// pieces, and pieces are numbered page by page: a bounded grid of blocks walks over the numbers.
#pragma once

#include "common.cuh"

// Keep the compiler from holding values computed from a pack: it computes them again.
template <typename T, int kCount>
__device__ __forceinline__ void hide_value(Pack<T, kCount>& pack) {
#ifdef __CUDACC__
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / 4); ++i) {
    asm volatile("" : "+r"(reinterpret_cast<u32*>(pack.values)[i]));
  }
#endif
}

// Division of numbers below 2**31 by a divisor known before the launch: a multiplication, an
// addition and a shift (Granlund and Montgomery, 1994).
struct Divisor {
  u32 divisor;
  u32 multiplier;
  int shift;
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) {
  const u32 high = static_cast<u32>((u64{n} * by.multiplier) >> 32);
  return (high + n) >> by.shift;
}

// One array of a pool: K, V or their scales.
struct TransferStrides {
  i64 page_bytes;
  i64 axis_bytes_0;  // of the axes of rows, the outermost first
  i64 axis_bytes_1;
  i64 axis_bytes_2;
};

struct TransferRows {
  i64 src_stride_bytes;  // between page numbers
  i64 dst_stride_bytes;
  i64 src_num_pages;
  i64 dst_num_pages;
  i64 src_operation;  // for the fault record; negative: another launch of the call reports
  i64 dst_operation;
  Divisor pieces_per_page;
  Divisor pieces_per_row;
  Divisor rows_per_step;  // of the first axis: rows on the second and third together
  Divisor rows_2;         // rows on the third axis
  u32 num_pieces;         // of the whole transfer, below 2**31
  int src_index_bytes;
  int dst_index_bytes;
  int lane_shift;  // log2(threads that share a piece)
};

// Where a piece lies. A negative page: nothing to do.
struct TransferPlace {
  i64 src_page;
  i64 dst_page;
  u32 axis_0;
  u32 axis_1;
  u32 axis_2;
  u32 piece;  // of its row
};

__device__ __forceinline__ i64 offset_of(const TransferStrides& s, i64 page,
                                         const TransferPlace& at) {
  return page * s.page_bytes + at.axis_0 * s.axis_bytes_0 + at.axis_1 * s.axis_bytes_1 +
         at.axis_2 * s.axis_bytes_2;
}

// Find a piece. The thread that `reports` reports a page past the end, once per pair of pages.
__device__ __forceinline__ TransferPlace find_piece(const TransferRows& rows, const char* src_pages,
                                                    const char* dst_pages, FaultRecord* faults,
                                                    u32 number, bool reports) {
  TransferPlace at{-1, -1, 0, 0, 0, 0};
  if (number >= rows.num_pieces) return at;
  const u32 position = divide(number, rows.pieces_per_page);
  const u32 within = number - position * rows.pieces_per_page.divisor;
  const i64 src = load_index(src_pages + position * rows.src_stride_bytes, rows.src_index_bytes);
  const i64 dst = load_index(dst_pages + position * rows.dst_stride_bytes, rows.dst_index_bytes);
  if (src < 0 || dst < 0) return at;
  if (src >= rows.src_num_pages || dst >= rows.dst_num_pages) {
    if (reports && within == 0 && rows.src_operation >= 0) {
      if (src >= rows.src_num_pages) {
        report_fault(faults, rows.src_operation, position, src);
      } else {
        report_fault(faults, rows.dst_operation, position, dst);
      }
    }
    return at;
  }
  const u32 row = divide(within, rows.pieces_per_row);
  at.piece = within - row * rows.pieces_per_row.divisor;
  at.axis_0 = divide(row, rows.rows_per_step);
  const u32 rest = row - at.axis_0 * rows.rows_per_step.divisor;
  at.axis_1 = divide(rest, rows.rows_2);
  at.axis_2 = rest - at.axis_1 * rows.rows_2.divisor;
  at.src_page = src;
  at.dst_page = dst;
  return at;
}
