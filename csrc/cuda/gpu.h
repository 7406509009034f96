// The thin layer under the kernels: real CUDA with nvcc, the emulator of ../testing/ with a host compiler.
//
// Kernel sources use only what both offer: __global__, __device__, threadIdx and friends, __syncthreads,
// __syncthreads_or, __shfl_xor_sync, atomicOr, atomicExch, KVPAGER_SHARED(type, name) in place of __shared__, and
// KVPAGER_LAUNCH in place of <<<>>>.
#pragma once
#if defined(KVPAGER_EMULATE)
#include "../testing/emulated_gpu.h"
#else
#include <cuda_runtime.h>
#define KVPAGER_SHARED(type, name) __shared__ type name
#define KVPAGER_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#endif
