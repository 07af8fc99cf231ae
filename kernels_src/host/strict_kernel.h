// What a strict build puts around a kernel; strict.cpp runs it.
#pragma once

#include "cuda_names.h"

// `MOST_THREADS`: of a block, as the kernel's launch bounds say.
#define KVCUPY_HOST_KERNEL(BARRIERS, MOST_THREADS, PARAMS, ...)                                 \
  extern "C" __attribute__((visibility("hidden"))) void kvcupy_kernel(const void* params) {     \
    __VA_ARGS__(*static_cast<const PARAMS*>(params));                                           \
  }                                                                                             \
  extern "C" {                                                                                  \
  __attribute__((visibility("hidden"))) extern const int kvcupy_kernel_has_barriers = BARRIERS; \
  __attribute__((visibility("default"))) extern const int kvcupy_most_threads = MOST_THREADS;   \
  }
