// What a kernel is given: raw pointers with element strides, free of any framework, for the CPU and CUDA alike.
//
// Letters as in docs/design/words.md: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block
// size, M blocks per table row. The last dimension of every float tensor is contiguous. All offsets are 64-bit, since
// block * stride passes 2^31 on real pools. `at` is in bounds when its indices are below the sizes named beside it;
// whoever calls it says why they are.
#pragma once
#include "numbers.h"

namespace kvpager {

// [rows, heads, D]
template <class T>
struct Rows {
  T* data;
  int64_t row_stride, head_stride;
  KVPAGER_HD T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// [N, K, S, D]
template <class T>
struct Cache {
  T* data;
  int64_t block_stride, head_stride, slot_stride;
  KVPAGER_HD T* at(int64_t block, int64_t head, int64_t offset) const {
    return data + block * block_stride + head * head_stride + offset * slot_stride;
  }
};

// [n]
template <class T>
struct List {
  const T* data;
  int64_t stride;
  KVPAGER_HD T operator[](int64_t index) const { return data[index * stride]; }
};

// [rows, columns]
template <class T>
struct Grid {
  T* data;
  int64_t row_stride, column_stride;
  KVPAGER_HD T& at(int64_t row, int64_t column) const { return data[row * row_stride + column * column_stride]; }
};

// Scales of a quantised cache, [N, K, S] beside it, or one for all of it: then every stride is 0.
template <class T>
struct Scales {
  T* data;  // null if the cache is not quantised
  int64_t block_stride, head_stride, slot_stride;
  bool fixed;  // one scale for all: it is only read
  KVPAGER_HD T* at(int64_t block, int64_t head, int64_t offset) const {
    return data + block * block_stride + head * head_stride + offset * slot_stride;
  }
};

struct PoolShape {
  int64_t num_blocks, num_kv_heads, block_size, head_dim;
};

// T here is an unsigned integer as wide as an element: a write copies bits.
template <class T>
struct WriteParams {
  Rows<const T> key, value;         // [>= num_tokens, K, D]
  Cache<T> key_cache, value_cache;  // [N, K, S, D]
  List<int64_t> slot_mapping;       // [num_tokens]
  int64_t num_tokens;
  PoolShape pool;
};

// T: type of key and value. C: codes.
template <class T, class C>
struct QuantisedWriteParams {
  Rows<const T> key, value;         // [>= num_tokens, K, D]
  Cache<C> key_cache, value_cache;  // [N, K, S, D]
  Scales<float> key_scale, value_scale;
  List<int64_t> slot_mapping;  // [num_tokens]
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

// T: type of query and out. C: type of the caches, T itself or the codes of a quantised cache.
template <class T, class C = T>
struct AttentionParams {
  Rows<T> out;                // [num_tokens, H, D]
  Grid<accumulate_t<T>> lse;  // [num_tokens, H]; data is null if not wanted
  Rows<const T> query;        // [num_tokens, H, D]
  Cache<const C> key_cache, value_cache;
  Scales<const float> key_scale, value_scale;
  Grid<const int32_t> block_tables;  // [num_sequences, max_blocks]
  List<int32_t> query_start_loc;     // [num_sequences + 1]; data is null if row b is the one query of sequence b
  List<int32_t> seq_lens;            // [num_sequences]
  List<accumulate_t<T>> sinks;       // [H]; data is null if there are none
  int64_t num_tokens, num_sequences, num_heads, max_blocks;
  int64_t max_query_len, max_seq_len;
  int64_t window;  // 0 = all
  PoolShape pool;
  accumulate_t<T> scale, softcap;  // softcap 0 = none

  // First position that a query at `position` sees.
  KVPAGER_HD int64_t first_visible(int64_t position) const {
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
  }

