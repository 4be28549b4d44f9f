#include "testing/conformance/placed_dispatcher.hpp"

#include <cstring>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "core/tensor_memory.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock::conformance {
namespace {

/// Says where dispatchers keep their tensors.
class OnDevice final : public ForwardingStrategy {
 public:
  OnDevice(std::unique_ptr<Strategy> inner, MakePlace make_place)
      : ForwardingStrategy(std::move(inner)), make_place_(std::move(make_place)) {}

  const MakePlace& make_place() const { return make_place_; }

 private:
  MakePlace make_place_;
};

std::vector<int64_t> copy_of(const TensorPlace& place, const int64_t* from, int64_t count) {
  const OwnedTensor host = place.to_host(ConstTensorView(from, {count}, place.device));
  const std::span<const int64_t> values = host.view.as<int64_t>();
  return {values.begin(), values.end()};
}

/// A plan on a device as the host sees it: copies of its arrays.
class CopiedPlan final : public DevicePlanData {
 public:
  CopiedPlan(Plan there, const TensorPlace& place) : there_(std::move(there)) {
    const Segments segments = there_.segments();
    const ConstTensorView weights = there_.weights();
    starts_ = copy_of(place, segments.starts, segments.num_segments + 1);
    counts_ = copy_of(place, segments.counts, segments.num_segments);
    weights_ = place.to_host(weights);
    dropped_.assign(there_.dropped().begin(), there_.dropped().end());
  }

  const Plan& there() const { return there_; }

  Device device() const override { return {}; }
  int64_t num_rows() const override { return starts_.back(); }
  int64_t capacity_rows() const override { return starts_.back(); }
  Segments segments() const override {
    return {.starts = starts_.data(),
            .counts = counts_.data(),
            .num_segments = std::ssize(counts_),
            .device = {}};
  }
  ConstTensorView weights() const override { return weights_.view; }
  std::span<const int64_t> dropped() const override { return dropped_; }

 private:
  Plan there_;
  std::vector<int64_t> starts_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> dropped_;
  OwnedTensor weights_;
};

const CopiedPlan* copied_plan(const Plan& plan) {
  return dynamic_cast<const CopiedPlan*>(plan.device_data().get());
}

// REQUIRES: is_copied.
const Plan& device_plan(const Plan& plan) {
  return copied_plan(plan)->there();
}

Shape with_rows(const Shape& shape, int64_t num_rows) {
  return shape.rank() > 1 ? Shape{num_rows, shape[1]} : Shape{num_rows};
}

}  // namespace

std::unique_ptr<Strategy> on_device(std::unique_ptr<Strategy> strategy, MakePlace make_place) {
  return std::make_unique<OnDevice>(std::move(strategy), std::move(make_place));
}

PlacedDispatcher::PlacedDispatcher(Group& group, DispatchConfig config,
                                   std::unique_ptr<Strategy> strategy)
    : dispatcher_(group, std::move(config), std::move(strategy)) {
  find_place();
}

PlacedDispatcher::PlacedDispatcher(Group& group, DispatchConfig config,
                                   std::string_view strategy_name, const StrategyList& candidates)
    : dispatcher_(group, std::move(config), strategy_name, candidates) {
  find_place();
}

void PlacedDispatcher::find_place() {
  const OnDevice* there = nullptr;
  try {
    there = dynamic_cast<const OnDevice*>(&strategy());
  } catch (const Error&) {  // an unknown name, which the first plan reports
  }
  if (there == nullptr) return;
  place_ = there->make_place()(group());
  // Results are needed in host memory: the hosts meet in every call.
  dispatcher_.set_device_options({.stream = place_.stream, .run_ahead = false});
}

bool PlacedDispatcher::is_copied(const Plan& plan) {
  return copied_plan(plan) != nullptr;
}

// Copies tensors of a call. A failure fails the group: the other ranks are in the call already.
template <typename Copies>
void PlacedDispatcher::copy(const Copies& copies) {
  group().check();  // after a failed call a copy could wait forever
  try {
    copies();
  } catch (const std::exception& error) {
    group().fail(Error(ErrorCode::kInternal, error.what()));
    throw;
  }
}

