// One copy of a token per rank, which the receiver copies to its other rows: the same rows as with
// one copy per route, but fewer of them are sent.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "dispatch/cuda/step.hpp"
#include "plan/cuda/cuda_plan.hpp"

namespace crossdock {
namespace {

using CudaCopies = CudaTest;

constexpr comm::GpuPretences kApart{.peers_are_elsewhere = true};

DispatchConfig with_copies(DispatchConfig config, Copies copies = Copies::kPerRank) {
  config.copies = copies;
  return config;
}

void expect_cpu_bits(const DispatchCase& the_case, const GpuSetting& setting) {
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& wanted) {
    for (int i = 0; i < 2; ++i) {
      const QueuedStep step(rank.dispatcher, rank.tensors);
      expect_same(step.wait(rank.stream), wanted);
    }
    rank.dispatcher.check();
  });
}

TEST_F(CudaCopies, PerRankGiveTheBitsOfTheCpu) {
  const std::vector<DispatchConfig> configs = {
      {.num_experts = 11, .top_k = 3, .width = 40},
      {.num_experts = 11, .top_k = 3, .width = 33},
      {.num_experts = 9, .top_k = 7, .width = 2056, .max_rows = 700},
      {.num_experts = 9, .top_k = 9, .width = 7, .alignment = 16, .max_rows = 900},
      {.num_experts = 12, .top_k = 6, .width = 64, .keep_empty_segments = true},
      {.num_experts = 8, .top_k = 4, .width = 24, .placement = {0, 0, 0, 0, 0, 0, 0, 1}},
      {.num_experts = 8, .top_k = 4, .width = 24, .capacity = Capacity{.factor = 0.5}},
      {.num_experts = 8,
       .top_k = 4,
       .width = 24,
       .capacity = Capacity{.factor = 0.5, .policy = DropPolicy::kWeight}},
      {.num_experts = 8,
       .top_k = 4,
       .width = 24,
       .capacity = Capacity{.factor = 0.8, .pad_to_capacity = true, .max_tokens = 60},
       .max_rows = 800}};
  unsigned seed = 100;
  for (const DispatchConfig& config : configs) {
    SCOPED_TRACE(seed);
    const DType dtype = seed % 2 == 0 ? DType::kF32 : DType::kBF16;
    expect_cpu_bits(random_case(with_copies(config), {20, 0, 60}, seed++), {.dtype = dtype});
  }
  expect_cpu_bits(random_case(with_copies(configs[2]), {50}, 200), {.dtype = DType::kF16});
  expect_cpu_bits(random_case(with_copies(configs[2]), {50, 40}, 201), {.options = {.max_sms = 9}});
  expect_cpu_bits(random_case(with_copies(configs[0]), {0, 0}, 202), {});
}

TEST_F(CudaCopies, PerRankCarryScalesAndRowWeights) {
  const DispatchConfig config =
      with_copies({.num_experts = 7, .top_k = 5, .width = 300, .max_rows = 500});
  const DispatchCase the_case = random_case(config, {31, 20}, 210);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const int64_t T = the_case.ranks[static_cast<size_t>(rank.group.rank())].T;
    Buffer x(T * config.width);
    Buffer scales(T * 3 * size_of(DType::kF32));
    for (size_t i = 0; i < x.bytes().size(); ++i) x.data()[i] = static_cast<std::byte>(i % 120);
    for (int64_t i = 0; i < T * 3; ++i) {
      reinterpret_cast<float*>(scales.data())[i] = static_cast<float>(i + 1);
    }
    const DispatchArgs on_host{.x = x.view(DType::kF8E4M3, {T, config.width}),
                               .scales = scales.view(DType::kF32, {T, 3}),
                               .with_row_weights = true};
    Dispatcher host(rank.group, config, "direct");
    const RankTensors tensors =
        tensors_of(config, the_case.ranks[static_cast<size_t>(rank.group.rank())], DType::kF32);
    const DispatchResult there = host.dispatch(host.plan(tensors.routing()), on_host);
    const OwnedTensor x_there = to_device(on_host.x, rank.stream);
    const OwnedTensor scales_there = to_device(on_host.scales, rank.stream);
    const Plan plan = rank.plan();
    const DispatchResult moved = rank.dispatcher.dispatch(
        plan, {.x = x_there.view, .scales = scales_there.view, .with_row_weights = true});
    rank.stream.synchronize();
    const int64_t R = plan.num_rows();
    EXPECT_EQ(to_host(moved.rows.view, R, rank.stream), bytes_of(there.rows.view));
    EXPECT_EQ(to_host(moved.row_scales.view, R, rank.stream), bytes_of(there.row_scales.view));
    EXPECT_EQ(to_host(moved.row_weights.view, R, rank.stream), wanted.row_weights);
  });
}

// Rows of one rank's tokens that go to other ranks: one per route, and one per token and rank.
std::pair<size_t, size_t> rows_to_others(const DispatchCase& the_case, int rank, int P) {
  const DispatchConfig& config = the_case.config;
  const reference::RankInput& input = the_case.ranks[static_cast<size_t>(rank)];
  size_t routes = 0;
  size_t copies = 0;
  for (int64_t t = 0; t < input.T; ++t) {
    std::set<int64_t> ranks;
    for (int64_t k = 0; k < config.top_k && input.mask[static_cast<size_t>(t)] == 0; ++k) {
      const int64_t expert = input.expert_ids[static_cast<size_t>(t * config.top_k + k)];
      if (expert < 0) continue;
      int owner = 0;
      while (first_expert(config.num_experts, P, owner + 1) <= expert) ++owner;
      if (owner == rank) continue;
      ++routes;
      ranks.insert(owner);
    }
    copies += ranks.size();
  }
  return {routes, copies};
}

