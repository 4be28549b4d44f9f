#include <algorithm>
#include <cmath>
#include <utility>

#include "crossdock/testing/random_worlds.hpp"
#include "testing/conformance/trial.hpp"

namespace crossdock::testing {
namespace {

using reference::RankInput;

// Worlds with few tokens try to leave out each of them.
constexpr int64_t kFewTokens = 64;

// Keeps the tokens [first, last) of a rank.
void keep_tokens(RankInput& rank, int64_t first, int64_t last, int64_t K) {
  const auto cut = [&](auto& values, int64_t width) {
    if (values.empty()) return;
    values.erase(values.begin() + last * width, values.end());
    values.erase(values.begin(), values.begin() + first * width);
  };
  cut(rank.expert_ids, K);
  cut(rank.weights, K);
  cut(rank.mask, 1);
  rank.T = last - first;
}

void erase_token(RankInput& rank, int64_t token, int64_t K) {
  const auto erase = [&](auto& values, int64_t width) {
    if (values.empty()) return;
    const auto first = values.begin() + token * width;
    values.erase(first, first + width);
  };
  erase(rank.expert_ids, K);
  erase(rank.weights, K);
  erase(rank.mask, 1);
  --rank.T;
}

// Experts of the rank move to rank 0.
World without_rank(World world, size_t rank) {
  world.ranks.erase(world.ranks.begin() + static_cast<int64_t>(rank));
  for (int32_t& owner : world.config.placement) {
    if (owner == static_cast<int32_t>(rank)) owner = 0;
    if (owner > static_cast<int32_t>(rank)) --owner;
  }
  return world;
}

// A smaller top_k leaves out the last slots.
World with_top_k(World world, int64_t top_k) {
  const int64_t K = world.num_slots();
  world.config.top_k = top_k;
  if (world.dense) return world;
  for (RankInput& rank : world.ranks) {
    std::vector<int64_t> ids;
    std::vector<double> weights;
    for (int64_t t = 0; t < rank.T; ++t) {
      const int64_t first = t * K;
      ids.insert(ids.end(), rank.expert_ids.begin() + first,
                 rank.expert_ids.begin() + first + top_k);
      weights.insert(weights.end(), rank.weights.begin() + first,
                     rank.weights.begin() + first + top_k);
    }
    rank.expert_ids = std::move(ids);
    rank.weights = std::move(weights);
  }
  return world;
}

World without_expert(World world, int64_t expert) {
  if (world.config.top_k == world.config.num_experts) {
    const int64_t top_k = world.config.top_k - 1;
    world = with_top_k(std::move(world), top_k);
  }
  DispatchConfig& config = world.config;
  --config.num_experts;
  if (config.max_routes_per_token > 0) {
    config.max_routes_per_token = std::min(config.max_routes_per_token, config.num_experts);
  }
  if (!config.placement.empty()) config.placement.erase(config.placement.begin() + expert);
  for (RankInput& rank : world.ranks) {
    for (int64_t& id : rank.expert_ids) {
      if (id == expert) id = -1;
      if (id > expert) --id;
    }
  }
  return world;
}

// Collects the simpler worlds of one world.
class Simplifier {
 public:
  explicit Simplifier(const World& world) : world_(world) {}

  // The world after `change`.
  void change(const auto& change) {
    World world = world_;
    change(world);
    add(std::move(world));
  }

  void add(World world) {
    if (world.config.max_rows) {  // too few stay too few
      const bool was_enough = most_rows(world_) <= *world_.config.max_rows;
      world.config.max_rows = std::max<int64_t>(0, most_rows(world) - (was_enough ? 0 : 1));
    }
    fit_slots(world);
    worlds_.push_back(std::move(world));
  }

  void leave_out_ranks() {
    for (size_t r = world_.ranks.size(); r-- > 0 && world_.ranks.size() > 1;) {
      add(without_rank(world_, r));
    }
  }

