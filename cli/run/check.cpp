#include "cli/run/check.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <sstream>

#include "cli/run/reference.hpp"
#include "crossdock/testing/comparator.hpp"

namespace crossdock::cli {
namespace {

using reference::denormal_spacing_of;
using reference::epsilon_of;
using reference::InputNoise;
using reference::MlpWeights;
using Values = std::vector<double>;

constexpr double kWork = 6e8;  // multiplications of the reference for all sampled tokens
constexpr int64_t kMaxSampledTokens = 64;  // in the sample
constexpr int64_t kMaxSlice = 4;           // inner positions whose weight gradients are compared

// Sums are computed in fp32 (fp64 for fp64); results and hidden rows are rounded to the dtype. The
// longest sum may be a softmax over many experts.
double tolerance_of(const RunJob& job) {
  const RouterConfig& router = job.layer.router;
  const auto terms =
      static_cast<double>(std::max(router.width + job.layer.experts.inner, router.num_experts));
  return 8.0 * epsilon_of(job.dtype()) + 16.0 * std::sqrt(terms) * epsilon_of(job.sum_dtype());
}

// Compares results of this rank and keeps the first difference.
class Findings {
 public:
  Findings(const RunJob& job, const RunValues& values, int rank)
      : job_(job), values_(values), tolerance_(tolerance_of(job)), rank_(rank) {}

  // Computes the same result with another reference, whose inputs were changed.
  using Again = std::function<Values(const RunReference&)>;

  // |got - wanted| must be at most the tolerance times the largest magnitude of `wanted`, or, where
  // terms cancel, at most what changed inputs cause.
  void compare(const std::string& name, const Values& got, const Values& wanted,
               const Again& again) {
    double scale = 0.0;
    for (const double value : wanted) scale = std::max(scale, std::abs(value));
    comparator_.near("rank " + std::to_string(rank_) + ": " + name, got, wanted,
                     {.tolerance = tolerance_,
                      .scale = {scale},
                      .floor = denormal_spacing_of(job_.dtype()),
                      .dtype = job_.dtype(),
                      .spread = [&] { return spread_under_noise(wanted, again); }});
    check_.passed = comparator_.passed();
    check_.failure = comparator_.failure();
    check_.largest_error = comparator_.largest_part();
  }
  RunCheck& check() { return check_; }

 private:
  // Half the tolerance, since the effects of all inputs add up.
  Values spread_under_noise(const Values& wanted, const Again& again) {
    for (uint64_t sample = shaken_.size(); sample < InputNoise::kSamples; ++sample) {
      const InputNoise noise{.relative = tolerance_ / 2, .sample = sample};
      shaken_.emplace_back(job_, values_, noise);
    }
    Values spread;
    for (const RunReference& shaken : shaken_) {
      reference::widen_spread(wanted, again(shaken), spread);
    }
    return spread;
  }

  const RunJob& job_;
  const RunValues& values_;
  double tolerance_;
  int rank_;
  std::vector<RunReference> shaken_;  // created when needed
  reference::Comparator comparator_;
  RunCheck check_;
};

Values row_of(const TensorView& tensor, int64_t row) {
  const TensorView one(static_cast<std::byte*>(tensor.data) + row * tensor.row_bytes(),
                       tensor.dtype, {tensor.row_bytes() / size_of(tensor.dtype)});
  return reference::to_values(one);
}

// The routes of this rank, [T, K].
struct OwnRoutes {
  std::vector<int32_t> ids;
  Values weights;

