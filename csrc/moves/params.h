// What the kernels that move K and V are given: writes, gathers, copies and swaps of blocks, changes of tables.
#pragma once
#include "../views.h"

namespace kvpager {

// T: type of key and value. C: type of the caches, T itself or codes.
template <class T, class C>
struct WriteParams {
  Rows<const T> key, value;              // [>= num_tokens, K, D]
  Cache<C> key_cache, value_cache;       // [N, K, S, D]
  Scales<float> key_scale, value_scale;  // of codes
  List<int64_t> slot_mapping;            // [num_tokens]
  int64_t num_tokens;
  PoolShape pool;
};

// T: type of key and value. C: type of the caches, T itself or codes.
template <class T, class C>
struct GatherParams {
  Rows<T> key, value;  // [num_rows, K, D]
  Cache<const C> key_cache, value_cache;
  Scales<const float> key_scale, value_scale;
  Grid<const int32_t> block_tables;       // [num_sequences, max_blocks]
  List<int32_t> seq_lens, seq_start_loc;  // [num_sequences], [num_sequences + 1]
  int64_t num_rows, num_sequences, max_blocks;
  PoolShape pool;
};

// Blocks of two caches [N, inner...] between which whole blocks are copied; both may be the same cache. Inner
// dimensions that lie against each other in both are merged.
struct BlockShape {
  static constexpr int kMaxInner = 7;
  int64_t num_sources, num_targets, source_stride, target_stride;  // blocks, and elements from one block to the next
  int64_t num_inner, elements;                                     // elements: of one block
  int64_t sizes[kMaxInner], from[kMaxInner], to[kMaxInner];        // from, to: element strides of source and target

  // Elements that lie against each other in both: a run. At least 1.
  int64_t run() const {
    const int64_t last = num_inner - 1;
    return last >= 0 && from[last] == 1 && to[last] == 1 ? sizes[last] : 1;
  }

  // Offsets within a block of its element number `index` < elements.
  struct Offsets {
    int64_t from, to;
  };
  Offsets offsets(int64_t index) const {
    Offsets at{0, 0};
    for (int64_t dim = num_inner - 1; dim >= 0; index /= sizes[dim--]) {
      at.from += index % sizes[dim] * from[dim];
      at.to += index % sizes[dim] * to[dim];
    }
    return at;
  }
};

// Entries of a block table that have changed. In bounds: rows of `changed` below num_changes, columns below 3.
struct TableUpdate {
  Grid<int32_t> block_tables;   // [num_rows, num_columns]
  Grid<const int32_t> changed;  // [num_changes, 3]: (row, column, block); row -1 = nothing
  int64_t num_rows, num_columns, num_changes;
};

}  // namespace kvpager
