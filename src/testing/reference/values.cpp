#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

template <typename Element>
double to_value(Element element) {
  return static_cast<double>(element);
}
template <>
double to_value(BF16 element) {
  return to_float(element);
}
template <>
double to_value(F16 element) {
  return to_float(element);
}
template <>
double to_value(F8E4M3 element) {
  return to_float(element);
}

template <typename Element>
Element from_value(double value) {
  return static_cast<Element>(value);
}
template <>
BF16 from_value(double value) {
  return to_bf16(static_cast<float>(value));
}
template <>
F16 from_value(double value) {
  return to_f16(static_cast<float>(value));
}
template <>
F8E4M3 from_value(double value) {
  return to_f8e4m3(static_cast<float>(value));
}

// Calls visit(Element{}) with the element type of the dtype.
template <typename Visit>
auto with_element(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kF64:
      return visit(double{});
    case DType::kF32:
      return visit(float{});
    case DType::kBF16:
      return visit(BF16{});
    case DType::kF16:
      return visit(F16{});
    case DType::kF8E4M3:
      return visit(F8E4M3{});
    case DType::kI64:
      return visit(int64_t{});
    case DType::kI32:
      return visit(int32_t{});
    case DType::kBool:
      return visit(bool{});
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  concat("the reference does not support dtype ", name_of(dtype)));
  }
}

}  // namespace

double round_to(DType dtype, double value) {
  return with_element(dtype,
                      [&](auto element) { return to_value(from_value<decltype(element)>(value)); });
}

OwnedTensor to_tensor(DType dtype, Shape shape, const std::vector<double>& values) {
  CROSSDOCK_CHECK(shape.num_elements() == static_cast<int64_t>(values.size()), "shape ",
                  shape.to_string(), " must have as many elements as there are values (",
                  values.size(), ")");
  const Buffer buffer(shape.num_elements() * size_of(dtype));
  const TensorView view = buffer.view(dtype, shape);
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const std::span<Element> elements = view.as<Element>();
    for (size_t i = 0; i < values.size(); ++i) elements[i] = from_value<Element>(values[i]);
  });
  return {view, buffer.owner()};
}

std::vector<double> to_values(ConstTensorView tensor) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(tensor.num_elements()));
  with_element(tensor.dtype, [&](auto element) {
    for (const auto& e : tensor.as<decltype(element)>()) values.push_back(to_value(e));
  });
  return values;
}

Comparison compare(const std::vector<double>& got, const std::vector<double>& wanted) {
  CROSSDOCK_CHECK(got.size() == wanted.size(), "arrays to compare must have the same size; got ",
                  got.size(), " and ", wanted.size());
  Comparison result;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool both_nan = std::isnan(got[i]) && std::isnan(wanted[i]);
    if (both_nan || std::bit_cast<uint64_t>(got[i]) == std::bit_cast<uint64_t>(wanted[i])) continue;
    if (result.num_different++ == 0) result.first = static_cast<int64_t>(i);
    const double error = std::abs(got[i] - wanted[i]);
    result.max_error = std::isfinite(error) ? std::max(result.max_error, error)
                                            : std::numeric_limits<double>::infinity();
  }
  return result;
}

namespace {

struct Route {
  int64_t token;
  int64_t slot;
  double weight;
};

void check_placement(const DispatchConfig& config, int64_t P) {
  const std::vector<int32_t>& placement = config.placement;
  CROSSDOCK_CHECK(placement.empty() || std::ssize(placement) == config.num_experts,
                  "placement must have num_experts = ", config.num_experts, " entries; got ",
                  placement.size());
  for (const int32_t owner : placement) {
    CROSSDOCK_CHECK(owner >= 0 && owner < P, "placement must hold ranks in [0, ", P, "); got ",
                    owner);
  }
}

void check_sizes(const DispatchConfig& config, int64_t K, const RankInput& input) {
  const auto num_slots = static_cast<size_t>(input.T * K);
  CROSSDOCK_CHECK(input.expert_ids.size() == num_slots && input.weights.size() == num_slots,
                  "expert_ids and weights must have T * K = ", num_slots, " entries; got ",
                  input.expert_ids.size(), " and ", input.weights.size());
  CROSSDOCK_CHECK(input.mask.empty() || input.mask.size() == static_cast<size_t>(input.T),
                  "mask must have T = ", input.T, " entries; got ", input.mask.size());
  for (const int64_t id : input.expert_ids) {
    CROSSDOCK_CHECK(id >= -1 && id < config.num_experts, "an expert id must be in [-1, ",
                    config.num_experts, "); got ", id);
  }
}

// One rank's routes to each expert, in (token, slot) order. [E]
std::vector<std::vector<Route>> routes_by_expert(const DispatchConfig& config, int64_t K,
                                                 const RankInput& input) {
  std::vector<std::vector<Route>> routes(static_cast<size_t>(config.num_experts));
  for (int64_t t = 0; t < input.T; ++t) {
    if (!input.mask.empty() && input.mask[static_cast<size_t>(t)] != 0) continue;
    for (int64_t k = 0; k < K; ++k) {
      const auto i = static_cast<size_t>(t * K + k);
      const int64_t expert = input.expert_ids[i];
      if (expert >= 0) routes[static_cast<size_t>(expert)].push_back({t, k, input.weights[i]});
    }
  }
  return routes;
}

// Keeps `capacity` routes, in (token, slot) order; returns how many were dropped.
int64_t drop_beyond(int64_t capacity, DropPolicy policy, std::vector<Route>& routes) {
  const auto num_kept = static_cast<size_t>(capacity);
  if (routes.size() <= num_kept) return 0;
  const auto num_dropped = static_cast<int64_t>(routes.size() - num_kept);
  if (policy == DropPolicy::kWeight) {
    // Largest first, NaN before everything; a stable sort keeps equal ones in (token, slot) order.
    std::stable_sort(routes.begin(), routes.end(), [](const Route& a, const Route& b) {
      if (std::isnan(a.weight) || std::isnan(b.weight)) return !std::isnan(b.weight);
      return a.weight > b.weight;
    });
  }
  routes.resize(num_kept);
  std::sort(routes.begin(), routes.end(), [](const Route& a, const Route& b) {
    return a.token != b.token ? a.token < b.token : a.slot < b.slot;
  });
  return num_dropped;
}

// C of a rank with `num_tokens` tokens, if there is a capacity.
int64_t rank_capacity(const DispatchConfig& config, int64_t num_tokens) {
  const Capacity& capacity = *config.capacity;
  return capacity_of(capacity.pad_to_capacity ? capacity.max_tokens : num_tokens, config.top_k,
                     config.num_experts, capacity.factor);
}

// Every rank's kept routes to each expert. [P][E]; fills layout.dropped.
std::vector<std::vector<std::vector<Route>>> kept_routes(const DispatchConfig& config,
                                                         const std::vector<RankInput>& ranks,
                                                         Layout& layout) {
  std::vector<std::vector<std::vector<Route>>> kept;
  for (const RankInput& input : ranks) {
    check_sizes(config, layout.K, input);
    std::vector<std::vector<Route>> routes = routes_by_expert(config, layout.K, input);
    std::vector<int64_t> dropped(routes.size(), 0);
    for (size_t e = 0; config.capacity && e < routes.size(); ++e) {
      dropped[e] = drop_beyond(rank_capacity(config, input.T), config.capacity->policy, routes[e]);
    }
    layout.dropped.push_back(std::move(dropped));
    kept.push_back(std::move(routes));
  }
  return kept;
}

}  // namespace

