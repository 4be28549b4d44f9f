#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <sstream>

#include "conformance/expect_conformance.hpp"
#include "crossdock/mpi.hpp"
#include "nodes/engine.hpp"

namespace crossdock::nodes {
namespace {

/// "2,1,1": what the engine must find, where the processes run on several nodes.
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

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

TEST(MpiNodes, AreFoundByTheEngineItself) {
  const auto communicator = make_mpi_communicator();
  const Topology expected = expected_topology(world_size());
  EXPECT_EQ(communicator->topology().num_nodes, expected.num_nodes);
  EXPECT_EQ(communicator->topology().node_of_rank, expected.node_of_rank);
}

class MpiNodes : public testing::TestWithParam<std::string> {};

TEST_P(MpiNodes, GiveTheReferencesResults) {
  const bool knows_nodes = GetParam() == "direct" || GetParam() == "hierarchical";
  for (const Shape& shape : shapes()) {
    // What does not depend on nodes is for conformance_mpi_test.
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

// Real nodes as they are; on one machine, as one node and as several.
std::vector<Shape> shapes() {
  const int size = world_size();
  std::vector<Shape> shapes = {{size, 0}};
  if (real_nodes() != nullptr) return shapes;
  if (size <= 4) shapes.push_back({size, 1});
  shapes.push_back({size, size <= 4 ? 2 : 3});
  return shapes;
}

void run_on(const Shape& shape, const std::function<void(Group&)>& body, GroupOptions options) {
  Group group(make_mpi_communicator({.ranks_per_node = shape.ranks_per_node}), options);
  try {
    body(group);
  } catch (const std::exception& error) {
    group.leave(std::string("it threw: ") + error.what());
    ADD_FAILURE() << error.what();
  }
}

}  // namespace crossdock::nodes
