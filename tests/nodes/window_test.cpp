// Many more messages than the communicator may have in flight, on MPI processes.

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <numeric>

#include "crossdock/crossdock.hpp"
#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::nodes {
namespace {

constexpr int64_t kTokens = 65536;  // per rank
constexpr int64_t kExperts = 16;
constexpr int64_t kTopK = 8;
constexpr int64_t kWidth = 8;
constexpr int kWindow = 128;
constexpr int64_t kChunkBytes = 4096;

// Every token has a unique value, which stays exact when multiplied by 9 * 16.
float value_of(int rank, int64_t t, int64_t d) {
  return static_cast<float>((static_cast<int64_t>(rank) * kTokens + t) % 65521 + d);
}

int32_t expert_of(int rank, int64_t t, int64_t k) {
  return static_cast<int32_t>((rank + 5 * t + 3 * k) % kExperts);
}

// Expert e multiplies by e + 1, and all weights are 1/8.
float factor_of(int rank, int64_t t) {
  float sum = 0;
  for (int64_t k = 0; k < kTopK; ++k) sum += static_cast<float>(expert_of(rank, t, k) + 1);
  return sum / 8;
}

void multiply(Group& group, const Plan& plan, ConstTensorView rows, TensorView y) {
  const Segments segments = plan.segments();
  const int64_t first = first_expert(kExperts, group.size(), group.rank());
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    for (int64_t i = segments.starts[e] * kWidth; i < segments.starts[e + 1] * kWidth; ++i) {
      const auto s = static_cast<size_t>(i);
      y.as<float>()[s] = rows.as<float>()[s] * static_cast<float>(first + e + 1);
    }
  }
}

// Dispatch and combine. Returns the number of wrong sums.
int64_t count_wrong_sums(Group& group, const std::string& strategy) {
  const int rank = group.rank();
  std::vector<float> x;
  std::vector<int32_t> ids;
  const std::vector<float> weights(static_cast<size_t>(kTokens * kTopK), 1.0f / 8);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t d = 0; d < kWidth; ++d) x.push_back(value_of(rank, t, d));
    for (int64_t k = 0; k < kTopK; ++k) ids.push_back(expert_of(rank, t, k));
  }
  Dispatcher dispatcher(group, {.num_experts = kExperts, .top_k = kTopK, .width = kWidth},
                        strategy);
  const Plan plan =
      dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {kTokens, kTopK}),
                              .weights = ConstTensorView(weights.data(), {kTokens, kTopK})});
  const DispatchResult rows =
      dispatcher.dispatch(plan, {.x = ConstTensorView(x.data(), {kTokens, kWidth})});
  const OwnedTensor y = dispatcher.allocate_rows(plan, DType::kF32);
  multiply(group, plan, rows.rows.view, y.view);
  const OwnedTensor out = dispatcher.combine(plan, y.view);
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < kTokens * kWidth; ++i) {
    const float wanted = value_of(rank, i / kWidth, i % kWidth) * factor_of(rank, i / kWidth);
    if (out.view.as<float>()[static_cast<size_t>(i)] != wanted) ++num_wrong;
  }
  return num_wrong;
}

TEST(Window, HoldsWhateverTheNumberOfTokens) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != 4) GTEST_SKIP() << "for two nodes of two ranks";
  const bool on_real_nodes = std::getenv("CROSSDOCK_TEST_NODES") != nullptr;
  const MpiOptions options{.chunk_bytes = kChunkBytes,
                           .max_in_flight = kWindow,
                           .ranks_per_node = on_real_nodes ? 0 : 2};
  for (const char* strategy : {"alltoall", "hierarchical"}) {
    Group group(make_mpi_communicator(options), conformance::test_deadlines());
    EXPECT_EQ(group.options().staging_bytes, kWindow / 2 * kChunkBytes);
    EXPECT_EQ(count_wrong_sums(group, strategy), 0) << strategy;
    const Traffic traffic = group.communicator().traffic();
    EXPECT_LE(traffic.max_requests_in_flight, kWindow);
    EXPECT_GT(traffic.max_requests_in_flight, kWindow / 2);  // the limit was reached
    EXPECT_GT(traffic.requests_posted, 20 * kWindow);
    for (const Event& event : group.recorder().events()) {
      if (std::string_view(event.phase) != "exchange" || strategy == std::string("alltoall")) {
        continue;
      }
      if (std::string_view(event.operation) == "plan") continue;
      EXPECT_LE(event.bytes, kWindow * kChunkBytes);
    }
  }
}

}  // namespace
}  // namespace crossdock::nodes
