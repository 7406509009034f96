// The functions of ../cuda/device/ptx.h, by what the PTX manual says of each instruction.
#pragma once
#include <cmath>

#include "async_copies.h"
#include "memory.h"
#include "tensor_cores.h"

namespace kvpager::cuda {

template <class T>
T checked_load(const void* from, const emulated::Where& where) {
  emulated::check_aligned("a vector load from an address that is not aligned to its size", from, sizeof(T), where);
  return *static_cast<const T*>(from);
}
inline uint4 load_once_16(const void* from, KVPAGER_HERE) { return checked_load<uint4>(from, where); }
inline uint2 load_once_8(const void* from, KVPAGER_HERE) { return checked_load<uint2>(from, where); }
inline uint32_t load_once_4(const void* from, KVPAGER_HERE) { return checked_load<uint32_t>(from, where); }

inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, KVPAGER_HERE) {
  emulated::mma_m16n8k16<bfloat16>(c, a, b0, b1, where);
}
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, KVPAGER_HERE) {
  emulated::mma_m16n8k16<float16>(c, a, b0, b1, where);
}
inline int fresh_thread_index() { return static_cast<int>(emulated::self().index.x); }
inline uint4 load_shared_16(const void* shared, KVPAGER_HERE) {
  emulated::check_shared("a shared load from outside shared memory", shared, sizeof(uint4), where);
  return checked_load<uint4>(shared, where);
}
inline void ldmatrix_x4(uint32_t (&to)[4], const void* shared_row, KVPAGER_HERE) {
  emulated::ldmatrix<4>(to, shared_row, where);
}
inline void ldmatrix_x4_trans(uint32_t (&to)[4], const void* shared_row, KVPAGER_HERE) {
  emulated::ldmatrix<4, true>(to, shared_row, where);
}

template <class T>
uint32_t pack_pair(float low, float high) {
  return narrow<T>(low).bits | uint32_t{narrow<T>(high).bits} << 16;
}
inline uint32_t pack_bf16(float low, float high) { return pack_pair<bfloat16>(low, high); }
inline uint32_t pack_f16(float low, float high) { return pack_pair<float16>(low, high); }

// A float holds enough of an operation's result that rounding it once more to float16 changes nothing.
inline float half_of_f16x2(uint32_t pair, int high) { return emulated::half_of<float16>(pair, high); }
inline void f32_of_f16x2(uint32_t two, float& low, float& high) {
  low = half_of_f16x2(two, 0), high = half_of_f16x2(two, 1);
}
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  return pack_f16(half_of_f16x2(a, 0) - half_of_f16x2(b, 0), half_of_f16x2(a, 1) - half_of_f16x2(b, 1));
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return pack_f16(half_of_f16x2(a, 0) * half_of_f16x2(b, 0), half_of_f16x2(a, 1) * half_of_f16x2(b, 1));
}

// Subnormal arguments and results are flushed to zeros of their sign.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(flushed(x))); }
inline float log2_fast(float x) { return std::log2(flushed(x)); }
inline float reciprocal_fast(float x) { return flushed(1.0f / flushed(x)); }

inline void cp_async_16(void* shared, const void* global, bool wanted = true, KVPAGER_HERE) {
  emulated::cp_async_16(shared, global, wanted ? 16 : 0, where);
}
using emulated::cp_async_commit;
using emulated::cp_async_wait;

}  // namespace kvpager::cuda
