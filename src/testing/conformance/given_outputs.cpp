#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "core/check.hpp"
#include "testing/conformance/checks.hpp"
#include "testing/conformance/placed_dispatcher.hpp"
#include "testing/conformance/trial.hpp"
#include "testing/conformance/values.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {
namespace {

// A rank's tensors for one step, and memory for its outputs.
class Step {
 public:
  Step(const World& world, int rank)
      : world_(world), input_(world.ranks[static_cast<size_t>(rank)]), rank_(rank) {}

  Plan plan(PlacedDispatcher& dispatcher) const {
    const Shape slots{input_.T, world_.config.top_k};
    const std::vector<double> ids(input_.expert_ids.begin(), input_.expert_ids.end());
    const OwnedTensor id_tensor = reference::to_tensor(DType::kI32, slots, ids);
    const OwnedTensor weights = reference::to_tensor(DType::kF32, slots, input_.weights);
    return dispatcher.plan(Routing{id_tensor.view, weights.view});
  }

  OwnedTensor tokens(uint64_t seed) const {
    return reference::to_tensor(DType::kF32, {input_.T, world_.config.width},
                                token_values(world_, rank_, seed));
  }

  // Memory like that of an output that the library provided, filled with NaN.
  static OwnedTensor like(const OwnedTensor& provided) {
    const Buffer buffer(provided.view.num_bytes());
    if (buffer.num_bytes() > 0) {
      std::memset(buffer.data(), 0xff, static_cast<size_t>(buffer.num_bytes()));
    }
    return {buffer.view(provided.view.dtype, provided.view.shape), buffer.owner()};
  }

  // The result must be in the given memory, with the values that the library put into its own
  // memory.
  void expect(const char* what, const OwnedTensor& result, const OwnedTensor& given,
              const OwnedTensor& provided) {
    if (result.view.data != given.view.data) {
      find(concat(what, " is not in the caller's memory"));
    }
    const auto difference =
        reference::compare(reference::to_values(given.view), reference::to_values(provided.view));
    if (difference.num_different > 0) {
      find(concat(difference.num_different, " values of ", what,
                  " differ from those in the library's memory; the first is value ",
                  difference.first));
    }
  }

  Findings take_findings() { return std::move(findings_); }

 private:
  void find(const std::string& message) {
    findings_.push_back(concat("rank ", rank_, ": ", message));
  }

  const World& world_;
  const reference::RankInput& input_;
  int rank_;
  Findings findings_;
};

// Makes each call twice: into the library's memory, whose values other checks judge, then into the
// caller's.
Findings given_outputs(Group& group, const StrategyFactory& strategy) {
  std::vector<int64_t> tokens(static_cast<size_t>(group.size()), 6);
  tokens.back() = 0;
  World world = make_small_world(tokens, 24, 7);
  world.config.alignment = 8;  // pad rows are written too
  PlacedDispatcher dispatcher(group, world.config, strategy());
  Step step(world, group.rank());
  const Plan plan = step.plan(dispatcher);

  const OwnedTensor x = step.tokens(1);
  DispatchArgs args{.x = x.view, .with_row_weights = true};
  const DispatchResult sent = dispatcher.dispatch(plan, args);
  const OwnedTensor rows = Step::like(sent.rows);
  const OwnedTensor row_weights = Step::like(sent.row_weights);
  args.rows = rows.view;
  args.row_weights = row_weights.view;
  const DispatchResult sent_there = dispatcher.dispatch(plan, args);
  step.expect("rows", sent_there.rows, rows, sent.rows);
  step.expect("row_weights", sent_there.row_weights, row_weights, sent.row_weights);

  const OwnedTensor grad_out = step.tokens(2);
  const CombineBackwardResult back =
      dispatcher.combine_backward(plan, grad_out.view, sent.rows.view);
  const OwnedTensor grad_rows = Step::like(back.grad_rows);
  const OwnedTensor grad_weights = Step::like(back.grad_weights);
  const CombineBackwardArgs into{.grad_out = grad_out.view,
                                 .y = sent.rows.view,
                                 .grad_rows = grad_rows.view,
                                 .grad_weights = grad_weights.view};
  const CombineBackwardResult back_there = dispatcher.combine_backward(plan, into);
  step.expect("grad_rows", back_there.grad_rows, grad_rows, back.grad_rows);
  step.expect("grad_weights", back_there.grad_weights, grad_weights, back.grad_weights);

  const OwnedTensor routes = dispatcher.collect_routes(plan, sent.row_weights.view);
  const OwnedTensor collected = Step::like(routes);
  const OwnedTensor collected_there =
      dispatcher.collect_routes(plan, sent.row_weights.view, collected.view);
  step.expect("routes", collected_there, collected, routes);
  return step.take_findings();
}

}  // namespace

std::vector<Check> list_given_outputs() {
  return {{"scenario/given_outputs", true, given_outputs}};
}

namespace {

constexpr uint64_t kSeed = 7;

uint64_t hash_of_values(const std::vector<double>& values, uint64_t hash) {
  for (const double value : values) {
    hash = hash_of(hash, std::isnan(value) ? 1 : std::bit_cast<uint64_t>(value));
  }
  return hash;
}

}  // namespace

uint64_t output_hash(Group& group, const StrategyFactory& strategy) {
  const World world = make_shared_world(group.size());
  Findings findings;
  PlacedDispatcher dispatcher(group, world.config, strategy());
  Trial trial(dispatcher, world, kSeed, findings);
  trial.combine();
  const Agreement all =
      group.agree({.operation = "conformance", .body = std::as_bytes(std::span(trial.out()))});
  uint64_t hash = 0;
  for (int r = 0; r < group.size(); ++r) {
    std::vector<double> values(all.body(r).size() / sizeof(double));
    if (!values.empty()) std::memcpy(values.data(), all.body(r).data(), all.body(r).size());
    hash = hash_of_values(values, hash);
  }
  return hash;
}

uint64_t expected_output_hash() {
  const World world = make_shared_world(1);
  const int64_t D = world.config.width;
  const reference::Layout layout = reference::lay_out(world.config, world.ranks);
  const reference::PerRank weights = {world.ranks[0].weights};
  const reference::PerRank rows =
      rows_of_routes(layout, D, {route_values(world, 0, kSeed + Trial::kCombineSeed)});
  return hash_of_values(reference::combine_exact(layout, D, world.dtype, rows, &weights)[0], 0);
}

}  // namespace crossdock::conformance
