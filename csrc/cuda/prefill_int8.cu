// Prefill over int8 caches.
#include "prefill_launch.cuh"

namespace kvpager::cuda {

template void launch_prefill(const AttentionParams<float16, int8_code>&, bool, const Tensor&, const LaunchScope&);
template void launch_prefill(const AttentionParams<bfloat16, int8_code>&, bool, const Tensor&, const LaunchScope&);

}  // namespace kvpager::cuda
