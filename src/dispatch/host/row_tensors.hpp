#pragma once

#include <cstddef>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

// Rows of a dispatcher's calls in host memory.

namespace crossdock {

/// tokens [T, ...] and the rows [R, ...] they go to, as bits.
RowPart row_part(const ConstTensorView& tokens, const TensorView& rows);

/// The weight of the route in a slot, t * K + k.
double weight_at(const PlanData& plan, size_t slot);

/// Zeroes the rows that belong to no route.
void zero_pad_rows(const PlanData& plan, const TensorView& rows);

void zero(const TensorView& tensor);

}  // namespace crossdock
