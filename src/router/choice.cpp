#include "router/choice.hpp"

#include <algorithm>
#include <cmath>

namespace crossdock::router {
namespace {

// Whether a is strictly better than b; NaN is worse than any number.
template <typename T>
bool is_better(T a, T b) {
  return a > b || (std::isnan(b) && !std::isnan(a));
}

}  // namespace

template <typename T>
int64_t Choice<T>::best_open(int64_t begin, int64_t end) const {
  int64_t best = -1;
  for (int64_t e = begin; e < end; ++e) {
    if (is_open_[static_cast<size_t>(e)] == 0) continue;
    if (best < 0 ||
        is_better(biased_[static_cast<size_t>(e)], biased_[static_cast<size_t>(best)])) {
      best = e;
    }
  }
  return best;
}

// Leaves the group's experts open.
template <typename T>
T Choice<T>::score_of_group(int64_t group) {
  const int64_t size = config_.num_experts / config_.num_groups;
  const int64_t share =
      config_.group_score == GroupScore::kTop2 ? 2 : config_.top_k / config_.group_top_k;
  const int64_t begin = group * size;
  T sum = 0;
  for (int64_t i = 0; i < std::min(share, size); ++i) {
    const int64_t best = best_open(begin, begin + size);
    sum += biased_[static_cast<size_t>(best)];
    is_open_[static_cast<size_t>(best)] = 0;
  }
  std::fill_n(is_open_.begin() + begin, size, uint8_t{1});
  return sum;
}

// Leaves only the experts of the best group_top_k groups open.
template <typename T>
void Choice<T>::close_weak_groups() {
  const int64_t num_groups = config_.num_groups;
  const int64_t size = config_.num_experts / num_groups;
  for (int64_t g = 0; g < num_groups; ++g)
    group_scores_[static_cast<size_t>(g)] = score_of_group(g);
  std::vector<uint8_t> is_kept(static_cast<size_t>(num_groups), 0);
  for (int64_t i = 0; i < config_.group_top_k; ++i) {
    int64_t best = -1;
    for (int64_t g = 0; g < num_groups; ++g) {
      if (is_kept[static_cast<size_t>(g)] != 0) continue;
      if (best < 0 || is_better(group_scores_[static_cast<size_t>(g)],
                                group_scores_[static_cast<size_t>(best)])) {
        best = g;
      }
    }
    is_kept[static_cast<size_t>(best)] = 1;
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    std::fill_n(is_open_.begin() + g * size, size, is_kept[static_cast<size_t>(g)]);
  }
}

template <typename T>
void Choice<T>::choose(const T* scores, const T* bias, int32_t* ids) {
  const int64_t E = config_.num_experts;
  for (int64_t e = 0; e < E; ++e) {
    biased_[static_cast<size_t>(e)] = bias != nullptr ? scores[e] + bias[e] : scores[e];
  }
  std::fill(is_open_.begin(), is_open_.end(), uint8_t{1});
  if (config_.group_top_k < config_.num_groups) close_weak_groups();
  for (int64_t k = 0; k < config_.top_k; ++k) {
    const int64_t best = best_open(0, E);
    ids[k] = static_cast<int32_t>(best);
    is_open_[static_cast<size_t>(best)] = 0;
  }
}

template class Choice<float>;
template class Choice<double>;

}  // namespace crossdock::router
