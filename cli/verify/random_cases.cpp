#include "cli/verify/random_cases.hpp"

#include <memory>
#include <sstream>

#include "cli/device/tensor_place.hpp"
#include "crossdock/testing/layer_worlds.hpp"

namespace crossdock::cli {
namespace {

using conformance::World;
using testing::RandomCase;
using testing::RandomNumbers;

constexpr int64_t kLayerOneIn = 4;  // cases are whole layers

// The seed of one thing among many.
uint64_t seed_of(uint64_t seed, uint64_t what, int64_t number) {
  RandomNumbers numbers(seed ^ (what << 56));
  return RandomNumbers(numbers.next() + static_cast<uint64_t>(number)).next();
}

std::string summary_of(const World& world, int ranks_per_node) {
  const DispatchConfig& config = world.config;
  std::ostringstream text;
  text << "dispatch: ranks " << world.ranks.size();
  if (ranks_per_node > 0) text << " (" << ranks_per_node << " per node)";
  text << ", T ";
  for (size_t r = 0; r < world.ranks.size(); ++r) text << (r > 0 ? "," : "") << world.ranks[r].T;
  text << ", E " << config.num_experts << ", K " << world.num_slots() << ", D " << config.width
       << ", " << name_of(world.dtype) << (world.dense ? ", dense" : "");
  if (config.alignment > 1) text << ", alignment " << config.alignment;
  if (config.capacity) text << ", capacity " << config.capacity->factor;
  if (!config.placement.empty()) text << ", placement";
  if (config.partial_sums != PartialSums::kNone) {
    text << ", partial sums " << name_of(config.partial_sums);
  }
  if (config.max_rows) text << ", max_rows " << *config.max_rows;
  return text.str();
}

}  // namespace

BlockShape shape_of_block(uint64_t seed, int64_t number, int most_ranks) {
  RandomNumbers random(seed_of(seed, 1, number / kCasesPerBlock));
  BlockShape shape;
  shape.num_ranks = static_cast<int>(random.in(1, most_ranks));
  shape.ranks_per_node = random.one_of({0, 0, 1, 2, 3});
  return shape;
}

RandomCase make_random_case(uint64_t seed, int64_t number, int most_ranks, bool on_gpu) {
  const BlockShape shape = shape_of_block(seed, number, most_ranks);
  const uint64_t own = seed_of(seed, 2, number);
  if (number % kLayerOneIn == 0) {
    return testing::layer_case(conformance::random_layer_spec(own, shape.num_ranks, on_gpu),
                               shape.ranks_per_node, tensor_places(on_gpu ? "cuda" : "cpu"));
  }
  return random_case_of(testing::random_dispatch_world(own, {.num_ranks = shape.num_ranks}),
                        shape.ranks_per_node);
}

RandomCase random_case_of(const World& given, int ranks_per_node) {
  const auto world = std::make_shared<const World>(given);
  RandomCase made;
  made.kind = "dispatch";
  made.summary = summary_of(*world, ranks_per_node);
  made.num_ranks = static_cast<int>(world->ranks.size());
  made.ranks_per_node = ranks_per_node;
  made.run = [world](Group& group, const testing::RandomSetting& setting) {
    return testing::judge_dispatch_world(group, setting, *world);
  };
  made.simpler = [world, ranks_per_node] {
    std::vector<RandomCase> cases;
    if (ranks_per_node > 0) cases.push_back(random_case_of(*world, 0));
    for (const World& simpler : testing::simpler_worlds(*world)) {
      cases.push_back(random_case_of(simpler, ranks_per_node));
    }
    return cases;
  };
  made.to_file = [world, ranks_per_node](const std::string& strategy,
                                         const std::string& communicator,
                                         const std::string& device) {
    return to_json(DispatchCase{.strategy = strategy,
                                .communicator = communicator,
                                .device = device,
                                .ranks_per_node = ranks_per_node,
                                .world = *world});
  };
  return made;
}

}  // namespace crossdock::cli
