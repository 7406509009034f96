// Launches the tensor core prefill; one compilation for each type of cache (prefill_float.cu and friends).
#pragma once
#include "runtime.h"

namespace kvpager::cuda {

// `few_rows`: a sequence's rows are few, so that the warps of a block share 16 of them, and several blocks their
// positions where that fills the device. T: float16 or bfloat16.
template <class T, class C>
void launch_prefill(const AttentionParams<T, C>& params, bool few_rows, const Tensor& beside, const LaunchScope& scope);

}  // namespace kvpager::cuda
