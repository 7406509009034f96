// Moving whole blocks by a kernel: measures the widest unit, and launches for it.
#include <algorithm>

#include "move_blocks.cuh"
#include "move_blocks.h"

namespace kvpager::cuda::moves {
namespace {

// Whether the elements of the last dimension lie against each other in both memories.
bool is_packed(const BlockShape& shape) {
  const int64_t last = shape.num_inner - 1;
  return last >= 0 && shape.from[last] == 1 && shape.to[last] == 1;
}

// The widest unit of blocks of `shape` between two memories, and their shape in it.
int64_t unit_of(const BlockShape& shape, const void* source, const void* target, int64_t element_bytes) {
  Alignment alignment;
  alignment.address(source).address(target);
  alignment.offset(shape.source_stride * element_bytes).offset(shape.target_stride * element_bytes);
  const int64_t outer = is_packed(shape) ? shape.num_inner - 1 : shape.num_inner;
  for (int64_t dim = 0; dim < outer; ++dim)
    alignment.offset(shape.from[dim] * element_bytes).offset(shape.to[dim] * element_bytes);
  if (!is_packed(shape)) return std::min(alignment.unit_bytes(), element_bytes);
  return alignment.offset(shape.sizes[outer] * element_bytes).unit_bytes();
}

UnitShape shape_in_units(const BlockShape& shape, int64_t element_bytes, int64_t unit) {
  const int64_t last = shape.num_inner - 1, num_units = shape.elements * element_bytes / unit;
  if (num_units > INT32_MAX / 2) fail_argument("caches", "blocks of at most 1073741823 units on CUDA", "more");
  UnitShape result{shape.num_sources,
                   shape.num_targets,
                   shape.source_stride * element_bytes / unit,
                   shape.target_stride * element_bytes / unit,
                   static_cast<int>(shape.num_inner),
                   static_cast<uint32_t>(num_units),
                   {},
                   {},
                   {}};
  for (int64_t dim = 0; dim <= last; ++dim) {
    result.sizes[dim] = static_cast<uint32_t>(shape.sizes[dim]);
    result.from[dim] = shape.from[dim] * element_bytes / unit;
    result.to[dim] = shape.to[dim] * element_bytes / unit;
  }
  if (is_packed(shape)) {  // the unit spans elements
    result.sizes[last] = static_cast<uint32_t>(shape.sizes[last] * element_bytes / unit);
    result.from[last] = result.to[last] = 1;
  }
  return result;
}

}  // namespace

void move_blocks(const BlockShape& shape, const void* source, void* target, int64_t element_bytes,
                 const Grid<const int64_t>& pairs, int64_t num_pairs, const Launch& launch) {
  const int64_t unit = unit_of(shape, source, target, element_bytes);
  const UnitShape units = shape_in_units(shape, element_bytes, unit);
  if (units.num_units == 0) return;
  const int64_t slices = std::min<int64_t>(divided_up(units.num_units, kMoveThreads * kUnitsAtOnce), 1024);
  const dim3 grid = grid_of_size("pairs", num_pairs, slices);
  with_unit(unit, [&](auto zero) {
    using U = decltype(zero);
    KVPAGER_LAUNCH(move_blocks_kernel<U>, grid, dim3(kMoveThreads), launch.stream, static_cast<const U*>(source),
                   static_cast<U*>(target), units, pairs, launch.errors);
  });
  check_launch();
}

}  // namespace kvpager::cuda::moves
