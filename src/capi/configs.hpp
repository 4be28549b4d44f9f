#pragma once

#include "crossdock/crossdock.h"
#include "crossdock/crossdock.hpp"

namespace crossdock::capi {

// Convert the caller's configurations to the C++ API's. Throw Error(kInvalidArgument) if a field
// has an undefined value; consistency is checked where the values are used.

DispatchConfig to_config(const crossdock_dispatch_config& given, int64_t num_experts);
ExpertsConfig to_config(const crossdock_experts_config& given);
RouterConfig to_config(const crossdock_router_config& given);

ExpertWeights to_weights(const char* name, const crossdock_expert_weights& given);
ExpertGradients to_gradients(const char* name, const crossdock_expert_gradients& given);

PartialSums to_partial_sums(int32_t value);

/// `value`, or the default if it is 0.
template <typename Number>
Number or_default(Number value, Number if_zero) {
  return value == 0 ? if_zero : value;
}

/// An enumeration's field, checked to be one of `num_values` values, numbered from 0 as in C++.
int checked_enum(const char* name, int32_t value, int num_values);

}  // namespace crossdock::capi
