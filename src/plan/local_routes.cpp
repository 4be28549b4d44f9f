#include "plan/local_routes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "core/check.hpp"
#include "core/tensor_check.hpp"

namespace crossdock {
namespace {

void check_weights(const ConstTensorView& weights, const Shape& shape) {
  CROSSDOCK_CHECK(weights.shape == shape && is_summable(weights.dtype), "weights must be ",
                  shape.to_string(), " fp32, fp64, bf16 or fp16, got ", describe(weights));
  check_memory("weights", weights);
}

void check_mask(const ConstTensorView& mask, int64_t T) {
  if (!mask.given()) return;
  CROSSDOCK_CHECK(mask.shape == Shape{T} && mask.dtype == DType::kBool, "mask must be [", T,
                  "] bool, got ", describe(mask));
  check_memory("mask", mask);
}

std::string print_weight(double weight) {
  if (std::isnan(weight)) return "NaN";
  return weight > 0 ? "Infinity" : "-Infinity";
}

// Checks and stores routes one by one, in (token, slot) order.
template <typename Weight>
class RouteWriter {
 public:
  RouteWriter(const DispatchConfig& config, int64_t T, int64_t K, BufferPool& pool)
      : K_(K), E_(config.num_experts), reject_(config.nonfinite == NonFinite::kReject) {
    const auto num_slots = static_cast<size_t>(T * K_);
    routes_.T = T;
    routes_.K = K;
    routes_.expert_ids.assign(num_slots, -1);
    routes_.counts.assign(static_cast<size_t>(E_), 0);
    routes_.dropped.assign(static_cast<size_t>(E_), 0);
    routes_.weight_dtype = DTypeOf<Weight>::value;
    routes_.weights = pool.take(static_cast<int64_t>(num_slots * sizeof(Weight)));
    weights_ = reinterpret_cast<Weight*>(routes_.weights.data());
    if (num_slots > 0) std::memset(weights_, 0, num_slots * sizeof(Weight));
    last_slot_.assign(static_cast<size_t>(E_), -1);
  }

  void write(int64_t token, int64_t slot, int64_t id, Weight weight) {
    CROSSDOCK_CHECK(id >= 0 && id < E_, "token ", token, ", slot ", slot, ": expert id ", id,
                    " must be in [0, ", E_, "), or -1 for no route");
    const auto expert = static_cast<size_t>(id);
    const int64_t place = token * K_ + slot;
    CROSSDOCK_CHECK(last_slot_[expert] < token * K_, "token ", token, ", slot ", slot,
                    ": expert id ", id, " is already in slot ", last_slot_[expert] - token * K_,
                    "; a token may name an expert only once");
    CROSSDOCK_CHECK(!reject_ || std::isfinite(weight), "token ", token, ", slot ", slot,
                    ": weight must be finite, got ", print_weight(static_cast<double>(weight)),
                    "; nonfinite = propagate allows it");
    last_slot_[expert] = place;
    ++routes_.counts[expert];
    routes_.expert_ids[static_cast<size_t>(place)] = static_cast<int32_t>(id);
    weights_[place] = weight;
  }

  LocalRoutes take() { return std::move(routes_); }

