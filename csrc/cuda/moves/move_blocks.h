// Moving whole blocks by a kernel (move_blocks.cu): what copy_blocks and swap_blocks launch.
#pragma once
#include "../../moves/params.h"
#include "../device/launch.h"

namespace kvpager::cuda::moves {

// Moves the blocks of all pairs. `source` and `target`: the first elements of both caches, as the device addresses
// them.
void move_blocks(const BlockShape& shape, const void* source, void* target, int64_t element_bytes,
                 const Grid<const int64_t>& pairs, int64_t num_pairs, const Launch& launch);

}  // namespace kvpager::cuda::moves
