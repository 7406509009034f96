// The types of elements: the one list of them, what is true of each, and their conversions to float and back.
//
// "Numbers" are float, float16, bfloat16 and double; "codes" are the one-byte elements of a quantised cache, where the
// number is code * scale. The same source serves the host compiler, nvcc and the emulator, and knows no framework. A
// new type of codes is a struct, a line in the list, its traits, `widen` and `narrow` here; whatever is missing does
// not compile.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define KVPAGER_HD __host__ __device__ __forceinline__
#else
// Always inlined: kernels of several instruction sets use these, and no set's code may serve another
// (cpu/runtime/isa.h).
#define KVPAGER_HD inline __attribute__((always_inline))
#endif

// X(type, enumerator of torch's ScalarType, torch's name, ...) for every type of numbers and of codes. The build reads
// the codes from here as well: it compiles `*.cache.cu` once for each (build_backend/native_build.py).
#define KVPAGER_FOR_NUMBERS(X, ...)              \
  X(float, Float, "float32", __VA_ARGS__)        \
  X(float16, Half, "float16", __VA_ARGS__)       \
  X(bfloat16, BFloat16, "bfloat16", __VA_ARGS__) \
  X(double, Double, "float64", __VA_ARGS__)
#define KVPAGER_FOR_CODES(X, ...)         \
  X(int8_code, Char, "int8", __VA_ARGS__) \
  X(fp8_e4m3, Float8_e4m3fn, "float8_e4m3fn", __VA_ARGS__)

// X(T, C) for every pair of a type of numbers below double and the caches it may stand beside: its own type, or codes.
#define KVPAGER_FOR_CACHES(X) \
  X(float, float) X(float16, float16) X(bfloat16, bfloat16) KVPAGER_FOR_CODES(KVPAGER_BESIDE_CODES_, X)
#define KVPAGER_BESIDE_CODES_(C, dtype, name, X) X(float, C) X(float16, C) X(bfloat16, C)

namespace kvpager {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct int8_code {
  int8_t code;  // -127 ... 127
};
struct fp8_e4m3 {
  uint8_t bits;  // sign, 4 exponent bits of bias 7, 3 of mantissa; no inf, 0x7f and 0xff are NaN, the largest is 448
};

// Whether caches of this type are quantised: whether it is a type of codes.
template <class T>
inline constexpr bool is_quantised = false;
#define KVPAGER_IS_QUANTISED(C, ...) \
  template <>                        \
  inline constexpr bool is_quantised<C> = true;
KVPAGER_FOR_CODES(KVPAGER_IS_QUANTISED)
#undef KVPAGER_IS_QUANTISED

// What is true of one type of codes. There is no default: a type without traits must not compile.
template <class C>
struct CodeTraits;
template <>
struct CodeTraits<int8_code> {
  static constexpr float kLargest = 127;  // the largest number a code stands for before it is scaled
};
template <>
struct CodeTraits<fp8_e4m3> {
  static constexpr float kLargest = 448;
};

// The type of all arithmetic over T: float, or double for double.
template <class T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// In `*.cache.cu`, where KVPAGER_CACHE names the type of the caches: that type, or T itself for `query_type`.
struct query_type {};
template <class T, class Cache>
using cache_type = std::conditional_t<std::is_same_v<Cache, query_type>, T, Cache>;

KVPAGER_HD constexpr uint32_t float_bits(float number) { return __builtin_bit_cast(uint32_t, number); }
KVPAGER_HD constexpr float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

KVPAGER_HD float widen(float number) { return number; }
KVPAGER_HD double widen(double number) { return number; }
KVPAGER_HD float widen(bfloat16 number) { return float_of_bits(uint32_t{number.bits} << 16); }

KVPAGER_HD float widen(float16 number) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number.bits));
  return wide;
#else
  const uint32_t sign = uint32_t{number.bits} << 16 & 0x80000000u, magnitude = number.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | magnitude << 13);       // inf, NaN
  if (magnitude >= 0x0400u) return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));  // bias 15 -> 127
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
#endif
}

KVPAGER_HD constexpr float widen(int8_code number) { return number.code; }

KVPAGER_HD constexpr float widen(fp8_e4m3 number) {
  const uint32_t sign = uint32_t{number.bits} << 24 & 0x80000000u, magnitude = number.bits & 0x7fu;
  if (magnitude == 0x7fu) return float_of_bits(sign | 0x7fc00000u);
  if (magnitude >= 0x08u) return float_of_bits(sign | ((magnitude << 20) + (120u << 23)));  // bias 7 -> 127
  return float_of_bits(sign | float_bits(static_cast<float>(magnitude) * 0x1p-9f));
}

// narrow<T>(x): nearest T, ties to even; NaN stays NaN, overflow becomes inf. Codes of a quantised cache saturate, and
// int8, which has no NaN, makes a 0 of it.
template <class T>
KVPAGER_HD constexpr T narrow(accumulate_t<T> number) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float16>) {
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(number));
    return result;
  }
#endif
  if constexpr (std::is_same_v<T, bfloat16>) {
    const uint32_t bits = float_bits(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bfloat16{static_cast<uint16_t>(bits >> 16 | 0x40u)};
    return bfloat16{static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  } else if constexpr (std::is_same_v<T, float16>) {
    const uint32_t bits = float_bits(number), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to inf
      result = 0x7c00u;
    } else if (magnitude <
               0x38800000u) {  // below 2^-14: one unit in the last place of 0.5 is a subnormal's step, 2^-24
      result = float_bits(float_of_bits(magnitude) + 0.5f) - float_bits(0.5f);
    } else {
      result = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    }
    return float16{static_cast<uint16_t>(sign | result)};
  } else if constexpr (std::is_same_v<T, int8_code>) {
    const float bounded = number > 127.0f ? 127.0f : (number < -127.0f ? -127.0f : number);
    // Adding 1.5 * 2^23 leaves no room for a fraction: rounded to even, the code in the low bits.
    return int8_code{static_cast<int8_t>(number == number ? float_bits(bounded + 12582912.0f) & 0xffu : 0u)};
  } else if constexpr (std::is_same_v<T, fp8_e4m3>) {
    const uint32_t bits = float_bits(number), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result = 0x7fu;
    } else if (magnitude >= 0x43e00000u) {  // 448 and more
      result = 0x7eu;
    } else if (magnitude < 0x3c800000u) {  // below 2^-6: a unit in the last place of 2^14 is a subnormal's step, 2^-9
      result = float_bits(float_of_bits(magnitude) + 16384.0f) - float_bits(16384.0f);
    } else {
      result = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
    }
    return fp8_e4m3{static_cast<uint8_t>(sign | result)};
  } else {
    static_assert(std::is_same_v<T, accumulate_t<T>>, "narrow() has no rule for this type");
    return number;
  }
}

// What all kernels take for granted of codes: a byte each, all zero bits are 0, and what is too large saturates.
#define KVPAGER_CHECK_CODES(C, ...)                                                    \
  static_assert(sizeof(C) == 1 && widen(C{}) == 0);                                    \
  static_assert(widen(narrow<C>(CodeTraits<C>::kLargest)) == CodeTraits<C>::kLargest); \
  static_assert(widen(narrow<C>(-2 * CodeTraits<C>::kLargest)) == -CodeTraits<C>::kLargest);
KVPAGER_FOR_CODES(KVPAGER_CHECK_CODES)
#undef KVPAGER_CHECK_CODES

}  // namespace kvpager
