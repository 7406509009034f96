// Moving whole blocks, as bits in the widest unit that fits.
//
// A block's units are spread over threads and grid.y; a thread takes kUnitsAtOnce of them, all loaded before one is
// stored. Offsets within a block are counted in 32 bits: one division a unit and dimension, none where a block lies in
// one piece. Bytes moved: each block once in, once out. In flight: 64 bytes a thread.
// budget: kernel=move_blocks_kernel registers=48 shared=0 spills=0 threads=128
#pragma once
#include "../../moves/params.h"
#include "../device/errors.cuh"
#include "../device/units.h"

namespace kvpager::cuda::moves {

constexpr int kMoveThreads = 128;
constexpr int kUnitsAtOnce = 4;

// The units of a block: the same places in the memory they are read from and written to. All but the bases in units.
struct UnitShape {
  int64_t num_sources, num_targets, source_stride, target_stride;  // blocks, and from one block to the next
  int num_inner;
  uint32_t num_units, sizes[BlockShape::kMaxInner];
  int64_t from[BlockShape::kMaxInner], to[BlockShape::kMaxInner];
};

struct UnitOffsets {
  int64_t from, to;
};

// Of unit `index` < num_units.
KVPAGER_HD UnitOffsets offsets_of(const UnitShape& shape, uint32_t index) {
  UnitOffsets at{0, 0};
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
    move_blocks_kernel(const U* sources, U* targets, UnitShape shape, Grid<const int64_t> pairs, unsigned* errors) {
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
    UnitOffsets at[kUnitsAtOnce];
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

}  // namespace kvpager::cuda::moves
