// Prefill over caches of the queries' type.
#include "prefill_launch.cuh"

namespace kvpager::cuda {

template void launch_prefill(const AttentionParams<float16, float16>&, bool, const Tensor&, const LaunchScope&);
template void launch_prefill(const AttentionParams<bfloat16, bfloat16>&, bool, const Tensor&, const LaunchScope&);

}  // namespace kvpager::cuda
