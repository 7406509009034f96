// Prefill attention on tensor cores over one type of caches, KVPAGER_CACHE: compiled apart, since it takes long.
#include "kernel.cuh"

namespace kvpager::cuda::prefill {

template <class T, class C, int kHeadDim, int kRowWarps>
void launch_kernel(const AttentionParams<T, C>& params, const PrefillPlan& plan, float* workspace,
                   const Launch& launch) {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  constexpr int kBytes = Shape::kBytes > Shape::kMergeBytes ? Shape::kBytes : Shape::kMergeBytes;
  allow_dynamic_shared(prefill_kernel<T, C, kHeadDim, kRowWarps>, kBytes);
  KVPAGER_LAUNCH_SHARED((prefill_kernel<T, C, kHeadDim, kRowWarps>), plan.grid, dim3(kPrefillThreads), kBytes,
                        launch.stream, params, plan.shared_rows(workspace, params.pool.head_dim), launch.errors);
  check_launch();
}

template <class T, class C>
void launch_prefill(const AttentionParams<T, C>& params, const PrefillPlan& plan, float* workspace,
                    const Launch& launch) {
  const auto launch_for = [&](auto head_dim) {
    constexpr int D = decltype(head_dim)::value;
    plan.few_rows ? launch_kernel<T, C, D, 1>(params, plan, workspace, launch)
                  : launch_kernel<T, C, D, 4>(params, plan, workspace, launch);
  };
  switch (compiled_head_dim(params.pool.head_dim)) {
    case 64: return launch_for(std::integral_constant<int, 64>());
    case 128: return launch_for(std::integral_constant<int, 128>());
    default: return launch_for(std::integral_constant<int, 256>());
  }
}

template void launch_prefill(const AttentionParams<bfloat16, cache_type<bfloat16, KVPAGER_CACHE>>&, const PrefillPlan&,
                             float*, const Launch&);
template void launch_prefill(const AttentionParams<float16, cache_type<float16, KVPAGER_CACHE>>&, const PrefillPlan&,
                             float*, const Launch&);

}  // namespace kvpager::cuda::prefill
