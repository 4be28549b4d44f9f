#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/attachment.hpp"
#include "dispatch/cuda/tensors.hpp"
#include "layer/layer_cases.hpp"

namespace crossdock {

inline constexpr double kPoison = std::numeric_limits<double>::quiet_NaN();

/// A copy in host memory. Waits for the stream.
inline OwnedTensor copy_to_host(const TensorView& tensor, const RankStream& stream) {
  const auto bytes = std::make_shared<std::vector<std::byte>>(to_host(tensor, stream));
  return {.view = TensorView(bytes->data(), tensor.dtype, tensor.shape), .owner = bytes};
}

inline std::vector<double> values_of(const TensorView& tensor, const RankStream& stream) {
  const OwnedTensor host = copy_to_host(tensor, stream);
  return reference::to_values(host.view);
}

/// A layer on one rank with parameters and tokens on its GPU.
struct LayerOnGpu {
  RankStream stream;
  LayerOnRank rank;

  LayerOnGpu(Group& group, const LayerCase& layer_case, double initial_gradient = kPoison,
             MoeLayerOptions options = {}, std::optional<int> token_rank = std::nullopt)
      : stream(group),
        rank(group, layer_case, with_stream(std::move(options)), initial_gradient, token_rank) {
    const MoveTensor move = [&](const OwnedTensor& host) {
      return to_device(ConstTensorView(host.view), stream);
    };
    rank.parameters.move(move);
    rank.tokens.move(move);
    stream.synchronize();
  }

  /// Copies the tokens of another case, with the same number of tokens, into this memory.
  void copy_tokens(const LayerCase& other, int rank_index) const {
    const RankTokens from(other, rank_index);
    copy(from.x.view, rank.tokens.x.view);
    copy(from.grad_out.view, rank.tokens.grad_out.view);
    stream.synchronize();
  }

  /// The results of a forward and its backward. Waits for the stream.
  RankResult result(const MoeForwardResult& forward, const OwnedTensor& grad_x) const {
    RankResult result;
    result.out = values_of(forward.out.view, stream);
    result.grad_x = values_of(grad_x.view, stream);
    const MoeDecision decision = forward.saved.decision.on_host(stream.view());
    result.losses = decision.losses;
    result.load = decision.load;
    RankParameters parameters = rank.parameters;
    parameters.move([&](const OwnedTensor& tensor) { return copy_to_host(tensor.view, stream); });
    parameters.read_gradients(rank.layer_case, result);
    return result;
  }

  RankResult run() {
    MoeForwardResult forward = rank.forward();
    const OwnedTensor grad_x = rank.backward(forward.saved);
    return result(forward, grad_x);
  }

  /// The backward of a forward, with the gradients of the weights in a separate call.
  RankResult backward_with_delayed_dw(MoeForwardResult& forward) {
    MoeBackwardArgs args = rank.backward_args(forward.saved);
    args.delay_dw = true;
    const OwnedTensor grad_x = rank.layer.backward(args);
    rank.layer.backward_dw({.x = args.x,
                            .grad_out = args.grad_out,
                            .saved = &forward.saved,
                            .experts = args.grads.experts,
                            .shared = args.grads.shared});
    return result(forward, grad_x);
  }

 private:
  MoeLayerOptions with_stream(MoeLayerOptions options) const {
    options.device.stream = stream.view();
    return options;
  }
  void copy(const ConstTensorView& from, const TensorView& to) const {
    cuda_ok(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.num_bytes()),
                            cudaMemcpyHostToDevice, stream.get()));
  }
};

/// One forward and one backward on thread ranks, on all available GPUs.
inline std::vector<RankResult> run_layer_on_gpu(const LayerCase& layer_case,
                                                const DeviceOptions& device = {},
                                                const comm::GpuPretences& pretences = {}) {
  std::vector<RankResult> results(layer_case.tokens_per_rank.size());
  run_ranks(layer_case.num_ranks(), [&](Group& group) {
    comm::gpu_pretences_of(group) = pretences;
    MoeLayerOptions options;
    options.device = device;
    results[static_cast<size_t>(group.rank())] =
        LayerOnGpu(group, layer_case, kPoison, std::move(options)).run();
  });
  return results;
}

/// Rows that any rank of a case can receive.
inline int64_t most_rows(const LayerCase& layer_case) {
  int64_t T = 0;
  for (const int64_t tokens : layer_case.tokens_per_rank) T += tokens;
  const MoeLayerConfig& config = layer_case.config;
  return T * config.router.top_k + config.router.num_experts * config.dispatch.alignment;
}

/// A layer with all parts, large enough for several tiles of the kernels.
inline LayerCase medium_case(DType dtype, int64_t inner = 40) {
  MoeLayerConfig config;
  config.router.num_experts = 12;
  config.router.top_k = 3;
  config.router.width = 72;
  config.router.score = Score::kSigmoid;
  config.router.aux_loss_coeff = 0.1;
  config.experts.inner = inner;
  config.experts.dtype = dtype;
  config.shared_inner = 24;
  LayerCase made =
      make_case({.config = config, .tokens_per_rank = {211}, .biases = true, .mask = true});
  made.config.dispatch.max_rows = most_rows(made);
  return made;
}

/// The same with sharded experts. `inner` is that of a shard: with multiples of 8, the fastest
/// kernels compute 16-bit products.
inline LayerCase sharded_case(DType dtype, int64_t etp, std::vector<int64_t> tokens_per_rank,
                              int64_t inner = 16) {
  LayerCase made = spread(medium_case(dtype, etp * inner), std::move(tokens_per_rank));
  made.config.etp = etp;
  return made;
}

}  // namespace crossdock