  void leave_out_tokens() {
    const int64_t K = world_.num_slots();
    int64_t num_tokens = 0;
    for (size_t r = 0; r < world_.ranks.size(); ++r) {
      const int64_t T = world_.ranks[r].T;
      num_tokens += T;
      if (T > 0) change([&](World& w) { keep_tokens(w.ranks[r], 0, 0, K); });
      if (T < 2) continue;
      change([&](World& w) { keep_tokens(w.ranks[r], 0, T / 2, K); });
      change([&](World& w) { keep_tokens(w.ranks[r], T / 2, T, K); });
    }
    if (num_tokens > kFewTokens) return;
    for (size_t r = 0; r < world_.ranks.size(); ++r) {
      for (int64_t t = world_.ranks[r].T; t-- > 0;) {
        change([&](World& w) { erase_token(w.ranks[r], t, K); });
      }
    }
  }

  void leave_out_experts() {
    const int64_t E = world_.config.num_experts;
    if (E > 3) {
      World half = world_;
      while (half.config.num_experts > E / 2) {
        const int64_t last = half.config.num_experts - 1;
        half = without_expert(std::move(half), last);
      }
      add(std::move(half));
    }
    for (int64_t e = E; e-- > 0 && E > 1;) add(without_expert(world_, e));
  }

  void narrow() {
    const int64_t K = world_.config.top_k;
    const int64_t D = world_.config.width;
    for (const int64_t top_k : {int64_t{1}, K / 2, K - 1}) {
      if (top_k >= 1 && top_k < K) add(with_top_k(world_, top_k));
    }
    for (const int64_t width : {int64_t{1}, D / 2, D - 1}) {
      if (width >= 1 && width < D) change([&](World& w) { w.config.width = width; });
    }
  }

  void leave_out_options();
  void leave_out_routes();

  std::vector<World> take() { return std::move(worlds_); }

