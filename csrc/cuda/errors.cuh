// The device error word: a kernel can't raise, so it skips the row and sets the bit of the argument that was wrong.
// Bit numbers are those of DEVICE_ERRORS in python/kvpager/ops/device_errors.py.
#pragma once
#include "gpu.h"

namespace kvpager::cuda {

enum ErrorBit : unsigned { kSlotMapping = 0, kBlockTables = 1, kSeqLens = 2, kQueryStartLoc = 3, kPairs = 4 };

__device__ __forceinline__ void report(unsigned* errors, ErrorBit bit) { atomicOr(errors, 1u << bit); }

// Moves the word into `word` [1] int64 and clears it, in stream order. One thread.
__global__ void take_errors_kernel(unsigned* errors, int64_t* word) {
  if (threadIdx.x == 0) *word = atomicExch(errors, 0u);
}

}  // namespace kvpager::cuda
