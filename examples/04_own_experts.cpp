// Your own experts between dispatch and combine, forward and backward.
//
// Expert e multiplies its rows by a number s_e. So out = sum over k of w_k s_(expert k) x, and all
// gradients of the loss <out, 1> are known.
#include <atomic>
#include <cmath>
#include <crossdock/crossdock.hpp>
#include <cstdio>

using namespace crossdock;

namespace {

constexpr int64_t D = 4;  // token width
constexpr int64_t E = 6;  // experts in all
constexpr int64_t K = 2;  // experts per token

float scale_of(int64_t expert) {
  return 1.0f + static_cast<float>(expert);
}

// Expert by expert, rows [R, D] -> result [R, D]. `first`: the expert of segment 0.
void scale_rows(const Segments& segments, int64_t first, const TensorView& rows,
                const TensorView& result) {
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    for (int64_t i = segments.starts[e] * D; i < segments.starts[e + 1] * D; ++i) {
      result.as<float>()[i] = scale_of(first + e) * rows.as<float>()[i];
    }
  }
}

bool near(float a, float b) {
  return std::abs(a - b) < 1e-4f;
}

// Three tokens on every rank; every token differs from all others.
struct Tokens {
  static constexpr int64_t T = 3;
  std::vector<float> x;             // [T, D]
  std::vector<int32_t> expert_ids;  // [T, K]
  std::vector<float> weights;       // [T, K]

  explicit Tokens(int rank) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t d = 0; d < D; ++d)
        x.push_back(static_cast<float>(int64_t{100} * rank + 10 * t + d));
      expert_ids.push_back(static_cast<int32_t>((t + rank) % E));
      expert_ids.push_back(static_cast<int32_t>((t + rank + 3) % E));
      weights.insert(weights.end(), {0.25f, 0.5f});
    }
  }
};

bool run_rank(Group& group) {
  Dispatcher dispatcher(group, {.num_experts = E, .top_k = K, .width = D}, "auto");
  const Tokens tokens(group.rank());
  constexpr int64_t T = Tokens::T;
  const int64_t first = first_expert(E, group.size(), group.rank());  // expert of segment 0

  // Forward. The result is written where combine can fetch it without a copy.
  const Plan plan = dispatcher.plan({.expert_ids = {tokens.expert_ids.data(), {T, K}},
                                     .weights = {tokens.weights.data(), {T, K}}});
  const DispatchResult sent = dispatcher.dispatch(plan, {.x = {tokens.x.data(), {T, D}}});
  const OwnedTensor y = dispatcher.allocate_rows(plan, DType::kF32);
  scale_rows(plan.segments(), first, sent.rows.view, y.view);
  const OwnedTensor out = dispatcher.combine(plan, y.view);

  // Backward of the combine, of your experts and of the dispatch.
  const std::vector<float> grad_out(static_cast<size_t>(T * D), 1.0f);
  const CombineBackwardResult back =
      dispatcher.combine_backward(plan, {grad_out.data(), {T, D}}, y.view);
  const OwnedTensor grad_rows = dispatcher.allocate_rows(plan, DType::kF32);
  scale_rows(plan.segments(), first, back.grad_rows.view, grad_rows.view);
  const OwnedTensor grad_x = dispatcher.dispatch_backward(plan, grad_rows.view);

  bool right = true;
  for (int64_t t = 0; t < T; ++t) {
    float factor = 0.0f;  // of x in out
    float sum = 0.0f;     // of the token's values
    for (int64_t d = 0; d < D; ++d) sum += tokens.x[t * D + d];
    for (int64_t k = 0; k < K; ++k) {
      const float scale = scale_of(tokens.expert_ids[t * K + k]);
      factor += tokens.weights[t * K + k] * scale;
      right = right && near(back.grad_weights.view.as<float>()[t * K + k], scale * sum);
    }
    for (int64_t d = 0; d < D; ++d) {
      right = right && near(out.view.as<float>()[t * D + d], factor * tokens.x[t * D + d]);
      right = right && near(grad_x.view.as<float>()[t * D + d], factor);
    }
  }
  return right;
}

}  // namespace

int main() {
  std::atomic<bool> all_right = true;
  run_ranks(4, [&](Group& group) {
    if (!run_rank(group)) all_right = false;
  });
  std::printf("%s\n", all_right ? "outputs and gradients are right" : "something is wrong");
  return all_right ? 0 : 1;
}