 private:
  const World& world_;
  std::vector<World> worlds_;
};

void Simplifier::leave_out_options() {
  const DispatchConfig& config = world_.config;
  const auto drop = [&](bool is_set, const auto& how) {
    if (is_set) change(how);
  };
  drop(config.capacity.has_value(), [](World& w) { w.config.capacity.reset(); });
  drop(config.capacity && config.capacity->pad_to_capacity,
       [](World& w) { w.config.capacity->pad_to_capacity = false; });
  drop(config.max_rows.has_value(), [](World& w) { w.config.max_rows.reset(); });
  drop(!config.placement.empty(), [](World& w) { w.config.placement.clear(); });
  drop(config.alignment > 1, [](World& w) { w.config.alignment = 1; });
  drop(config.keep_empty_segments, [](World& w) { w.config.keep_empty_segments = false; });
  drop(config.max_routes_per_token > 0, [](World& w) { w.config.max_routes_per_token = 0; });
  drop(config.copies != Copies::kAuto, [](World& w) { w.config.copies = Copies::kAuto; });
  drop(config.partial_sums != PartialSums::kNone,
       [](World& w) { w.config.partial_sums = PartialSums::kNone; });
  drop(world_.dense && world_.num_slots() == config.top_k, [](World& w) {
    w.dense = false;
    w.slots = 0;
    w.config.max_routes_per_token = 0;
  });
  drop(world_.wide_ids, [](World& w) { w.wide_ids = false; });
  drop(world_.num_chunks > 1, [](World& w) { w.num_chunks = 1; });
  drop(world_.awaits_chunks, [](World& w) { w.awaits_chunks = false; });
  drop(world_.weight_dtype && *world_.weight_dtype != DType::kF32,
       [](World& w) { w.weight_dtype = DType::kF32; });
  drop(world_.dtype != DType::kF32, [](World& w) {
    w.dtype = DType::kF32;
    for (RankInput& rank : w.ranks) {
      for (double& weight : rank.weights) weight = reference::round_to(DType::kF32, weight);
    }
  });
}

void Simplifier::leave_out_routes() {
  bool has_mask = false;
  bool has_other_weights = false;
  bool is_finite = true;
  int64_t num_slots = 0;
  for (const RankInput& rank : world_.ranks) {
    num_slots += std::ssize(rank.expert_ids);
    has_mask = has_mask || !rank.mask.empty();
    for (const double weight : rank.weights) {
      has_other_weights = has_other_weights || weight != 1.0;
      is_finite = is_finite && std::isfinite(weight);
    }
  }
  if (has_mask) {
    change([](World& w) {
      for (RankInput& rank : w.ranks) rank.mask.clear();
      for (RankInput& rank : w.ranks) {
        for (double& weight : rank.weights) weight = std::isnan(weight) ? 1.0 : weight;
      }
    });
  }
  if (has_other_weights) {
    change([](World& w) {
      for (RankInput& rank : w.ranks) std::fill(rank.weights.begin(), rank.weights.end(), 1.0);
    });
  }
  if (world_.config.nonfinite == NonFinite::kPropagate && is_finite) {
    change([](World& w) { w.config.nonfinite = NonFinite::kReject; });
  }
  for (size_t r = 0; r < world_.ranks.size() && num_slots <= kFewTokens; ++r) {
    for (size_t i = 0; i < world_.ranks[r].expert_ids.size(); ++i) {
      if (world_.ranks[r].expert_ids[i] < 0) continue;
      change([&](World& w) { w.ranks[r].expert_ids[i] = -1; });
    }
  }
}

}  // namespace

void fit_slots(World& world) {
  if (!world.dense) return;
  struct Slot {
    int64_t expert;
    double weight;
  };
  const int64_t K = world.num_slots();
  const DispatchConfig& config = world.config;
  int64_t most = std::max(config.top_k, config.max_routes_per_token);
  std::vector<std::vector<std::vector<Slot>>> tokens(world.ranks.size());  // [P][T]
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    const RankInput& rank = world.ranks[r];
    for (int64_t t = 0; t < rank.T; ++t) {
      std::vector<Slot>& slots = tokens[r].emplace_back();
      for (auto i = static_cast<size_t>(t * K); i < static_cast<size_t>((t + 1) * K); ++i) {
        if (rank.expert_ids[i] >= 0) slots.push_back({rank.expert_ids[i], rank.weights[i]});
      }
      std::ranges::sort(slots, {}, &Slot::expert);
      const bool is_masked = !rank.mask.empty() && rank.mask[static_cast<size_t>(t)] != 0;
      if (!is_masked) most = std::max(most, std::ssize(slots));
    }
  }
  world.slots = most;
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    world.ranks[r].expert_ids.clear();
    world.ranks[r].weights.clear();
    for (std::vector<Slot>& slots : tokens[r]) {
      slots.resize(static_cast<size_t>(most), {-1, 0.0});
      for (const Slot& slot : slots) {
        world.ranks[r].expert_ids.push_back(slot.expert);
        world.ranks[r].weights.push_back(slot.weight);
      }
    }
  }
}

int64_t most_rows(const World& world) {
  const reference::Layout layout = reference::lay_out(world.config, world.ranks, world.slots);
  int64_t most = 0;
  for (int r = 0; r < layout.num_ranks(); ++r) most = std::max(most, layout.num_rows(r));
  return most;
}

std::vector<World> simpler_worlds(const World& world) {
  Simplifier simplifier(world);
  simplifier.leave_out_ranks();
  simplifier.leave_out_tokens();
  simplifier.leave_out_experts();
  simplifier.leave_out_options();
  simplifier.narrow();
  simplifier.leave_out_routes();
  return simplifier.take();
}

RandomCase reduce(RandomCase failing, const std::function<bool(const RandomCase&)>& fails,
                  int most_tries) {
  bool is_simpler = true;
  while (is_simpler) {
    is_simpler = false;
    for (RandomCase& simpler : failing.simpler()) {
      if (most_tries-- <= 0) return failing;
      if (!fails(simpler)) continue;
      failing = std::move(simpler);
      is_simpler = true;
      break;
    }
  }
  return failing;
}

}  // namespace crossdock::testing