 private:
  int64_t K_;
  int64_t E_;
  bool reject_;
  LocalRoutes routes_;
  Weight* weights_ = nullptr;
  std::vector<int64_t> last_slot_;  // [E] t * K + k of the latest route to an expert
};

bool is_masked(const ConstTensorView& mask, int64_t token) {
  return mask.given() && static_cast<const uint8_t*>(mask.data)[token] != 0;
}

// Weights are stored in fp32, fp64 weights in fp64.
double kept_weight(double weight) {
  return weight;
}
template <typename Weight>
float kept_weight(Weight weight) {
  return to_float(weight);
}

template <typename Id, typename Weight>
LocalRoutes read_slots(const Routing& routing, const DispatchConfig& config, BufferPool& pool) {
  const int64_t T = routing.expert_ids.shape[0];
  const int64_t K = config.top_k;
  const auto* ids = static_cast<const Id*>(routing.expert_ids.data);
  const auto* weights = static_cast<const Weight*>(routing.weights.data);
  RouteWriter<decltype(kept_weight(Weight{}))> writer(config, T, K, pool);
  for (int64_t t = 0; t < T; ++t) {
    if (is_masked(routing.mask, t)) continue;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t i = t * K + k;
      if (ids[i] != -1) writer.write(t, k, ids[i], kept_weight(weights[i]));
    }
  }
  return writer.take();
}

// Slots that the map needs per token.
int64_t count_slots(const DenseRouting& routing, const DispatchConfig& config) {
  const int64_t T = routing.map.shape[0];
  const int64_t E = config.num_experts;
  const int64_t bound = config.max_routes_per_token;
  const auto* map = static_cast<const uint8_t*>(routing.map.data);
  int64_t slots = std::max(config.top_k, bound);
  for (int64_t t = 0; t < T; ++t) {
    if (is_masked(routing.mask, t)) continue;
    const int64_t num_set = E - std::count(map + t * E, map + (t + 1) * E, 0);
    CROSSDOCK_CHECK(bound == 0 || num_set <= bound, "token ", t, ": ", num_set,
                    " experts are set, at most max_routes_per_token (", bound, ") may be");
    slots = std::max(slots, num_set);
  }
  return slots;
}

template <typename Weight>
LocalRoutes read_map(const DenseRouting& routing, const DispatchConfig& config, BufferPool& pool) {
  const int64_t T = routing.map.shape[0];
  const int64_t E = config.num_experts;
  const auto* map = static_cast<const uint8_t*>(routing.map.data);
  const auto* weights = static_cast<const Weight*>(routing.weights.data);
  const int64_t K = count_slots(routing, config);
  RouteWriter<decltype(kept_weight(Weight{}))> writer(config, T, K, pool);
  for (int64_t t = 0; t < T; ++t) {
    if (is_masked(routing.mask, t)) continue;
    int64_t slot = 0;
    for (int64_t e = 0; e < E; ++e) {
      if (map[t * E + e] == 0) continue;
      writer.write(t, slot, e, kept_weight(weights[t * E + e]));
      ++slot;
    }
  }
  return writer.take();
}

// Calls read(Weight{}) with the type of the weights. REQUIRES: checked weights.
template <typename Read>
LocalRoutes read_as(DType dtype, const Read& read) {
  switch (dtype) {
    case DType::kF64:
      return read(double{});
    case DType::kBF16:
      return read(BF16{});
    case DType::kF16:
      return read(F16{});
    default:
      return read(float{});
  }
}

}  // namespace

LocalRoutes read_routes(const Routing& routing, const DispatchConfig& config, BufferPool& pool) {
  const ConstTensorView& ids = routing.expert_ids;
  CROSSDOCK_CHECK(ids.shape.rank() == 2 && ids.shape[1] == config.top_k &&
                      (ids.dtype == DType::kI32 || ids.dtype == DType::kI64),
                  "expert_ids must be [T, ", config.top_k, "] int32 or int64, got ", describe(ids));
  check_memory("expert_ids", ids);
  check_weights(routing.weights, ids.shape);
  check_mask(routing.mask, ids.shape[0]);
  const bool wide_ids = ids.dtype == DType::kI64;
  return read_as(routing.weights.dtype, [&]<typename Weight>(Weight /*type*/) {
    return wide_ids ? read_slots<int64_t, Weight>(routing, config, pool)
                    : read_slots<int32_t, Weight>(routing, config, pool);
  });
}

LocalRoutes read_routes(const DenseRouting& routing, const DispatchConfig& config,
                        BufferPool& pool) {
  const ConstTensorView& map = routing.map;
  CROSSDOCK_CHECK(
      map.shape.rank() == 2 && map.shape[1] == config.num_experts && map.dtype == DType::kBool,
      "map must be [T, ", config.num_experts, "] bool, got ", describe(map));
  check_memory("map", map);
  check_weights(routing.weights, map.shape);
  check_mask(routing.mask, map.shape[0]);
  return read_as(routing.weights.dtype, [&]<typename Weight>(Weight /*type*/) {
    return read_map<Weight>(routing, config, pool);
  });
}

void widen_slots(int64_t K, LocalRoutes& routes, BufferPool& pool) {
  CROSSDOCK_ASSERT(K >= routes.K);
  if (K == routes.K) return;
  const int64_t num_slots = routes.T * K;
  const int64_t weight_bytes = size_of(routes.weight_dtype);
  std::vector<int32_t> expert_ids(static_cast<size_t>(num_slots), -1);
  Buffer weights = pool.take(num_slots * weight_bytes);
  if (num_slots > 0) std::memset(weights.data(), 0, static_cast<size_t>(num_slots * weight_bytes));
  for (int64_t t = 0; t < routes.T; ++t) {
    std::copy_n(routes.expert_ids.begin() + t * routes.K, routes.K, expert_ids.begin() + t * K);
    std::memcpy(weights.data() + t * K * weight_bytes,
                routes.weights.data() + t * routes.K * weight_bytes,
                static_cast<size_t>(routes.K * weight_bytes));
  }
  routes.K = K;
  routes.expert_ids = std::move(expert_ids);
  routes.weights = std::move(weights);
}

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
