// The CPU ops that move rows as they are: writing tokens into slots, copying blocks within and between caches, writing
// the changed entries of a block table.
#include <algorithm>

#include "kernels.h"
#include "sequences.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // elements a thread should move at least, so that small calls stay on one

int64_t grain_rows(int64_t elements_per_row) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_row));
}

}  // namespace

template <class T>
void write_kv(const WriteParams<T>& p) {
  const PoolShape& pool = p.pool;
  check_slots(p.slot_mapping, p.num_tokens, pool);
  const int64_t grain = grain_rows(2 * pool.num_kv_heads * pool.head_dim);
  torch::stable::parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = p.slot_mapping[token];
      if (slot < 0) continue;
      // In bounds: 0 <= slot < N * S was checked above, so block < N and offset < S; token < num_tokens <= rows of key.
      const int64_t block = slot / pool.block_size, offset = slot % pool.block_size;
      for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
        std::copy_n(p.key.at(token, head), pool.head_dim, p.key_cache.at(block, head, offset));
        std::copy_n(p.value.at(token, head), pool.head_dim, p.value_cache.at(block, head, offset));
      }
    }
  });
}

template void write_kv(const WriteParams<uint16_t>&);
template void write_kv(const WriteParams<uint32_t>&);
template void write_kv(const WriteParams<uint64_t>&);

void copy_blocks(char* data, const CopyShape& shape, int64_t element_bytes, const Grid<const int64_t>& pairs,
                 int64_t num_pairs) {
  // A run: the elements of the last merged dimension, when they lie against each other.
  const bool packed = shape.num_inner > 0 && shape.strides[shape.num_inner - 1] == 1;
  const int64_t run = packed ? shape.sizes[shape.num_inner - 1] : 1;
  torch::stable::parallel_for(0, num_pairs, grain_rows(shape.elements), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // In bounds: check_pairs has found both blocks in the pool, and offset() of an element below `elements` stays
      // within a block. Source and destination are different blocks, so the ranges are disjoint.
      const char* source = data + pairs.at(row, 0) * shape.block_stride * element_bytes;
      char* destination = data + pairs.at(row, 1) * shape.block_stride * element_bytes;
      for (int64_t element = 0; element < shape.elements; element += run) {
        const int64_t at = shape.offset(element) * element_bytes;
        memcpy(destination + at, source + at, run * element_bytes);
      }
    }
  });
}

void swap_blocks(const char* source, char* target, const SwapShape& shape, int64_t element_bytes,
                 const Grid<const int64_t>& pairs, int64_t num_pairs) {
  const int64_t last = shape.num_inner - 1;
  const bool packed = last >= 0 && shape.from[last] == 1 && shape.to[last] == 1;
  const int64_t run = packed ? shape.sizes[last] : 1;
  torch::stable::parallel_for(0, num_pairs, grain_rows(shape.elements), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // In bounds: check_swap_pairs has found both blocks; an index below `elements` stays within a block.
      const char* from = source + pairs.at(row, 0) * shape.source_stride * element_bytes;
      char* to = target + pairs.at(row, 1) * shape.target_stride * element_bytes;
      for (int64_t element = 0; element < shape.elements; element += run) {
        int64_t from_at = 0, to_at = 0, index = element;
        for (int64_t dim = last; dim >= 0; index /= shape.sizes[dim--]) {
          from_at += index % shape.sizes[dim] * shape.from[dim];
          to_at += index % shape.sizes[dim] * shape.to[dim];
        }
        memcpy(to + to_at * element_bytes, from + from_at * element_bytes, run * element_bytes);
      }
    }
  });
}

void update_tables(const TableUpdate& p) {
  const auto is_padding = [&](int64_t change) { return p.changed.at(change, 0) == -1; };
  for (int64_t change = 0; change < p.num_changes; ++change) {
    const int32_t row = p.changed.at(change, 0), column = p.changed.at(change, 1);
    if (!is_padding(change) && (row < 0 || row >= p.num_rows || column < 0 || column >= p.num_columns))
      fail_argument(
          "changed",
          "rows below " + std::to_string(p.num_rows) + " (or -1) and columns below " + std::to_string(p.num_columns),
          "row " + std::to_string(row) + ", column " + std::to_string(column) + " at entry " + std::to_string(change));
  }
  for (int64_t change = 0; change < p.num_changes; ++change)
    if (!is_padding(change))  // in bounds: both were checked above
      p.block_tables.at(p.changed.at(change, 0), p.changed.at(change, 1)) = p.changed.at(change, 2);
}

}  // namespace kvpager::cpu
