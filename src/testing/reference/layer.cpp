#include <algorithm>

#include "core/check.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

// Rows [begin, end) of an array [R, width].
std::vector<double> slice(const std::vector<double>& values, int64_t begin, int64_t end,
                          int64_t width) {
  return {values.begin() + begin * width, values.begin() + end * width};
}

void paste(const std::vector<double>& part, int64_t begin, int64_t width,
           std::vector<double>& values) {
  std::copy(part.begin(), part.end(), values.begin() + begin * width);
}

void scale_rows(const std::vector<double>& scales, int64_t width, std::vector<double>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) rows[i] *= scales[i / static_cast<size_t>(width)];
}

// The experts of a layer on one rank, with their inputs. Pad rows are part of their expert's
// segment: they are zero, have weight 0 and a zero gradient, and combine ignores their y.
struct ExpertStep {
  const LayerInput& input;
  const Receiver& receiver;
  const std::vector<double>& rows;         // [R, D]
  const std::vector<double>& row_weights;  // [R]

  std::vector<double> weights_of(int64_t begin, int64_t end) const {
    return input.weights_in_experts ? slice(row_weights, begin, end, 1) : std::vector<double>{};
  }

  // y [R, D]; pad rows are zero
  std::vector<double> forward() const {
    const int64_t D = input.config.width;
    std::vector<double> y = rows;
    if (input.experts.empty()) {
      if (input.weights_in_experts) scale_rows(row_weights, D, y);
      return y;
    }
    for (size_t i = 0; i < receiver.experts.size(); ++i) {
      const int64_t begin = receiver.segment_starts[i];
      const int64_t end = receiver.segment_starts[i + 1];
      const MlpWeights& expert = input.experts[static_cast<size_t>(receiver.experts[i])];
      paste(mlp_forward(input.mlp, expert, slice(rows, begin, end, D), weights_of(begin, end)),
            begin, D, y);
    }
    for (size_t r = 0; r < receiver.sources.size(); ++r) {
      if (receiver.sources[r].rank < 0)
        std::fill_n(y.begin() + static_cast<int64_t>(r) * D, D, 0.0);
    }
    return y;
  }

  // grad_y [R, D] -> gradients of rows [R, D] and of row weights [R]; of experts, in expert_grads
  MlpGradients backward(const std::vector<double>& grad_y,
                        std::vector<MlpWeights>& expert_grads) const {
    const int64_t D = input.config.width;
    MlpGradients grads{.rows = grad_y,
                       .row_weights = std::vector<double>(receiver.sources.size(), 0.0),
                       .expert = {}};
    if (input.experts.empty()) {
      for (size_t i = 0; i < rows.size(); ++i) {
        grads.row_weights[i / static_cast<size_t>(D)] += rows[i] * grad_y[i];
      }
      if (input.weights_in_experts) scale_rows(row_weights, D, grads.rows);
      return grads;
    }
    for (size_t i = 0; i < receiver.experts.size(); ++i) {
      const int64_t begin = receiver.segment_starts[i];
      const int64_t end = receiver.segment_starts[i + 1];
      const auto e = static_cast<size_t>(receiver.experts[i]);
      MlpGradients part = mlp_backward(input.mlp, input.experts[e], slice(rows, begin, end, D),
                                       weights_of(begin, end), slice(grad_y, begin, end, D));
      paste(part.rows, begin, D, grads.rows);
      paste(part.row_weights, begin, 1, grads.row_weights);
      expert_grads[e] = std::move(part.expert);
    }
    return grads;
  }
};

// One array of the input per rank.
PerRank collect(const std::vector<RankInput>& ranks, std::vector<double> RankInput::*member) {
  PerRank values;
  for (const RankInput& rank : ranks) values.push_back(rank.*member);
  return values;
}

}  // namespace

LayerOutput run_layer(const LayerInput& input) {
  const int64_t D = input.config.width;
  const PerRank weights = collect(input.ranks, &RankInput::weights);
  PerRank grad_out = collect(input.ranks, &RankInput::grad_out);
  for (size_t r = 0; r < grad_out.size(); ++r) grad_out[r].resize(input.ranks[r].x.size());

  LayerOutput output;
  output.layout = lay_out(input.config, input.ranks);
  output.rows = dispatch(output.layout, D, collect(input.ranks, &RankInput::x));
  const PerRank row_weights = dispatch_routes(output.layout, weights);
  std::vector<ExpertStep> steps;
  for (size_t r = 0; r < input.ranks.size(); ++r) {
    steps.push_back({input, output.layout.receivers[r], output.rows[r], row_weights[r]});
    output.y.push_back(steps[r].forward());
  }
  output.out = combine(output.layout, D, output.y, input.weights_in_experts ? nullptr : &weights);

  CombineGradients back = combine_backward(output.layout, D, grad_out, output.y, weights);
  output.grad_y = input.weights_in_experts ? dispatch(output.layout, D, grad_out) : back.rows;
  output.expert_grads.resize(input.experts.size());
  PerRank grad_rows;
  PerRank grad_row_weights;
  for (size_t r = 0; r < input.ranks.size(); ++r) {
    MlpGradients grads = steps[r].backward(output.grad_y[r], output.expert_grads);
    grad_rows.push_back(std::move(grads.rows));
    grad_row_weights.push_back(std::move(grads.row_weights));
  }
  output.grad_x = combine(output.layout, D, grad_rows);
  output.grad_weights = input.weights_in_experts ? collect_routes(output.layout, grad_row_weights)
                                                 : std::move(back.weights);
  output.dropped.resize(static_cast<size_t>(input.config.num_experts));
  for (const std::vector<int64_t>& dropped : output.layout.dropped) {
    for (size_t e = 0; e < dropped.size(); ++e) output.dropped[e] += dropped[e];
  }
  return output;
}

}  // namespace crossdock::reference
