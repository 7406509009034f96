// Launches the plain attention of plain.cuh, for all types: a compilation of its own, since it is the slowest to
// compile.
#include "plain.h"

#include "plain.cuh"

namespace kvpager::cuda::plain {

template <class T, class C>
void attend(const AttentionParams<T, C>& params, const Launch& launch) {
  if (params.pool.head_dim > kMaxHeadDim)
    fail_argument("query", "a head dim of at most " + std::to_string(kMaxHeadDim) + " on CUDA",
                  std::to_string(params.pool.head_dim));
  if (params.num_tokens == 0) return;
  const dim3 grid = grid_of_size("query", params.num_tokens, params.num_heads);
  KVPAGER_LAUNCH((attention_kernel<T, C>), grid, dim3(kThreads), launch.stream, params, launch.errors);
  check_launch();
}

#define KVPAGER_INSTANTIATE(T, C) template void attend(const AttentionParams<T, C>&, const Launch&);
KVPAGER_FOR_CACHES(KVPAGER_INSTANTIATE)
KVPAGER_INSTANTIATE(double, double)

}  // namespace kvpager::cuda::plain
