#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "crossdock/router.hpp"
#include "router/backend.hpp"
#include "router/balance_losses.hpp"

namespace crossdock::router {

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

extern template class RouterPass<float>;
extern template class RouterPass<double>;

}  // namespace crossdock::router
