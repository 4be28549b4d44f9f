#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"

// Convert a routing to the form that the plan kernels take: int32 ids and fp32 weights by slot.
// These kernels do not wait for peers.

namespace crossdock::cuda {

/// A dense map, and the slots that are made from it.
struct MapSlotsArgs {
  const uint8_t* map;   // [T, E] bool
  const void* weights;  // [T, E]
  DType weight_dtype;   // fp64, fp32, bf16 or fp16
  const bool* mask;     // [T] true = padding; may be null
  int64_t T;
  int32_t E;
  int32_t K;
  int32_t* expert_ids;  // out: [T, K] set bits in ascending order, then -1
  float* slot_weights;  // out: [T, K]; 0 where there is no route
  uint64_t* bad_route;  // SignalState::bad_route, for tokens with more than K set bits
};

void load_route_slots();  // before the first launch

/// Records the lowest token with more than K set bits as kTooManyRoutes; its first id is then the
/// number of bits.
void launch_map_slots(const MapSlotsArgs& args, cudaStream_t stream);

/// Sets *most to the largest number of set bits in a token that is not masked.
void launch_most_bits(const uint8_t* map, const bool* mask, int64_t T, int32_t E, int32_t* most,
                      cudaStream_t stream);

/// Rounds fp64, bf16 or fp16 weights to fp32.
void launch_round_weights(const void* from, DType dtype, int64_t count, float* to,
                          cudaStream_t stream);

}  // namespace crossdock::cuda
