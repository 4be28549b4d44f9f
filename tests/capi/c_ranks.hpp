#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "crossdock/crossdock.h"
#include "crossdock/testing/reference.hpp"

namespace crossdock::capi_test {

/// The result of a struct's _INIT macro in C.
template <typename Struct>
Struct made() {
  Struct empty{};
  empty.struct_size = sizeof(Struct);
  return empty;
}

/// Deadlines, so waits end even if a test fails.
inline crossdock_group_config with_deadlines() {
  auto config = made<crossdock_group_config>();
  config.arrival_deadline_s = 120;
  config.progress_deadline_s = 120;
  return config;
}

#define EXPECT_OK(call) EXPECT_EQ(call, CROSSDOCK_OK) << crossdock_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, CROSSDOCK_OK) << crossdock_last_error()

/// Runs body(group, rank) on `size` threads, one per rank. A rank that returns leaves its group.
inline void run_c_ranks(int size, const std::function<void(crossdock_group*, int)>& body) {
  std::vector<crossdock_group*> groups(static_cast<size_t>(size));
  const crossdock_group_config config = with_deadlines();
  ASSERT_OK(crossdock_group_from_threads(size, &config, groups.data()));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        crossdock_group* group = groups[static_cast<size_t>(rank)];
        body(group, rank);
        crossdock_group_leave(group, "it returned");
      });
    }
  }
  for (crossdock_group* group : groups) crossdock_group_destroy(group);
}

inline crossdock_tensor tensor(const std::vector<float>& values, int64_t rows, int64_t columns) {
  return crossdock_tensor_2d(values.data(), CROSSDOCK_F32, rows, columns);
}

inline std::vector<double> doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

inline std::vector<double> doubles(const crossdock_tensor& values) {
  int64_t count = values.num_dims > 0 ? 1 : 0;
  for (int i = 0; i < values.num_dims; ++i) count *= values.shape[i];
  const auto* first = static_cast<const float*>(values.data);
  return {first, first + count};
}

/// A routing with different tokens, experts and weights on every rank, all exactly representable.
struct Case {
  static constexpr int64_t E = 5;
  static constexpr int64_t K = 2;
  static constexpr int64_t D = 4;

  static int64_t num_tokens(int rank) { return rank == 1 ? 0 : 2 + rank; }

  explicit Case(int rank) : T(num_tokens(rank)) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t d = 0; d < D; ++d) {
        x.push_back(static_cast<float>(64 * rank + 8 * t + d));
        grad_out.push_back(static_cast<float>(1 + rank + t - d));
      }
      expert_ids.push_back(static_cast<int32_t>((t + rank) % E));
      expert_ids.push_back(t == 1 ? -1 : static_cast<int32_t>((t + rank + 2) % E));
      weights.insert(weights.end(), {0.25F, 0.5F + 0.125F * static_cast<float>(t)});
    }
  }

  crossdock_routing routing() const {
    auto made_routing = made<crossdock_routing>();
    made_routing.expert_ids = crossdock_tensor_2d(expert_ids.data(), CROSSDOCK_I32, T, K);
    made_routing.weights = tensor(weights, T, K);
    return made_routing;
  }

  reference::RankInput reference_input() const {
    return {.T = T,
            .x = doubles(x),
            .expert_ids = {expert_ids.begin(), expert_ids.end()},
            .weights = doubles(weights),
            .grad_out = doubles(grad_out)};
  }

  static crossdock_dispatch_config config() {
    auto config = made<crossdock_dispatch_config>();
    config.num_experts = E;
    config.top_k = K;
    config.width = D;
    return config;
  }

  int64_t T;
  std::vector<float> x;             // [T, D]
  std::vector<float> grad_out;      // [T, D]
  std::vector<int32_t> expert_ids;  // [T, K]
  std::vector<float> weights;       // [T, K]
};

/// A dispatcher and a plan of a case; destroyed with this object.
class Planned {
 public:
  Planned(crossdock_group* group, const Case& input,
          crossdock_dispatch_config config = Case::config()) {
    EXPECT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
    const crossdock_routing routing = input.routing();
    EXPECT_OK(crossdock_plan_create(dispatcher, &routing, &plan));
    EXPECT_OK(crossdock_plan_describe(plan, &info));
  }
  ~Planned() {
    crossdock_plan_destroy(plan);
    crossdock_dispatcher_destroy(dispatcher);
  }
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  crossdock_dispatcher* dispatcher = nullptr;
  crossdock_plan* plan = nullptr;
  crossdock_plan_info info = made<crossdock_plan_info>();
};

}  // namespace crossdock::capi_test