// Passes invalid tensors on unchanged: the dispatcher reports what is wrong.
OwnedTensor PlacedDispatcher::upload(const ConstTensorView& tensor) const {
  if (!tensor.given()) return {};
  if (tensor.data != nullptr) return place_.to_device(tensor);
  return {.view = TensorView(nullptr, tensor.dtype, tensor.shape, place_.device), .owner = nullptr};
}

// Row tensors on the device have capacity_rows rows.
OwnedTensor PlacedDispatcher::upload_rows(const Plan& plan, const ConstTensorView& rows) const {
  const int64_t capacity = device_plan(plan).capacity_rows();
  if (!rows.given() || rows.num_rows() != plan.num_rows() || rows.num_rows() == capacity) {
    return upload(rows);
  }
  const OwnedTensor all = new_host_tensor(rows.dtype, with_rows(rows.shape, capacity));
  if (rows.num_bytes() > 0) {
    std::memcpy(all.view.data, rows.data, static_cast<size_t>(rows.num_bytes()));
  }
  return upload(all.view);
}

OwnedTensor PlacedDispatcher::download(const ConstTensorView& tensor, int64_t num_rows,
                                       const TensorView& given) const {
  OwnedTensor copy = place_.to_host(
      ConstTensorView(tensor.data, tensor.dtype, with_rows(tensor.shape, num_rows), tensor.device));
  if (!given.given()) return copy;
  if (given.num_bytes() > 0) {
    std::memcpy(given.data, copy.view.data, static_cast<size_t>(given.num_bytes()));
  }
  return {.view = given, .owner = nullptr};
}

template <typename AnyRouting>
Plan PlacedDispatcher::plan_there(const ConstTensorView& routes, const AnyRouting& routing) {
  if (!place_.to_device || routing.weights.dtype == DType::kF64) return dispatcher_.plan(routing);
  OwnedTensor routes_there;
  OwnedTensor weights;
  OwnedTensor mask;
  copy([&] {
    routes_there = upload(routes);
    weights = upload(routing.weights);
    mask = upload(routing.mask);
  });
  const Plan made = dispatcher_.plan(AnyRouting{routes_there.view, weights.view, mask.view});
  std::shared_ptr<const CopiedPlan> copied;
  copy([&] { copied = std::make_shared<const CopiedPlan>(made, place_); });
  dispatcher_.check();  // the device is done: a refused routing is known on all ranks
  return made.with_device_data(std::move(copied));
}

Plan PlacedDispatcher::plan(const Routing& routing) {
  return plan_there(routing.expert_ids, routing);
}

Plan PlacedDispatcher::plan(const DenseRouting& routing) {
  return plan_there(routing.map, routing);
}

DispatchResult PlacedDispatcher::dispatch(const Plan& plan, const DispatchArgs& args) {
  if (!is_copied(plan)) return dispatcher_.dispatch(plan, args);
  OwnedTensor x;
  OwnedTensor scales;
  OwnedTensor rows;
  OwnedTensor row_scales;
  OwnedTensor row_weights;
  copy([&] {
    x = upload(args.x);
    scales = upload(args.scales);
    rows = upload_rows(plan, args.rows);
    row_scales = upload_rows(plan, args.row_scales);
    row_weights = upload_rows(plan, args.row_weights);
  });
  DispatchResult result;
  const auto copy_back = [&](const DispatchResult& moved) {
    const int64_t R = plan.num_rows();
    result.rows = download(moved.rows.view, R, args.rows);
    if (args.scales.given()) {
      result.row_scales = download(moved.row_scales.view, R, args.row_scales);
    }
    if (args.with_row_weights) {
      result.row_weights = download(moved.row_weights.view, R, args.row_weights);
    }
  };
  DispatchArgs there{.x = x.view,
                     .scales = scales.view,
                     .rows = rows.view,
                     .row_scales = row_scales.view,
                     .row_weights = row_weights.view,
                     .with_row_weights = args.with_row_weights,
                     .num_chunks = args.num_chunks};
  if (args.on_chunk) {  // called once, with all rows
    there.on_chunk = [&](const DispatchResult& moved, const DispatchChunk& chunk) {
      copy_back(moved);
      args.on_chunk(result, chunk);
    };
  }
  const DispatchResult moved = dispatcher_.dispatch(device_plan(plan), there);
  if (!args.on_chunk) copy([&] { copy_back(moved); });
  return result;
}

