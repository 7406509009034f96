// The CPU op `linear`: cuts the outputs into parts and spreads them over threads. float64 is computed here, plainly.
#include <algorithm>

#include "../../layers/checks.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::layers {

KVPAGER_DECLARE_PER_ISA(template <class T> void linear_part(const LinearParams<T>& params, const LinearPart& part))

namespace {

constexpr int64_t kPartOutputs = 64;  // rows of the weights, which stay in the second-level cache for all rows of x
constexpr int64_t kGrainProducts = 1 << 16;  // fewer are not worth waking a thread for

// Four outputs at once, since one sum alone waits for itself. In bounds: see linear.isa.cpp.
void linear_plainly(const LinearParams<double>& p, const LinearPart& part) {
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const double* x = p.x + row * p.x_stride;
    for (int64_t output = part.first_output; output < part.end_output; output += 4) {
      const int64_t count = std::min<int64_t>(4, part.end_output - output);
      const double* weights[4];
      for (int64_t n = 0; n < 4; ++n) weights[n] = p.weight + (output + std::min(n, count - 1)) * p.weight_stride;
      double sums[4] = {};
      for (int64_t k = 0; k < p.depth; ++k)
        for (int64_t n = 0; n < 4; ++n) sums[n] += x[k] * weights[n][k];
      for (int64_t n = 0; n < count; ++n)
        p.out[row * p.out_stride + output + n] = sums[n] + (p.bias == nullptr ? 0 : p.bias[output + n]);
    }
  }
}

template <class T>
void multiply(const LinearParams<T>& p) {
  const int64_t products = std::max<int64_t>(1, kPartOutputs * p.depth * p.num_rows);
  const int64_t num_parts = (p.num_outputs + kPartOutputs - 1) / kPartOutputs;
  torch::stable::parallel_for(0, num_parts, std::max<int64_t>(1, kGrainProducts / products),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t n = begin; n < end; ++n) {
                                  const int64_t first = n * kPartOutputs;
                                  const LinearPart part{first, std::min(first + kPartOutputs, p.num_outputs)};
                                  if constexpr (std::is_same_v<T, double>) {
                                    linear_plainly(p, part);
                                  } else {
                                    KVPAGER_ACTIVE(linear_part<T>)(p, part);
                                  }
                                }
                              });
}

void linear(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  with_number_type("x", x.scalar_type(),
                   [&](auto number) { multiply(linear_params<decltype(number)>(out, x, weight, bias)); });
}

}  // namespace
}  // namespace kvpager::cpu::layers

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) { library.impl("linear", TORCH_BOX(&kvpager::cpu::layers::linear)); }
