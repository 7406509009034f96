// From tensors to params: what every entry point checks before a pointer is taken.
//
// The Python wrappers check shapes with fuller messages; these checks make a raw call of `torch.ops.kvpager` safe too.
// Every failure is a RuntimeError whose text the wrappers turn into the class it names (kvpager/ops/device_errors.py).
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
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

// What an op writes: no two elements lie at one address. A dimension longer than 1 has to step over all that the
// dimensions with smaller strides reach. O(dims²), and dims are few.
inline void check_written(const char* argument, const Tensor& tensor) {
  struct Dim {
    int64_t stride, size;
  };
  constexpr int64_t kMaxDims = CopyShape::kMaxInner + 1;
  Dim dims[kMaxDims];
  int64_t num_dims = 0;
  const int64_t all_dims = tensor.dim();
  if (all_dims > kMaxDims) fail_argument(argument, "at most 8 dimensions", shape_text(tensor));
  for (int64_t dim = 0; dim < all_dims; ++dim) {
    const Dim next{tensor.stride(dim), tensor.size(dim)};
    if (next.size == 0) return;
    if (next.size == 1) continue;
    int64_t place = num_dims++;  // sorted by falling stride, as the dimensions mostly are
    for (; place > 0 && dims[place - 1].stride < next.stride; --place) dims[place] = dims[place - 1];
    dims[place] = next;
  }
  int64_t reach = 1;
  while (num_dims-- > 0) {
    const auto [stride, size] = dims[num_dims];
    if (stride < reach) {
      std::string strides;
      for (int64_t dim = 0; dim < all_dims; ++dim) strides += (dim ? ", " : "") + std::to_string(tensor.stride(dim));
      fail_argument(argument, "elements that share no memory, since they are written",
                    shape_text(tensor) + " with strides [" + strides + "]");
    }
    reach += (size - 1) * stride;
  }
}

constexpr const char* kFloatDtypes = "float32, float16, bfloat16 or float64";

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
         dtype == ScalarType::Double;
}

inline bool is_quantised_dtype(ScalarType dtype) {
  return dtype == ScalarType::Char || dtype == ScalarType::Float8_e4m3fn;
}

inline PoolShape check_pool(const Tensor& key_cache, const Tensor& value_cache) {
  if (key_cache.dim() != 4) fail_argument("key_cache", "[N, K, S, D]", shape_text(key_cache));
  if (!is_float(key_cache.scalar_type()) && !is_quantised_dtype(key_cache.scalar_type()))
    fail_argument("key_cache", std::string(kFloatDtypes) + ", int8 or float8_e4m3fn", "another dtype");
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

// Calls `use` with zeros of the types of the float tensors and of the caches: the same, or codes for 32- and 16-bit
// floats.
template <class F>
void with_cache_types(const char* argument, const Tensor& numbers, const Tensor& key_cache, const F& use) {
  const ScalarType cache_dtype = key_cache.scalar_type();
  with_float_type(argument, numbers.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      if (cache_dtype == ScalarType::Char) return use(T{}, int8_code{});
      if (cache_dtype == ScalarType::Float8_e4m3fn) return use(T{}, fp8_e4m3{});
    } else if (is_quantised_dtype(cache_dtype)) {
      fail_argument(argument, "float32, float16 or bfloat16 beside a quantised cache", "float64");
    }
    use(T{}, T{});
  });
}

// The scales of a quantised cache: float32, the cache's shape without D, or one element. None beside other caches.
inline void check_scales(const char* argument, const std::optional<Tensor>& scale, const Tensor& cache,
                         const PoolShape& pool) {
  if (!is_quantised_dtype(cache.scalar_type())) {
    if (scale) fail_argument(argument, "none beside a cache that is not quantised", shape_text(*scale));
    return;
  }
  if (!scale) fail_argument(argument, "the scales of the quantised cache", "none");
  if (scale->dim() == 0) return check_tensor(argument, *scale, ScalarType::Float, cache, {});
  if (scale->dim() == 1) return check_tensor(argument, *scale, ScalarType::Float, cache, {1});
  check_tensor(argument, *scale, ScalarType::Float, cache, {pool.num_blocks, pool.num_kv_heads, pool.block_size});
}

// Caches that are written, and their scales, unless those are one for all, which is only read.
inline void check_written_caches(const Tensor& key_cache, const Tensor& value_cache,
                                 const std::optional<Tensor>& key_scale = std::nullopt,
                                 const std::optional<Tensor>& value_scale = std::nullopt) {
  check_written("key_cache", key_cache);
  check_written("value_cache", value_cache);
  if (key_scale) check_written("key_scale", *key_scale);
  if (value_scale) check_written("value_scale", *value_scale);
}

