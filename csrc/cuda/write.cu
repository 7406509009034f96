// The CUDA entry points of what writes a step's tokens: write_kv and the fused front end. Which kernel takes a call:
//
// | op                 | cache     | kernel                                        | when                                |
// |--------------------|-----------|-----------------------------------------------|-------------------------------------|
// | write_kv           | numbers   | write_kv_kernel                               | always, in the widest unit that fits |
// | write_kv           | quantised | write_quantised_rows_kernel                   | `takes_rows`                        |
// |                    |           | write_quantised_plainly_kernel                | else                                |
// | qk_norm_rope_write | any       | fused_rows_kernel                             | `takes_rows`                        |
// |                    |           | fused_plainly_kernel                          | else                                |
#include "../fused_checks.h"
#include "fused.cuh"
#include "runtime.h"

namespace kvpager::cuda {
namespace {

// Rows in registers: 16-bit numbers, a head dim that 8 lanes share in chunks of 8, aligned in memory.
template <class T>
bool takes_rows(const PoolShape& pool, const Alignment& numbers, const Alignment& caches, int64_t code_bytes) {
  return sizeof(T) == 2 && pool.head_dim % (2 * kChunk) == 0 && pool.head_dim <= 4 * kRowLanes * kChunk &&
         numbers.fits(16) && caches.fits(kChunk * code_bytes);
}

template <class C>
Alignment caches_of(const Cache<C>& key_cache, const Cache<C>& value_cache) {
  return Alignment().cache(key_cache, sizeof(C)).cache(value_cache, sizeof(C));
}

int64_t round_up_div(int64_t count, int64_t by) { return (count + by - 1) / by; }

void write_numbers(const WriteParams<uint8_t>& params, int64_t element_bytes, const Tensor& beside) {
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
    WriteParams<U> units{in_units<const U>(params.key, element_bytes),
                         in_units<const U>(params.value, element_bytes),
                         in_units<U>(params.key_cache, element_bytes),
                         in_units<U>(params.value_cache, element_bytes),
                         params.slot_mapping,
                         params.num_tokens,
                         params.pool};
    units.pool.head_dim = row_bytes / static_cast<int64_t>(sizeof(U));
    KVPAGER_LAUNCH(write_kv_kernel<U>, grid_of_size("slot_mapping", params.num_tokens), dim3(kWriteThreads),
                   scope.stream, units, scope.errors);
    scope.check();
  });
}

template <class T, class C>
void write_quantised(const QuantisedWriteParams<T, C>& params, const Tensor& beside) {
  const int64_t rows = 2 * params.pool.num_kv_heads;
  const Alignment numbers = Alignment().rows(params.key, sizeof(T)).rows(params.value, sizeof(T));
  const LaunchScope scope(beside);
  const auto launch = [&](auto kernel, int64_t rows_per_block) {
    const dim3 grid = grid_of_size("slot_mapping", params.num_tokens, round_up_div(rows, rows_per_block));
    KVPAGER_LAUNCH(kernel, grid, dim3(kWriteThreads), scope.stream, params, scope.errors);
    scope.check();
  };
  if constexpr (sizeof(T) == 2) {
    if (takes_rows<T>(params.pool, numbers, caches_of(params.key_cache, params.value_cache), sizeof(C)))
      return params.pool.head_dim <= 2 * kRowLanes * kChunk
                 ? launch(write_quantised_rows_kernel<T, C, 1>, kRowsPerBlock)
                 : launch(write_quantised_rows_kernel<T, C, 2>, kRowsPerBlock);
  }
  launch(write_quantised_plainly_kernel<T, C>, kWriteThreads / 32);
}

void write_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
              std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  if (is_quantised_dtype(key_cache.scalar_type()))
    return with_cache_types("key", key, key_cache, [&](auto number, auto code) {
      using T = decltype(number);
      using C = decltype(code);
      if constexpr (is_quantised<C>) {
        const auto params =
            quantised_write_params<T, C>(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
        if (params.num_tokens > 0) write_quantised(params, key_cache);
      }
    });
  check_scales("key_scale", key_scale, key_cache, {});
  check_scales("value_scale", value_scale, key_cache, {});
  const WriteParams<uint8_t> params = write_params<uint8_t>(key, value, key_cache, value_cache, slot_mapping);
  if (params.num_tokens > 0) write_numbers(params, static_cast<int64_t>(key_cache.element_size()), key_cache);
}

template <class T, class C>
void launch_fused(const FusedParams<T, C>& params, const Tensor& beside) {
  const int64_t rows = params.num_heads + 2 * params.pool.num_kv_heads;
  const LaunchScope scope(beside);
  const auto launch = [&](auto kernel, int64_t rows_per_block) {
    const dim3 grid = grid_of_size("slot_mapping", params.num_tokens, round_up_div(rows, rows_per_block));
    KVPAGER_LAUNCH(kernel, grid, dim3(kWriteThreads), scope.stream, params, scope.errors);
    scope.check();
  };
  if constexpr (sizeof(T) == 2) {
    const Alignment numbers = Alignment()
                                  .rows(params.qkv, sizeof(T))
                                  .rows(params.query_out, sizeof(T))
                                  .address(params.q_weight)
                                  .address(params.k_weight)
                                  .address(params.cos_sin)
                                  .offset(params.cos_sin_stride * static_cast<int64_t>(sizeof(float)));
    if (takes_rows<T>(params.pool, numbers, caches_of(params.key_cache, params.value_cache), sizeof(C)))
      return params.pool.head_dim <= 2 * kRowLanes * kChunk ? launch(fused_rows_kernel<T, C, 1>, kRowsPerBlock)
                                                            : launch(fused_rows_kernel<T, C, 2>, kRowsPerBlock);
  }
  launch(fused_plainly_kernel<T, C>, kWriteThreads / 32);
}

void qk_norm_rope_write(Tensor query_out, Tensor qkv, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                        Tensor cos_sin, Tensor positions, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                        double eps, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("qkv", qkv, key_cache, [&](auto number, auto code) {
    const auto params = fused_params<decltype(number), decltype(code)>(query_out, qkv, q_weight, k_weight, cos_sin,
                                                                       positions, key_cache, value_cache, slot_mapping,
                                                                       eps, key_scale, value_scale);
    if (params.num_tokens > 0) launch_fused(params, key_cache);
  });
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("write_kv", TORCH_BOX(&kvpager::cuda::write_kv));
  library.impl("qk_norm_rope_write", TORCH_BOX(&kvpager::cuda::qk_norm_rope_write));
}
