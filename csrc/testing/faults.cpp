// Small kernels, each right and with a fault planted, to see that the emulator catches it: `faults NAME [fault]`.
//
// Prints "right" or "wrong" (the result was not the expected one) and exits with 0 or 1; what the emulator or a
// sanitizer finds ends the process with its report. Names are those of kCases. See tests/ops/test_emulator.py.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "emulated_gpu.h"

namespace {

using namespace emulated;
using kvpager::bfloat16;
using kvpager::float16;

constexpr uint32_t kAll = 0xffffffffu;

// --- barriers and shuffles

// grid (1), block 128: the sum of 128 numbers, a warp's part through shared memory.
__global__ void sum_kernel(const int* numbers, int* sum, bool fault) {
  KVPAGER_SHARED(int[4], parts);
  int part = numbers[threadIdx.x];
  for (int width = 16; width > 0; width /= 2) part += __shfl_xor_sync(kAll, part, width);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  if (!fault) __syncthreads();
  if (threadIdx.x == 0) *sum = parts[0] + parts[1] + parts[2] + parts[3];
}

bool missing_barrier(bool fault) {
  std::vector<int> numbers(128, 1);
  int sum = 0;
  KVPAGER_LAUNCH(sum_kernel, dim3(1), dim3(128), 0, numbers.data(), &sum, fault);
  return sum == 128;
}

// Half a warp shuffles over itself; the fault: it names the whole warp.
__global__ void shuffle_kernel(int* out, bool fault) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 16) out[lane] = __shfl_down_sync(fault ? kAll : 0xffffu, lane, 1, 16);
  __syncthreads();
}

bool divergent_shuffle(bool fault) {
  int out[16];
  KVPAGER_LAUNCH(shuffle_kernel, dim3(1), dim3(32), 0, out, fault);
  return out[3] == 4 && out[15] == 15;
}

// Two halves of a warp in different collectives, each over its own lanes; the fault: over the whole warp.
__global__ void two_collectives_kernel(int* out, bool fault) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 16)
    out[lane] = static_cast<int>(__ballot_sync(fault ? kAll : 0x0000ffffu, lane % 2));
  else
    out[lane] = __reduce_max_sync(fault ? kAll : 0xffff0000u, lane);
}

bool mixed_collectives(bool fault) {
  int out[32];
  KVPAGER_LAUNCH(two_collectives_kernel, dim3(1), dim3(32), 0, out, fault);
  return out[0] == 0xaaaa && out[31] == 31;
}

// A warp that returns needs no barrier; the fault: one waits for a phase that never ends.
__global__ void barrier_in_a_branch_kernel(bool fault) {
  KVPAGER_SHARED(uint64_t, never);
  if (threadIdx.x == 0) mbarrier_init(&never, 1);
  __syncthreads();
  if (threadIdx.x >= 32) {
    if (fault) mbarrier_wait(&never, 0);
    return;
  }
  __syncthreads();
}

bool divergent_barrier(bool fault) {
  KVPAGER_LAUNCH(barrier_in_a_branch_kernel, dim3(1), dim3(64), 0, fault);
  return true;
}

// grid (8), block 64: the last block to come sums what all have written; the fault: a block counts itself in before
// its other warp has written.
__global__ void last_block_kernel(int* parts, unsigned* arrived, int* sum, bool fault) {
  KVPAGER_SHARED(unsigned, ticket);
  if (!fault) parts[blockIdx.x * 64 + threadIdx.x] = 1;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(arrived, 1u);
  __syncthreads();
  if (fault) parts[blockIdx.x * 64 + threadIdx.x] = 1;
  if (ticket != gridDim.x - 1 || threadIdx.x != 0) return;
  int total = 0;
  for (unsigned i = 0; i < gridDim.x * 64; ++i) total += parts[i];
  *sum = total;
}

bool early_arrival(bool fault) {
  std::vector<int> parts(8 * 64, 0);
  unsigned arrived = 0;
  int sum = 0;
  KVPAGER_LAUNCH(last_block_kernel, dim3(8), dim3(64), 0, parts.data(), &arrived, &sum, fault);
  return sum == 8 * 64;
}

// --- tensor cores

template <class T>
uint32_t pair_of(float low, float high) {
  return kvpager::narrow<T>(low).bits | uint32_t{kvpager::narrow<T>(high).bits} << 16;
}
float a_of(int row, int k) { return static_cast<float>(row * 3 - k) / 4; }
float b_of(int k, int column) { return static_cast<float>(k % 5 + 2 * column); }

