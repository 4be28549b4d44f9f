#include <algorithm>
#include <bit>
#include <cmath>
#include <sstream>

#include "core/hash.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using reference::MlpWeights;
using Values = std::vector<double>;

// Distance between neighbouring values near 1.
double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-52;
    case DType::kF32:
      return 0x1p-23;
    case DType::kF16:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

// Sums are computed in fp32 (fp64 for fp64); results and hidden rows are rounded to the dtype.
double tolerance_of(const LayerSpec& spec) {
  const auto terms = static_cast<double>(spec.config.router.width + spec.config.experts.inner);
  return 8.0 * epsilon_of(spec.dtype()) + 16.0 * std::sqrt(terms) * epsilon_of(spec.sum_dtype());
}

class Comparison {
 public:
  Comparison(int rank, double tolerance) : rank_(rank), tolerance_(tolerance) {}

  // Values of tokens and parameters are near 1, so terms that cancel are, too.
  void compare(const std::string& name, const Values& got, const Values& wanted) {
    std::ostringstream message;
    message.precision(9);
    message << "rank " << rank_ << ": " << name;
    if (got.size() != wanted.size()) {
      message << " has " << got.size() << " values, must have " << wanted.size();
      return findings_.push_back(message.str());
    }
    double scale = 1.0;
    for (const double value : wanted) scale = std::max(scale, std::abs(value));
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (std::abs(got[i] - wanted[i]) <= tolerance_ * scale) continue;  // not if got is NaN
      message << ", value " << i << " is " << got[i] << ", must be " << wanted[i];
      return findings_.push_back(message.str());
    }
  }
  void compare(const std::string& name, const MlpWeights& got, const MlpWeights& wanted) {
    compare(name + " w1", got.w1, wanted.w1);
    compare(name + " w2", got.w2, wanted.w2);
    compare(name + " b1", got.b1, wanted.b1);
    compare(name + " b2", got.b2, wanted.b2);
  }
  Findings take() { return std::move(findings_); }

 private:
  int rank_;
  double tolerance_;
  Findings findings_;
};

}  // namespace

Findings compare(const LayerWorld& world, int rank, const LayerResults& got,
                 const LayerResults& wanted) {
  Comparison comparison(rank, tolerance_of(world.spec));
  comparison.compare("out", got.out, wanted.out);
  comparison.compare("grad_x", got.grad_x, wanted.grad_x);
  comparison.compare("grad of the gate", got.grad_gate, wanted.grad_gate);
  comparison.compare("grad of the gate's bias", got.grad_gate_bias, wanted.grad_gate_bias);
  comparison.compare("grad of the experts'", got.grad_experts, wanted.grad_experts);
  comparison.compare("grad of the shared experts'", got.grad_shared, wanted.grad_shared);
  comparison.compare("load", got.load, wanted.load);
  comparison.compare("drops", got.dropped, wanted.dropped);
  comparison.compare("losses", got.losses, wanted.losses);
  comparison.compare("numbers of tokens and sequences", got.totals, wanted.totals);
  return comparison.take();
}

uint64_t hash_of(const LayerResults& results) {
  uint64_t hash = kHashStart;
  for (const Values* values :
       {&results.out, &results.grad_x, &results.grad_gate, &results.grad_gate_bias,
        &results.grad_experts.w1, &results.grad_experts.w2, &results.grad_experts.b1,
        &results.grad_experts.b2, &results.grad_shared.w1, &results.grad_shared.w2,
        &results.grad_shared.b1, &results.grad_shared.b2, &results.load, &results.dropped,
        &results.losses, &results.totals}) {
    hash = hash_bytes(std::as_bytes(std::span(*values)), hash);
  }
  return hash;
}

Findings judge(Group& group, const StrategyFactory& strategy, const LayerWorld& world,
               const LayerPlace& place) {
  const LayerResults got = run_layer(group, {.strategy = strategy()}, world, place);
  return compare(world, group.rank(), got,
                 expected_results(world)[static_cast<size_t>(group.rank())]);
}

}  // namespace crossdock::conformance
