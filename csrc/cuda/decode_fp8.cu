// Decode attention on tensor cores over fp8 e4m3 caches; compiled apart, since it takes long.
#include "decode.cuh"

namespace kvpager::cuda {

template void launch_decode(const AttentionParams<bfloat16, fp8_e4m3>&, const Schedule&, const Workspace&, int64_t,
                            Stream, unsigned*);
template void launch_decode(const AttentionParams<float16, fp8_e4m3>&, const Schedule&, const Workspace&, int64_t,
                            Stream, unsigned*);

}  // namespace kvpager::cuda