// block 32: C = A B; the fault: the second and third matrix of A are swapped.
template <class T>
__global__ void mma_kernel(float* out, bool fault) {
  const int lane = static_cast<int>(threadIdx.x), row = lane / 4, k = lane % 4 * 2;
  const auto a_at = [&](int down, int right) {
    return pair_of<T>(a_of(row + down, k + right), a_of(row + down, k + right + 1));
  };
  const uint32_t a[4] = {a_at(0, 0), fault ? a_at(0, 8) : a_at(8, 0), fault ? a_at(8, 0) : a_at(0, 8), a_at(8, 8)};
  const uint32_t b0 = pair_of<T>(b_of(k, row), b_of(k + 1, row)), b1 = pair_of<T>(b_of(k + 8, row), b_of(k + 9, row));
  float c[4] = {};
  mma_m16n8k16<T>(c, a, b0, b1);
  for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

template <class T>
bool wrong_fragment(bool fault) {
  float out[16 * 8];
  KVPAGER_LAUNCH(mma_kernel<T>, dim3(1), dim3(32), 0, out, fault);
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float wanted = 0;
      for (int k = 0; k < 16; ++k) wanted += a_of(row, k) * b_of(k, column);
      if (out[row * 8 + column] != wanted) return false;
    }
  return true;
}

// block 32: an 8x8 matrix and its transpose by ldmatrix; the fault: not transposed.
__global__ void transpose_kernel(const uint16_t* matrix, uint32_t* straight, uint32_t* transposed, bool fault) {
  KVPAGER_SHARED(uint4[8], rows);
  const int lane = static_cast<int>(threadIdx.x);
  memcpy(reinterpret_cast<uint32_t*>(rows) + lane, matrix + 2 * lane, 4);
  __syncwarp();
  uint32_t as_it_is[1], turned[1];
  ldmatrix<1>(as_it_is, &rows[lane % 8]);
  ldmatrix<1, true>(turned, &rows[lane % 8]);
  straight[lane] = as_it_is[0];
  transposed[lane] = fault ? as_it_is[0] : turned[0];
}

bool not_transposed(bool fault) {
  uint16_t matrix[64], wanted[64];
  for (int i = 0; i < 64; ++i) matrix[i] = wanted[i % 8 * 8 + i / 8] = static_cast<uint16_t>(i * 7);
  uint32_t straight[32], transposed[32];
  KVPAGER_LAUNCH(transpose_kernel, dim3(1), dim3(32), 0, matrix, straight, transposed, fault);
  return memcmp(straight, matrix, sizeof matrix) == 0 && memcmp(transposed, wanted, sizeof wanted) == 0;
}

// --- asynchronous copies: block 64, a ring of 2 stages of 64 numbers each, of 6 runs

constexpr int kRuns = 6, kStages = 2, kRun = 64;
enum RingFault { kNone, kNoWait, kEarlyRefill };

struct Ring {
  float stages[kStages][kRun];
  uint64_t full[kStages];
};

__global__ void bulk_ring_kernel(const float* from, float* to, RingFault fault) {
  KVPAGER_SHARED(Ring, ring);
  const int thread = static_cast<int>(threadIdx.x);
  const auto issue = [&](int run) {
    const int stage = run % kStages;
    mbarrier_arrive_expect(&ring.full[stage], sizeof ring.stages[0]);
    bulk_copy(ring.stages[stage], from + run * kRun, sizeof ring.stages[0], &ring.full[stage]);
  };
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(&ring.full[stage], 1);
    for (int run = 0; run < kStages; ++run) issue(run);
  }
  __syncthreads();
  for (int run = 0; run < kRuns; ++run) {
    if (fault != kNoWait || run == kRuns - 1)
      mbarrier_wait(&ring.full[run % kStages], static_cast<unsigned>(run / kStages));
    to[run * kRun + thread] = ring.stages[run % kStages][thread];
    if (fault != kEarlyRefill) __syncthreads();  // all have read before it is refilled
    if (thread == 0 && run + kStages < kRuns) issue(run + kStages);
  }
}

