#include <algorithm>
#include <cstdint>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/experts.hpp"
#include "ops/activation_functions.hpp"
#include "ops/cuda/device_activation.hpp"
#include "ops/cuda/row_chunks.cuh"

namespace crossdock::ops {

// Rows of gates and linear values, or of plain values, in chunks.

/// Where the values of a hidden row are.
struct HiddenLayout {
  int64_t F;
  int64_t width;  // 2F or F
  bool interleaved;
};

/// The hidden values of one chunk of activations, as they are stored.
template <Activation kKind, typename Element>
struct HiddenChunk {
  Chunk<Element> gate;    // of a plain activation: its only value
  Chunk<Element> linear;  // of a gated activation only
};

/// Separates the gates and linear values in two adjacent chunks of an interleaved row; `gate` is
/// the first chunk.
template <typename Element>
__device__ inline void split_pairs(Chunk<Element>& gate, Chunk<Element>& linear) {
  constexpr int kCount = cuda::kWide<Element>;
  const Chunk<Element> halves[2] = {gate, linear};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    gate.elements[j] = halves[2 * j / kCount].elements[2 * j % kCount];
    linear.elements[j] = halves[2 * j / kCount].elements[2 * j % kCount + 1];
  }
}

/// The inverse.
template <typename Element>
__device__ inline void join_pairs(Chunk<Element>& gate, Chunk<Element>& linear) {
  constexpr int kCount = cuda::kWide<Element>;
  Chunk<Element> halves[2];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    halves[2 * j / kCount].elements[2 * j % kCount] = gate.elements[j];
    halves[2 * j / kCount].elements[2 * j % kCount + 1] = linear.elements[j];
  }
  gate = halves[0];
  linear = halves[1];
}

/// The hidden values of activations [column, column + kWide) of a row.
template <Activation kKind, bool kAligned, typename Element>
__device__ inline HiddenChunk<kKind, Element> load_hidden(const Element* row, int64_t column,
                                                          const HiddenLayout& layout) {
  HiddenChunk<kKind, Element> chunk;
  if constexpr (!is_gated(kKind)) {
    chunk.gate = load_chunk_once<kAligned>(row, column, layout.F);
  } else if (layout.interleaved) {
    chunk.gate = load_chunk_once<kAligned>(row, 2 * column, layout.width);
    chunk.linear = load_chunk_once<kAligned>(row, 2 * column + cuda::kWide<Element>, layout.width);
    split_pairs(chunk.gate, chunk.linear);
  } else {
    chunk.gate = load_chunk_once<kAligned>(row, column, layout.F);
    chunk.linear = load_chunk_once<kAligned>(row + layout.F, column, layout.F);
  }
  return chunk;
}

template <Activation kKind, bool kAligned, typename Element>
__device__ inline void store_hidden(Element* row, int64_t column, const HiddenLayout& layout,
                                    HiddenChunk<kKind, Element> chunk) {
  if constexpr (!is_gated(kKind)) {
    store_chunk<kAligned>(row, column, layout.F, chunk.gate);
  } else if (layout.interleaved) {
    join_pairs(chunk.gate, chunk.linear);
    store_chunk<kAligned>(row, 2 * column, layout.width, chunk.gate);
    store_chunk<kAligned>(row, 2 * column + cuda::kWide<Element>, layout.width, chunk.linear);
  } else {
    store_chunk<kAligned>(row, column, layout.F, chunk.gate);
    store_chunk<kAligned>(row + layout.F, column, layout.F, chunk.linear);
  }
}

namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 4;

// Blocks per SM that must fit with their registers: unaligned rows need more of them.
template <bool kAligned>
inline constexpr int kResidentBlocks = kAligned ? kBlocksPerSm : 3;

template <typename Element>
struct ForwardArgs {
  SegmentTable segments;
  HiddenLayout layout;
  float limit;
  const Element* hidden;
  const float* row_weights;  // may be null
  Element* activation;
};

