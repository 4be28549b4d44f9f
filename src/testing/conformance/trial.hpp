#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "crossdock/testing/conformance.hpp"
#include "testing/conformance/placed_dispatcher.hpp"

namespace crossdock::conformance {

/// Takes one routing through a dispatcher and compares each step with the reference. Every step is
/// collective. Outputs are poisoned before the library fills them.
class Trial {
 public:
  /// Added to the seed for the values that `combine` sums.
  static constexpr uint64_t kCombineSeed = 4;

  /// Makes the plan. All arguments must outlive this object. `seed` chooses the values.
  Trial(PlacedDispatcher& dispatcher, const World& world, uint64_t seed, Findings& findings);

  /// Rows, row weights and, for fp8, scales: arbitrary bits arrive unchanged in their places.
  void dispatch();
  /// Rows of each chunk are in their place when it is announced.
  void dispatch_in_chunks();
  /// Weighted into the caller's memory, unweighted into the library's.
  void combine();
  /// Backward of combine and of dispatch, gradients of weights.
  void backward();
  /// <dispatch(x), y> = <x, combine_unweighted(y)>, summed over all ranks.
  void transpose();

  /// `out` of the weighted combine, as the library returned it. [T, D]
  const std::vector<double>& out() const { return out_; }

  /// Hash of the results so far whose bits are fixed: of sums, gradients of rows, routes and
  /// weights, but not of dot products and of partial sums that round.
  uint64_t bits() const { return bits_; }

 private:
  void check_plan();
  void dispatch_with_scales(DType scale_dtype, int64_t group_size);
  void expect_bits(const std::string& what, ConstTensorView got, const std::vector<double>& wanted);
  void expect_sums(const std::string& what, ConstTensorView got, const reference::PerRank& rows,
                   const reference::PerRank* weights = nullptr);
  std::vector<std::vector<double>> possible_sums(const reference::PerRank& rows,
                                                 const reference::PerRank* weights) const;
  void expect_rows(const std::string& what, ConstTensorView got, uint64_t seed);
  void expect_near_weights(ConstTensorView got, const std::vector<double>& wanted,
                           const reference::PerRank& grad_out, const reference::PerRank& y);
  void find(const std::string& message);
  /// The dtype of results and gradients: the tokens' dtype, or bf16 for fp8.
  DType sum_dtype() const;
  /// Of the plan's weights.
  DType weight_dtype() const;
  int64_t width() const { return world_.config.width; }

  PlacedDispatcher& dispatcher_;
  const World& world_;
  uint64_t seed_;
  Findings& findings_;
  int rank_;
  const reference::RankInput& input_;
  reference::Layout layout_;
  reference::PerRank weights_;
  Plan plan_;
  std::vector<double> out_;
  uint64_t bits_ = 0;
};

}  // namespace crossdock::conformance

namespace crossdock::testing {

/// Gives the routes of a dense world as many slots as the library's plan will have, with the
/// experts of a token ascending and empty slots last. Call after any change to routes, masks, top_k
/// or max_routes_per_token; other worlds are unchanged.
void fit_slots(conformance::World& world);

/// The largest number of rows that any rank receives.
int64_t most_rows(const conformance::World& world);

}  // namespace crossdock::testing
