#include "crossdock/threads.hpp"
#include "nodes/node_runner.hpp"

namespace crossdock::nodes {

// One node, one rank per node, equal nodes, a smaller last node.
std::vector<Shape> shapes() {
  return {{1, 0}, {4, 0}, {4, 1}, {4, 2}, {6, 2}, {7, 3}, {8, 5}};
}

void run_on(const Shape& shape, const std::function<void(Group&)>& body, GroupOptions options) {
  run_ranks(shape.size, body, {.ranks_per_node = shape.ranks_per_node, .group = options});
}

}  // namespace crossdock::nodes
