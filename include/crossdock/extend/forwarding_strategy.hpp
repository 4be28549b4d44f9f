#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Forwards every call to another strategy. Derive from it and override what differs, e.g. to
/// observe a strategy or to inject faults in a test. scatter_chunks is forwarded too: overriding
/// scatter alone changes only dispatches in one chunk. On a GPU, the inner strategy's path runs and
/// overrides of the members that move rows have no effect.
class CROSSDOCK_API ForwardingStrategy : public Strategy {
 public:
  explicit ForwardingStrategy(std::unique_ptr<Strategy> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  std::unique_ptr<Path> make_device_path(const PathContext& context, Device device) const override;
  std::shared_ptr<const void> prepare(const StrategyCall& call) override {
    return inner_->prepare(call);
  }
  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    inner_->scatter(call, parts);
  }
  void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    inner_->scatter_chunks(call, parts, chunks, arrived);
  }
  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    inner_->gather_sum(call, args);
  }
  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    inner_->gather_partial_sums(call, args);
  }
  void scatter_routes(const StrategyCall& call, ConstTensorView routes, TensorView rows) override {
    inner_->scatter_routes(call, routes, rows);
  }
  void gather_routes(const StrategyCall& call, ConstTensorView rows, TensorView routes) override {
    inner_->gather_routes(call, rows, routes);
  }
  OwnedTensor allocate_rows(const StrategyCall& call, DType dtype, Shape shape) override {
    return inner_->allocate_rows(call, dtype, shape);
  }
  const StrategyModel& model() const override { return inner_->model(); }

 protected:
  Strategy& inner() { return *inner_; }

 private:
  std::unique_ptr<Strategy> inner_;
};

}  // namespace crossdock
