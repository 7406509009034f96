// The CPU op `silu_mul`: spreads rows over threads. float64 is computed here, plainly.
#include "../../layers/checks.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::layers {

// Rows begin ... end - 1.
KVPAGER_DECLARE_PER_ISA(template <class T> void silu_mul_rows(const GateParams<T>& params, int64_t begin, int64_t end))

namespace {

void silu_mul_plainly(const GateParams<double>& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t at = 0; at < p.width; ++at) {
      const double x = p.gate[row * p.gate_stride + at];
      p.out[row * p.out_stride + at] = x / (1 + std::exp(-x)) * p.up[row * p.up_stride + at];
    }
}

void silu_mul(Tensor out, Tensor gate, Tensor up) {
  with_number_type("gate", gate.scalar_type(), [&](auto number) {
    using T = decltype(number);
    const GateParams<T> p = gate_params<T>(out, gate, up);
    torch::stable::parallel_for(0, p.num_rows, grain_of(p.width), [&](int64_t begin, int64_t end) {
      if constexpr (std::is_same_v<T, double>) {
        silu_mul_plainly(p, begin, end);
      } else {
        KVPAGER_ACTIVE(silu_mul_rows<T>)(p, begin, end);
      }
    });
  });
}

}  // namespace
}  // namespace kvpager::cpu::layers

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("silu_mul", TORCH_BOX(&kvpager::cpu::layers::silu_mul));
}
