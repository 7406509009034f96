// The matrix product of prefill, for one instruction set: rows of A times a packed panel B, sums in registers.
//
// A is read one 32-bit word at a time and spread over a vector; a row of B is kVecs vectors of words. A word is a float
// or, with kPairs, two bfloat16 whose products are added in float (dot_bf16); float variables carry its bits. Each
// row's sums depend on that row alone and are added in the order of k, so a row gets the same bits whichever rows share
// its block.
#pragma once
#include "../vec/vec.h"

namespace kvpager::cpu::prefill::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/

constexpr int kRowBlock = kNumRegisters >= 32 ? 12 : 6;  // rows at once: 2 * kRowBlock sums and 3 more registers
constexpr int kPanel = 2 * kWidth;                       // columns at once

// What becomes of C [rows, columns]: replaced by A B * scale, or, with `shrink` [rows], C * shrink + A B.
struct Target {
  float* sums;
  int64_t stride;
  float scale;
  const float* shrink;
};

struct Operand {
  const float* words;
  int64_t stride;
};

template <bool kPairs>
KVPAGER_INLINE Vec multiply_add(Vec sums, float a, Vec b) {
#if defined(KVPAGER_HAS_BF16_DOT)
  if constexpr (kPairs) return dot_bf16(sums, (Bf16Vec)splat(a), (Bf16Vec)b);
#endif
  return fma(splat(a), b, sums);
}

template <bool kPairs, bool kGrow, int kRows, int kVecs>
KVPAGER_INLINE void multiply_block(Operand a, Operand b, int64_t depth, Target c) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kGrow) {
        sums[row][v] = mul(load(c.sums + row * c.stride + v * kWidth), splat(c.shrink[row]));
      } else {
        sums[row][v] = zero();
      }
    }
  for (int64_t k = 0; k < depth; ++k) {
    Vec columns[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) columns[v] = load(b.words + k * b.stride + v * kWidth);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const float word = a.words[row * a.stride + k];
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sums[row][v] = multiply_add<kPairs>(sums[row][v], word, columns[v]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v)
      store(c.sums + row * c.stride + v * kWidth, kGrow ? sums[row][v] : mul(sums[row][v], splat(c.scale)));
}

// `rows` rows of A, at most kRowBlock, times `depth` rows of B, kVecs vectors wide.
template <bool kPairs, bool kGrow, int kVecs>
void multiply(int64_t rows, Operand a, Operand b, int64_t depth, Target c) {
  const auto take = [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    multiply_block<kPairs, kGrow, kRows, kVecs>(a, b, depth, c);
    a.words += kRows * a.stride;
    c.sums += kRows * c.stride;
    if constexpr (kGrow) c.shrink += kRows;
    rows -= kRows;
  };
  if (rows == kRowBlock) take(std::integral_constant<int, kRowBlock>{});
  if constexpr (kRowBlock > 8)
    if (rows >= 8) take(std::integral_constant<int, 8>{});
  if (rows >= 4) take(std::integral_constant<int, 4>{});
  if (rows >= 2) take(std::integral_constant<int, 2>{});
  if (rows >= 1) take(std::integral_constant<int, 1>{});
}

}  // namespace kvpager::cpu::prefill::KVPAGER_ISA