  // Of a sequence: its table is wide enough for it, and the caller's bound holds.
  KVPAGER_HD bool length_is_valid(int64_t length) const {
    return length >= 0 && length <= max_blocks * pool.block_size && length <= max_seq_len;
  }
};

template <class T>
struct MergeParams {
  Rows<T> out;                // [num_tokens, H, D]; may be out_a or out_b
  Grid<accumulate_t<T>> lse;  // [num_tokens, H]; data is null if not wanted; may be lse_a or lse_b
  Rows<const T> out_a, out_b;
  Grid<const accumulate_t<T>> lse_a, lse_b;
  int64_t num_tokens, num_heads, head_dim;
};

// The fused front end of a step. T: type of qkv and query_out. C: type of the caches, T itself or the codes of a quantised
// cache.
template <class T, class C = T>
struct FusedParams {
  Rows<T> query_out;                // [>= num_tokens, H, D]
  Rows<const T> qkv;                // [>= num_tokens, H + 2 K, D]: query heads, then key heads, then value heads
  const T *q_weight, *k_weight;     // [D], contiguous; null = no norm
  List<int64_t> positions;          // [>= num_tokens], rows of cos_sin
  const accumulate_t<T>* cos_sin;   // [num_positions, D]: D / 2 cosines, then D / 2 sines
  int64_t cos_sin_stride;           // of a row
  Cache<C> key_cache, value_cache;  // [N, K, S, D]
  Scales<float> key_scale, value_scale;
  List<int64_t> slot_mapping;  // [num_tokens]
  int64_t num_tokens, num_heads, num_positions;
  PoolShape pool;
  accumulate_t<T> eps;
};

// A linear layer: out = x weight^T + bias.
template <class T>
struct LinearParams {
  T* out;                                       // [num_rows, num_outputs]
  const T* x;                                   // [num_rows, depth]
  const T* weight;                              // [num_outputs, depth]
  const T* bias;                                // [num_outputs], contiguous; null = none
  int64_t out_stride, x_stride, weight_stride;  // of a row
  int64_t num_rows, num_outputs, depth;
};

// RMSNorm of rows: residual += x where there is one, out = norm(residual or x) * weight.
template <class T>
struct NormParams {
  T* out;           // [num_rows, width]
  const T* x;       // [num_rows, width]
  const T* weight;  // [width], contiguous
  T* residual;      // [num_rows, width]; null = none
  int64_t out_stride, x_stride, residual_stride;
  int64_t num_rows, width;
  accumulate_t<T> eps;
};

// The gated activation: out = silu(gate) * up; all [num_rows, width].
template <class T>
struct GateParams {
  T* out;
  const T *gate, *up;
  int64_t out_stride, gate_stride, up_stride;
  int64_t num_rows, width;
};

// One cache [N, inner...] of `copy_blocks`: element strides of the inner dimensions, contiguous ones merged.
struct CopyShape {
  static constexpr int kMaxInner = 7;
  int64_t num_blocks, block_stride, num_inner, elements;  // elements: of one block
  int64_t sizes[kMaxInner], strides[kMaxInner];

  // Offset within a block of its element number `index` < elements.
  KVPAGER_HD int64_t offset(int64_t index) const {
    int64_t at = 0;
    for (int64_t dim = num_inner - 1; dim >= 0; --dim) {
      at += index % sizes[dim] * strides[dim];
      index /= sizes[dim];
    }
    return at;
  }
};

// One pair of caches [N, inner...] of `swap_blocks`; like CopyShape, with the element strides of both.
struct SwapShape {
  int64_t num_sources, num_targets, source_stride, target_stride, num_inner, elements;
  int64_t sizes[CopyShape::kMaxInner], from[CopyShape::kMaxInner], to[CopyShape::kMaxInner];
};

// Entries of a block table that have changed. In bounds: rows of `changed` below num_changes, columns below 3.
struct TableUpdate {
  Grid<int32_t> block_tables;   // [num_rows, num_columns]
  Grid<const int32_t> changed;  // [num_changes, 3]: (row, column, block); row -1 = nothing
  int64_t num_rows, num_columns, num_changes;
};

// Merging two results by log-sum-exp: weights of both parts and the common lse. An empty part (lse -inf) weighs 0.
template <class A>
struct MergeWeights {
  A a, b, lse;
};

template <class A>
KVPAGER_HD MergeWeights<A> merge_weights(A lse_a, A lse_b) {
  const A top = lse_a > lse_b ? lse_a : lse_b;
  if (top == -INFINITY) return {A(0), A(0), top};  // both empty: -inf - -inf would be NaN
  using std::exp;
  using std::log;
  const A a = exp(lse_a - top), b = exp(lse_b - top), sum = a + b;
  return {a / sum, b / sum, top + log(sum)};
}

}  // namespace kvpager
