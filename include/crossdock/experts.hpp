#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// What stands between the two matrices of an expert.
enum class Activation : uint8_t {
  kSwiglu,         // silu(gate) * linear
  kClampedSwiglu,  // gate at most limit, linear in [-limit, limit]:
                   // gate * sigmoid(1.702 * gate) * (linear + 1)
  kGeglu,          // gelu(gate) * linear
  kGelu,           // by erf
  kGeluTanh,       // the tanh approximation
  kSquaredRelu     // max(h, 0)^2
};

inline constexpr std::array<std::string_view, 6> kActivationNames = {
    "swiglu", "clamped_swiglu", "geglu", "gelu", "gelu_tanh", "squared_relu"};

/// Gated: W1 is [2F, D], gate and linear; otherwise [F, D].
constexpr bool is_gated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kClampedSwiglu ||
         activation == Activation::kGeglu;
}

constexpr std::string_view name_of(Activation activation) {
  return kActivationNames[static_cast<size_t>(activation)];
}

/// The inverse of name_of; throws Error(kInvalidArgument) that lists the names.
inline Activation parse_activation(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kActivationNames.size(); ++i) {
    if (kActivationNames[i] == name) return static_cast<Activation>(i);
    known.append(i == 0 ? "" : ", ").append(kActivationNames[i]);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "activation must be one of " + known + "; got \"" + std::string(name) + "\"");
}

/// Where the weights of the routes are applied.
enum class WeightsIn : uint8_t {
  kCombine,  // y = W2 a + b2; the combine multiplies
  kExperts   // y = W2 (p a) + p b2 with p the row's weight; the combine is then unweighted
};

struct ExpertsConfig {
  int64_t num_local_experts = 0;  // E_local; may be 0
  int64_t width = 0;              // D
  int64_t inner = 0;              // F
  Activation activation = Activation::kSwiglu;
  bool interleaved = false;  // gated: rows of W1 are gate 0, linear 0, gate 1, ...
  double limit = 7.0;        // of clamped_swiglu
  WeightsIn weights_in = WeightsIn::kCombine;
  DType dtype = DType::kF32;  // of rows, y, weights and biases: fp64, fp32, bf16 or fp16
  /// Nothing is saved by forward; backward computes the hidden rows again, to the same bits.
  bool recompute = false;

  /// Rows of W1: 2F or F.
  int64_t hidden_width() const { return is_gated(activation) ? 2 * inner : inner; }
};

/// Parameters of all local experts.
struct ExpertWeights {
  ConstTensorView w1 = {};  // [E_local, 2F or F, D]: gate rows, then linear rows, or in turn
  ConstTensorView w2 = {};  // [E_local, D, F]
  ConstTensorView b1 = {};  // [E_local, 2F or F], optional
  ConstTensorView b2 = {};  // [E_local, D], optional
};

/// Where their gradients go; fp32, or fp64 for fp64. A view that is not given is left out.
struct ExpertGradients {
  TensorView w1 = {};  // [E_local, 2F or F, D]
  TensorView w2 = {};  // [E_local, D, F]
  TensorView b1 = {};  // [E_local, 2F or F]
  TensorView b2 = {};  // [E_local, D]
};

/// What forward leaves for backward. Belongs to one forward; any number may be in flight.
///
/// After forward: `hidden` [R, 2F or F], W1 x + b1 in the dtype of the rows (nothing with
/// `recompute`). After backward_dx, in its place: what backward_dw needs. The rows x and grad_y are
/// the caller's and are not copied; y is not needed.
struct ExpertsSaved {
  Buffer hidden;               // [R, 2F or F]
  Buffer grad_hidden;          // [R, 2F or F]
  Buffer weighted_activation;  // [R, F], the activation times the row's weight

  int64_t num_bytes() const {
    return hidden.num_bytes() + grad_hidden.num_bytes() + weighted_activation.num_bytes();
  }
};

struct ExpertsForwardArgs {
  ExpertWeights weights = {};
  ConstTensorView rows = {};         // [R, D]; R may be more than the segments hold
  Segments segments = {};            // E_local of them
  ConstTensorView row_weights = {};  // [R] fp32 (fp64 for fp64); needed and read with kExperts only
  TensorView y = {};                 // out [R, D]
};

