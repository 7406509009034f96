// The CPU op `write_kv`: checks the slots, then spreads tokens over threads. Numbers are copied, codes are quantised.
#include <algorithm>
#include <memory>

#include "../../moves/checks.h"
#include "../attention/values.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::moves {

// Quantises tokens begin ... end - 1 into their slots. `row` has room for head_dim floats.
KVPAGER_DECLARE_PER_ISA(template <class T, class C>
                        void quantise_tokens(const WriteParams<T, C>& params, int64_t begin, int64_t end, float* row))

namespace {

template <class T>
void copy_tokens(const WriteParams<T, T>& p, int64_t begin, int64_t end) {
  const PoolShape& pool = p.pool;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) continue;
    // In bounds: check_slots has found slot < N * S, so block < N and offset < S; token < num_tokens <= rows of key.
    const int64_t block = slot / pool.block_size, offset = slot % pool.block_size;
    for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
      std::copy_n(p.key.at(token, head), pool.head_dim, p.key_cache.at(block, head, offset));
      std::copy_n(p.value.at(token, head), pool.head_dim, p.value_cache.at(block, head, offset));
    }
  }
}

template <class T, class C>
void write(const WriteParams<T, C>& p) {
  check_fixed_scales(p);
  check_slots(p.slot_mapping, p.num_tokens, p.pool);
  const int64_t grain = grain_of(2 * p.pool.num_kv_heads * p.pool.head_dim);
  torch::stable::parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    if constexpr (is_quantised<C>) {
      const auto row = std::make_unique_for_overwrite<float[]>(p.pool.head_dim);
      KVPAGER_ACTIVE(quantise_tokens<T, C>)(p, begin, end, row.get());
    } else {
      copy_tokens(p, begin, end);
    }
  });
}

void write_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
              std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  // Beside a cache of numbers it is the cache that says the type, and `key` that does not fit.
  const bool quantised = is_quantised_dtype(key_cache.scalar_type());
  with_cache_types(quantised ? "key" : "key_cache", quantised ? key : key_cache, key_cache,
                   [&](auto number, auto code) {
                     write(write_params<decltype(number), decltype(code)>(key, value, key_cache, value_cache,
                                                                          slot_mapping, key_scale, value_scale));
                   });
}

}  // namespace
}  // namespace kvpager::cpu::moves

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("write_kv", TORCH_BOX(&kvpager::cpu::moves::write_kv));
}
