// Paged attention on CUDA, plain (plain.cu): any head dim up to 256, any dtype, decode and prefill alike. The ops take
// it where no faster kernel fits.
#pragma once
#include "../../attention/params.h"
#include "../device/launch.h"

namespace kvpager::cuda::plain {

template <class T, class C>
void attend(const AttentionParams<T, C>& params, const Launch& launch);

}  // namespace kvpager::cuda::plain
