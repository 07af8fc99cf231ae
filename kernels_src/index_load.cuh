// An int32 or int64 from an index array in two steps, for kernels that have other loads to begin.
//
// What `begin_index` returns is no number yet: `index_of` sign-extends int32, and so waits for the
// load. Loads between the two do not wait. `load_index` does both at once.
#pragma once

#include "common.cuh"

__device__ __forceinline__ u64 begin_index(const char* address, int index_bytes) {
  return index_bytes == 4 ? *reinterpret_cast<const u32*>(address)
                          : *reinterpret_cast<const u64*>(address);
}

__device__ __forceinline__ i64 index_of(u64 loaded, int index_bytes) {
  return index_bytes == 4 ? static_cast<int>(static_cast<u32>(loaded)) : static_cast<i64>(loaded);
}
