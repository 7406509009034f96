// Global memory and bits: vector types, atomics, fences, and the intrinsics that kernels use on words.
//
// Threads of the emulator never run at the same moment, so an atomic is a plain read and write; fences order nothing
// that was not in order. A vector access that is not aligned to its size is undefined behaviour, as on the GPU: the
// checked loads and stores of the kernels stop, and under UBSan so does any other.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

template <class T, class F>
T exchange_with(T* address, F&& next) {
  const T old = *static_cast<volatile T*>(address);
  *static_cast<volatile T*>(address) = next(old);
  return old;
}

}  // namespace emulated

template <class T>
T atomicAdd(T* address, T number) {
  return emulated::exchange_with(address, [=](T old) { return old + number; });
}
template <class T>
T atomicExch(T* address, T number) {
  return emulated::exchange_with(address, [=](T) { return number; });
}
template <class T>
T atomicMax(T* address, T number) {
  return emulated::exchange_with(address, [=](T old) { return old > number ? old : number; });
}
template <class T>
T atomicMin(T* address, T number) {
  return emulated::exchange_with(address, [=](T old) { return old < number ? old : number; });
}
template <class T>
T atomicOr(T* address, T bits) {
  return emulated::exchange_with(address, [=](T old) { return old | bits; });
}
template <class T>
T atomicAnd(T* address, T bits) {
  return emulated::exchange_with(address, [=](T old) { return old & bits; });
}
template <class T>
T atomicCAS(T* address, T compare, T number) {
  return emulated::exchange_with(address, [=](T old) { return old == compare ? number : old; });
}
// Counts up to `last`, then starts again at 0.
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emulated::exchange_with(address, [=](unsigned old) { return old >= last ? 0u : old + 1; });
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}

inline uint32_t __float_as_uint(float number) { return std::bit_cast<uint32_t>(number); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float number) { return std::bit_cast<int>(number); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<uint32_t>(bits)); }
inline int __ffs(int bits) { return bits ? std::countr_zero(static_cast<uint32_t>(bits)) + 1 : 0; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// Byte i of the result is byte number (selector >> 4 i & 7) of the eight in `high:low`; bit 3 of a selector repeats
// that byte's sign instead.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (selector & 7)) & 0xff);
    if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