// Views of checked scales; `T` may be const.
template <class T>
Scales<T> scales_of(const std::optional<Tensor>& scale) {
  if (!scale) return {};
  T* data;
  if constexpr (std::is_const_v<T>) {
    data = static_cast<T*>(scale->const_data_ptr());
  } else {
    data = static_cast<T*>(scale->mutable_data_ptr());
  }
  if (scale->dim() != 3) return {data, 0, 0, 0, true};
  return {data, scale->stride(0), scale->stride(1), scale->stride(2), false};
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
  check_written_caches(key_cache, value_cache);
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

template <class T, class C>
QuantisedWriteParams<T, C> quantised_write_params(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                                  const Tensor& value_cache, const Tensor& slot_mapping,
                                                  const std::optional<Tensor>& key_scale,
                                                  const std::optional<Tensor>& value_scale) {
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_scales("key_scale", key_scale, key_cache, pool);
  check_scales("value_scale", value_scale, value_cache, pool);
  check_written_caches(key_cache, value_cache, key_scale, value_scale);
  check_tensor("slot_mapping", slot_mapping, ScalarType::Long, key_cache, {-1});
  const int64_t num_tokens = slot_mapping.size(0);
  for (auto [argument, tensor] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_tensor(argument, *tensor, key.scalar_type(), key_cache, {num_tokens, pool.num_kv_heads, pool.head_dim},
                 /*at_least=*/true);
    check_last_contiguous(argument, *tensor);
  }
  return {rows_of<T>(key),
          rows_of<T>(value),
          mutable_cache_of<C>(key_cache),
          mutable_cache_of<C>(value_cache),
          scales_of<float>(key_scale),
          scales_of<float>(value_scale),
          list_of<int64_t>(slot_mapping),
          num_tokens,
          pool};
}

template <class T, class C>
GatherParams<T, C> gather_params(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                 const Tensor& value_cache, const Tensor& block_tables, const Tensor& seq_lens,
                                 const Tensor& seq_start_loc, const std::optional<Tensor>& key_scale,
                                 const std::optional<Tensor>& value_scale) {
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_scales("key_scale", key_scale, key_cache, pool);
  check_scales("value_scale", value_scale, value_cache, pool);
  const ScalarType dtype = is_quantised<C> ? key.scalar_type() : key_cache.scalar_type();
  check_tensor("key", key, dtype, key_cache, {-1, pool.num_kv_heads, pool.head_dim});
  check_tensor("value", value, dtype, key_cache, {key.size(0), pool.num_kv_heads, pool.head_dim});
  check_last_contiguous("key", key);
  check_last_contiguous("value", value);
  check_written("key", key);
  check_written("value", value);
  check_tensor("seq_lens", seq_lens, ScalarType::Int, key_cache, {-1});
  const int64_t num_sequences = seq_lens.size(0);
  check_tensor("block_tables", block_tables, ScalarType::Int, key_cache, {num_sequences, -1});
  check_tensor("seq_start_loc", seq_start_loc, ScalarType::Int, key_cache, {num_sequences + 1});
  return {mutable_rows_of<T>(key),
          mutable_rows_of<T>(value),
          cache_of<C>(key_cache),
          cache_of<C>(value_cache),
          scales_of<const float>(key_scale),
          scales_of<const float>(value_scale),
          grid_of<int32_t>(block_tables),
          list_of<int32_t>(seq_lens),
          list_of<int32_t>(seq_start_loc),
          key.size(0),
          num_sequences,
          block_tables.size(1),
          pool};
}

struct AttentionOptions {
  double scale;
  int64_t max_query_len, max_seq_len, window;
  double softcap;
};

template <class T, class C = T>
AttentionParams<T, C> attention_params(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                                       const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                                       const std::optional<Tensor>& query_start_loc, const Tensor& seq_lens,
                                       const std::optional<Tensor>& sinks, const AttentionOptions& options,
                                       const std::optional<Tensor>& key_scale = std::nullopt,
                                       const std::optional<Tensor>& value_scale = std::nullopt) {
  using A = accumulate_t<T>;
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_scales("key_scale", key_scale, key_cache, pool);
  check_scales("value_scale", value_scale, value_cache, pool);
  const ScalarType dtype = is_quantised<C> ? query.scalar_type() : key_cache.scalar_type();
  const ScalarType wide = accumulate_dtype(dtype);
  check_tensor("query", query, dtype, key_cache, {-1, -1, pool.head_dim});
  check_last_contiguous("query", query);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1);
  if (num_heads == 0 || num_heads % pool.num_kv_heads != 0)
    fail_argument("query",
                  "a number of heads that is a multiple of the " + std::to_string(pool.num_kv_heads) + " kv heads",
                  std::to_string(num_heads) + " heads");
  check_tensor("out", out, dtype, key_cache, {num_tokens, num_heads, pool.head_dim});
  check_last_contiguous("out", out);
  check_written("out", out);
  check_tensor("seq_lens", seq_lens, ScalarType::Int, key_cache, {query_start_loc ? -1 : num_tokens});
  const int64_t num_sequences = seq_lens.size(0);
  check_tensor("block_tables", block_tables, ScalarType::Int, key_cache, {num_sequences, -1});
  if (query_start_loc)
    check_tensor("query_start_loc", *query_start_loc, ScalarType::Int, key_cache, {num_sequences + 1});
  if (lse) {
    check_tensor("lse", *lse, wide, key_cache, {num_tokens, num_heads});
    check_written("lse", *lse);
  }
  if (sinks) check_tensor("sinks", *sinks, wide, key_cache, {num_heads});
  if (options.window < 0) fail_argument("window", "0 or more positions", std::to_string(options.window));
  constexpr double kLargest = std::numeric_limits<A>::max();  // in which scale and softcap are used
  if (!(options.softcap >= 0 && options.softcap <= kLargest))
    fail_argument("softcap", "0 (none) or a finite positive number", std::to_string(options.softcap));
  if (!(options.scale >= -kLargest && options.scale <= kLargest))
    fail_argument("scale", "a finite number", std::to_string(options.scale));

  AttentionParams<T, C> params{};
  params.out = mutable_rows_of<T>(out);
  if (lse) params.lse = mutable_grid_of<A>(*lse);
  params.query = rows_of<T>(query);
  params.key_cache = cache_of<C>(key_cache);
  params.value_cache = cache_of<C>(value_cache);
  params.key_scale = scales_of<const float>(key_scale);
  params.value_scale = scales_of<const float>(value_scale);
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
  if (lse) {
    check_tensor("lse", *lse, wide, out, {num_tokens, num_heads});
    check_written("lse", *lse);
  }
  check_last_contiguous("out", out);
  check_written("out", out);
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
  check_written("caches", cache);
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

// The blocks of `source` and `target` have the same inner shape and dtype, and share no memory.
inline SwapShape swap_shape(const Tensor& source, const Tensor& target) {
  if (source.dim() < 2 || source.dim() > CopyShape::kMaxInner + 1)
    fail_argument("src", "tensors of 2 to 8 dimensions", shape_text(source));
  bool same = source.dim() == target.dim() && source.scalar_type() == target.scalar_type();
  for (int64_t dim = 1; same && dim < source.dim(); ++dim) same = source.size(dim) == target.size(dim);
  if (!same) fail_argument("dst", "blocks of the shape and dtype of `src`", shape_text(target));
  check_written("dst", target);
  SwapShape shape{source.size(0), target.size(0), source.stride(0), target.stride(0), 0, 1, {}, {}, {}};
  for (int64_t dim = 1; dim < source.dim(); ++dim) {
    const int64_t size = source.size(dim), from = source.stride(dim), to = target.stride(dim);
    shape.elements *= size;
    if (size == 1) continue;
    const int64_t previous = shape.num_inner - 1;
    if (previous >= 0 && shape.from[previous] == size * from && shape.to[previous] == size * to) {
      shape.sizes[previous] *= size;  // lies against the dimension before it in both
      shape.from[previous] = from;
      shape.to[previous] = to;
    } else {
      shape.sizes[shape.num_inner] = size;
      shape.from[shape.num_inner] = from;
      shape.to[shape.num_inner++] = to;
    }
  }
  return shape;
}

inline void check_swap(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets, const Tensor& pairs) {
  if (sources.empty()) fail_argument("src", "at least one cache", "none");
  if (sources.size() != targets.size())
    fail_argument("dst", std::to_string(sources.size()) + " caches, as in `src`", std::to_string(targets.size()));
  if (pairs.dim() != 2 || pairs.size(1) != 2 || pairs.scalar_type() != ScalarType::Long)
    fail_argument("pairs", "[P, 2] int64", shape_text(pairs));
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].dim() < 1 || sources[i].size(0) != sources[0].size(0))
      fail_argument("src", "the same blocks in each", shape_text(sources[i]));
    if (targets[i].dim() < 1 || targets[i].size(0) != targets[0].size(0))
      fail_argument("dst", "the same blocks in each", shape_text(targets[i]));
  }
}

inline TableUpdate table_update(const Tensor& block_tables, const Tensor& changed) {
  check_tensor("block_tables", block_tables, ScalarType::Int, block_tables, {-1, -1});
  check_tensor("changed", changed, ScalarType::Int, block_tables, {-1, 3});
  check_written("block_tables", block_tables);
  return {mutable_grid_of<int32_t>(block_tables), grid_of<int32_t>(changed), block_tables.size(0), block_tables.size(1),
          changed.size(0)};
}

inline void check_copy(const std::vector<Tensor>& caches, const Tensor& pairs) {
  if (caches.empty()) fail_argument("caches", "at least one cache", "none");
  check_tensor("pairs", pairs, ScalarType::Long, caches[0], {-1, 2});
  for (const Tensor& cache : caches)
    if (cache.size(0) != caches[0].size(0) || cache.get_device_index() != caches[0].get_device_index())
      fail_argument("caches", "the same blocks on the same device in each", shape_text(cache));
}

}  // namespace kvpager
