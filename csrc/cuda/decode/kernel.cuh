// Decode attention on tensor cores: one query token a sequence, K and V read once for up to 8 query heads of a kv head.
//
// A block takes one part of the split plan (cuts.cuh) for one tile of query heads: consecutive tokens of one or more
// rows. Its warps take the tiles of a piece in turns (piece.cuh, tile.cuh). The sums of the warps meet in shared
// memory, and the pieces of a row that was cut meet in the workspace (merge.cuh). All blocks are resident at once: 3 on
// a multiprocessor, 2 if D is more than 128.
//
// One step of a warp asks for the rows of the next step as soon as registers are free:
//   scores of K | ask for the next K | softmax | add weighted V | ask for the next V | look up the block after that
//
// Budgets, for D = 128 on sm_90 (the tools read the lines below): a tile is 8 KB of K and V in 16 loads of 16 bytes a
// lane, so 12 warps have up to 96 KB under way on a multiprocessor, where 26 KB (bfloat16) of latency must be covered.
// The loop is about 40 instructions for a KB of K and V in bfloat16, 85 in fp8 and 110 in int8, all branches counted
// (a new largest logit, the options, the ends of a piece), of 248 that a multiprocessor can issue while memory brings
// a KB.
// budget: kernel=decode_kernel registers=168 shared=18720 spills=0 threads=128 loads16=4 mma=18
// budget: kernel=decode_kernel<bfloat16,bfloat16,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=24
// budget: kernel=decode_kernel<float16,float16,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=24
// budget: kernel=decode_kernel<bfloat16,fp8_e4m3,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,fp8_e4m3,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,fp8_e5m2,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,fp8_e5m2,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,int8_code,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,int8_code,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,bfloat16,256 registers=255 shared=37152 spills=0 threads=128 loads16=32 mma=48
// budget: kernel=decode_kernel<float16,float16,256 registers=255 shared=37152 spills=0 threads=128 loads16=32 mma=48
// budget: kernel=decode_kernel<bfloat16,fp8_e4m3,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,fp8_e4m3,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,fp8_e5m2,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,fp8_e5m2,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,int8_code,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,int8_code,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
#pragma once
#include "piece.cuh"

namespace kvpager::cuda::decode {

// The next piece of the block's part from `at` on; false if there is none. Rows without tokens are done on the way.
template <int D, class Params>
__device__ __forceinline__ bool next_piece(const Params& params, Cut at, Piece& piece) {
  const auto& p = params.attention;
  const SplitPlan& plan = params.plan;
  const Cut to = plan.cut(blockIdx.y + 1);
  for (; at.row <= to.row && at.row < p.num_sequences; at = {at.row + 1, 0}) {
    const int length = p.seq_lens[at.row];
    if (length < 0 || length > params.longest) {
      if (fresh_thread_index() == 0) report(params.errors, kSeqLens);
      continue;
    }
    if (length == 0) {  // written by the part that holds the row's start
      if (at.position == 0 && (at.row < to.row || to.position > 0)) write_nothing_seen(p, at.row, D);
      continue;
    }
    const int first = static_cast<int>(p.options.first_visible(length - 1)), begin = larger(first, at.position);
    int end = at.row == to.row ? smaller(length, to.position) : length;
    if (begin >= end) continue;
    if (const int split = plan.fixed_split; split > 0) end = smaller(end - begin, split - begin % split) + begin;
    piece = {at.row, first, length, begin, end};
    return true;
  }
  return false;
}

// grid (K * head tiles of a kv head, parts), block kDecodeThreads
template <class T, class C, int D>
__global__ void __launch_bounds__(kDecodeThreads, decode_blocks(D)) decode_kernel(DecodeParams<T, C> params) {
  using Shape = DecodeShape<T, C, D>;
  using Sums = BlockSums<D>;
  using Heads = QueryTile<Shape>;
  KVPAGER_SHARED(Sums, shared);
  KVPAGER_SHARED(Heads, queries);
  const AttentionParams<T, C>& p = params.attention;
  const SplitPlan& plan = params.plan;
  if (!plan_is_valid(plan, p.num_sequences, params.errors) || !scales_are_valid(p, params.errors)) return;
  Cut at = plan.cut(blockIdx.y);
  for (Piece piece; next_piece<D>(params, at, piece);) {
    if (fresh_thread_index() == 0) shared.piece = piece;
    WarpSums<Shape> sums;
    const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool good = attend_piece<Shape>(params, piece, queries, sums, warp, lane);
    shared.put(sums, warp, lane);
    at = finish_piece<D>(p, plan, params.workspace, shared, !good, params.errors);
  }
}

}  // namespace kvpager::cuda::decode
