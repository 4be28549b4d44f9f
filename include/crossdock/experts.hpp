#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

class ExpertsBackends;  // internal: the CPU and GPU implementations

/// Function between the two matrices of an expert.
enum class Activation : uint8_t {
  kSwiglu,         // silu(gate) * linear
  kClampedSwiglu,  // gate at most limit, linear in [-limit, limit]:
                   // gate * sigmoid(1.702 * gate) * (linear + 1)
  kGeglu,          // gelu(gate) * linear
  kGelu,           // exact, with erf
  kGeluTanh,       // the tanh approximation
  kSquaredRelu,    // max(h, 0)^2
  kGegluTanh,      // geglu with the tanh approximation
  kLimitedSwiglu   // gate at most limit, linear in [-limit, limit]: silu(gate) * linear
};

inline constexpr std::array<std::string_view, 8> kActivationNames = {
    "swiglu",    "clamped_swiglu", "geglu",      "gelu",
    "gelu_tanh", "squared_relu",   "geglu_tanh", "limited_swiglu"};

/// Whether W1 is [2F, D] (gate and linear rows) instead of [F, D].
constexpr bool is_gated(Activation activation) {
  return activation != Activation::kGelu && activation != Activation::kGeluTanh &&
         activation != Activation::kSquaredRelu;
}

constexpr std::string_view name_of(Activation activation) {
  return kActivationNames[static_cast<size_t>(activation)];
}

/// The inverse of name_of. Throws Error(kInvalidArgument), listing the valid names.
CROSSDOCK_API Activation parse_activation(std::string_view name);

/// Where route weights are applied.
enum class WeightsIn : uint8_t {
  kCombine,  // y = W2 a + b2; combine multiplies by the weight
  kExperts   // y = W2 (p a) + p b2 with p the row's weight; combine is unweighted
};

struct ExpertsConfig {
  int64_t num_local_experts = 0;  // E_local; may be 0
  int64_t width = 0;              // D
  int64_t inner = 0;              // F
  Activation activation = Activation::kSwiglu;
  bool interleaved = false;  // gated: rows of W1 are gate 0, linear 0, gate 1, ...
  double limit = 7.0;        // for clamped_swiglu and limited_swiglu
  WeightsIn weights_in = WeightsIn::kCombine;
  /// Dtype of rows, y, weights and biases: fp64, fp32, bf16 or fp16; not fp64 on a GPU.
  DType dtype = DType::kF32;
  /// Forward saves nothing; backward recomputes the hidden rows, with the same bits.
  bool recompute = false;
  /// W1, W2 and their gradients are stored as [E_local, D, 2F or F] and [E_local, F, D]. In host
  /// memory only.
  bool transposed = false;

  /// Rows of W1: 2F or F.
  int64_t hidden_width() const { return is_gated(activation) ? 2 * inner : inner; }

  bool operator==(const ExpertsConfig&) const = default;
};

/// Parameters of all local experts.
struct ExpertWeights {
  ConstTensorView w1 = {};  // [E_local, 2F or F, D]: gate rows, then linear rows (or interleaved)
  ConstTensorView w2 = {};  // [E_local, D, F]
  ConstTensorView b1 = {};  // [E_local, 2F or F], optional
  ConstTensorView b2 = {};  // [E_local, D], optional
};

/// Outputs for the gradients of all local experts, in fp32 (fp64 if the experts are fp64). On a GPU
/// those of w1 and w2 may have the dtype of the experts instead: they are rounded once and cannot
/// be accumulated. All are optional: gradients whose view is unset are not computed.
struct ExpertGradients {
  TensorView w1 = {};  // [E_local, 2F or F, D]
  TensorView w2 = {};  // [E_local, D, F]
  TensorView b1 = {};  // [E_local, 2F or F]
  TensorView b2 = {};  // [E_local, D]
};

/// Values of one forward that its backward needs. Any number of backwards may be pending.
///
/// forward fills `hidden`, W1 x + b1 in the dtype of the rows (nothing with `recompute`).
/// backward_dx replaces it with the other two, for backward_dw. The rows x and grad_y are not
/// copied: the caller keeps them. y is not needed.
///
/// On a GPU the buffers have memory for all R rows. They return to a pool in the order of the
/// stream of forward, so forward and its backward must be given the same stream. Values saved by a
/// captured call must live until the last replay of the graph has finished.
struct ExpertsSaved {
  Buffer hidden;               // [R, 2F or F]
  Buffer grad_hidden;          // [R, 2F or F]
  Buffer weighted_activation;  // [R, F], activation times the row's weight
  ExpertsConfig config = {};   // of the experts that filled them; backward refuses any other

  int64_t num_bytes() const {
    return hidden.num_bytes() + grad_hidden.num_bytes() + weighted_activation.num_bytes();
  }
};

struct ExpertsForwardArgs {
  ExpertWeights weights = {};
  ConstTensorView rows = {};         // [R, D]; R may exceed the rows of the segments
  Segments segments = {};            // E_local segments
  ConstTensorView row_weights = {};  // [R] fp32 (fp64 for fp64); with WeightsIn::kExperts only
  TensorView y = {};                 // out [R, D]; may be fp32, unrounded, for bf16 or fp16 rows
  Stream stream = {};                // for tensors on a GPU
  int free_sms = 0;  // SMs that matrix products leave to other streams, if the GPU has more
};

