// Launching a kernel, free of any framework: its stream, the device's error word, grid sizes, launch errors.
#pragma once
#include "../../errors.h"
#include "gpu.h"

namespace kvpager::cuda {

#if defined(KVPAGER_EMULATE)

// The emulated device is the CPU.
inline void check_launch() {}
inline int64_t num_multiprocessors() { return 5; }
template <class K>
void allow_dynamic_shared(K*, int) {}

#else

inline void check_cuda(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(status));
}

inline void check_launch() { check_cuda(cudaGetLastError(), "launching a kvpager kernel"); }

// Of the current device.
inline int64_t num_multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "finding the current device");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
  return count;
}

// More than 48 KB of dynamic shared memory have to be asked for, by kernel and device.
template <class K>
void allow_dynamic_shared(K* kernel, int bytes) {
  check_cuda(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "asking for shared memory");
}

#endif

// Where kernels go, on the current device.
struct Launch {
  Stream stream;
  unsigned* errors;  // the device's error word (errors.cuh)
};

inline dim3 grid_of_size(const char* argument, int64_t x, int64_t y = 1) {
  if (x > 0x7fffffff) fail_argument(argument, "at most 2147483647 rows on CUDA", std::to_string(x));
  if (y > 65535) fail_argument(argument, "at most 65535 heads on CUDA", std::to_string(y));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

inline int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

}  // namespace kvpager::cuda
