#include "cli/eval/experts.hpp"

#include <algorithm>

#include "crossdock/experts.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock::cli {
namespace {

using Parameter = std::vector<double> reference::MlpWeights::*;

}  // namespace

// The library's experts with the parameters of this rank.
struct LocalExperts::Mlp {
  Mlp(const EvalCase& eval_case, const PlanData& plan);

  // Sets the views of values and gradients, unless no local expert has the parameter.
  void add(Parameter parameter, Shape shape, ConstTensorView& value, TensorView& grad);
  // The gradients of local expert i, in the form of its parameters.
  reference::MlpWeights grads_of(size_t i) const;

  const EvalCase& eval_case;
  std::vector<int64_t> experts;  // [E_local]
  std::vector<OwnedTensor> memory;
  ExpertWeights weights;
  ExpertGradients grads;
  Experts library;
  ExpertsSaved saved;
};

namespace {

ExpertsConfig make_config(const EvalCase& eval_case, int64_t num_local_experts) {
  const reference::LayerInput& layer = eval_case.layer;
  return {.num_local_experts = num_local_experts,
          .width = layer.mlp.D,
          .inner = layer.mlp.F,
          .activation = layer.mlp.activation,
          .interleaved = layer.mlp.interleaved,
          .limit = layer.mlp.limit,
          .weights_in = layer.weights_in_experts ? WeightsIn::kExperts : WeightsIn::kCombine,
          .dtype = eval_case.dtype};
}

// rows [R, D], each multiplied by its weight
OwnedTensor scaled(ConstTensorView rows, const std::vector<double>& weights) {
  std::vector<double> values = reference::to_values(rows);
  const auto D = static_cast<size_t>(rows.shape[1]);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= weights[i / D];
  return reference::to_tensor(rows.dtype, rows.shape, values);
}

// Dot product of a's and b's row, for every row.
std::vector<double> row_products(ConstTensorView a, ConstTensorView b) {
  const std::vector<double> left = reference::to_values(a);
  const std::vector<double> right = reference::to_values(b);
  std::vector<double> sums(static_cast<size_t>(a.shape[0]), 0.0);
  const auto D = static_cast<size_t>(a.shape[1]);
  for (size_t i = 0; i < left.size(); ++i) sums[i / D] += left[i] * right[i];
  return sums;
}

}  // namespace

LocalExperts::Mlp::Mlp(const EvalCase& eval_case_in, const PlanData& plan)
    : eval_case(eval_case_in),
      experts(
          plan.experts_by_owner.begin() + plan.owner_offsets[static_cast<size_t>(plan.rank)],
          plan.experts_by_owner.begin() + plan.owner_offsets[static_cast<size_t>(plan.rank) + 1]),
      library(make_config(eval_case_in, static_cast<int64_t>(experts.size()))) {
  const auto E_local = static_cast<int64_t>(experts.size());
  const int64_t D = library.config().width;
  const int64_t F = library.config().inner;
  const int64_t hidden = library.config().hidden_width();
  add(&reference::MlpWeights::w1, {E_local, hidden, D}, weights.w1, grads.w1);
  add(&reference::MlpWeights::w2, {E_local, D, F}, weights.w2, grads.w2);
  add(&reference::MlpWeights::b1, {E_local, hidden}, weights.b1, grads.b1);
  add(&reference::MlpWeights::b2, {E_local, D}, weights.b2, grads.b2);
}

