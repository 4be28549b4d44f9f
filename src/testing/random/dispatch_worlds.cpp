#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "core/check.hpp"
#include "crossdock/testing/random_worlds.hpp"
#include "testing/conformance/trial.hpp"
#include "testing/conformance/values.hpp"

namespace crossdock::testing {
namespace {

using reference::RankInput;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Bounds the work of a case: values [routes, D] and rows [R, D], of all ranks together.
constexpr int64_t kMostValues = 12'000;
constexpr int64_t kMostValuesOfLarge = 400'000;

enum class WeightKind : uint8_t { kAny, kSoftmax, kEqual, kSigned, kExtreme, kNonFinite, kShort };

// What a world is made of besides its fields.
struct Draw {
  RandomNumbers random;
  bool is_large = false;
  int skew = 0;                // favours low experts
  int64_t absent_one_in = 0;   // slots without a route; 0: none
  bool has_full_slots = true;  // dense: as many bits as top_k; else any number
  WeightKind weights = WeightKind::kAny;

  int64_t most_values() const { return is_large ? kMostValuesOfLarge : kMostValues; }
};

void draw_sizes(Draw& draw, World& world) {
  RandomNumbers& random = draw.random;
  const int64_t P = std::ssize(world.ranks);
  DispatchConfig& config = world.config;
  config.num_experts = random.one_in(12) ? random.in(1, 12 * P) : random.in(1, 2 * P + 4);
  config.top_k = random.in(1, std::min<int64_t>(random.one_in(5) ? 12 : 4, config.num_experts));
  config.width = random.one_of<int64_t>({1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 33, 64, 65});
  if (random.one_in(10)) config.width = random.in(1, 300);
  if (draw.is_large && random.one_in(2)) config.width = random.in(1000, 9000);
}

void draw_token_counts(Draw& draw, World& world) {
  RandomNumbers& random = draw.random;
  const int64_t P = std::ssize(world.ranks);
  const int64_t all = std::max<int64_t>(
      P, draw.most_values() / (world.config.top_k * world.config.width));  // of all ranks
  const int64_t most = std::max<int64_t>(1, std::min(all / P, random.one_of<int64_t>({3, 9, 40})));
  const bool has_none = random.one_in(40);
  for (RankInput& rank : world.ranks) {
    rank.T = has_none || random.one_in(6) ? 0 : random.in(0, most);
  }
  if (random.one_in(6) || draw.is_large) {  // one rank has many
    const auto rank = static_cast<size_t>(random.in(0, P - 1));
    world.ranks[rank].T = random.in(0, std::min<int64_t>(all / 2, draw.is_large ? 4000 : 300));
  }
}

// Experts from `allowed`, all different, the first ones more often if skewed.
std::vector<int64_t> draw_experts(Draw& draw, std::vector<int64_t> allowed, int64_t count) {
  std::vector<int64_t> ids;
  for (int64_t k = 0; k < count && !allowed.empty(); ++k) {
    int64_t index = std::ssize(allowed) - 1;
    for (int i = 0; i <= draw.skew; ++i) index = std::min(index, draw.random.in(0, index));
    ids.push_back(allowed[static_cast<size_t>(index)]);
    allowed.erase(allowed.begin() + index);
  }
  return ids;
}

// The experts that tokens of the world may choose.
std::vector<int64_t> draw_allowed(Draw& draw, const World& world) {
  std::vector<int64_t> allowed(static_cast<size_t>(world.config.num_experts));
  std::iota(allowed.begin(), allowed.end(), 0);
  const int64_t P = std::ssize(world.ranks);
  if (draw.random.one_in(6)) {  // those of one rank
    const auto owners = reference::owners_of(world.config, static_cast<int>(P));
    const auto owner = draw.random.in(0, P - 1);
    std::erase_if(allowed, [&](int64_t e) { return owners[static_cast<size_t>(e)] != owner; });
  } else if (draw.random.one_in(8)) {
    allowed = {draw.random.in(0, world.config.num_experts - 1)};
  }
  return allowed;
}

void draw_routes(Draw& draw, World& world) {
  RandomNumbers& random = draw.random;
  draw.skew = random.one_in(3) ? static_cast<int>(random.in(1, 4)) : 0;
  draw.absent_one_in = random.one_in(3) ? random.in(1, 5) : 0;
  world.dense = random.one_in(4);
  draw.has_full_slots = !world.dense || random.one_in(3);
  const bool has_mask = random.one_in(5);
  const std::vector<int64_t> allowed = draw_allowed(draw, world);
  const int64_t most_bits =
      draw.has_full_slots ? world.config.top_k : std::min<int64_t>(world.config.num_experts, 24);
  world.slots = most_bits;
  for (RankInput& rank : world.ranks) {
    for (int64_t t = 0; t < rank.T; ++t) {
      const int64_t count = draw.has_full_slots ? most_bits : random.in(0, most_bits);
      std::vector<int64_t> ids = draw_experts(draw, allowed, count);
      for (int64_t& id : ids) {
        if (draw.absent_one_in > 0 && random.one_in(draw.absent_one_in)) id = -1;
      }
      ids.resize(static_cast<size_t>(most_bits), -1);
      rank.expert_ids.insert(rank.expert_ids.end(), ids.begin(), ids.end());
      if (has_mask) rank.mask.push_back(random.one_in(3) ? 1 : 0);
    }
    rank.weights.resize(rank.expert_ids.size(), 0.0);
  }
  if (!world.dense) world.slots = 0;
  fit_slots(world);
}

void draw_capacity(Draw& draw, World& world) {
  RandomNumbers& random = draw.random;
  if (!random.one_in(4)) return;
  Capacity capacity{.factor = std::ldexp(static_cast<double>(random.in(1, 64)), -5),
                    .policy = random.one_of({DropPolicy::kPosition, DropPolicy::kWeight})};
  if (random.one_in(3)) {
    int64_t most = 1;
    for (const RankInput& rank : world.ranks) most = std::max(most, rank.T);
    capacity.max_tokens = most + random.in(0, 3);
    const int64_t rows = reference::capacity_of(capacity.max_tokens, world.config.top_k,
                                                world.config.num_experts, capacity.factor) *
                         world.config.num_experts * std::ssize(world.ranks);
    capacity.pad_to_capacity = rows * world.config.width <= draw.most_values();
  }
  world.config.capacity = capacity;
}

void draw_options(Draw& draw, World& world) {
  RandomNumbers& random = draw.random;
  DispatchConfig& config = world.config;
  world.wide_ids = random.one_in(2);
  world.num_chunks = random.in(1, 5);
  world.awaits_chunks = random.one_in(2);
  config.keep_empty_segments = random.one_in(8);
  config.copies = random.one_of({Copies::kAuto, Copies::kPerRoute, Copies::kPerRank});
  if (random.one_in(3)) {
    const int64_t alignment = random.one_of<int64_t>({8, 8, 16, 32, 64, 128, 256});
    if (alignment * config.num_experts * config.width <= 4 * draw.most_values()) {
      config.alignment = alignment;
    }
  }
  if (world.dense && random.one_in(2)) {
    config.max_routes_per_token = random.in(world.num_slots(), config.num_experts);
    fit_slots(world);
  }
  if (random.one_in(4)) {
    config.partial_sums = random.one_of({PartialSums::kF32, PartialSums::kRowType});
    world.exact_sums = random.one_in(3);
  }
}

double draw_weight(WeightKind kind, double equal, RandomNumbers& random) {
  const double fraction = static_cast<double>(random.next() >> 11) * 0x1p-53;
  switch (kind) {
    case WeightKind::kEqual:
      return equal;
    case WeightKind::kSoftmax:
      return fraction;
    case WeightKind::kSigned:
      return random.one_in(3) ? 0.0 : random.one_in(8) ? -0.0 : 4.0 * fraction - 2.0;
    case WeightKind::kExtreme:
      return std::ldexp(fraction - 0.5, static_cast<int>(random.in(-150, 130)));
    case WeightKind::kNonFinite:
      if (!random.one_in(6)) return fraction;
      return random.one_of({kNan, std::numeric_limits<double>::infinity(),
                            -std::numeric_limits<double>::infinity()});
    default:
      return std::ldexp(fraction + 0.5, static_cast<int>(random.in(-3, 3)));
  }
}

void draw_weights(Draw& draw, World& world) {
  RandomNumbers& random = draw.random;
  if (world.exact_sums) return conformance::make_weights(world);
  draw.weights = static_cast<WeightKind>(random.in(0, static_cast<int64_t>(WeightKind::kShort)));
  const bool propagates = draw.weights == WeightKind::kNonFinite;
  if (propagates || random.one_in(8)) world.config.nonfinite = NonFinite::kPropagate;
  if (draw.weights == WeightKind::kShort && world.dtype != DType::kF64) {
    world.weight_dtype = random.one_of({DType::kBF16, DType::kF16});
  }
  const DType dtype =
      world.weight_dtype.value_or(world.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  const double without_route = random.one_in(2) ? kNan : 0.0;
  const double equal = static_cast<double>(random.in(-2, 2)) / 2.0;
  for (RankInput& rank : world.ranks) {
    for (size_t i = 0; i < rank.weights.size(); ++i) {
      const auto token = i / static_cast<size_t>(world.num_slots());
      const bool is_route = rank.expert_ids[i] >= 0 && (rank.mask.empty() || !rank.mask[token]);
      double weight = reference::round_to(dtype, draw_weight(draw.weights, equal, random));
      if (std::isinf(weight) && !propagates) weight = 1.0;
      rank.weights[i] = is_route ? weight : without_route;
    }
  }
}

// A limit on rows: just enough, more, or one too few.
void draw_max_rows(Draw& draw, World& world) {
  if (!draw.random.one_in(6)) return;
  world.config.max_rows =
      std::max<int64_t>(0, most_rows(world) + draw.random.one_of<int64_t>({0, 0, 1, 100, -1}));
}

}  // namespace

World random_dispatch_world(uint64_t seed, const RandomLimits& limits) {
  Draw draw{.random = RandomNumbers(seed)};
  RandomNumbers& random = draw.random;
  World world;
  world.name = "random";
  world.seed = random.next() >> 16;
  world.ranks.resize(static_cast<size_t>(limits.num_ranks));
  world.dtype = random.one_of({DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kF8E4M3,
                               DType::kF32, DType::kBF16});
  draw.is_large = random.one_in(1000);
  draw_sizes(draw, world);
  if (random.one_in(3)) {
    const int64_t last = random.one_in(4) ? 0 : limits.num_ranks - 1;
    for (int64_t e = 0; e < world.config.num_experts; ++e) {
      world.config.placement.push_back(static_cast<int32_t>(random.in(0, last)));
    }
  }
  draw_token_counts(draw, world);
  draw_routes(draw, world);
  draw_options(draw, world);
  draw_capacity(draw, world);
  draw_weights(draw, world);
  draw_max_rows(draw, world);
  return world;
}

CaseOutcome judge_dispatch_world(Group& group, const RandomSetting& setting, const World& given) {
  constexpr int64_t kMostExactSlots = 36;  // for sums of quarters in bf16
  constexpr uint64_t kTransposeOneIn = 4;
  CaseOutcome outcome;
  World world = given;
  const auto make = [&] {
    return std::make_unique<conformance::PlacedDispatcher>(group, world.config, setting.strategy,
                                                           setting.candidates);
  };
  if (setting.on_gpu) {
    world.config.max_rows.reset();  // Trial reads rows past the last segment
  } else if (world.config.max_rows && most_rows(world) > *world.config.max_rows) {
    const auto dispatcher = make();
    try {
      conformance::Trial trial(*dispatcher, world, world.seed, outcome.findings);
      outcome.findings.emplace_back("a plan with too few max_rows was accepted");
      return outcome;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCapacity) throw;
    }
    world.config.max_rows.reset();  // the group must stay usable
  }
  const auto dispatcher = make();
  conformance::Trial trial(*dispatcher, world, world.seed, outcome.findings);
  trial.dispatch();
  trial.dispatch_in_chunks();
  trial.combine();
  trial.backward();
  const bool is_exact = world.exact_sums || world.config.partial_sums == PartialSums::kNone;
  if (is_exact && world.num_slots() <= kMostExactSlots && world.seed % kTransposeOneIn == 0) {
    trial.transpose();
  }
  outcome.bits = trial.bits();
  return outcome;
}

namespace {

// What a rank tells the others: its hash, then "strategy\nfinding\0" for each finding.
std::string to_body(uint64_t bits, const std::vector<std::pair<std::string, std::string>>& found) {
  std::string body(sizeof(bits), '\0');
  std::memcpy(body.data(), &bits, sizeof(bits));
  for (const auto& [strategy, finding] : found) {
    body.append(strategy).append("\n").append(finding).push_back('\0');
  }
  return body;
}

void add_body(std::span<const std::byte> bytes, int rank, CaseVerdict& verdict) {
  uint64_t bits = 0;
  std::memcpy(&bits, bytes.data(), sizeof(bits));
  if (bits != 0) verdict.bits += conformance::hash_of(bits, static_cast<uint64_t>(rank));
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (size_t begin = sizeof(bits); begin < text.size();) {
    const size_t line = text.find('\n', begin);
    const size_t end = text.find('\0', line);
    const std::string strategy = text.substr(begin, line - begin);
    if (verdict.strategy.empty()) verdict.strategy = strategy;
    std::string finding = strategy + ": " + text.substr(line + 1, end - line - 1);
    begin = end + 1;
    // All ranks report the same error.
    if (std::ranges::find(verdict.findings, finding) != verdict.findings.end()) continue;
    verdict.findings.push_back(std::move(finding));
  }
}

}  // namespace

CaseVerdict judge_case(Group& group, const RandomCase& random_case,
                       const std::vector<std::string>& strategies, const StrategyList& candidates,
                       bool on_gpu) {
  const std::string rank = concat("rank ", group.rank(), ": ");
  std::vector<std::pair<std::string, std::string>> found;
  uint64_t bits = 0;
  for (const std::string& strategy : strategies) {
    try {
      CaseOutcome outcome = random_case.run(
          group, {.strategy = strategy, .candidates = candidates, .on_gpu = on_gpu});
      for (std::string& finding : outcome.findings) found.emplace_back(strategy, finding);
      if (bits != 0 && outcome.bits != 0 && outcome.bits != bits) {
        found.emplace_back(
            strategy, concat(rank, "the results have other bits than with ", strategies.front()));
      }
      if (bits == 0) bits = outcome.bits;
    } catch (const std::exception& error) {
      found.emplace_back(strategy, error.what());
      break;
    }
  }
  CaseVerdict verdict;
  try {
    const std::string own = to_body(bits, found);
    const Agreement all =
        group.agree({.operation = "random case", .body = std::as_bytes(std::span(own))});
    for (int r = 0; r < group.size(); ++r) add_body(all.body(r), r, verdict);
  } catch (const Error& error) {
    // The ranks are no longer at the same call.
    group.fail(error);
    for (const auto& [strategy, finding] : found) {
      verdict.findings.push_back(concat(strategy, ": ", finding));
    }
    if (found.empty()) verdict.findings.push_back(rank + error.what());
    verdict.strategy = found.empty() ? strategies.back() : found.front().first;
  }
  if (!verdict.passed()) verdict.bits = 0;
  return verdict;
}

}  // namespace crossdock::testing
