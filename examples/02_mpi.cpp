// A whole MoE layer on MPI processes, trained for a few steps:
//
//   mpirun -np 4 build/release/examples/example_02_mpi
//
// Each process has its own tokens and its share of the experts. The layer finds the other processes
// through the group; no other MPI call is needed.
#include <crossdock/crossdock.hpp>
#include <cstdio>
#include <random>

using namespace crossdock;

namespace {

constexpr int64_t D = 32;  // token width
constexpr int64_t F = 48;  // inner width of an expert
constexpr int64_t E = 8;   // experts in all

std::vector<float> random_values(int64_t count, float scale, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

}  // namespace

int main() {
  Group group(make_mpi_communicator());
  const auto rank = static_cast<unsigned>(group.rank());

  MoeLayerConfig config;
  config.router.num_experts = E;
  config.router.top_k = 2;
  config.router.width = D;
  config.router.normalise = true;
  config.experts.inner = F;
  MoeLayer layer(group, config);

  // Parameters and gradients are yours; the layer gets views. The gate is identical on every rank.
  const int64_t E_local = layer.config().experts.num_local_experts;
  const std::vector<float> gate = random_values(E * D, 0.2f, 1);
  std::vector<float> w1 = random_values(E_local * 2 * F * D, 0.2f, 10 + rank);
  std::vector<float> w2 = random_values(E_local * D * F, 0.2f, 20 + rank);
  std::vector<float> grad_w1(w1.size());
  std::vector<float> grad_w2(w2.size());

  // Any number of tokens, different on every rank. The experts learn to return their tokens.
  const int64_t T = 16 + 5 * group.rank();
  const std::vector<float> x = random_values(T * D, 1.0f, 30 + rank);
  std::vector<float> grad_out(x.size());

  float first_loss = 0.0f;
  float loss = 0.0f;
  for (int step = 0; step < 20; ++step) {
    const MoeLayerWeights weights{
        .gate = {.weight = {gate.data(), {E, D}}},
        .experts = {.w1 = {w1.data(), {E_local, 2 * F, D}}, .w2 = {w2.data(), {E_local, D, F}}}};
    MoeForwardResult forward = layer.forward({.weights = weights, .x = {x.data(), {T, D}}});

    loss = 0.0f;
    for (size_t i = 0; i < x.size(); ++i) {
      grad_out[i] = forward.out.view.as<float>()[i] - x[i];
      loss += 0.5f * grad_out[i] * grad_out[i] / static_cast<float>(x.size());
    }
    if (step == 0) first_loss = loss;

    layer.backward({.weights = weights,
                    .x = {x.data(), {T, D}},
                    .grad_out = {grad_out.data(), {T, D}},
                    .saved = &forward.saved,
                    .grads = {.experts = {.w1 = {grad_w1.data(), {E_local, 2 * F, D}},
                                          .w2 = {grad_w2.data(), {E_local, D, F}}}}});
    for (size_t i = 0; i < w1.size(); ++i) w1[i] -= 0.003f * grad_w1[i];
    for (size_t i = 0; i < w2.size(); ++i) w2[i] -= 0.003f * grad_w2[i];
  }
  std::printf("rank %d of %d: loss of its %d tokens %.4f -> %.4f\n", group.rank(), group.size(),
              static_cast<int>(T), first_loss, loss);
  return loss < first_loss ? 0 : 1;
}
