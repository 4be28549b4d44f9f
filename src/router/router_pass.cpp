#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/tensor_memory.hpp"
#include "crossdock/router.hpp"
#include "ops/convert.hpp"
#include "ops/gemm.hpp"
#include "router/backend.hpp"
#include "router/balance_losses.hpp"
#include "router/choice.hpp"
#include "router/scores.hpp"

namespace crossdock::router {
namespace {

// The weights of one token from its scores and chosen experts, forward and backward. Slots without
// a route (-1) have weight 0 and are skipped.

/// Weights before scaling: the chosen scores, as they are, normalised or after a softmax over them.
template <typename T>
void unscaled_weights(const RouterConfig& config, const T* scores, const int32_t* ids, T* weights) {
  const int64_t K = config.top_k;
  T divisor = 1;
  T largest = 0;
  if (config.score == Score::kSoftmaxAfterTopK) {
    bool is_first = true;
    for (int64_t k = 0; k < K; ++k) {
      if (ids[k] < 0) continue;
      largest = is_first ? scores[ids[k]] : std::max(largest, scores[ids[k]]);
      is_first = false;
    }
  }
  T sum = 0;
  for (int64_t k = 0; k < K; ++k) {
    weights[k] = 0;
    if (ids[k] < 0) continue;
    const T score = scores[ids[k]];
    weights[k] = config.score == Score::kSoftmaxAfterTopK ? std::exp(score - largest) : score;
    sum += weights[k];
  }
  if (config.score == Score::kSoftmaxAfterTopK) divisor = sum > T{0} ? sum : T{1};
  if (config.normalises()) divisor = sum + static_cast<T>(kEpsilon);
  for (int64_t k = 0; k < K; ++k) weights[k] /= divisor;
}

template <typename T>
void route_weights(const RouterConfig& config, const T* scores, const int32_t* ids, T* weights) {
  unscaled_weights(config, scores, ids, weights);
  for (int64_t k = 0; k < config.top_k; ++k) weights[k] *= static_cast<T>(config.scaling);
}

/// grad_scores[ids[k]] += the gradient through route_weights. `weights` [K] is scratch.
template <typename T>
void route_weights_backward(const RouterConfig& config, const T* scores, const int32_t* ids,
                            const T* grad_weights, T* weights, T* grad_scores) {
  const int64_t K = config.top_k;
  const T scaling = static_cast<T>(config.scaling);
  unscaled_weights(config, scores, ids, weights);
  T sum = 0;
  T inner = 0;
  for (int64_t k = 0; k < K; ++k) {
    if (ids[k] < 0) continue;
    sum += scores[ids[k]];
    inner += grad_weights[k] * weights[k];
  }
  for (int64_t k = 0; k < K; ++k) {
    if (ids[k] < 0) continue;
    T slope = grad_weights[k];
    if (config.score == Score::kSoftmaxAfterTopK) {
      slope = weights[k] * (grad_weights[k] - inner);
    } else if (config.normalises()) {
      slope = (grad_weights[k] - inner) / (sum + static_cast<T>(kEpsilon));
    }
    grad_scores[ids[k]] += scaling * slope;
  }
}

/// The backend for host memory. Sums are in T: float or double.
template <typename T>
class RouterPass final : public Backend {
 public:
  RouterPass(const RouterConfig& config, std::shared_ptr<ThreadPool> pool)
      : E_(config.num_experts),
        K_(config.top_k),
        D_(config.width),
        config_(config),
        pool_(std::move(pool)) {}

  RouterOutput route(const RouteArgs& args) override;
  RouterLosses losses(const RouterOutput& output, const LossCounts& counts, Stream stream) override;
  void backward(const RouterBackwardArgs& args) override;
  RouterStatistics sum(const RouterStatistics& a, const RouterStatistics& b,
                       Stream stream) override;

 private:
  // Runs body(first, last) over pieces of [0, T) on the pool.
  void for_each_chunk(int64_t num_tokens, const std::function<void(int64_t, int64_t)>& body);

  void note_tokens(const RouteArgs& args, RouterOutput& output);
  // Input of the gate [T, D]: x times the jitter, 0 for padding; x itself if neither applies.
  ConstTensorView seen_by_gate(const ConstTensorView& x, const RouterOutput& output,
                               bool zero_padding, Buffer& memory);
  void compute_logits(const RouteArgs& args, RouterOutput& output);
  void choose_routes(const RouteArgs& args, RouterOutput& output);
  void count_routes(RouterOutput& output);

