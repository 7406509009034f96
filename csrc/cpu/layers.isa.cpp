// RMSNorm with its residual, and SiLU times a second row: rows of vectors, widened, computed in float, rounded once.
//
// A row stays in the first-level cache between its passes. Each row is computed alone, so its bits depend on nothing
// beside it.
#include "layers.h"
#include "vec/transpose.h"

namespace kvpager::cpu::KVPAGER_ISA {
namespace {

// Calls `use(at, load, store)` for every vector of a row, the last one perhaps partial.
template <class T, class F>
KVPAGER_INLINE void for_vectors(int64_t width, const F& use) {
  int64_t at = 0;
  for (; at + kWidth <= width; at += kWidth)
    use(
        at, [](const T* source) __attribute__((always_inline)) { return load(source); },
        [](T* target, Vec numbers) __attribute__((always_inline)) { store_narrow(target, numbers); });
  if (const int64_t count = width - at; count > 0)
    use(
        at, [count](const T* source) __attribute__((always_inline)) { return load_partial(source, count); },
        [count](T* target, Vec numbers)
            __attribute__((always_inline)) { store_narrow_partial(target, numbers, count); });
}

}  // namespace

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

template <class T>
void silu_mul_rows(const GateParams<T>& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    // In bounds: row < num_rows, offsets < width, as gate_params has checked.
    const T *gate = p.gate + row * p.gate_stride, *up = p.up + row * p.up_stride;
    T* out = p.out + row * p.out_stride;
    for_vectors<T>(p.width, [&](int64_t at, auto take, auto put) __attribute__((always_inline)) {
      const Vec x = take(gate + at);
      const Vec falling = exp(clamp_high(sub(zero(), x), 88.0f));  // e^-x; beyond it the result is 0 all the same
      put(out + at, mul(div(x, add(splat(1.0f), falling)), take(up + at)));
    });
  }
}

#define KVPAGER_INSTANTIATE(T)                                     \
  template void norm_rows(const NormParams<T>&, int64_t, int64_t); \
  template void silu_mul_rows(const GateParams<T>&, int64_t, int64_t);
KVPAGER_INSTANTIATE(float)
KVPAGER_INSTANTIATE(float16)
KVPAGER_INSTANTIATE(bfloat16)

}  // namespace kvpager::cpu::KVPAGER_ISA
