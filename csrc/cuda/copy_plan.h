// The plan of a swap: runs of bytes that lie in one piece in both memories, neighbours merged. Host code.
#pragma once
#include <cstddef>
#include <vector>

#include "../params.h"

namespace kvpager::cuda {

struct CopyRun {
  const char* from;
  char* to;
  size_t bytes;
};

// Adds the runs of one pair of caches, each piece of a block through all pairs before the next piece: where blocks that
// follow each other are swapped to blocks that do, a run spans them. The pairs have been checked. O(pairs * pieces).
inline void plan_copies(const char* source, char* target, const SwapShape& shape, int64_t element_bytes,
                        const Grid<const int64_t>& pairs, int64_t num_pairs, std::vector<CopyRun>& plan) {
  const int64_t last = shape.num_inner - 1;
  const bool packed = last >= 0 && shape.from[last] == 1 && shape.to[last] == 1;
  const int64_t run = packed ? shape.sizes[last] : 1;
  const size_t begin = plan.size();
  for (int64_t element = 0; element < shape.elements; element += run) {
    int64_t from_at = 0, to_at = 0, index = element;
    for (int64_t dim = last; dim >= 0; index /= shape.sizes[dim--]) {
      from_at += index % shape.sizes[dim] * shape.from[dim];
      to_at += index % shape.sizes[dim] * shape.to[dim];
    }
    for (int64_t row = 0; row < num_pairs; ++row) {
      // In bounds: both blocks of a pair are in their pools; an element below `elements` lies within its block.
      const CopyRun next{source + (pairs.at(row, 0) * shape.source_stride + from_at) * element_bytes,
                         target + (pairs.at(row, 1) * shape.target_stride + to_at) * element_bytes,
                         static_cast<size_t>(run * element_bytes)};
      CopyRun* previous = plan.size() > begin ? &plan.back() : nullptr;
      if (previous && previous->from + previous->bytes == next.from && previous->to + previous->bytes == next.to)
        previous->bytes += next.bytes;
      else
        plan.push_back(next);
    }
  }
}

}  // namespace kvpager::cuda
