// Moving whole blocks, as bits in the widest unit that fits, and writing the changed entries of a block table.
//
// A block's units are spread over threads and grid.y; a thread takes kUnitsAtOnce of them, all loaded before one is
// stored. Offsets within a block are counted in 32 bits: one division a unit and dimension, none where a block lies in
// one piece. Bytes moved: each block once in, once out. In flight: 64 bytes a thread.
// budget: kernel=move_blocks_kernel registers=48 shared=0 spills=0 threads=128
// budget: kernel=update_tables_kernel registers=24 shared=0 spills=0 threads=128
#pragma once
#include "errors.cuh"
#include "units.h"

namespace kvpager::cuda {

constexpr int kMoveThreads = 128;
constexpr int kUnitsAtOnce = 4;

// The units of a block: the same places in the memory they are read from and written to. All but the bases in units.
struct MoveShape {
  int64_t num_sources, num_targets, source_stride, target_stride;  // blocks, and from one block to the next
  int num_inner;
  uint32_t num_units, sizes[CopyShape::kMaxInner];
  int64_t from[CopyShape::kMaxInner], to[CopyShape::kMaxInner];
};

struct MoveOffsets {
  int64_t from, to;
};

// Of unit `index` < num_units.
KVPAGER_HD MoveOffsets offsets_of(const MoveShape& shape, uint32_t index) {
  MoveOffsets at{0, 0};
  for (int dim = shape.num_inner - 1; dim > 0; --dim) {
    const uint32_t place = index % shape.sizes[dim];
    index /= shape.sizes[dim];
    at.from += place * shape.from[dim];
    at.to += place * shape.to[dim];
  }
  if (shape.num_inner > 0) {
    at.from += index * shape.from[0];
    at.to += index * shape.to[0];
  }
  return at;
}

// grid (num_pairs, slices of a block), block kMoveThreads
template <class U>
__global__ void __launch_bounds__(kMoveThreads)
    move_blocks_kernel(const U* sources, U* targets, MoveShape shape, Grid<const int64_t> pairs, unsigned* errors) {
  const int64_t source = pairs.at(blockIdx.x, 0), target = pairs.at(blockIdx.x, 1);  // the grid is num_pairs wide
  if (source < 0 || source >= shape.num_sources || target < 0 || target >= shape.num_targets) {
    if (threadIdx.x == 0) report(errors, kPairs);
    return;
  }
  // In bounds: both blocks are in their pools, and a unit below num_units lies within its block.
  const U* from = sources + source * shape.source_stride;
  U* to = targets + target * shape.target_stride;
  const uint32_t step = gridDim.y * kMoveThreads;
  for (uint32_t first = blockIdx.y * kMoveThreads + threadIdx.x; first < shape.num_units;
       first += step * kUnitsAtOnce) {
    U units[kUnitsAtOnce];
    MoveOffsets at[kUnitsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kUnitsAtOnce; ++i) {
      if (first + i * step >= shape.num_units) continue;
      at[i] = offsets_of(shape, first + i * step);
      units[i] = from[at[i].from];
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnitsAtOnce; ++i)
      if (first + i * step < shape.num_units) to[at[i].to] = units[i];
  }
}

// block_tables [B, M], changed [num_changes, 3]: (row, column, block) each; row -1 = nothing. A thread each.
__global__ void __launch_bounds__(kMoveThreads) update_tables_kernel(TableUpdate p, unsigned* errors) {
  const int64_t change = int64_t{blockIdx.x} * kMoveThreads + threadIdx.x;
  if (change >= p.num_changes) return;
  const int32_t row = p.changed.at(change, 0), column = p.changed.at(change, 1);
  if (row == -1) return;
  if (row < 0 || row >= p.num_rows || column < 0 || column >= p.num_columns) return report(errors, kChanged);
  p.block_tables.at(row, column) = p.changed.at(change, 2);
}

}  // namespace kvpager::cuda
