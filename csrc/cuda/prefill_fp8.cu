// Prefill over fp8 caches.
#include "prefill_launch.cuh"

namespace kvpager::cuda {

template void launch_prefill(const AttentionParams<float16, fp8_e4m3>&, bool, const Tensor&, const LaunchScope&);
template void launch_prefill(const AttentionParams<bfloat16, fp8_e4m3>&, bool, const Tensor&, const LaunchScope&);

}  // namespace kvpager::cuda
