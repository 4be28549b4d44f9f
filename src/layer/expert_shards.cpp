#include "crossdock/expert_shards.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"

namespace crossdock {
namespace {

constexpr int64_t kMostExperts = int64_t{1} << 20;  // more are assumed to be a mistake

void check_shard(const ExpertsConfig& whole, const ExpertShard& shard) {
  CROSSDOCK_CHECK(!whole.transposed, "sharded experts must not be transposed");
  CROSSDOCK_CHECK(shard.etp >= 1 && shard.etp <= whole.inner, "etp must be from 1 to F (",
                  whole.inner, "), so that each shard has a column; got ", shard.etp);
  CROSSDOCK_CHECK(shard.index >= 0 && shard.index < shard.etp, "index of a shard must be in [0, ",
                  shard.etp, "), got ", shard.index);
}

// The first column of a shard in F; F for index = etp.
int64_t first_column(int64_t F, const ExpertShard& shard) {
  return shard.index * (F / shard.etp) + std::min(shard.index, F % shard.etp);
}

// Columns [whole, whole + count) of whole experts are columns [part, part + count) of a shard.
struct Block {
  int64_t whole;
  int64_t part;
  int64_t count;
};

// A tensor [outer, columns, inner] that is cut by columns.
struct Cut {
  const char* name;
  Shape whole_shape;
  Shape part_shape;
  int64_t outer;
  int64_t whole_columns;
  int64_t part_columns;
  int64_t inner;
  std::vector<Block> blocks;
};

// w1, w2, b1, b2
std::array<Cut, 4> cuts_of(const ExpertsConfig& whole, const ExpertShard& shard) {
  const ExpertsConfig part = shard_of(whole, shard);
  const int64_t E_local = whole.num_local_experts;
  const int64_t D = whole.width;
  const int64_t F = whole.inner;
  const int64_t f = part.inner;
  const int64_t all = whole.hidden_width();
  const int64_t own = part.hidden_width();
  const int64_t first = first_column(F, shard);
  std::vector<Block> hidden = {{first, 0, f}};
  if (is_gated(whole.activation)) {
    if (whole.interleaved) {
      hidden = {{2 * first, 0, 2 * f}};
    } else {
      hidden.push_back({F + first, f, f});
    }
  }
  return {{{"w1", {E_local, all, D}, {E_local, own, D}, E_local, all, own, D, hidden},
           {"w2", {E_local, D, F}, {E_local, D, f}, E_local * D, F, f, 1, {{first, 0, f}}},
           {"b1", {E_local, all}, {E_local, own}, E_local, all, own, 1, hidden},
           {"b2", {E_local, D}, {E_local, D}, E_local, D, D, 1, {{0, 0, D}}}}};
}

// [E] the ep rank of each expert.
std::vector<int32_t> ep_ranks_of(const DispatchConfig& config, int ep) {
  if (!config.placement.empty()) return config.placement;
  std::vector<int32_t> ranks;
  for (int rank = 0; rank < ep; ++rank) {
    const int64_t end = first_expert(config.num_experts, ep, rank + 1);
    ranks.resize(static_cast<size_t>(end), rank);
  }
  return ranks;
}

enum class Direction { kCut, kJoin };

void copy(const Cut& cut, Direction direction, DType dtype, const void* from, void* to) {
  const int64_t bytes = cut.inner * size_of(dtype);  // of a column
  for (int64_t i = 0; i < cut.outer; ++i) {
    for (const Block& block : cut.blocks) {
      const int64_t whole = (i * cut.whole_columns + block.whole) * bytes;
      const int64_t part = (i * cut.part_columns + block.part) * bytes;
      const bool cuts = direction == Direction::kCut;
      std::memcpy(static_cast<std::byte*>(to) + (cuts ? part : whole),
                  static_cast<const std::byte*>(from) + (cuts ? whole : part),
                  static_cast<size_t>(block.count * bytes));
    }
  }
}

// Repeats each value of [T, K] etp times.
OwnedTensor repeat(const ConstTensorView& values, int64_t etp) {
  OwnedTensor repeated = new_host_tensor(values.dtype, {values.shape[0], values.shape[1] * etp});
  const auto bytes = static_cast<size_t>(size_of(values.dtype));
  const auto* from = static_cast<const std::byte*>(values.data);
  auto* to = static_cast<std::byte*>(repeated.view.data);
  for (int64_t i = 0; i < values.num_elements(); ++i, from += bytes) {
    for (int64_t j = 0; j < etp; ++j, to += bytes) std::memcpy(to, from, bytes);
  }
  return repeated;
}

// Experts become virtual experts. Out-of-range ids stay out of range.
template <typename Id>
void number_shards(const TensorView& ids, int64_t etp) {
  const std::span<Id> values = ids.as<Id>();
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0) continue;
    const int64_t last = std::numeric_limits<Id>::max();
    const int64_t id = values[i];
    const int64_t j = static_cast<int64_t>(i) % etp;
    values[i] = static_cast<Id>(id > (last - j) / etp ? last : id * etp + j);
  }
}

template <typename T>
void sum_typed(const ConstTensorView& values, const TensorView& out) {
  const std::span<const T> from = values.as<T>();
  const std::span<T> to = out.as<T>();
  const size_t etp = to.empty() ? 0 : from.size() / to.size();
  for (size_t i = 0; i < to.size(); ++i) {
    T sum = 0;
    for (size_t j = 0; j < etp; ++j) sum += from[i * etp + j];
    to[i] = sum;
  }
}

}  // namespace

