// The CUDA op `copy_blocks`: whole blocks within each cache, by a kernel.
#include "../../moves/checks.h"
#include "../device/scope.h"
#include "move_blocks.h"

namespace kvpager::cuda::moves {
namespace {

void copy_blocks(std::vector<Tensor> caches, Tensor pairs) {
  const std::vector<BlockShape> shapes = check_copy(caches, pairs);  // all are checked before one is written
  if (pairs.size(0) == 0) return;
  const LaunchScope scope(pairs);
  for (size_t i = 0; i < caches.size(); ++i)
    move_blocks(shapes[i], caches[i].const_data_ptr(), caches[i].mutable_data_ptr(),
                static_cast<int64_t>(caches[i].element_size()), grid_of<int64_t>(pairs), pairs.size(0), scope);
}

}  // namespace
}  // namespace kvpager::cuda::moves

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("copy_blocks", TORCH_BOX(&kvpager::cuda::moves::copy_blocks));
}
