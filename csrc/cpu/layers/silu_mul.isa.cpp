// SiLU times a second row: rows of vectors, widened, computed in float, rounded once.
#include "../../layers/params.h"
#include "../vec/rows.h"

namespace kvpager::cpu::layers::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/

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

template void silu_mul_rows(const GateParams<float>&, int64_t, int64_t);
template void silu_mul_rows(const GateParams<float16>&, int64_t, int64_t);
template void silu_mul_rows(const GateParams<bfloat16>&, int64_t, int64_t);

}  // namespace kvpager::cpu::layers::KVPAGER_ISA