__global__ void grouped_ring_kernel(const float* from, float* to, RingFault fault) {
  KVPAGER_DYNAMIC_SHARED(float, stages);  // [kStages, kRun]
  const int thread = static_cast<int>(threadIdx.x);
  const auto issue = [&](int run) {
    if (thread < kRun / 4 && run < kRuns)
      cp_async_16(stages + run % kStages * kRun + thread * 4, from + run * kRun + thread * 4);
    cp_async_commit();
  };
  for (int run = 0; run < kStages; ++run) issue(run);
  for (int run = 0; run < kRuns; ++run) {
    if (fault != kNoWait) cp_async_wait<kStages - 1>();
    __syncthreads();
    to[run * kRun + thread] = stages[run % kStages * kRun + thread];
    if (fault != kEarlyRefill) __syncthreads();
    issue(run + kStages);
  }
}

template <bool bulk>
bool ring(RingFault fault) {
  alignas(16) float from[kRuns * kRun];
  float to[kRuns * kRun] = {};
  for (int i = 0; i < kRuns * kRun; ++i) from[i] = static_cast<float>(i);
  if (bulk)
    KVPAGER_LAUNCH(bulk_ring_kernel, dim3(1), dim3(64), 0, from, to, fault);
  else
    KVPAGER_LAUNCH_SHARED(grouped_ring_kernel, dim3(1), dim3(64), kStages * kRun * 4, 0, from, to, fault);
  return memcmp(from, to, sizeof to) == 0;
}

// --- addresses

__global__ void table_kernel(const int* table, const float* pool, float* out) {
  out[threadIdx.x] = pool[table[threadIdx.x / 4] * 4 + threadIdx.x % 4];
}

bool block_out_of_range(bool fault) {
  const std::unique_ptr<float[]> pool(new float[8 * 4]());
  const int table[8] = {3, 1, 7, fault ? 8 : 2, 0, 4, 5, 6};
  float out[32];
  KVPAGER_LAUNCH(table_kernel, dim3(1), dim3(32), 0, table, pool.get(), out);
  return true;
}

__global__ void misaligned_kernel(const float* from, bool fault) {
  KVPAGER_DYNAMIC_SHARED(float, to);
  cp_async_16(to + threadIdx.x * 4, from + threadIdx.x * 4 + (fault ? 1 : 0));
  cp_async_commit();
  cp_async_wait<0>();
}

bool misaligned_copy(bool fault) {
  alignas(16) float from[32 * 4 + 1] = {};
  KVPAGER_LAUNCH_SHARED(misaligned_kernel, dim3(1), dim3(32), 32 * 16, 0, from, fault);
  return true;
}

__global__ void shared_kernel(bool fault) {
  KVPAGER_SHARED(float[32], numbers);
  float* volatile at = numbers;
  at[threadIdx.x + (fault ? 1 : 0)] = 1;
}

bool past_shared_memory(bool fault) {
  KVPAGER_LAUNCH(shared_kernel, dim3(1), dim3(32), 0, fault);
  return true;
}

struct Case {
  const char* name;
  bool (*run)(bool fault);
};
const Case kCases[] = {
    {"missing_barrier", missing_barrier},
    {"divergent_shuffle", divergent_shuffle},
    {"mixed_collectives", mixed_collectives},
    {"divergent_barrier", divergent_barrier},
    {"early_arrival", early_arrival},
    {"wrong_fragment_bf16", wrong_fragment<bfloat16>},
    {"wrong_fragment_f16", wrong_fragment<float16>},
    {"not_transposed", not_transposed},
    {"bulk_without_wait", [](bool fault) { return ring<true>(fault ? kNoWait : kNone); }},
    {"bulk_refilled_early", [](bool fault) { return ring<true>(fault ? kEarlyRefill : kNone); }},
    {"cp_async_without_wait", [](bool fault) { return ring<false>(fault ? kNoWait : kNone); }},
    {"cp_async_refilled_early", [](bool fault) { return ring<false>(fault ? kEarlyRefill : kNone); }},
    {"block_out_of_range", block_out_of_range},
    {"misaligned_copy", misaligned_copy},
    {"past_shared_memory", past_shared_memory},
};

}  // namespace

int main(int count, char** arguments) {
  for (const Case& one : kCases)
    if (count > 1 && strcmp(one.name, arguments[1]) == 0) {
      const bool right = one.run(count > 2);
      puts(right ? "right" : "wrong");
      return right ? 0 : 1;
    }
  for (const Case& one : kCases) puts(one.name);
  return 2;
}
