#include <gtest/gtest.h>

#include "layer/etp_cases.hpp"

namespace crossdock {
namespace {

TEST(MoeLayerMpi, EqualsTheReferenceForwardAndBackward) {
  Group group(make_mpi_communicator());
  for (const NamedCase& named : list_layer_cases(group.size())) {
    for (const std::string& strategy : strategy_names()) {
      LayerCase layer_case = make_case(named.options);
      layer_case.config.strategy = strategy;
      const RankResult wanted = run_reference(layer_case)[static_cast<size_t>(group.rank())];
      EXPECT_EQ(find_difference(run_layer(group, layer_case), wanted, 1e-11), "")
          << named.name << ", " << strategy;
    }
  }
}

TEST(MoeLayerMpi, EqualsTheReferenceWithShardedExperts) {
  Group group(make_mpi_communicator());
  for (const int64_t etp : {2, 4}) {
    if (group.size() % etp != 0) continue;
    for (const NamedCase& named : list_etp_cases(group.size(), etp)) {
      for (const std::string& strategy : strategy_names()) {
        LayerCase layer_case = make_case(named.options);
        layer_case.config.strategy = strategy;
        const RankResult wanted = run_reference(layer_case)[static_cast<size_t>(group.rank())];
        EXPECT_EQ(find_difference(run_layer(group, layer_case), wanted, 1e-11), "")
            << named.name << ", " << strategy << ", etp " << etp;
      }
    }
  }
}

TEST(MoeLayerMpi, ShardsReplicatedTokens) {
  Group group(make_mpi_communicator());
  LayerCaseOptions options = list_layer_cases(1)[2].options;
  options.tokens_per_rank = {5};
  const RankResult wanted = run_reference(make_case(options))[0];
  for (const std::string& strategy : strategy_names()) {
    LayerCase layer_case = make_case(options);
    layer_case.config.strategy = strategy;
    LayerOnRank rank(group, layer_case, {.replicated_over = &group}, 0.0, 0);
    MoeForwardResult forward = rank.forward();
    const OwnedTensor grad_x = rank.backward(forward.saved);
    RankResult got;
    got.out = reference::to_values(forward.out);
    got.grad_x = reference::to_values(grad_x);
    RankResult want;
    want.out = wanted.out;
    want.grad_x = wanted.grad_x;
    EXPECT_EQ(find_difference(got, want, 1e-11), "") << strategy;
  }
}

TEST(MoeLayerMpi, HasTheBitsOfThreadRanks) {
  Group group(make_mpi_communicator());
  for (const std::string& strategy : strategy_names()) {
    LayerCaseOptions options = list_layer_cases(group.size())[1].options;
    options.config.experts.dtype = DType::kF32;
    options.config.strategy = strategy;
    const LayerCase layer_case = make_case(options);
    const std::vector<RankResult> threads = run_layer_on_threads(layer_case);
    EXPECT_EQ(shared_bits({run_layer(group, layer_case)}),
              shared_bits({threads[static_cast<size_t>(group.rank())]}))
        << strategy;
  }
}

}  // namespace
}  // namespace crossdock
