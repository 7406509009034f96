// What an op needs of torch and the CUDA run time: the device and stream of its tensors, and where ops are registered.
//
// csrc/testing/ compiles the ops with a host compiler and the emulator, under another namespace of ops, so that checks,
// dispatch, launch geometry and kernels are all tested where there is no GPU.
#pragma once
#include "../../tensors.h"
#include "launch.h"

#if defined(KVPAGER_EMULATE)

#define KVPAGER_NAMESPACE kvpager_emulated
#define KVPAGER_KEY CPU

namespace kvpager::cuda {

inline unsigned* emulated_error_word() {
  static unsigned word = 0;
  return &word;
}

struct LaunchScope : Launch {
  explicit LaunchScope(const Tensor&) : Launch{0, emulated_error_word()} {}
};

// A test that wants the pairs of a swap to lie on the device says so.
inline bool lies_on_device(const Tensor&) { return getenv("KVPAGER_EMULATE_ON_DEVICE") != nullptr; }
inline void* address_on_device(const char*, const Tensor&, void* address) { return address; }

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

// The device's error word; the device is current. In take_errors.cu: a variable of the device belongs to one file.
unsigned* error_word_of(int32_t device);

struct CurrentDevice {
  explicit CurrentDevice(const Tensor& tensor) : guard(tensor.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

// Makes the tensor's device current while it lives, and launches on its current stream.
struct LaunchScope : CurrentDevice, Launch {
  explicit LaunchScope(const Tensor& tensor)
      : CurrentDevice(tensor),
        Launch{current_stream(tensor.get_device_index()), error_word_of(tensor.get_device_index())} {}
};

inline bool lies_on_device(const Tensor& tensor) { return !tensor.is_cpu(); }

// Where the device finds memory of the tensor: pinned memory has an address there too. Other host memory is refused,
// since copies of it would wait.
inline void* address_on_device(const char* argument, const Tensor& tensor, void* address) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return address;
  void* mapped = nullptr;
  if (cudaHostGetDevicePointer(&mapped, address, 0) == cudaSuccess) return mapped;
  cudaGetLastError();  // forget it
  fail_argument(argument, "tensors on the device or in pinned memory", "pageable memory");
}

}  // namespace kvpager::cuda

#endif
