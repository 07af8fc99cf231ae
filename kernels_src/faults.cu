// Record a fault that the host has found, in the order of a stream.
//
// The copy engine moves pages by their addresses, so that the host checks the page numbers and no
// kernel sees them. One thread.
#include "common.cuh"

struct NoteFaultParams {
  FaultRecord* faults;
  i64 count;      // of faults; what follows is of the first
  i64 operation;  // as in the record
  i64 position;
  i64 value;
};

// grid: 1, block: kThreads, smem: 0
template <int kThreads>
__global__ void note_fault(const __grid_constant__ NoteFaultParams p) {
  static_assert(kThreads == 1, "each thread would note it");
  if (atomicAdd(&p.faults->count, static_cast<u64>(p.count)) == 0) {
    p.faults->operation = p.operation;
    p.faults->position = p.position;
    p.faults->value = p.value;
  }
}
