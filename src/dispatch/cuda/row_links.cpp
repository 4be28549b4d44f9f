#include "dispatch/cuda/row_links.hpp"

#include <algorithm>

#include "crossdock/extend/strategy.hpp"
#include "dispatch/cuda/kernels/link_rows.hpp"
#include "dispatch/cuda/kernels/partial_sums.hpp"

namespace crossdock::cuda {
namespace {

// The number of this rank's rows, on the device.
const int64_t* rows_in_use(const CudaPlan& plan) {
  return plan.arrays().rows_per_rank + plan.inputs().rank;
}

}  // namespace

ReadyLinks ready_links(GpuCall& call, const CudaPlan& plan) {
  ReadyLinks links;
  links.memory = plan.take_links(call.rank().pool(), plan.capacity_rows());
  const int64_t num_bytes = links.memory->num_rows * static_cast<int64_t>(sizeof(RowLink));
  links.shown = call.show(links.memory->rows, num_bytes, /*with_contents=*/false);
  return links;
}

void queue_links(const GpuCall& call, const CudaPlan& plan, const ReadyLinks& links) {
  plan.set_links(links.memory);
  LinkRowsArgs args{};
  args.targets = plan.arrays().targets;
  args.weights = plan.arrays().weights;
  args.T = plan.inputs().T;
  args.K = plan.shape().K;
  args.links = *links.memory;
  args.signals = call.signals();
  call.reach(0, args.rows);
  call.zero_pads(plan, reinterpret_cast<std::byte*>(args.links.rows), sizeof(RowLink));
  launch_link_rows(args, call.stream());
}

void queue_fan_out(const GpuCall& call, const CudaPlan& plan, std::span<const FanOutPart> parts,
                   const TensorView& row_weights) {
  FanOutArgs args{};
  args.links = *plan.links();
  args.rows_in_use = rows_in_use(plan);
  args.num_parts = static_cast<int32_t>(parts.size());
  std::ranges::copy(parts, args.parts);
  args.row_weights = static_cast<float*>(row_weights.data);
  args.signals = call.signals().state;
  launch_fan_out(args, call.max_sms(), call.stream());
}

void queue_partial_sums(const GpuCall& call, const CudaPlan& plan, const GatherSumArgs& args,
                        const TensorView& partials) {
  launch_partial_sums({.links = *plan.links(),
                       .rows_in_use = rows_in_use(plan),
                       .is_weighted = args.weights.given(),
                       .D = static_cast<int32_t>(args.rows.shape[1]),
                       .dtype = args.rows.dtype,
                       .partial_dtype = partials.dtype,
                       .rows = static_cast<const std::byte*>(args.rows.data),
                       .partials = static_cast<std::byte*>(partials.data),
                       .signals = call.signals().state},
                      call.max_sms(), call.stream());
}

}  // namespace crossdock::cuda
