#include "crossdock/plan.hpp"

#include <utility>

#include "core/text.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock {

PartialSums parse_partial_sums(std::string_view name) {
  return static_cast<PartialSums>(index_of_name("partial_sums", name, kPartialSumsNames));
}

Copies parse_copies(std::string_view name) {
  return static_cast<Copies>(index_of_name("copies", name, kCopiesNames));
}

Plan::Plan(std::shared_ptr<const PlanData> data, std::shared_ptr<const void> strategy_state,
           std::shared_ptr<const DevicePlanData> device_data)
    : data_(std::move(data)),
      strategy_state_(std::move(strategy_state)),
      device_data_(std::move(device_data)) {}

uint64_t Plan::id() const {
  return data_->id;
}

Device Plan::device() const {
  return device_data_ ? device_data_->device() : Device{};
}

int64_t Plan::num_tokens() const {
  return data_->T;
}

int64_t Plan::num_rows() const {
  return device_data_ ? device_data_->num_rows() : data_->num_rows();
}

int64_t Plan::capacity_rows() const {
  return device_data_ ? device_data_->capacity_rows() : data_->num_rows();
}

int64_t Plan::num_local_experts() const {
  return data_->num_local_experts();
}

Segments Plan::segments() const& {
  if (device_data_) return device_data_->segments();
  return {.starts = data_->local_starts.data(),
          .counts = data_->local_counts.data(),
          .num_segments = data_->num_local_experts(),
          .device = {}};
}

std::span<const int64_t> Plan::dropped() const& {
  return device_data_ ? device_data_->dropped() : std::span<const int64_t>(data_->dropped);
}

ConstTensorView Plan::weights() const& {
  if (device_data_) return device_data_->weights();
  return {data_->weights.data(), data_->weight_dtype, {data_->T, data_->K}};
}

Plan Plan::with_device_data(std::shared_ptr<const DevicePlanData> device_data) const {
  return {data_, strategy_state_, std::move(device_data)};
}

}  // namespace crossdock
