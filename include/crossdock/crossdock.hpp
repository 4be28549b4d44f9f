#pragma once

/// The C++ front door of Crossdock.
///
///   Group       the ranks that exchange rows: threads (threads.hpp) or MPI processes (mpi.hpp)
///   MoeLayer    a whole layer: router, dispatch, experts, combine, and backward
///   Dispatcher  plan -> dispatch -> your experts -> combine, and backward
///   Plan        one routing, agreed by all ranks; where every row goes
///   Router      scores, top-k and losses of one rank's tokens; of use without a layer too
///   Experts     a grouped MLP over the rows of a plan; likewise
///   Strategy    how rows travel: "allgather", "alltoall", ... or your own
///
/// Start with examples/01_single_process.cpp. What judges instead of working has its own headers:
/// conformance.hpp and faults.hpp for strategies and engines, reference.hpp and
/// reference_router.hpp for numbers.

#include "crossdock/activation.hpp"
#include "crossdock/buffer.hpp"
#include "crossdock/build.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/dispatch_config.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/dtype.hpp"
#include "crossdock/error.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/fabric.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/group.hpp"
#include "crossdock/model_presets.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/planner.hpp"
#include "crossdock/recorder.hpp"
#include "crossdock/router.hpp"
#include "crossdock/router_config.hpp"
#include "crossdock/routing.hpp"
#include "crossdock/strategy_cost.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"
#include "crossdock/threads.hpp"
