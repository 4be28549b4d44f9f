#include <gtest/gtest.h>

#include "layer/layer_cases.hpp"

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
