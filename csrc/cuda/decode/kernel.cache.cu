// Decode attention on tensor cores over one type of caches, KVPAGER_CACHE: compiled apart, since it takes long.
#include <algorithm>

#include "kernel.cuh"

namespace kvpager::cuda::decode {

template <class T, class C>
void launch_decode(const AttentionParams<T, C>& params, const SplitPlan& plan, const Workspace& workspace,
                   int64_t head_tiles, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(head_tiles), static_cast<unsigned>(plan.num_parts));
  const auto launch_for = [&](auto head_dim) {
    constexpr int D = decltype(head_dim)::value;
    static_assert(is_decode_head_dim(D));
    KVPAGER_LAUNCH(
        (decode_kernel<T, C, D>), grid, dim3(kDecodeThreads), launch.stream,
        DecodeParams<T, C>{params, Addresses(params.key_cache, 16), Addresses(params.value_cache, 16),
                           Addresses(params.key_scale, sizeof(float)), Addresses(params.value_scale, sizeof(float)),
                           Divisor(static_cast<uint32_t>(params.pool.block_size)),
                           LogitFactors(params.options.scale, params.options.softcap),
                           static_cast<int>(std::min<int64_t>(
                               {params.max_blocks * params.pool.block_size, params.max_seq_len, INT32_MAX})),
                           plan, workspace, launch.errors});
    check_launch();
  };
  switch (params.pool.head_dim) {
    case 64: return launch_for(std::integral_constant<int, 64>());
    case 96: return launch_for(std::integral_constant<int, 96>());
    case 128: return launch_for(std::integral_constant<int, 128>());
    case 256: return launch_for(std::integral_constant<int, 256>());
  }
}

template void launch_decode(const AttentionParams<bfloat16, cache_type<bfloat16, KVPAGER_CACHE>>&, const SplitPlan&,
                            const Workspace&, int64_t, const Launch&);
template void launch_decode(const AttentionParams<float16, cache_type<float16, KVPAGER_CACHE>>&, const SplitPlan&,
                            const Workspace&, int64_t, const Launch&);

}  // namespace kvpager::cuda::decode
