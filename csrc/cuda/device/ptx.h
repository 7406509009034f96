// The instructions that C++ has no words for: all inline PTX of the kernels stands here (nvcc only).
//
// Under the emulator csrc/testing/ offers the same names; there each is what the PTX manual says of it. Lane letters as
// in the manual's figures: r = lane / 4, c = lane % 4.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace kvpager::cuda {

// 16, 8 or 4 bytes of memory that the kernel only reads and reads once: past L1, through the read-only path.
__device__ __forceinline__ uint4 load_once_16(const void* from) {
  uint4 to;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "l"(from));
  return to;
}
__device__ __forceinline__ uint2 load_once_8(const void* from) {
  uint2 to;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(from));
  return to;
}
__device__ __forceinline__ uint32_t load_once_4(const void* from) {
  uint32_t to;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to) : "l"(from));
  return to;
}

// c[m, n] += a[m, k] * b[k, n], 16 x 8 x 16, float sums. Lane (r, c) holds two numbers a register:
//   a: rows r, r + 8 of columns 2c, 2c + 1; then the same rows of columns 2c + 8, 2c + 9
//   b: column r of rows 2c, 2c + 1; then of rows 2c + 8, 2c + 9
//   c: row r of columns 2c, 2c + 1; then row r + 8 of them
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats to two 16-bit floats, to nearest, ties to even; `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

// Two float16 to floats.
__device__ __forceinline__ void f32_of_f16x2(uint32_t two, float& low, float& high) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(low), "=f"(high)
      : "r"(two));
}

// Two float16 at once: a - b.
__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
// a * b
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

#if __CUDA_ARCH__ >= 890
#define KVPAGER_HAS_FP8_CONVERSION 1
// Codes 0, 1 and codes 2, 3 of four e4m3 codes to two pairs of float16: exact.
__device__ __forceinline__ void f16x2_of_e4m3x4(uint32_t four, uint32_t& pair_01, uint32_t& pair_23) {
  asm volatile(
      "{.reg .b16 low, high; mov.b32 {low, high}, %2;"
      "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(pair_01), "=r"(pair_23)
      : "r"(four));
}
// Two floats to two e4m3 codes in the low 16 bits, `low` in the low byte: to nearest, ties to even, at most 448.
__device__ __forceinline__ uint32_t e4m3x2_of_f32(float low, float high) {
  uint32_t two;
  asm("{.reg .b16 codes; cvt.rn.satfinite.e4m3x2.f32 codes, %1, %2; cvt.u32.u16 %0, codes;}"
      : "=r"(two)
      : "f"(high), "f"(low));
  return two;
}
// The same to e5m2 codes: at most 57344.
__device__ __forceinline__ uint32_t e5m2x2_of_f32(float low, float high) {
  uint32_t two;
  asm("{.reg .b16 codes; cvt.rn.satfinite.e5m2x2.f32 codes, %1, %2; cvt.u32.u16 %0, codes;}"
      : "=r"(two)
      : "f"(high), "f"(low));
  return two;
}
#endif

// 2^x, log2 x and 1 / x to about 2^-22, flushing subnormals; 2^-inf = 0, log2 0 = -inf, 1 / inf = 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes from global to shared memory while the thread goes on; zeros, and nothing is read, if not `wanted`.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool wanted = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of the thread's groups are under way; what others copied needs a barrier as well.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes of shared memory, read each time it is asked for: what the compiler would else keep in registers.
__device__ __forceinline__ uint4 load_shared_16(const void* shared) {
  uint4 to;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "r"(shared_address(shared)));
  return to;
}

// threadIdx.x, asked for anew: what is made of it is not kept in registers while they are needed for more.
__device__ __forceinline__ int fresh_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&to)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

}  // namespace kvpager::cuda
