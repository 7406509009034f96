// What the machine can do, for benches/ops.py: reading memory, multiplying and adding; and an op that does nothing.
//
// Compiled by the bench for the machine at hand. Threads are Python's: ctypes lets the lock go while one of these runs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

typedef float Vec __attribute__((vector_size(sizeof(float) * 16)));

#define EXPORT extern "C" __attribute__((visibility("default")))

// Reads `bytes` (a multiple of 512) once, front to back; the result only keeps the compiler from leaving it out.
EXPORT float machine_read(const char* data, int64_t bytes) {
  Vec sums[8] = {};
  for (int64_t at = 0; at + 512 <= bytes; at += 512)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] += *reinterpret_cast<const Vec*>(data + at + 64 * i);
  float total = 0;
  for (const Vec& sum : sums)
    for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  return total;
}

// 16 * 12 * rounds independent multiply-adds.
EXPORT float machine_fma(int64_t rounds) {
  Vec sums[12], factor, term;
  for (int lane = 0; lane < 16; ++lane) factor[lane] = 0.999f, term[lane] = 0.001f;
  for (Vec& sum : sums) sum = term;
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = sums[i] * factor + term;
  float total = 0;
  for (const Vec& sum : sums)
    for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  return total;
}

using torch::stable::Tensor;

namespace {
void nothing(Tensor, std::optional<Tensor>, Tensor, Tensor, Tensor, Tensor, Tensor, double, int64_t, int64_t, double,
             std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, int64_t, std::optional<Tensor>,
             std::optional<Tensor>) {}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvpager_bench, CPU, library) { library.impl("nothing", TORCH_BOX(&nothing)); }
