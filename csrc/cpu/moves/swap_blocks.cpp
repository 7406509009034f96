// The CPU op `swap_blocks`: copies whole blocks from some caches to others; pairs are spread over threads.
#include "../../moves/checks.h"
#include "move_blocks.h"

namespace kvpager::cpu::moves {
namespace {

void swap_blocks(std::vector<Tensor> src, std::vector<Tensor> dst, Tensor pairs) {
  const std::vector<BlockShape> shapes = check_swap(src, dst, pairs);  // all are checked before one is written
  const auto grid = grid_of<int64_t>(pairs);
  check_swap_pairs(grid, pairs.size(0), src[0].size(0), dst[0].size(0));
  for (size_t i = 0; i < src.size(); ++i) {
    const char* const source = static_cast<const char*>(src[i].const_data_ptr());
    char* const target = static_cast<char*>(dst[i].mutable_data_ptr());
    torch::stable::parallel_for(0, pairs.size(0), grain_of(shapes[i].elements), [&](int64_t begin, int64_t end) {
      move_blocks(source, target, shapes[i], src[i].element_size(), grid, begin, end);
    });
  }
}

}  // namespace
}  // namespace kvpager::cpu::moves

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("swap_blocks", TORCH_BOX(&kvpager::cpu::moves::swap_blocks));
}
