#include "layer/device_gather.hpp"

#include "comm/agreed_failure.hpp"

namespace crossdock {
namespace {

DispatchConfig to_all_config(const Group& group, const GatheredRows& rows) {
  const int64_t P = group.size();
  return {.num_experts = P,
          .top_k = P,
          .width = rows.width,
          .max_rows = rows.max_rows,
          .max_routes_per_token = P};
}

}  // namespace

DeviceGather::DeviceGather(Group& group, const GatheredRows& rows, DeviceMemory& memory)
    : group_(group),
      config_(rows),
      memory_(memory),
      to_all_(group, to_all_config(group, rows), "direct") {}

void DeviceGather::set_device_options(const DeviceOptions& options) {
  stream_ = options.stream;
  to_all_.set_device_options(
      {.stream = options.stream, .max_sms = options.max_sms, .run_ahead = options.run_ahead});
}

// A plan made during a capture is filled only by replays of that graph, so calls outside the
// capture make their own. A graph needs every plan that it uses as long as it lives.
Plan DeviceGather::plan_to_all(int64_t num_rows, Device device) {
  const int64_t P = group_.size();
  Plan plan = plan_;
  OwnedTensor map;
  OwnedTensor weights;
  bool captured = false;
  run_agreed(group_, [&] {
    captured = is_captured(stream_, device);
    if (plan.valid()) return;
    map = memory_.take(DType::kBool, {num_rows, P}, stream_);
    weights = memory_.take(DType::kF32, {num_rows, P}, stream_);
    memory_.fill(map.view, 1, stream_);
    memory_.fill(weights.view, 0, stream_);
  });
  if (!plan.valid()) plan = to_all_.plan(DenseRouting{.map = map.view, .weights = weights.view});
  if (captured) {
    captured_plans_.push_back(plan);
  } else {
    plan_ = plan;
  }
  return plan;
}

OwnedTensor DeviceGather::gather(const ConstTensorView& rows) {
  const Plan plan = plan_to_all(rows.num_rows(), rows.device);
  return to_all_.dispatch(plan, {.x = rows}).rows;
}

}  // namespace crossdock
