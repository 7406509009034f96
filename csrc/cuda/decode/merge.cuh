// From the sums of warps to results. Pieces of sequences that were cut meet in memory; the last block to come merges
// them.
//
// The workspace is zeros between launches: a counter [B, head tiles] of the tokens that have arrived of each row, then
// for each piece and query head a pair (largest logit in units of log 2, total weight) and the weighted sum [D] of V. A
// block that has written a piece adds its tokens to the row's counter; the one that completes the row merges its
// pieces, in the order of their positions, and clears what it read. So there is no second launch, and the result does
// not depend on which block was last.
#pragma once
#include "cuts.cuh"
#include "launch.h"
#include "tile.cuh"

namespace kvpager::cuda::decode {

constexpr int kMergeBatch = 8;               // pieces whose loads hide each other's latency
constexpr unsigned kBadPiece = 0x80000000u;  // in a counter, beside the tokens

// A partial result of one head: 4 dims of the weighted sum, relative to `top`.
struct Partial {
  float top = -INFINITY, total = 0, acc[4] = {};

  // Log-sum-exp merge. A partial result without weight is ignored: it may hold NaN.
  __device__ void add(float other_top, float other_total, const float4& other) {
    if (other_total == 0) return;
    const float new_top = fmaxf(top, other_top), shrink = exp2_fast(top - new_top);
    const float weight = exp2_fast(other_top - new_top), numbers[4] = {other.x, other.y, other.z, other.w};
    top = new_top;
    total = total * shrink + other_total * weight;
    for (int i = 0; i < 4; ++i) acc[i] = acc[i] * shrink + numbers[i] * weight;
  }
};

// Positions begin ... end - 1 of a row that sees first ... length - 1.
struct Piece {
  int row, first, length, begin, end;
  __device__ bool is_whole() const { return begin == first && end == length; }
};

// What the threads of a block tell each other. The piece waits here while the registers are full of K and V.
template <int D>
struct BlockSums {
  float tops[kDecodeWarps][kTileHeads], totals[kDecodeWarps][kTileHeads];
  float4 accs[kDecodeWarps][kTileHeads][D / 4];
  Piece piece;
  unsigned arrived;

  template <class Shape>
  __device__ void put(const WarpSums<Shape>& sums, int warp, int lane) {
    const int r = lane / 4, c = lane % 4;
    const float total = sum_over_tokens(sums.total);
    if (c == 0) tops[warp][r] = sums.top, totals[warp][r] = total;
#pragma unroll
    for (int j = 0; j < Shape::kProducts; ++j)
      for (int i = 0; i < 4; ++i) {
        float* row = reinterpret_cast<float*>(accs[warp][2 * c + i % 2]);
        row[Shape::ValueShare::dim(r, 2 * j + i / 2)] = sums.acc[j][i] * sums.power;
      }
  }

  __device__ Partial merged(int head, int four) const {
    Partial result;
    for (int warp = 0; warp < kDecodeWarps; ++warp)
      result.add(tops[warp][head], totals[warp][head], accs[warp][head][four]);
    return result;
  }
};

// Writes dims 4 four ... of one head, its sink added. In bounds: row < num_tokens, head < H, the dims < D.
template <class P>
__device__ __forceinline__ void write_result(const P& p, Partial result, int row, int head, int four) {
  if (p.options.sinks.data && p.options.sinks[head] > -INFINITY)  // a logit without a value
    result.add(p.options.sinks[head] * kLog2E, 1, float4{0, 0, 0, 0});
  auto* out = p.out.at(row, head) + 4 * four;
  for (int i = 0; i < 4; ++i) out[i] = narrow<std::remove_reference_t<decltype(*out)>>(result.acc[i] / result.total);
  if (p.lse.data && four == 0) p.lse.at(row, head) = (result.top + log2_fast(result.total)) / kLog2E;
}

template <class P>
__device__ __forceinline__ void write_nothing_seen(const P& p, int row, int head_dim) {
  const HeadTile tile = head_tile(p);
  for (int i = fresh_thread_index(); i < tile.heads * head_dim; i += kDecodeThreads)
    p.out.at(row, tile.head + i / head_dim)[i % head_dim] = {};
  if (p.lse.data && fresh_thread_index() < tile.heads) p.lse.at(row, tile.head + fresh_thread_index()) = -INFINITY;
}

// The workspace's rooms of a row's pieces, in the order of their positions; those of parts without tokens stay zeros.
struct RowRooms {
  int64_t base;
  int count;
  bool fixed;
  __device__ int64_t operator[](int index) const { return base + (fixed || index == 0 ? index : 2 * index - 1); }
};

__device__ __forceinline__ RowRooms rooms_of(const SplitPlan& plan, const Workspace& workspace, const Piece& piece) {
  const int split = plan.fixed_split;
  if (split > 0)
    return {piece.row * workspace.splits_per_row, (piece.length - 1) / split - piece.first / split + 1, true};
  const int part = part_of(plan, {piece.row, piece.first});
  return {2 * part, part_of(plan, {piece.row, piece.length - 1}) - part + 1, false};
}

// Where a piece of the block's part goes.
__device__ __forceinline__ int64_t room_of(const SplitPlan& plan, const Workspace& workspace, const Piece& piece) {
  const int split = plan.fixed_split;
  if (split > 0) return piece.row * workspace.splits_per_row + piece.begin / split - piece.first / split;
  return 2 * int64_t{blockIdx.y} - (piece.begin > piece.first);
}

// The last to come: all pieces of the row are in memory. `good`: none of them met a bad value.
template <int D, class P>
__device__ __forceinline__ void merge_pieces(const P& p, const SplitPlan& plan, const Workspace& workspace,
                                             const Piece& piece, bool good) {
  const RowRooms rooms = rooms_of(plan, workspace, piece);
  const HeadTile tile = head_tile(p);
  for (int i = fresh_thread_index(); i < tile.heads * (D / 4); i += kDecodeThreads) {
    const int head = tile.head + i / (D / 4), four = i % (D / 4);
    Partial result;
    for (int begin = 0; begin < rooms.count; begin += kMergeBatch) {
      float2 pairs[kMergeBatch];
      float4 accs[kMergeBatch];
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i) {  // all under way before one is needed
        const int64_t place = rooms[smaller(begin + i, rooms.count - 1)] * p.num_heads + head;
        pairs[i] = __ldcg(reinterpret_cast<const float2*>(workspace.tops_totals) + place);
        accs[i] = __ldcg(reinterpret_cast<const float4*>(workspace.accs + place * D) + four);
      }
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i)
        if (begin + i < rooms.count) result.add(pairs[i].x, pairs[i].y, accs[i]);
    }
    if (good) write_result(p, result, piece.row, head, four);
  }
  __syncthreads();  // all have read
  for (int index = 0; index < rooms.count; ++index) {
    const int64_t place = rooms[index] * p.num_heads + tile.head;  // the heads of a tile lie side by side
    for (int i = fresh_thread_index(); i < tile.heads * (D / 4); i += kDecodeThreads)
      reinterpret_cast<float4*>(workspace.accs + place * D)[i] = {};
    for (int i = fresh_thread_index(); i < 2 * tile.heads; i += kDecodeThreads)
      workspace.tops_totals[2 * place + i] = 0;
  }
}