template <Activation kKind, bool kAligned, typename Element>
__device__ void activate_row(const ForwardArgs<Element>& args, int64_t row) {
  constexpr int64_t kCount = cuda::kWide<Element>;
  const int64_t F = args.layout.F;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float weight = args.row_weights != nullptr ? args.row_weights[row] : 1.0f;
  const Element* hidden = args.hidden + row * args.layout.width;
  Element* activation = args.activation + row * F;
  for (int64_t column = lane * kCount; column < F; column += 32 * kCount) {
    const auto h = load_hidden<kKind, kAligned>(hidden, column, args.layout);
    Chunk<Element> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float a = gate_function<kKind>(cuda::widen(h.gate.elements[j]), args.limit).value;
      if constexpr (is_gated(kKind)) {
        a *= linear_function<kKind>(cuda::widen(h.linear.elements[j]), args.limit).value;
      }
      result.elements[j] = cuda::narrow<Element>(a * weight);
    }
    store_chunk<kAligned>(activation, column, F, result);
  }
}

// A warp takes rows in turn, a lane chunks of a row.
// Floor: (H + F) * sizeof(Element) bytes for each row of a segment, H = 2F or F.
template <typename Element, Activation kKind, bool kAligned>
__global__ void __launch_bounds__(kWarps * 32, kResidentBlocks<kAligned>)
    activate_kernel(const __grid_constant__ ForwardArgs<Element> args) {
  cuda::wait_for_previous_kernel();
  const int64_t end = args.segments.end_row();
  const int64_t step = int64_t{gridDim.x} * kWarps;
  int64_t row = args.segments.first_row() + int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (; row < end; row += step) {
    if (args.segments.find(row) >= 0) activate_row<kKind, kAligned>(args, row);
  }
}

template <typename Element>
struct BackwardArgs {
  SegmentTable segments;
  HiddenLayout layout;
  float limit;
  const Element* hidden;
  const float* row_weights;        // may be null
  const Element* grad_activation;  // [R, F]
  const Element* grad_y;           // [R, D]; with b2
  const Element* b2;               // may be null
  int64_t D;
  Element* grad_hidden;          // may be `hidden`
  Element* weighted_activation;  // may be null or grad_activation
  float* grad_row_weights;       // may be null
};

// One chunk of a row. Adds its part of <a, u> to `sum`.
template <Activation kKind, typename Element>
__device__ void backward_chunk(const BackwardArgs<Element>& args,
                               const HiddenChunk<kKind, Element>& h,
                               const Chunk<Element>& grad_activation, float weight,
                               HiddenChunk<kKind, Element>& grad_hidden,
                               Chunk<Element>& weighted_activation, float& sum) {
#pragma unroll
  for (int j = 0; j < cuda::kWide<Element>; ++j) {
    const float u = cuda::widen(grad_activation.elements[j]);
    const float grad_a = u * weight;
    const Slope<float> gate = gate_function<kKind>(cuda::widen(h.gate.elements[j]), args.limit);
    float a = gate.value;
    float grad_gate = grad_a * gate.derivative;
    if constexpr (is_gated(kKind)) {
      const Slope<float> linear =
          linear_function<kKind>(cuda::widen(h.linear.elements[j]), args.limit);
      a *= linear.value;
      grad_gate *= linear.value;
      grad_hidden.linear.elements[j] =
          cuda::narrow<Element>(grad_a * gate.value * linear.derivative);
    }
    grad_hidden.gate.elements[j] = cuda::narrow<Element>(grad_gate);
    weighted_activation.elements[j] = cuda::narrow<Element>(a * weight);
    sum = fmaf(a, u, sum);
  }
}

