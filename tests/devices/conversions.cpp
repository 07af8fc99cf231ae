// The conversions of numeric.cuh as functions on arrays, one by one and by packs of eight, and by
// fours those of fp8.cuh, for test_host_numbers.py and test_compilers.py.
#include "fp8.cuh"
#include "host/copy.h"
#include "numeric.cuh"

template <typename T>
void decode_one_by_one(const T* codes, float* numbers, long count) {
  for (long i = 0; i < count; ++i) numbers[i] = to_float(codes[i]);
}
template <typename T>
void encode_one_by_one(const float* numbers, T* codes, long count) {
  for (long i = 0; i < count; ++i) codes[i] = from_float<T>(numbers[i]);
}
template <typename T>
void decode_packs(const T* codes, float* numbers, long count) {
  for (long i = 0; i < count; i += 8) {
    Pack<T, 8> pack;
    pack.load(reinterpret_cast<const char*>(codes + i));
    to_floats(pack).store(reinterpret_cast<char*>(numbers + i));
  }
}
template <typename T>
void encode_packs(const float* numbers, T* codes, long count) {
  for (long i = 0; i < count; i += 8) {
    Pack<float, 8> pack;
    pack.load(reinterpret_cast<const char*>(numbers + i));
    from_floats<T>(pack).store(reinterpret_cast<char*>(codes + i));
  }
}

// One of the two fp16 numbers of a word.
float number_of(u32 pair, int i) { return i ? upper_of<half>(pair) : lower_of<half>(pair); }

// As GPUs before sm_89 have it.
void decode_four(u32 codes, fp8_e4m3, float* numbers) {
  const u32 pairs[] = {decode_e4m3_pair(lower_pair(codes)), decode_e4m3_pair(upper_pair(codes))};
  for (int i = 0; i < 4; ++i) numbers[i] = number_of(pairs[i / 2], i % 2);
}
void decode_four(u32 codes, fp8_e5m2, float* numbers) {
  const u32 pairs[] = {lower_pair(codes), upper_pair(codes)};
  for (int i = 0; i < 4; ++i) numbers[i] = number_of(pairs[i / 2], i % 2);
}
void decode_four(u32 codes, int8, float* numbers) {
  const float4 four = decode_four_int8(codes);
  memcpy(numbers, &four, sizeof four);
}
template <typename T>
void decode_fours(const T* codes, float* numbers, long count) {
  for (long i = 0; i < count; i += 4) {
    u32 four;
    memcpy(&four, codes + i, sizeof four);
    decode_four(four, T{}, numbers + i);
  }
}
u32 code_of(float x, fp8_e4m3) { return encode_fp8<3, 7>(x, 448.0f); }
u32 code_of(float x, fp8_e5m2) { return encode_fp8<2, 15>(x, 57344.0f); }
u32 code_of(float x, int8) { return static_cast<unsigned char>(from_float<int8>(x)); }
template <typename T>
void encode_fours(const float* numbers, T* codes, long count) {
  for (long i = 0; i < count; ++i) {
    const auto code = static_cast<unsigned char>(code_of(numbers[i], T{}));
    memcpy(codes + i, &code, 1);
  }
}

extern "C" __attribute__((visibility("default"))) void copy_row(char* to, const char* from,
                                                                const char* ahead, long bytes,
                                                                int streamed) {
  kvcupy_host::copy_row(to, from, ahead, bytes, streamed);
}

extern "C" __attribute__((visibility("default"))) float absmax_of_packs(const float* numbers,
                                                                        long count) {
  AbsMax<8> largest;
  for (long i = 0; i < count; i += 8) {
    Pack<float, 8> pack;
    pack.load(reinterpret_cast<const char*>(numbers + i));
    largest.add(pack);
  }
  return largest.value();
}

// x * (1 + ulps * 2**-23), or so: what hardware may return for it.
static float nudged(float x, int ulps) {
  u32 bits;
  memcpy(&bits, &x, sizeof bits);
  bits += ulps;
  memcpy(&x, &bits, sizeof bits);
  return x;
}

// What divides by a scale where hardware approximates reciprocals so.
static ScaleDivisor nudged_divisor(float number, int ulps) {
  ScaleDivisor scale(number);
  const float divisor = number * scale.power;
  const float approximation = 1.0f / divisor;
  const bool is_number = approximation - approximation == 0.0f && approximation != 0.0f;
  scale.reciprocal =
      refine_reciprocal(divisor, is_number ? nudged(approximation, ulps) : approximation);
  return scale;
}

extern "C" __attribute__((visibility("default"))) void divide(const float* numbers,
                                                              const float* scales, float* quotients,
                                                              long count, int ulps) {
  for (long i = 0; i < count; ++i) {
    quotients[i] = nudged_divisor(scales[i], ulps).quotient(numbers[i]);
  }
}