  void grad_shares_of(const BalanceLosses& balance, int32_t sequence, T grad_losses,
                      T* grad_shares);
  void write_grad_logits(const RouterBackwardArgs& args, T* grad_logits);
  void write_grad_x(const RouterBackwardArgs& args, const T* grad_logits);
  void write_grad_gate(const RouterBackwardArgs& args, const T* grad_logits);

  int64_t E_;
  int64_t K_;
  int64_t D_;
  RouterConfig config_;
  std::shared_ptr<ThreadPool> pool_;
  BufferPool buffers_;
};

constexpr int64_t kChunkTokens = 64;

// Calls work(Element{}) with the element type of a tensor, for a router that sums in T.
template <typename T, typename Work>
void with_element(DType dtype, const Work& work) {
  if constexpr (sizeof(T) == 8) {
    work(double{});
  } else if (dtype == DType::kBF16) {
    work(BF16{});
  } else if (dtype == DType::kF16) {
    work(F16{});
  } else {
    work(float{});
  }
}

// The sequence of each token; -1: padding.
std::span<int32_t> sequences_of(const RouterOutput& output) {
  return {pointer<int32_t>(output.sequences), static_cast<size_t>(output.T)};
}

// The random factors of token t, for a router with jitter.
template <typename T>
TokenJitter<T> jitter_of(const RouterConfig& config, const RouterOutput& output, int64_t t) {
  const int64_t* ids = pointer<int64_t>(output.token_ids);
  return {config.jitter, output.jitter_seed, ids != nullptr ? ids[t] : t};
}

ops::GemmOperand by_rows(const ConstTensorView& matrix) {
  return {matrix.data, matrix.dtype, matrix.shape[1], 1};
}
// The transpose of the matrix as an operand.
ops::GemmOperand by_columns(const ConstTensorView& matrix) {
  return {matrix.data, matrix.dtype, 1, matrix.shape[1]};
}

}  // namespace

template <typename T>
void RouterPass<T>::for_each_chunk(int64_t num_tokens,
                                   const std::function<void(int64_t, int64_t)>& body) {
  pool_->parallel_for((num_tokens + kChunkTokens - 1) / kChunkTokens, [&](int64_t chunk) {
    body(chunk * kChunkTokens, std::min(num_tokens, (chunk + 1) * kChunkTokens));
  });
}

template <typename T>
void RouterPass<T>::note_tokens(const RouteArgs& args, RouterOutput& output) {
  const bool* mask = pointer<bool>(args.mask);
  const bool by_sequence = config_.counts(BalanceScope::kSequence);
  const int32_t* sequence_ids = by_sequence ? pointer<int32_t>(args.sequence_ids) : nullptr;
  output.sequences = buffers_.take(bytes_of<int32_t>(output.T));
  const std::span<int32_t> sequences = sequences_of(output);
  for (int64_t t = 0; t < output.T; ++t) {
    const int32_t sequence = sequence_ids != nullptr ? sequence_ids[t] : 0;
    sequences[static_cast<size_t>(t)] = mask != nullptr && mask[t] ? -1 : sequence;
  }
  output.statistics.num_sequences = by_sequence ? args.num_sequences : 1;
  output.jitter_seed = args.jitter_seed;
  if (config_.jitter == 0.0 || !args.token_ids.given()) return;
  output.token_ids = buffers_.take(bytes_of<int64_t>(output.T));
  std::copy_n(pointer<int64_t>(args.token_ids), output.T, pointer<int64_t>(output.token_ids));
}

template <typename T>
ConstTensorView RouterPass<T>::seen_by_gate(const ConstTensorView& x, const RouterOutput& output,
                                            bool zero_padding, Buffer& memory) {
  const std::span<const int32_t> sequences = sequences_of(output);
  const bool has_padding = std::find(sequences.begin(), sequences.end(), -1) != sequences.end();
  if (config_.jitter == 0.0 && !(zero_padding && has_padding)) return x;
  memory = buffers_.take(bytes_of<T>(output.T * D_));
  with_element<T>(x.dtype, [&](auto element) {
    using Element = decltype(element);
    for_each_chunk(output.T, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        T* to = pointer<T>(memory) + t * D_;
        if (sequences[static_cast<size_t>(t)] < 0) {
          std::fill_n(to, D_, T{0});
          continue;
        }
        ops::widen_row(pointer<Element>(x) + t * D_, D_, to);
        if (config_.jitter == 0.0) continue;
        const TokenJitter<T> jitter = jitter_of<T>(config_, output, t);
        for (int64_t d = 0; d < D_; ++d) to[d] *= jitter.factor(d);
      }
    });
  });
  return memory.view(DTypeOf<T>::value, {output.T, D_});
}

