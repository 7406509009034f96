// A small CUDA on the CPU, for tests: runs a kernel's own source with a host compiler (C++20, headers only).
//
// README.md beside this file says what is covered and how to use it. Settings of the environment, read at each launch:
//  * KVPAGER_EMULATE_SEED=n          0 (the default): threads in turn, one block after the other; else at random
//  * KVPAGER_EMULATE_SKIP_BARRIER=k  every thread runs through its k-th block barrier (from 1): a planted fault
//  * KVPAGER_EMULATE_SKIP_WAIT=k     every thread runs through its k-th wait for asynchronous copies: another
#pragma once
#define __global__ inline
#define __device__ inline
#define __host__
#define __forceinline__
#define __launch_bounds__(...)

#include "memory.h"
#include "scheduler.h"

#include "collectives.h"
#include "shared_memory.h"

#include "async_copies.h"
#include "launch.h"
#include "ptx.h"
#include "tensor_cores.h"

#define threadIdx (emulated::self().index)
#define blockIdx (emulated::own_block().index)
#define blockDim (emulated::device->block_size)
#define gridDim (emulated::device->grid_size)

#define KVPAGER_LAUNCH_SHARED(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), emulated::launch(grid, block, shared_bytes, [&] { kernel(__VA_ARGS__); }))
#define KVPAGER_LAUNCH(kernel, grid, block, stream, ...) \
  KVPAGER_LAUNCH_SHARED(kernel, grid, block, 0, stream, __VA_ARGS__)

using std::exp;
using std::log;
using std::tanh;
