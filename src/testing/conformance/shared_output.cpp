#include <bit>
#include <cmath>
#include <cstring>

#include "testing/conformance/trial.hpp"
#include "testing/conformance/values.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {
namespace {

constexpr uint64_t kSeed = 7;

uint64_t hash_of_values(const std::vector<double>& values, uint64_t hash) {
  for (const double value : values) {
    hash = hash_of(hash, std::isnan(value) ? 1 : std::bit_cast<uint64_t>(value));
  }
  return hash;
}

}  // namespace

uint64_t output_hash(Group& group, const StrategyFactory& strategy) {
  const World world = make_shared_world(group.size());
  Findings findings;
  Dispatcher dispatcher(group, world.config, strategy());
  Trial trial(dispatcher, world, kSeed, findings);
  trial.combine();
  const Agreement all =
      group.agree({.operation = "conformance", .body = std::as_bytes(std::span(trial.out()))});
  uint64_t hash = 0;
  for (int r = 0; r < group.size(); ++r) {
    std::vector<double> values(all.body(r).size() / sizeof(double));
    if (!values.empty()) std::memcpy(values.data(), all.body(r).data(), all.body(r).size());
    hash = hash_of_values(values, hash);
  }
  return hash;
}

uint64_t expected_output_hash() {
  const World world = make_shared_world(1);
  const int64_t D = world.config.width;
  const reference::Layout layout = reference::lay_out(world.config, world.ranks);
  const reference::PerRank weights = {world.ranks[0].weights};
  const reference::PerRank rows =
      rows_of_routes(layout, D, {route_values(world, 0, kSeed + Trial::kCombineSeed)});
  return hash_of_values(reference::combine_exact(layout, D, world.dtype, rows, &weights)[0], 0);
}

}  // namespace crossdock::conformance
