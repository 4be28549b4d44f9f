#pragma once

#include <cstdint>
#include <vector>

#include "bench/scenario.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::bench {

/// Synthetic data of a scenario: tokens, routes and results of experts. Every value is a function
/// of its position, so each rank can compute what any other rank holds. Read-only, shared by the
/// ranks of a process.
class Workload {
 public:
  explicit Workload(const Scenario& scenario);

  const Scenario& scenario() const { return scenario_; }
  DispatchConfig dispatch_config() const;

  /// K distinct experts of every token, uniform, and their weights. [T, K]
  const std::vector<int32_t>& expert_ids(int rank) const { return expert_ids_[size_t(rank)]; }
  const std::vector<float>& weights(int rank) const { return weights_[size_t(rank)]; }

  /// The final row of every route, according to the reference.
  const reference::Layout& layout() const { return layout_; }

  /// One row of D values of the scenario's dtype.
  void token(int rank, int64_t t, void* row) const { fill(1, rank, t, 0, row); }
  void grad_out(int rank, int64_t t, void* row) const { fill(2, rank, t, 0, row); }
  /// The result of the expert in slot k.
  void expert_output(int rank, int64_t t, int64_t k, void* row) const { fill(3, rank, t, k, row); }

 private:
  void fill(uint32_t what, int rank, int64_t t, int64_t k, void* row) const;

  Scenario scenario_;
  std::vector<std::vector<int32_t>> expert_ids_;  // [P], each [T, K]
  std::vector<std::vector<float>> weights_;       // [P], each [T, K]
  reference::Layout layout_;
};

}  // namespace crossdock::bench
