#pragma once

#include <crossdock/crossdock.hpp>
#include <crossdock/extend/forwarding_strategy.hpp>
#include <crossdock/moe_layer.hpp>
#include <crossdock/testing/conformance.hpp>
#include <crossdock/testing/faults.hpp>

// The names that fragments of C++ in README.md and docs/ use without declaring them. Nothing is
// linked.

using namespace crossdock;

extern Group& group;
extern Group& world;
extern Mesh& mesh;
extern std::unique_ptr<Communicator> mine;
extern const Router& router;
extern Dispatcher& dispatcher;
extern MoeLayer& layer;
extern const Error& error;
extern const StrategyCall& call;
extern const Plan& plan;
extern const Plan& plan_a;
extern const Plan& plan_b;

struct Args {  // converts to the arguments of any call
  operator RouteArgs() const;
  operator ExpertsForwardArgs() const;
  operator MoeForwardArgs() const;
};
extern const Args args;
extern const GateWeights gate;
extern const DispatchConfig config;
extern const JobDescription job;
extern const MoeLayerConfig layer_config;
extern const std::vector<TensorView> expert_grads;
extern const std::vector<TensorView> dense_grads;
extern const TensorView load;
extern const Routing routing;
extern const ConstTensorView x;
extern const ConstTensorView x_b;
extern const ConstTensorView ids;
extern const ConstTensorView weights;
extern const ConstTensorView rows_a;
extern const ConstTensorView grad_out;
extern const TensorView bias;
extern const TensorView y;
extern const TensorView y_a;
extern const TensorView out;
extern const DType dtype;
extern void* stream;

struct AnyExperts : Experts {  // the library's or the caller's own
  void operator()(ConstTensorView rows, Segments segments, TensorView y) const;
};
extern const AnyExperts& experts;
std::vector<int> all_ranks_but(int rank);
void report(double loss);

class Mine final : public ForwardingStrategy {
 public:
  Mine();
};