  explicit OwnRoutes(const RouterOutput& router) {
    const Routing routing = router.routing();
    const auto given = routing.expert_ids.as<int32_t>();
    ids.assign(given.begin(), given.end());
    weights = reference::to_values(routing.weights);
  }
};

int64_t sample_size(const RunJob& job) {
  const MoeLayerConfig& layer = job.layer;
  const double per_token =
      static_cast<double>(layer.router.width) *
      static_cast<double>(layer.router.top_k * layer.experts.inner + layer.shared_inner) *
      (job.with_backward ? 12.0 : 3.0);
  const auto affordable = static_cast<int64_t>(kWork / per_token);
  return std::min(job.tokens_total, std::clamp<int64_t>(affordable, 2, kMaxSampledTokens));
}

// Checks the sampled tokens that this rank holds.
void check_tokens(const RunJob& job, const RunReference& reference, const OwnRoutes& routes,
                  const RunOutcome& outcome, int rank, Findings& findings) {
  const int64_t K = job.layer.router.top_k;
  const int64_t size = sample_size(job);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t index = (2 * i + 1) * job.tokens_total / (2 * size);
    const int64_t t = index - job.first_token(rank);
    if (t < 0 || t >= job.num_tokens(rank)) continue;
    const std::vector<int64_t> ids(routes.ids.begin() + t * K, routes.ids.begin() + (t + 1) * K);
    const Values weights(routes.weights.begin() + t * K, routes.weights.begin() + (t + 1) * K);
    const RunReference::Token wanted = reference.token(index, ids);
    const auto compare = [&](const char* name, const Values& got, Values RunReference::Token::*of) {
      findings.compare(name + (" of token " + std::to_string(index)), got, wanted.*of,
                       [&](const RunReference& again) { return again.token(index, ids).*of; });
    };
    compare("best weights", weights, &RunReference::Token::chosen_weights);
    compare("weights", weights, &RunReference::Token::weights);
    compare("out", row_of(outcome.out.view, t), &RunReference::Token::out);
    if (job.with_backward) {
      compare("grad_x", row_of(outcome.grad_x.view, t), &RunReference::Token::grad_x);
    }
    ++findings.check().num_tokens;
  }
}

// The routes of all ranks to each expert, in the order of tokens. Collective.
std::vector<std::vector<RunReference::Route>> gather_routes(Group& group, const RunJob& job,
                                                            const OwnRoutes& own) {
  const Agreement ids =
      group.agree({.operation = "run_ids", .body = std::as_bytes(std::span(own.ids))});
  const Agreement weights =
      group.agree({.operation = "run_weights", .body = std::as_bytes(std::span(own.weights))});
  const auto num_routes = static_cast<size_t>(job.tokens_total * job.layer.router.top_k);
  std::vector<int32_t> all_ids(num_routes);
  Values all_weights(num_routes);
  if (num_routes > 0) {
    std::memcpy(all_ids.data(), ids.bytes.data(), num_routes * sizeof(int32_t));
    std::memcpy(all_weights.data(), weights.bytes.data(), num_routes * sizeof(double));
  }
  std::vector<std::vector<RunReference::Route>> routes(
      static_cast<size_t>(job.layer.router.num_experts));
  for (size_t i = 0; i < num_routes; ++i) {
    routes[static_cast<size_t>(all_ids[i])].push_back(
        {static_cast<int64_t>(i) / job.layer.router.top_k, all_weights[i]});
  }
  return routes;
}

// The library's gradients of one local expert.
MlpWeights library_gradients(const ExpertGradients& grads, int64_t local_expert) {
  MlpWeights result;
  result.w1 = row_of(grads.w1, local_expert);
  result.w2 = row_of(grads.w2, local_expert);
  if (grads.b1.given()) result.b1 = row_of(grads.b1, local_expert);
  if (grads.b2.given()) result.b2 = row_of(grads.b2, local_expert);
  return result;
}

// Checks the most loaded expert of this rank.
void check_expert(const RunJob& job, const RunReference& reference,
                  const std::vector<std::vector<RunReference::Route>>& routes, int rank,
                  const ExpertGradients& grads, Findings& findings) {
  const auto first = first_expert(job.layer.router.num_experts, job.num_ranks, rank);
  const auto end = first_expert(job.layer.router.num_experts, job.num_ranks, rank + 1);
  if (first == end) return;
  const auto busiest =
      std::max_element(routes.begin() + first, routes.begin() + end,
                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  const int64_t expert = busiest - routes.begin();
  const int64_t F = job.layer.experts.inner;
  const int64_t count = std::min(kMaxSlice, F);
  const RunReference::Slice slice{.first = (F - count) / 2, .count = count};
  const MlpWeights wanted = reference.gradients(expert, *busiest, slice);
  const MlpWeights got = reference.cut(library_gradients(grads, expert - first), slice);
  const auto compare = [&](const char* name, Values MlpWeights::*parameter) {
    findings.compare(name + (" of expert " + std::to_string(expert)), got.*parameter,
                     wanted.*parameter, [&](const RunReference& again) {
                       return again.gradients(expert, *busiest, slice).*parameter;
                     });
  };
  compare("grad of w1", &MlpWeights::w1);
  compare("grad of w2", &MlpWeights::w2);
  compare("grad of b1", &MlpWeights::b1);
  compare("grad of b2", &MlpWeights::b2);
  ++findings.check().num_experts;
}

// Combines the findings of all ranks. Collective.
RunCheck merge(Group& group, const RunCheck& own) {
  std::ostringstream text;
  text << own.passed << ' ' << own.num_tokens << ' ' << own.num_experts << ' ' << own.largest_error
       << ' ' << own.failure;
  const std::string sent = text.str();
  const Agreement all =
      group.agree({.operation = "run_check", .body = std::as_bytes(std::span(sent))});
  RunCheck merged;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::span<const std::byte> body = all.body(rank);
    std::istringstream read(std::string(reinterpret_cast<const char*>(body.data()), body.size()));
    RunCheck one;
    read >> one.passed >> one.num_tokens >> one.num_experts >> one.largest_error >> std::ws;
    std::getline(read, one.failure);
    merged.num_tokens += one.num_tokens;
    merged.num_experts += one.num_experts;
    merged.largest_error = std::max(merged.largest_error, one.largest_error);
    if (merged.passed) merged.failure = one.failure;
    merged.passed = merged.passed && one.passed;
  }
  return merged;
}

}  // namespace

RunCheck check_run(Group& group, const RunJob& job, const RunValues& values,
                   const RunTensors& tensors, const RunOutcome& outcome) {
  const RunReference reference(job, values);
  const OwnRoutes routes(*outcome.decision.router);
  Findings findings(job, values, group.rank());
  check_tokens(job, reference, routes, outcome, group.rank(), findings);
  if (job.with_backward) {
    check_expert(job, reference, gather_routes(group, job, routes), group.rank(),
                 tensors.grads.experts, findings);
  }
  return merge(group, findings.check());
}

}  // namespace crossdock::cli
