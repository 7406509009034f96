// The CPU op `paged_attention`, decode attention: checks, cuts the batch, attends on all threads, merges what was cut.
//
// A batch is one line of visible tokens, sequence after sequence, each token with all of its heads. It is cut into
// parts of equal length whatever the sequences are (one of 32k tokens, 256 of mixed lengths). A sequence that a cut
// goes through has several pieces; each leaves a Partial, and they are merged by log-sum-exp in the order of their
// positions. Cuts lie at multiples of the block size. With `fixed_split` they lie at multiples of that, and each piece
// is one split: then neither other sequences nor the number of threads influence the result.
// Cost: O(sum of lengths * H * D) arithmetic over one pass of K and V; O(B + parts) for the cuts.
#include <atomic>
#include <vector>

#include "../../attention/checks.h"
#include "../attention/plain.h"
#include "../attention/values.h"
#include "kernel.h"

namespace kvpager::cpu::decode {
namespace {

constexpr int64_t kPartsPerThread = 4;         // so that a thread that is late leaves its last parts to others
constexpr int64_t kMinPartBytes = 256 * 1024;  // of K and V: below this, waking a thread costs more than it brings

// A piece and where its result goes: to `out` if it is all of its sequence, else to Partial number `partial`.
struct PlannedPiece {
  Piece piece;
  int64_t partial;  // -1: none
};

template <class T, class C>
int64_t first_position(const AttentionParams<T, C>& p, int64_t row) {
  return p.seq_lens[row] > 0 ? p.options.first_visible(p.seq_lens[row] - 1) : 0;
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
    cuts.push_back(
        {static_cast<int>(row), static_cast<int>((first_position(p, row) + target - before) / grain * grain)});
  }
  cuts.push_back({static_cast<int>(p.num_sequences), 0});
  return cuts;
}

// The cuts of the caller's plan. Beside what makes a plan valid, none lies past the end of its sequence or the batch.
template <class T, class C>
std::vector<Cut> planned_cuts(const AttentionParams<T, C>& p, const SplitPlan& plan) {
  const auto refuse = [](const std::string& got) { fail_argument("split_plan", SplitPlan::kWanted, got); };
  if (!plan.is_for(p.num_sequences))
    refuse(plan.entries[0] != p.num_sequences ? "one for " + std::to_string(plan.entries[0]) + " sequences"
                                              : "one for splits of " + std::to_string(plan.entries[1]) + " tokens");
  std::vector<Cut> cuts;
  for (int index = 0; index <= plan.num_parts; ++index) {
    const Cut cut = plan.cut(index);
    // A valid cut's row is 0 or more.
    if (!plan.cut_is_valid(index, p.num_sequences) || cut.row > p.num_sequences ||
        (cut.row < p.num_sequences && cut.position > p.seq_lens[cut.row]))
      refuse("a cut at row " + std::to_string(cut.row) + ", position " + std::to_string(cut.position));
    cuts.push_back(cut);
  }
  return cuts;
}

// All pieces of the batch in order, and where each part's begin: part i has pieces starts[i] ... starts[i + 1] - 1.
struct Plan {
  std::vector<PlannedPiece> pieces;
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
      int64_t begin = row == from.row ? std::max<int64_t>(first, from.position) : first;
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
    const float sink = p.options.sink(head);
    float top = sink;
    for (int64_t i = 0; i < count; ++i) top = std::max(top, data[i * step + head]);
    float total = sink > -INFINITY ? std::exp(sink - top) : 0.0f;  // a sink is a logit without a value
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
  const auto attend = KVPAGER_ACTIVE(attend_piece<T, C>);
  std::atomic<int64_t> next_part{0};
  const int64_t num_parts = plan.starts.size() - 1;
  const auto work = [&](int64_t, int64_t) {
    float* scratch = thread_scratch(scratch_floats(H, D) + own + D);
    float *result = scratch + scratch_floats(H, D), *merged = result + own;
    for (int64_t part; (part = next_part.fetch_add(1, std::memory_order_relaxed)) < num_parts;)
      for (int64_t i = plan.starts[part]; i < plan.starts[part + 1]; ++i) {
        const auto& [piece, partial] = plan.pieces[i];
        float* target = partial < 0 ? result : partials + partial * own;
        attend(p, piece, scratch, partial_at(target, H));
        if (partial < 0) finish(p, piece.row, result, 1, merged);
      }
  };
  if (num_parts == 1)
    work(0, 1);
  else
    torch::stable::parallel_for(0, std::min<int64_t>(num_parts, torch::stable::get_num_threads()), 1, work);
}

// The caller's workspace: zeros, as many floats as it has; null if there is none.
float* workspace_of(const SplitArguments& split, int64_t wanted) {
  if (!split.workspace) return nullptr;
  if (const int64_t bytes = split.workspace->size(0), least = wanted * static_cast<int64_t>(sizeof(float));
      bytes < least)
    fail_argument("workspace", "at least " + std::to_string(least) + " bytes", std::to_string(bytes) + " bytes");
  return static_cast<float*>(split.workspace->mutable_data_ptr());
}

template <class T, class C>
void attend_in_parts(const AttentionParams<T, C>& p, const SplitArguments& split) {
  const int64_t grain = split.fixed_split > 0 ? split.fixed_split : p.pool.block_size;
  const Plan plan =
      plan_of(p, split.split_plan ? planned_cuts(p, split.plan()) : even_cuts(p, grain), split.fixed_split);
  const int64_t step = partial_floats(p.num_heads, p.pool.head_dim), wanted = plan.num_partials * step;
  float* const workspace = workspace_of(split, wanted);
  std::vector<float> own_partials(workspace ? 0 : wanted);
  float* partials = workspace ? workspace : own_partials.data();

  for (int64_t row = 0; row < p.num_sequences; ++row)
    if (p.seq_lens[row] == 0) write_empty(p, row, row + 1);
  if (plan.pieces.empty()) return;
  run_parts(p, plan, partials);
  std::vector<float> merged(plan.num_partials > 0 ? p.pool.head_dim : 0);
  for (size_t i = 0, count; i < plan.pieces.size(); i += count) {
    count = 1;
    const auto& [piece, partial] = plan.pieces[i];
    if (partial < 0) continue;
    while (i + count < plan.pieces.size() && plan.pieces[i + count].piece.row == piece.row) ++count;
    finish(p, piece.row, partials + partial * step, count, merged.data());
  }
  if (workspace) std::fill_n(workspace, wanted, 0.0f);  // left as it was found
}

void attend(const AttentionArguments& arguments, const SplitArguments& split) {
  with_cache_types("query", arguments.query, arguments.key_cache, [&](auto number, auto code) {
    const auto params = attention_params<decltype(number), decltype(code)>(arguments);
    check_fixed_scales(params);
    check_split(split, arguments.query, sizeof(float));
    check_sequences(params);
    if constexpr (std::is_same_v<decltype(number), double>) {  // never cuts a sequence: every split gives the same
      if (split.split_plan) planned_cuts(params, split.plan());
      plain::attend(params, [](auto... work) { torch::stable::parallel_for(work...); });
    } else {
      attend_in_parts(params, split);
    }
  });
}

}  // namespace
}  // namespace kvpager::cpu::decode

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("paged_attention", TORCH_BOX((&kvpager::paged_attention<&kvpager::cpu::decode::attend>)));
}
