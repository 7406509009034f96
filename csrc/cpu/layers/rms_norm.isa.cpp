// RMSNorm with its residual: rows of vectors, widened, computed in float, rounded once.
//
// A row stays in the first-level cache between its passes. Each row is computed alone, so its bits depend on nothing
// beside it.
#include "../../layers/params.h"
#include "../vec/rows.h"

namespace kvpager::cpu::layers::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/

template <class T>
void norm_rows(const NormParams<T>& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    // In bounds: row < num_rows, offsets < width, as norm_params has checked.
    const T* x = p.x + row * p.x_stride;
    if (p.residual != nullptr) {
      T* residual = p.residual + row * p.residual_stride;
      for_vectors<T>(p.width, [&](int64_t at, auto take, auto put) __attribute__((always_inline)) {
        put(residual + at, add(take(residual + at), take(x + at)));
      });
      x = residual;
    }
    Vec squares = zero();
    for_vectors<T>(p.width, [&](int64_t at, auto take, auto) __attribute__((always_inline)) {
      const Vec numbers = take(x + at);
      squares = fma(numbers, numbers, squares);
    });
    const Vec factor = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(p.width) + p.eps));
    T* out = p.out + row * p.out_stride;
    for_vectors<T>(p.width, [&](int64_t at, auto take, auto put) __attribute__((always_inline)) {
      put(out + at, mul(mul(take(x + at), factor), take(p.weight + at)));
    });
  }
}

template void norm_rows(const NormParams<float>&, int64_t, int64_t);
template void norm_rows(const NormParams<float16>&, int64_t, int64_t);
template void norm_rows(const NormParams<bfloat16>&, int64_t, int64_t);

}  // namespace kvpager::cpu::layers::KVPAGER_ISA
