// Every strategy on MPI processes on several nodes, which the communicator detects itself.

#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "crossdock/mpi.hpp"
#include "nodes/node_runner.hpp"
#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::nodes {
namespace {

// "2,1,1": the nodes that the communicator must detect, if the processes run on several.
const char* real_nodes() {
  return std::getenv("CROSSDOCK_TEST_NODES");
}

Topology expected_topology(int size) {
  if (real_nodes() == nullptr) return Topology::single_node(size);
  Topology topology;
  std::istringstream sizes(real_nodes());
  for (std::string ranks; std::getline(sizes, ranks, ','); ++topology.num_nodes) {
    topology.node_of_rank.insert(topology.node_of_rank.end(), std::stoul(ranks),
                                 topology.num_nodes);
  }
  return topology;
}

TEST(MpiNodes, AreFoundByTheEngineItself) {
  const auto communicator = make_mpi_communicator();
  const Topology expected = expected_topology(communicator->size());
  EXPECT_EQ(communicator->topology().num_nodes, expected.num_nodes);
  EXPECT_EQ(communicator->topology().node_of_rank, expected.node_of_rank);
}

class MpiNodes : public testing::TestWithParam<std::string> {};

TEST_P(MpiNodes, GiveTheReferencesResults) {
  const bool knows_nodes = GetParam() == "direct" || GetParam() == "hierarchical";
  for (const Shape& shape : shapes()) {
    // Checks that do not depend on nodes are left to conformance_mpi_test.
    if (real_nodes() == nullptr && (!knows_nodes || shape.ranks_per_node == 0)) continue;
    run_on(
        shape,
        [](Group& group) {
          const std::vector<conformance::Check> checks = conformance::quick_checks();
          const conformance::Report report = conformance::run_checks(
              group, [] { return make_strategy(GetParam()); }, checks);
          EXPECT_EQ(report.num_checks, std::ssize(checks));
          conformance::expect_no_failures(report.failures);
        },
        conformance::test_deadlines());
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, MpiNodes, testing::ValuesIn(strategy_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace crossdock::nodes
