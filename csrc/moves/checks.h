// From tensors to what the kernels that move K and V are given.
#pragma once
#include <unordered_set>

#include "../tensors.h"
#include "params.h"

namespace kvpager {

// Caches of numbers: T is C, and there are no scales.
template <class T, class C>
WriteParams<T, C> write_params(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                               const Tensor& value_cache, const Tensor& slot_mapping,
                               const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_scales("key_scale", key_scale, key_cache, pool);
  check_scales("value_scale", value_scale, value_cache, pool);
  check_written_caches(key_cache, value_cache, key_scale, value_scale);
  const ScalarType dtype = is_quantised<C> ? key.scalar_type() : key_cache.scalar_type();
  check_tensor("slot_mapping", slot_mapping, ScalarType::Long, key_cache, {-1});
  const int64_t num_tokens = slot_mapping.size(0);
  for (auto [argument, tensor] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_tensor(argument, *tensor, dtype, key_cache, {num_tokens, pool.num_kv_heads, pool.head_dim},
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

// The blocks of `source` and `target` have the same inner shape and dtype; each may be the other.
inline BlockShape block_shape(const char* source_argument, const Tensor& source, const char* target_argument,
                              const Tensor& target) {
  if (source.dim() < 2 || source.dim() > BlockShape::kMaxInner + 1)
    fail_argument(source_argument, "tensors of 2 to 8 dimensions", shape_text(source));
  bool same = source.dim() == target.dim() && source.scalar_type() == target.scalar_type();
  for (int64_t dim = 1; same && dim < source.dim(); ++dim) same = source.size(dim) == target.size(dim);
  if (!same) fail_argument(target_argument, "blocks of the shape and dtype of `src`", shape_text(target));
  check_written(target_argument, target);
  BlockShape shape{source.size(0), target.size(0), source.stride(0), target.stride(0), 0, 1, {}, {}, {}};
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

// Checks the tensors of `swap_blocks`; returns the shape of each pair of caches.
inline std::vector<BlockShape> check_swap(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets,
                                          const Tensor& pairs) {
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
  std::vector<BlockShape> shapes;
  for (size_t i = 0; i < sources.size(); ++i) shapes.push_back(block_shape("src", sources[i], "dst", targets[i]));
  return shapes;
}

inline TableUpdate table_update(const Tensor& block_tables, const Tensor& changed) {
  check_tensor("block_tables", block_tables, ScalarType::Int, block_tables, {-1, -1});
  check_tensor("changed", changed, ScalarType::Int, block_tables, {-1, 3});
  check_written("block_tables", block_tables);
  return {mutable_grid_of<int32_t>(block_tables), grid_of<int32_t>(changed), block_tables.size(0), block_tables.size(1),
          changed.size(0)};
}

// Checks the tensors of `copy_blocks`; returns the shape of each cache.
inline std::vector<BlockShape> check_copy(const std::vector<Tensor>& caches, const Tensor& pairs) {
  if (caches.empty()) fail_argument("caches", "at least one cache", "none");
  check_tensor("pairs", pairs, ScalarType::Long, caches[0], {-1, 2});
  for (const Tensor& cache : caches)
    if (cache.size(0) != caches[0].size(0) || cache.get_device_index() != caches[0].get_device_index())
      fail_argument("caches", "the same blocks on the same device in each", shape_text(cache));
  std::vector<BlockShape> shapes;
  for (const Tensor& cache : caches) shapes.push_back(block_shape("caches", cache, "caches", cache));
  return shapes;
}

// Sources and destinations of pairs are blocks below num_blocks, and no destination is named twice or is a source.
inline void check_pairs(const Grid<const int64_t>& pairs, int64_t num_pairs, int64_t num_blocks) {
  std::unordered_set<int64_t> sources, destinations;
  for (int64_t row = 0; row < num_pairs; ++row) {
    for (int64_t column = 0; column < 2; ++column)
      if (pairs.at(row, column) < 0 || pairs.at(row, column) >= num_blocks)
        fail_slot("pairs", "block ids of 0 to " + std::to_string(num_blocks - 1),
                  std::to_string(pairs.at(row, column)) + " at row " + std::to_string(row));
    sources.insert(pairs.at(row, 0));
  }
  for (int64_t row = 0; row < num_pairs; ++row)
    if (sources.count(pairs.at(row, 1)) || !destinations.insert(pairs.at(row, 1)).second)
      fail_argument("pairs", "destinations that are no source and named once",
                    "block " + std::to_string(pairs.at(row, 1)) + " at row " + std::to_string(row));
}

// Sources of pairs are blocks below num_sources, targets below num_targets, each named once.
inline void check_swap_pairs(const Grid<const int64_t>& pairs, int64_t num_pairs, int64_t num_sources,
                             int64_t num_targets) {
  std::unordered_set<int64_t> targets;
  for (int64_t row = 0; row < num_pairs; ++row) {
    for (int64_t column = 0; column < 2; ++column) {
      const int64_t block = pairs.at(row, column), num_blocks = column == 0 ? num_sources : num_targets;
      if (block < 0 || block >= num_blocks)
        fail_slot(
            "pairs",
            std::string(column == 0 ? "source" : "destination") + " blocks of 0 to " + std::to_string(num_blocks - 1),
            std::to_string(block) + " at row " + std::to_string(row));
    }
    if (!targets.insert(pairs.at(row, 1)).second)
      fail_argument("pairs", "destinations named once",
                    "block " + std::to_string(pairs.at(row, 1)) + " at row " + std::to_string(row));
  }
}

}  // namespace kvpager