// Computes the row's gradients, chunk by chunk. A lane stores a chunk after it has loaded it, so
// outputs may replace inputs. Returns this lane's part of <a, u>.
template <Activation kKind, bool kAligned, typename Element>
__device__ float backward_row(const BackwardArgs<Element>& args, int64_t row) {
  constexpr int64_t kCount = cuda::kWide<Element>;
  const int64_t F = args.layout.F;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float weight = args.row_weights != nullptr ? args.row_weights[row] : 1.0f;
  const Element* hidden = args.hidden + row * args.layout.width;
  const Element* grad_activation = args.grad_activation + row * F;
  Element* grad_hidden = args.grad_hidden + row * args.layout.width;
  float sum = 0.0f;
  for (int64_t column = lane * kCount; column < F; column += 32 * kCount) {
    const auto h = load_hidden<kKind, kAligned>(hidden, column, args.layout);
    const Chunk<Element> u = load_chunk_once<kAligned>(grad_activation, column, F);
    HiddenChunk<kKind, Element> grad;
    Chunk<Element> weighted;
    backward_chunk<kKind>(args, h, u, weight, grad, weighted, sum);
    store_hidden<kKind, kAligned>(grad_hidden, column, args.layout, grad);
    if (args.weighted_activation == nullptr) continue;
    store_chunk<kAligned>(args.weighted_activation + row * F, column, F, weighted);
  }
  return sum;
}

// This lane's part of <b2, g>.
template <bool kAligned, typename Element>
__device__ float multiply_bias(const BackwardArgs<Element>& args, int64_t row, int64_t expert) {
  constexpr int64_t kCount = cuda::kWide<Element>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Element* grad_y = args.grad_y + row * args.D;
  const Element* b2 = args.b2 + expert * args.D;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t column = lane * kCount; column < args.D; column += 32 * kCount) {
    const Chunk<Element> g = load_chunk<kAligned>(grad_y, column, args.D);
    const Chunk<Element> b = load_chunk<kAligned>(b2, column, args.D);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      sum = fmaf(cuda::widen(b.elements[j]), cuda::widen(g.elements[j]), sum);
    }
  }
  return sum;
}

// A warp takes rows in turn, a lane chunks of a row.
// Floor: 2 (H + F) * sizeof(Element) bytes for each row of a segment, and D * sizeof(Element) more
// for grad_row_weights with b2.
template <typename Element, Activation kKind, bool kAligned>
__global__ void __launch_bounds__(kWarps * 32, kResidentBlocks<kAligned>)
    activate_backward_kernel(const __grid_constant__ BackwardArgs<Element> args) {
  cuda::wait_for_previous_kernel();
  const int64_t end = args.segments.end_row();
  const int64_t step = int64_t{gridDim.x} * kWarps;
  int64_t row = args.segments.first_row() + int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (; row < end; row += step) {
    const int64_t expert = args.segments.find(row);
    if (expert < 0) continue;
    const float product = backward_row<kKind, kAligned>(args, row);
    if (args.grad_row_weights == nullptr) continue;
    float sum = warp_sum(product);
    if (args.b2 != nullptr) sum += warp_sum(multiply_bias<kAligned>(args, row, expert));
    if (threadIdx.x % 32 == 0) args.grad_row_weights[row] = sum;
  }
}

HiddenLayout layout_of(const ActivationSpec& spec) {
  return {.F = spec.F,
          .width = is_gated(spec.kind) ? 2 * spec.F : spec.F,
          .interleaved = spec.interleaved};
}

// Persistent blocks, fewer if there are few rows.
unsigned num_blocks(int64_t num_rows) {
  const int64_t most = int64_t{cuda::num_sms(cuda::current_device())} * kBlocksPerSm;
  return static_cast<unsigned>(std::min((num_rows + kWarps - 1) / kWarps, most));
}

template <typename Element, Activation kKind>
void launch_forward(const ActivateArgs& args, cudaStream_t stream) {
  const ForwardArgs<Element> kernel_args{.segments = SegmentTable(args.segments),
                                         .layout = layout_of(args.spec),
                                         .limit = static_cast<float>(args.spec.limit),
                                         .hidden = pointer<Element>(args.hidden),
                                         .row_weights = pointer<float>(args.row_weights),
                                         .activation = pointer<Element>(args.activation)};
  const bool is_aligned = has_aligned_rows(args.hidden) && has_aligned_rows(args.activation);
  auto* kernel =
      is_aligned ? activate_kernel<Element, kKind, true> : activate_kernel<Element, kKind, false>;
  cuda::launch_early(kernel, num_blocks(args.hidden.num_rows()), kWarps * 32, stream, kernel_args);
}

