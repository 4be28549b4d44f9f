#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>

#include "crossdock/mpi.hpp"
#include "nodes/node_runner.hpp"

namespace crossdock::nodes {
namespace {

/// "2,1,1": the nodes that the communicator must detect, if the processes run on several.
const char* real_nodes() {
  return std::getenv("CROSSDOCK_TEST_NODES");
}

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

}  // namespace

// The real nodes, if there are any; on one machine, one node and several simulated ones.
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