// The plan says which rows are sent. If the links are then removed, the receiver copies nothing,
// and exactly these rows have been written.
TEST_F(CudaCopies, PerRankSendOneRowPerTokenAndRank) {
  constexpr int kRanks = 3;
  const DispatchConfig config =
      with_copies({.num_experts = 12, .top_k = 8, .width = 16, .max_rows = 900});
  const DispatchCase the_case = random_case(config, {40, 30, 50}, 220);
  std::atomic<size_t> sent = 0;
  std::atomic<size_t> written = 0;
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
    const int own = rank.group.rank();
    const Plan plan = rank.plan();
    const cuda::PlanLinks* links = cuda::device_plan(plan).links();
    ASSERT_NE(links, nullptr);
    const auto num_routes = static_cast<size_t>(plan.num_tokens() * config.top_k);
    std::vector<cuda::RouteTarget> targets(num_routes);
    rank.stream.synchronize();
    cuda_ok(cudaMemcpyAsync(targets.data(), links->rank_targets,
                            num_routes * sizeof(cuda::RouteTarget), cudaMemcpyDeviceToHost,
                            rank.stream.get()));
    cuda_ok(cudaMemsetAsync(links->rows, 0,
                            static_cast<size_t>(links->num_rows) * sizeof(cuda::RowLink),
                            rank.stream.get()));
    rank.stream.synchronize();
    size_t to_others = 0;
    for (const cuda::RouteTarget& target : targets) {
      if (target.rank >= 0) ++sent;
      if (target.rank >= 0 && target.rank != own) ++to_others;
    }
    const auto [routes, copies] = rows_to_others(the_case, own, kRanks);
    EXPECT_EQ(to_others, copies);
    EXPECT_LT(copies, routes * 2 / 3);
    const OwnedTensor rows =
        device_tensor(DType::kF32, {plan.capacity_rows(), config.width}, rank.stream);
    rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .rows = rows.view});
    const std::vector<std::byte> bytes = to_host(rows.view, rank.stream);
    const std::vector<std::byte> untouched(static_cast<size_t>(rows.view.row_bytes()),
                                           std::byte{0xff});
    for (size_t begin = 0; begin < bytes.size(); begin += untouched.size()) {
      const bool is_written =
          std::memcmp(bytes.data() + begin, untouched.data(), untouched.size()) != 0;
      written += is_written ? 1 : 0;
    }
    rank.group.agree({.operation = "counted"});
  });
  EXPECT_EQ(written, sent);
}

bool has_links(const DispatchConfig& config, const comm::GpuPretences& pretences = {}) {
  std::atomic<int> linked = 0;
  run_on_gpu(random_case(config, {20, 30}, 230), {.pretences = pretences},
             [&](GpuRank& rank, const StepBytes& wanted) {
               const QueuedStep step(rank.dispatcher, rank.tensors);
               expect_same(step.wait(rank.stream), wanted);
               linked += cuda::device_plan(step.plan).links() != nullptr ? 1 : 0;
             });
  EXPECT_NE(linked, 1);
  return linked == 2;
}

TEST_F(CudaCopies, ArePerRankBetweenGpusUnlessTheConfigurationSaysOtherwise) {
  const DispatchConfig config{.num_experts = 8, .top_k = 4, .width = 32, .max_rows = 300};
  const DispatchConfig on_host{.num_experts = 8,
                               .top_k = 4,
                               .width = 32,
                               .capacity = Capacity{.factor = 1.0, .policy = DropPolicy::kWeight}};
  const DispatchConfig one_expert_each{.num_experts = 2, .top_k = 2, .width = 32, .max_rows = 300};
  if (cuda_device_count() == 1) {
    EXPECT_FALSE(has_links(config));
    EXPECT_FALSE(has_links(on_host));
  }
  EXPECT_TRUE(has_links(with_copies(config)));
  EXPECT_TRUE(has_links(with_copies(on_host)));
  EXPECT_TRUE(has_links(config, kApart));
  EXPECT_TRUE(has_links(on_host, kApart));
  EXPECT_FALSE(has_links(with_copies(config, Copies::kPerRoute), kApart));
  EXPECT_FALSE(has_links(one_expert_each, kApart));  // no token has two rows on a rank
}

// Peers reach foreign memory through a copy; the rows are complete before they are copied back.
TEST_F(CudaCopies, PerRankWorkWithForeignRowsAndWithBegunCalls) {
  const DispatchConfig config{.num_experts = 8, .top_k = 4, .width = 32, .max_rows = 300};
  const GpuSetting setting{.pretences = kApart};
  const DispatchCase the_case = random_case(config, {20, 30}, 240);
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    const OwnedTensor rows =
        device_tensor(DType::kF32, {plan.capacity_rows(), config.width}, rank.stream);
    rank.stream.synchronize();
    rank.group.agree({.operation = "allocated"});
    const DispatchArgs args{.x = rank.tensors.x.view, .rows = rows.view};
    rank.dispatcher.finish(rank.dispatcher.begin_dispatch(plan, args));
    rank.stream.synchronize();
    EXPECT_EQ(to_host(rows.view, plan.num_rows(), rank.stream), wanted.rows);
    rank.group.agree({.operation = "done"});
  });
}

}  // namespace
}  // namespace crossdock
