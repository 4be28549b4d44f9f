// The C API with memory on a GPU: the caller's outputs and stream, release in another stream.
#include "crossdock/cuda.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "capi/c_ranks.hpp"
#include "capi/cuda_stream.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t D = Case::D;
constexpr int64_t K = Case::K;

/// Memory on the thread's GPU.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t num_bytes) {
    EXPECT_CUDA(cudaGetDevice(&device_));
    EXPECT_CUDA(cudaMalloc(&data_, num_bytes + 1));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <typename T>
  void fill(const std::vector<T>& values) {
    EXPECT_CUDA(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  crossdock_tensor tensor(int32_t dtype, int64_t rows, int64_t columns) const {
    crossdock_tensor made_tensor = crossdock_tensor_2d(data_, dtype, rows, columns);
    made_tensor.device_kind = CROSSDOCK_CUDA;
    made_tensor.device_index = device_;
    return made_tensor;
  }

 private:
  int device_ = 0;
  void* data_ = nullptr;
};

std::vector<double> to_host(const crossdock_tensor& tensor, cudaStream_t stream) {
  std::vector<float> values(static_cast<size_t>(tensor.shape[0] * tensor.shape[1]));
  EXPECT_CUDA(cudaMemcpyAsync(values.data(), tensor.data, values.size() * sizeof(float),
                              cudaMemcpyDeviceToHost, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  return doubles(values);
}

reference::LayerOutput expected() {
  reference::LayerInput input{.config = {.num_experts = Case::E, .top_k = K, .width = D}};
  for (int rank = 0; rank < kRanks; ++rank) input.ranks.push_back(Case(rank).reference_input());
  return reference::run_layer(input);
}

TEST(CApiOnAGpu, GivenAndProvidedOutputsHaveTheReferencesValues) {
  if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  const reference::LayerOutput wanted = expected();
  run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
    const auto r = static_cast<size_t>(rank);
    const Case input(rank);
    select_gpu(rank);
    const Stream stream;
    const Stream other_stream;
    DeviceMemory ids(input.expert_ids.size() * sizeof(int32_t));
    DeviceMemory weights(input.weights.size() * sizeof(float));
    DeviceMemory x(input.x.size() * sizeof(float));
    DeviceMemory grad_out(input.x.size() * sizeof(float));
    ids.fill(input.expert_ids);
    weights.fill(input.weights);
    x.fill(input.x);
    grad_out.fill(input.grad_out);

    crossdock_dispatcher* dispatcher = nullptr;
    const auto config = Case::config();
    ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
    auto options = made<crossdock_device_options>();
    options.stream = stream.get();
    ASSERT_OK(crossdock_set_device_options(dispatcher, &options));
    auto routing = made<crossdock_routing>();
    routing.expert_ids = ids.tensor(CROSSDOCK_I32, input.T, K);
    routing.weights = weights.tensor(CROSSDOCK_F32, input.T, K);
    crossdock_plan* plan = nullptr;
    ASSERT_OK(crossdock_plan_create(dispatcher, &routing, &plan));
    auto info = made<crossdock_plan_info>();
    ASSERT_OK(crossdock_plan_describe(plan, &info));
    const int64_t R = info.capacity_rows;

    auto args = made<crossdock_dispatch_args>();
    args.x = x.tensor(CROSSDOCK_F32, input.T, D);
    auto sent = made<crossdock_dispatch_result>();
    const DeviceMemory rows(static_cast<size_t>(R * D) * sizeof(float));
    sent.rows.tensor = rows.tensor(CROSSDOCK_F32, R, D);
    ASSERT_OK(crossdock_dispatch(dispatcher, plan, &args, &sent));
    EXPECT_EQ(to_host(sent.rows.tensor, stream.get()), wanted.rows[r]);

    auto back_args = made<crossdock_combine_backward_args>();
    back_args.grad_out = grad_out.tensor(CROSSDOCK_F32, input.T, D);
    back_args.y = sent.rows.tensor;
    auto back = made<crossdock_combine_backward_result>();
    const DeviceMemory grad_rows(static_cast<size_t>(R * D) * sizeof(float));
    back.grad_rows.tensor = grad_rows.tensor(CROSSDOCK_F32, R, D);
    ASSERT_OK(crossdock_combine_backward(dispatcher, plan, &back_args, &back));
    EXPECT_EQ(to_host(back.grad_rows.tensor, stream.get()), wanted.grad_y[r]);
    EXPECT_EQ(to_host(back.grad_weights.tensor, stream.get()), wanted.grad_weights[r]);

    crossdock_output out{};
    ASSERT_OK(crossdock_combine(dispatcher, plan, &sent.rows.tensor, &out));
    EXPECT_CUDA(cudaStreamSynchronize(stream.get()));
    EXPECT_EQ(to_host(out.tensor, other_stream.get()), wanted.out[r]);
    EXPECT_OK(crossdock_output_release(&out, other_stream.get()));
    EXPECT_OK(crossdock_output_release(&back.grad_weights, nullptr));
    EXPECT_CUDA(cudaStreamSynchronize(stream.get()));
    crossdock_plan_destroy(plan);
    crossdock_dispatcher_destroy(dispatcher);
  });
}

}  // namespace
}  // namespace crossdock::capi_test