/// The segments [first, last), for a call that computes a part of them.
struct SegmentRange {
  int64_t first = 0;
  int64_t last = 0;
};

struct ExpertsBackwardDxArgs {
  ExpertWeights weights = {};
  ConstTensorView rows = {};  // [R, D] as in forward; read with `recompute` only
  Segments segments = {};
  /// [R] the weight p of each row, whether the combine applied it or the experts did; not given: 1.
  ConstTensorView row_weights = {};
  /// [R, D] gradient of the combined output, dispatched: not yet multiplied by the row's weight.
  ConstTensorView grad_y = {};
  ExpertsSaved* saved = nullptr;  // in and out
  TensorView grad_rows = {};      // out [R, D]
  TensorView grad_row_weights =
      {};                   // out [R] fp32 (fp64 for fp64), optional: <a, W2^T g> + <b2, g>
  bool keep_for_dw = true;  // false: backward_dw will not be called; `saved` is emptied
};

struct ExpertsBackwardDwArgs {
  ConstTensorView rows = {};  // [R, D] as in forward
  Segments segments = {};
  ConstTensorView row_weights = {};  // [R] as in backward_dx
  ConstTensorView grad_y = {};       // [R, D] as in backward_dx
  const ExpertsSaved* saved = nullptr;
  ExpertGradients grads = {};
  /// true: the sums are added to what is there, and experts without rows are not touched.
  /// false: overwritten; experts without rows get exactly 0.
  bool accumulate = false;
};

/// The experts of one rank: a grouped MLP over ragged rows, forward and backward.
///
/// Only rows of the segments are read. Pad rows and rows past the last segment may hold anything;
/// in y, grad_rows and grad_row_weights they become 0. Any count may be 0. An output must not
/// overlap an input or another output.
///
/// Products are those of ops/gemm.hpp: fp32 sums (fp64 for fp64) in a fixed order. The result of a
/// row depends on that row alone; a weight gradient depends on the rows of its expert in their
/// order; nothing depends on the number of threads. Members are thread-safe and not collective.
class CROSSDOCK_API Experts {
 public:
  /// No pool: the one of the process.
  explicit Experts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool = nullptr);

  const ExpertsConfig& config() const { return config_; }

  /// Throw where the calls below would because of these; for a caller that must know beforehand.
  void check(const ExpertWeights& weights) const;
  void check(const ExpertGradients& grads) const;

  ExpertsSaved forward(const ExpertsForwardArgs& args) const;

  /// forward in parts, for rows that come one after the other: begin_forward takes the memory of
  /// all rows and zeroes those of no expert in y; forward_part, with the same arguments, computes
  /// some segments, whose rows are there by then. When every segment was computed once, the result
  /// has the bits of forward.
  [[nodiscard]] ExpertsSaved begin_forward(const ExpertsForwardArgs& args) const;
  void forward_part(const ExpertsForwardArgs& args, ExpertsSaved& saved, SegmentRange part) const;

  /// Gradients of the rows and of their weights.
  void backward_dx(const ExpertsBackwardDxArgs& args) const;

  /// The same in parts, likewise; at the end finish_backward_dx leaves what backward_dw needs.
  void begin_backward_dx(const ExpertsBackwardDxArgs& args) const;
  void backward_dx_part(const ExpertsBackwardDxArgs& args, SegmentRange part) const;
  void finish_backward_dx(const ExpertsBackwardDxArgs& args) const;

  /// Gradients of the parameters, after backward_dx, at once or any time later.
  void backward_dw(const ExpertsBackwardDwArgs& args) const;

 private:
  void check(const ExpertsForwardArgs& args) const;
  void check(const ExpertsBackwardDxArgs& args) const;

  ExpertsConfig config_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<BufferPool> buffers_;
};

/// All rows in one segment: with it, Experts of one expert are a dense MLP (shared experts).
class OneSegment {
 public:
  explicit OneSegment(int64_t num_rows) : starts_{0, num_rows} {}
  /// Valid as long as this object.
  [[nodiscard]] Segments view() const& { return {starts_.data(), &starts_[1], 1, {}}; }
  Segments view() const&& = delete;

 private:
  std::array<int64_t, 2> starts_;
};

}  // namespace crossdock
