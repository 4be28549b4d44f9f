#pragma once

#include <optional>

#include "crossdock/crossdock.h"
#include "crossdock/crossdock.hpp"

namespace crossdock::capi {

// Convert the caller's configurations to the C++ API's. If a field has an undefined value, it gets
// its default and `refusal` says why, unless it is already set: a rank that threw would leave the
// others waiting in the first collective call. Consistency is checked where the values are used.

DispatchConfig to_config(const crossdock_dispatch_config& given, int64_t num_experts,
                         std::optional<Error>& refusal);
ExpertsConfig to_config(const crossdock_experts_config& given, std::optional<Error>& refusal);
RouterConfig to_config(const crossdock_router_config& given, std::optional<Error>& refusal);

/// For the first collective call.
inline void throw_if_set(const std::optional<Error>& refusal) {
  if (refusal) throw *refusal;
}

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
