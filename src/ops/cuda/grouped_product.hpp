#pragma once

#include <cstdint>
#include <memory>

#include "crossdock/tensor.hpp"

// Products of ragged rows with the weights of their experts, on a GPU: rows are [R, width], grouped
// by expert; w is [E_local, N, K]. Weights and rows have one dtype: bf16, fp16 or fp32.
//
// Only rows of segments count: pad rows, and rows from segments.starts[E_local] up to R, may hold
// anything. R is a capacity; the true number of rows is read on the device.
//
// Sums are in fp32, in ascending order of the inner dimension, never split: the bits of a row
// depend on that row and its expert alone, those of a weight gradient on the rows of its expert and
// their order.

namespace crossdock::ops {

/// Applied to a forward product before it is stored. A gated activation reads the product after its
/// rounding, so its result does not depend on whether the product is kept.
enum class ProductEpilogue : uint8_t {
  kNone,
  kSwiglu,           // out = silu(gate) * linear
  kSwigluKeepHidden  // the same, and the product goes to `hidden`
};

/// out[r, :] = w[e] x[r, :] + bias[e] for the rows r of expert e.
struct ProductForwardArgs {
  ConstTensorView x = {};     // [R, K]
  ConstTensorView w = {};     // [E_local, N, K]
  ConstTensorView bias = {};  // [E_local, N], optional
  Segments segments = {};     // on the device
  TensorView out = {};        // [R, N], or [R, N / 2] with SwiGLU; without SwiGLU may be fp32
  TensorView hidden = {};     // [R, N] with kSwigluKeepHidden
  ProductEpilogue epilogue = ProductEpilogue::kNone;
  bool interleaved = false;  // SwiGLU: rows of w[e] are gate 0, linear 0, gate 1, ...; else N / 2
                             // gates, then N / 2 linear rows. `hidden` has the same order.
  bool zero_unused_rows = true;  // rows of `out` that belong to no expert become 0; else untouched
  int free_sms = 0;              // SMs left to kernels of other streams
};

/// out[r, :] = w[e]^T grad[r, :]
struct ProductDxArgs {
  ConstTensorView grad = {};  // [R, N]
  ConstTensorView w = {};     // [E_local, N, K]
  Segments segments = {};
  TensorView out = {};           // [R, K]; may be fp32
  bool zero_unused_rows = true;  // as in ProductForwardArgs
  int free_sms = 0;              // as in ProductForwardArgs
};

/// out[e] = sum over the rows r of expert e of grad[r, :] x[r, :]^T. Experts without rows: 0, or
/// untouched with `accumulate`.
struct ProductDwArgs {
  ConstTensorView grad = {};  // [R, N]
  ConstTensorView x = {};     // [R, K]
  Segments segments = {};
  TensorView out = {};      // [E_local, N, K]; may be fp32
  bool accumulate = false;  // adds to `out`, which must be fp32
  int free_sms = 0;         // as in ProductForwardArgs
};

enum class ProductKernels : uint8_t {
  kFastest,
  kPlain  // kernels that run on every GPU from sm_80 on
};

/// Computes the products of one Experts object on one GPU. On sm_90a, bf16 and fp16 products whose
/// widths are multiples of 8 (16 with SwiGLU) and whose tensors are 16-byte aligned use specialized
/// kernels; all others use plain kernels. The two may differ in bits.
///
/// A call uses the object's SMs minus `free_sms`, at least one. The bits do not depend on their
/// number.
///
/// Calls queue work and never wait for it. They can be captured: a call outside a capture first
/// allocates what its stream needs, a captured call what its graph needs: a few KiB each, never
/// freed. Replays of one graph must not overlap. A stream must not be destroyed while its products
/// run. Thread-safe. Invalid arguments throw Error(kInvalidArgument), dtypes without products (fp8)
/// and builds without CUDA Error(kUnsupported).
class GroupedProducts {
 public:
  /// max_sms: the most SMs that a product uses; 0: all.
  explicit GroupedProducts(Device device, int max_sms = 0,
                           ProductKernels kernels = ProductKernels::kFastest);
  ~GroupedProducts();
  GroupedProducts(const GroupedProducts&) = delete;
  GroupedProducts& operator=(const GroupedProducts&) = delete;

  void forward(const ProductForwardArgs& args, Stream stream);
  void dx(const ProductDxArgs& args, Stream stream);
  void dw(const ProductDwArgs& args, Stream stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The sizes of a product: w is [E_local, N, K], there are up to R rows.
struct ProductSizes {
  int64_t R = 0;
  int64_t E_local = 0;
  int64_t N = 0;
  int64_t K = 0;
};

// These throw if the arguments are not valid for a product on `device`.

ProductSizes check_product(const ProductForwardArgs& args, Device device);
ProductSizes check_product(const ProductDxArgs& args, Device device);
ProductSizes check_product(const ProductDwArgs& args, Device device);

}  // namespace crossdock::ops
