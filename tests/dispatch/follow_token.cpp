// Runs what tools/follow_token.py measures, on two ranks that are threads:
//
//   follow_token stack     prints the stack between MoeLayer::forward and the strategy of its
//   dispatch follow_token dispatch  leaves the coverage of one Dispatcher::dispatch follow_token
//   gpu       the same with tensors on a GPU
#include <execinfo.h>
#include <unistd.h>

#include <array>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "crossdock/crossdock.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#if CROSSDOCK_HAS_CUDA
#include <cuda_runtime.h>
#endif

extern "C" void __gcov_reset();
extern "C" void __gcov_dump();

namespace crossdock {
namespace {

constexpr int kRanks = 2;
constexpr int64_t T = 4;
constexpr int64_t K = 2;
constexpr int64_t E = 4;
constexpr int64_t D = 8;
constexpr int64_t F = 8;

class PrintsStack final : public ForwardingStrategy {
 public:
  PrintsStack() : ForwardingStrategy(make_strategy("direct")) {}

  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    if (call.group.rank() == 0 && std::string_view(call.operation) == "dispatch") {
      std::array<void*, 64> frames{};
      const int count = backtrace(frames.data(), frames.size());
      std::fflush(stdout);
      backtrace_symbols_fd(frames.data(), count, STDOUT_FILENO);
    }
    inner().scatter(call, parts);
  }
};

void print_stack() {
  run_ranks(kRanks, [](Group& group) {
    MoeLayerConfig config;
    config.router.num_experts = E;
    config.router.top_k = K;
    config.router.width = D;
    config.experts.inner = F;
    MoeLayer layer(group, config, {.strategy = std::make_unique<PrintsStack>()});
    const int64_t E_local = layer.config().experts.num_local_experts;
    std::vector<float> x(T * D);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) + 100 * group.rank();
    const std::vector<float> gate(E * D, 0.1f);
    const std::vector<float> w1(static_cast<size_t>(E_local * 2 * F * D), 0.1f);
    const std::vector<float> w2(static_cast<size_t>(E_local * D * F), 0.1f);
    const MoeLayerWeights weights{
        .gate = {.weight = {gate.data(), {E, D}}},
        .experts = {.w1 = {w1.data(), {E_local, 2 * F, D}}, .w2 = {w2.data(), {E_local, D, F}}}};
    static_cast<void>(layer.forward({.weights = weights, .x = {x.data(), {T, D}}}));
  });
}

// The memory of a tensor, on the device of the measurement. Never freed.
template <typename Value>
const Value* on_device(const std::vector<Value>& values, bool is_gpu) {
  if (!is_gpu) return (new std::vector<Value>(values))->data();
  void* memory = nullptr;
#if CROSSDOCK_HAS_CUDA
  if (cudaMalloc(&memory, values.size() * sizeof(Value)) != cudaSuccess ||
      cudaMemcpy(memory, values.data(), values.size() * sizeof(Value), cudaMemcpyHostToDevice) !=
          cudaSuccess) {
    std::abort();
  }
#endif
  return static_cast<const Value*>(memory);
}

void measure_dispatch(bool is_gpu) {
  std::barrier together(kRanks);
  run_ranks(kRanks, [&](Group& group) {
    const Device device{.kind = is_gpu ? DeviceKind::kCuda : DeviceKind::kCpu,
                        .index = is_gpu ? cuda_device_of(group) : -1};
    Dispatcher dispatcher(group, {.num_experts = E, .top_k = K, .width = D}, "direct");
    const std::vector<int32_t> ids = {0, 1, 1, 2, 2, 3, 3, 0};
    const Plan plan = dispatcher.plan(
        {.expert_ids = {on_device(ids, is_gpu), DType::kI32, {T, K}, device},
         .weights = {
             on_device(std::vector<float>(T * K, 0.5f), is_gpu), DType::kF32, {T, K}, device}});
    const float* x = on_device(std::vector<float>(T * D, 1.0f), is_gpu);
    together.arrive_and_wait();
    if (group.rank() == 0) __gcov_reset();
    together.arrive_and_wait();
    const DispatchResult sent = dispatcher.dispatch(plan, {.x = {x, DType::kF32, {T, D}, device}});
    together.arrive_and_wait();
    if (group.rank() == 0) {
      __gcov_dump();
      _exit(0);
    }
    together.arrive_and_wait();  // destroys nothing while rank 0 writes
  });
}

}  // namespace
}  // namespace crossdock

int main(int argc, char** argv) {
  const std::string_view what = argc == 2 ? argv[1] : "";
  if (what == "stack") {
    crossdock::print_stack();
  } else if (what == "dispatch" || what == "gpu") {
    crossdock::measure_dispatch(what == "gpu");
  } else {
    std::fputs("usage: follow_token stack|dispatch|gpu\n", stderr);
    return 2;
  }
  return 0;
}
