#include <gtest/gtest.h>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {
namespace {

TEST(Topology, PutsSoManyRanksOnEachNode) {
  const Topology topology = Topology::uniform(7, 3);
  EXPECT_EQ(topology.num_nodes, 3);
  EXPECT_EQ(topology.node_of_rank, (std::vector{0, 0, 0, 1, 1, 1, 2}));
  EXPECT_EQ(topology.ranks_of_node(1), (std::vector{3, 4, 5}));
  EXPECT_EQ(Topology::single_node(3).num_nodes, 1);
}

TEST(Topology, NumbersNodesByTheirLowestRank) {
  const Topology topology = Topology::from_node_ids(std::vector{5, 2, 5, 9});
  EXPECT_EQ(topology.node_of_rank, (std::vector{0, 1, 0, 2}));
  EXPECT_EQ(topology.num_nodes, 3);
}

TEST(Topology, OfASubgroupKeepsWhoIsTogether) {
  const Topology part = Topology::uniform(8, 2).subset(std::vector{3, 4, 5, 7});
  EXPECT_EQ(part.node_of_rank, (std::vector{0, 1, 1, 2}));
  EXPECT_EQ(part.num_nodes, 3);
}

TEST(Topology, NeedsRanks) {
  EXPECT_THROW(Topology::uniform(0, 1), Error);
  EXPECT_THROW(Topology::uniform(4, 0), Error);
}

}  // namespace
}  // namespace crossdock
