// Between the op of prefill attention (paged_prefill.cu) and its kernels, which are compiled apart for each type of
// caches (kernel.cache.cu).
#pragma once
#include <algorithm>

#include "../../attention/params.h"
#include "../device/launch.h"

namespace kvpager::cuda::prefill {

// Where the positions that a block's rows see are cut over the blocks of grid.z. All of it is in the workspace.
struct SharedRows {
  float* partials;     // [blocks, K, num_parts, 16, kHeadDim + 2]: of a row its sums, its top and its total
  unsigned* arrivals;  // [blocks, K], zeros
  int num_parts;       // 1: nothing is cut, and both are null
};

// The head dims that the kernels are compiled for: the least that holds the call's.
constexpr int64_t compiled_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// How a call is launched. `few_rows`: a sequence's rows are few, so that the warps of a block share 16 of them, and
// several blocks their positions where that fills the device.
struct PrefillPlan {
  bool few_rows;
  dim3 grid;
  int64_t workspace_floats;  // zeros

  template <class T, class C>
  PrefillPlan(const AttentionParams<T, C>& params, bool few_rows) : few_rows(few_rows), workspace_floats(0) {
    constexpr int64_t kTile = 64, kMostParts = 64;  // positions of a tile where rows are few
    const int64_t block_rows = few_rows ? 16 : 64, group = params.num_heads / params.pool.num_kv_heads;
    const int64_t full_blocks = params.num_tokens * group / block_rows;
    grid = grid_of_size("query", full_blocks + params.num_sequences + 1, params.pool.num_kv_heads);
    if (!few_rows) return;
    const int64_t wanted = 2 * num_multiprocessors() / (std::max<int64_t>(1, full_blocks) * grid.y);
    grid.z =
        static_cast<unsigned>(std::clamp<int64_t>(std::min(wanted, params.max_seq_len / (4 * kTile)), 1, kMostParts));
    if (grid.z > 1) workspace_floats = num_blocks() * (grid.z * block_floats(params.pool.head_dim) + 1);
  }

  // Of the same rows; the blocks of grid.z share them.
  int64_t num_blocks() const { return int64_t{grid.x} * grid.y; }
  static int64_t block_floats(int64_t head_dim) { return 16 * (compiled_head_dim(head_dim) + 2); }

  // The areas of a workspace of workspace_floats.
  SharedRows shared_rows(float* workspace, int64_t head_dim) const {
    if (grid.z == 1) return {nullptr, nullptr, 1};
    float* const arrivals = workspace + num_blocks() * grid.z * block_floats(head_dim);
    return {workspace, reinterpret_cast<unsigned*>(arrivals), static_cast<int>(grid.z)};
  }
};

// T: float16 or bfloat16. The head dim is at most 256.
template <class T, class C>
void launch_prefill(const AttentionParams<T, C>& params, const PrefillPlan& plan, float* workspace,
                    const Launch& launch);

}  // namespace kvpager::cuda::prefill
