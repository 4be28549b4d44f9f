// Experts and layers on a GPU through the C API give the values of the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capi/c_ranks.hpp"
#include "capi/cuda_stream.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/dtype.hpp"

namespace crossdock::capi_test {
namespace {

using Values = std::vector<float>;

size_t bytes_of(int32_t dtype) {
  return dtype == CROSSDOCK_BF16 ? 2 : dtype == CROSSDOCK_F32 ? 4 : 8;
}

std::vector<std::byte> encoded(const Values& values, int32_t dtype) {
  std::vector<std::byte> bytes(values.size() * bytes_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = to_bf16(values[i]).bits;
    const void* from = dtype == CROSSDOCK_BF16 ? static_cast<const void*>(&half) : &values[i];
    std::memcpy(bytes.data() + i * bytes_of(dtype), from, bytes_of(dtype));
  }
  return bytes;
}

Values decoded(const std::vector<std::byte>& bytes, int32_t dtype) {
  Values values(bytes.size() / bytes_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    BF16 half{};
    if (dtype == CROSSDOCK_BF16) {
      std::memcpy(&half, bytes.data() + i * 2, 2);
      values[i] = to_float(half);
    } else {
      std::memcpy(&values[i], bytes.data() + i * 4, 4);
    }
  }
  return values;
}

/// The host, or the thread's GPU with a stream.
struct Place {
  bool is_gpu = false;
  int device = 0;
  cudaStream_t stream = nullptr;

  /// Memory for bytes; freed with the last copy of the pointer.
  std::shared_ptr<void> allocate(size_t num_bytes) const {
    void* data = nullptr;
    if (!is_gpu) return {std::malloc(num_bytes + 1), std::free};
    EXPECT_CUDA(cudaMalloc(&data, num_bytes + 1));
    return {data, [](void* memory) { cudaFree(memory); }};
  }
  void copy(void* to, const void* from, size_t num_bytes) const {
    if (!is_gpu) {
      std::memcpy(to, from, num_bytes);
      return;
    }
    EXPECT_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream));
    EXPECT_CUDA(cudaStreamSynchronize(stream));
  }
};

/// A tensor at a place. Outputs are initialised with NaN.
class Tensor {
 public:
  Tensor(const Place& place, int32_t dtype, std::vector<int64_t> shape, Values values = {})
      : place_(place), dtype_(dtype) {
    size_t count = 1;
    for (const int64_t size : shape) count *= static_cast<size_t>(size);
    if (values.empty()) values.assign(count, std::nanf(""));
    EXPECT_EQ(values.size(), count);
    const std::vector<std::byte> bytes = encoded(values, dtype);
    memory_ = place.allocate(bytes.size());
    place.copy(memory_.get(), bytes.data(), bytes.size());
    num_bytes_ = bytes.size();
    view.data = memory_.get();
    view.num_dims = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) view.shape[i] = shape[i];
    view.dtype = dtype;
    view.device_kind = place.is_gpu ? CROSSDOCK_CUDA : CROSSDOCK_CPU;
    view.device_index = place.device;
  }

  /// Waits for the stream.
  Values read() const {
    std::vector<std::byte> bytes(num_bytes_);
    place_.copy(bytes.data(), memory_.get(), num_bytes_);
    return decoded(bytes, dtype_);
  }

  crossdock_tensor view{};

 private:
  Place place_;
  int32_t dtype_;
  std::shared_ptr<void> memory_;
  size_t num_bytes_ = 0;
};

Values values(int64_t count, int64_t step) {
  Values found;
  for (int64_t i = 0; i < count; ++i) {
    found.push_back(static_cast<float>((i * step + i / 7) % 23 - 11) / 32.0F);
  }
  return found;
}

struct Named {
  std::string name;
  Values got;
};

/// The relative norm of the differences must be small.
void expect_close(const std::vector<Named>& gpu, const std::vector<Named>& cpu, double most) {
  ASSERT_EQ(gpu.size(), cpu.size());
  for (size_t i = 0; i < gpu.size(); ++i) {
    ASSERT_EQ(gpu[i].got.size(), cpu[i].got.size()) << gpu[i].name;
    double difference = 0;
    double norm = 0;
    for (size_t j = 0; j < gpu[i].got.size(); ++j) {
      difference += std::pow(gpu[i].got[j] - cpu[i].got[j], 2);
      norm += std::pow(cpu[i].got[j], 2);
    }
    EXPECT_GT(norm, 0) << gpu[i].name;
    EXPECT_LE(std::sqrt(difference / norm), most)
        << gpu[i].name << ", first " << gpu[i].got[0] << ", on the CPU " << cpu[i].got[0];
  }
}

double most_difference(int32_t dtype) {
  return dtype == CROSSDOCK_BF16 ? 1e-2 : 2e-3;
}

// On a GPU the gradients of w1 and w2 may have the experts' dtype.
int32_t gradient_dtype(const Place& place, int32_t dtype) {
  return place.is_gpu ? dtype : CROSSDOCK_F32;
}

// ---- Experts ----

