// Paged attention on CUDA, plain: one block per (query token, query head), the warps share out the positions.
//
// Each warp runs the online softmax over every kWarps-th position, a lane holding the dims lane, lane + 32, ...; the
// warps' partial results meet in shared memory. Same kernel for decode and prefill. It is correct and simple, and reads
// K and V once per query head and query token.
// budget: kernel=attention_kernel registers=96 shared=8256 spills=0 threads=128
#pragma once
#include "queries.cuh"

namespace kvpager::cuda::plain {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxHeadDim = 256;
constexpr int kDimsPerLane = kMaxHeadDim / 32;

struct QueryPlace {
  int64_t sequence, length, query_len, position;  // the query stands at `position`; -1: it belongs to no sequence
};

// Where query row `token` belongs. In bounds: token < num_tokens; sequence is found among num_sequences.
template <class T, class C>
__device__ QueryPlace place_of(const AttentionParams<T, C>& p, int64_t token) {
  if (p.query_start_loc.data == nullptr) {
    const int64_t length = p.seq_lens[token];
    return {token, length, 1, length - 1};
  }
  int64_t low = 0, high = p.num_sequences;  // the last sequence that starts at or before the token
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.query_start_loc[middle] <= token ? low : high) = middle;
  }
  if (p.num_sequences == 0) return {0, 0, 0, -1};
  const int64_t start = p.query_start_loc[low], stop = p.query_start_loc[low + 1];
  if (token < start || token >= stop) return {0, 0, 0, -1};
  const int64_t length = p.seq_lens[low];
  return {low, length, stop - start, length - (stop - token)};
}

// Same answer in every thread of the block; a row with a value that does not fit is reported and skipped.
template <class T, class C>
__device__ bool row_is_valid(const AttentionParams<T, C>& p, const QueryPlace& at, unsigned* errors) {
  const int64_t S = p.pool.block_size;
  if (!p.length_is_valid(at.length)) {
    if (threadIdx.x == 0) report(errors, kSeqLens);
    return false;
  }
  if (at.query_len > p.max_query_len || (at.query_len > at.length && p.query_start_loc.data != nullptr)) {
    if (threadIdx.x == 0) report(errors, kQueryStartLoc);
    return false;
  }
  bool bad = false;
  if (at.length > 0)
    // In bounds: position < length <= max_blocks * S, so every column is below max_blocks.
    for (int64_t column = p.options.first_visible(at.position) / S + threadIdx.x; column <= at.position / S;
         column += kThreads) {
      const int32_t block = p.block_tables.at(at.sequence, column);
      bad |= block < 0 || block >= p.pool.num_blocks;
    }
  if (!__syncthreads_or(bad)) return true;
  if (threadIdx.x == 0) report(errors, kBlockTables);
  return false;
}

template <class A>
__device__ __forceinline__ A warp_sum(A part) {
  for (int width = 16; width > 0; width /= 2) part += __shfl_xor_sync(0xffffffffu, part, width);
  return part;
}

// One warp's running softmax: the sums of its positions, relative to the largest logit so far.
template <class A>
struct Partial {
  A top = -INFINITY, total = 0, acc[kDimsPerLane] = {};
};

