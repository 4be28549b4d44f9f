#pragma once

#include "crossdock/crossdock.h"
#include "crossdock/crossdock.hpp"

namespace crossdock::capi {

// Converts the caller's configurations to those of the C++ API. Throws Error(kInvalidArgument) if a
// field has no meaning; whether the values are consistent is checked where they are used.

DispatchConfig to_config(const crossdock_dispatch_config& given, int64_t num_experts);
ExpertsConfig to_config(const crossdock_experts_config& given);
RouterConfig to_config(const crossdock_router_config& given);

ExpertWeights to_weights(const char* name, const crossdock_expert_weights& given);
ExpertGradients to_gradients(const char* name, const crossdock_expert_gradients& given);

PartialSums to_partial_sums(int32_t value);

/// A number whose 0 means the default.
template <typename Number>
Number or_default(Number value, Number if_zero) {
  return value == 0 ? if_zero : value;
}

/// A field of an enumeration with `num_values` values, numbered from 0 as in C++.
int checked_enum(const char* name, int32_t value, int num_values);

}  // namespace crossdock::capi
