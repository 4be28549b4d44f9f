#include "crossdock/plan.hpp"

namespace crossdock {

Segments Plan::segments() const {
  return {.starts = data_->local_starts.data(),
          .counts = data_->local_counts.data(),
          .num_segments = data_->num_local_experts(),
          .device = {}};
}

ConstTensorView Plan::weights() const {
  return {data_->weights.data(), data_->weight_dtype, {data_->T, data_->K}};
}

}  // namespace crossdock