// Positions first + warp, first + warp + kWarps, ... < stop. All lanes end with the same top and total.
template <class T, class C>
__device__ Partial<accumulate_t<T>> attend(const AttentionParams<T, C>& p, const QueryPlace& at, int64_t head, int warp,
                                           int lane) {
  using A = accumulate_t<T>;
  const int D = static_cast<int>(p.pool.head_dim);  // <= kMaxHeadDim, checked by the launcher
  const int64_t S = p.pool.block_size, kv_head = head / (p.num_heads / p.pool.num_kv_heads);
  A query[kDimsPerLane];
  const T* query_row = p.query.at(blockIdx.x, head);
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i)
    query[i] = lane + 32 * i < D ? widen(query_row[lane + 32 * i]) * p.options.scale : A(0);
  Partial<A> sum;
  for (int64_t position = p.options.first_visible(at.position) + warp; position <= at.position; position += kWarps) {
    // In bounds: row_is_valid has seen this column and found a block of the pool; kv_head < K; d < D.
    const int64_t block = p.block_tables.at(at.sequence, position / S);
    const C* key = p.key_cache.at(block, kv_head, position % S);
    const C* value = p.value_cache.at(block, kv_head, position % S);
    A score = 0;
#pragma unroll
    for (int i = 0; i < kDimsPerLane; ++i)
      if (lane + 32 * i < D) score += query[i] * widen(key[lane + 32 * i]);
    score = warp_sum(score);
    A value_scale = 1;
    if constexpr (is_quantised<C>) {
      score *= *p.key_scale.at(block, kv_head, position % S);
      value_scale = *p.value_scale.at(block, kv_head, position % S);
    }
    score = p.options.logit(score, {head, at.position, position});
    if (score == -INFINITY) continue;  // overflowed: no weight, and -inf - -inf would be NaN
    const A top = score > sum.top || score != score ? score : sum.top;
    const A shrink = exp(sum.top - top), weight = exp(score - top);
#pragma unroll
    for (int i = 0; i < kDimsPerLane; ++i)
      if (lane + 32 * i < D) sum.acc[i] = sum.acc[i] * shrink + weight * value_scale * widen(value[lane + 32 * i]);
    sum.total = sum.total * shrink + weight;
    sum.top = top;
  }
  return sum;
}

// What the warps of a block tell each other.
template <class A>
struct WarpResults {
  A tops[kWarps], totals[kWarps], accs[kWarps][kMaxHeadDim];
};

// grid (num_tokens, H), block kThreads
template <class T, class C>
__global__ void __launch_bounds__(kThreads, 4) attention_kernel(AttentionParams<T, C> p, unsigned* errors) {
  using A = accumulate_t<T>;
  KVPAGER_SHARED(WarpResults<A>, warps);
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, D = static_cast<int>(p.pool.head_dim);
  check_query_starts<kThreads>(p, errors);
  const QueryPlace at = place_of(p, token);
  T* out = p.out.at(token, head);  // token < num_tokens and head < H: the grid's size
  if (!row_is_valid(p, at, errors) || !scales_are_valid(p, errors)) return;
  if (at.length == 0) {  // nothing to see
    for (int d = threadIdx.x; d < D; d += kThreads) out[d] = narrow<T>(A(0));
    if (p.lse.data && threadIdx.x == 0) p.lse.at(token, head) = -INFINITY;
    return;
  }
  const Partial<A> sum = attend(p, at, head, warp, lane);
  if (lane == 0) {
    warps.tops[warp] = sum.top;
    warps.totals[warp] = sum.total;
  }
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i)
    if (lane + 32 * i < D) warps.accs[warp][lane + 32 * i] = sum.acc[i];
  __syncthreads();

  A top = p.options.sinks.data ? p.options.sinks[head] : A(-INFINITY);  // a sink is a logit without a value
  for (int w = 0; w < kWarps; ++w) top = warps.tops[w] > top || warps.tops[w] != warps.tops[w] ? warps.tops[w] : top;
  A total = p.options.sinks.data && p.options.sinks[head] > -INFINITY ? exp(p.options.sinks[head] - top) : A(0),
    weights[kWarps];
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = warps.tops[w] == -INFINITY ? A(0) : exp(warps.tops[w] - top);  // a warp may have had no position
    total += weights[w] * warps.totals[w];
  }
  for (int d = threadIdx.x; d < D; d += kThreads) {
    A merged = 0;
    for (int w = 0; w < kWarps; ++w) merged += weights[w] * warps.accs[w][d];
    out[d] = narrow<T>(merged / total);
  }
  if (p.lse.data && threadIdx.x == 0) p.lse.at(token, head) = top + log(total);
}

}  // namespace kvpager::cuda::plain
