// Copies of swap_blocks by the copy engines: a plan of runs that lie in one piece in both memories. Host code.
#pragma once
#include <cstddef>
#include <vector>

#include "../../moves/params.h"
#include "../device/gpu.h"

namespace kvpager::cuda::moves {

struct CopyRun {
  const char* from;
  char* to;
  size_t bytes;
};

// Adds the runs of one pair of caches to a plan, each run of a block through all pairs before the next: where blocks
// that follow each other are swapped to blocks that do, one run spans them. The pairs are checked. O(pairs * runs of a
// block).
void plan_copies(const char* source, char* target, const BlockShape& shape, int64_t element_bytes,
                 const Grid<const int64_t>& pairs, int64_t num_pairs, std::vector<CopyRun>& plan);

// Copies on the stream, and never waits.
void copy_runs(const std::vector<CopyRun>& plan, Stream stream);

}  // namespace kvpager::cuda::moves
