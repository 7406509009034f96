// The pairs of `copy_blocks` and `swap_blocks`, where the host can read them: checked before a block is moved.
#pragma once
#include <unordered_set>

#include "checks.h"

namespace kvpager {

inline void check_pairs(const Grid<const int64_t>& pairs, int64_t num_pairs, int64_t num_blocks) {
  std::unordered_set<int64_t> sources, destinations;
  for (int64_t row = 0; row < num_pairs; ++row) {
    for (int64_t column = 0; column < 2; ++column)
      if (pairs.at(row, column) < 0 || pairs.at(row, column) >= num_blocks)
        fail_slot("pairs", "block ids of 0 to " + std::to_string(num_blocks - 1),
                  std::to_string(pairs.at(row, column)) + " at row " + std::to_string(row));
    sources.insert(pairs.at(row, 0));
  }
  for (int64_t row = 0; row < num_pairs; ++row)
    if (sources.count(pairs.at(row, 1)) || !destinations.insert(pairs.at(row, 1)).second)
      fail_argument("pairs", "destinations that are no source and named once",
                    "block " + std::to_string(pairs.at(row, 1)) + " at row " + std::to_string(row));
}

// Sources of pairs are blocks below num_sources, targets below num_targets, each named once.
inline void check_swap_pairs(const Grid<const int64_t>& pairs, int64_t num_pairs, int64_t num_sources,
                             int64_t num_targets) {
  std::unordered_set<int64_t> targets;
  for (int64_t row = 0; row < num_pairs; ++row) {
    for (int64_t column = 0; column < 2; ++column) {
      const int64_t block = pairs.at(row, column), num_blocks = column == 0 ? num_sources : num_targets;
      if (block < 0 || block >= num_blocks)
        fail_slot(
            "pairs",
            std::string(column == 0 ? "source" : "destination") + " blocks of 0 to " + std::to_string(num_blocks - 1),
            std::to_string(block) + " at row " + std::to_string(row));
    }
    if (!targets.insert(pairs.at(row, 1)).second)
      fail_argument("pairs", "destinations named once",
                    "block " + std::to_string(pairs.at(row, 1)) + " at row " + std::to_string(row));
  }
}

}  // namespace kvpager
