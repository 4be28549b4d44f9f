#pragma once

#include <string>

#include "trainer.hpp"

namespace train {

/// The largest difference between a training run and the run it should equal, relative to the
/// largest value of each tensor.
struct Difference {
  double first_loss = 0.0;  // of the first step
  double losses = 0.0;      // of any step, with the gradients' norm
  double gradients = 0.0;   // of the first step
  std::string worst_gradient;
};

Difference compare(const TrainResult& result, const TrainResult& wanted);

/// Whether sums in another order explain the difference. fp64: 1e-9 after one step, 1e-7 after
/// many, in which the router chooses freely. fp32: 1e-4.
bool is_small(const Difference& difference, crossdock::DType dtype);

/// "losses within 2.1e-15, gradients within 4.0e-14 (block0.w1)"
std::string describe(const Difference& difference);

}  // namespace train
