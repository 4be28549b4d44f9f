#include "crossdock/plan.hpp"

namespace crossdock {

Segments Plan::segments() const {
  if (device_data_) return device_data_->segments();
  return {.starts = data_->local_starts.data(),
          .counts = data_->local_counts.data(),
          .num_segments = data_->num_local_experts(),
          .device = {}};
}

ConstTensorView Plan::weights() const {
  if (device_data_) return device_data_->weights();
  return {data_->weights.data(), data_->weight_dtype, {data_->T, data_->K}};
}

}  // namespace crossdock
