// Decode attention on the CPU: checks, cuts the work, runs the kernel's spans on all threads, merges what was cut.
//
// The unit of work is a token of context, all heads of it: a batch is a line of sum(lengths) tokens, cut into parts of
// equal length whatever the sequences are (one of 32k tokens, 256 of mixed lengths). A sequence that a cut goes through
// has several pieces; each leaves a Partial, and they are merged by log-sum-exp in the order of their positions.
// Cuts lie at multiples of the block size, or with `fixed_split` at multiples of it: then each piece is one split, so
// neither other sequences nor the number of threads have a part in the result.
// Cost: O(sum of lengths * H * D) arithmetic over one pass of K and V; O(B + parts) for the cuts.
#include "decode.h"

#include <atomic>
#include <vector>

#include "kernels.h"
#include "sequences.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kPartsPerThread = 4;         // so that a thread that is late leaves its last parts to others
constexpr int64_t kMinPartBytes = 256 * 1024;  // of K and V: below this, waking a thread costs more than it brings

struct Cut {
  int64_t row, position;
};

// A span and where its result goes: to `out` if it is all of its sequence, else to Partial number `partial`.
struct Piece {
  Span span;
  int64_t partial;  // -1: none
};

template <class T, class C>
int64_t first_position(const AttentionParams<T, C>& p, int64_t row) {
  return p.seq_lens[row] > 0 ? p.first_visible(p.seq_lens[row] - 1) : 0;
}

// Cuts into parts of equal numbers of visible tokens: num_parts + 1 of them, the first at the start of the batch.
template <class T, class C>
std::vector<Cut> even_cuts(const AttentionParams<T, C>& p, int64_t grain) {
  int64_t total = 0;
  for (int64_t row = 0; row < p.num_sequences; ++row) total += p.seq_lens[row] - first_position(p, row);
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t bytes = total * 2 * p.pool.num_kv_heads * p.pool.head_dim * static_cast<int64_t>(sizeof(C));
  const int64_t parts =
      threads == 1 ? 1 : std::max<int64_t>(1, std::min(threads * kPartsPerThread, bytes / kMinPartBytes));
  std::vector<Cut> cuts{{0, 0}};
  int64_t row = 0, before = 0;  // tokens of the rows before `row`
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t target = total * part / parts;
    for (int64_t visible; target >= before + (visible = p.seq_lens[row] - first_position(p, row)); ++row)
      before += visible;  // target < total, so this ends at a row of the batch
    cuts.push_back({row, (first_position(p, row) + target - before) / grain * grain});
  }
  cuts.push_back({p.num_sequences, 0});
  return cuts;
}

// A schedule is [B, fixed_split, row, position, row, position, ...]: any cuts in order give the right result.
template <class T, class C>
std::vector<Cut> scheduled_cuts(const AttentionParams<T, C>& p, const DecodeOptions& options) {
  const auto& entries = options.schedule;
  const auto refuse = [](const std::string& got) {
    fail_argument("split_plan", "one that make_split_plan made for these `seq_lens` and `fixed_split`", got);
  };
  const int64_t size = options.schedule_size;
  if (size < 6 || size % 2 != 0) refuse(std::to_string(size) + " entries");
  if (entries[0] != p.num_sequences) refuse("one for " + std::to_string(entries[0]) + " sequences");
  if (entries[1] != options.fixed_split) refuse("one for splits of " + std::to_string(entries[1]) + " tokens");
  std::vector<Cut> cuts;
  for (int64_t entry = 2; entry < size; entry += 2) cuts.push_back({entries[entry], entries[entry + 1]});
  for (size_t i = 0; i < cuts.size(); ++i) {
    const auto [row, position] = cuts[i];
    const bool first = i == 0, last = i + 1 == cuts.size();
    bool fits = first ? row == 0 && position == 0
                      : row > cuts[i - 1].row || (row == cuts[i - 1].row && position >= cuts[i - 1].position);
    const bool at_end = row == p.num_sequences && position == 0;
    fits &= at_end || (!last && row >= 0 && row < p.num_sequences && position >= 0 && position <= p.seq_lens[row]);
    fits &= options.fixed_split == 0 || position % options.fixed_split == 0;
    if (!fits) refuse("a cut at row " + std::to_string(row) + ", position " + std::to_string(position));
  }
  return cuts;
}

// All pieces of the batch in order, and where each part's begin: part i has pieces starts[i] ... starts[i + 1] - 1.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<int64_t> starts;
  int64_t num_partials = 0;
};

template <class T, class C>
Plan plan_of(const AttentionParams<T, C>& p, const std::vector<Cut>& cuts, int64_t fixed_split) {
  Plan plan;
  for (size_t part = 0; part + 1 < cuts.size(); ++part) {
    plan.starts.push_back(plan.pieces.size());
    const Cut from = cuts[part], to = cuts[part + 1];
    for (int64_t row = from.row; row < p.num_sequences && row <= to.row; ++row) {
      const int64_t first = first_position(p, row), length = p.seq_lens[row];
      int64_t begin = row == from.row ? std::max(first, from.position) : first;
      const int64_t end = row == to.row ? to.position : length;
      while (begin < end) {
        const int64_t stop = fixed_split > 0 ? std::min(end, (begin / fixed_split + 1) * fixed_split) : end;
        const bool whole = begin == first && stop == length;
        plan.pieces.push_back({{row, begin, stop}, whole ? -1 : plan.num_partials++});
        begin = stop;
      }
    }
  }
  plan.starts.push_back(plan.pieces.size());
  return plan;
}

