// The CPU op `copy_blocks`: copies whole blocks within each cache; pairs are spread over threads.
#include "../../moves/checks.h"
#include "move_blocks.h"

namespace kvpager::cpu::moves {
namespace {

void copy_blocks(std::vector<Tensor> caches, Tensor pairs) {
  const std::vector<BlockShape> shapes = check_copy(caches, pairs);  // all are checked before one is written
  const auto grid = grid_of<int64_t>(pairs);
  check_pairs(grid, pairs.size(0), caches[0].size(0));
  for (size_t i = 0; i < caches.size(); ++i) {
    char* const data = static_cast<char*>(caches[i].mutable_data_ptr());
    torch::stable::parallel_for(0, pairs.size(0), grain_of(shapes[i].elements), [&](int64_t begin, int64_t end) {
      move_blocks(data, data, shapes[i], caches[i].element_size(), grid, begin, end);
    });
  }
}

}  // namespace
}  // namespace kvpager::cpu::moves

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("copy_blocks", TORCH_BOX(&kvpager::cpu::moves::copy_blocks));
}
