// Tensors: what every op checks of them before a pointer is taken, and the views of those that were checked.
//
// The Python wrappers check shapes with fuller messages; these checks make a raw call of `torch.ops.kvpager` safe too.
// Ops include this header, kernels never do: they are given views (views.h).
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "errors.h"
#include "views.h"

namespace kvpager {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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
  constexpr int64_t kMaxDims = 8;
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

// Names of dtypes for error texts: "a, b or c".
inline std::string names_of(std::initializer_list<const char*> names) {
  std::string text;
  size_t index = 0;
  for (const char* name : names)
    text += (index == 0 ? "" : index + 1 < names.size() ? ", " : " or ") + std::string(name), ++index;
  return text;
}

#define KVPAGER_NAME(type, dtype, name, ...) name,
inline std::string number_dtypes() { return names_of({KVPAGER_FOR_NUMBERS(KVPAGER_NAME)}); }
inline std::string cache_dtypes() {
  return names_of({KVPAGER_FOR_NUMBERS(KVPAGER_NAME) KVPAGER_FOR_CODES(KVPAGER_NAME)});
}
#undef KVPAGER_NAME

#define KVPAGER_OR_IS(type, dtype, ...) || given == ScalarType::dtype
inline bool is_number_dtype(ScalarType given) { return false KVPAGER_FOR_NUMBERS(KVPAGER_OR_IS); }
inline bool is_quantised_dtype(ScalarType given) { return false KVPAGER_FOR_CODES(KVPAGER_OR_IS); }
#undef KVPAGER_OR_IS

inline PoolShape check_pool(const Tensor& key_cache, const Tensor& value_cache) {
  if (key_cache.dim() != 4) fail_argument("key_cache", "[N, K, S, D]", shape_text(key_cache));
  if (!is_number_dtype(key_cache.scalar_type()) && !is_quantised_dtype(key_cache.scalar_type()))
    fail_argument("key_cache", cache_dtypes(), "another dtype");
  const PoolShape pool{key_cache.size(0), key_cache.size(1), key_cache.size(2), key_cache.size(3)};
  if (pool.num_kv_heads < 1 || pool.block_size < 1 || pool.head_dim < 1)
    fail_argument("key_cache", "K, S and D of at least 1", shape_text(key_cache));
  check_tensor("value_cache", value_cache, key_cache.scalar_type(), key_cache,
               {pool.num_blocks, pool.num_kv_heads, pool.block_size, pool.head_dim});
  check_last_contiguous("key_cache", key_cache);
  check_last_contiguous("value_cache", value_cache);
  return pool;
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

inline void check_num_heads(const char* argument, int64_t num_heads, const PoolShape& pool) {
  if (num_heads > 0 && num_heads % pool.num_kv_heads == 0) return;
  fail_argument(argument,
                "a number of heads that is a multiple of the " + std::to_string(pool.num_kv_heads) + " kv heads",
                std::to_string(num_heads) + " heads");
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

#define KVPAGER_CASE(type, dtype, ...) \
  case ScalarType::dtype: return use(type{});

// Calls `use` with a zero of the C++ type of a dtype of numbers.
template <class F>
void with_number_type(const char* argument, ScalarType given, const F& use) {
  switch (given) {
    KVPAGER_FOR_NUMBERS(KVPAGER_CASE)
    default: fail_argument(argument, number_dtypes(), "another dtype");
  }
}

// Calls `use` with a zero of the C++ type of a dtype of codes.
template <class F>
void with_code_type(const char* argument, ScalarType given, const F& use) {
  switch (given) {
    KVPAGER_FOR_CODES(KVPAGER_CASE)
    default: fail_argument(argument, "codes of a quantised cache", "another dtype");
  }
}
#undef KVPAGER_CASE

// Calls `use` with zeros of the types of the numbers and of the caches: the same, or codes beside what is not double.
template <class F>
void with_cache_types(const char* argument, const Tensor& numbers, const Tensor& key_cache, const F& use) {
  const ScalarType cache_dtype = key_cache.scalar_type();
  with_number_type(argument, numbers.scalar_type(), [&](auto number) {
    using T = decltype(number);
    if (!is_quantised_dtype(cache_dtype)) return use(T{}, T{});
    if constexpr (std::is_same_v<T, double>) {
      fail_argument(argument, "float32, float16 or bfloat16 beside a quantised cache", "float64");
    } else {
      with_code_type(argument, cache_dtype, [&](auto code) { use(T{}, code); });
    }
  });
}

}  // namespace kvpager
