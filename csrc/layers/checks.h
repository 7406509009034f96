// From tensors to what the kernels of the layers around attention are given.
#pragma once
#include "../tensors.h"
#include "params.h"

namespace kvpager {

inline const void* check_norm_weight(const char* argument, const std::optional<Tensor>& weight, const Tensor& qkv,
                                     int64_t head_dim) {
  if (!weight) return nullptr;
  check_tensor(argument, *weight, qkv.scalar_type(), qkv, {head_dim});
  check_last_contiguous(argument, *weight);
  return weight->const_data_ptr();
}

template <class T, class C>
QkNormRopeWriteParams<T, C> qk_norm_rope_write_params(const Tensor& query_out, const Tensor& qkv,
                                                      const std::optional<Tensor>& q_weight,
                                                      const std::optional<Tensor>& k_weight, const Tensor& cos_sin,
                                                      const Tensor& positions, const Tensor& key_cache,
                                                      const Tensor& value_cache, const Tensor& slot_mapping, double eps,
                                                      const std::optional<Tensor>& key_scale,
                                                      const std::optional<Tensor>& value_scale) {
  using A = accumulate_t<T>;
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_scales("key_scale", key_scale, key_cache, pool);
  check_scales("value_scale", value_scale, value_cache, pool);
  check_written_caches(key_cache, value_cache, key_scale, value_scale);
  const ScalarType dtype = is_quantised<C> ? qkv.scalar_type() : key_cache.scalar_type();
  const int64_t D = pool.head_dim;
  if (D % 2 != 0) fail_argument("key_cache", "an even head dim, which turns in pairs", std::to_string(D));
  check_tensor("slot_mapping", slot_mapping, ScalarType::Long, key_cache, {-1});
  const int64_t num_tokens = slot_mapping.size(0);
  check_tensor("query_out", query_out, dtype, key_cache, {num_tokens, -1, D}, /*at_least=*/true);
  check_last_contiguous("query_out", query_out);
  check_written("query_out", query_out);
  const int64_t num_heads = query_out.size(1);
  check_num_heads("query_out", num_heads, pool);
  check_tensor("qkv", qkv, dtype, key_cache, {num_tokens, (num_heads + 2 * pool.num_kv_heads) * D}, /*at_least=*/true);
  check_last_contiguous("qkv", qkv);
  check_tensor("cos_sin", cos_sin, accumulate_dtype(dtype), key_cache, {-1, D});
  check_last_contiguous("cos_sin", cos_sin);
  check_tensor("positions", positions, ScalarType::Long, key_cache, {num_tokens}, /*at_least=*/true);
  if (!(eps >= 0)) fail_argument("eps", "0 or more", std::to_string(eps));

  QkNormRopeWriteParams<T, C> params{};
  params.query_out = mutable_rows_of<T>(query_out);
  params.qkv = {static_cast<const T*>(qkv.const_data_ptr()), qkv.stride(0), D};
  params.q_weight = static_cast<const T*>(check_norm_weight("q_weight", q_weight, qkv, D));
  params.k_weight = static_cast<const T*>(check_norm_weight("k_weight", k_weight, qkv, D));
  params.positions = list_of<int64_t>(positions);
  params.cos_sin = static_cast<const A*>(cos_sin.const_data_ptr());
  params.cos_sin_stride = cos_sin.stride(0);
  params.key_cache = mutable_cache_of<C>(key_cache);
  params.value_cache = mutable_cache_of<C>(value_cache);
  params.key_scale = scales_of<float>(key_scale);
  params.value_scale = scales_of<float>(value_scale);
  params.slot_mapping = list_of<int64_t>(slot_mapping);
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.num_positions = cos_sin.size(0);
  params.pool = pool;
  params.eps = static_cast<A>(eps);
  return params;
}

// [rows, width] of the dtype of `beside`; -1 takes any size.
inline void check_matrix(const char* argument, const Tensor& tensor, const Tensor& beside, int64_t rows,
                         int64_t width) {
  check_tensor(argument, tensor, beside.scalar_type(), beside, {rows, width});
  check_last_contiguous(argument, tensor);
}

template <class T>
LinearParams<T> linear_params(const Tensor& out, const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias) {
  check_matrix("x", x, x, -1, -1);
  const int64_t num_rows = x.size(0), depth = x.size(1);
  check_matrix("weight", weight, x, -1, depth);
  const int64_t num_outputs = weight.size(0);
  check_matrix("out", out, x, num_rows, num_outputs);
  check_written("out", out);
  if (bias) {
    check_tensor("bias", *bias, x.scalar_type(), x, {num_outputs});
    check_last_contiguous("bias", *bias);
  }
  return {static_cast<T*>(out.mutable_data_ptr()),
          static_cast<const T*>(x.const_data_ptr()),
          static_cast<const T*>(weight.const_data_ptr()),
          bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
          out.stride(0),
          x.stride(0),
          weight.stride(0),
          num_rows,
          num_outputs,
          depth};
}

template <class T>
NormParams<T> norm_params(const Tensor& out, const Tensor& x, const Tensor& weight,
                          const std::optional<Tensor>& residual, double eps) {
  check_matrix("x", x, x, -1, -1);
  const int64_t num_rows = x.size(0), width = x.size(1);
  check_matrix("out", out, x, num_rows, width);
  check_written("out", out);
  check_tensor("weight", weight, x.scalar_type(), x, {width});
  check_last_contiguous("weight", weight);
  if (residual) {
    check_matrix("residual", *residual, x, num_rows, width);
    check_written("residual", *residual);
  }
  if (!(eps >= 0)) fail_argument("eps", "0 or more", std::to_string(eps));
  return {static_cast<T*>(out.mutable_data_ptr()),
          static_cast<const T*>(x.const_data_ptr()),
          static_cast<const T*>(weight.const_data_ptr()),
          residual ? static_cast<T*>(residual->mutable_data_ptr()) : nullptr,
          out.stride(0),
          x.stride(0),
          residual ? residual->stride(0) : 0,
          num_rows,
          width,
          static_cast<accumulate_t<T>>(eps)};
}

template <class T>
GateParams<T> gate_params(const Tensor& out, const Tensor& gate, const Tensor& up) {
  check_matrix("gate", gate, gate, -1, -1);
  check_matrix("up", up, gate, gate.size(0), gate.size(1));
  check_matrix("out", out, gate, gate.size(0), gate.size(1));
  check_written("out", out);
  return {static_cast<T*>(out.mutable_data_ptr()),
          static_cast<const T*>(gate.const_data_ptr()),
          static_cast<const T*>(up.const_data_ptr()),
          out.stride(0),
          gate.stride(0),
          up.stride(0),
          gate.size(0),
          gate.size(1)};
}

}  // namespace kvpager
