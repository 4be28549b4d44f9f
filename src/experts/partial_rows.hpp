#pragma once

#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// out = sums, rounded once: sums [T, D] in fp32, out in bf16 or fp16, in host memory or on one
/// GPU.
void round_sums(const ConstTensorView& sums, const TensorView& out, ThreadPool& pool,
                Stream stream = {});

}  // namespace crossdock
