#include "eval_check.hpp"

#include <cmath>
#include <sstream>

#include "epsilon.hpp"

namespace crossdock::cli {
namespace {

using reference::LayerInput;
using reference::LayerOutput;
using reference::PerRank;

// Collects what was compared and the first difference.
class Checker {
 public:
  // To the last bit.
  void exact(const std::string& name, const std::vector<double>& got,
             const std::vector<double>& wanted) {
    if (!same_size(name, got.size(), wanted.size())) return;
    const reference::Comparison difference = reference::compare(got, wanted);
    if (difference.num_different > 0) fail(name, difference.first, got, wanted);
  }

  void exact(const std::string& name, const std::vector<int64_t>& got,
             const std::vector<int64_t>& wanted) {
    exact(name, std::vector<double>(got.begin(), got.end()),
          std::vector<double>(wanted.begin(), wanted.end()));
  }

  // |got - wanted| at most tolerance * scale, entry by entry; what is not finite must be equal.
  void near(const std::string& name, const std::vector<double>& got,
            const std::vector<double>& wanted, const std::vector<double>& scale, double tolerance) {
    if (!same_size(name, got.size(), wanted.size())) return;
    for (size_t i = 0; i < got.size(); ++i) {
      const bool both_nan = std::isnan(got[i]) && std::isnan(wanted[i]);
      if (both_nan || got[i] == wanted[i]) continue;
      const double error = std::abs(got[i] - wanted[i]);
      if (!(error <= tolerance * scale[i])) return fail(name, static_cast<int64_t>(i), got, wanted);
      if (scale[i] > 0) largest_error_ = std::max(largest_error_, error / scale[i]);
    }
  }

  bool passed() const { return failure_.empty(); }
  const std::string& failure() const { return failure_; }
  double largest_error() const { return largest_error_; }

 private:
  bool same_size(const std::string& name, size_t got, size_t wanted) {
    if (got == wanted) return true;
    if (failure_.empty()) {
      failure_ =
          name + " has " + std::to_string(got) + " values, must have " + std::to_string(wanted);
    }
    return false;
  }

  void fail(const std::string& name, int64_t index, const std::vector<double>& got,
            const std::vector<double>& wanted) {
    if (!failure_.empty()) return;
    std::ostringstream message;
    message.precision(17);
    message << name << ", value " << index << " is " << got[static_cast<size_t>(index)]
            << ", must be " << wanted[static_cast<size_t>(index)];
    failure_ = message.str();
  }

