#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

/// The reference for all results: plain loops in fp64 over all ranks at once, in one process and
/// without any exchange. Slow on purpose. Values are doubles for every dtype, as a double can hold
/// every value of the floating-point dtypes.
namespace crossdock::reference {

/// One array per rank. [P]
using PerRank = std::vector<std::vector<double>>;

/// Input of one rank.
struct RankInput {
  int64_t T = 0;
  std::vector<double> x = {};            // [T, D]
  std::vector<int64_t> expert_ids = {};  // [T, K]; -1: no route
  std::vector<double> weights = {};      // [T, K]; ignored in slots without a route
  std::vector<double> grad_out = {};     // [T, D]; empty: zeros
  std::vector<uint8_t> mask = {};  // [T]; 1: padding, the token has no routes; empty: no padding
};

/// The route that a row belongs to; all fields are -1 for a pad row.
struct RowSource {
  int rank = -1;
  int64_t token = -1;
  int64_t slot = -1;
  friend bool operator==(const RowSource&, const RowSource&) = default;
};

/// The final row of a route; -1 if the route is masked, absent or dropped.
struct RowPlace {
  int rank = -1;
  int64_t row = -1;
  bool is_kept() const { return rank >= 0; }
};

/// The rows of one rank as a receiver.
struct Receiver {
  std::vector<int64_t> experts;          // [E_local] ascending
  std::vector<int64_t> segment_starts;   // [E_local + 1] in rows
  std::vector<int64_t> rows_per_expert;  // [E_local] without pad rows
  std::vector<RowSource> sources;        // [R]
};

/// The final rows of all routes of all ranks, with the dispatch's order, alignment and capacity.
struct Layout {
  int64_t K = 0;
  std::vector<Receiver> receivers;            // [P]
  std::vector<std::vector<RowPlace>> places;  // [P], each [T, K]
  std::vector<std::vector<int64_t>> dropped;  // [P], each [E]

