#pragma once

#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::ops {

/// sum[i] = round(sum[i] + term[i]), added in fp32 (fp64 for fp64).
struct AddArgs {
  ConstTensorView term;  // same dtype and shape as sum
  TensorView sum;        // fp64, fp32, bf16 or fp16
};

void add(const AddArgs& args, ThreadPool& pool);

}  // namespace crossdock::ops