template <typename T>
void RouterPass<T>::compute_logits(const RouteArgs& args, RouterOutput& output) {
  Buffer memory;
  const ConstTensorView x = seen_by_gate(args.x, output, false, memory);
  std::vector<T> bias(static_cast<size_t>(E_), T{0});
  if (args.gate.bias.given()) {
    with_element<T>(args.gate.bias.dtype, [&](auto element) {
      ops::widen_row(pointer<decltype(element)>(args.gate.bias), E_, bias.data());
    });
  }
  const ops::GemmProblem problem{
      .a = by_rows(x), .b = by_rows(args.gate.weight), .M = output.T, .N = E_, .K = D_};
  ops::grouped_gemm<T>({&problem, 1}, *pool_, [&](const ops::GemmTile<T>& tile) {
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      const T* from = tile.values + i * tile.stride;
      T* to = pointer<T>(output.logits) + (tile.row + i) * E_ + tile.column;
      for (int64_t j = 0; j < tile.num_columns; ++j) {
        to[j] = from[j] + bias[static_cast<size_t>(tile.column + j)];
      }
    }
  });
}

template <typename T>
void RouterPass<T>::choose_routes(const RouteArgs& args, RouterOutput& output) {
  const ConstTensorView& forced = args.forced_ids;
  for_each_chunk(output.T, [&](int64_t first, int64_t last) {
    std::vector<T> scores(static_cast<size_t>(E_));
    Choice<T> choice(config_);
    for (int64_t t = first; t < last; ++t) {
      int32_t* ids = pointer<int32_t>(output.expert_ids) + t * K_;
      T* weights = pointer<T>(output.weights) + t * K_;
      if (sequences_of(output)[static_cast<size_t>(t)] < 0) {
        std::fill_n(ids, K_, -1);
        std::fill_n(weights, K_, T{0});
        continue;
      }
      scores_of(config_.score, pointer<T>(output.logits) + t * E_, E_, scores.data());
      if (forced.given() && forced.dtype == DType::kI64) {
        const int64_t* from = pointer<int64_t>(forced) + t * K_;
        std::transform(from, from + K_, ids, [](int64_t id) { return static_cast<int32_t>(id); });
      } else if (forced.given()) {
        std::copy_n(pointer<int32_t>(forced) + t * K_, K_, ids);
      } else if (config_.force_balance) {
        for (int64_t k = 0; k < K_; ++k) ids[k] = static_cast<int32_t>((t * K_ + k) % E_);
      } else {
        choice.choose(scores.data(), pointer<T>(args.expert_bias), ids);
      }
      route_weights(config_, scores.data(), ids, weights);
    }
  });
}

template <typename T>
void RouterPass<T>::count_routes(RouterOutput& output) {
  RouterStatistics& statistics = output.statistics;
  statistics.routes_per_expert.assign(static_cast<size_t>(statistics.num_sequences * E_), 0);
  statistics.num_tokens.assign(static_cast<size_t>(statistics.num_sequences), 0);
  const int32_t* ids = pointer<int32_t>(output.expert_ids);
  for (int64_t t = 0; t < output.T; ++t) {
    const int32_t sequence = sequences_of(output)[static_cast<size_t>(t)];
    if (sequence < 0) continue;
    ++statistics.num_tokens[static_cast<size_t>(sequence)];
    for (int64_t k = 0; k < K_; ++k) {
      const int32_t id = ids[t * K_ + k];
      if (id >= 0) ++statistics.routes_per_expert[static_cast<size_t>(sequence * E_ + id)];
    }
  }
}

template <typename T>
RouterOutput RouterPass<T>::route(const RouteArgs& args) {
  RouterOutput output;
  output.T = args.x.num_rows();
  output.K = K_;
  output.E = E_;
  output.weight_dtype = DTypeOf<T>::value;
  output.expert_ids = buffers_.take(bytes_of<int32_t>(output.T * K_));
  output.weights = buffers_.take(bytes_of<T>(output.T * K_));
  output.logits = buffers_.take(bytes_of<T>(output.T * E_));
  note_tokens(args, output);
  compute_logits(args, output);
  choose_routes(args, output);
  count_routes(output);
  return output;
}

