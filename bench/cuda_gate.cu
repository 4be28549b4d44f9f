#include "bench/cuda_gate.hpp"
#include "bench/cuda_memory.hpp"

namespace crossdock::bench {
namespace {

// Both counters only increase.
struct GateWords {
  unsigned arrived;  // ranks, summed over replays
  unsigned opened;   // replays
};

constexpr unsigned long long kMostNs = 5'000'000'000;  // limit of every wait

// Allows the next kernel to launch early, as it would after a kernel that computes.
__device__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ unsigned long long now_ns() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

__device__ void wait_for(const unsigned* word, unsigned value) {
  const unsigned long long begin = now_ns();
  while (*static_cast<const volatile unsigned*>(word) < value && now_ns() - begin < kMostNs) {
  }
  __threadfence();
}

__global__ void await_others_kernel(const GateWords* words, unsigned num_others) {
  wait_for(&words->arrived, (words->opened + 1) * num_others);
}

__global__ void open_kernel(GateWords* words) {
  allow_next_kernel();
  atomicAdd(&words->opened, 1);
}

__global__ void pass_kernel(GateWords* words, unsigned num_others) {
  allow_next_kernel();
  const unsigned replay = atomicAdd(&words->arrived, 1) / num_others;
  wait_for(&words->opened, replay + 1);
}

}  // namespace

StartGate::StartGate(int num_ranks, cudaStream_t stream)
    : num_ranks_(num_ranks), words_(device_tensor(DType::kU8, {sizeof(GateWords)}, stream)) {
  check_cuda(cudaMemsetAsync(words_.view.data, 0, sizeof(GateWords), stream), "cudaMemsetAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void StartGate::queue_await_others(cudaStream_t stream) const {
  await_others_kernel<<<1, 1, 0, stream>>>(static_cast<const GateWords*>(words_.view.data),
                                           static_cast<unsigned>(num_ranks_ - 1));
  check_cuda(cudaGetLastError(), "await_others_kernel");
}

void StartGate::queue_open(cudaStream_t stream) const {
  open_kernel<<<1, 1, 0, stream>>>(static_cast<GateWords*>(words_.view.data));
  check_cuda(cudaGetLastError(), "open_kernel");
}

void StartGate::queue_pass(cudaStream_t stream) const {
  pass_kernel<<<1, 1, 0, stream>>>(static_cast<GateWords*>(words_.view.data),
                                   static_cast<unsigned>(num_ranks_ - 1));
  check_cuda(cudaGetLastError(), "pass_kernel");
}

}  // namespace crossdock::bench
