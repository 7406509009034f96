// The CPU kernels' entry points, one for each op; instantiated in the .cpp files for the types that ops.cpp dispatches.
// Each checks the values it is given first and throws before it writes (see ../checks.h for the text).
#pragma once
#include "../params.h"

namespace kvpager::cpu {

template <class T>
void write_kv(const WriteParams<T>& params);

template <class T, class C>
void write_quantised_kv(const QuantisedWriteParams<T, C>& params);

template <class T, class C>
void gather_kv(const GatherParams<T, C>& params);

// A scale that is only read must be a positive number: nothing else can be divided by.
void check_fixed_scale(const char* argument, const Scales<const float>& scale);

// Decode and prefill, plain, one source for all CPUs.
template <class T>
void attention(const AttentionParams<T>& params);

struct DecodeOptions {
  int64_t fixed_split;     // tokens of a split; 0 = cut where it suits the threads
  List<int32_t> schedule;  // data is null if the kernel is to cut for itself
  int64_t schedule_size;
  float* workspace;  // zeros; null if the kernel is to find room itself
  int64_t workspace_floats;
};

// Throws if the schedule is not one for these sequences.
template <class T, class C>
void check_schedule(const AttentionParams<T, C>& params, const DecodeOptions& options);

// Decode: query token b is the last one of sequence b.
template <class T, class C>
void decode(const AttentionParams<T, C>& params, const DecodeOptions& options);

// Prefill: the queries of a sequence are its last tokens.
template <class T, class C>
void prefill(const AttentionParams<T, C>& params);

template <class T>
void merge_attention(const MergeParams<T>& params);

template <class T, class C>
void qk_norm_rope_write(const FusedParams<T, C>& params);

template <class T>
void linear(const LinearParams<T>& params);

template <class T>
void rms_norm(const NormParams<T>& params);

template <class T>
void silu_mul(const GateParams<T>& params);

// `data` is the first element of the cache that `shape` describes. The pairs have been checked.
void copy_blocks(char* data, const CopyShape& shape, int64_t element_bytes, const Grid<const int64_t>& pairs,
                 int64_t num_pairs);

// Like copy_blocks, between two caches; `source` and `target` are their first elements.
void swap_blocks(const char* source, char* target, const SwapShape& shape, int64_t element_bytes,
                 const Grid<const int64_t>& pairs, int64_t num_pairs);

// Entries whose row is -1 are left out.
void update_tables(const TableUpdate& params);

}  // namespace kvpager::cpu
