#include "cli/eval/check.hpp"

#include <cmath>
#include <functional>
#include <sstream>

#include "crossdock/testing/comparator.hpp"

namespace crossdock::cli {
namespace {

using reference::Allowance;
using reference::Comparator;
using reference::denormal_spacing_of;
using reference::epsilon_of;
using reference::InputNoise;
using reference::LayerInput;
using reference::LayerOutput;
using reference::MlpWeights;
using reference::PerRank;

// The case without its dropped routes and without a capacity, so changed weights drop no other
// routes.
LayerInput with_kept_routes(LayerInput layer, const reference::Layout& layout) {
  layer.config.capacity.reset();
  for (size_t r = 0; r < layer.ranks.size(); ++r) {
    for (size_t i = 0; i < layout.places[r].size(); ++i) {
      if (!layout.places[r][i].is_kept()) layer.ranks[r].expert_ids[i] = -1;
    }
  }
  return layer;
}

// The case as the library runs it: if one expert of a rank has a bias, its others have zeros.
LayerInput with_shared_biases(LayerInput layer) {
  const std::vector<int32_t> owners =
      reference::owners_of(layer.config, static_cast<int>(layer.ranks.size()));
  for (const auto bias : {&MlpWeights::b1, &MlpWeights::b2}) {
    std::vector<size_t> sizes(layer.ranks.size(), 0);
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      size_t& size = sizes[static_cast<size_t>(owners[e])];
      size = std::max(size, (layer.experts[e].*bias).size());
    }
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      (layer.experts[e].*bias).resize(sizes[static_cast<size_t>(owners[e])]);
    }
  }
  return layer;
}

// The results that the library must have.
LayerOutput wanted_results(const LayerInput& layer) {
  LayerOutput wanted = reference::run_layer(with_shared_biases(layer));
  for (size_t e = 0; e < wanted.expert_grads.size(); ++e) {
    if (layer.experts[e].b1.empty()) wanted.expert_grads[e].b1.clear();
    if (layer.experts[e].b2.empty()) wanted.expert_grads[e].b2.clear();
  }
  return wanted;
}

// The case with magnitudes instead of values: its sums bound the rounding error of the real sums.
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

// Calls visit(values) with every array of the case.
void for_each_array(LayerInput& layer, const auto& visit) {
  for (reference::RankInput& rank : layer.ranks) {
    visit(rank.x);
    visit(rank.weights);
    visit(rank.grad_out);
  }
  for (reference::MlpWeights& expert : layer.experts) {
    visit(expert.w1);
    visit(expert.w2);
    visit(expert.b1);
    visit(expert.b2);
  }
}

// Results of the case with randomly changed inputs. All experts get biases, which model the
// rounding of inner values and results. Changes are a quarter of the tolerance, since the effects
// of all inputs add up.
std::vector<LayerOutput> shaken_results(LayerInput layer, double tolerance, double spacing) {
  for (reference::MlpWeights& expert : layer.experts) {
    expert.b1.resize(expert.w1.size() / static_cast<size_t>(layer.mlp.D));
    expert.b2.resize(static_cast<size_t>(layer.mlp.D));
  }
  std::vector<LayerOutput> results;
  for (uint64_t sample = 0; sample < InputNoise::kSamples; ++sample) {
    const InputNoise noise{.relative = tolerance / 4, .absolute = spacing, .sample = sample};
    LayerInput shaken = layer;
    uint64_t stream = 0;
    for_each_array(shaken, [&](std::vector<double>& values) { noise.shake(values, stream++); });
    results.push_back(reference::run_layer(shaken));
  }
  return results;
}

// The largest magnitude, for every entry.
std::vector<double> flat_scale(const std::vector<double>& values) {
  double most = 0.0;
  for (const double value : values)
    most = std::max(most, std::isfinite(value) ? std::abs(value) : 0);
  return std::vector<double>(values.size(), most);
}

std::string of_rank(const char* name, size_t rank) {
  return std::string(name) + " of rank " + std::to_string(rank);
}

// Experts return their rows unchanged: sums are functions of exact rows, so their bits are fixed.
void check_exact_sums(const EvalCase& eval_case, const EvalResult& result,
                      const LayerOutput& wanted, Comparator& checker) {
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

// Experts return their rows unchanged: sums of magnitudes bound the rounding of sums.
void check_near_rows(const EvalCase& eval_case, const EvalResult& result, const LayerOutput& wanted,
                     double tolerance, Comparator& checker) {
  const DispatchConfig& config = eval_case.layer.config;
  const LayerOutput bound =
      reference::run_layer(magnitudes(with_kept_routes(eval_case.layer, wanted.layout)));
  const auto allow = [&](const std::vector<double>& scale, int64_t terms, DType dtype) {
    return Allowance{.tolerance = tolerance,
                     .scale = scale,
                     .floor = static_cast<double>(terms) * denormal_spacing_of(dtype),
                     .dtype = dtype};
  };
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    const EvalRank& rank = result.ranks[r];
    checker.near(of_rank("grad_weights", r), rank.grad_weights, wanted.grad_weights[r],
                 allow(bound.grad_weights[r], config.width, eval_case.weight_dtype()));
    if (config.partial_sums == PartialSums::kNone) continue;  // compared by check_exact_sums
    const auto allow_sums = [&](const std::vector<double>& scale) {
      Allowance allowance = allow(scale, config.top_k + 1, eval_case.dtype);
      allowance.may_overflow = config.partial_sums == PartialSums::kRowType;
      return allowance;
    };
    checker.near(of_rank("out", r), rank.out, wanted.out[r], allow_sums(bound.out[r]));
    checker.near(of_rank("grad_x", r), rank.grad_x, wanted.grad_x[r], allow_sums(bound.grad_x[r]));
  }
}

