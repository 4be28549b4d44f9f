#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "crossdock/extend/forwarding_strategy.hpp"

namespace crossdock::conformance {

/// A working strategy with hooks to inject faults.
struct Faults {
  using AfterScatter = std::function<void(const StrategyCall&, std::span<const RowPart>)>;
  using Sum = std::function<void(Strategy&, const StrategyCall&, const GatherSumArgs&)>;
  using AfterRoutes = std::function<void(const StrategyCall&, TensorView routes)>;

  std::function<void(Strategy&, const StrategyCall&, std::span<const RowPart>)>
      scatter{};  // instead
  AfterScatter after_scatter{};
  Sum sum{};  // instead of gather_sum
  Sum partial_sum{};
  AfterRoutes after_scatter_routes{};
  AfterRoutes after_gather_routes{};
};

class FaultyStrategy : public ForwardingStrategy {
 public:
  FaultyStrategy(std::unique_ptr<Strategy> inner, Faults faults)
      : ForwardingStrategy(std::move(inner)), faults_(std::move(faults)) {}

  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    if (faults_.scatter) {
      faults_.scatter(inner(), call, parts);
    } else {
      inner().scatter(call, parts);
    }
    if (faults_.after_scatter) faults_.after_scatter(call, parts);
  }

  void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    // Uses scatter, to include its faults, rather than the inner strategy's own chunks.
    // NOLINTNEXTLINE(bugprone-parent-virtual-call)
    Strategy::scatter_chunks(call, parts, chunks, arrived);
  }

  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    if (faults_.sum) return faults_.sum(inner(), call, args);
    inner().gather_sum(call, args);
  }

  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    if (faults_.partial_sum) return faults_.partial_sum(inner(), call, args);
    inner().gather_partial_sums(call, args);
  }

  void scatter_routes(const StrategyCall& call, ConstTensorView routes, TensorView rows) override {
    inner().scatter_routes(call, routes, rows);
    if (faults_.after_scatter_routes) faults_.after_scatter_routes(call, rows);
  }

  void gather_routes(const StrategyCall& call, ConstTensorView rows, TensorView routes) override {
    inner().gather_routes(call, rows, routes);
    if (faults_.after_gather_routes) faults_.after_gather_routes(call, routes);
  }

 private:
  Faults faults_;
};

}  // namespace crossdock::conformance
