#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "crossdock/extend/forwarding_strategy.hpp"

namespace crossdock::conformance {

/// A working strategy with hooks to inject faults.
struct Faults {
  using AfterScatter = std::function<void(const Exchange&, std::span<const RowPart>)>;
  using Sum = std::function<void(Strategy&, const Exchange&, const GatherSumArgs&)>;
  using AfterRoutes = std::function<void(const Exchange&, TensorView routes)>;

  std::function<void(Strategy&, const Exchange&, std::span<const RowPart>)> scatter{};  // instead
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

  void scatter(const Exchange& exchange, std::span<const RowPart> parts) override {
    if (faults_.scatter) {
      faults_.scatter(inner(), exchange, parts);
    } else {
      inner().scatter(exchange, parts);
    }
    if (faults_.after_scatter) faults_.after_scatter(exchange, parts);
  }

  void scatter_chunks(const Exchange& exchange, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    // Uses scatter, to include its faults, rather than the inner strategy's own chunks.
    // NOLINTNEXTLINE(bugprone-parent-virtual-call)
    Strategy::scatter_chunks(exchange, parts, chunks, arrived);
  }

  void gather_sum(const Exchange& exchange, const GatherSumArgs& args) override {
    if (faults_.sum) return faults_.sum(inner(), exchange, args);
    inner().gather_sum(exchange, args);
  }

  void gather_partial_sums(const Exchange& exchange, const GatherSumArgs& args) override {
    if (faults_.partial_sum) return faults_.partial_sum(inner(), exchange, args);
    inner().gather_partial_sums(exchange, args);
  }

  void scatter_routes(const Exchange& exchange, ConstTensorView routes, TensorView rows) override {
    inner().scatter_routes(exchange, routes, rows);
    if (faults_.after_scatter_routes) faults_.after_scatter_routes(exchange, rows);
  }

  void gather_routes(const Exchange& exchange, ConstTensorView rows, TensorView routes) override {
    inner().gather_routes(exchange, rows, routes);
    if (faults_.after_gather_routes) faults_.after_gather_routes(exchange, routes);
  }

 private:
  Faults faults_;
};

}  // namespace crossdock::conformance
