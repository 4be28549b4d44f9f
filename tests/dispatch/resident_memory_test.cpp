#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "comm/group_runner.hpp"
#include "crossdock/dispatcher.hpp"

namespace crossdock {
namespace {

constexpr int64_t kTokens = 2048;
constexpr int64_t kWidth = 1024;
constexpr int64_t kTopK = 4;
constexpr int64_t kExperts = 16;

// Resident bytes of this process; a page shared by several processes is divided among them.
int64_t resident_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "Pss:") return kibibytes * 1024;
  }
  return 0;
}

// Resident bytes of all processes of the group, each counted once. Collective.
int64_t resident_bytes_of_all(Group& group) {
  group.agree({.operation = "before_counting"});
  struct Count {
    int64_t process;
    int64_t bytes;
  };
  const Count own{.process = getpid(), .bytes = resident_bytes()};
  const Agreement all =
      group.agree({.operation = "count", .body = std::as_bytes(std::span(&own, 1))});
  std::map<int64_t, int64_t> bytes_of_process;
  for (int rank = 0; rank < group.size(); ++rank) {
    Count count{};
    std::memcpy(&count, all.body(rank).data(), sizeof count);
    bytes_of_process[count.process] = count.bytes;
  }
  int64_t total = 0;
  for (const auto& [process, bytes] : bytes_of_process) total += bytes;
  return total;
}

// Every rank's tokens go to all experts equally, in a different order on every rank.
std::vector<int32_t> routes_of(int rank) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t k = 0; k < kTopK; ++k) {
      ids.push_back(static_cast<int32_t>((t + rank + k * (kExperts / kTopK)) % kExperts));
    }
  }
  return ids;
}

TEST(ResidentMemory, GrowsByTheLeasesOfAStepAndTheOutput) {
  testing::run_healthy_group(testing::group_sizes().back(), [](Group& group) {
    const std::vector<int32_t> ids = routes_of(group.rank());
    const std::vector<float> weights(ids.size(), 0.25F);
    const std::vector<float> x(static_cast<size_t>(kTokens * kWidth), 1.0F);
    Dispatcher dispatcher(group, {.num_experts = kExperts, .top_k = kTopK, .width = kWidth},
                          "direct");
    const Plan plan =
        dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {kTokens, kTopK}),
                                .weights = ConstTensorView(weights.data(), {kTokens, kTopK})});
    const int64_t before = resident_bytes_of_all(group);
    const DispatchResult sent =
        dispatcher.dispatch(plan, {.x = ConstTensorView(x.data(), {kTokens, kWidth})});
    const OwnedTensor y = dispatcher.allocate_rows(plan, DType::kF32);
    std::memcpy(y.view.data, sent.rows.view.data, static_cast<size_t>(y.view.num_bytes()));
    const OwnedTensor out = dispatcher.combine(plan, y.view);
    const int64_t growth = resident_bytes_of_all(group) - before;

    const int64_t row_bytes = kWidth * static_cast<int64_t>(sizeof(float));
    const int64_t leases = 2 * group.size() * kTokens * kTopK * row_bytes;
    const int64_t outputs = group.size() * kTokens * row_bytes;
    EXPECT_NEAR(static_cast<double>(growth) / static_cast<double>(leases + outputs), 1.0, 0.1);
    // The group reports the memory it holds.
    const GroupMemory memory = group.memory();
    const int64_t held = group.size() * (memory.window_bytes + memory.pool_bytes);
    EXPECT_NEAR(static_cast<double>(held) / static_cast<double>(leases + outputs), 1.0, 0.1);
  });
}

}  // namespace
}  // namespace crossdock
