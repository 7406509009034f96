// The CUDA op `update_tables`: writes the changed entries of a block table, a thread each.
// budget: kernel=update_tables_kernel registers=24 shared=0 spills=0 threads=128
#include "../../moves/checks.h"
#include "../device/errors.cuh"
#include "../device/scope.h"

namespace kvpager::cuda::moves {
namespace {

constexpr int kUpdateThreads = 128;

// block_tables [B, M], changed [num_changes, 3]: (row, column, block) each; row -1 = nothing. A thread each.
__global__ void __launch_bounds__(kUpdateThreads) update_tables_kernel(TableUpdate p, unsigned* errors) {
  const int64_t change = int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x;
  if (change >= p.num_changes) return;
  const int32_t row = p.changed.at(change, 0), column = p.changed.at(change, 1);
  if (row == -1) return;
  if (row < 0 || row >= p.num_rows || column < 0 || column >= p.num_columns) return report(errors, kChanged);
  p.block_tables.at(row, column) = p.changed.at(change, 2);
}

void update_tables(Tensor block_tables, Tensor changed) {
  const TableUpdate params = table_update(block_tables, changed);
  if (params.num_changes == 0) return;
  const LaunchScope scope(block_tables);
  KVPAGER_LAUNCH(update_tables_kernel, grid_of_size("changed", divided_up(params.num_changes, kUpdateThreads)),
                 dim3(kUpdateThreads), scope.stream, params, scope.errors);
  check_launch();
}

}  // namespace
}  // namespace kvpager::cuda::moves

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("update_tables", TORCH_BOX(&kvpager::cuda::moves::update_tables));
}
