// From tensors to params: what every entry point checks before a pointer is taken.
//
// The Python wrappers check shapes with fuller messages; these checks make a raw call of `torch.ops.kvpager` safe too.
// Every failure is a RuntimeError whose text the wrappers turn into the class it names (kvpager/ops/device_errors.py).
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace kvpager {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail_argument(const char* argument, const std::string& wanted, const std::string& got) {
  throw std::runtime_error(std::string("ArgumentError: `") + argument + "`: wanted " + wanted + ", got " + got);
}

[[noreturn]] inline void fail_slot(const char* argument, const std::string& wanted, const std::string& got) {
  throw std::runtime_error(std::string("SlotError: `") + argument + "`: wanted " + wanted + ", got " + got);
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return text + "]";
}

// `sizes` are exact, or lower bounds for the first dimension when `at_least` is set; -1 takes any size.
inline void check_tensor(const char* argument, const Tensor& tensor, ScalarType dtype, const Tensor& beside,
                         std::initializer_list<int64_t> sizes, bool at_least = false) {
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size());
  int64_t dim = 0;
  std::string wanted;
  for (int64_t size : sizes) {
    if (fits && size >= 0) fits = at_least && dim == 0 ? tensor.size(0) >= size : tensor.size(dim) == size;
    wanted += (dim++ ? ", " : "[") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  if (!fits) fail_argument(argument, "shape " + wanted + "]", shape_text(tensor));
  if (tensor.scalar_type() != dtype) fail_argument(argument, "the dtype that goes with the caches", "another");
  if (tensor.get_device_index() != beside.get_device_index() || tensor.is_cpu() != beside.is_cpu())
    fail_argument(argument, "a tensor beside the others", "one on another device");
}

inline void check_last_contiguous(const char* argument, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1)
    fail_argument(argument, "a contiguous last dimension (stride 1)", "stride " + std::to_string(tensor.stride(last)));
}

constexpr const char* kFloatDtypes = "float32, float16, bfloat16 or float64";

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
         dtype == ScalarType::Double;
}

inline PoolShape check_pool(const Tensor& key_cache, const Tensor& value_cache) {
  if (key_cache.dim() != 4) fail_argument("key_cache", "[N, K, S, D]", shape_text(key_cache));
  if (!is_float(key_cache.scalar_type())) fail_argument("key_cache", kFloatDtypes, "another dtype");
  const PoolShape pool{key_cache.size(0), key_cache.size(1), key_cache.size(2), key_cache.size(3)};
  if (pool.num_kv_heads < 1 || pool.block_size < 1 || pool.head_dim < 1)
    fail_argument("key_cache", "K, S and D of at least 1", shape_text(key_cache));
  check_tensor("value_cache", value_cache, key_cache.scalar_type(), key_cache,
               {pool.num_blocks, pool.num_kv_heads, pool.block_size, pool.head_dim});
  check_last_contiguous("key_cache", key_cache);
  check_last_contiguous("value_cache", value_cache);
  return pool;
}

// Views of checked tensors. A pointer is taken only here; the sizes that bound its use are those just checked.
template <class T>
Rows<const T> rows_of(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1)};
}
template <class T>
Rows<T> mutable_rows_of(const Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1)};
}
template <class T>
Cache<const T> cache_of(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}
template <class T>
Cache<T> mutable_cache_of(const Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}
template <class T>
List<T> list_of(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0)};
}
template <class T>
Grid<const T> grid_of(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1)};
}
template <class T>
Grid<T> mutable_grid_of(const Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1)};
}

inline ScalarType accumulate_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls `use` with a zero of the C++ type of a float dtype.
template <class F>
void with_float_type(const char* argument, ScalarType dtype, const F& use) {
  switch (dtype) {
    case ScalarType::Float: return use(float{});
    case ScalarType::Double: return use(double{});
    case ScalarType::Half: return use(float16{});
    case ScalarType::BFloat16: return use(bfloat16{});
    default: fail_argument(argument, kFloatDtypes, "another dtype");
  }
}

// Calls `use` with a zero of the unsigned integer that is as wide as an element: for ops that copy bits.
template <class F>
void with_bits_type(const char* argument, size_t bytes, const F& use) {
  switch (bytes) {
    case 1: return use(uint8_t{});
    case 2: return use(uint16_t{});
    case 4: return use(uint32_t{});
    case 8: return use(uint64_t{});
    default: fail_argument(argument, "elements of 1, 2, 4 or 8 bytes", std::to_string(bytes));
  }
}

template <class T>
WriteParams<T> write_params(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                            const Tensor& slot_mapping) {
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_tensor("slot_mapping", slot_mapping, ScalarType::Long, key_cache, {-1});
  const int64_t num_tokens = slot_mapping.size(0);
  for (auto [argument, tensor] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_tensor(argument, *tensor, key_cache.scalar_type(), key_cache, {num_tokens, pool.num_kv_heads, pool.head_dim},
                 /*at_least=*/true);
    check_last_contiguous(argument, *tensor);
  }
  return {rows_of<T>(key),
          rows_of<T>(value),
          mutable_cache_of<T>(key_cache),
          mutable_cache_of<T>(value_cache),
          list_of<int64_t>(slot_mapping),
          num_tokens,
          pool};
}

struct AttentionOptions {
  double scale;
  int64_t max_query_len, max_seq_len, window;
  double softcap;
};

