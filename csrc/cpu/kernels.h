// The CPU kernels' entry points, one for each op; instantiated in the .cpp files for the types that ops.cpp dispatches.
// Each checks the values it is given first and throws before it writes (see ../checks.h for the text).
#pragma once
#include "../params.h"

namespace kvpager::cpu {

template <class T>
void write_kv(const WriteParams<T>& params);

template <class T>
void attention(const AttentionParams<T>& params);

template <class T>
void merge_attention(const MergeParams<T>& params);

// `data` is the first element of the cache that `shape` describes. The pairs have been checked.
void copy_blocks(char* data, const CopyShape& shape, int64_t element_bytes, const Grid<const int64_t>& pairs,
                 int64_t num_pairs);

void check_pairs(const Grid<const int64_t>& pairs, int64_t num_pairs, int64_t num_blocks);

}  // namespace kvpager::cpu