/// The segments [first, last).
struct SegmentRange {
  int64_t first = 0;
  int64_t last = 0;
};

struct ExpertsBackwardDxArgs {
  ExpertWeights weights = {};
  ConstTensorView rows = {};  // [R, D] as in forward; read with `recompute` only
  Segments segments = {};
  /// [R] the weight p of each row, whether combine or the experts applied it; unset: 1.
  ConstTensorView row_weights = {};
  /// [R, D] dispatched gradient of the combined output, not yet multiplied by the row's weight.
  ConstTensorView grad_y = {};
  ExpertsSaved* saved = nullptr;  // in and out
  TensorView grad_rows = {};      // out [R, D], like y
  /// out [R] fp32 (fp64 for fp64), optional: <a, W2^T g> + <b2, g>
  TensorView grad_row_weights = {};
  bool keep_for_dw = true;  // false: `saved` is emptied; backward_dw must not be called
  Stream stream = {};       // for tensors on a GPU
  int free_sms = 0;         // as in forward
};

struct ExpertsBackwardDwArgs {
  ConstTensorView rows = {};  // [R, D] as in forward
  Segments segments = {};
  ConstTensorView row_weights = {};  // [R] as in backward_dx
  ConstTensorView grad_y = {};       // [R, D] as in backward_dx
  const ExpertsSaved* saved = nullptr;
  ExpertGradients grads = {};
  /// true: adds to `grads`; the gradients of experts without rows are left unchanged.
  /// false: overwrites `grads`; the gradients of experts without rows become exactly 0.
  bool accumulate = false;
  Stream stream = {};  // for tensors on a GPU
};

/// The experts of one rank: a grouped MLP over ragged rows, forward and backward.
///
/// Only rows of segments are read. Pad rows and rows past the last segment may hold anything; they
/// become 0 in y, grad_rows and grad_row_weights. Any count may be 0. An output must not overlap an
/// input or another output. Invalid arguments throw Error(kInvalidArgument).
///
/// Sums are computed in fp32 (fp64 for fp64), in a fixed order. The result of a row depends on that
/// row alone, a weight gradient on the rows of its expert and their order; neither depends on the
/// number of threads. Members are thread-safe and not collective.
///
/// All tensors and segments of a call are in host memory or on one GPU. On a GPU:
/// - Calls queue their work in `stream` and return. They neither wait for the GPU nor, in the
///   steady state, allocate memory, and can be captured in a graph and replayed with other segments
///   in the same memory. Experts whose calls were captured must outlive the graph.
/// - R is a capacity: the rows of the segments are counted on the GPU, and the segments themselves
///   are not checked. Rows past the last segment are zeroed too, at the cost of writing them.
/// - Matrix products use all SMs but `free_sms`. Each block of their kernels needs a whole SM, so
///   kernels in other streams can start only on the SMs left free. Same bits for any number of SMs.
/// - Matrix products take inputs in the dtype of the experts, so activations and W2^T g are rounded
///   to it. Results differ from the CPU's by the rounding of the dtype.
class CROSSDOCK_API Experts {
 public:
  /// Default pool, for tensors in host memory: ThreadPool::process_wide().
  explicit Experts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool = nullptr);

  const ExpertsConfig& config() const { return config_; }

  /// Throws if the calls below would refuse these arguments with rows on `device`; for callers that
  /// check in advance.
  void check(const ExpertWeights& weights, Device device = {}) const;
  void check(const ExpertGradients& grads, Device device = {}, bool accumulate = false) const;
  /// Throws if the values were saved by experts with a different configuration.
  void check(const ExpertsSaved& saved) const;

  /// Loads the kernels for calls on a GPU, which may wait for the GPU; otherwise the first call
  /// does. Ranks that are threads of one process must call it before they queue a dispatch: a peer
  /// could not launch its kernel during that wait. Does nothing for host memory.
  void prepare(Device device, Stream stream = {}) const;

  ExpertsSaved forward(const ExpertsForwardArgs& args) const;

  /// forward in parts, for rows that arrive in chunks. begin_forward allocates memory for all rows
  /// and zeroes the rows of y that belong to no expert; forward_part, with the same arguments,
  /// computes segments whose rows have arrived. Once every segment has been computed, the result
  /// has the same bits as forward's.
  [[nodiscard]] ExpertsSaved begin_forward(const ExpertsForwardArgs& args) const;
  void forward_part(const ExpertsForwardArgs& args, ExpertsSaved& saved, SegmentRange part) const;

  /// Computes the gradients of the rows and of their weights.
  void backward_dx(const ExpertsBackwardDxArgs& args) const;

  /// backward_dx in parts, like forward. Call finish_backward_dx after the last part: it prepares
  /// `saved` for backward_dw.
  void begin_backward_dx(const ExpertsBackwardDxArgs& args) const;
  void backward_dx_part(const ExpertsBackwardDxArgs& args, SegmentRange part) const;
  void finish_backward_dx(const ExpertsBackwardDxArgs& args) const;

  /// Computes the gradients of the parameters, at any time after backward_dx.
  void backward_dw(const ExpertsBackwardDwArgs& args) const;

 private:
  void check(const ExpertsForwardArgs& args) const;
  void check(const ExpertsBackwardDxArgs& args) const;

  ExpertsConfig config_;
  std::shared_ptr<ExpertsBackends> backends_;
};

/// A single segment that holds all rows, to use Experts with one expert as a dense MLP. In host
/// memory.
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
