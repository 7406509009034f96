// The CPU op `update_tables`: writes the changed entries of a block table, on the caller's thread.
#include "../../moves/checks.h"

namespace kvpager::cpu::moves {
namespace {

void update_tables(Tensor block_tables, Tensor changed) {
  const TableUpdate p = table_update(block_tables, changed);
  const auto is_padding = [&](int64_t change) { return p.changed.at(change, 0) == -1; };
  for (int64_t change = 0; change < p.num_changes; ++change) {
    const int32_t row = p.changed.at(change, 0), column = p.changed.at(change, 1);
    if (!is_padding(change) && (row < 0 || row >= p.num_rows || column < 0 || column >= p.num_columns))
      fail_argument(
          "changed",
          "rows below " + std::to_string(p.num_rows) + " (or -1) and columns below " + std::to_string(p.num_columns),
          "row " + std::to_string(row) + ", column " + std::to_string(column) + " at entry " + std::to_string(change));
  }
  for (int64_t change = 0; change < p.num_changes; ++change)
    if (!is_padding(change))  // in bounds: both were checked above
      p.block_tables.at(p.changed.at(change, 0), p.changed.at(change, 1)) = p.changed.at(change, 2);
}

}  // namespace
}  // namespace kvpager::cpu::moves

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("update_tables", TORCH_BOX(&kvpager::cpu::moves::update_tables));
}
