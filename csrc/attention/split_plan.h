// The split plan of decode attention: where a batch is cut into parts, as the kernels of the CPU and CUDA read it.
//
// A batch is one line of visible tokens, sequence after sequence. A plan is int32
// [B, fixed_split, row, position, row, position, ...]: num_parts + 1 cuts in the order of the line, the first at its
// start and the last, (B, 0), at its end (python/kvpager/ops makes it). Any cuts in order give the right result, so
// that a plan that was made for other lengths is slow but not wrong.
#pragma once
#include "../views.h"

namespace kvpager {

// A place in the line of tokens, before the token at `position` of sequence `row`.
struct Cut {
  int row, position;
  KVPAGER_HD bool operator<=(const Cut& other) const {
    return row < other.row || (row == other.row && position <= other.position);
  }
};

struct SplitPlan {
  static constexpr const char* kWanted = "one that make_split_plan made for these `seq_lens` and `fixed_split`";

  List<int32_t> entries;  // data is null if there is no plan
  int num_parts;
  int fixed_split;  // tokens; 0 = a row is cut where a part ends and nowhere else

  // Whether a list of so many entries can be a plan.
  static bool size_is_valid(int64_t size) { return size >= 6 && size % 2 == 0; }
  static int64_t parts_of_size(int64_t size) { return (size - 2) / 2 - 1; }

  // 0 <= index <= num_parts
  KVPAGER_HD Cut cut(int index) const { return {entries[2 + 2 * index], entries[3 + 2 * index]}; }

  KVPAGER_HD bool is_for(int64_t num_sequences) const {
    return entries[0] == num_sequences && entries[1] == fixed_split;
  }

  // Whether a cut follows the one before it, lies at a split, and begins or ends the line where it should. Where that
  // is true of every cut, all of them lie between the start of the line and its end.
  KVPAGER_HD bool cut_is_valid(int index, int64_t num_sequences) const {
    const Cut at = cut(index);
    bool bad = at.position < 0 || (fixed_split > 0 && at.position % fixed_split != 0);
    bad |= index == 0 ? at.row != 0 || at.position != 0 : !(cut(index - 1) <= at);
    bad |= index == num_parts && (at.row != num_sequences || at.position != 0);
    return !bad;
  }
};

}  // namespace kvpager