// call(plan, rows, out) on the device; out has a row per token.
template <typename Call>
OwnedTensor PlacedDispatcher::sum_there(const Plan& plan, const ConstTensorView& rows,
                                        const TensorView& out, const Call& call) {
  if (!is_copied(plan)) return call(plan, rows, out);
  OwnedTensor rows_there;
  OwnedTensor out_there;
  copy([&] {
    rows_there = upload_rows(plan, rows);
    out_there = upload(out);
  });
  const OwnedTensor sum = call(device_plan(plan), rows_there.view, out_there.view);
  OwnedTensor result;
  copy([&] { result = download(sum.view, plan.num_tokens(), out); });
  return result;
}

OwnedTensor PlacedDispatcher::combine(const Plan& plan, ConstTensorView y, TensorView out) {
  return sum_there(plan, y, out, [&](const Plan& there, ConstTensorView rows, TensorView sums) {
    return dispatcher_.combine(there, rows, sums);
  });
}

OwnedTensor PlacedDispatcher::combine_unweighted(const Plan& plan, ConstTensorView y,
                                                 TensorView out) {
  return sum_there(plan, y, out, [&](const Plan& there, ConstTensorView rows, TensorView sums) {
    return dispatcher_.combine_unweighted(there, rows, sums);
  });
}

OwnedTensor PlacedDispatcher::dispatch_backward(const Plan& plan, ConstTensorView grad_rows,
                                                TensorView grad_x) {
  return sum_there(plan, grad_rows, grad_x,
                   [&](const Plan& there, ConstTensorView rows, TensorView sums) {
                     return dispatcher_.dispatch_backward(there, rows, sums);
                   });
}

CombineBackwardResult PlacedDispatcher::combine_backward(const Plan& plan,
                                                         const CombineBackwardArgs& args) {
  if (!is_copied(plan)) return dispatcher_.combine_backward(plan, args);
  OwnedTensor grad_out;
  OwnedTensor y;
  OwnedTensor grad_rows;
  OwnedTensor grad_weights;
  copy([&] {
    grad_out = upload(args.grad_out);
    y = upload_rows(plan, args.y);
    grad_rows = upload_rows(plan, args.grad_rows);
    grad_weights = upload(args.grad_weights);
  });
  const CombineBackwardResult moved =
      dispatcher_.combine_backward(device_plan(plan), {.grad_out = grad_out.view,
                                                       .y = y.view,
                                                       .grad_rows = grad_rows.view,
                                                       .grad_weights = grad_weights.view});
  CombineBackwardResult result;
  copy([&] {
    result.grad_rows = download(moved.grad_rows.view, plan.num_rows(), args.grad_rows);
    result.grad_weights = download(moved.grad_weights.view, plan.num_tokens(), args.grad_weights);
  });
  return result;
}

OwnedTensor PlacedDispatcher::collect_routes(const Plan& plan, ConstTensorView rows,
                                             TensorView routes) {
  return sum_there(plan, rows, routes,
                   [&](const Plan& there, ConstTensorView values, TensorView collected) {
                     return dispatcher_.collect_routes(there, values, collected);
                   });
}

OwnedTensor PlacedDispatcher::allocate_rows(const Plan& plan, DType dtype) {
  if (!is_copied(plan)) return dispatcher_.allocate_rows(plan, dtype);
  return new_host_tensor(dtype, {plan.num_rows(), config().width});
}

}  // namespace crossdock::conformance