  std::string failure_;
  double largest_error_ = 0.0;
};

// The case with magnitudes in place of values: its sums bound the rounding of the real ones.
LayerInput magnitudes(LayerInput layer) {
  const auto take = [](std::vector<double>& values) {
    for (double& value : values) value = std::isfinite(value) ? std::abs(value) : 0.0;
  };
  for (reference::RankInput& rank : layer.ranks) {
    take(rank.x);
    take(rank.weights);
    take(rank.grad_out);
  }
  return layer;
}

// The largest magnitude everywhere.
std::vector<double> flat_scale(const std::vector<double>& values) {
  double most = 0.0;
  for (const double value : values)
    most = std::max(most, std::isfinite(value) ? std::abs(value) : 0);
  return std::vector<double>(values.size(), most);
}

std::string of_rank(const char* name, size_t rank) {
  return std::string(name) + " of rank " + std::to_string(rank);
}

// Every expert returns its row: the sums are a function of exact rows, so their bits are fixed.
void check_exact_sums(const EvalCase& eval_case, const EvalResult& result,
                      const LayerOutput& wanted, Checker& checker) {
  const int64_t D = eval_case.layer.config.width;
  PerRank weights;
  for (const reference::RankInput& rank : eval_case.layer.ranks) weights.push_back(rank.weights);
  const auto rounded = [&](PerRank values) {
    for (auto& rank : values) {
      for (double& value : rank) value = reference::round_to(eval_case.dtype, value);
    }
    return values;
  };
  PerRank grad_rows = wanted.grad_y;
  if (eval_case.layer.weights_in_experts) {
    const PerRank row_weights = reference::dispatch_routes(wanted.layout, weights);
    for (size_t r = 0; r < grad_rows.size(); ++r) {
      for (size_t i = 0; i < grad_rows[r].size(); ++i) {
        grad_rows[r][i] *= row_weights[r][i / static_cast<size_t>(D)];
      }
    }
  }
  const PerRank out =
      reference::combine_exact(wanted.layout, D, eval_case.dtype, rounded(wanted.y),
                               eval_case.layer.weights_in_experts ? nullptr : &weights);
  const PerRank grad_x =
      reference::combine_exact(wanted.layout, D, eval_case.dtype, rounded(grad_rows));
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    checker.exact(of_rank("out", r), result.ranks[r].out, out[r]);
    checker.exact(of_rank("grad_x", r), result.ranks[r].grad_x, grad_x[r]);
  }
}

void check_near_sums(const EvalCase& eval_case, const EvalResult& result, const LayerOutput& wanted,
                     double tolerance, Checker& checker) {
  const LayerOutput bound = reference::run_layer(magnitudes(eval_case.layer));
  const bool identity = eval_case.layer.experts.empty();
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    const EvalRank& rank = result.ranks[r];
    const auto scale = [&](const PerRank& sums, const PerRank& values) {
      return identity ? sums[r] : flat_scale(values[r]);
    };
    checker.near(of_rank("out", r), rank.out, wanted.out[r], scale(bound.out, wanted.out),
                 tolerance);
    checker.near(of_rank("grad_x", r), rank.grad_x, wanted.grad_x[r],
                 scale(bound.grad_x, wanted.grad_x), tolerance);
    checker.near(of_rank("grad_weights", r), rank.grad_weights, wanted.grad_weights[r],
                 scale(bound.grad_weights, wanted.grad_weights), tolerance);
  }
  for (size_t e = 0; e < wanted.expert_grads.size(); ++e) {
    const std::string name = " of expert " + std::to_string(e);
    const auto compare = [&](const char* parameter, const std::vector<double>& got,
                             const std::vector<double>& want) {
      checker.near(parameter + name, got, want, flat_scale(want), tolerance);
    };
    compare("grad_w1", result.expert_grads[e].w1, wanted.expert_grads[e].w1);
    compare("grad_w2", result.expert_grads[e].w2, wanted.expert_grads[e].w2);
    compare("grad_b1", result.expert_grads[e].b1, wanted.expert_grads[e].b1);
    compare("grad_b2", result.expert_grads[e].b2, wanted.expert_grads[e].b2);
  }
}

}  // namespace

CheckReport check_result(const EvalCase& eval_case, const EvalResult& result) {
  const LayerInput& layer = eval_case.layer;
  const LayerOutput wanted = reference::run_layer(layer);
  Checker checker;
  int64_t num_tokens = 0;
  int64_t num_rows = 0;
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    checker.exact(of_rank("rows", r), result.ranks[r].rows, wanted.rows[r]);
    checker.exact(of_rank("rows_per_expert", r), result.ranks[r].rows_per_expert,
                  wanted.layout.receivers[r].rows_per_expert);
    num_tokens += layer.ranks[r].T;
    num_rows += wanted.layout.num_rows(static_cast<int>(r));
  }
  checker.exact("dropped", result.dropped(), wanted.dropped);
  // Products are summed in fp32 at least, over K or D terms, or D and F of an MLP whose inner
  // values are rounded to the dtype.
  const bool identity = layer.experts.empty();
  const double terms = static_cast<double>(layer.config.width + layer.config.top_k + layer.mlp.F);
  const double tolerance = (identity ? 2.0 : 32.0) * epsilon_of(eval_case.dtype) +
                           terms * epsilon_of(eval_case.weight_dtype());
  check_near_sums(eval_case, result, wanted, tolerance, checker);
  const bool has_fixed_bits = identity && !layer.config.partial_sums;
  if (has_fixed_bits) check_exact_sums(eval_case, result, wanted, checker);

  std::ostringstream summary;
  if (checker.passed()) {
    summary << "checked against the fp64 reference: " << result.ranks.size() << " ranks, "
            << num_tokens << " tokens, " << num_rows << " rows; rows"
            << (has_fixed_bits ? ", out and grad_x" : "") << " equal to the last bit, "
            << (has_fixed_bits ? "grad_weights" : "sums and gradients") << " within "
            << checker.largest_error() << " (relative; at most " << tolerance << ")";
  } else {
    summary << "differs from the fp64 reference: " << checker.failure();
  }
  return {checker.passed(), summary.str()};
}

}  // namespace crossdock::cli
