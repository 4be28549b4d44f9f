#include <gtest/gtest.h>

#include "layer/overlap_cases.hpp"

namespace crossdock {
namespace {

// ranks_per_node: 0: the actual nodes; otherwise simulated ones.
void expect_same_bits(int ranks_per_node) {
  Group group(make_mpi_communicator({.ranks_per_node = ranks_per_node}));
  for (const NamedCase& named : list_overlap_cases(group.size())) {
    for (const std::string& strategy : strategy_names()) {
      LayerCase layer_case = make_case(named.options);
      layer_case.config.strategy = strategy;
      const RankResult wanted = run_layer(group, layer_case);
      for (const int64_t num_chunks : kChunkCounts) {
        layer_case.config.overlap_chunks = num_chunks;
        EXPECT_EQ(find_difference(run_layer(group, layer_case), wanted, 0.0), "")
            << named.name << ", " << strategy << ", " << num_chunks << " chunks";
      }
    }
  }
}

TEST(OverlapMpi, HasTheBitsOfALayerWithoutIt) {
  expect_same_bits(0);
}

TEST(OverlapMpi, HasTheBitsOfALayerWithoutItOnSeveralNodes) {
  expect_same_bits(2);
}

}  // namespace
}  // namespace crossdock
