// What the kernels of the layers around attention are given.
#pragma once
#include "../views.h"

namespace kvpager {

// T: type of qkv and query_out. C: type of the caches, T itself or codes.
template <class T, class C = T>
struct QkNormRopeWriteParams {
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

// The outputs first_output ... end_output - 1 of all rows: what a thread takes at once.
struct LinearPart {
  int64_t first_output, end_output;
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

}  // namespace kvpager
