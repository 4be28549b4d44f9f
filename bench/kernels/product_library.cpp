// Grouped products for bench/compare_grouped.py, which loads this as a shared object.

#include <exception>
#include <string>

#include "ops/cuda/grouped_product.hpp"

namespace {

using namespace crossdock;  // NOLINT: a file that only converts

thread_local std::string last_error;

}  // namespace

extern "C" {

/// All tensors are bf16 on one GPU, except a dW with an fp32 output.
struct ProductCall {
  void* a;       // forward: x [R, K]; dX, dW: grad [R, N]
  void* b;       // forward, dX: w [E, N, K]; dW: x [R, K]
  void* out;     // as in ProductForwardArgs, ProductDxArgs, ProductDwArgs
  void* hidden;  // SwiGLU: [R, N], or null
  const int64_t* starts;
  const int64_t* counts;
  int64_t R, E, N, K;
  void* stream;
};

#define EXPORTED __attribute__((visibility("default")))

EXPORTED const char* products_error() {
  return last_error.c_str();
}

EXPORTED void* products_create(int device) {
  try {
    return new ops::GroupedProducts({DeviceKind::kCuda, device});
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

EXPORTED void products_destroy(void* products) {
  delete static_cast<ops::GroupedProducts*>(products);
}

/// operation: forward, swiglu, dx, dw, dw_fp32 or dw_fp32_add. Returns 0, or 1 and
/// products_error().
EXPORTED int products_run(void* products, const char* operation, const ProductCall* call) {
  try {
    auto& all = *static_cast<ops::GroupedProducts*>(products);
    const Device gpu{DeviceKind::kCuda, 0};
    const std::string name = operation;
    const Segments segments{call->starts, call->counts, call->E, gpu};
    const Stream stream{call->stream};
    const auto rows = [&](void* data, int64_t width) {
      return TensorView(data, DType::kBF16, {call->R, width}, gpu);
    };
    const auto weights = [&](void* data, DType dtype) {
      return TensorView(data, dtype, {call->E, call->N, call->K}, gpu);
    };
    if (name == "forward" || name == "swiglu") {
      const bool is_gated = name == "swiglu";
      const bool keeps = is_gated && call->hidden != nullptr;
      all.forward({.x = rows(call->a, call->K),
                   .w = weights(call->b, DType::kBF16),
                   .segments = segments,
                   .out = rows(call->out, is_gated ? call->N / 2 : call->N),
                   .hidden = keeps ? rows(call->hidden, call->N) : TensorView(),
                   .epilogue = keeps      ? ops::ProductEpilogue::kSwigluKeepHidden
                               : is_gated ? ops::ProductEpilogue::kSwiglu
                                          : ops::ProductEpilogue::kNone},
                  stream);
    } else if (name == "dx") {
      all.dx({.grad = rows(call->a, call->N),
              .w = weights(call->b, DType::kBF16),
              .segments = segments,
              .out = rows(call->out, call->K)},
             stream);
    } else {
      all.dw({.grad = rows(call->a, call->N),
              .x = rows(call->b, call->K),
              .segments = segments,
              .out = weights(call->out, name == "dw" ? DType::kBF16 : DType::kF32),
              .accumulate = name == "dw_fp32_add"},
             stream);
    }
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // extern "C"