// Likewise to fp8, by the arithmetic of GPUs before sm_89, which divides four at a time by a scale:
// three are others.
extern "C" __attribute__((visibility("default"))) void quantise_by_fours(const float* numbers,
                                                                         const float* scales,
                                                                         unsigned char* codes,
                                                                         long count, int ulps,
                                                                         int is_e4m3) {
  for (long i = 0; i < count; ++i) {
    Pack<float, 4> four;
    for (long j = 0; j < 4; ++j) four.values[(i + j) % 4] = numbers[(i + j) % count];
    const ScaleDivisor scale = nudged_divisor(scales[i], ulps);
    const auto e4m3 = quantise_by_arithmetic<fp8_e4m3>(four, scale);
    const auto e5m2 = quantise_by_arithmetic<fp8_e5m2>(four, scale);
    memcpy(codes + i, is_e4m3 ? static_cast<const void*>(e4m3.values + i % 4) : e5m2.values + i % 4,
           1);
  }
}

extern "C" __attribute__((visibility("default"))) void refine(const float* numbers,
                                                              float* reciprocals, long count,
                                                              int ulps) {
  for (long i = 0; i < count; ++i) {
    reciprocals[i] = refine_reciprocal(numbers[i], nudged(1.0f / numbers[i], ulps));
  }
}

extern "C" __attribute__((visibility("default"))) void dynamic_scales(const float* absmax,
                                                                      float* scales, long count,
                                                                      int format) {
  for (long i = 0; i < count; ++i) {
    scales[i] = format == 0   ? dynamic_scale<fp8_e4m3>(absmax[i])
                : format == 1 ? dynamic_scale<fp8_e5m2>(absmax[i])
                              : dynamic_scale<int8>(absmax[i]);
  }
}

#define EXPORT(NAME, T)                                                                      \
  extern "C" __attribute__((visibility("default"))) void NAME##_decode(const T* c, float* n, \
                                                                       long count) {         \
    DECODE(c, n, count);                                                                     \
  }                                                                                          \
  extern "C" __attribute__((visibility("default"))) void NAME##_encode(const float* n, T* c, \
                                                                       long count) {         \
    ENCODE(n, c, count);                                                                     \
  }

#define DECODE decode_one_by_one
#define ENCODE encode_one_by_one
EXPORT(one_fp16, half)
EXPORT(one_bf16, bfloat16)
EXPORT(one_fp8_e4m3, fp8_e4m3)
EXPORT(one_fp8_e5m2, fp8_e5m2)
EXPORT(one_int8, int8)
#undef DECODE
#undef ENCODE
#define DECODE decode_packs
#define ENCODE encode_packs
EXPORT(eight_fp16, half)
EXPORT(eight_bf16, bfloat16)
EXPORT(eight_fp8_e4m3, fp8_e4m3)
EXPORT(eight_fp8_e5m2, fp8_e5m2)
EXPORT(eight_int8, int8)
#undef DECODE
#undef ENCODE
#define DECODE decode_fours
#define ENCODE encode_fours
EXPORT(four_fp8_e4m3, fp8_e4m3)
EXPORT(four_fp8_e5m2, fp8_e5m2)
EXPORT(four_int8, int8)

#ifdef KVCUPY_MAIN
// usage: FUNCTION COUNT BYTES_IN BYTES_OUT, of an element; converts standard input.
#include <stdio.h>
#include <stdlib.h>

using Function = void (*)(const void*, void*, long);
#define NAMED(NAME) {#NAME, reinterpret_cast<Function>(NAME)}
#define BOTH_WAYS(NAME) NAMED(NAME##_decode), NAMED(NAME##_encode)

static const struct {
  const char* name;
  Function function;
} functions[] = {
    BOTH_WAYS(one_fp16),     BOTH_WAYS(eight_fp16),     BOTH_WAYS(one_bf16),
    BOTH_WAYS(eight_bf16),   BOTH_WAYS(one_fp8_e4m3),   BOTH_WAYS(eight_fp8_e4m3),
    BOTH_WAYS(one_fp8_e5m2), BOTH_WAYS(eight_fp8_e5m2), BOTH_WAYS(one_int8),
    BOTH_WAYS(eight_int8),   BOTH_WAYS(four_fp8_e4m3),  BOTH_WAYS(four_fp8_e5m2),
    BOTH_WAYS(four_int8),
};

int main(int, char** arguments) {
  const size_t count = atol(arguments[2]);
  const size_t bytes_in = atol(arguments[3]);
  const size_t bytes_out = atol(arguments[4]);
  void* source = aligned_alloc(64, (count * bytes_in + 63) / 64 * 64);
  void* target = aligned_alloc(64, (count * bytes_out + 63) / 64 * 64);
  if (fread(source, bytes_in, count, stdin) != count) return 2;
  for (const auto& one : functions) {
    if (strcmp(one.name, arguments[1]) != 0) continue;
    one.function(source, target, static_cast<long>(count));
    return fwrite(target, bytes_out, count, stdout) == count ? 0 : 4;
  }
  return 3;
}
#endif
