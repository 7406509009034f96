// Tensor cores: mma.m16n8k16 with f32 sums, and the moves of 8x8 matrices of 16-bit elements between lanes.
//
// Register layouts are those of the PTX manual. With group = lane / 4 and in_group = lane % 4, an 8x8 matrix has row
// `group`, columns 2 in_group and 2 in_group + 1 in the low and high half of a lane's register. A [16, 16] is four such
// matrices: a[0] rows 0-7 columns 0-7, a[1] rows 8-15, a[2] columns 8-15, a[3] both. B [16, 8] is kept by columns: b[0]
// has rows 2 in_group and the next of column `group`, b[1] those 8 further. C [16, 8]: c[0], c[1] row `group`, c[2],
// c[3] row group + 8; columns 2 in_group and the next. The hardware's order of additions is not specified; here it is
// that of k.
#pragma once
#include "../types.h"
#include "collectives.h"
#include "shared_memory.h"

namespace emulated {

struct MmaOperands {
  uint32_t a[4], b[2];
  float c[4];
};
struct MmaResult {
  float d[4];
};

template <class T>
float half_of(uint32_t word, int high) {
  return kvpager::widen(T{static_cast<uint16_t>(high ? word >> 16 : word)});
}

template <class T>
MmaResult combine_mma(const Brought<MmaOperands>& brought, int lane) {
  MmaResult result;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = brought[lane].c[i];
    for (int k = 0; k < 16; ++k) {
      const int in_group = k % 8 / 2;
      const uint32_t a = brought[row % 8 * 4 + in_group].a[row / 8 + k / 8 * 2];
      const uint32_t b = brought[column * 4 + in_group].b[k / 8];
      sum += half_of<T>(a, k % 2) * half_of<T>(b, k % 2);
    }
    result.d[i] = sum;
  }
  return result;
}

// c += A B; T: kvpager::bfloat16 or kvpager::float16.
template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, KVPAGER_HERE) {
  const MmaOperands operands{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  const MmaResult result =
      collective<MmaOperands, MmaResult, combine_mma<T>>("mma.m16n8k16", 0xffffffffu, operands, where);
  memcpy(c, result.d, sizeof c);
}

template <int matrices>
struct LoadedMatrices {
  uint32_t words[matrices];
};

template <int matrices, bool transposed>
LoadedMatrices<matrices> combine_ldmatrix(const Brought<const char*>& brought, int lane) {
  LoadedMatrices<matrices> loaded;
  for (int m = 0; m < matrices; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int along = lane % 4 * 2 + i, across = lane / 4;
      const int row = transposed ? along : across, column = transposed ? across : along;
      memcpy(&pair[i], brought[m * 8 + row] + 2 * column, 2);
    }
    loaded.words[m] = pair[0] | uint32_t{pair[1]} << 16;
  }
  return loaded;
}

// ldmatrix.sync.aligned.m8n8.x{1,2,4}[.trans].shared.b16: lanes 8 m to 8 m + 7 name the rows of matrix m.
template <int matrices, bool transposed = false>
void ldmatrix(uint32_t (&words)[matrices], const void* row, KVPAGER_HERE) {
  static_assert(matrices == 1 || matrices == 2 || matrices == 4);
  if (self().lane < matrices * 8) {
    check_shared("ldmatrix from what is no shared memory of the block", row, 16, where);
    check_aligned("ldmatrix from an address that is not aligned to 16 bytes", row, 16, where);
  }
  using Loaded = LoadedMatrices<matrices>;
  const Loaded loaded = collective<const char*, Loaded, combine_ldmatrix<matrices, transposed>>(
      "ldmatrix", 0xffffffffu, static_cast<const char*>(row), where);
  memcpy(words, loaded.words, sizeof words);
}

}  // namespace emulated
