// Paged attention on CUDA, plain (attention.cu): any head dim up to 256, any dtype, decode and prefill alike. The
// launchers of decode.cu and prefill.cu take it where no faster kernel fits.
#pragma once
#include "runtime.h"

namespace kvpager::cuda {

// Checks and launches. `query_start_loc` is nullopt if query row b is the one query of sequence b.
void attend_plainly(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query, const Tensor& key_cache,
                    const Tensor& value_cache, const Tensor& block_tables, const std::optional<Tensor>& query_start_loc,
                    const Tensor& seq_lens, const std::optional<Tensor>& sinks, const AttentionOptions& options,
                    const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale);

}  // namespace kvpager::cuda
