// Makes the split plan of decode attention on the device, for callers that bring none: cuts as even as
// make_split_plan's.
// budget: kernel=cut_kernel registers=64 shared=2304 spills=0 threads=256
#pragma once
#include "../../views.h"
#include "../device/gpu.h"

namespace kvpager::cuda::decode {

constexpr int kCutThreads = 256;
constexpr int64_t kMinPartTokens = 128;  // below this a part costs more than it brings

// What the tokens of each row add to the line, for the rows of one pass, and before them.
struct CutLine {
  int64_t ends[kCutThreads], before;
};

// Sums over the block's threads up to each, in place. Ends with a barrier.
__device__ __forceinline__ void running_sums(int64_t (&numbers)[kCutThreads]) {
  for (int width = 1; width < kCutThreads; width *= 2) {
    __syncthreads();
    const int64_t left = threadIdx.x >= width ? numbers[threadIdx.x - width] : 0;
    __syncthreads();
    numbers[threadIdx.x] += left;
  }
  __syncthreads();
}

// What is cut, and how: cuts lie at multiples of `grain`, which is `fixed_split` if that is not 0.
struct CutParams {
  List<int32_t> seq_lens;  // [num_sequences]
  int64_t num_sequences, max_seq_len, window;
  int32_t* plan;  // [2 num_parts + 4]
  int num_parts, grain, fixed_split;

  // Tokens that the row adds to the line. A length that is not valid adds none; decode_kernel reports it.
  __device__ int64_t visible(int64_t row) const {
    const int64_t length = row < num_sequences ? seq_lens[row] : 0;
    if (length < 0 || length > max_seq_len) return 0;
    return window > 0 && length > window ? window : length;
  }
  __device__ void put(int64_t part, int64_t row, int64_t position) const {
    plan[2 + 2 * part] = static_cast<int32_t>(row);
    plan[3 + 2 * part] = static_cast<int32_t>(position);
  }
};

// Writes a split plan. grid 1, block kCutThreads. O(B / kCutThreads) passes over the lengths.
__global__ void cut_kernel(CutParams p) {
  KVPAGER_SHARED(CutLine, line);
  int64_t mine = 0;
  for (int64_t row = threadIdx.x; row < p.num_sequences; row += kCutThreads) mine += p.visible(row);
  line.ends[threadIdx.x] = mine;
  running_sums(line.ends);
  const int64_t total = line.ends[kCutThreads - 1];
  const int64_t wanted = total / kMinPartTokens, parts = wanted < 1 ? 1 : (wanted < p.num_parts ? wanted : p.num_parts);
  if (threadIdx.x == 0) {
    line.before = 0;
    p.plan[0] = static_cast<int32_t>(p.num_sequences);
    p.plan[1] = p.fixed_split;
    p.put(0, 0, 0);
  }
  for (int64_t part = parts + threadIdx.x; part <= p.num_parts; part += kCutThreads) p.put(part, p.num_sequences, 0);
  for (int64_t first_row = 0; first_row < p.num_sequences; first_row += kCutThreads) {
    __syncthreads();  // all have read the last pass's sums
    line.ends[threadIdx.x] = p.visible(first_row + threadIdx.x);
    running_sums(line.ends);
    const int64_t before = line.before, end = before + line.ends[kCutThreads - 1];
    for (int64_t part = 1 + threadIdx.x; part < parts; part += kCutThreads) {
      const int64_t target = total * part / parts;
      if (target < before || target >= end) continue;
      int row = 0;  // the first whose end lies past the target
      for (int step = kCutThreads / 2; step > 0; step /= 2)
        if (line.ends[row + step - 1] + before <= target) row += step;
      const int64_t position = p.seq_lens[first_row + row] - (before + line.ends[row] - target);
      p.put(part, first_row + row, position / p.grain * p.grain);
    }
    __syncthreads();
    if (threadIdx.x == 0) line.before = end;
  }
}

}  // namespace kvpager::cuda::decode
