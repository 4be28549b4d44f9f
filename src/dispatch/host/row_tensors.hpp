#pragma once

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

// Rows of a dispatcher's calls in host memory.

namespace crossdock {

/// tokens [T, ...] and the rows [R, ...] they go to, as bits.
RowPart row_part(const ConstTensorView& tokens, const TensorView& rows);

/// Zeroes the rows that belong to no route.
void zero_pad_rows(const PlanData& plan, const TensorView& rows);

void zero(const TensorView& tensor);

}  // namespace crossdock
