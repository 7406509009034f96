// The device error word: where it lives, and the op that fetches it. And the copies of swap_blocks.
#include "runtime.h"

#include <atomic>

#include "errors.cuh"

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

void* address_on_device(const char* argument, const Tensor& tensor, void* address) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return address;
  void* mapped = nullptr;
  if (cudaHostGetDevicePointer(&mapped, address, 0) == cudaSuccess) return mapped;
  cudaGetLastError();  // forget it
  fail_argument(argument, "tensors on the device or in pinned memory", "pageable memory");
}

namespace {

// One batch for the copy engines; false where the run time, the driver or the stream has none.
bool copy_batch(const std::vector<CopyRun>& plan, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream == nullptr || stream == cudaStreamLegacy || cudaStreamIsCapturing(stream, &capture) != cudaSuccess ||
      capture != cudaStreamCaptureStatusNone)
    return false;
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
  for (const CopyRun& run : plan) {
    to.push_back(run.to);
    from.push_back(run.from);
    bytes.push_back(run.bytes);
  }
  cudaMemcpyAttributes attributes{};  // of all copies
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t status =
      cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), plan.size(), &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t status = cudaMemcpyBatchAsync(to.data(), const_cast<void**>(from.data()), bytes.data(), plan.size(),
                                                  &attributes, &first, 1, &failed, stream);
#endif
  if (status == cudaSuccess) return true;
  cudaGetLastError();  // forget it
  if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver)
    check_cuda(status, "copying a batch of blocks");
#endif
  return false;
}

}  // namespace

void copy_runs(const std::vector<CopyRun>& plan, const LaunchScope& scope) {
  if (copy_batch(plan, scope.stream)) return;
  for (const CopyRun& run : plan)
    check_cuda(cudaMemcpyAsync(run.to, run.from, run.bytes, cudaMemcpyDefault, scope.stream), "copying blocks");
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
  scope.check();
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("take_errors", TORCH_BOX(&kvpager::cuda::take_errors));
}
