#pragma once

#include <memory>
#include <vector>

#include "layer/layer_case.hpp"

namespace crossdock {

/// The group of ranks 0 and 1, or 2 and 3. Collective.
inline std::unique_ptr<Group> pair_of(Group& world) {
  const int first = world.rank() / 2 * 2;
  return world.subgroup(std::vector<int>{first, first + 1});
}

/// The tokens of a case for four ranks, where every rank of a pair holds those of both.
inline LayerCase replicated_case(const LayerCase& sliced) {
  LayerCase replicated = sliced;
  const std::vector<int64_t>& T = sliced.tokens_per_rank;
  const int64_t first = T[0] + T[1];
  const int64_t second = T[2] + T[3];
  replicated.tokens_per_rank = {first, first, second, second};
  const auto repeat = [&](auto& values, int64_t width) {
    if (values.empty()) return;
    const auto from = values;
    const auto middle = from.begin() + first * width;
    const auto end = middle + second * width;
    values.assign(from.begin(), middle);
    values.insert(values.end(), from.begin(), middle);
    values.insert(values.end(), middle, end);
    values.insert(values.end(), middle, end);
  };
  repeat(replicated.x, sliced.config.router.width);
  repeat(replicated.grad_out, sliced.config.router.width);
  repeat(replicated.mask, 1);
  return replicated;
}

/// What a rank must get for the replicated case, given the results for the sliced one.
inline RankResult gathered(const std::vector<RankResult>& slices, int rank) {
  RankResult result = slices[static_cast<size_t>(rank)];
  const size_t first = static_cast<size_t>(rank) / 2 * 2;
  for (std::vector<double> RankResult::*member : {&RankResult::out, &RankResult::grad_x}) {
    result.*member = slices[first].*member;
    const std::vector<double>& other = slices[first + 1].*member;
    (result.*member).insert((result.*member).end(), other.begin(), other.end());
  }
  return result;
}

}  // namespace crossdock
