#pragma once

#include <memory>

#include "crossdock/extend/strategy.hpp"

/// The library's strategies, one line each: src/dispatch/CMakeLists.txt compiles host.cpp and
/// cuda.cpp in the folder of that name. make_<name> in host.cpp makes the strategy, and
/// make_<name>_device_path in cuda.cpp its path on a GPU.
// clang-format off
#define CROSSDOCK_STRATEGIES(STRATEGY) \
  STRATEGY(direct)                     \
  STRATEGY(hierarchical)               \
  STRATEGY(alltoall)                   \
  STRATEGY(allgather)
// clang-format on

namespace crossdock {

#define CROSSDOCK_DECLARE_STRATEGY(name)   \
  std::unique_ptr<Strategy> make_##name(); \
  std::unique_ptr<Path> make_##name##_device_path(const PathContext& context, Device device);
CROSSDOCK_STRATEGIES(CROSSDOCK_DECLARE_STRATEGY)
#undef CROSSDOCK_DECLARE_STRATEGY

}  // namespace crossdock
