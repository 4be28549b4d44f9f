#pragma once

#include <functional>
#include <string>
#include <vector>

#include "crossdock/group.hpp"

/// The tests of nodes are written once (suite_test.cpp) and compiled for each communicator;
/// node_runner_<name>.cpp defines these.
namespace crossdock::nodes {

/// How ranks are distributed over nodes.
struct Shape {
  int size = 0;
  int ranks_per_node = 0;  // 0: as the communicator detects them
};

std::vector<Shape> shapes();

/// Runs body on every rank of a group of this shape. On MPI all processes call it.
void run_on(const Shape& shape, const std::function<void(Group&)>& body, GroupOptions options);

}  // namespace crossdock::nodes
