// The function and variable qualifiers that NVIDIA's headers expect, for a plain C++ compiler.
// The full CUDA toolkit has a file of this name; the header wheels do not.
#pragma once

#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __no_return__ __attribute__((noreturn))
#define __specialization_static static
#define CUDARTAPI
