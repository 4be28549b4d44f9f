#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "dispatch/cuda/tensors.hpp"
#include "router/router_case.hpp"

namespace crossdock {

/// Everything that a router computes from one input, on the host.
struct RouterValues {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> logits;
  std::vector<int64_t> routes_per_expert;
  std::vector<int64_t> num_tokens;
  RouterLosses losses;
  std::vector<float> grad_logits;
  std::vector<double> grad_x;  // rounded to the dtype of x
  std::vector<float> grad_gate;
  std::vector<float> grad_bias;

  bool operator==(const RouterValues& other) const {
    const auto same = [](const auto& a, const auto& b) {  // NaN included
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return ids == other.ids && same(weights, other.weights) && same(logits, other.logits) &&
           routes_per_expert == other.routes_per_expert && num_tokens == other.num_tokens &&
           losses.aux == other.losses.aux && losses.z == other.losses.z &&
           same(grad_logits, other.grad_logits) && same(grad_x, other.grad_x) &&
           same(grad_gate, other.grad_gate) && same(grad_bias, other.grad_bias);
  }
};

/// How the backward of an input is called.
struct BackwardCase {
  std::vector<double> grad_weights;  // [T, K]; empty: none
  double grad_losses = 0.5;
  bool accumulate = false;    // adds to the initial values below
  bool only_weights = false;  // requests no gradients of bias and logits
};

/// The initial values of outputs that are accumulated: small integers.
inline std::vector<double> initial_values(int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 7) - 3.0;
  return values;
}

template <typename T>
std::vector<T> values_of(const std::vector<std::byte>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Runs an input where its tensors are: `Place` copies tensors there and back.
template <typename AnyRouter, typename Place>
RouterValues run_router(const AnyRouter& router, const RouteArgs& host,
                        const BackwardCase& backward, const Place& place) {
  const RouterConfig& config = router.config();
  const int64_t T = host.x.num_rows();
  const int64_t E = config.num_experts;
  std::vector<OwnedTensor> kept;
  const auto there = [&](const ConstTensorView& tensor) {
    if (!tensor.given()) return tensor;
    kept.push_back(place.put(tensor));
    return ConstTensorView(kept.back().view);
  };
  RouteArgs args = host;
  args.x = there(host.x);
  args.gate = {.weight = there(host.gate.weight), .bias = there(host.gate.bias)};
  args.expert_bias = there(host.expert_bias);
  args.mask = there(host.mask);
  args.sequence_ids = there(host.sequence_ids);
  args.forced_ids = there(host.forced_ids);
  args.token_ids = there(host.token_ids);
  args.stream = place.stream();
  const RouterOutput output = router.route(args);
  const RouterLosses losses = router.losses(output, {}, place.stream());

  const auto make = [&](DType dtype, const Shape& shape) {
    const auto count = static_cast<size_t>(shape.num_elements());
    const OwnedTensor filled =
        reference::to_tensor(dtype, shape,
                             backward.accumulate ? initial_values(shape.num_elements())
                                                 : std::vector<double>(count, std::nan("")));
    return place.put(filled.view);
  };
  const OwnedTensor grad_x = make(config.dtype, {T, config.width});
  const OwnedTensor grad_gate = make(DType::kF32, {E, config.width});
  const OwnedTensor grad_bias = make(DType::kF32, {E});
  const OwnedTensor grad_logits = make(DType::kF32, {T, E});
  OwnedTensor grad_weights;
  if (!backward.grad_weights.empty() || T == 0) {
    const OwnedTensor given =
        reference::to_tensor(DType::kF32, {T, config.top_k}, backward.grad_weights);
    grad_weights = place.put(given.view);
  }
  const bool wants_all = !backward.only_weights;
  router.backward({.x = args.x,
                   .gate = args.gate,
                   .output = &output,
                   .grad_weights = grad_weights.view,
                   .grad_losses = backward.grad_losses,
                   .grad_x = grad_x.view,
                   .accumulate_x = backward.accumulate,
                   .grad_gate = grad_gate.view,
                   .grad_bias = wants_all ? TensorView(grad_bias.view) : TensorView{},
                   .accumulate_gate = backward.accumulate,
                   .grad_logits = wants_all ? TensorView(grad_logits.view) : TensorView{},
                   .stream = place.stream()});

  RouterValues values;
  const Routing routing = output.routing();
  values.ids = values_of<int32_t>(place.get(routing.expert_ids));
  values.weights = values_of<float>(place.get(routing.weights));
  values.logits = values_of<float>(place.get(output.logits.view(DType::kF32, {T, E})));
  for (int64_t t = 0; host.mask.given() && t < T; ++t) {
    const bool is_padding = static_cast<const bool*>(host.mask.data)[t];  // undefined there
    if (is_padding) std::fill_n(values.logits.begin() + t * E, E, 0.0F);
  }
  const RouterStatistics statistics = output.statistics.on_host(place.stream());
  values.routes_per_expert = statistics.routes_per_expert;
  values.num_tokens = statistics.num_tokens;
  values.losses = losses.on_host(place.stream());
  values.grad_logits = values_of<float>(place.get(grad_logits.view));
  const std::vector<std::byte> x_bytes = place.get(grad_x.view);
  values.grad_x =
      reference::to_values(ConstTensorView(x_bytes.data(), config.dtype, {T, config.width}));
  values.grad_gate = values_of<float>(place.get(grad_gate.view));
  values.grad_bias = values_of<float>(place.get(grad_bias.view));
  return values;
}

/// Host memory.
struct OnHost {
  static OwnedTensor put(const ConstTensorView& host) {
    auto memory = std::make_shared<std::vector<std::byte>>(bytes_of(host));
    return {.view = TensorView(memory->data(), host.dtype, host.shape), .owner = memory};
  }
  static std::vector<std::byte> get(const ConstTensorView& tensor) { return bytes_of(tensor); }
  static Stream stream() { return {}; }
};

/// GPU 0.
struct OnGpu {
  const RankStream& rank_stream;

  OwnedTensor put(const ConstTensorView& host) const { return to_device(host, rank_stream); }
  std::vector<std::byte> get(const ConstTensorView& tensor) const {
    return to_host(tensor, rank_stream);
  }
  Stream stream() const { return rank_stream.view(); }
};

/// Tokens and a gate whose logits are exact in any order of sums and have ties: x is -1, 0 or 1,
/// the gate has multiples of 1/16, and some experts have the same row of it.
inline reference::RouterInput exact_input(const RouterConfig& config, int64_t T,
                                          uint64_t seed = 5) {
  std::mt19937_64 generator(seed);
  reference::RouterInput input;
  input.config = config;
  input.T = T;
  input.x.resize(static_cast<size_t>(T * config.width));
  for (double& value : input.x) value = static_cast<double>(generator() % 3) - 1.0;
  const auto D = static_cast<size_t>(config.width);
  input.gate.resize(static_cast<size_t>(config.num_experts) * D);
  for (size_t i = 0; i < input.gate.size(); ++i) {
    const size_t e = i / D;
    const bool is_twin = e % 4 == 3;  // has the row of expert e - 2
    input.gate[i] =
        is_twin ? input.gate[i - 2 * D] : (static_cast<double>(generator() % 17) - 8.0) / 16.0;
  }
  return input;
}

/// An expert bias that puts a third of the experts first, whatever the scores.
inline std::vector<double> separating_bias(const RouterConfig& config) {
  double size = 1.0;
  if (config.score == Score::kSqrtSoftplus) size = 4.0;
  if (config.score == Score::kSoftmaxAfterTopK) size = 64.0;
  std::vector<double> bias(static_cast<size_t>(config.num_experts));
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = e % 3 == 1 ? size : 0.0;
  return bias;
}

/// Each value within `relative` of the largest, or of `least` if that is larger.
template <typename T>
void expect_near(const char* name, const std::vector<T>& got, const std::vector<T>& wanted,
                 double relative, double least = 1e-3) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  double largest = least;
  for (const T value : wanted) largest = std::max(largest, std::abs(static_cast<double>(value)));
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(wanted[i]));
    ASSERT_LE(error, relative * largest)
        << name << " at " << i << ": " << got[i] << ", must be " << wanted[i];
  }
}