int64_t capacity_of(int64_t num_tokens, int64_t top_k, int64_t num_experts, double factor) {
  const double even_share =
      static_cast<double>(num_tokens * top_k) / static_cast<double>(num_experts);
  return static_cast<int64_t>(std::ceil(even_share * factor));
}

std::vector<int32_t> owners_of(const DispatchConfig& config, int num_ranks) {
  if (!config.placement.empty()) return config.placement;
  std::vector<int32_t> owners;
  for (int r = 0; r < num_ranks; ++r) {
    const int64_t share = config.num_experts / num_ranks + (r < config.num_experts % num_ranks);
    owners.insert(owners.end(), static_cast<size_t>(share), r);
  }
  return owners;
}

Layout lay_out(const DispatchConfig& config, const std::vector<RankInput>& ranks, int64_t K) {
  CROSSDOCK_CHECK(config.num_experts > 0 && config.top_k > 0 && config.alignment > 0,
                  "num_experts, top_k and alignment must be positive; got ", config.num_experts,
                  ", ", config.top_k, " and ", config.alignment);
  check_placement(config, std::ssize(ranks));
  Layout layout;
  layout.K = K > 0 ? K : config.top_k;
  for (const RankInput& input : ranks) {
    layout.places.emplace_back(static_cast<size_t>(input.T * layout.K));
  }
  layout.receivers.resize(ranks.size());
  const auto kept = kept_routes(config, ranks, layout);
  const std::vector<int32_t> owners = owners_of(config, static_cast<int>(ranks.size()));

  for (int64_t e = 0; e < config.num_experts; ++e) {
    const int owner = owners[static_cast<size_t>(e)];
    Receiver& receiver = layout.receivers[static_cast<size_t>(owner)];
    std::vector<RowSource>& sources = receiver.sources;
    const auto segment_start = static_cast<int64_t>(sources.size());
    int64_t num_real_rows = 0;
    for (size_t s = 0; s < ranks.size(); ++s) {
      const std::vector<Route>& routes = kept[s][static_cast<size_t>(e)];
      for (const Route& route : routes) {
        RowPlace& place =
            layout.places[s][static_cast<size_t>(route.token * layout.K + route.slot)];
        place = {owner, static_cast<int64_t>(sources.size())};
        sources.push_back({static_cast<int>(s), route.token, route.slot});
      }
      num_real_rows += static_cast<int64_t>(routes.size());
      if (config.capacity && config.capacity->pad_to_capacity) {
        const int64_t C = rank_capacity(config, 0);
        sources.resize(sources.size() + static_cast<size_t>(C) - routes.size());
      }
    }
    const bool is_empty = static_cast<int64_t>(sources.size()) == segment_start;
    if (is_empty && config.keep_empty_segments) sources.emplace_back();
    while (static_cast<int64_t>(sources.size()) % config.alignment != 0) sources.emplace_back();
    receiver.experts.push_back(e);
    receiver.segment_starts.push_back(segment_start);
    receiver.rows_per_expert.push_back(num_real_rows);
  }
  for (Receiver& receiver : layout.receivers) {
    receiver.segment_starts.push_back(static_cast<int64_t>(receiver.sources.size()));
  }
  return layout;
}

}  // namespace crossdock::reference
