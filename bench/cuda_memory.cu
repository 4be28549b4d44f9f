#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "bench/cuda_memory.hpp"
#include "bench/median.hpp"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

constexpr int64_t kFlushBytes = int64_t{512} << 20;
constexpr int64_t kCopyBytes = int64_t{4} << 30;
constexpr int kCopies = 7;
constexpr size_t kBlockSize = size_t{1} << 20;  // of random values

// A thread writes words at a stride, each a hash of its index.
__global__ void fill_kernel(uint64_t* words, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    uint64_t hash = static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15ULL;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
    words[i] = hash ^ (hash >> 27);
  }
}

// A thread reads vectors at a stride; the sum keeps the compiler from removing the loads.
__global__ void read_kernel(const ulonglong2* vectors, int64_t count, unsigned long long* sum) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  unsigned long long bits = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    bits ^= vectors[i].x ^ vectors[i].y;
  }
  if (bits == 1) *sum = bits;
}

OwnedTensor random_bytes(int64_t num_bytes, cudaStream_t stream) {
  OwnedTensor memory = device_tensor(DType::kU8, {num_bytes}, stream);
  fill_kernel<<<1024, 256, 0, stream>>>(static_cast<uint64_t*>(memory.view.data), num_bytes / 8);
  check_cuda(cudaGetLastError(), "fill_kernel");
  return memory;
}

}  // namespace

void check_cuda(cudaError_t status, const std::string& call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kCuda, call + ": " + cudaGetErrorString(status));
}

OnGpu::OnGpu(int device) {
  check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

OnGpu::~OnGpu() {
  cudaSetDevice(previous_);
}

int gpu_of(cudaStream_t stream) {
  int device = 0;
  check_cuda(cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice");
  return device;
}

OwnedTensor device_tensor(DType dtype, const Shape& shape, cudaStream_t stream) {
  const auto num_bytes = static_cast<size_t>(shape.num_elements() * size_of(dtype));
  void* memory = nullptr;
  check_cuda(cudaMallocAsync(&memory, num_bytes + 1, stream), "cudaMallocAsync");
  check_cuda(cudaMemsetAsync(memory, 0xff, num_bytes, stream), "cudaMemsetAsync");
  const std::shared_ptr<void> owner(memory,
                                    [stream](void* pointer) { cudaFreeAsync(pointer, stream); });
  return {TensorView(memory, dtype, shape, {DeviceKind::kCuda, gpu_of(stream)}), owner};
}

OwnedTensor to_device(const ConstTensorView& host, cudaStream_t stream) {
  OwnedTensor copy = device_tensor(host.dtype, host.shape, stream);
  check_cuda(cudaMemcpyAsync(copy.view.data, host.data, static_cast<size_t>(host.num_bytes()),
                             cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  return copy;
}

OwnedTensor to_host(const ConstTensorView& tensor, int64_t num_rows, cudaStream_t stream) {
  const Shape shape = tensor.shape.rank() > 1 ? Shape{num_rows, tensor.shape[1]} : Shape{num_rows};
  const Buffer buffer(shape.num_elements() * size_of(tensor.dtype));
  check_cuda(cudaMemcpyAsync(buffer.data(), tensor.data, static_cast<size_t>(buffer.num_bytes()),
                             cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return {buffer.view(tensor.dtype, shape), buffer.owner()};
}

const std::vector<float>& random_values() {
  static const std::vector<float> kBlock = [] {
    std::vector<float> block(kBlockSize);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal(0.0f, 0.5f);
    for (float& value : block) value = to_float(to_bf16(normal(generator)));
    return block;
  }();
  return kBlock;
}

OwnedTensor random_tensor(const Shape& shape, cudaStream_t stream) {
  std::vector<BF16> block;
  for (const float value : random_values()) block.push_back(to_bf16(value));
  const OwnedTensor tensor = device_tensor(DType::kBF16, shape, stream);
  auto* data = static_cast<std::byte*>(tensor.view.data);
  const auto num_bytes = static_cast<size_t>(tensor.view.num_bytes());
  size_t filled = std::min(block.size() * sizeof(BF16), num_bytes);
  check_cuda(cudaMemcpyAsync(data, block.data(), filled, cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  for (size_t count = 0; filled < num_bytes; filled += count) {
    count = std::min(filled, num_bytes - filled);
    check_cuda(cudaMemcpyAsync(data + filled, data, count, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }
  return tensor;
}

CacheFlush::CacheFlush(std::vector<cudaStream_t> streams) : streams_(std::move(streams)) {
  for (const cudaStream_t stream : streams_) {
    const OnGpu on_gpu(gpu_of(stream));
    memories_.push_back(random_bytes(kFlushBytes, stream));
  }
}

void CacheFlush::run() const {
  for (size_t i = 0; i < streams_.size(); ++i) {
    const TensorView& memory = memories_[i].view;
    const OnGpu on_gpu(memory.device.index);
    read_kernel<<<528, 512, 0, streams_[i]>>>(static_cast<const ulonglong2*>(memory.data),
                                              kFlushBytes / 16,
                                              static_cast<unsigned long long*>(memory.data));
    check_cuda(cudaGetLastError(), "read_kernel");
  }
  for (size_t i = 1; i < streams_.size(); ++i) {
    check_cuda(cudaStreamSynchronize(streams_[i]), "cudaStreamSynchronize");
  }
}

double measure_copy_bandwidth(cudaStream_t stream) {
  const OwnedTensor from = random_bytes(kCopyBytes, stream);
  const OwnedTensor to = device_tensor(DType::kU8, {kCopyBytes}, stream);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> times;
  for (int i = 0; i <= kCopies; ++i) {
    cudaEventRecord(begin, stream);
    check_cuda(
        cudaMemcpyAsync(to.view.data, from.view.data, kCopyBytes, cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
    cudaEventRecord(end, stream);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    float milliseconds = 0.0f;
    cudaEventElapsedTime(&milliseconds, begin, end);
    if (i > 0) times.push_back(milliseconds);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return 2.0 * static_cast<double>(kCopyBytes) / (median(times) * 1e3);
}

}  // namespace crossdock::bench
