// The thin layer under the kernels: real CUDA with nvcc, the emulator of csrc/testing/ with a host compiler.
//
// Kernel sources use only what both offer:
//  * __global__, __device__, threadIdx and friends, uint2, uint4, KVPAGER_SHARED(type, name) in place of __shared__,
//    KVPAGER_DYNAMIC_SHARED(type, name) in place of extern __shared__, and KVPAGER_LAUNCH in place of <<<>>>;
//  * __syncthreads, __syncthreads_or, __syncwarp, __shfl_sync, __shfl_xor_sync, __any_sync (all lanes of a warp),
//    atomicAdd, atomicOr, atomicExch, __threadfence, __byte_perm, __ldcg;
//  * the functions of ptx.h, by the same names in namespace kvpager::cuda.
#pragma once
#if defined(KVPAGER_EMULATE)
#include "../../testing/emulated_gpu.h"
namespace kvpager::cuda {
using Stream = int;
}
#else
#include <cuda_runtime.h>

#include "ptx.h"
namespace kvpager::cuda {
using Stream = cudaStream_t;
}
#define KVPAGER_SHARED(type, name) __shared__ type name
#define KVPAGER_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(dynamic_shared)
#define KVPAGER_LAUNCH_SHARED(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define KVPAGER_LAUNCH(kernel, grid, block, stream, ...) \
  KVPAGER_LAUNCH_SHARED(kernel, grid, block, 0, stream, __VA_ARGS__)
#endif
