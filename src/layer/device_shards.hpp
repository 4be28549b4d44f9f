#pragma once

#include "crossdock/expert_shards.hpp"

namespace crossdock {

// shard_routes and sum_over_shards for tensors on one GPU, with the bits of the CPU. Work is queued
// in `stream`. Builds without CUDA throw Error(kUnsupported).

/// Fills `sharded` [T, K * etp] with the routes [T, K] of every shard: int32 ids and fp32 weights.
void shard_routes_on_device(const Routing& routing, const ShardedRoutes& sharded, Stream stream);

/// values [T, K * etp] and out [T, K] are fp32.
void sum_over_shards_on_device(const ConstTensorView& values, const TensorView& out, Stream stream);

/// Call it before ranks that share a GPU wait for each other.
void load_device_shards(Device device);

}  // namespace crossdock
