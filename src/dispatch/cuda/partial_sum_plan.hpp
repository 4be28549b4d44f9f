#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/plan.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/kernels/sum_groups.hpp"
#include "dispatch/host/partial_sums.hpp"

namespace crossdock::cuda {

/// Sums for launch_sum_groups: sum n has the terms [offsets[n], offsets[n + 1]).
struct SumList {
  std::vector<SumTerm> terms;
  std::vector<int64_t> offsets{0};

  /// Ends the current sum.
  void end_sum() { offsets.push_back(std::ssize(terms)); }
};

/// How a plan's rows are summed with partial sums. Every rank makes the sums `sent`, one partial
/// row each, ordered by the rank that they go to. A source makes the sums `tokens` of the partial
/// rows that arrive there, in the order of the ranks they come from, and of rows that it reads in
/// place.
struct PartialSumLists {
  SumList sent;
  std::vector<int64_t> send_offsets;  // [P + 1] into the sums of `sent`
  std::vector<int64_t> recv_offsets;  // [P + 1] into the partial rows that arrive
  SumList tokens;                     // [T]
  int32_t arrived_source = 0;         // source of the arrived rows in `tokens`; -1: none arrive
};

/// The sums that a rank makes of its own rows, as RankSums lists them; `offsets` [sums + 1] into
/// RankSums::rows. REQUIRES: the weights are fp32.
SumList sums_at_experts(const RankSums& sums, std::vector<int64_t> offsets);

/// The lists on the GPU, and sizes on the host.
struct PartialSumPlan {
  struct List {
    const SumTerm* terms = nullptr;
    const int64_t* offsets = nullptr;  // [num_sums + 1]
    int64_t num_sums = 0;
  };

  RowTraffic traffic;  // partial rows to their sources
  Buffer memory;       // holds the lists
  List sent;
  List tokens;
  int32_t arrived_source = 0;
};

/// Collective; waits for the GPU.
PartialSumPlan make_partial_sum_plan(CudaRank& rank, const Plan& plan,
                                     const PartialSumLists& lists);

}  // namespace crossdock::cuda
