#pragma once

/// Crossdock's C++ API. Includes all user headers.
///
///   Group       the ranks that exchange rows: threads (threads.hpp), MPI processes (mpi.hpp)
///               or processes started by any launcher (sockets.hpp)
///   Mesh        tensor, context, data, pipeline and expert parallelism: provides the groups
///   MoeLayer    a whole layer: router, dispatch, experts and combine, forward and backward
///   Dispatcher  plan -> dispatch -> your experts -> combine, and backward
///   Plan        one routing, agreed by all ranks: where every row goes
///   SequenceShard  the tokens of one rank among those of all; packed sequences (sequence.hpp)
///   Router      scores, top-k and losses of one rank's tokens; also usable without a layer
///   Experts     a grouped MLP over the rows of a plan; also usable without a layer
///   quantise_rows  rows to fp8 with a scale per group of values, and back (fp8.hpp)
///   plan_job    traffic, memory and time of a job before it starts (planner.hpp)
///
/// Start with examples/01_single_process.cpp. Two folders are for authors of strategies and
/// communicators; of the first, the headers below include what their own declarations need:
///
///   crossdock/extend/   for writing one: examples/03_own_strategy.cpp, 05_own_communicator.cpp
///   crossdock/testing/  for testing one: reference results, conformance suite, fault injection. A
///                       separate library: link crossdock::testing

#include <string_view>
#include <vector>

#include "crossdock/cuda.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/dtype.hpp"
#include "crossdock/error.hpp"
#include "crossdock/expert_shards.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/planner.hpp"
#include "crossdock/recorder.hpp"
#include "crossdock/router.hpp"
#include "crossdock/sequence.hpp"
#include "crossdock/sockets.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"
#include "crossdock/threads.hpp"

namespace crossdock {

/// A part of the library that a build may lack.
struct Feature {
  std::string_view name;  // "mpi", "cuda"
  bool is_built = false;
  std::string_view note;  // what was found, or why the feature is missing
};

/// How this library was built. Strings that do not apply are empty.
struct BuildDescription {
  std::string_view version;     // CROSSDOCK_VERSION
  std::string_view revision;    // of the source tree
  std::string_view compiler;    // "GNU 12.2.0"
  std::string_view build_type;  // "Release"
  std::string_view sanitizers;  // "address,undefined"
  std::vector<Feature> features;
};

[[nodiscard]] CROSSDOCK_API BuildDescription describe_build();

}  // namespace crossdock
