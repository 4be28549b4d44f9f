#include "dispatch/host/row_tensors.hpp"

#include <cstring>

#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {

RowPart row_part(const ConstTensorView& tokens, const TensorView& rows) {
  return {.tokens = static_cast<const std::byte*>(tokens.data),
          .rows = static_cast<std::byte*>(rows.data),
          .row_bytes = rows.row_bytes()};
}

double weight_at(const PlanData& plan, size_t slot) {
  return plan.weight_dtype == DType::kF64 ? pointer<double>(plan.weights)[slot]
                                          : static_cast<double>(pointer<float>(plan.weights)[slot]);
}

void zero_pad_rows(const PlanData& plan, const TensorView& rows) {
  for (const RowRange& pad : pad_rows(plan)) {
    std::memset(static_cast<std::byte*>(rows.data) + pad.first * rows.row_bytes(), 0,
                static_cast<size_t>(pad.count * rows.row_bytes()));
  }
}

void zero(const TensorView& tensor) {
  if (tensor.num_bytes() > 0) {
    std::memset(tensor.data, 0, static_cast<size_t>(tensor.num_bytes()));
  }
}

}  // namespace crossdock
