#pragma once

#include <functional>
#include <memory>

#include "crossdock/extend/strategy.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::conformance {

/// Where a rank keeps its tensors. Default: in host memory.
struct TensorPlace {
  std::function<OwnedTensor(const ConstTensorView&)> to_device{};  // a copy; waits
  std::function<OwnedTensor(const ConstTensorView&)> to_host{};    // a copy; waits
  Device device{};
  Stream stream{};
};

/// Makes the place of a group's rank.
using MakePlace = std::function<TensorPlace(Group&)>;

/// The same strategy for checks on a device: dispatchers that the checks make with it get their
/// tensors there. The checks compute and compare in host memory, so every call copies its tensors
/// to the place that `make_place` makes for the dispatcher, waits, and copies the results back.
/// fp64 stays in host memory. Other users of the strategy notice no difference.
CROSSDOCK_API std::unique_ptr<Strategy> on_device(std::unique_ptr<Strategy> strategy,
                                                  MakePlace make_place);

}  // namespace crossdock::conformance
