#include <cstring>

#include "bench/cuda_device.hpp"
#include "bench/cuda_gate.hpp"
#include "bench/cuda_memory.hpp"

namespace crossdock::bench {
namespace {

// Entry 0 counts how often the gate was opened, entry r how often rank r has arrived. Each is
// written by one rank only, because atomic operations may not work across GPUs.

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

__device__ void wait_for(const volatile unsigned* word, unsigned value) {
  const unsigned long long begin = now_ns();
  while (*word < value && now_ns() - begin < kMostNs) {
  }
}

// Returns the new value. There is no fence, which would delay what is timed: no data passes through
// the gate.
__device__ unsigned count_up(volatile unsigned* word) {
  const unsigned value = *word + 1;
  *word = value;
  return value;
}

// Each thread waits for one rank.
__global__ void await_others_kernel(const unsigned* words, int num_ranks) {
  const volatile unsigned* shared = words;
  const unsigned replay = shared[0] + 1;
  for (int rank = 1 + static_cast<int>(threadIdx.x); rank < num_ranks; rank += blockDim.x) {
    wait_for(shared + rank, replay);
  }
}

__global__ void open_kernel(unsigned* words) {
  allow_next_kernel();
  count_up(words);
}

__global__ void pass_kernel(unsigned* words, int rank) {
  allow_next_kernel();
  const unsigned replay = count_up(words + rank);
  wait_for(words, replay);
}

// In GPU memory if all ranks share one GPU, otherwise in host memory, which all GPUs reach.
std::shared_ptr<unsigned> make_words(int num_ranks, cudaStream_t stream) {
  const size_t num_bytes = static_cast<size_t>(num_ranks) * sizeof(unsigned);
  if (num_gpus_of(num_ranks) == 1) {
    const OwnedTensor words = device_tensor(DType::kU8, {static_cast<int64_t>(num_bytes)}, stream);
    check_cuda(cudaMemsetAsync(words.view.data, 0, num_bytes, stream), "cudaMemsetAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return {words.owner, static_cast<unsigned*>(words.view.data)};
  }
  void* words = nullptr;
  check_cuda(cudaHostAlloc(&words, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped),
             "cudaHostAlloc");
  std::memset(words, 0, num_bytes);
  return {static_cast<unsigned*>(words), [](unsigned* memory) { cudaFreeHost(memory); }};
}

}  // namespace

StartGate::StartGate(int num_ranks, cudaStream_t stream)
    : num_ranks_(num_ranks), words_(make_words(num_ranks, stream)) {}

void StartGate::queue_await_others(cudaStream_t stream) const {
  await_others_kernel<<<1, 32, 0, stream>>>(words_.get(), num_ranks_);
  check_cuda(cudaGetLastError(), "await_others_kernel");
}

void StartGate::queue_open(cudaStream_t stream) const {
  open_kernel<<<1, 1, 0, stream>>>(words_.get());
  check_cuda(cudaGetLastError(), "open_kernel");
}

void StartGate::queue_pass(int rank, cudaStream_t stream) const {
  pass_kernel<<<1, 1, 0, stream>>>(words_.get(), rank);
  check_cuda(cudaGetLastError(), "pass_kernel");
}

}  // namespace crossdock::bench
