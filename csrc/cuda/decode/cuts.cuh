// The split plan as the blocks of a GPU use it (csrc/attention/split_plan.h says what it is).
//
// Parts go to blocks, one for each part and up to 8 query heads of a kv head, all resident at once, whatever the
// sequences are.
#pragma once
#include "../../attention/split_plan.h"
#include "../device/errors.cuh"

namespace kvpager::cuda::decode {

// Part of the token at `position` of a row: the last one that begins at or before it.
__device__ __forceinline__ int part_of(const SplitPlan& plan, Cut token) {
  int low = 0, high = plan.num_parts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (plan.cut(middle) <= token ? low : high) = middle;
  }
  return low;
}

// The same answer in every thread; the first of a block reports.
__device__ __forceinline__ bool plan_is_valid(const SplitPlan& plan, int64_t num_sequences, unsigned* errors) {
  bool bad = !plan.is_for(num_sequences);
  for (int index = threadIdx.x; index <= plan.num_parts; index += blockDim.x)
    bad |= !plan.cut_is_valid(index, num_sequences);
  if (!__syncthreads_or(bad)) return true;
  if (threadIdx.x == 0) report(errors, kSplitPlan);
  return false;
}

}  // namespace kvpager::cuda::decode
