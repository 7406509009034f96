// What a launcher needs of the CUDA run time: the caller's device and stream, the device's error word, launch errors.
#pragma once
#include "../checks.h"
#include "gpu.h"

#if defined(KVPAGER_EMULATE)

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
};

}  // namespace kvpager::cuda

#else

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <atomic>

namespace kvpager::cuda {

__device__ unsigned error_word;  // one per device, zero when the module is loaded

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

inline unsigned* error_word_of(int32_t device) {
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

// Makes the tensor's device current while it lives; gives its current stream and error word.
struct LaunchScope {
  explicit LaunchScope(const Tensor& tensor)
      : guard(tensor.get_device_index()), stream(current_stream(tensor.get_device_index())),
        errors(error_word_of(tensor.get_device_index())) {}
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
  unsigned* errors;
  void check() const { check_cuda(cudaGetLastError(), "launching a kvpager kernel"); }
};

}  // namespace kvpager::cuda

#endif
