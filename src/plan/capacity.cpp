#include "plan/capacity.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.hpp"

namespace crossdock {
namespace {

void drop(LocalRoutes& routes, size_t slot) {
  const auto expert = static_cast<size_t>(routes.expert_ids[slot]);
  routes.expert_ids[slot] = -1;
  --routes.counts[expert];
  ++routes.dropped[expert];
  if (routes.weight_dtype == DType::kF64) {
    reinterpret_cast<double*>(routes.weights.data())[slot] = 0;
  } else {
    reinterpret_cast<float*>(routes.weights.data())[slot] = 0;
  }
}

void drop_by_position(int64_t capacity, LocalRoutes& routes) {
  std::vector<int64_t> kept(routes.counts.size(), 0);
  for (size_t slot = 0; slot < routes.expert_ids.size(); ++slot) {
    if (routes.expert_ids[slot] < 0) continue;
    if (++kept[static_cast<size_t>(routes.expert_ids[slot])] > capacity) drop(routes, slot);
  }
}

// Larger weights first, NaN before all others so that it stays visible; then the lower slot.
template <typename Weight>
struct KeepsFirst {
  const Weight* weights;

  bool operator()(int64_t a, int64_t b) const {
    const bool a_nan = std::isnan(weights[a]);
    const bool b_nan = std::isnan(weights[b]);
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && weights[a] != weights[b]) return weights[a] > weights[b];
    return a < b;
  }
};

template <typename Weight>
void drop_by_weight(int64_t capacity, LocalRoutes& routes) {
  // Slots of the experts with too many routes, by (expert, token, slot).
  const size_t E = routes.counts.size();
  std::vector<int64_t> offsets(E + 1, 0);
  for (size_t e = 0; e < E; ++e) {
    offsets[e + 1] = offsets[e] + (routes.counts[e] > capacity ? routes.counts[e] : 0);
  }
  std::vector<int64_t> slots(static_cast<size_t>(offsets[E]));
  std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
  for (size_t slot = 0; slot < routes.expert_ids.size(); ++slot) {
    const int32_t expert = routes.expert_ids[slot];
    if (expert < 0 || routes.counts[static_cast<size_t>(expert)] <= capacity) continue;
    slots[static_cast<size_t>(next[static_cast<size_t>(expert)]++)] = static_cast<int64_t>(slot);
  }
  const KeepsFirst<Weight> keeps_first{reinterpret_cast<const Weight*>(routes.weights.data())};
  for (size_t e = 0; e < E; ++e) {
    if (offsets[e] == offsets[e + 1]) continue;
    const auto first = slots.begin() + offsets[e];
    const auto last = slots.begin() + offsets[e + 1];
    const auto cut = first + capacity;
    std::nth_element(first, cut, last, keeps_first);
    std::for_each(cut, last, [&](int64_t slot) { drop(routes, static_cast<size_t>(slot)); });
  }
}

}  // namespace

int64_t capacity_rows(const DispatchConfig& config, int64_t num_tokens) {
  const double routes_per_expert = static_cast<double>(num_tokens) *
                                   static_cast<double>(config.top_k) /
                                   static_cast<double>(config.num_experts);
  const double rows = std::ceil(routes_per_expert * config.capacity->factor);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  return rows < static_cast<double>(kMost) ? static_cast<int64_t>(rows) : kMost;
}

int64_t padded_rows_per_source(const DispatchConfig& config) {
  if (!config.capacity || !config.capacity->pad_to_capacity) return 0;
  return capacity_rows(config, config.capacity->max_tokens);
}

void drop_beyond_capacity(const DispatchConfig& config, LocalRoutes& routes) {
  if (!config.capacity) return;
  const Capacity& capacity = *config.capacity;
  CROSSDOCK_CHECK(!capacity.pad_to_capacity || routes.T <= capacity.max_tokens, "T is ", routes.T,
                  ", must be at most max_tokens (", capacity.max_tokens, ") with pad_to_capacity");
  const int64_t rows =
      capacity_rows(config, capacity.pad_to_capacity ? capacity.max_tokens : routes.T);
  if (capacity.policy == DropPolicy::kPosition) {
    drop_by_position(rows, routes);
  } else if (routes.weight_dtype == DType::kF64) {
    drop_by_weight<double>(rows, routes);
  } else {
    drop_by_weight<float>(rows, routes);
  }
}

}  // namespace crossdock