ExpertsConfig shard_of(const ExpertsConfig& whole, const ExpertShard& shard) {
  if (shard.etp == 1 && shard.index == 0) return whole;
  check_shard(whole, shard);
  ExpertsConfig part = whole;
  const ExpertShard next{.etp = shard.etp, .index = shard.index + 1};
  part.inner = first_column(whole.inner, next) - first_column(whole.inner, shard);
  return part;
}

OwnedExperts cut_expert_shard(const ExpertsConfig& whole, const ExpertShard& shard,
                              const ExpertWeights& weights) {
  const std::array<Cut, 4> cuts = cuts_of(whole, shard);
  const ConstTensorView given[] = {weights.w1, weights.w2, weights.b1, weights.b2};
  OwnedExperts part;
  OwnedTensor* const results[] = {&part.w1, &part.w2, &part.b1, &part.b2};
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (!given[i].given()) continue;
    check_tensor(cuts[i].name, given[i], cuts[i].whole_shape);
    *results[i] = new_host_tensor(given[i].dtype, cuts[i].part_shape);
    copy(cuts[i], Direction::kCut, given[i].dtype, given[i].data, results[i]->view.data);
  }
  return part;
}

void join_expert_shard(const ExpertsConfig& whole, const ExpertShard& shard,
                       const ExpertWeights& part, const ExpertGradients& to) {
  const std::array<Cut, 4> cuts = cuts_of(whole, shard);
  const ConstTensorView given[] = {part.w1, part.w2, part.b1, part.b2};
  const TensorView results[] = {to.w1, to.w2, to.b1, to.b2};
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (!results[i].given()) continue;
    check_tensor(std::string(cuts[i].name) + " of the shard", given[i], results[i].dtype,
                 cuts[i].part_shape);
    check_tensor(cuts[i].name, results[i], cuts[i].whole_shape);
    copy(cuts[i], Direction::kJoin, given[i].dtype, given[i].data, results[i].data);
  }
}

DispatchConfig shard_experts(const DispatchConfig& config, int64_t etp, int num_ranks) {
  CROSSDOCK_CHECK(etp >= 1 && num_ranks % etp == 0, "etp (", etp,
                  ") must be at least 1 and divide the number of ranks of the group (", num_ranks,
                  ")");
  if (etp == 1) return config;
  const auto ep = static_cast<int>(num_ranks / etp);
  const int64_t E = config.num_experts;
  CROSSDOCK_CHECK(E >= 1 && E <= kMostExperts, "num_experts must be in [1, ", kMostExperts,
                  "], got ", E);
  CROSSDOCK_CHECK(config.top_k <= E && config.max_routes_per_token <= E, "num_experts (", E,
                  ") must be at least top_k (", config.top_k, ") and max_routes_per_token (",
                  config.max_routes_per_token, ")");
  CROSSDOCK_CHECK(config.placement.empty() || std::ssize(config.placement) == E,
                  "placement must name the rank of each of the ", E, " experts, got ",
                  config.placement.size(), " entries");
  DispatchConfig sharded = config;
  sharded.num_experts = E * etp;
  sharded.top_k = config.top_k * etp;
  sharded.max_routes_per_token = config.max_routes_per_token * etp;
  sharded.placement.clear();
  const std::vector<int32_t> ep_ranks = ep_ranks_of(config, ep);
  for (size_t e = 0; e < ep_ranks.size(); ++e) {
    const int32_t rank = ep_ranks[e];
    CROSSDOCK_CHECK(rank >= 0 && rank < ep, "placement of expert ", e,
                    " must be an ep rank in [0, ", ep, "), got ", rank);
    for (int64_t j = 0; j < etp; ++j) {
      sharded.placement.push_back(static_cast<int32_t>(rank * etp + j));
    }
  }
  return sharded;
}

ShardedRoutes shard_routes(const Routing& routing, int64_t etp) {
  const ConstTensorView& ids = routing.expert_ids;
  const Shape shape{ids.num_rows(), ids.shape.rank() == 2 ? ids.shape[1] : 0};
  CROSSDOCK_CHECK(etp >= 1, "etp must be at least 1, got ", etp);
  CROSSDOCK_CHECK(ids.dtype == DType::kI32 || ids.dtype == DType::kI64,
                  "expert_ids must be int32 or int64, got ", name_of(ids.dtype));
  check_tensor("expert_ids", ids, shape);
  check_tensor("weights", routing.weights, shape);
  ShardedRoutes sharded{.expert_ids = repeat(ids, etp), .weights = repeat(routing.weights, etp)};
  if (ids.dtype == DType::kI64) {
    number_shards<int64_t>(sharded.expert_ids.view, etp);
  } else {
    number_shards<int32_t>(sharded.expert_ids.view, etp);
  }
  return sharded;
}

void sum_over_shards(ConstTensorView values, TensorView out) {
  const int64_t K = out.shape.rank() == 2 ? out.shape[1] : 0;
  const int64_t slots = values.shape.rank() == 2 ? values.shape[1] : 0;
  CROSSDOCK_CHECK(K >= 1 && slots >= K && slots % K == 0, "values must be [T, K * etp] and out ",
                  "[T, K], got ", describe(values), " and ", describe(out));
  const bool is_f64 = values.dtype == DType::kF64;
  check_tensor("values", values, is_f64 ? DType::kF64 : DType::kF32, {out.shape[0], slots});
  check_tensor("out", out, values.dtype, {out.shape[0], K});
  check_no_overlap({{"out", out}}, {{"values", values}});
  if (is_f64) return sum_typed<double>(values, out);
  sum_typed<float>(values, out);
}

}  // namespace crossdock
