#include <utility>

#include "crossdock/cuda.hpp"

namespace crossdock {
namespace {

/// The inner strategy, with a device for the dispatcher to work on. The inner one's own calls serve
/// what stays on the host.
class OnCuda final : public Strategy {
 public:
  OnCuda(std::unique_ptr<Strategy> inner, int device) : inner_(std::move(inner)), device_(device) {}

  std::string_view name() const override { return inner_->name(); }

  std::optional<Device> device_for_host_tensors() const override {
    return Device{.kind = DeviceKind::kCuda, .index = device_};
  }

  std::shared_ptr<const void> prepare(const Exchange& exchange) override {
    return inner_->prepare(exchange);
  }
  void scatter(const Exchange& exchange, std::span<const RowPart> parts) override {
    inner_->scatter(exchange, parts);
  }
  void gather_sum(const Exchange& exchange, const GatherSumArgs& args) override {
    inner_->gather_sum(exchange, args);
  }
  void gather_partial_sums(const Exchange& exchange, const GatherSumArgs& args) override {
    inner_->gather_partial_sums(exchange, args);
  }
  void scatter_routes(const Exchange& exchange, ConstTensorView routes, TensorView rows) override {
    inner_->scatter_routes(exchange, routes, rows);
  }
  void gather_routes(const Exchange& exchange, ConstTensorView rows, TensorView routes) override {
    inner_->gather_routes(exchange, rows, routes);
  }
  OwnedTensor allocate_rows(const Exchange& exchange, DType dtype, Shape shape) override {
    return inner_->allocate_rows(exchange, dtype, shape);
  }

 private:
  std::unique_ptr<Strategy> inner_;
  int device_;
};

}  // namespace

std::unique_ptr<Strategy> on_cuda(std::unique_ptr<Strategy> strategy, int device) {
  return std::make_unique<OnCuda>(std::move(strategy), device);
}

}  // namespace crossdock
