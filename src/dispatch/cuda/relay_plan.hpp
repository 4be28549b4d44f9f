#pragma once

#include <cstdint>

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"

namespace crossdock::cuda {

/// What `direct` and `hierarchical` need of a plan between nodes: one copy of a token travels to
/// each of its gateways, which store it into the final rows on their node; rows of other nodes come
/// home one by one. Index arrays are on the device, sizes on the host.
class RelayPlan {
 public:
  /// `plan` was made on the host by one of the two strategies. Collective; waits for the device.
  RelayPlan(CudaRank& rank, const Plan& plan);

  const RowTraffic& copies() const { return copies_; }      // tokens to gateways
  const RowTraffic& far_home() const { return far_home_; }  // rows to sources on other nodes

  // Device arrays.
  const int64_t* copy_tokens() const { return copy_tokens_; }        // [copies sent] t
  const RouteTarget* near_targets() const { return near_targets_; }  // [T, K] on this node
  const RouteTarget* copy_targets() const { return copy_targets_; }  // [copies received, K]
  const int64_t* far_rows() const { return far_rows_; }              // [rows sent home] row here
  const RouteTarget* sum_targets() const { return sum_targets_; }    // [T, K]; rank P: came home
  int64_t num_copies_received() const { return copies_.num_received; }

 private:
  RowTraffic copies_;
  RowTraffic far_home_;
  Buffer memory_;
  const int64_t* copy_tokens_ = nullptr;
  const RouteTarget* near_targets_ = nullptr;
  const RouteTarget* copy_targets_ = nullptr;
  const int64_t* far_rows_ = nullptr;
  const RouteTarget* sum_targets_ = nullptr;
};

}  // namespace crossdock::cuda