constexpr int64_t kExperts = 3;
constexpr int64_t D = 32;
constexpr int64_t F = 24;
constexpr int64_t R = 40;  // the last 5 rows belong to no expert

std::vector<Named> run_experts(const Place& place, int32_t dtype) {
  const std::vector<int64_t> starts = {0, 20, 20, 35};
  const std::vector<int64_t> counts = {18, 0, 15};  // 2 pad rows, an expert without rows
  const std::shared_ptr<void> segments = place.allocate(7 * sizeof(int64_t));
  auto* const where = static_cast<int64_t*>(segments.get());
  place.copy(where, starts.data(), 4 * sizeof(int64_t));
  place.copy(where + 4, counts.data(), 3 * sizeof(int64_t));

  const Tensor w1(place, dtype, {kExperts, 2 * F, D}, values(kExperts * 2 * F * D, 5));
  const Tensor w2(place, dtype, {kExperts, D, F}, values(kExperts * D * F, 7));
  const Tensor rows(place, dtype, {R, D}, values(R * D, 11));
  const Tensor grad_y(place, dtype, {R, D}, values(R * D, 13));
  const Tensor row_weights(place, CROSSDOCK_F32, {R}, values(R, 3));
  const Tensor y(place, dtype, {R, D});
  const Tensor grad_rows(place, dtype, {R, D});
  const Tensor grad_row_weights(place, CROSSDOCK_F32, {R});
  const int32_t dw_dtype = gradient_dtype(place, dtype);
  const Tensor grad_w1(place, dw_dtype, {kExperts, 2 * F, D});
  const Tensor grad_w2(place, dw_dtype, {kExperts, D, F});

  auto config = made<crossdock_experts_config>();
  config.num_local_experts = kExperts;
  config.width = D;
  config.inner = F;
  config.dtype = dtype;
  crossdock_experts* experts = nullptr;
  EXPECT_OK(crossdock_experts_create(&config, &experts));

  auto forward = made<crossdock_experts_forward_args>();
  forward.weights.w1 = w1.view;
  forward.weights.w2 = w2.view;
  forward.segments = {.starts = where, .counts = where + 4, .num_segments = kExperts};
  forward.rows = rows.view;
  forward.y = y.view;
  forward.stream = place.stream;
  crossdock_experts_saved* saved = nullptr;
  EXPECT_OK(crossdock_experts_forward(experts, &forward, &saved));

  auto backward = made<crossdock_experts_backward_args>();
  backward.weights = forward.weights;
  backward.segments = forward.segments;
  backward.rows = rows.view;
  backward.row_weights = row_weights.view;
  backward.grad_y = grad_y.view;
  backward.grad_rows = grad_rows.view;
  backward.grad_row_weights = grad_row_weights.view;
  backward.grads.w1 = grad_w1.view;
  backward.grads.w2 = grad_w2.view;
  backward.stream = place.stream;
  EXPECT_OK(crossdock_experts_backward_dx(experts, &backward, saved));
  EXPECT_OK(crossdock_experts_backward_dw(experts, &backward, saved));
  std::vector<Named> found = {{"y", y.read()},
                              {"grad_rows", grad_rows.read()},
                              {"grad_row_weights", grad_row_weights.read()},
                              {"grad_w1", grad_w1.read()},
                              {"grad_w2", grad_w2.read()}};
  crossdock_experts_saved_destroy(saved);
  crossdock_experts_destroy(experts);
  return found;
}

class CApiOnAGpuDtypes : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }
};

TEST_P(CApiOnAGpuDtypes, ExpertsHaveTheValuesOfTheCpu) {
  const Stream stream;
  const Place gpu{.is_gpu = true, .stream = stream.get()};
  expect_close(run_experts(gpu, GetParam()), run_experts({}, GetParam()),
               most_difference(GetParam()));
}

// ---- Layers ----

constexpr int kRanks = 2;
constexpr int64_t E = 6;
constexpr int64_t E_local = E / kRanks;
constexpr int64_t K = 2;
constexpr int64_t T = 50;

struct Outcome {
  std::vector<Named> tensors;
  std::vector<double> losses = std::vector<double>(5);
  std::vector<int64_t> load = std::vector<int64_t>(E);
  std::vector<int64_t> dropped = std::vector<int64_t>(E);
};

crossdock_layer* make_layer(crossdock_group* group, int32_t dtype, int64_t max_rows) {
  auto router = made<crossdock_router_config>();
  router.num_experts = E;
  router.top_k = K;
  router.width = D;
  router.normalise = 1;
  router.aux_loss_coeff = 0.5;
  router.z_loss_coeff = 0.25;
  auto experts = made<crossdock_experts_config>();
  experts.inner = F;
  experts.dtype = dtype;
  auto dispatch = made<crossdock_dispatch_config>();
  dispatch.max_rows = max_rows;
  auto config = made<crossdock_layer_config>();
  config.router = &router;
  config.experts = &experts;
  config.dispatch = &dispatch;
  crossdock_layer* layer = nullptr;
  EXPECT_OK(crossdock_layer_create(group, &config, &layer));
  return layer;
}

