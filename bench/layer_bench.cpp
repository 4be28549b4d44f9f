#include "bench/layer_bench.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "bench/layer_values.hpp"
#include "crossdock/error.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::bench {
namespace {

MoeLayerConfig config_of(const Scenario& s, std::string_view strategy) {
  MoeLayerConfig config;
  config.router.num_experts = s.experts;
  config.router.top_k = s.top_k;
  config.router.width = s.width;
  config.experts.inner = s.inner;
  config.strategy = strategy;
  config.overlap_chunks = s.overlap_chunks;
  return config;
}

class LayerOnRank {
 public:
  LayerOnRank(const Scenario& s, Group& group, std::string_view strategy)
      : s_(s),
        rank_(group.rank()),
        first_(first_expert(s.experts, group.size(), rank_)),
        E_local_(first_expert(s.experts, group.size(), rank_ + 1) - first_),
        layer_(group, config_of(s, strategy), {}),
        gate_(values_of_gate(s)),
        x_(values_of_x(s, rank_)),
        grad_out_(values_of_grad_out(s, rank_)),
        grad_gate_(gate_.size()) {
    for (int64_t e = first_; e < first_ + E_local_; ++e) {
      const std::vector<float> w1 = values_of_w1(s, e);
      const std::vector<float> w2 = values_of_w2(s, e);
      w1_.insert(w1_.end(), w1.begin(), w1.end());
      w2_.insert(w2_.end(), w2.begin(), w2.end());
    }
    grad_w1_.resize(w1_.size());
    grad_w2_.resize(w2_.size());
  }

  std::vector<Step> steps() {
    const int64_t tokens = s_.token_bytes();
    const int64_t parameters = s_.parameter_bytes();
    const double flops =
        6.0 * static_cast<double>(s_.ranks * s_.tokens * s_.top_k * s_.width * s_.inner);
    return {{.name = "forward",
             .bytes = 2 * tokens + parameters,
             .flops = flops,
             .run = [this] { forward(); }},
            {.name = "backward",
             .bytes = 3 * tokens + 2 * parameters,
             .flops = 2 * flops,
             .run = [this] { backward(); }}};
  }

  // Checks the first and the last token, with the experts that the router chose.
  void check() const {
    const Routing routing = decision_.router->routing();
    for (const int64_t t : {int64_t{0}, s_.tokens - 1}) {
      const std::vector<double> x(x_.begin() + t * s_.width, x_.begin() + (t + 1) * s_.width);
      std::vector<double> wanted(x.size(), 0.0);
      for (int64_t k = 0; k < s_.top_k; ++k) {
        const auto slot = static_cast<size_t>(t * s_.top_k + k);
        const int64_t expert = routing.expert_ids.as<int32_t>()[slot];
        const double weight = routing.weights.as<float>()[slot];
        const std::vector<double> y = expert_output(expert, x);
        for (size_t d = 0; d < wanted.size(); ++d) wanted[d] += weight * y[d];
      }
      check_token(t, wanted);
    }
  }

 private:
  MoeLayerWeights weights() const {
    return {.gate = {.weight = {gate_.data(), {s_.experts, s_.width}}},
            .experts = {{w1_.data(), {E_local_, 2 * s_.inner, s_.width}},
                        {w2_.data(), {E_local_, s_.width, s_.inner}},
                        {},
                        {}}};
  }
  ConstTensorView tokens(const std::vector<float>& rows) const {
    return {rows.data(), {s_.tokens, s_.width}};
  }

  void forward() {
    result_ = {};
    result_ = layer_.forward({.weights = weights(), .x = tokens(x_)});
    decision_ = result_.saved.decision;
  }

  void backward() {
    grad_x_ = {};
    grad_x_ = layer_.backward(
        {.weights = weights(),
         .x = tokens(x_),
         .grad_out = tokens(grad_out_),
         .saved = &result_.saved,
         .grads = {.gate = {grad_gate_.data(), {s_.experts, s_.width}},
                   .experts = {{grad_w1_.data(), {E_local_, 2 * s_.inner, s_.width}},
                               {grad_w2_.data(), {E_local_, s_.width, s_.inner}},
                               {},
                               {}}}});
  }

  std::vector<double> expert_output(int64_t expert, const std::vector<double>& x) const {
    const std::vector<float> w1 = values_of_w1(s_, expert);
    const std::vector<float> w2 = values_of_w2(s_, expert);
    return reference::mlp_forward(
        {.D = s_.width, .F = s_.inner},
        {.w1 = {w1.begin(), w1.end()}, .w2 = {w2.begin(), w2.end()}, .b1 = {}, .b2 = {}}, x);
  }

  void check_token(int64_t t, const std::vector<double>& wanted) const {
    const auto out = result_.out.view.as<float>();
    double scale = 0.0;
    for (const double value : wanted) scale = std::max(scale, std::abs(value));
    for (size_t d = 0; d < wanted.size(); ++d) {
      const double got = out[static_cast<size_t>(t) * wanted.size() + d];
      if (std::abs(got - wanted[d]) <= 1e-4 * scale) continue;
      throw Error(ErrorCode::kInternal, "the layer's out is wrong in token " + std::to_string(t) +
                                            " of rank " + std::to_string(rank_) + ", column " +
                                            std::to_string(d));
    }
  }

  Scenario s_;
  int rank_;
  int64_t first_;  // expert of this rank
  int64_t E_local_;
  MoeLayer layer_;
  std::vector<float> gate_, x_, grad_out_, grad_gate_;
  std::vector<float> w1_, w2_, grad_w1_, grad_w2_;
  MoeForwardResult result_;
  MoeDecision decision_;
  OwnedTensor grad_x_;
};

}  // namespace

std::vector<StepResult> run_layer(const Scenario& scenario, Group& group, std::string_view strategy,
                                  const Repeats& repeats, bool check) {
  LayerOnRank layer(scenario, group, strategy);
  std::vector<StepResult> results = measure(group, layer.steps(), repeats);
  if (check) layer.check();
  return results;
}

}  // namespace crossdock::bench
