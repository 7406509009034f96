// The CPU entry points of the ops, and what this library says about itself.
//
// The schemas stand in Python (python/kvpager/ops/schemas.py); a function here takes the arguments of its schema in
// order, checks them (checks.h), picks the type and calls the kernel. Stable ABI only: no ATen, no c10.
#include "checks.h"
#include "cpu/kernels.h"
#include "fused_checks.h"
#include "layer_checks.h"
#include "pair_checks.h"

namespace kvpager {
namespace {

// The CPU can look at a scale that is only read; its reading ops all do.
void check_fixed_scales(const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  cpu::check_fixed_scale("key_scale", scales_of<const float>(key_scale));
  cpu::check_fixed_scale("value_scale", scales_of<const float>(value_scale));
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
        check_fixed_scales(key_scale, value_scale);
        cpu::write_quantised_kv(params);
      }
    });
  check_scales("key_scale", key_scale, key_cache, {});
  check_scales("value_scale", value_scale, key_cache, {});
  with_bits_type("key_cache", key_cache.element_size(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) > 1) {
      cpu::write_kv(write_params<T>(key, value, key_cache, value_cache, slot_mapping));
    } else {
      fail_argument("key_cache", "elements of 2, 4 or 8 bytes", "1");
    }
  });
}

cpu::DecodeOptions decode_options(const Tensor& query, int64_t fixed_split, const std::optional<Tensor>& schedule,
                                  const std::optional<Tensor>& workspace) {
  if (fixed_split < 0) fail_argument("fixed_split", "0 or more tokens", std::to_string(fixed_split));
  cpu::DecodeOptions options{};
  options.fixed_split = fixed_split;
  if (schedule) {
    check_tensor("split_plan", *schedule, ScalarType::Int, query, {-1});
    options.schedule = list_of<int32_t>(*schedule);
    options.schedule_size = schedule->size(0);
  }
  if (workspace) {
    check_tensor("workspace", *workspace, ScalarType::Byte, query, {-1});
    check_last_contiguous("workspace", *workspace);
    if (reinterpret_cast<uintptr_t>(workspace->const_data_ptr()) % sizeof(float) != 0)
      fail_argument("workspace", "an address that is a multiple of 4", "another");
    options.workspace = static_cast<float*>(workspace->mutable_data_ptr());
    options.workspace_floats = workspace->size(0) / static_cast<int64_t>(sizeof(float));
  }
  return options;
}

void paged_attention(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                     Tensor block_tables, Tensor seq_lens, double scale, int64_t max_seq_len, int64_t window,
                     double softcap, std::optional<Tensor> sinks, std::optional<Tensor> key_scale,
                     std::optional<Tensor> value_scale, int64_t fixed_split, std::optional<Tensor> schedule,
                     std::optional<Tensor> workspace) {
  with_cache_types("query", query, key_cache, [&](auto number, auto code) {
    using T = decltype(number);
    using C = decltype(code);
    const auto params =
        attention_params<T, C>(out, lse, query, key_cache, value_cache, block_tables, std::nullopt, seq_lens, sinks,
                               {scale, 1, max_seq_len, window, softcap}, key_scale, value_scale);
    check_fixed_scales(key_scale, value_scale);
    const cpu::DecodeOptions options = decode_options(query, fixed_split, schedule, workspace);
    if constexpr (std::is_same_v<T, double>) {
      cpu::check_schedule(params, options);
      cpu::attention(params);  // never cuts a sequence, so every schedule and split gives the same
    } else {
      cpu::decode(params, options);
    }
  });
}

void paged_prefill(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                   Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, double scale, int64_t max_query_len,
                   int64_t max_seq_len, int64_t window, double softcap, std::optional<Tensor> sinks,
                   std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("query", query, key_cache, [&](auto number, auto code) {
    using T = decltype(number);
    using C = decltype(code);
    const auto params =
        attention_params<T, C>(out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks,
                               {scale, max_query_len, max_seq_len, window, softcap}, key_scale, value_scale);
    check_fixed_scales(key_scale, value_scale);
    if constexpr (std::is_same_v<T, double>) {
      cpu::attention(params);
    } else {
      cpu::prefill(params);
    }
  });
}

void merge_attention(Tensor out, std::optional<Tensor> lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  with_float_type("out", out.scalar_type(), [&](auto zero) {
    cpu::merge_attention(merge_params<decltype(zero)>(out, lse, out_a, lse_a, out_b, lse_b));
  });
}

void qk_norm_rope_write(Tensor query_out, Tensor qkv, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                        Tensor cos_sin, Tensor positions, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                        double eps, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("qkv", qkv, key_cache, [&](auto number, auto code) {
    using T = decltype(number);
    using C = decltype(code);
    const auto params = fused_params<T, C>(query_out, qkv, q_weight, k_weight, cos_sin, positions, key_cache,
                                           value_cache, slot_mapping, eps, key_scale, value_scale);
    check_fixed_scales(key_scale, value_scale);
    cpu::qk_norm_rope_write(params);
  });
}