template <typename Element, Activation kKind>
void launch_backward(const ActivateBackwardArgs& args, cudaStream_t stream) {
  const bool has_b2 = args.b2.given() && args.grad_row_weights.given();
  const BackwardArgs<Element> kernel_args{
      .segments = SegmentTable(args.segments),
      .layout = layout_of(args.spec),
      .limit = static_cast<float>(args.spec.limit),
      .hidden = pointer<Element>(args.hidden),
      .row_weights = pointer<float>(args.row_weights),
      .grad_activation = pointer<Element>(args.grad_activation),
      .grad_y = has_b2 ? pointer<Element>(args.grad_y) : nullptr,
      .b2 = has_b2 ? pointer<Element>(args.b2) : nullptr,
      .D = has_b2 ? args.b2.shape[1] : 0,
      .grad_hidden = pointer<Element>(args.grad_hidden),
      .weighted_activation = pointer<Element>(args.weighted_activation),
      .grad_row_weights = pointer<float>(args.grad_row_weights)};
  const bool is_aligned = has_aligned_rows(args.hidden) && has_aligned_rows(args.grad_activation) &&
                          has_aligned_rows(args.grad_hidden) &&
                          has_aligned_rows(args.weighted_activation) &&
                          (!has_b2 || (has_aligned_rows(args.b2) && has_aligned_rows(args.grad_y)));
  auto* kernel = is_aligned ? activate_backward_kernel<Element, kKind, true>
                            : activate_backward_kernel<Element, kKind, false>;
  cuda::launch_early(kernel, num_blocks(args.hidden.num_rows()), kWarps * 32, stream, kernel_args);
}

template <typename Element, Activation kKind>
void load_for() {
  cuda::load_kernels(activate_kernel<Element, kKind, true>, activate_kernel<Element, kKind, false>,
                     activate_backward_kernel<Element, kKind, true>,
                     activate_backward_kernel<Element, kKind, false>);
}

template <Activation kKind>
using Kind = std::integral_constant<Activation, kKind>;

// Calls use(Element(), Kind<kind>()).
template <typename Use>
void with_types(DType dtype, Activation kind, const Use& use) {
  cuda::with_element(dtype, [&](auto element) {
    with_activation(kind, [&](auto constant) { use(element, constant); });
  });
}

}  // namespace

void load_device_activation(Activation kind, DType dtype, Device device) {
  const cuda::CallGuard guard(device.index);
  with_types(dtype, kind, []<typename Element, Activation kKind>(Element, Kind<kKind>) {
    load_for<Element, kKind>();
  });
}

void activate_on_device(const ActivateArgs& args, Stream stream) {
  CROSSDOCK_ASSERT(args.hidden.dtype == args.activation.dtype);
  if (args.hidden.num_rows() == 0 || args.segments.num_segments == 0) return;
  const cuda::CallGuard guard(args.hidden.device.index);
  with_types(args.hidden.dtype, args.spec.kind,
             [&]<typename Element, Activation kKind>(Element, Kind<kKind>) {
               launch_forward<Element, kKind>(args, cuda::handle_of(stream));
             });
}

void activate_backward_on_device(const ActivateBackwardArgs& args, Stream stream) {
  CROSSDOCK_ASSERT(args.hidden.dtype == args.grad_activation.dtype &&
                   args.hidden.dtype == args.grad_hidden.dtype);
  if (args.hidden.num_rows() == 0 || args.segments.num_segments == 0) return;
  const cuda::CallGuard guard(args.hidden.device.index);
  with_types(args.hidden.dtype, args.spec.kind,
             [&]<typename Element, Activation kKind>(Element, Kind<kKind>) {
               launch_backward<Element, kKind>(args, cuda::handle_of(stream));
             });
}

}  // namespace crossdock::ops
