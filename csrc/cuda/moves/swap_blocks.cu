// The CUDA op `swap_blocks`: whole blocks between a device and pinned host memory, or within either, on the caller's
// stream. It never waits:
//  * pairs on the host: a plan of merged runs (copy_runs.h), given to the copy engines as one batch
// (cudaMemcpyBatchAsync). Where that is not to be had (an older CUDA, the legacy default stream, a graph that is being
//    captured, which then holds these pairs for good), run by run.
//  * pairs on the device: the kernel of copy_blocks, which reads and writes the host's memory through its mapping. That
//    can be captured in a graph and replayed with new pairs; it takes multiprocessors from whatever else runs.
#include "../../moves/checks.h"
#include "../device/scope.h"
#include "copy_runs.h"
#include "move_blocks.h"

namespace kvpager::cuda::moves {
namespace {

void swap_blocks(std::vector<Tensor> src, std::vector<Tensor> dst, Tensor pairs) {
  const std::vector<BlockShape> shapes = check_swap(src, dst, pairs);
  const bool by_kernel = lies_on_device(pairs);
  const auto grid = grid_of<int64_t>(pairs);
  const int64_t num_pairs = pairs.size(0);
  if (!by_kernel) check_swap_pairs(grid, num_pairs, src[0].size(0), dst[0].size(0));
  const LaunchScope scope(lies_on_device(src[0]) ? src[0] : (lies_on_device(dst[0]) ? dst[0] : pairs));
  std::vector<const void*> sources;
  std::vector<void*> targets;
  for (size_t i = 0; i < src.size(); ++i) {
    sources.push_back(address_on_device("src", src[i], const_cast<void*>(src[i].const_data_ptr())));
    targets.push_back(address_on_device("dst", dst[i], dst[i].mutable_data_ptr()));
  }
  if (num_pairs == 0) return;
  std::vector<CopyRun> plan;
  for (size_t i = 0; i < src.size(); ++i) {
    const int64_t element_bytes = static_cast<int64_t>(src[i].element_size());
    if (by_kernel)
      move_blocks(shapes[i], sources[i], targets[i], element_bytes, grid, num_pairs, scope);
    else
      plan_copies(static_cast<const char*>(src[i].const_data_ptr()), static_cast<char*>(dst[i].mutable_data_ptr()),
                  shapes[i], element_bytes, grid, num_pairs, plan);
  }
  if (!plan.empty()) copy_runs(plan, scope.stream);
}

}  // namespace
}  // namespace kvpager::cuda::moves

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("swap_blocks", TORCH_BOX(&kvpager::cuda::moves::swap_blocks));
}