  int num_ranks() const { return static_cast<int>(places.size()); }
  int64_t num_tokens(int rank) const {
    return static_cast<int64_t>(places[static_cast<size_t>(rank)].size()) / K;
  }
  int64_t num_rows(int rank) const {
    return static_cast<int64_t>(receivers[static_cast<size_t>(rank)].sources.size());
  }
};

/// Maximum number of rows that an expert takes from one source rank: ceil((T * K / E) * factor).
CROSSDOCK_API int64_t capacity_of(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                  double factor);

/// [E] the rank of every expert: the placement, or contiguous and as even as possible.
CROSSDOCK_API std::vector<int32_t> owners_of(const DispatchConfig& config, int num_ranks);

/// The ranks' routes have K slots per token; 0: top_k. REQUIRES: a valid routing.
CROSSDOCK_API Layout lay_out(const DispatchConfig& config, const std::vector<RankInput>& ranks,
                             int64_t K = 0);

/// tokens [T, D] -> rows [R, D]; pad rows are zero.
CROSSDOCK_API PerRank dispatch(const Layout& layout, int64_t width, const PerRank& tokens);

/// routes [T, K] -> rows [R]; 0 in pad rows.
CROSSDOCK_API PerRank dispatch_routes(const Layout& layout, const PerRank& routes);

/// rows [R] -> routes [T, K]; 0 in slots without a kept route.
CROSSDOCK_API PerRank collect_routes(const Layout& layout, const PerRank& rows);

/// rows [R, D] -> [T, D], the sum of a token's rows, each times its weight. Without weights: all 1.
/// Also the backward of dispatch.
CROSSDOCK_API PerRank combine(const Layout& layout, int64_t width, const PerRank& rows,
                              const PerRank* weights = nullptr);

/// As combine, but bit-exact: acc starts at +0, acc = fma(weight, row, acc) for ascending slots, in
/// fp32 (fp64 for fp64 rows), then one rounding to the dtype.
CROSSDOCK_API PerRank combine_exact(const Layout& layout, int64_t width, DType dtype,
                                    const PerRank& rows, const PerRank* weights = nullptr);

/// Partial sums of the rows of a token.
struct PartialGroups {
  PartialSums sums = PartialSums::kF32;
  DType rows = DType::kF32;        // dtype of the rows and of the result
  std::vector<int> group_of_rank;  // [P] ranks with the same number make one sum together
};

/// As combine_exact with partial sums: the rows of a group are summed the same way and rounded to
/// partial_dtype(sums, rows); then acc, from +0, adds these sums, groups ascending, in fp32 (fp64
/// for fp64 rows), and is rounded once.
CROSSDOCK_API PerRank combine_partial(const Layout& layout, int64_t width,
                                      const PartialGroups& groups, const PerRank& rows,
                                      const PerRank* weights = nullptr);

struct CombineGradients {
  PerRank rows = {};     // [R, D] = weight * grad_out of the row's token; 0 in pad rows
  PerRank weights = {};  // [T, K] = <y row, grad_out>; 0 in slots without a kept route
};

/// Backward of combine.
CROSSDOCK_API CombineGradients combine_backward(const Layout& layout, int64_t width,
                                                const PerRank& grad_out, const PerRank& y,
                                                const PerRank& weights);

/// The value of the dtype nearest to `value`, ties to even; via fp32 for the small floats.
CROSSDOCK_API double round_to(DType dtype, double value);

/// The values, rounded to the dtype, as a host tensor. REQUIRES: exact values for integer dtypes.
CROSSDOCK_API OwnedTensor to_tensor(DType dtype, Shape shape, const std::vector<double>& values);

/// The inverse of to_tensor.
CROSSDOCK_API std::vector<double> to_values(ConstTensorView tensor);
inline std::vector<double> to_values(const OwnedTensor& tensor) {
  return to_values(ConstTensorView(tensor.view));
}

/// How two arrays of values differ. Any NaN equals any NaN; +0 and -0 differ.
struct Comparison {
  int64_t num_different = 0;  // entries whose bits differ
  int64_t first = -1;         // index of the first such entry; -1: none
  double max_error = 0.0;     // largest |got - wanted|; infinite if any is not finite
};

/// REQUIRES: arrays of equal size.
CROSSDOCK_API Comparison compare(const std::vector<double>& got, const std::vector<double>& wanted);

/// Sizes and activation of an expert's MLP.
struct MlpConfig {
  int64_t D = 0;
  int64_t F = 0;
  Activation activation = Activation::kSwiglu;
  bool interleaved = false;  // gated: rows of W1 are gate 0, linear 0, gate 1, ...
  double limit = 7.0;        // for clamped_swiglu
};

/// One expert's parameters, or their gradients.
struct MlpWeights {
  std::vector<double> w1 = {};  // [2F, D] (gate rows, then linear rows) or [F, D]
  std::vector<double> w2 = {};  // [D, F]
  std::vector<double> b1 = {};  // [2F] or [F]; empty: none
  std::vector<double> b2 = {};  // [D]; empty: none
};

/// The part of an expert, or of its gradients, that one of `etp` ranks holds: whole columns of F,
/// the first F mod etp ranks have one more; b2 is identical on all of them.
CROSSDOCK_API MlpWeights shard_of(const MlpConfig& config, const MlpWeights& expert, int64_t etp,
                                  int64_t index);

/// rows [R, D] -> y [R, D] = W2 (p act(W1 x + b1)) + p b2, with p the row's weight; all 1 if
/// row_weights is empty.
CROSSDOCK_API std::vector<double> mlp_forward(const MlpConfig& config, const MlpWeights& expert,
                                              const std::vector<double>& rows,
                                              const std::vector<double>& row_weights = {});

struct MlpGradients {
  std::vector<double> rows = {};         // [R, D]
  std::vector<double> row_weights = {};  // [R]
  MlpWeights expert = {};                // zeros for an expert without rows
};

CROSSDOCK_API MlpGradients mlp_backward(const MlpConfig& config, const MlpWeights& expert,
                                        const std::vector<double>& rows,
                                        const std::vector<double>& row_weights,
                                        const std::vector<double>& grad_y);

/// The nearest value of fp8 e4m3, ties to the even one; 448 for larger values.
CROSSDOCK_API double round_to_e4m3(double value);

/// Arguments of crossdock::quantise_rows.
struct Fp8Format {
  int64_t width = 0;  // D
  int64_t group = 128;
  Fp8Scale scale = Fp8Scale::kPow2;
  double amax_floor = 0.0;  // representable in fp32
};

struct Fp8Rows {
  std::vector<double> values;  // [T, D]
  std::vector<double> scales;  // [T, ceil(D/group)]
};

/// x [T, D] in fp8, by the formulas of crossdock::quantise_rows.
CROSSDOCK_API Fp8Rows quantise_rows(const std::vector<double>& x, const Fp8Format& format);

/// A whole layer after the router.
struct LayerInput {
  DispatchConfig config = {};
  std::vector<RankInput> ranks = {};  // [P]
  bool weights_in_experts = false;    // false: applied by combine
  MlpConfig mlp = {};
  std::vector<MlpWeights> experts = {};  // [E]; empty: every expert returns its row (times its
                                         // weight, if weights are applied in the experts)
};

struct LayerOutput {
  Layout layout;
  PerRank rows;                          // [R, D]
  PerRank y;                             // [R, D] results of the experts
  PerRank out;                           // [T, D]
  PerRank grad_y;                        // [R, D] gradients passed to the experts
  PerRank grad_x;                        // [T, D]
  PerRank grad_weights;                  // [T, K]
  std::vector<MlpWeights> expert_grads;  // [E], or empty
  std::vector<int64_t> dropped;          // [E] summed over ranks
};

CROSSDOCK_API LayerOutput run_layer(const LayerInput& input);

}  // namespace crossdock::reference