template <typename T>
RouterLosses RouterPass<T>::losses(const RouterOutput& output, const LossCounts& counts,
                                   Stream /*stream*/) {
  const BalanceLosses balance = balance_losses(config_, output, counts);
  const size_t num_aux = balance.aux.size();
  std::vector<double> aux_of_token(static_cast<size_t>(output.T) * num_aux);  // [T, losses]
  std::vector<double> z_of_token(static_cast<size_t>(output.T));
  for_each_chunk(output.T, [&](int64_t first, int64_t last) {
    std::vector<T> scores(static_cast<size_t>(E_));
    std::vector<T> shares(static_cast<size_t>(E_));
    for (int64_t t = first; t < last; ++t) {
      const int32_t sequence = sequences_of(output)[static_cast<size_t>(t)];
      if (sequence < 0) continue;
      const T* logits = pointer<T>(output.logits) + t * E_;
      if (num_aux > 0) {
        scores_of(config_.score, logits, E_, scores.data());
        shares_of(config_.score, logits, scores.data(), E_, shares.data());
      }
      for (size_t i = 0; i < num_aux; ++i) {
        const AuxLoss& loss = balance.aux[i];
        const size_t row = loss.row_of(sequence);
        double sum = 0.0;
        for (size_t e = 0; e < shares.size(); ++e) {
          sum += static_cast<double>(shares[e]) *
                 static_cast<double>(loss.routes[row * shares.size() + e]);
        }
        aux_of_token[static_cast<size_t>(t) * num_aux + i] =
            sum * static_cast<double>(static_cast<T>(loss.factors[row]));
      }
      if (config_.z_loss_coeff != 0.0) {
        const auto lse = static_cast<double>(log_sum_exp(logits, E_));
        z_of_token[static_cast<size_t>(t)] =
            static_cast<double>(static_cast<T>(balance.z_factor)) * lse * lse;
      }
    }
  });
  RouterLosses sums;
  for (size_t i = 0; i < num_aux; ++i) {
    double sum = 0.0;
    for (size_t at = i; at < aux_of_token.size(); at += num_aux) sum += aux_of_token[at];
    sums.aux_terms.of(balance.aux[i].scope) = sum;
    sums.aux += sum;
  }
  for (const double z : z_of_token) sums.z += z;
  return sums;
}

// The gradient of all auxiliary losses with respect to a token's shares, [E].
template <typename T>
void RouterPass<T>::grad_shares_of(const BalanceLosses& balance, int32_t sequence, T grad_losses,
                                   T* grad_shares) {
  for (size_t i = 0; i < balance.aux.size(); ++i) {
    const AuxLoss& loss = balance.aux[i];
    const size_t row = loss.row_of(sequence);
    const T factor = grad_losses * static_cast<T>(loss.factors[row]);
    for (int64_t e = 0; e < E_; ++e) {
      const T term =
          factor *
          static_cast<T>(loss.routes[row * static_cast<size_t>(E_) + static_cast<size_t>(e)]);
      grad_shares[e] = i == 0 ? term : grad_shares[e] + term;
    }
  }
}

template <typename T>
void RouterPass<T>::write_grad_logits(const RouterBackwardArgs& args, T* grad_logits) {
  const RouterOutput& output = *args.output;
  const BalanceLosses balance = balance_losses(config_, output, args.counts);
  const T z_factor = static_cast<T>(balance.z_factor);
  const T grad_losses = static_cast<T>(args.grad_losses);
  for_each_chunk(output.T, [&](int64_t first, int64_t last) {
    std::vector<T> scores(static_cast<size_t>(E_));
    std::vector<T> shares(static_cast<size_t>(E_));
    std::vector<T> grad_scores(static_cast<size_t>(E_));
    std::vector<T> grad_shares(static_cast<size_t>(E_));
    std::vector<T> weights(static_cast<size_t>(K_));
    for (int64_t t = first; t < last; ++t) {
      T* grad = grad_logits + t * E_;
      std::fill_n(grad, E_, T{0});
      const int32_t sequence = sequences_of(output)[static_cast<size_t>(t)];
      if (sequence < 0) continue;
      const T* logits = pointer<T>(output.logits) + t * E_;
      scores_of(config_.score, logits, E_, scores.data());
      std::fill(grad_scores.begin(), grad_scores.end(), T{0});
      if (args.grad_weights.given()) {
        route_weights_backward(config_, scores.data(), pointer<int32_t>(output.expert_ids) + t * K_,
                               pointer<T>(args.grad_weights) + t * K_, weights.data(),
                               grad_scores.data());
      }
      if (!balance.aux.empty()) {
        shares_of(config_.score, logits, scores.data(), E_, shares.data());
        grad_shares_of(balance, sequence, grad_losses, grad_shares.data());
        shares_backward(config_.score, scores.data(), shares.data(), grad_shares.data(), E_,
                        grad_scores.data(), grad);
      }
      scores_backward(config_.score, logits, scores.data(), grad_scores.data(), E_, grad);
      if (config_.z_loss_coeff != 0.0) {
        softmax(logits, E_, shares.data());
        const T factor = grad_losses * T{2} * z_factor * log_sum_exp(logits, E_);
        for (int64_t e = 0; e < E_; ++e) grad[e] += factor * shares[static_cast<size_t>(e)];
      }
    }
  });
}

