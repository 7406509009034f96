// The device error word: a kernel can't raise, so it skips the row and sets the bit of the argument that was wrong.
// Bit numbers are those of DEVICE_ERRORS in python/kvpager/ops/device_errors.py.
#pragma once
#include "gpu.h"

namespace kvpager::cuda {

enum ErrorBit : unsigned {
  kSlotMapping = 0,
  kBlockTables = 1,
  kSeqLens = 2,
  kQueryStartLoc = 3,
  kPairs = 4,
  kKeyScale = 5,
  kValueScale = 6,
  kPositions = 7,
  kSeqStartLoc = 8,
  kChanged = 9,
  kSplitPlan = 10,
};

__device__ __forceinline__ void report(unsigned* errors, ErrorBit bit) { atomicOr(errors, 1u << bit); }

// A scale that stands for a whole cache is a positive number: nothing else can be divided by. The same answer in every
// thread; the first of a block reports.
__device__ __forceinline__ bool scale_is_valid(const float* scale, bool fixed, ErrorBit bit, unsigned* errors) {
  if (!fixed || (*scale > 0 && *scale < INFINITY)) return true;
  if (threadIdx.x == 0) report(errors, bit);
  return false;
}

// Of both caches. `P`: params with `key_scale` and `value_scale`.
template <class P>
__device__ __forceinline__ bool scales_are_valid(const P& p, unsigned* errors) {
  const bool key_is_valid = scale_is_valid(p.key_scale.data, p.key_scale.fixed, kKeyScale, errors);
  return scale_is_valid(p.value_scale.data, p.value_scale.fixed, kValueScale, errors) && key_is_valid;
}

}  // namespace kvpager::cuda
