#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/router.hpp"

namespace crossdock::router {

/// Chooses experts for one token at a time. Holds scratch memory: use one per thread. T is float or
/// double.
template <typename T>
class Choice {
 public:
  explicit Choice(const RouterConfig& config)
      : config_(config),
        biased_(static_cast<size_t>(config.num_experts)),
        is_open_(static_cast<size_t>(config.num_experts)),
        group_scores_(static_cast<size_t>(config.num_groups)) {}

  /// scores [E], bias [E] or null -> ids [K], best first, ties to the lower id. NaN scores
  /// are chosen last.
  void choose(const T* scores, const T* bias, int32_t* ids);

 private:
  // The best open expert in [begin, end), ties to the lower id; -1 if none is open.
  int64_t best_open(int64_t begin, int64_t end) const;
  T score_of_group(int64_t group);
  void close_weak_groups();

  const RouterConfig& config_;
  std::vector<T> biased_;         // [E]
  std::vector<uint8_t> is_open_;  // [E] still available
  std::vector<T> group_scores_;   // [G]
};

extern template class Choice<float>;
extern template class Choice<double>;

}  // namespace crossdock::router