// grad_x (+)= grad_logits * gate, times the jitter.
template <typename T>
void RouterPass<T>::write_grad_x(const RouterBackwardArgs& args, const T* grad_logits) {
  const RouterOutput& output = *args.output;
  const ops::GemmProblem problem{.a = {grad_logits, DTypeOf<T>::value, E_, 1},
                                 .b = by_columns(args.gate.weight),
                                 .M = output.T,
                                 .N = D_,
                                 .K = E_};
  with_element<T>(args.grad_x.dtype, [&](auto element) {
    using Element = decltype(element);
    ops::grouped_gemm<T>({&problem, 1}, *pool_, [&](const ops::GemmTile<T>& tile) {
      for (int64_t i = 0; i < tile.num_rows; ++i) {
        const int64_t t = tile.row + i;
        const T* from = tile.values + i * tile.stride;
        Element* to = pointer<Element>(args.grad_x) + t * D_ + tile.column;
        const bool has_jitter = config_.jitter != 0.0;
        const TokenJitter<T> jitter = jitter_of<T>(config_, output, t);
        for (int64_t j = 0; j < tile.num_columns; ++j) {
          const T grad = has_jitter ? from[j] * jitter.factor(tile.column + j) : from[j];
          to[j] = ops::narrow<Element>(args.accumulate_x ? ops::widen(to[j]) + grad : grad);
        }
      }
    });
  });
}

// grad_gate (+)= grad_logits^T * x, grad_bias (+)= the sum of grad_logits; both in token order.
template <typename T>
void RouterPass<T>::write_grad_gate(const RouterBackwardArgs& args, const T* grad_logits) {
  const RouterOutput& output = *args.output;
  const bool accumulate = args.accumulate_gate;
  if (args.grad_gate.given()) {
    Buffer memory;
    const ConstTensorView x = seen_by_gate(args.x, output, true, memory);
    const ops::GemmProblem problem{.a = {grad_logits, DTypeOf<T>::value, 1, E_},
                                   .b = by_columns(x),
                                   .M = E_,
                                   .N = D_,
                                   .K = output.T};
    ops::grouped_gemm<T>({&problem, 1}, *pool_, [&](const ops::GemmTile<T>& tile) {
      for (int64_t i = 0; i < tile.num_rows; ++i) {
        const T* from = tile.values + i * tile.stride;
        T* to = pointer<T>(args.grad_gate) + (tile.row + i) * D_ + tile.column;
        for (int64_t j = 0; j < tile.num_columns; ++j) {
          to[j] = accumulate ? to[j] + from[j] : from[j];
        }
      }
    });
  }
  if (args.grad_bias.given()) {
    std::vector<double> sums(static_cast<size_t>(E_), 0.0);
    for (int64_t t = 0; t < output.T; ++t) {
      for (int64_t e = 0; e < E_; ++e) {
        sums[static_cast<size_t>(e)] += static_cast<double>(grad_logits[t * E_ + e]);
      }
    }
    T* to = pointer<T>(args.grad_bias);
    for (int64_t e = 0; e < E_; ++e) {
      const T sum = static_cast<T>(sums[static_cast<size_t>(e)]);
      to[e] = accumulate ? to[e] + sum : sum;
    }
  }
}

template <typename T>
void RouterPass<T>::backward(const RouterBackwardArgs& args) {
  Buffer memory;
  T* grad_logits = pointer<T>(args.grad_logits);
  if (!args.grad_logits.given()) {
    memory = buffers_.take(bytes_of<T>(args.output->T * E_));
    grad_logits = pointer<T>(memory);
  }
  write_grad_logits(args, grad_logits);
  if (args.grad_x.given()) write_grad_x(args, grad_logits);
  write_grad_gate(args, grad_logits);
}

template <typename T>
RouterStatistics RouterPass<T>::sum(const RouterStatistics& a, const RouterStatistics& b,
                                    Stream /*stream*/) {
  RouterStatistics total = a;
  total.add(b);
  return total;
}

std::unique_ptr<Backend> make_host_backend(const RouterConfig& config,
                                           std::shared_ptr<ThreadPool> pool) {
  if (config.dtype == DType::kF64) {
    return std::make_unique<RouterPass<double>>(config, std::move(pool));
  }
  return std::make_unique<RouterPass<float>>(config, std::move(pool));
}

}  // namespace crossdock::router
