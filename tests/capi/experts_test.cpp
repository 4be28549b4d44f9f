// Experts through the C API give the values of the C++ API.
#include "crossdock/experts.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int64_t E_local = 2;
constexpr int64_t D = 4;
constexpr int64_t F = 3;
constexpr int64_t R = 5;

std::vector<float> values(int64_t count, float first) {
  std::vector<float> made_values;
  for (int64_t i = 0; i < count; ++i) {
    made_values.push_back(first + 0.125F * static_cast<float>(i % 7));
  }
  return made_values;
}

TEST(CExperts, ForwardAndBackwardHaveTheValuesOfTheCppApi) {
  const std::vector<float> w1 = values(E_local * 2 * F * D, -0.25F);
  const std::vector<float> w2 = values(E_local * D * F, -0.5F);
  const std::vector<float> rows = values(R * D, -0.375F);
  const std::vector<float> grad_y = values(R * D, 0.25F);
  const int64_t starts[] = {0, 2, R};
  const int64_t counts[] = {2, 3};
  const Segments segments{.starts = starts, .counts = counts, .num_segments = E_local};

  const Experts experts({.num_local_experts = E_local, .width = D, .inner = F});
  const ExpertWeights weights{.w1 = {w1.data(), {E_local, 2 * F, D}},
                              .w2 = {w2.data(), {E_local, D, F}}};
  std::vector<float> y(rows.size());
  std::vector<float> grad_rows(rows.size());
  std::vector<float> grad_w1(w1.size());
  ExpertsSaved saved = experts.forward({.weights = weights,
                                        .rows = {rows.data(), {R, D}},
                                        .segments = segments,
                                        .y = {y.data(), {R, D}}});
  experts.backward_dx({.weights = weights,
                       .rows = {rows.data(), {R, D}},
                       .segments = segments,
                       .grad_y = {grad_y.data(), {R, D}},
                       .saved = &saved,
                       .grad_rows = {grad_rows.data(), {R, D}}});
  experts.backward_dw({.rows = {rows.data(), {R, D}},
                       .segments = segments,
                       .grad_y = {grad_y.data(), {R, D}},
                       .saved = &saved,
                       .grads = {.w1 = {grad_w1.data(), {E_local, 2 * F, D}}}});

  auto config = made<crossdock_experts_config>();
  config.num_local_experts = E_local;
  config.width = D;
  config.inner = F;
  config.dtype = CROSSDOCK_F32;
  crossdock_experts* c_experts = nullptr;
  ASSERT_OK(crossdock_experts_create(&config, &c_experts));
  std::vector<float> c_y(rows.size());
  std::vector<float> c_grad_rows(rows.size());
  std::vector<float> c_grad_w1(w1.size());
  auto forward = made<crossdock_experts_forward_args>();
  forward.weights.w1 = crossdock_tensor_3d(w1.data(), CROSSDOCK_F32, E_local, 2 * F, D);
  forward.weights.w2 = crossdock_tensor_3d(w2.data(), CROSSDOCK_F32, E_local, D, F);
  forward.segments = {.starts = starts, .counts = counts, .num_segments = E_local};
  forward.rows = tensor(rows, R, D);
  forward.y = tensor(c_y, R, D);
  crossdock_experts_saved* c_saved = nullptr;
  ASSERT_OK(crossdock_experts_forward(c_experts, &forward, &c_saved));
  auto backward = made<crossdock_experts_backward_args>();
  backward.weights = forward.weights;
  backward.segments = forward.segments;
  backward.rows = forward.rows;
  backward.grad_y = tensor(grad_y, R, D);
  backward.grad_rows = tensor(c_grad_rows, R, D);
  backward.grads.w1 = crossdock_tensor_3d(c_grad_w1.data(), CROSSDOCK_F32, E_local, 2 * F, D);
  ASSERT_OK(crossdock_experts_backward_dx(c_experts, &backward, c_saved));
  ASSERT_OK(crossdock_experts_backward_dw(c_experts, &backward, c_saved));
  EXPECT_EQ(c_y, y);
  EXPECT_EQ(c_grad_rows, grad_rows);
  EXPECT_EQ(c_grad_w1, grad_w1);
  crossdock_experts_saved_destroy(c_saved);
  crossdock_experts_destroy(c_experts);
}

TEST(CExperts, ADtypeMustBeSet) {
  auto config = made<crossdock_experts_config>();
  crossdock_experts* experts = nullptr;
  EXPECT_EQ(crossdock_experts_create(&config, &experts), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "crossdock_experts_config: dtype must be one of CROSSDOCK_F64 (1) to CROSSDOCK_BOOL "
               "(10), got 0");
}

}  // namespace
}  // namespace crossdock::capi_test