// Leaves a piece of a row that was cut in memory, and merges them all if it is the last to come.
template <int D, class P>
__device__ __forceinline__ void leave_piece(const P& p, const SplitPlan& plan, const Workspace& workspace,
                                            BlockSums<D>& shared, bool bad) {
  const Piece& piece = shared.piece;
  const HeadTile tile = head_tile(p);
  const int64_t place = room_of(plan, workspace, piece) * p.num_heads + tile.head;
  for (int i = fresh_thread_index(); i < (bad ? 0 : tile.heads * (D / 4)); i += kDecodeThreads) {
    const int head = i / (D / 4);
    const Partial result = shared.merged(head, i % (D / 4));
    reinterpret_cast<float4*>(workspace.accs + place * D)[i] = {result.acc[0], result.acc[1], result.acc[2],
                                                                result.acc[3]};
    if (i % (D / 4) > 0) continue;
    workspace.tops_totals[2 * (place + head)] = result.top;
    workspace.tops_totals[2 * (place + head) + 1] = result.total;
  }
  __threadfence();
  __syncthreads();
  unsigned* const counter = workspace.counters + int64_t{piece.row} * gridDim.x + blockIdx.x;  // [B, grid's width]
  if (fresh_thread_index() == 0) {
    if (bad) atomicOr(counter, kBadPiece);
    const unsigned tokens = piece.end - piece.begin;
    shared.arrived = atomicAdd(counter, tokens) + tokens;
  }
  __syncthreads();
  const unsigned arrived = shared.arrived;
  if ((arrived & ~kBadPiece) != static_cast<unsigned>(piece.length - piece.first)) return;
  __threadfence();
  merge_pieces<D>(p, plan, workspace, piece, (arrived & kBadPiece) == 0);
  if (fresh_thread_index() == 0) *counter = 0;
}

// The block's sums are in `shared`, and its piece, whose end is returned. `bad`, in any thread: a table entry was no
// block. Begins and ends with a barrier.
template <int D, class P>
__device__ __forceinline__ Cut finish_piece(const P& p, const SplitPlan& plan, const Workspace& workspace,
                                            BlockSums<D>& shared, bool bad, unsigned* errors) {
  bad = __syncthreads_or(bad);
  if (bad && fresh_thread_index() == 0) report(errors, kBlockTables);
  const Piece& piece = shared.piece;
  if (piece.is_whole()) {
    const HeadTile tile = head_tile(p);
    for (int i = fresh_thread_index(); i < (bad ? 0 : tile.heads * (D / 4)); i += kDecodeThreads)
      write_result(p, shared.merged(i / (D / 4), i % (D / 4)), piece.row, tile.head + i / (D / 4), i % (D / 4));
  } else {
    leave_piece<D>(p, plan, workspace, shared, bad);
  }
  const Cut end{piece.row, piece.end};
  __syncthreads();
  return end;
}

}  // namespace kvpager::cuda::decode