void linear(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  with_float_type("x", x.scalar_type(),
                  [&](auto zero) { cpu::linear(linear_params<decltype(zero)>(out, x, weight, bias)); });
}

void rms_norm(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> residual, double eps) {
  with_float_type("x", x.scalar_type(),
                  [&](auto zero) { cpu::rms_norm(norm_params<decltype(zero)>(out, x, weight, residual, eps)); });
}

void silu_mul(Tensor out, Tensor gate, Tensor up) {
  with_float_type("gate", gate.scalar_type(),
                  [&](auto zero) { cpu::silu_mul(gate_params<decltype(zero)>(out, gate, up)); });
}

void copy_blocks(std::vector<Tensor> caches, Tensor pairs) {
  check_copy(caches, pairs);
  std::vector<CopyShape> shapes;
  for (const Tensor& cache : caches) shapes.push_back(copy_shape(cache));  // all are checked before one is written
  const auto grid = grid_of<int64_t>(pairs);
  check_pairs(grid, pairs.size(0), caches[0].size(0));
  for (size_t i = 0; i < caches.size(); ++i)
    cpu::copy_blocks(static_cast<char*>(caches[i].mutable_data_ptr()), shapes[i], caches[i].element_size(), grid,
                     pairs.size(0));
}

void swap_blocks(std::vector<Tensor> src, std::vector<Tensor> dst, Tensor pairs) {
  check_swap(src, dst, pairs);
  std::vector<SwapShape> shapes;
  for (size_t i = 0; i < src.size(); ++i) shapes.push_back(swap_shape(src[i], dst[i]));
  const auto grid = grid_of<int64_t>(pairs);
  check_swap_pairs(grid, pairs.size(0), src[0].size(0), dst[0].size(0));
  for (size_t i = 0; i < src.size(); ++i)
    cpu::swap_blocks(static_cast<const char*>(src[i].const_data_ptr()), static_cast<char*>(dst[i].mutable_data_ptr()),
                     shapes[i], src[i].element_size(), grid, pairs.size(0));
}

void update_tables(Tensor block_tables, Tensor changed) { cpu::update_tables(table_update(block_tables, changed)); }

void gather_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens,
               Tensor seq_start_loc, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("key", key, key_cache, [&](auto number, auto code) {
    const auto params = gather_params<decltype(number), decltype(code)>(
        key, value, key_cache, value_cache, block_tables, seq_lens, seq_start_loc, key_scale, value_scale);
    check_fixed_scales(key_scale, value_scale);
    cpu::gather_kv(params);
  });
}

// Nothing is ever pending on the CPU: its kernels raise at once.
void take_errors(Tensor word) {
  check_tensor("word", word, ScalarType::Long, word, {1});
  *static_cast<int64_t*>(word.mutable_data_ptr()) = 0;
}

}  // namespace
}  // namespace kvpager

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("write_kv", TORCH_BOX(&kvpager::write_kv));
  library.impl("paged_attention", TORCH_BOX(&kvpager::paged_attention));
  library.impl("paged_prefill", TORCH_BOX(&kvpager::paged_prefill));
  library.impl("merge_attention", TORCH_BOX(&kvpager::merge_attention));
  library.impl("qk_norm_rope_write", TORCH_BOX(&kvpager::qk_norm_rope_write));
  library.impl("linear", TORCH_BOX(&kvpager::linear));
  library.impl("rms_norm", TORCH_BOX(&kvpager::rms_norm));
  library.impl("silu_mul", TORCH_BOX(&kvpager::silu_mul));
  library.impl("copy_blocks", TORCH_BOX(&kvpager::copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&kvpager::swap_blocks));
  library.impl("update_tables", TORCH_BOX(&kvpager::update_tables));
  library.impl("gather_kv", TORCH_BOX(&kvpager::gather_kv));
  library.impl("take_errors", TORCH_BOX(&kvpager::take_errors));
}

// Read by kvpager/native.py: what the library was built with.
#define KVPAGER_STRINGIZE_(x) #x
#define KVPAGER_STRINGIZE(x) KVPAGER_STRINGIZE_(x)
extern "C" __attribute__((visibility("default"))) const char* kvpager_build_info() {
  return "torch abi target " KVPAGER_STRINGIZE(TORCH_TARGET_VERSION) ", compiler " __VERSION__
#if defined(KVPAGER_CUDA_ARCHS)
                                                                     ", cuda " KVPAGER_CUDA_ARCHS
#endif
      ;
}
