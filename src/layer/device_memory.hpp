#pragma once

#include <cstdint>
#include <memory>

#include "crossdock/expert_shards.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// GPU memory for the layer's own steps. It is used in the order of the stream it was taken for,
/// and returns to a pool when released.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual OwnedTensor take(DType dtype, const Shape& shape, Stream stream) = 0;
  /// Sets all bytes of a tensor that was taken here.
  virtual void fill(const TensorView& tensor, uint8_t value, Stream stream) = 0;
  /// Copies between tensors of the same size on this GPU.
  virtual void copy(const ConstTensorView& from, const TensorView& to, Stream stream) = 0;
};

/// The stream in which a dispatcher of this group queues work when given `stream`.
Stream stream_of_calls(Group& group, Stream stream);

// In builds without CUDA, these throw Error(kUnsupported).

std::unique_ptr<DeviceMemory> make_device_memory(Device device);

/// Whether the stream is being captured into a graph.
bool is_captured(Stream stream, Device device);

// shard_routes and sum_over_shards for tensors on one GPU, with the bits of the CPU. Work is queued
// in `stream`. Builds without CUDA throw Error(kUnsupported).

/// Fills `sharded` [T, K * etp] with the routes [T, K] of every shard: int32 ids and fp32 weights.
void shard_routes_on_device(const Routing& routing, const ShardedRoutes& sharded, Stream stream);

/// values [T, K * etp] and out [T, K] are fp32.
void sum_over_shards_on_device(const ConstTensorView& values, const TensorView& out, Stream stream);

/// Call it before ranks that share a GPU wait for each other.
void load_device_shards(Device device);

}  // namespace crossdock
