// Trains a layer, its router included, on four ranks and again on one: the losses are the same.
//
//   build/release/examples/example_09_train
//
// The tokens of a batch are divided unevenly among the ranks, and so are the experts. After each
// step, what every rank has computed for its own tokens is summed over the ranks: the gradient of
// the gate and the loss. The gradients of the experts are complete, because the layer carries the
// tokens of all ranks to them.
#include <cmath>
#include <crossdock/crossdock.hpp>
#include <cstdio>
#include <random>

using namespace crossdock;

namespace {

constexpr int64_t T = 96;  // tokens of all ranks
constexpr int64_t D = 16;  // token width
constexpr int64_t F = 24;  // inner width of an expert
constexpr int64_t E = 6;   // experts in all: ranks 0 and 1 of four have two of them
constexpr int kSteps = 60;
constexpr float kRate = 0.02f;

using Values = std::vector<float>;

Values random_values(int64_t count, float scale, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Values values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// The rows [first, last) of a matrix with `width` columns.
Values rows_of(const Values& matrix, int64_t first, int64_t last, int64_t width) {
  return {matrix.begin() + first * width, matrix.begin() + last * width};
}

// Each token is to become itself with its values in reverse order.
Values reversed(const Values& x) {
  Values targets(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t column = i % D;
    targets[i] = x[i - column + (D - 1 - column)];
  }
  return targets;
}

void descend(Values& values, const Values& gradient) {
  for (size_t i = 0; i < values.size(); ++i) values[i] -= kRate * gradient[i];
}

// The loss of every step, the same on every rank.
Values train(Group& group) {
  MoeLayerConfig config;
  config.router = {.num_experts = E, .top_k = 2, .width = D, .normalise = true};
  config.router.aux_loss_coeff = 0.01;  // keeps the experts equally busy
  config.experts.inner = F;
  MoeLayer layer(group, config);

  // Rank r of P has the tokens from T r^2 / P^2 on, and its contiguous part of the experts.
  const int64_t rank = group.rank();
  const int64_t squared = static_cast<int64_t>(group.size()) * group.size();
  const int64_t first_token = T * rank * rank / squared;
  const int64_t last_token = T * (rank + 1) * (rank + 1) / squared;
  const int64_t num_tokens = last_token - first_token;
  const Values x = rows_of(random_values(T * D, 1.0f, 1), first_token, last_token, D);
  const Values targets = reversed(x);

  const int64_t first = first_expert(E, group.size(), group.rank());
  const int64_t E_local = layer.config().experts.num_local_experts;
  Values gate = random_values(E * D, 0.3f, 2);  // the same on every rank
  Values w1 = rows_of(random_values(E * 2 * F * D, 0.3f, 3), first, first + E_local, 2 * F * D);
  Values w2 = rows_of(random_values(E * D * F, 0.3f, 4), first, first + E_local, D * F);
  Values grad_gate(gate.size());
  Values grad_w1(w1.size());
  Values grad_w2(w2.size());
  Values grad_out(x.size());

  Values losses;
  for (int step = 0; step < kSteps; ++step) {
    const MoeLayerWeights weights{
        .gate = {.weight = {gate.data(), {E, D}}},
        .experts = {.w1 = {w1.data(), {E_local, 2 * F, D}}, .w2 = {w2.data(), {E_local, D, F}}}};
    MoeForwardResult forward =
        layer.forward({.weights = weights, .x = {x.data(), {num_tokens, D}}});

    float loss = 0.0f;
    for (size_t i = 0; i < x.size(); ++i) {
      const float difference = forward.out.view.as<float>()[i] - targets[i];
      loss += 0.5f * difference * difference / T;
      grad_out[i] = difference / T;
    }
    layer.backward({.weights = weights,
                    .x = {x.data(), {num_tokens, D}},
                    .grad_out = {grad_out.data(), {num_tokens, D}},
                    .saved = &forward.saved,
                    .grads = {.gate = {grad_gate.data(), {E, D}},
                              .experts = {.w1 = {grad_w1.data(), {E_local, 2 * F, D}},
                                          .w2 = {grad_w2.data(), {E_local, D, F}}}}});

    const TensorView own[] = {{grad_gate.data(), {E, D}}, {&loss, {1}}};
    group.all_reduce(own);
    descend(gate, grad_gate);
    descend(w1, grad_w1);
    descend(w2, grad_w2);
    losses.push_back(loss);
  }
  return losses;
}

Values train_on(int num_ranks) {
  Values losses;
  run_ranks(num_ranks, [&](Group& group) {
    const Values own = train(group);
    if (group.rank() == 0) losses = own;
  });
  return losses;
}

}  // namespace

int main() {
  const Values four = train_on(4);
  const Values one = train_on(1);
  float difference = 0.0f;
  for (size_t i = 0; i < one.size(); ++i) {
    difference = std::max(difference, std::abs(four[i] - one[i]) / one[i]);
  }
  for (size_t i = 0; i < one.size(); i += 12) {
    std::printf("step %2d: loss %.4f\n", static_cast<int>(i), four[i]);
  }
  std::printf("last loss %.4f; on one rank the losses differ by at most %.1e of their size\n",
              four.back(), difference);
  return four.back() < 0.5f * four.front() && difference < 1e-3f ? 0 : 1;
}