/// The GPU's values equal the CPU's: ids, counts and, if `exact_logits`, logits exactly; grad_x up
/// to the rounding of its dtype; everything else up to the rounding of fp32.
inline void expect_values(const RouterValues& got, const RouterValues& wanted, DType dtype,
                          bool exact_logits) {
  ASSERT_EQ(got.ids, wanted.ids);
  EXPECT_EQ(got.routes_per_expert, wanted.routes_per_expert);
  EXPECT_EQ(got.num_tokens, wanted.num_tokens);
  if (exact_logits) {
    ASSERT_EQ(got.logits, wanted.logits);
  } else {
    expect_near("logits", got.logits, wanted.logits, 2e-6);
  }
  expect_near("weights", got.weights, wanted.weights, 2e-6);
  EXPECT_NEAR(got.losses.aux, wanted.losses.aux, 2e-6 * wanted.losses.aux);
  EXPECT_NEAR(got.losses.z, wanted.losses.z, 2e-6 * wanted.losses.z);
  EXPECT_NEAR(got.losses.aux_terms.sequence, wanted.losses.aux_terms.sequence,
              2e-6 * wanted.losses.aux_terms.sequence);
  expect_near("grad_logits", got.grad_logits, wanted.grad_logits, 1e-5);
  const double rounding = dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 1e-3 : 8e-3;
  expect_near("grad_x", got.grad_x, wanted.grad_x, rounding);
  expect_near("grad_gate", got.grad_gate, wanted.grad_gate, 1e-5);
  expect_near("grad_bias", got.grad_bias, wanted.grad_bias, 1e-5);
}

}  // namespace crossdock