// Room for floats that a thread keeps, at a multiple of 64 bytes.
float* thread_scratch(int64_t floats) {
  thread_local std::vector<float> room;
  if (room.size() < static_cast<size_t>(floats + 16)) room.resize(floats + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
}

// Merges the partials of one sequence, `count` of them in order, with its sinks, into out and lse.
template <class T, class C>
void finish(const AttentionParams<T, C>& p, int64_t row, const float* data, int64_t count, float* merged) {
  const int64_t H = p.num_heads, D = p.pool.head_dim, step = partial_floats(H, D);
  for (int64_t head = 0; head < H; ++head) {
    const bool sink = p.sinks.data != nullptr && p.sinks[head] > -INFINITY;
    float top = sink ? p.sinks[head] : -INFINITY;
    for (int64_t i = 0; i < count; ++i) top = std::max(top, data[i * step + head]);
    float total = sink ? std::exp(p.sinks[head] - top) : 0.0f;  // a sink is a logit without a value
    std::fill_n(merged, D, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const Partial part = partial_at(const_cast<float*>(data) + i * step, H);
      if (part.tops[head] == -INFINITY && part.totals[head] == 0) continue;  // -inf - -inf would be NaN
      const float weight = std::exp(part.tops[head] - top);
      total += weight * part.totals[head];
      const float* acc = part.accs + head * D;
      for (int64_t d = 0; d < D; ++d) merged[d] += weight * acc[d];
    }
    T* out = p.out.at(row, head);  // row < num_tokens, head < H, d < D
    for (int64_t d = 0; d < D; ++d) out[d] = narrow<T>(merged[d] / total);
    if (p.lse.data) p.lse.at(row, head) = top + std::log(total);
  }
}

template <class T, class C>
void run_parts(const AttentionParams<T, C>& p, const Plan& plan, float* partials) {
  const int64_t H = p.num_heads, D = p.pool.head_dim, own = partial_floats(H, D);
  const auto attend = KVPAGER_ACTIVE(attend_span<T, C>);
  std::atomic<int64_t> next_part{0};
  const int64_t num_parts = plan.starts.size() - 1;
  const auto work = [&](int64_t, int64_t) {
    float* scratch = thread_scratch(scratch_floats(H, D) + own + D);
    float *result = scratch + scratch_floats(H, D), *merged = result + own;
    for (int64_t part; (part = next_part.fetch_add(1, std::memory_order_relaxed)) < num_parts;)
      for (int64_t i = plan.starts[part]; i < plan.starts[part + 1]; ++i) {
        const Piece& piece = plan.pieces[i];
        float* target = piece.partial < 0 ? result : partials + piece.partial * own;
        attend(p, piece.span, scratch, partial_at(target, H));
        if (piece.partial < 0) finish(p, piece.span.row, result, 1, merged);
      }
  };
  if (num_parts == 1)
    work(0, 1);
  else
    torch::stable::parallel_for(0, std::min<int64_t>(num_parts, torch::stable::get_num_threads()), 1, work);
}

}  // namespace

template <class T, class C>
void check_schedule(const AttentionParams<T, C>& p, const DecodeOptions& options) {
  for (int64_t row = 0; row < p.num_sequences; ++row) check_sequence(p, row, p.seq_lens[row], 1);
  if (options.schedule.data) scheduled_cuts(p, options);
}

template void check_schedule(const AttentionParams<double, double>&, const DecodeOptions&);

template <class T, class C>
void decode(const AttentionParams<T, C>& p, const DecodeOptions& options) {
  for (int64_t row = 0; row < p.num_sequences; ++row) check_sequence(p, row, p.seq_lens[row], 1);
  const int64_t grain = options.fixed_split > 0 ? options.fixed_split : p.pool.block_size;
  const Plan plan =
      plan_of(p, options.schedule.data ? scheduled_cuts(p, options) : even_cuts(p, grain), options.fixed_split);
  const int64_t step = partial_floats(p.num_heads, p.pool.head_dim), wanted = plan.num_partials * step;
  if (options.workspace != nullptr && wanted > options.workspace_floats)
    fail_argument("workspace", "at least " + std::to_string(wanted * sizeof(float)) + " bytes",
                  std::to_string(options.workspace_floats * sizeof(float)) + " bytes");
  std::vector<float> own_partials(options.workspace ? 0 : wanted);
  float* partials = options.workspace ? options.workspace : own_partials.data();

  for (int64_t row = 0; row < p.num_sequences; ++row)
    if (p.seq_lens[row] == 0) write_empty(p, row, row + 1);
  if (plan.pieces.empty()) return;
  run_parts(p, plan, partials);
  std::vector<float> merged(plan.num_partials > 0 ? p.pool.head_dim : 0);
  for (size_t i = 0, count; i < plan.pieces.size(); i += count) {
    count = 1;
    const Piece& piece = plan.pieces[i];
    if (piece.partial < 0) continue;
    while (i + count < plan.pieces.size() && plan.pieces[i + count].span.row == piece.span.row) ++count;
    finish(p, piece.span.row, partials + piece.partial * step, count, merged.data());
  }
  if (options.workspace) std::fill_n(options.workspace, wanted, 0.0f);  // left as it was found
}

#define KVPAGER_INSTANTIATE(T, C) template void decode(const AttentionParams<T, C>&, const DecodeOptions&);
KVPAGER_INSTANTIATE(float, float)
KVPAGER_INSTANTIATE(float16, float16)
KVPAGER_INSTANTIATE(bfloat16, bfloat16)
KVPAGER_INSTANTIATE(float, int8_code)
KVPAGER_INSTANTIATE(float16, int8_code)
KVPAGER_INSTANTIATE(bfloat16, int8_code)
KVPAGER_INSTANTIATE(float, fp8_e4m3)
KVPAGER_INSTANTIATE(float16, fp8_e4m3)
KVPAGER_INSTANTIATE(bfloat16, fp8_e4m3)

}  // namespace kvpager::cpu
