// Copies of swap_blocks by the copy engines: one batch (cudaMemcpyBatchAsync), or run by run where there is none.
#include "copy_runs.h"

#include "../device/launch.h"

namespace kvpager::cuda::moves {

void plan_copies(const char* source, char* target, const BlockShape& shape, int64_t element_bytes,
                 const Grid<const int64_t>& pairs, int64_t num_pairs, std::vector<CopyRun>& plan) {
  const int64_t run = shape.run();
  const size_t begin = plan.size();
  for (int64_t element = 0; element < shape.elements; element += run) {
    const BlockShape::Offsets at = shape.offsets(element);
    for (int64_t row = 0; row < num_pairs; ++row) {
      // In bounds: both blocks of a pair are in their pools; an element below `elements` lies within its block.
      const CopyRun next{source + (pairs.at(row, 0) * shape.source_stride + at.from) * element_bytes,
                         target + (pairs.at(row, 1) * shape.target_stride + at.to) * element_bytes,
                         static_cast<size_t>(run * element_bytes)};
      CopyRun* previous = plan.size() > begin ? &plan.back() : nullptr;
      if (previous && previous->from + previous->bytes == next.from && previous->to + previous->bytes == next.to)
        previous->bytes += next.bytes;
      else
        plan.push_back(next);
    }
  }
}

#if defined(KVPAGER_EMULATE)

void copy_runs(const std::vector<CopyRun>& plan, Stream) {
  for (const CopyRun& run : plan) memcpy(run.to, run.from, run.bytes);
}

#else

namespace {

// One batch for the copy engines; false where the run time, the driver or the stream has none.
bool copy_batch(const std::vector<CopyRun>& plan, Stream stream) {
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

void copy_runs(const std::vector<CopyRun>& plan, Stream stream) {
  if (copy_batch(plan, stream)) return;
  for (const CopyRun& run : plan)
    check_cuda(cudaMemcpyAsync(run.to, run.from, run.bytes, cudaMemcpyDefault, stream), "copying blocks");
}

#endif

}  // namespace kvpager::cuda::moves
