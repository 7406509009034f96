// What a launcher needs of the CUDA run time: the caller's device and stream, the device's error word, launch errors,
// grid sizes, and where ops are registered.
//
// csrc/testing/ compiles the launchers with a host compiler and the emulator, under another namespace of ops, so that
// checks, dispatch, launch geometry and kernels are all tested where there is no GPU.
#pragma once
#include "../checks.h"
#include "copy_plan.h"
#include "gpu.h"

#if defined(KVPAGER_EMULATE)

#define KVPAGER_NAMESPACE kvpager_emulated
#define KVPAGER_KEY CPU

namespace kvpager::cuda {

inline unsigned* emulated_error_word() {
  static unsigned word = 0;
  return &word;
}

// The emulated device is the CPU: no stream, one error word.
struct LaunchScope {
  explicit LaunchScope(const Tensor&) {}
  int stream = 0;
  unsigned* errors = emulated_error_word();
  void check() const {}
  int64_t multiprocessors() const { return 5; }
};

template <class K>
void allow_dynamic_shared(K*, int) {}

// A test that wants the pairs of a swap to lie on the device says so.
inline bool lies_on_device(const Tensor&) { return getenv("KVPAGER_EMULATE_ON_DEVICE") != nullptr; }
inline void* address_on_device(const char*, const Tensor&, void* address) { return address; }
inline void copy_runs(const std::vector<CopyRun>& plan, const LaunchScope&) {
  for (const CopyRun& run : plan) memcpy(run.to, run.from, run.bytes);
}

}  // namespace kvpager::cuda

#else

#define KVPAGER_NAMESPACE kvpager
#define KVPAGER_KEY CUDA

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

namespace kvpager::cuda {

// Looked up when first called, so that the library also loads beside a torch without CUDA.
inline cudaStream_t current_stream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* symbol = dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    if (void* handle = symbol ? nullptr : dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW))
      symbol = dlsym(handle, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(symbol);
  }();
  void* stream = nullptr;
  if (function == nullptr || function(device, &stream) != 0)
    throw std::runtime_error("this torch gives no CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

inline void check_cuda(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(status));
}

// The device's error word (errors.cuh); the device is current. In runtime.cu: a variable of the device belongs to one file.
unsigned* error_word_of(int32_t device);

// Makes the tensor's device current while it lives; gives its current stream and error word.
struct LaunchScope {
  explicit LaunchScope(const Tensor& tensor)
      : guard(tensor.get_device_index()), stream(current_stream(tensor.get_device_index())),
        errors(error_word_of(tensor.get_device_index())) {}
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
  unsigned* errors;
  void check() const { check_cuda(cudaGetLastError(), "launching a kvpager kernel"); }
  int64_t multiprocessors() const {
    int device = 0, count = 0;
    check_cuda(cudaGetDevice(&device), "finding the current device");
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
    return count;
  }
};

// More than 48 KB of dynamic shared memory have to be asked for, by kernel and device.
template <class K>
void allow_dynamic_shared(K* kernel, int bytes) {
  check_cuda(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "asking for shared memory");
}

inline bool lies_on_device(const Tensor& tensor) { return !tensor.is_cpu(); }
// Where the device finds memory of the tensor: pinned memory has an address there too. Other host memory is refused, for
// copies of it would wait.
void* address_on_device(const char* argument, const Tensor& tensor, void* address);
// Copies on the scope's stream, without waiting: see moves.cu.
void copy_runs(const std::vector<CopyRun>& plan, const LaunchScope& scope);

}  // namespace kvpager::cuda

#endif

namespace kvpager::cuda {

inline dim3 grid_of_size(const char* argument, int64_t x, int64_t y = 1) {
  if (x > 0x7fffffff) fail_argument(argument, "at most 2147483647 rows on CUDA", std::to_string(x));
  if (y > 65535) fail_argument(argument, "at most 65535 heads on CUDA", std::to_string(y));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace kvpager::cuda