Outcome run_layer(const Place& place, crossdock_layer* layer, int32_t dtype, int rank) {
  const Tensor gate(place, dtype, {E, D}, values(E * D, 5));
  const Tensor w1(place, dtype, {E_local, 2 * F, D}, values(E_local * 2 * F * D, 7 + rank));
  const Tensor w2(place, dtype, {E_local, D, F}, values(E_local * D * F, 11 + rank));
  const Tensor x(place, dtype, {T, D}, values(T * D, 13 + rank));
  const Tensor grad_out(place, dtype, {T, D}, values(T * D, 17 + rank));
  const Tensor out(place, dtype, {T, D});
  const Tensor grad_x(place, dtype, {T, D});
  const Tensor grad_gate(place, CROSSDOCK_F32, {E, D});
  const int32_t dw_dtype = gradient_dtype(place, dtype);
  const Tensor grad_w1(place, dw_dtype, {E_local, 2 * F, D});
  const Tensor grad_w2(place, dw_dtype, {E_local, D, F});

  Outcome outcome;
  auto forward = made<crossdock_layer_forward_args>();
  forward.weights.gate = gate.view;
  forward.weights.experts.w1 = w1.view;
  forward.weights.experts.w2 = w2.view;
  forward.x = x.view;
  auto result = made<crossdock_layer_forward_result>();
  result.out.tensor = out.view;
  crossdock_layer_saved* saved = nullptr;
  EXPECT_OK(crossdock_layer_forward(layer, &forward, &result, &saved));
  EXPECT_EQ(result.device_losses.num_dims, place.is_gpu ? 1 : 0);
  EXPECT_OK(crossdock_layer_saved_losses(saved, outcome.losses.data()));
  EXPECT_OK(crossdock_layer_saved_load(saved, outcome.load.data()));
  EXPECT_OK(crossdock_layer_saved_dropped(saved, outcome.dropped.data()));
  if (place.is_gpu) {
    std::vector<double> device_losses(5);
    place.copy(device_losses.data(), result.device_losses.data, 5 * sizeof(double));
    EXPECT_EQ(device_losses, outcome.losses);
    EXPECT_EQ(result.aux_loss, 0);
  }

  auto backward = made<crossdock_layer_backward_args>();
  backward.weights = forward.weights;
  backward.x = x.view;
  backward.grad_out = grad_out.view;
  backward.grads.gate = grad_gate.view;
  backward.grads.experts.w1 = grad_w1.view;
  backward.grads.experts.w2 = grad_w2.view;
  crossdock_output grad_x_output{};
  grad_x_output.tensor = grad_x.view;
  EXPECT_OK(crossdock_layer_backward(layer, &backward, saved, &grad_x_output));
  EXPECT_EQ(grad_x_output.owner, nullptr);
  outcome.tensors = {{"out", out.read()},
                     {"grad_x", grad_x.read()},
                     {"grad_gate", grad_gate.read()},
                     {"grad_w1", grad_w1.read()},
                     {"grad_w2", grad_w2.read()}};
  crossdock_layer_saved_destroy(saved);
  return outcome;
}

TEST_P(CApiOnAGpuDtypes, ALayerHasTheValuesOfTheCpu) {
  const int32_t dtype = GetParam();
  for (const int64_t max_rows : {int64_t{0}, kRanks * T * K}) {
    SCOPED_TRACE("max_rows " + std::to_string(max_rows));
    run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
      const int device = select_gpu(rank);
      const Stream stream;
      crossdock_layer* on_cpu = make_layer(group, dtype, 0);
      const Outcome cpu = run_layer({}, on_cpu, dtype, rank);
      crossdock_layer_destroy(on_cpu);

      crossdock_layer* layer = make_layer(group, dtype, max_rows);
      auto options = made<crossdock_device_options>();
      options.stream = stream.get();
      ASSERT_OK(crossdock_layer_set_device_options(layer, &options));
      for (int step = 0; step < 2; ++step) {
        const Place place{.is_gpu = true, .device = device, .stream = stream.get()};
        const Outcome gpu = run_layer(place, layer, dtype, rank);
        expect_close(gpu.tensors, cpu.tensors, most_difference(dtype));
        EXPECT_EQ(gpu.load, cpu.load);
        EXPECT_EQ(gpu.dropped, cpu.dropped);
        for (size_t i = 0; i < 5; ++i) EXPECT_NEAR(gpu.losses[i], cpu.losses[i], 1e-4) << i;
      }
      EXPECT_CUDA(cudaStreamSynchronize(stream.get()));
      crossdock_layer_destroy(layer);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CApiOnAGpuDtypes, testing::Values(CROSSDOCK_F32, CROSSDOCK_BF16),
                         [](const testing::TestParamInfo<int32_t>& dtype) {
                           return std::string(dtype.param == CROSSDOCK_BF16 ? "Bf16" : "Fp32");
                         });

}  // namespace
}  // namespace crossdock::capi_test