// With MLPs, a result is compared relative to its largest value, or to its spread where terms
// cancel.
void check_near_mlps(const EvalCase& eval_case, const EvalResult& result, const LayerOutput& wanted,
                     double tolerance, Comparator& checker) {
  LayerInput layer = with_kept_routes(eval_case.layer, wanted.layout);
  const double spacing = denormal_spacing_of(eval_case.dtype);
  double largest_input = 1.0;
  double terms = static_cast<double>(layer.config.width + layer.config.top_k + layer.mlp.F);
  for_each_array(layer, [&](const std::vector<double>& values) {
    for (const double scale : flat_scale(values)) largest_input = std::max(largest_input, scale);
  });
  for (const auto& rows : wanted.rows) terms += static_cast<double>(rows.size());
  std::vector<LayerOutput> shaken;
  using Member = std::function<const std::vector<double>&(const LayerOutput&)>;
  const auto compare = [&](const std::string& name, const std::vector<double>& got, DType dtype,
                           const Member& member) {
    const std::vector<double>& values = member(wanted);
    const auto spread = [&] {
      if (shaken.empty()) shaken = shaken_results(layer, tolerance, spacing);
      std::vector<double> widest;
      for (const LayerOutput& output : shaken)
        reference::widen_spread(values, member(output), widest);
      return widest;
    };
    checker.near(name, got, values,
                 {.tolerance = tolerance,
                  .scale = flat_scale(values),
                  .floor = spacing * terms * largest_input,
                  .dtype = dtype,
                  .spread = spread});
  };
  const DType sum_dtype = eval_case.weight_dtype();
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    const auto compare_rank = [&](const char* name, const std::vector<double>& got, DType dtype,
                                  PerRank LayerOutput::*member) {
      compare(
          of_rank(name, r), got,
          dtype, [&](const LayerOutput& output) -> const auto& { return (output.*member)[r]; });
    };
    compare_rank("out", result.ranks[r].out, eval_case.dtype, &LayerOutput::out);
    compare_rank("grad_x", result.ranks[r].grad_x, eval_case.dtype, &LayerOutput::grad_x);
    compare_rank("grad_weights", result.ranks[r].grad_weights, sum_dtype,
                 &LayerOutput::grad_weights);
  }
  for (size_t e = 0; e < wanted.expert_grads.size(); ++e) {
    const auto compare_grad = [&](const char* name, std::vector<double> MlpWeights::*member) {
      if ((wanted.expert_grads[e].*member).empty() && (result.expert_grads[e].*member).empty()) {
        return;
      }
      compare(
          name + (" of expert " + std::to_string(e)), result.expert_grads[e].*member,
          sum_dtype, [&](const LayerOutput& output) -> const auto& {
            return output.expert_grads[e].*member;
          });
    };
    compare_grad("grad_w1", &MlpWeights::w1);
    compare_grad("grad_w2", &MlpWeights::w2);
    compare_grad("grad_b1", &MlpWeights::b1);
    compare_grad("grad_b2", &MlpWeights::b2);
  }
}

}  // namespace

CheckReport check_result(const EvalCase& eval_case, const EvalResult& result) {
  const LayerInput& layer = eval_case.layer;
  const LayerOutput wanted = wanted_results(layer);
  Comparator checker;
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
  // Products are summed at least in fp32, over K or D terms, or D and F terms of an MLP whose inner
  // values are rounded to the dtype. Without an MLP a value is rounded to the dtype at most three
  // times, by half an epsilon each: y, a partial sum and out.
  const bool identity = layer.experts.empty();
  const double terms = static_cast<double>(layer.config.width + layer.config.top_k + layer.mlp.F);
  const double tolerance = (identity ? 2.0 : 32.0) * epsilon_of(eval_case.dtype) +
                           terms * epsilon_of(eval_case.weight_dtype());
  const auto check_near = identity ? check_near_rows : check_near_mlps;
  check_near(eval_case, result, wanted, tolerance, checker);
  const bool has_fixed_bits = identity && layer.config.partial_sums == PartialSums::kNone;
  if (has_fixed_bits) check_exact_sums(eval_case, result, wanted, checker);

  std::ostringstream summary;
  if (checker.passed()) {
    summary << "checked against the fp64 reference: " << result.ranks.size() << " ranks, "
            << num_tokens << " tokens, " << num_rows << " rows; rows"
            << (has_fixed_bits ? ", out and grad_x" : "") << " bit-identical, "
            << (has_fixed_bits ? "grad_weights" : "sums and gradients") << " within "
            << tolerance * checker.largest_part() << " (relative; at most " << tolerance << ")";
  } else {
    summary << "differs from the fp64 reference: " << checker.failure();
  }
  return {checker.passed(), summary.str()};
}

}  // namespace crossdock::cli
