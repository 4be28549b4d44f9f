#include "experts/shared_experts.hpp"

#include "ops/add.hpp"

namespace crossdock {
namespace {

ExpertsConfig as_one_expert(ExpertsConfig config) {
  config.num_local_experts = 1;
  config.weights_in = WeightsIn::kCombine;
  return config;
}

}  // namespace

SharedExperts::SharedExperts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool)
    : pool_(pool ? std::move(pool) : ThreadPool::process_wide()),
      experts_(as_one_expert(config), pool_) {}

ExpertsSaved SharedExperts::forward(const ExpertWeights& weights, ConstTensorView x,
                                    TensorView y) const {
  const OneSegment all(x.num_rows());
  return experts_.forward(
      {.weights = weights, .rows = x, .segments = all.view(), .row_weights = {}, .y = y});
}

void SharedExperts::backward_dx(const BackwardDxArgs& args) const {
  const OneSegment all(args.x.num_rows());
  experts_.backward_dx({.weights = args.weights,
                        .rows = args.x,
                        .segments = all.view(),
                        .row_weights = {},
                        .grad_y = args.grad_out,
                        .saved = args.saved,
                        .grad_rows = args.grad_x,
                        .grad_row_weights = {}});
}

void SharedExperts::backward_dw(const BackwardDwArgs& args) const {
  const OneSegment all(args.x.num_rows());
  experts_.backward_dw({.rows = args.x,
                        .segments = all.view(),
                        .row_weights = {},
                        .grad_y = args.grad_out,
                        .saved = args.saved,
                        .grads = args.grads,
                        .accumulate = args.accumulate});
}

void SharedExperts::add(ConstTensorView term, TensorView sum) const {
  ops::add({.term = term, .sum = sum}, *pool_);
}

}  // namespace crossdock
