// The CUDA entry points of the ops that move rows as they are: copy_blocks, swap_blocks, update_tables, gather_kv.
//
// swap_blocks copies between a device and pinned host memory (or within either) on the caller's stream, and never waits:
//  * pairs on the host: a plan of merged runs (copy_plan.h), given to the copy engines as one batch
//    (cudaMemcpyBatchAsync). Where that is not to be had (an older CUDA, the legacy default stream, a graph that is being
//    captured, which then holds these pairs for good), run by run.
//  * pairs on the device: the kernel of copy_blocks, which reads and writes the host's memory through its mapping. That
//    can be captured in a graph and replayed with new pairs; it takes SMs from whatever else runs.
#include <algorithm>

#include "../pair_checks.h"
#include "copy_plan.h"
#include "gather.cuh"
#include "moves.cuh"
#include "runtime.h"

namespace kvpager::cuda {
namespace {

// The widest unit of blocks of `shape` between two memories, and their shape in it.
int64_t unit_of(const SwapShape& shape, const void* source, const void* target, int64_t element_bytes) {
  Alignment alignment;
  alignment.address(source).address(target);
  alignment.offset(shape.source_stride * element_bytes).offset(shape.target_stride * element_bytes);
  const int64_t last = shape.num_inner - 1;
  const bool packed = last >= 0 && shape.from[last] == 1 && shape.to[last] == 1;
  for (int64_t dim = 0; dim < (packed ? last : shape.num_inner); ++dim)
    alignment.offset(shape.from[dim] * element_bytes).offset(shape.to[dim] * element_bytes);
  if (!packed) return std::min(alignment.unit_bytes(), element_bytes);
  return alignment.offset(shape.sizes[last] * element_bytes).unit_bytes();
}

MoveShape shape_in_units(const SwapShape& shape, int64_t element_bytes, int64_t unit) {
  const int64_t last = shape.num_inner - 1, num_units = shape.elements * element_bytes / unit;
  if (num_units > INT32_MAX / 2) fail_argument("caches", "blocks of at most 1073741823 units on CUDA", "more");
  MoveShape result{shape.num_sources,
                   shape.num_targets,
                   shape.source_stride * element_bytes / unit,
                   shape.target_stride * element_bytes / unit,
                   static_cast<int>(shape.num_inner),
                   static_cast<uint32_t>(num_units),
                   {},
                   {},
                   {}};
  for (int64_t dim = 0; dim <= last; ++dim) {
    result.sizes[dim] = static_cast<uint32_t>(shape.sizes[dim]);
    result.from[dim] = shape.from[dim] * element_bytes / unit;
    result.to[dim] = shape.to[dim] * element_bytes / unit;
  }
  if (last >= 0 && shape.from[last] == 1 && shape.to[last] == 1) {  // the unit spans elements
    result.sizes[last] = static_cast<uint32_t>(shape.sizes[last] * element_bytes / unit);
    result.from[last] = result.to[last] = 1;
  }
  return result;
}

void move_blocks(const SwapShape& shape, const void* source, void* target, int64_t element_bytes, const Tensor& pairs,
                 const LaunchScope& scope) {
  const int64_t unit = unit_of(shape, source, target, element_bytes);
  const MoveShape units = shape_in_units(shape, element_bytes, unit);
  if (units.num_units == 0) return;
  const int64_t per_slice = kMoveThreads * kUnitsAtOnce;
  const int64_t slices = std::min<int64_t>((units.num_units + per_slice - 1) / per_slice, 1024);
  const dim3 grid = grid_of_size("pairs", pairs.size(0), slices);
  with_unit(unit, [&](auto zero) {
    using U = decltype(zero);
    KVPAGER_LAUNCH(move_blocks_kernel<U>, grid, dim3(kMoveThreads), scope.stream, static_cast<const U*>(source),
                   static_cast<U*>(target), units, grid_of<int64_t>(pairs), scope.errors);
  });
  scope.check();
}

void copy_blocks(std::vector<Tensor> caches, Tensor pairs) {
  check_copy(caches, pairs);
  std::vector<SwapShape> shapes;
  for (const Tensor& cache : caches) {
    copy_shape(cache);                           // says `caches` where dimensions do not fit
    shapes.push_back(swap_shape(cache, cache));  // all are checked before one is written
  }
  if (pairs.size(0) == 0) return;
  const LaunchScope scope(pairs);
  for (size_t i = 0; i < caches.size(); ++i)
    move_blocks(shapes[i], caches[i].const_data_ptr(), caches[i].mutable_data_ptr(),
                static_cast<int64_t>(caches[i].element_size()), pairs, scope);
}

void swap_blocks(std::vector<Tensor> src, std::vector<Tensor> dst, Tensor pairs) {
  check_swap(src, dst, pairs);
  std::vector<SwapShape> shapes;
  for (size_t i = 0; i < src.size(); ++i) shapes.push_back(swap_shape(src[i], dst[i]));
  const bool by_kernel = lies_on_device(pairs);
  const auto grid = grid_of<int64_t>(pairs);
  if (!by_kernel) check_swap_pairs(grid, pairs.size(0), src[0].size(0), dst[0].size(0));
  const LaunchScope scope(lies_on_device(src[0]) ? src[0] : (lies_on_device(dst[0]) ? dst[0] : pairs));
  std::vector<const void*> sources;
  std::vector<void*> targets;
  for (size_t i = 0; i < src.size(); ++i) {
    sources.push_back(address_on_device("src", src[i], const_cast<void*>(src[i].const_data_ptr())));
    targets.push_back(address_on_device("dst", dst[i], dst[i].mutable_data_ptr()));
  }
  if (pairs.size(0) == 0) return;
  std::vector<CopyRun> plan;
  for (size_t i = 0; i < src.size(); ++i) {
    const int64_t element_bytes = static_cast<int64_t>(src[i].element_size());
    if (by_kernel)
      move_blocks(shapes[i], sources[i], targets[i], element_bytes, pairs, scope);
    else
      plan_copies(static_cast<const char*>(src[i].const_data_ptr()), static_cast<char*>(dst[i].mutable_data_ptr()),
                  shapes[i], element_bytes, grid, pairs.size(0), plan);
  }
  if (!plan.empty()) copy_runs(plan, scope);
}

void update_tables(Tensor block_tables, Tensor changed) {
  const TableUpdate params = table_update(block_tables, changed);
  if (params.num_changes == 0) return;
  const LaunchScope scope(block_tables);
  KVPAGER_LAUNCH(update_tables_kernel, grid_of_size("changed", (params.num_changes + kMoveThreads - 1) / kMoveThreads),
                 dim3(kMoveThreads), scope.stream, params, scope.errors);
  scope.check();
}

template <class T>
void gather_numbers(const GatherParams<T, T>& params, const LaunchScope& scope) {
  constexpr int64_t kBytes = sizeof(T);
  const int64_t row_bytes = params.pool.head_dim * kBytes;
  const Alignment alignment = Alignment()
                                  .rows(params.key, kBytes)
                                  .rows(params.value, kBytes)
                                  .cache(params.key_cache, kBytes)
                                  .cache(params.value_cache, kBytes)
                                  .offset(row_bytes);
  with_unit(alignment.unit_bytes(), [&](auto zero) {
    using U = decltype(zero);
    GatherParams<U, U> units{in_units<U>(params.key, kBytes),
                             in_units<U>(params.value, kBytes),
                             in_units<const U>(params.key_cache, kBytes),
                             in_units<const U>(params.value_cache, kBytes),
                             {},
                             {},
                             params.block_tables,
                             params.seq_lens,
                             params.seq_start_loc,
                             params.num_rows,
                             params.num_sequences,
                             params.max_blocks,
                             params.pool};
    units.pool.head_dim = row_bytes / static_cast<int64_t>(sizeof(U));
    KVPAGER_LAUNCH(gather_kv_kernel<U>, grid_of_size("key", std::max<int64_t>(1, params.num_rows)),
                   dim3(kGatherThreads), scope.stream, units, scope.errors);
  });
}

void gather_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens,
               Tensor seq_start_loc, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("key", key, key_cache, [&](auto number, auto code) {
    using T = decltype(number);
    using C = decltype(code);
    const auto params = gather_params<T, C>(key, value, key_cache, value_cache, block_tables, seq_lens, seq_start_loc,
                                            key_scale, value_scale);
    if (params.num_sequences == 0) return;
    const LaunchScope scope(key_cache);
    if constexpr (is_quantised<C>) {
      KVPAGER_LAUNCH((gather_codes_kernel<T, C>), grid_of_size("key", std::max<int64_t>(1, params.num_rows)),
                     dim3(kGatherThreads), scope.stream, params, scope.errors);
    } else {
      gather_numbers(params, scope);
    }
    scope.check();
  });
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("copy_blocks", TORCH_BOX(&kvpager::cuda::copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&kvpager::cuda::swap_blocks));
  library.impl("update_tables", TORCH_BOX(&kvpager::cuda::update_tables));
  library.impl("gather_kv", TORCH_BOX(&kvpager::cuda::gather_kv));
}
