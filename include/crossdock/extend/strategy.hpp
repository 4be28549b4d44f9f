#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy_model.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

class Path;          // internal
struct PathContext;  // internal

/// Context of a strategy's call: the group, the plan and the agreement that the call belongs to.
struct StrategyCall {
  Group& group;
  const Plan& plan;
  uint64_t sequence;      // of the agreement
  const char* operation;  // for messages and records
};

/// One part of every row, moved as bits; scatter gets a span of them. fp8 rows have two parts,
/// values and scales; all others have one.
struct RowPart {
  const std::byte* tokens = nullptr;  // [T, row_bytes]
  std::byte* rows = nullptr;          // [R, row_bytes]
  int64_t row_bytes = 0;
};

/// out[t] = round(acc), acc from +0 by fma(weight[t, k], rows[row of (t, k)], acc), k ascending.
struct GatherSumArgs {
  ConstTensorView rows{};     // [R, D]; fp64, fp32, bf16 or fp16
  ConstTensorView weights{};  // [T, K]; not given: all 1
  TensorView out{};           // [T, D], dtype of rows
};

/// A contiguous range of each rank's local experts, and their rows. Identical on every rank; may be
/// empty for some.
struct ExpertChunk {
  std::vector<int64_t> first_expert, last_expert;  // [P] local experts [first, last)
  std::vector<int64_t> first_row, last_row;        // [P] their rows, pad rows included

  bool holds(int rank, int64_t row) const {
    const auto r = static_cast<size_t>(rank);
    return row >= first_row[r] && row < last_row[r];
  }
};

/// How rows travel. All strategies give the same bits. Dispatcher calls a strategy after all ranks
/// have agreed, so inputs are valid. Calls that take a StrategyCall are collective, except
/// allocate_rows: every rank makes them, even without tokens or rows. A strategy keeps no state
/// between calls except in a plan.
class CROSSDOCK_API Strategy {
 public:
  virtual ~Strategy() = default;

  virtual std::string_view name() const = 0;

  /// (optional) The path for tensors on a GPU. Only the library can make a Path; other code can
  /// only return the path of another strategy, and must then forward prepare to that strategy as
  /// well. Default: throws Error(kUnsupported).
  virtual std::unique_ptr<Path> make_device_path(const PathContext& context, Device device) const;

  /// (optional) Exchanges what this strategy needs beyond the counts. The plan keeps the result,
  /// see Plan::strategy_state. `exchange.plan` has its data and no state yet.
  virtual std::shared_ptr<const void> prepare(const StrategyCall& /*call*/) { return nullptr; }

  /// rows[final row of (t, k)] = tokens[t] for every kept route, bits unchanged. Pad rows are
  /// zeroed by the caller.
  virtual void scatter(const StrategyCall& call, std::span<const RowPart> parts) = 0;

  /// (optional) As scatter, chunk by chunk: calls arrived(i) as soon as all rows of chunks[i] are
  /// in place on this rank, for every i, ascending. Rows of a chunk that has arrived are not
  /// touched again. The chunks together hold all rows. Default: scatter, then all arrived.
  virtual void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                              std::span<const ExpertChunk> chunks,
                              const std::function<void(size_t)>& arrived);

  /// Fetches the rows of each token and sums them at the source in slot order (exact mode).
  virtual void gather_sum(const StrategyCall& call, const GatherSumArgs& args) = 0;

  /// As gather_sum, but a token's rows on one rank, or on one node, are summed in slot order and
  /// rounded to partial_dtype(config.partial_sums, dtype of rows) before they are sent; the source
  /// adds these sums in ascending order of the ranks or nodes. Sums that are not sent are rounded
  /// too, so the result depends only on the routes and the mesh.
  virtual void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) = 0;

  /// (optional) One element per route: rows[final row of (t, k)] = routes[t, k].
  virtual void scatter_routes(const StrategyCall& call, ConstTensorView routes, TensorView rows);

  /// (optional) One element per route: routes[t, k] = rows[final row of (t, k)]; other slots are
  /// unchanged.
  virtual void gather_routes(const StrategyCall& call, ConstTensorView rows, TensorView routes);

  /// (optional) Allocates rows of this plan that scatter writes and gather_sum reads without a
  /// copy. Not collective. Default: memory from the group's pool.
  virtual OwnedTensor allocate_rows(const StrategyCall& call, DType dtype, Shape shape);

  /// (optional) What this strategy sends and holds, for "auto" and the planner. Lives at least as
  /// long as the strategy. Default: packs rows per destination and exchanges them, as alltoall.
  virtual const StrategyModel& model() const;
};

}  // namespace crossdock
