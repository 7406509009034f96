// Views that kernels are given in place of tensors: a pointer and strides counted in elements. For the CPU and CUDA
// alike, and free of any framework.
//
// Dimension letters are those of docs/design/words.md: T tokens, B sequences, H query heads, K kv heads, D head dim, N
// blocks, S block size, M blocks of a table row. The last dimension of every tensor of numbers or codes is contiguous.
// Offsets are 64-bit, since block * stride passes 2^31 on real pools. `at` is in bounds when its indices are below the
// sizes that stand beside it; the caller says why they are.
#pragma once
#include "types.h"

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

// The scales of a quantised cache: [N, K, S], or one for the whole cache, where every stride is 0.
template <class T>
struct Scales {
  T* data;  // null if the cache is not quantised
  int64_t block_stride, head_stride, slot_stride;
  bool fixed;  // one scale for the whole cache, which is only read
  KVPAGER_HD T* at(int64_t block, int64_t head, int64_t offset) const {
    return data + block * block_stride + head * head_stride + offset * slot_stride;
  }
};

struct PoolShape {
  int64_t num_blocks, num_kv_heads, block_size, head_dim;
};

}  // namespace kvpager
