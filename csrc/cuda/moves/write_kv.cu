// The CUDA op `write_kv`. Which kernel takes a call:
//
// | cache     | kernel                         | when                                 |
// |-----------|--------------------------------|--------------------------------------|
// | numbers   | write_kv_kernel                | always, in the widest unit that fits |
// | quantised | write_quantised_rows_kernel    | `takes_rows` (device/row.cuh)        |
// |           | write_quantised_plainly_kernel | else                                 |
#include "../../moves/checks.h"
#include "../device/scope.h"
#include "quantised_write.cuh"

namespace kvpager::cuda::moves {
namespace {

void write_numbers(const WriteParams<uint8_t, uint8_t>& params, int64_t element_bytes, const Tensor& beside) {
  const int64_t row_bytes = params.pool.head_dim * element_bytes;
  const Alignment alignment = Alignment()
                                  .rows(params.key, element_bytes)
                                  .rows(params.value, element_bytes)
                                  .cache(params.key_cache, element_bytes)
                                  .cache(params.value_cache, element_bytes)
                                  .offset(row_bytes);
  const LaunchScope scope(beside);
  with_unit(alignment.unit_bytes(), [&](auto zero) {
    using U = decltype(zero);
    WriteParams<U, U> units{in_units<const U>(params.key, element_bytes),
                            in_units<const U>(params.value, element_bytes),
                            in_units<U>(params.key_cache, element_bytes),
                            in_units<U>(params.value_cache, element_bytes),
                            {},
                            {},
                            params.slot_mapping,
                            params.num_tokens,
                            params.pool};
    units.pool.head_dim = row_bytes / static_cast<int64_t>(sizeof(U));
    KVPAGER_LAUNCH(write_kv_kernel<U>, grid_of_size("slot_mapping", params.num_tokens), dim3(kWriteThreads),
                   scope.stream, units, scope.errors);
    check_launch();
  });
}

template <class T, class C>
void write_quantised(const WriteParams<T, C>& params, const Tensor& beside) {
  const int64_t rows = 2 * params.pool.num_kv_heads;
  const Alignment numbers = Alignment().rows(params.key, sizeof(T)).rows(params.value, sizeof(T));
  const LaunchScope scope(beside);
  const auto launch = [&](auto kernel, int64_t rows_per_block) {
    const dim3 grid = grid_of_size("slot_mapping", params.num_tokens, divided_up(rows, rows_per_block));
    KVPAGER_LAUNCH(kernel, grid, dim3(kWriteThreads), scope.stream, params, scope.errors);
    check_launch();
  };
  if constexpr (sizeof(T) == 2) {
    if (takes_rows<T>(params.pool, numbers, params.key_cache, params.value_cache))
      return params.pool.head_dim <= 2 * kRowLanes * kPack
                 ? launch(write_quantised_rows_kernel<T, C, 1>, kRowsPerBlock)
                 : launch(write_quantised_rows_kernel<T, C, 2>, kRowsPerBlock);
  }
  launch(write_quantised_plainly_kernel<T, C>, kWriteThreads / 32);
}

void write_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
              std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  if (!is_quantised_dtype(key_cache.scalar_type())) {
    const auto params =
        write_params<uint8_t, uint8_t>(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
    if (params.num_tokens > 0) write_numbers(params, static_cast<int64_t>(key_cache.element_size()), key_cache);
    return;
  }
  with_cache_types("key", key, key_cache, [&](auto number, auto code) {
    using C = decltype(code);
    if constexpr (is_quantised<C>) {
      const auto params =
          write_params<decltype(number), C>(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
      if (params.num_tokens > 0) write_quantised(params, key_cache);
    }
  });
}

}  // namespace
}  // namespace kvpager::cuda::moves

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("write_kv", TORCH_BOX(&kvpager::cuda::moves::write_kv));
}
