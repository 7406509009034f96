// Conversions of codes on the device: four codes to two pairs of float16, exactly, and floats to codes, rounded as
// narrow() rounds. Every type of codes must fit the 11 significant bits of float16.
#pragma once
#include "../../types.h"
#include "gpu.h"

namespace kvpager::cuda {

// Codes 0, 1 and codes 2, 3 of `four` (code 0 in the low byte) to two pairs of float16.
// Deleted for types that have no rule here.
template <class C>
__device__ __forceinline__ void f16_of_codes(uint32_t four, uint32_t& pair_01, uint32_t& pair_23) = delete;

// 0x6400 | u is the float16 1024 + u for a byte u; with the sign bit flipped, u is the code + 128.
template <>
__device__ __forceinline__ void f16_of_codes<int8_code>(uint32_t four, uint32_t& pair_01, uint32_t& pair_23) {
  const uint32_t flipped = four ^ 0x80808080u, offset = 0x64806480u;  // 1152, twice
  pair_01 = sub_f16x2(__byte_perm(flipped, 0x64646464u, 0x4140), offset);
  pair_23 = sub_f16x2(__byte_perm(flipped, 0x64646464u, 0x4342), offset);
}

// Without the instruction: exponent and mantissa moved into place are the number times 2^-8, and NaN is put back.
__device__ __forceinline__ uint32_t f16x2_of_spread_e4m3(uint32_t spread) {  // codes in the high bytes of both halves
  const uint32_t magnitude = (spread & 0x7f007f00u) >> 1;
  const uint32_t number = mul_f16x2(magnitude, 0x5c005c00u);        // 256, twice
  const uint32_t is_nan = (magnitude + 0x00800080u) & 0x40004000u;  // only 0x7f carries that far
  return number | (is_nan >> 5) * 0x3fu | (spread & 0x80008000u);
}

template <>
__device__ __forceinline__ void f16_of_codes<fp8_e4m3>(uint32_t four, uint32_t& pair_01, uint32_t& pair_23) {
#if defined(KVPAGER_HAS_FP8_CONVERSION)
  f16x2_of_e4m3x4(four, pair_01, pair_23);
#else
  pair_01 = f16x2_of_spread_e4m3(__byte_perm(four, 0, 0x1404));
  pair_23 = f16x2_of_spread_e4m3(__byte_perm(four, 0, 0x3424));
#endif
}

// Upper bytes of float16. Volatile, as the conversion of e4m3 is: hoisted, moves so cheap would spill registers.
template <>
__device__ __forceinline__ void f16_of_codes<fp8_e5m2>(uint32_t four, uint32_t& pair_01, uint32_t& pair_23) {
#if defined(__CUDA_ARCH__)
  asm volatile("prmt.b32 %0, %2, 0, 0x1404; prmt.b32 %1, %2, 0, 0x3424;" : "=&r"(pair_01), "=r"(pair_23) : "r"(four));
#else
  pair_01 = __byte_perm(four, 0, 0x1404);
  pair_23 = __byte_perm(four, 0, 0x3424);
#endif
}

// The code of two neighbouring numbers, the first in the low byte.
template <class C>
__device__ __forceinline__ uint32_t two_codes(float low, float high) {
#if defined(KVPAGER_HAS_FP8_CONVERSION)
  if constexpr (std::is_same_v<C, fp8_e4m3>) return e4m3x2_of_f32(low, high);
  if constexpr (std::is_same_v<C, fp8_e5m2>) return e5m2x2_of_f32(low, high);
#endif
  const C codes[2] = {narrow<C>(low), narrow<C>(high)};
  uint16_t two;
  memcpy(&two, codes, sizeof two);
  return two;
}

}  // namespace kvpager::cuda
