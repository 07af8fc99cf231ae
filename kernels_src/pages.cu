// Copy pages of an array onto other pages of it.
//
// A page is up to three nested axes of rows, by strides, and a row is bytes. A long row is cut into
// pieces, so that a few long pages occupy the whole device. A group of `lanes` neighbouring threads
// takes one piece of one page, lane i its words i, i + lanes, ...
//
// Bytes: each row is read once and written once, plus two indices per piece.
#include "common.cuh"

struct CopyPagesParams {
  char* cache;            // [num_pages, rows by three strides, row_bytes]
  const char* src_pages;  // [num_copies] int32 or int64
  const char* dst_pages;  // [num_copies] int32 or int64
  FaultRecord* faults;
  i64 page_bytes;   // stride between pages
  i64 row_bytes_0;  // strides between rows on the three axes
  i64 row_bytes_1;
  i64 row_bytes_2;
  i64 num_pages;
  i64 src_stride_bytes;
  i64 dst_stride_bytes;
  i64 src_operation;  // for the fault record
  i64 dst_operation;
  i64 row_words;   // per row
  u32 num_pieces;  // num_copies * rows per page * pieces per row, below 2**31
  u32 pieces_per_row;
  u32 rows_per_page;
  u32 rows_1;  // rows on the second axis
  u32 rows_2;  // rows on the third axis
  int piece_words;
  int src_index_bytes;
  int dst_index_bytes;
  int lane_shift;
};

// Whether a page exists; a fault if not.
__device__ __forceinline__ bool exists(const CopyPagesParams& p, i64 page, i64 position,
                                       i64 operation, bool reports) {
  if (page < p.num_pages) return true;
  if (reports) report_fault(p.faults, operation, position, page);
  return false;
}

// grid: (pieces / (block / lanes)), block: (a multiple of lanes), smem: 0
template <int kWordBytes>
__global__ void copy_pages(const __grid_constant__ CopyPagesParams p) {
  constexpr int kUnroll = 4;  // words in flight per thread
  const int lanes = 1 << p.lane_shift;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 number = blockIdx.x * (blockDim.x >> p.lane_shift) + (threadIdx.x >> p.lane_shift);
  if (number >= p.num_pieces) return;
  const u32 row = number / p.pieces_per_row;
  const u32 piece = number - row * p.pieces_per_row;
  const u32 position = row / p.rows_per_page;
  const u32 within = row - position * p.rows_per_page;
  const bool reports = within == 0 && piece == 0 && lane == 0;
  const i64 src = load_index(p.src_pages + position * p.src_stride_bytes, p.src_index_bytes);
  const i64 dst = load_index(p.dst_pages + position * p.dst_stride_bytes, p.dst_index_bytes);
  if (src < 0 || dst < 0) return;
  if (!exists(p, src, position, p.src_operation, reports)) return;
  if (!exists(p, dst, position, p.dst_operation, reports)) return;

  const u32 outer = within / p.rows_2;
  const i64 skipped = i64{piece} * p.piece_words;
  const i64 offset = outer / p.rows_1 * p.row_bytes_0 + outer % p.rows_1 * p.row_bytes_1 +
                     (within - outer * p.rows_2) * p.row_bytes_2 + skipped * kWordBytes;
  const auto* in = reinterpret_cast<const Word<kWordBytes>*>(p.cache + src * p.page_bytes + offset);
  auto* out = reinterpret_cast<Word<kWordBytes>*>(p.cache + dst * p.page_bytes + offset);
  const i64 left = p.row_words - skipped;
  const int words = left < p.piece_words ? static_cast<int>(left) : p.piece_words;
#ifdef KVCUPY_HOST_VARIANTS
  if (lanes == 1) {
    if (in != out) memcpy(out, in, i64{words} * kWordBytes);
    return;
  }
#endif
  for (int first = lane; first < words; first += lanes * kUnroll) {
    Word<kWordBytes> in_flight[kUnroll];
    // Load
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * lanes < words) in_flight[i] = in[first + i * lanes];
    }
    // Store
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * lanes < words) out[first + i * lanes] = in_flight[i];
    }
  }
}
