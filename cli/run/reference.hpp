#pragma once

#include <cstdint>
#include <vector>

#include "cli/run/job.hpp"
#include "cli/run/values.hpp"
#include "crossdock/testing/comparator.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::cli {

/// Computes a run in fp64, token by token and expert by expert, from the run's values. Only the
/// routes come from the ranks.
class RunReference {
 public:
  RunReference(const RunJob& job, const RunValues& values, const reference::InputNoise& noise = {});

  struct Token {
    std::vector<double> chosen_weights;  // [K] for the experts that the reference chooses
    std::vector<double> weights;         // [K] for the given experts
    std::vector<double> out;             // [D]
    std::vector<double> grad_x;          // [D], with backward
  };

  /// Results for the token with this global index and the experts `ids` [K].
  Token token(int64_t index, const std::vector<int64_t>& ids) const;

  /// A route to an expert.
  struct Route {
    int64_t token = 0;  // global index
    double weight = 0;
  };

  /// A range of an expert's inner positions, whose parameters' gradients are computed.
  struct Slice {
    int64_t first = 0;
    int64_t count = 0;
  };
  reference::MlpWeights gradients(int64_t expert, const std::vector<Route>& routes,
                                  const Slice& slice) const;

  /// The same slice of a whole expert's gradients.
  reference::MlpWeights cut(const reference::MlpWeights& whole, const Slice& slice) const;

 private:
  struct MlpSources {
    Source w1, w2, b1, b2;
  };
  reference::MlpWeights mlp(const MlpSources& sources, int64_t index, int64_t inner) const;
  reference::MlpConfig mlp_config(int64_t inner) const;
  std::vector<double> row(Source source, int64_t index, int64_t width, DType dtype) const;
  std::vector<double> matrix(Source source, int64_t height, int64_t width, DType dtype) const;
  std::vector<double> token_row(Source source, int64_t index) const;

  const RunJob& job_;
  const RunValues& values_;
  reference::InputNoise noise_;
  std::vector<double> gate_;         // [E, D]
  std::vector<double> gate_bias_;    // [E], or empty
  std::vector<double> expert_bias_;  // [E], or empty
};

}  // namespace crossdock::cli
