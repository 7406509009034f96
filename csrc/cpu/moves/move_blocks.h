// Copying whole blocks from one cache to another, or within one: what copy_blocks and swap_blocks share.
#pragma once
#include <cstring>

#include "../../moves/params.h"
#include "../runtime/grain.h"

namespace kvpager::cpu::moves {

// The blocks of rows begin ... end - 1 of checked pairs. `source` and `target`: the first elements of both caches.
inline void move_blocks(const char* source, char* target, const BlockShape& shape, int64_t element_bytes,
                        const Grid<const int64_t>& pairs, int64_t begin, int64_t end) {
  const int64_t run = shape.run();
  for (int64_t row = begin; row < end; ++row) {
    // In bounds: the checks have found both blocks in their pools, and offsets below `elements` stay within a block. No
    // target is a source or another's target, so the ranges are disjoint.
    const char* from = source + pairs.at(row, 0) * shape.source_stride * element_bytes;
    char* to = target + pairs.at(row, 1) * shape.target_stride * element_bytes;
    for (int64_t element = 0; element < shape.elements; element += run) {
      const BlockShape::Offsets at = shape.offsets(element);
      memcpy(to + at.to * element_bytes, from + at.from * element_bytes, run * element_bytes);
    }
  }
}

}  // namespace kvpager::cpu::moves
