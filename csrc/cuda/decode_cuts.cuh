// How decode attention is cut over the GPU: the schedule's cuts, as the kernels read them.
//
// A batch is a line of visible tokens, sequence after sequence; parts of equal length go to the blocks (one for each part
// and up to 8 query heads of a kv head), all resident at once, whatever the sequences are. The schedule is that of the
// CPU: int32 [B, fixed_split, row, position, row, position, ...], num_parts + 1 cuts (kvpager/ops/schedule.py). Any cuts
// in order give the right result, so that one made for other lengths is slow but not wrong.
#pragma once
#include "errors.cuh"

namespace kvpager::cuda {

struct Cut {
  int row, position;
  __device__ bool operator<=(const Cut& other) const {
    return row < other.row || (row == other.row && position <= other.position);
  }
};

struct Schedule {
  List<int32_t> entries;
  int num_parts, fixed_split;  // 0: pieces end where parts do

  // 0 <= index <= num_parts
  __device__ Cut cut(int index) const { return {entries[2 + 2 * index], entries[3 + 2 * index]}; }

  // Part of the token at `position` of a row: the last one that begins at or before it.
  __device__ int part_of(Cut token) const {
    int low = 0, high = num_parts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (cut(middle) <= token ? low : high) = middle;
    }
    return low;
  }

  // The same answer in every thread; the first of a block reports.
  __device__ bool is_valid(int64_t num_sequences, unsigned* errors) const {
    bool bad = entries[0] != num_sequences || entries[1] != fixed_split;
    for (int part = threadIdx.x; part < num_parts; part += blockDim.x) {
      const Cut from = cut(part), to = cut(part + 1);
      bad |= !(from <= to) || from.position < 0 || (fixed_split > 0 && from.position % fixed_split != 0);
      bad |= part == 0 && (from.row != 0 || from.position != 0);
      bad |= part == num_parts - 1 && (to.row != num_sequences || to.position != 0);
    }
    if (!__syncthreads_or(bad)) return true;
    if (threadIdx.x == 0) report(errors, kSchedule);
    return false;
  }
};

}  // namespace kvpager::cuda
