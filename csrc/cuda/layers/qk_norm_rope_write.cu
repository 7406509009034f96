// The CUDA op `qk_norm_rope_write`: qk_norm_rope_write_rows_kernel where `takes_rows` (device/row.cuh) says so, else
// qk_norm_rope_write_plainly_kernel.
#include "../../layers/checks.h"
#include "../device/scope.h"
#include "qk_norm_rope_write.cuh"

namespace kvpager::cuda::layers {
namespace {

template <class T, class C>
void write(const QkNormRopeWriteParams<T, C>& params, const Tensor& beside) {
  const int64_t rows = params.num_heads + 2 * params.pool.num_kv_heads;
  const LaunchScope scope(beside);
  const auto launch = [&](auto kernel, int64_t rows_per_block) {
    const dim3 grid = grid_of_size("slot_mapping", params.num_tokens, divided_up(rows, rows_per_block));
    KVPAGER_LAUNCH(kernel, grid, dim3(kWriteThreads), scope.stream, params, scope.errors);
    check_launch();
  };
  if constexpr (sizeof(T) == 2) {
    const Alignment numbers = Alignment()
                                  .rows(params.qkv, sizeof(T))
                                  .rows(params.query_out, sizeof(T))
                                  .address(params.q_weight)
                                  .address(params.k_weight)
                                  .address(params.cos_sin)
                                  .offset(params.cos_sin_stride * static_cast<int64_t>(sizeof(float)));
    if (takes_rows<T>(params.pool, numbers, params.key_cache, params.value_cache))
      return params.pool.head_dim <= 2 * kRowLanes * kPack
                 ? launch(qk_norm_rope_write_rows_kernel<T, C, 1>, kRowsPerBlock)
                 : launch(qk_norm_rope_write_rows_kernel<T, C, 2>, kRowsPerBlock);
  }
  launch(qk_norm_rope_write_plainly_kernel<T, C>, kWriteThreads / 32);
}

void qk_norm_rope_write(Tensor query_out, Tensor qkv, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                        Tensor cos_sin, Tensor positions, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                        double eps, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("qkv", qkv, key_cache, [&](auto number, auto code) {
    const auto params = qk_norm_rope_write_params<decltype(number), decltype(code)>(
        query_out, qkv, q_weight, k_weight, cos_sin, positions, key_cache, value_cache, slot_mapping, eps, key_scale,
        value_scale);
    if (params.num_tokens > 0) write(params, key_cache);
  });
}

}  // namespace
}  // namespace kvpager::cuda::layers

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("qk_norm_rope_write", TORCH_BOX(&kvpager::cuda::layers::qk_norm_rope_write));
}
