// Partial sums of packed rows on a GPU: bit-identical to the reference, and as many bytes as the
// model counts.

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cost/step_sizes.hpp"
#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/payload.hpp"
#include "dispatch/sums_case.hpp"

namespace crossdock {
namespace {

using reference::PerRank;
using reference::to_tensor;

using CudaPackedSums = CudaTest;

std::vector<double> values_on(const ConstTensorView& tensor, const RankStream& stream) {
  const std::vector<std::byte> bytes = to_host(tensor, stream);
  const OwnedTensor host =
      to_tensor(tensor.dtype, tensor.shape,
                std::vector<double>(static_cast<size_t>(tensor.num_elements()), 0.0));
  if (!bytes.empty()) std::memcpy(host.view.data, bytes.data(), bytes.size());
  return reference::to_values(host);
}

/// One rank of a case on the GPU, and the rows that its experts return.
struct SumsRank {
  size_t r;
  GpuRank gpu;
  Plan plan;
  OwnedTensor y;

  SumsRank(Group& group, const SumsCase& given, const std::string& strategy)
      : r(static_cast<size_t>(group.rank())),
        gpu(group, {given.config, given.ranks}, {.dtype = given.dtype, .strategy = strategy}),
        plan(gpu.plan()) {
    const OwnedTensor host =
        to_tensor(given.dtype, {plan.num_rows(), given.config.width}, given.rows[r]);
    y = to_device(host.view, gpu.stream);
    gpu.stream.synchronize();
  }
};

// Checks every sum of every rank; unweighted sums twice, by both calls.
void expect_bits_of_the_reference(const SumsCase& given, const std::string& strategy,
                                  const Nodes& nodes) {
  SCOPED_TRACE(strategy + " " + std::string(name_of(given.dtype)) + " " +
               std::string(name_of(given.config.partial_sums)) + ", width " +
               std::to_string(given.config.width) + ", " + std::to_string(nodes.num_ranks) +
               " ranks by " + std::to_string(nodes.ranks_per_node));
  const Sums wanted = wanted_sums(given, strategy, nodes);
  PerRank out(given.ranks.size());
  PerRank grad_x(given.ranks.size());
  PerRank unweighted(given.ranks.size());
  run_ranks(
      nodes.num_ranks,
      [&](Group& group) {
        SumsRank rank(group, given, strategy);
        Dispatcher& dispatcher = rank.gpu.dispatcher;
        const OwnedTensor sums = dispatcher.combine(rank.plan, rank.y.view);
        const OwnedTensor gradients = dispatcher.dispatch_backward(rank.plan, rank.y.view);
        const OwnedTensor plain = dispatcher.combine_unweighted(rank.plan, rank.y.view);
        out[rank.r] = values_on(sums.view, rank.gpu.stream);
        grad_x[rank.r] = values_on(gradients.view, rank.gpu.stream);
        unweighted[rank.r] = values_on(plain.view, rank.gpu.stream);
        dispatcher.check();
      },
      options_for(nodes));
  expect_same_bits(out, wanted.out);
  expect_same_bits(grad_x, wanted.grad_x);
  expect_same_bits(unweighted, wanted.grad_x);
}

struct Rows {
  DType dtype;
  PartialSums sums;
};

constexpr Rows kAllRows[] = {{DType::kF32, PartialSums::kF32},
                             {DType::kBF16, PartialSums::kF32},
                             {DType::kBF16, PartialSums::kRowType},
                             {DType::kF16, PartialSums::kF32},
                             {DType::kF16, PartialSums::kRowType}};

// Every type of rows and sums, at widths that move as single values and as vectors.
TEST_F(CudaPackedSums, HaveTheBitsOfTheReference) {
  for (const Nodes& nodes : {Nodes{4, 2}, Nodes{7, 3}}) {
    for (const std::string& strategy : strategy_names()) {
      for (const auto& [dtype, sums] : kAllRows) {
        for (const int64_t width : {37, 40}) {
          expect_bits_of_the_reference(random_sums(nodes.num_ranks, dtype, sums, width), strategy,
                                       nodes);
        }
      }
    }
  }
}

TEST_F(CudaPackedSums, HaveTheBitsOfTheReferenceOnAllKindsOfNodes) {
  for (const Nodes& nodes : {Nodes{1, 0}, Nodes{4, 0}, Nodes{4, 1}, Nodes{8, 4}}) {
    for (const std::string& strategy : strategy_names()) {
      expect_bits_of_the_reference(
          random_sums(nodes.num_ranks, DType::kBF16, PartialSums::kF32, 36), strategy, nodes);
    }
  }
}

// 270 vectors of 8: more than a warp takes at once.
TEST_F(CudaPackedSums, OfWideRowsHaveTheBitsOfTheReference) {
  for (const auto& [dtype, sums] : kAllRows) {
    expect_bits_of_the_reference(random_sums(4, dtype, sums, 2160), "hierarchical", {4, 2});
  }
}

TEST_F(CudaPackedSums, LeaveOutDroppedRoutes) {
  for (const DropPolicy policy : {DropPolicy::kPosition, DropPolicy::kWeight}) {
    for (const std::string& strategy : strategy_names()) {
      const SumsCase given = random_sums(4, DType::kBF16, PartialSums::kRowType, 40,
                                         Capacity{.factor = 0.5, .policy = policy});
      expect_bits_of_the_reference(given, strategy, {4, 2});
    }
  }
}

// The plan cannot be captured, the sums can.
TEST_F(CudaPackedSums, AreCapturedAndReplayedWithOtherRows) {
  const Nodes nodes{4, 2};
  for (const std::string& strategy : strategy_names()) {
    SCOPED_TRACE(strategy);
    SumsCase given = random_sums(4, DType::kBF16, PartialSums::kRowType, 40);
    SumsCase other = given;
    for (std::vector<double>& rows : other.rows) {
      for (double& value : rows) value = -2.0 * value;
    }
    const Sums wanted = wanted_sums(other, strategy, nodes);
    PerRank out(given.ranks.size());
    run_ranks(
        nodes.num_ranks,
        [&](Group& group) {
          SumsRank rank(group, given, strategy);
          { const OwnedTensor warm = rank.gpu.dispatcher.combine(rank.plan, rank.y.view); }
          rank.gpu.stream.synchronize();
          OwnedTensor sums;
          const CapturedGraph graph(
              rank.gpu, [&] { sums = rank.gpu.dispatcher.combine(rank.plan, rank.y.view); });
          const OwnedTensor host = to_tensor(given.dtype, rank.y.view.shape, other.rows[rank.r]);
          for (int replay = 0; replay < 2; ++replay) {
            graph.launch();
            rank.gpu.stream.synchronize();
            cuda_ok(cudaMemcpyAsync(rank.y.view.data, host.view.data,
                                    static_cast<size_t>(host.view.num_bytes()),
                                    cudaMemcpyHostToDevice, rank.gpu.stream.get()));
            rank.gpu.stream.synchronize();
            group.agree({.operation = "replayed"});
          }
          out[rank.r] = values_on(sums.view, rank.gpu.stream);
          rank.gpu.dispatcher.check();
        },
        options_for(nodes));
    expect_same_bits(out, wanted.out);
  }
}

// Bytes that every rank sent in the exchange of a dispatch and of a combine, as it recorded them.
struct Recorded {
  std::vector<double> dispatch, combine;  // [P]
};

double exchanged_bytes(Group& group, const std::string& operation) {
  double bytes = 0;
  for (const Event& event : group.recorder().events()) {
    const bool is_exchange = std::string(event.phase) == "exchange";
    if (is_exchange && event.operation == operation) bytes += static_cast<double>(event.bytes);
  }
  return bytes;
}

Recorded record(const Routes& routes, const Nodes& nodes, const std::string& strategy) {
  const auto P = static_cast<size_t>(nodes.num_ranks);
  Recorded recorded{std::vector<double>(P), std::vector<double>(P)};
  run_ranks(
      nodes.num_ranks,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const int64_t K = routes.config.top_k;
        const int64_t T = std::ssize(routes.ids[r]) / K;
        const RankStream stream(group);
        const std::vector<float> ones(routes.ids[r].size(), 1.0f);
        const OwnedTensor ids = to_device(ConstTensorView(routes.ids[r].data(), {T, K}), stream);
        const OwnedTensor weights = to_device(ConstTensorView(ones.data(), {T, K}), stream);
        const OwnedTensor x = device_tensor(routes.dtype, {T, routes.config.width}, stream);
        stream.synchronize();
        Dispatcher dispatcher(group, routes.config, strategy);
        dispatcher.set_device_options({.stream = stream.view()});
        const Plan plan = dispatcher.plan(Routing{.expert_ids = ids.view, .weights = weights.view});
        const DispatchResult moved = dispatcher.dispatch(plan, {.x = x.view});
        const OwnedTensor out = dispatcher.combine(plan, moved.rows.view);
        stream.synchronize();
        recorded.dispatch[r] = exchanged_bytes(group, "dispatch");
        recorded.combine[r] = exchanged_bytes(group, "combine");
        dispatcher.check();
      },
      options_for(nodes));
  return recorded;
}

// Bytes that every rank sends, by the model; rows in a peer's memory are not exchanged.
std::vector<double> modelled_bytes(const Routes& routes, const StrategyModel& model,
                                   Movement movement) {
  const LinkFlow flow = model.flow(movement, count(routes), routes.topology);
  const double row_bytes =
      row_bytes_of({.config = routes.config, .dtype = routes.dtype}).of(movement);
  std::vector<double> bytes;
  for (size_t r = 0; r < flow.sent_between.size(); ++r) {
    const double within = model.reaches_peers() ? 0.0 : flow.sent_within[r];
    bytes.push_back((within + flow.sent_between[r]) * row_bytes);
  }
  return bytes;
}

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

TEST_F(CudaPackedSums, AreFewerBytesToTheByteAsTheModelCounts) {
  const Nodes nodes{8, 4};
  const auto routes_with = [&](PartialSums sums) {
    Routes routes =
        random_routes({.num_experts = 13, .top_k = 5, .width = 24, .partial_sums = sums},
                      Topology::uniform(nodes.num_ranks, nodes.ranks_per_node), 60, /*holes=*/true);
    routes.dtype = DType::kBF16;
    return routes;
  };
  for (const std::string& strategy : strategy_names()) {
    SCOPED_TRACE(strategy);
    const std::unique_ptr<Strategy> made = make_strategy(strategy);
    const Routes exact = routes_with(PartialSums::kNone);
    const Recorded rows = record(exact, nodes, strategy);
    EXPECT_EQ(rows.dispatch, modelled_bytes(exact, made->model(), Movement::kDispatch));
    // On a GPU rows of hierarchical leave from their owners, not from a gateway.
    EXPECT_EQ(sum_of(rows.combine),
              sum_of(modelled_bytes(exact, made->model(), Movement::kCombine)));
    for (const PartialSums sums : {PartialSums::kF32, PartialSums::kRowType}) {
      const Routes partial = routes_with(sums);
      const Recorded got = record(partial, nodes, strategy);
      EXPECT_EQ(got.combine, modelled_bytes(partial, made->model(), Movement::kPartialSums));
      if (strategy != "allgather" && sums == PartialSums::kRowType) {
        EXPECT_LT(sum_of(got.combine), sum_of(rows.combine));
      }
    }
  }
}

}  // namespace
}  // namespace crossdock