template <class T>
AttentionParams<T> attention_params(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                                    const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                                    const std::optional<Tensor>& query_start_loc, const Tensor& seq_lens,
                                    const std::optional<Tensor>& sinks, const AttentionOptions& options) {
  using A = accumulate_t<T>;
  const PoolShape pool = check_pool(key_cache, value_cache);
  const ScalarType dtype = key_cache.scalar_type(), wide = accumulate_dtype(dtype);
  check_tensor("query", query, dtype, key_cache, {-1, -1, pool.head_dim});
  check_last_contiguous("query", query);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1);
  if (num_heads == 0 || num_heads % pool.num_kv_heads != 0)
    fail_argument("query",
                  "a number of heads that is a multiple of the " + std::to_string(pool.num_kv_heads) + " kv heads",
                  std::to_string(num_heads) + " heads");
  check_tensor("out", out, dtype, key_cache, {num_tokens, num_heads, pool.head_dim});
  check_last_contiguous("out", out);
  check_tensor("seq_lens", seq_lens, ScalarType::Int, key_cache, {query_start_loc ? -1 : num_tokens});
  const int64_t num_sequences = seq_lens.size(0);
  check_tensor("block_tables", block_tables, ScalarType::Int, key_cache, {num_sequences, -1});
  if (query_start_loc)
    check_tensor("query_start_loc", *query_start_loc, ScalarType::Int, key_cache, {num_sequences + 1});
  if (lse) check_tensor("lse", *lse, wide, key_cache, {num_tokens, num_heads});
  if (sinks) check_tensor("sinks", *sinks, wide, key_cache, {num_heads});
  if (options.window < 0) fail_argument("window", "0 or more positions", std::to_string(options.window));
  if (!(options.softcap >= 0)) fail_argument("softcap", "0 or more", std::to_string(options.softcap));

  AttentionParams<T> params{};
  params.out = mutable_rows_of<T>(out);
  if (lse) params.lse = mutable_grid_of<A>(*lse);
  params.query = rows_of<T>(query);
  params.key_cache = cache_of<T>(key_cache);
  params.value_cache = cache_of<T>(value_cache);
  params.block_tables = grid_of<int32_t>(block_tables);
  if (query_start_loc) params.query_start_loc = list_of<int32_t>(*query_start_loc);
  params.seq_lens = list_of<int32_t>(seq_lens);
  if (sinks) params.sinks = list_of<A>(*sinks);
  params.num_tokens = num_tokens;
  params.num_sequences = num_sequences;
  params.num_heads = num_heads;
  params.max_blocks = block_tables.size(1);
  params.max_query_len = options.max_query_len;
  params.max_seq_len = options.max_seq_len;
  params.window = options.window;
  params.pool = pool;
  params.scale = static_cast<A>(options.scale);
  params.softcap = static_cast<A>(options.softcap);
  return params;
}

template <class T>
MergeParams<T> merge_params(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& out_a,
                            const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  using A = accumulate_t<T>;
  const ScalarType dtype = out.scalar_type(), wide = accumulate_dtype(dtype);
  check_tensor("out", out, dtype, out, {-1, -1, -1});
  const int64_t num_tokens = out.size(0), num_heads = out.size(1), head_dim = out.size(2);
  check_tensor("out_a", out_a, dtype, out, {num_tokens, num_heads, head_dim});
  check_tensor("out_b", out_b, dtype, out, {num_tokens, num_heads, head_dim});
  check_tensor("lse_a", lse_a, wide, out, {num_tokens, num_heads});
  check_tensor("lse_b", lse_b, wide, out, {num_tokens, num_heads});
  if (lse) check_tensor("lse", *lse, wide, out, {num_tokens, num_heads});
  check_last_contiguous("out", out);
  check_last_contiguous("out_a", out_a);
  check_last_contiguous("out_b", out_b);
  return {mutable_rows_of<T>(out),
          lse ? mutable_grid_of<A>(*lse) : Grid<A>{},
          rows_of<T>(out_a),
          rows_of<T>(out_b),
          grid_of<A>(lse_a),
          grid_of<A>(lse_b),
          num_tokens,
          num_heads,
          head_dim};
}

inline CopyShape copy_shape(const Tensor& cache) {
  if (cache.dim() < 2 || cache.dim() > CopyShape::kMaxInner + 1)
    fail_argument("caches", "tensors of 2 to 8 dimensions", shape_text(cache));
  CopyShape shape{cache.size(0), cache.stride(0), 0, 1, {}, {}};
  for (int64_t dim = 1; dim < cache.dim(); ++dim) {
    const int64_t size = cache.size(dim), stride = cache.stride(dim);
    shape.elements *= size;
    if (size == 1) continue;
    const int64_t previous = shape.num_inner - 1;
    if (previous >= 0 && shape.strides[previous] == size * stride) {  // lies against the dimension before it
      shape.sizes[previous] *= size;
      shape.strides[previous] = stride;
    } else {
      shape.sizes[shape.num_inner] = size;
      shape.strides[shape.num_inner++] = stride;
    }
  }
  return shape;
}

inline void check_copy(const std::vector<Tensor>& caches, const Tensor& pairs) {
  if (caches.empty()) fail_argument("caches", "at least one cache", "none");
  check_tensor("pairs", pairs, ScalarType::Long, caches[0], {-1, 2});
  for (const Tensor& cache : caches)
    if (cache.size(0) != caches[0].size(0) || cache.get_device_index() != caches[0].get_device_index())
      fail_argument("caches", "the same blocks on the same device in each", shape_text(cache));
}

}  // namespace kvpager
