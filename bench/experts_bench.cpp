#include "bench/experts_bench.hpp"

#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "bench/plain_blas.hpp"
#include "crossdock/error.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::bench {
namespace {

std::vector<float> values(int64_t count, uint32_t seed) {
  std::vector<float> result(static_cast<size_t>(count));
  for (float& value : result) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<float>(seed >> 8) * 0x1p-24F - 0.5F;
  }
  return result;
}

// Experts and plain BLAS calls on the same data: SwiGLU experts with R rows each, fp32.
class ExpertProducts {
 public:
  explicit ExpertProducts(const Scenario& s)
      : E_(s.experts),
        R_(s.tokens / s.experts),
        D_(s.width),
        F_(s.inner),
        pool_(std::make_shared<ThreadPool>()),
        experts_({.num_local_experts = E_, .width = D_, .inner = F_}, pool_),
        blas_(PlainBlas::load(pool_->num_threads())),
        x_(values(E_ * R_ * D_, 1)),
        g_(values(E_ * R_ * D_, 2)),
        w1_(values(E_ * 2 * F_ * D_, 3)),
        w2_(values(E_ * D_ * F_, 4)),
        y_(x_.size()),
        grad_x_(x_.size()),
        grad_w1_(w1_.size()),
        grad_w2_(w2_.size()),
        hidden_(static_cast<size_t>(E_ * R_ * 2 * F_)),
        library_rows_(x_.size()) {
    for (int64_t e = 0; e <= E_; ++e) starts_.push_back(e * R_);
    counts_.assign(static_cast<size_t>(E_), R_);
  }

  std::vector<Step> steps() {
    std::vector<Step> steps;
    add(steps, "experts", &ExpertProducts::forward, &ExpertProducts::library_forward);
    add(steps, "experts_dx", &ExpertProducts::backward_dx, &ExpertProducts::library_dx);
    add(steps, "experts_dw", &ExpertProducts::backward_dw, &ExpertProducts::library_dw);
    return steps;
  }

  // Checks the first and the last row of every expert.
  void check() const {
    for (int64_t e = 0; e < E_; ++e) {
      const auto slice = [](const std::vector<float>& all, int64_t first, int64_t count) {
        return std::vector<double>(all.begin() + first, all.begin() + first + count);
      };
      const reference::MlpWeights weights{.w1 = slice(w1_, e * 2 * F_ * D_, 2 * F_ * D_),
                                          .w2 = slice(w2_, e * D_ * F_, D_ * F_),
                                          .b1 = {},
                                          .b2 = {}};
      for (const int64_t row : {e * R_, (e + 1) * R_ - 1}) {
        const auto wanted =
            reference::mlp_forward({.D = D_, .F = F_}, weights, slice(x_, row * D_, D_));
        check_row(wanted, row);
      }
    }
  }

 private:
  using Member = void (ExpertProducts::*)();

  void add(std::vector<Step>& steps, const std::string& name, Member ours, Member library) {
    // Parameters or their gradients once, and two tensors of rows. Three products of 2 R D F flops
    // each.
    const int64_t bytes = static_cast<int64_t>(sizeof(float)) * E_ * (3 * F_ * D_ + 2 * R_ * D_);
    const double flops = 6.0 * static_cast<double>(E_ * R_ * D_ * F_);
    steps.push_back(
        {.name = name, .bytes = bytes, .flops = flops, .run = [this, ours] { (this->*ours)(); }});
    if (!blas_) return;
    // Threads of the BLAS library spin for a while after a call.
    steps.push_back({.name = name + "_blas",
                     .bytes = bytes,
                     .flops = flops,
                     .run = [this, library] { (this->*library)(); },
                     .settle = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }});
  }

  Segments segments() const { return {starts_.data(), counts_.data(), E_, {}}; }
  ExpertWeights weights() const {
    return {{w1_.data(), {E_, 2 * F_, D_}}, {w2_.data(), {E_, D_, F_}}, {}, {}};
  }
  Shape rows() const { return {E_ * R_, D_}; }

  void forward() {
    saved_ = {};
    saved_ = experts_.forward({.weights = weights(),
                               .rows = {x_.data(), rows()},
                               .segments = segments(),
                               .row_weights = {},
                               .y = {y_.data(), rows()}});
  }

  void backward_dx() {
    experts_.backward_dx({.weights = weights(),
                          .rows = {x_.data(), rows()},
                          .segments = segments(),
                          .row_weights = {},
                          .grad_y = {g_.data(), rows()},
                          .saved = &saved_,
                          .grad_rows = {grad_x_.data(), rows()},
                          .grad_row_weights = {}});
  }

  void backward_dw() {
    experts_.backward_dw(
        {.rows = {x_.data(), rows()},
         .segments = segments(),
         .row_weights = {},
         .grad_y = {g_.data(), rows()},
         .saved = &saved_,
         .grads = {{grad_w1_.data(), {E_, 2 * F_, D_}}, {grad_w2_.data(), {E_, D_, F_}}, {}, {}}});
  }

  void library_forward() {
    multiply_all({R_, 2 * F_, D_, false, true, x_.data(), w1_.data(), hidden_.data()});
    multiply_all({R_, D_, F_, false, true, hidden_.data(), w2_.data(), library_rows_.data()});
  }
  void library_dx() {
    multiply_all({R_, F_, D_, false, false, g_.data(), w2_.data(), hidden_.data()});
    multiply_all({R_, D_, 2 * F_, false, false, hidden_.data(), w1_.data(), library_rows_.data()});
  }
  void library_dw() {
    multiply_all({2 * F_, D_, R_, true, false, hidden_.data(), x_.data(), grad_w1_.data()});
    multiply_all({D_, F_, R_, true, false, g_.data(), hidden_.data(), grad_w2_.data()});
  }

  // One product per expert, all of the same size as the first expert's.
  void multiply_all(PlainProduct p) const {
    for (int64_t e = 0; e < E_; ++e) {
      blas_->multiply(p);
      p.a += p.M * p.K;
      p.b += p.K * p.N;
      p.c += p.M * p.N;
    }
  }

  void check_row(const std::vector<double>& wanted, int64_t row) const {
    double scale = 0.0;
    for (const double value : wanted) scale = std::max(scale, std::abs(value));
    for (int64_t d = 0; d < D_; ++d) {
      const double got = y_[static_cast<size_t>(row * D_ + d)];
      if (std::abs(got - wanted[static_cast<size_t>(d)]) <= 1e-4 * scale) continue;
      throw Error(ErrorCode::kInternal, "the experts' y is wrong in row " + std::to_string(row) +
                                            ", column " + std::to_string(d));
    }
  }

  int64_t E_, R_, D_, F_;
  std::shared_ptr<ThreadPool> pool_;
  Experts experts_;
  std::unique_ptr<PlainBlas> blas_;
  ExpertsSaved saved_;
  std::vector<float> x_, g_, w1_, w2_, y_, grad_x_, grad_w1_, grad_w2_;
  std::vector<float> hidden_, library_rows_;  // of the BLAS calls
  std::vector<int64_t> starts_, counts_;
};

}  // namespace

std::vector<StepResult> run_experts(const Scenario& scenario, Group& group, const Repeats& repeats,
                                    bool check) {
  ExpertProducts products(scenario);
  std::vector<StepResult> results = measure(group, products.steps(), repeats);
  if (check) products.check();
  return results;
}

}  // namespace crossdock::bench
