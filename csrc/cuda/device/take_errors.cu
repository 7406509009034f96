// The CUDA op `take_errors`, which fetches the device's error word, and where that word lives.
#include <atomic>

#include "errors.cuh"
#include "scope.h"

namespace kvpager::cuda {

#if !defined(KVPAGER_EMULATE)

__device__ unsigned error_word;  // one per device, zero when the module is loaded

unsigned* error_word_of(int32_t device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<unsigned*> known[kMaxDevices] = {};
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("CUDA device index out of range");
  unsigned* address = known[device];
  if (address == nullptr) {
    check_cuda(cudaGetSymbolAddress(reinterpret_cast<void**>(&address), error_word), "finding the device error word");
    known[device] = address;
  }
  return address;
}

#endif

namespace {

// budget: kernel=take_errors_kernel registers=16 shared=0 spills=0
// Moves the word into `word` [1] int64 and clears it, in stream order. One thread.
__global__ void take_errors_kernel(unsigned* errors, int64_t* word) {
  if (threadIdx.x == 0) *word = atomicExch(errors, 0u);
}

void take_errors(Tensor word) {
  check_tensor("word", word, ScalarType::Long, word, {1});
  const LaunchScope scope(word);
  KVPAGER_LAUNCH(take_errors_kernel, dim3(1), dim3(32), scope.stream, scope.errors,
                 static_cast<int64_t*>(word.mutable_data_ptr()));
  check_launch();
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("take_errors", TORCH_BOX(&kvpager::cuda::take_errors));
}
