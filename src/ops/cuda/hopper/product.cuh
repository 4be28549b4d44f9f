#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/product_params.hpp"
#include "ops/cuda/hopper/tile_shape.hpp"
#include "ops/cuda/hopper/work_units.cuh"

namespace crossdock::ops::hopper {

/// One kind of product: what is multiplied, in which tiles, and what becomes of the sums. A tile is
/// A B, A [rows, inner] and B [inner, columns]:
///
///            A                B                       output
///   forward  x [R, K]         w[e]^T [K, N]           [R, N]
///   dX       grad [R, N]      w[e] [N, K]             [R, K]
///   dW       grad^T [N, R_e]  x [R_e, K]              [N, K] for each expert
template <typename ElementType, Operation operation, typename ShapeType, typename EpilogueType>
struct Product {
  using Element = ElementType;
  using Shape = ShapeType;
  using Epilogue = EpilogueType;
  using Units =
      std::conditional_t<operation == Operation::kDw, ExpertUnits<Shape>, SegmentUnits<Shape>>;
  static constexpr Operation kOperation = operation;
  // Whether adjacent elements in memory lie across the inner dimension instead of along it.
  static constexpr bool kATransposed = operation == Operation::kDw;
  static constexpr bool kBTransposed = operation != Operation::kForward;
  static constexpr bool kIsGated = Epilogue::kIsGated;

  /// Columns of the output, before any gating.
  static __device__ int out_columns(const ProductParams& params) {
    return operation == Operation::kForward ? params.N : params.K;
  }

  static __device__ Units units(const ProductParams& params) {
    if constexpr (operation == Operation::kDw) {
      return Units({params.order, params.num_experts, params.N, params.K});
    } else {
      const int inner = operation == Operation::kForward ? params.K : params.N;
      return Units({params.starts, params.counts, params.num_experts, out_columns(params),
                    divide_up(inner, kDepth)});
    }
  }
};

/// The dynamic shared memory of a block.
template <typename Shape>
struct TileMemory {
  __device__ explicit TileMemory(std::byte* memory)
      : slots(memory + (Shape::kAlignment - shared_address(memory) % Shape::kAlignment) %
                           Shape::kAlignment) {}

  __device__ SharedAddress a(int slot) const {
    return shared_address(slots) + slot * Shape::kABytes;
  }
  __device__ SharedAddress b(int slot) const {
    return shared_address(slots) + Shape::kSlots * Shape::kABytes + slot * Shape::kBBytes;
  }
  /// The buffers in which a math warp arranges its results.
  __device__ SharedAddress stage(int math_warp) const {
    return shared_address(slots) + Shape::kSlots * Shape::kSlotBytes +
           math_warp * kStageBytes * Shape::kStageBuffers;
  }

  std::byte* slots;
};

/// The barriers of a block's ring of slots. Each block loads part of the data of both into the same
/// slot, and the two may multiply at different times: so a slot is free when both blocks have
/// finished with it. Every warp that waits for a full slot also arrives, in both blocks, when it
/// has finished, so none can fall a round behind.
template <typename Shape>
struct SlotBarriers {
  uint64_t full[Shape::kSlots];
  uint64_t empty[Shape::kSlots];

  __device__ void init() {
    constexpr int kWarps = Shape::kTakeTurns ? kMathWarps / 2 : kMathWarps;
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      init_barrier(full[slot], 1);
      init_barrier(empty[slot], kWarps * kClusterSize);
    }
  }

  /// Called by a whole warp that has finished with the slot.
  __device__ void release(int slot, int lane) {
    if (lane < kClusterSize) arrive_at(empty[slot], lane);
  }
};

}  // namespace crossdock::ops::hopper
