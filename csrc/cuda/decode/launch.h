// Between the op of decode attention (paged_attention.cu) and its kernels, which are compiled apart for each type of
// caches (kernel.cache.cu).
#pragma once
#include "../../attention/params.h"
#include "../../attention/split_plan.h"
#include "../device/launch.h"

namespace kvpager::cuda::decode {

// Where the pieces of rows that were cut meet. A room is the place of one piece.
struct Workspace {
  unsigned* counters;      // [B * head tiles]
  float* tops_totals;      // [rooms, H, 2]
  float* accs;             // [rooms, H, D], at a multiple of 16 bytes
  int64_t splits_per_row;  // rooms of a row if the split is fixed; else rooms 2 p - 1 and 2 p are those of part p
};

// Floats of an area of the workspace, so that the next one begins at a multiple of 16 bytes.
constexpr int64_t whole_vectors(int64_t floats) { return (floats + 3) / 4 * 4; }

// Query heads that one block serves at once, and blocks of threads that a multiprocessor holds.
constexpr int kTileHeads = 8;
constexpr int decode_blocks(int64_t head_dim) { return head_dim > 128 ? 2 : 3; }

// Head dims that the kernels are compiled for.
constexpr bool is_decode_head_dim(int64_t head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

// What makes a logit, in units of log 2, of a product: factor * product, or with a softcap cap * tanh(factor * product)
// with a factor for e^2x = 2^(factor * product).
struct LogitFactors {
  float factor, cap;
  LogitFactors(float scale, float softcap)
      : factor(softcap > 0 ? scale / softcap * (2 * kLog2E) : scale * kLog2E), cap(softcap * kLog2E) {}
};

// Division of numbers below 2^31 by one that stays the same: (high half of magic * n + n) >> shift.
struct Divisor {
  uint32_t divisor, magic, shift;
  explicit Divisor(uint32_t divisor) : divisor(divisor), shift(0) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
  KVPAGER_HD uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{magic} * n >> 32) + n) >> shift;
  }
};

// A cache or its scales, addressed by 32-bit offsets: in steps of 16 bytes in a cache, of one scale in scales.
struct Addresses {
  const char* data;
  uint32_t block, head, slot;  // strides
  template <class Strided>
  Addresses(const Strided& rows, int64_t step_bytes)
      : data(reinterpret_cast<const char*>(rows.data)), block(in_steps(rows.data, rows.block_stride, step_bytes)),
        head(in_steps(rows.data, rows.head_stride, step_bytes)),
        slot(in_steps(rows.data, rows.slot_stride, step_bytes)) {}
  KVPAGER_HD uint32_t offset(uint32_t block_id, uint32_t head_id, uint32_t slot_id) const {
    return block_id * block + head_id * head + slot_id * slot;
  }

 private:
  template <class E>
  static uint32_t in_steps(const E*, int64_t stride, int64_t step_bytes) {
    return static_cast<uint32_t>(stride * static_cast<int64_t>(sizeof(E)) / step_bytes);
  }
};

// Launches the kernel for a checked call. `head_tiles`: K times the tiles of a kv head's query heads.
template <class T, class C>
void launch_decode(const AttentionParams<T, C>& params, const SplitPlan& plan, const Workspace& workspace,
                   int64_t head_tiles, const Launch& launch);

}  // namespace kvpager::cuda::decode
