// The CUDA op `merge_attention`.
#include "../../attention/checks.h"
#include "../device/scope.h"
#include "merge.cuh"

namespace kvpager::cuda::attention {
namespace {

template <class T, int kWidth>
void launch(const MergeParams<T>& params, const Tensor& beside) {
  const LaunchScope scope(beside);
  const int64_t rows = merge_rows_per_block(params.head_dim / kWidth);
  const dim3 grid = grid_of_size("out", params.num_tokens, divided_up(params.num_heads, rows));
  KVPAGER_LAUNCH((merge_attention_kernel<T, kWidth>), grid, dim3(kMergeThreads), scope.stream, params);
  check_launch();
}

void merge_attention(Tensor out, std::optional<Tensor> lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  with_number_type("out", out.scalar_type(), [&](auto number) {
    using T = decltype(number);
    constexpr int64_t kBytes = sizeof(T), kWide = 16 / kBytes;
    const MergeParams<T> params = merge_params<T>(out, lse, out_a, lse_a, out_b, lse_b);
    if (params.num_tokens == 0 || params.num_heads == 0) return;
    const Alignment alignment =
        Alignment().rows(params.out, kBytes).rows(params.out_a, kBytes).rows(params.out_b, kBytes);
    params.head_dim % kWide == 0 && alignment.fits(16) ? launch<T, kWide>(params, out) : launch<T, 1>(params, out);
  });
}

}  // namespace
}  // namespace kvpager::cuda::attention

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("merge_attention", TORCH_BOX(&kvpager::cuda::attention::merge_attention));
}