void LocalExperts::Mlp::add(Parameter parameter, Shape shape, ConstTensorView& value,
                            TensorView& grad) {
  const auto& all = eval_case.layer.experts;
  const bool is_bias = shape.rank() == 2;
  if (is_bias && std::all_of(experts.begin(), experts.end(), [&](int64_t e) {
        return (all[static_cast<size_t>(e)].*parameter).empty();
      })) {
    return;
  }
  std::vector<double> stacked;
  for (size_t i = 0; i < experts.size(); ++i) {
    const std::vector<double>& entry = all[static_cast<size_t>(experts[i])].*parameter;
    stacked.insert(stacked.end(), entry.begin(), entry.end());
    // Zeros for a bias that this expert does not have but another local expert has.
    stacked.resize((i + 1) * static_cast<size_t>(shape.num_elements()) / experts.size());
  }
  memory.push_back(reference::to_tensor(eval_case.dtype, shape, stacked));
  value = memory.back().view;
  memory.push_back(reference::to_tensor(eval_case.weight_dtype(), shape, stacked));
  grad = memory.back().view;
}

reference::MlpWeights LocalExperts::Mlp::grads_of(size_t i) const {
  const reference::MlpWeights& expert = eval_case.layer.experts[static_cast<size_t>(experts[i])];
  const auto entry = [&](ConstTensorView stacked, const std::vector<double>& parameter) {
    const std::vector<double> values = reference::to_values(stacked);
    const auto first = values.begin() + static_cast<int64_t>(i * parameter.size());
    return parameter.empty()
               ? std::vector<double>{}
               : std::vector<double>(first, first + static_cast<int64_t>(parameter.size()));
  };
  return {.w1 = entry(grads.w1, expert.w1),
          .w2 = entry(grads.w2, expert.w2),
          .b1 = entry(grads.b1, expert.b1),
          .b2 = entry(grads.b2, expert.b2)};
}

LocalExperts::LocalExperts(const EvalCase& eval_case, const Plan& plan, const DispatchResult& sent)
    : case_(eval_case), plan_(plan), sent_(sent) {
  if (!eval_case.layer.experts.empty()) mlp_ = std::make_unique<Mlp>(eval_case, plan.data());
}

LocalExperts::~LocalExperts() = default;

OwnedTensor LocalExperts::forward() {
  const ConstTensorView rows = sent_.rows.view;
  if (!mlp_) return scaled(rows, reference::to_values(sent_.row_weights.view));
  Buffer memory(rows.num_bytes());
  OwnedTensor y{memory.view(rows.dtype, rows.shape), memory.owner()};
  mlp_->saved = mlp_->library.forward({.weights = mlp_->weights,
                                       .rows = rows,
                                       .segments = plan_.segments(),
                                       .row_weights = sent_.row_weights.view,
                                       .y = y.view});
  return y;
}

LocalExperts::Gradients LocalExperts::backward(ConstTensorView grad_y,
                                               std::vector<reference::MlpWeights>& expert_grads) {
  const ConstTensorView rows = sent_.rows.view;
  const ConstTensorView row_weights = sent_.row_weights.view;
  if (!mlp_) {
    return {
        scaled(grad_y, reference::to_values(row_weights)),
        reference::to_tensor(case_.weight_dtype(), row_weights.shape, row_products(rows, grad_y))};
  }
  const Buffer rows_memory(rows.num_bytes());
  const Buffer weights_memory(row_weights.num_bytes());
  Gradients grads{
      {rows_memory.view(rows.dtype, rows.shape), rows_memory.owner()},
      {weights_memory.view(row_weights.dtype, row_weights.shape), weights_memory.owner()}};
  mlp_->library.backward_dx({.weights = mlp_->weights,
                             .rows = rows,
                             .segments = plan_.segments(),
                             .row_weights = row_weights,
                             .grad_y = grad_y,
                             .saved = &mlp_->saved,
                             .grad_rows = grads.rows.view,
                             .grad_row_weights = grads.row_weights.view});
  mlp_->library.backward_dw({.rows = rows,
                             .segments = plan_.segments(),
                             .row_weights = row_weights,
                             .grad_y = grad_y,
                             .saved = &mlp_->saved,
                             .grads = mlp_->grads});
  for (size_t i = 0; i < mlp_->experts.size(); ++i) {
    expert_grads[static_cast<size_t>(mlp_->experts[i])] = mlp_->grads_of(i);
  }
  return grads;
}

}  // namespace crossdock::cli
