// Rows times the rows of a weight matrix, both as they lie: no packing, no second copy of the weights.
//
// A tile is some rows of x times four rows of the weights. Each of its dot products has a vector of sums, to which the
// products along the row are added one vector after the other; at the end its lanes are added up. So the bits of an
// output depend on its row and its weights alone: not on the rows beside it, nor on the number of threads. In a tile
// each vector of weights serves all rows of x, and each vector of x four outputs. The weights of a part stay in the
// cache for all rows of x. For the first rows they come from memory, so the weights of the next tile are prefetched.
#include "../../layers/params.h"
#include "../vec/transpose.h"

namespace kvpager::cpu::layers::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/
namespace {

constexpr int kOutputs = 4;
constexpr int kRows = kNumRegisters >= 32 ? 6 : 2;

// One step along the rows: kStep elements of each, multiplied and added to a vector of sums.
template <class T>
struct Steps {
  static constexpr int kStep = kWidth;
  using Numbers = Vec;
  static KVPAGER_INLINE Vec take(const T* source) { return load(source); }
  static KVPAGER_INLINE Vec take(const T* source, int64_t count) { return load_partial(source, count); }
  static KVPAGER_INLINE Vec multiply_add(Vec sums, Vec a, Vec b) { return fma(a, b, sums); }
};

#if defined(KVPAGER_HAS_BF16_DOT)
template <>
struct Steps<bfloat16> {
  static constexpr int kStep = 2 * kWidth;
  using Numbers = Bf16Vec;
  static KVPAGER_INLINE Bf16Vec take(const bfloat16* source) { return (Bf16Vec)load16(source); }
  static KVPAGER_INLINE Bf16Vec take(const bfloat16* source, int64_t count) {
    return (Bf16Vec)load16_partial(source, count);
  }
  static KVPAGER_INLINE Vec multiply_add(Vec sums, Bf16Vec a, Bf16Vec b) { return dot_bf16(sums, a, b); }
};
#endif

template <class T>
struct Tile {
  const T* x;  // its first row
  int64_t x_stride;
  const T* weights[kOutputs];  // rows; where the matrix ends, its last one again
  const T* ahead;              // what the next tile reads: kOutputs rows of `weight_stride`
  int64_t weight_stride, depth;
};

template <class T, int kCount, bool kPrefetch>
KVPAGER_INLINE void multiply_tile(const Tile<T>& tile, float (*totals)[kOutputs]) {
  using Step = Steps<T>;
  Vec sums[kCount][kOutputs];
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 4
    for (int n = 0; n < kOutputs; ++n) sums[row][n] = zero();
  const auto add = [&](auto take) __attribute__((always_inline)) {
    typename Step::Numbers numbers[kCount];
#pragma GCC unroll 8
    for (int row = 0; row < kCount; ++row) numbers[row] = take(tile.x + row * tile.x_stride);
#pragma GCC unroll 4
    for (int n = 0; n < kOutputs; ++n) {
      const auto weights = take(tile.weights[n]);
#pragma GCC unroll 8
      for (int row = 0; row < kCount; ++row) sums[row][n] = Step::multiply_add(sums[row][n], numbers[row], weights);
    }
  };
  int64_t k = 0;
  for (; k + Step::kStep <= tile.depth; k += Step::kStep) {
    add([k](const T* row) __attribute__((always_inline)) { return Step::take(row + k); });
    if constexpr (kPrefetch)
#pragma GCC unroll 4
      for (int n = 0; n < kOutputs; ++n) __builtin_prefetch(tile.ahead + n * tile.weight_stride + k, 0, 2);
  }
  if (k < tile.depth)
    add([k, &tile](const T* row) __attribute__((always_inline)) { return Step::take(row + k, tile.depth - k); });
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row)
    reduce_add4(sums[row][0], sums[row][1], sums[row][2], sums[row][3], totals[row]);
}

template <class T, bool kPrefetch>
void multiply_rows(const Tile<T>& tile, int64_t count, float (*totals)[kOutputs]) {
  switch (count) {
    case 1: return multiply_tile<T, 1, kPrefetch>(tile, totals);
    case 2: return multiply_tile<T, 2, kPrefetch>(tile, totals);
    default: break;
  }
  if constexpr (kRows > 2) switch (count) {
      case 3: return multiply_tile<T, 3, kPrefetch>(tile, totals);
      case 4: return multiply_tile<T, 4, kPrefetch>(tile, totals);
      case 5: return multiply_tile<T, 5, kPrefetch>(tile, totals);
      default: return multiply_tile<T, 6, kPrefetch>(tile, totals);
    }
}

}  // namespace

template <class T>
void linear_part(const LinearParams<T>& p, const LinearPart& part) {
  float totals[kRows][kOutputs];
  for (int64_t row = 0; row < p.num_rows; row += kRows) {
    const int64_t num_rows = least(kRows, p.num_rows - row);
    for (int64_t output = part.first_output; output < part.end_output; output += kOutputs) {
      const int64_t num_outputs = least(kOutputs, part.end_output - output);
      // In bounds: rows of x below num_rows, of the weights below num_outputs. What is asked for ahead may lie behind
      // the matrix; a prefetch reads nothing.
      Tile<T> tile{p.x + row * p.x_stride, p.x_stride, {}, {}, p.weight_stride, p.depth};
      for (int64_t n = 0; n < kOutputs; ++n)
        tile.weights[n] = p.weight + (output + least(n, num_outputs - 1)) * p.weight_stride;
      tile.ahead = tile.weights[0] + kOutputs * p.weight_stride;
      row == 0 ? multiply_rows<T, true>(tile, num_rows, totals) : multiply_rows<T, false>(tile, num_rows, totals);
      for (int64_t m = 0; m < num_rows; ++m)
        for (int64_t n = 0; n < num_outputs; ++n) {
          const float bias = p.bias == nullptr ? 0.0f : widen(p.bias[output + n]);
          p.out[(row + m) * p.out_stride + output + n] = narrow<T>(totals[m][n] + bias);
        }
    }
  }
}

template void linear_part(const LinearParams<float>&, const LinearPart&);
template void linear_part(const LinearParams<float16>&, const LinearPart&);
template void linear_part(const LinearParams<bfloat16>&, const LinearPart&);

}  // namespace kvpager::cpu::layers::KVPAGER_ISA
