#include "bench/cuda_link.hpp"

#include <cuda_runtime.h>

#include <chrono>
#include <memory>
#include <vector>

#include "bench/cuda_memory.hpp"
#include "bench/median.hpp"

namespace crossdock::bench {
namespace {

constexpr int64_t kBytesPerGpu = int64_t{4} << 30;  // sent in one round
constexpr int kRounds = 5;

// Plain memory: copies between GPUs do not pass through the host if they have access to it.
std::shared_ptr<std::byte> allocate(int64_t num_bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, static_cast<size_t>(num_bytes)), "cudaMalloc");
  return {static_cast<std::byte*>(memory), [](std::byte* pointer) { cudaFree(pointer); }};
}

// Copies from one GPU to another, in a stream of its own.
class LinkCopy {
 public:
  LinkCopy(int from, int to, int64_t num_bytes) : from_(from), to_(to), num_bytes_(num_bytes) {
    const OnGpu on_gpu(from);
    int can_access = 0;
    check_cuda(cudaDeviceCanAccessPeer(&can_access, from, to), "cudaDeviceCanAccessPeer");
    if (can_access != 0 && cudaDeviceEnablePeerAccess(to, 0) != cudaSuccess) {
      cudaGetLastError();  // it was already enabled
    }
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    source_ = allocate(num_bytes);
    const OnGpu on_other(to);
    target_ = allocate(num_bytes);
  }
  ~LinkCopy() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  LinkCopy(const LinkCopy&) = delete;
  LinkCopy& operator=(const LinkCopy&) = delete;

  void queue() const {
    const OnGpu on_gpu(from_);
    check_cuda(cudaMemcpyPeerAsync(target_.get(), to_, source_.get(), from_,
                                   static_cast<size_t>(num_bytes_), stream_),
               "cudaMemcpyPeerAsync");
  }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  int from_;
  int to_;
  int64_t num_bytes_;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<std::byte> source_;
  std::shared_ptr<std::byte> target_;
};

}  // namespace

double measure_link_rate(int num_gpus) {
  if (num_gpus < 2) return 0.0;
  std::vector<std::unique_ptr<LinkCopy>> copies;
  for (int from = 0; from < num_gpus; ++from) {
    for (int to = 0; to < num_gpus; ++to) {
      if (from == to) continue;
      copies.push_back(std::make_unique<LinkCopy>(from, to, kBytesPerGpu / (num_gpus - 1)));
    }
  }
  std::vector<double> seconds;
  for (int round = 0; round <= kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (const auto& copy : copies) copy->queue();
    for (const auto& copy : copies) copy->wait();
    const std::chrono::duration<double> duration = std::chrono::steady_clock::now() - begin;
    if (round > 0) seconds.push_back(duration.count());
  }
  return static_cast<double>(kBytesPerGpu) / median(seconds) * 1e-9;
}

}  // namespace crossdock::bench
