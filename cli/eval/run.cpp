#include "cli/eval/run.hpp"

#include "cli/eval/experts.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock::cli {
namespace {

Plan make_plan(const EvalCase& eval_case, const reference::RankInput& input,
               Dispatcher& dispatcher) {
  const Shape slots{input.T, eval_case.layer.config.top_k};
  const OwnedTensor weights = reference::to_tensor(eval_case.weight_dtype(), slots, input.weights);
  Routing routing{.expert_ids = {input.expert_ids.data(), slots}, .weights = weights.view};
  if (!input.mask.empty()) routing.mask = {input.mask.data(), DType::kBool, Shape{input.T}};
  return dispatcher.plan(routing);
}

std::vector<int64_t> real_rows_per_expert(const PlanData& plan) {
  std::vector<int64_t> rows_per_expert;
  const auto rank = static_cast<size_t>(plan.rank);
  for (int64_t i = plan.owner_offsets[rank]; i < plan.owner_offsets[rank + 1]; ++i) {
    const int32_t expert = plan.experts_by_owner[static_cast<size_t>(i)];
    int64_t num_rows = 0;
    for (int64_t source = 0; source < plan.P; ++source) {
      num_rows += plan.counts[static_cast<size_t>(source * plan.E + expert)];
    }
    rows_per_expert.push_back(num_rows);
  }
  return rows_per_expert;
}

// Like a caller with its own experts. Experts return their rows, so y is the dispatched rows.
void run_identity(Dispatcher& dispatcher, const Plan& plan, ConstTensorView y,
                  ConstTensorView grad_out, EvalRank& result) {
  result.out = reference::to_values(dispatcher.combine(plan, y));
  const CombineBackwardResult back = dispatcher.combine_backward(plan, grad_out, y);
  result.grad_weights = reference::to_values(back.grad_weights.view);
  result.grad_x = reference::to_values(dispatcher.dispatch_backward(plan, back.grad_rows.view));
}

// Like a layer: the experts' backward takes the dispatched grad_out and the row weights.
void run_experts(Dispatcher& dispatcher, const Plan& plan, ConstTensorView grad_out,
                 LocalExperts& experts, EvalResult& result) {
  EvalRank& rank = result.ranks[static_cast<size_t>(plan.data().rank)];
  const OwnedTensor y = experts.forward();
  const OwnedTensor out = experts.apply_weights() ? dispatcher.combine_unweighted(plan, y.view)
                                                  : dispatcher.combine(plan, y.view);
  rank.out = reference::to_values(out.view);
  const DispatchResult grad_y = dispatcher.dispatch(plan, {.x = grad_out});
  const LocalExperts::Gradients grads = experts.backward(grad_y.rows.view, result.expert_grads);
  rank.grad_x = reference::to_values(dispatcher.dispatch_backward(plan, grads.rows.view));
  rank.grad_weights = reference::to_values(dispatcher.collect_routes(plan, grads.row_weights.view));
}

}  // namespace

void run_rank(Group& group, const EvalCase& eval_case, EvalResult& result) {
  const reference::LayerInput& layer = eval_case.layer;
  const reference::RankInput& input = layer.ranks[static_cast<size_t>(group.rank())];
  EvalRank& rank = result.ranks[static_cast<size_t>(group.rank())];
  const Shape tokens{input.T, layer.config.width};
  const OwnedTensor x = reference::to_tensor(eval_case.dtype, tokens, input.x);
  const OwnedTensor grad_out = reference::to_tensor(eval_case.dtype, tokens, input.grad_out);

  Dispatcher dispatcher(group, layer.config, eval_case.strategy);
  const Plan plan = make_plan(eval_case, input, dispatcher);
  const DispatchResult sent = dispatcher.dispatch(plan, {.x = x.view, .with_row_weights = true});
  rank.rows = reference::to_values(sent.rows.view);
  rank.rows_per_expert = real_rows_per_expert(plan.data());
  rank.dropped.assign(plan.dropped().begin(), plan.dropped().end());
  if (layer.experts.empty() && !layer.weights_in_experts) {
    run_identity(dispatcher, plan, sent.rows.view, grad_out.view, rank);
  } else {
    LocalExperts experts(eval_case, plan, sent);
    run_experts(dispatcher, plan, grad_out.view, experts, result);
  }
}

std::vector<int64_t> EvalResult::dropped() const {
  std::vector<int64_t> sums;
  for (const EvalRank& rank : ranks) {
    sums.resize(rank.dropped.size());
    for (size_t e = 0; e < sums.size(); ++e) sums[e] += rank.dropped[e];
  }
  return sums;
}

EvalResult empty_result(const EvalCase& eval_case) {
  EvalResult result;
  result.ranks.resize(eval_case.layer.ranks.size());
  result.expert_grads.resize(eval_case.layer.experts.size());
  return result;
}

EvalResult run_case(const EvalCase& eval_case) {
  EvalResult result = empty_result(eval_case);
  run_ranks(eval_case.num_ranks(), [&](Group& group) { run_rank(group, eval_case, result); },
            {.ranks_per_node = eval_case.ranks_per_node});
  return result;
}

}  // namespace crossdock::cli
