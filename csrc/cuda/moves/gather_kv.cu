// The CUDA op `gather_kv`: numbers in the widest unit that fits, codes one by one.
#include <algorithm>

#include "../../moves/checks.h"
#include "../device/scope.h"
#include "gather.cuh"

namespace kvpager::cuda::moves {
namespace {

template <class T>
void gather_numbers(const GatherParams<T, T>& params, const Launch& launch) {
  constexpr int64_t kBytes = sizeof(T);
  const int64_t row_bytes = params.pool.head_dim * kBytes;
  const Alignment alignment = Alignment()
                                  .rows(params.key, kBytes)
                                  .rows(params.value, kBytes)
                                  .cache(params.key_cache, kBytes)
                                  .cache(params.value_cache, kBytes)
                                  .offset(row_bytes);
  with_unit(alignment.unit_bytes(), [&](auto zero) {
    using U = decltype(zero);
    GatherParams<U, U> units{in_units<U>(params.key, kBytes),
                             in_units<U>(params.value, kBytes),
                             in_units<const U>(params.key_cache, kBytes),
                             in_units<const U>(params.value_cache, kBytes),
                             {},
                             {},
                             params.block_tables,
                             params.seq_lens,
                             params.seq_start_loc,
                             params.num_rows,
                             params.num_sequences,
                             params.max_blocks,
                             params.pool};
    units.pool.head_dim = row_bytes / static_cast<int64_t>(sizeof(U));
    KVPAGER_LAUNCH(gather_kv_kernel<U>, grid_of_size("key", std::max<int64_t>(1, params.num_rows)),
                   dim3(kGatherThreads), launch.stream, units, launch.errors);
  });
}

void gather_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens,
               Tensor seq_start_loc, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("key", key, key_cache, [&](auto number, auto code) {
    using T = decltype(number);
    using C = decltype(code);
    const auto params = gather_params<T, C>(key, value, key_cache, value_cache, block_tables, seq_lens, seq_start_loc,
                                            key_scale, value_scale);
    if (params.num_sequences == 0) return;
    const LaunchScope scope(key_cache);
    if constexpr (is_quantised<C>) {
      KVPAGER_LAUNCH((gather_codes_kernel<T, C>), grid_of_size("key", std::max<int64_t>(1, params.num_rows)),
                     dim3(kGatherThreads), scope.stream, params, scope.errors);
    } else {
      gather_numbers(params, scope);
    }
    check_launch();
  });
}

}  // namespace
}  // namespace kvpager::cuda::moves

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("gather_kv", TORCH_BOX(&kvpager::cuda::moves::gather_kv));
}
