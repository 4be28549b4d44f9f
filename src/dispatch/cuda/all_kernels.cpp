#include "dispatch/cuda/all_kernels.hpp"

#include "comm/cuda/peer_channel.hpp"
#include "dispatch/cuda/kernels/fan_out.hpp"
#include "dispatch/cuda/kernels/gather_routes.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/gather_sum_backward.hpp"
#include "dispatch/cuda/kernels/link_rows.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/pad_rows.hpp"
#include "dispatch/cuda/kernels/partial_sums.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/cuda/kernels/scatter_chunk.hpp"
#include "dispatch/cuda/kernels/sum_groups.hpp"
#include "ops/cuda/device_rows.hpp"
#include "ops/fp8_rows.hpp"
#include "plan/cuda/device_plan.hpp"
#include "plan/cuda/route_slots.hpp"

namespace crossdock::cuda {

void load_all_kernels() {
  load_channel_kernels();
  load_plan();
  load_route_slots();
  load_scatter();
  load_scatter_chunk();
  load_gather_sum();
  load_gather_sum_backward();
  load_gather_routes();
  load_link_rows();
  load_fan_out();
  load_partial_sums();
  load_move_rows();
  load_pad_rows();
  load_sum_groups();
  ops::load_device_rows();
  ops::load_fp8_rows();
}

}  // namespace crossdock::cuda
