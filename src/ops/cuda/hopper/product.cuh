#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/product_params.hpp"
#include "ops/cuda/hopper/tile_shape.hpp"

// Which tile comes next. The tiles of an expert are taken in pairs, one for each block of a
// cluster; a pair is a work unit, and units have consecutive numbers over all experts.

namespace crossdock::ops::hopper {

/// One block's part of a work unit.
struct alignas(16) WorkUnit {
  int32_t num_steps;      // of kDepth along the inner dimension; kNoMoreWork ends the kernel
  int32_t row_blocks;     // 64-row blocks of the tile that overlap the output
  int32_t expert;         // local expert; dW: its place in the order of work
  int32_t a_row;          // the tile's first row in the left operand; dW: first column
  int32_t column_tile;    // may be one past the last: nothing to compute
  int32_t num_rows;       // rows of the output from the tile's first one on; may be negative
  int32_t out_row;        // the tile's first row in the output
  int32_t share_columns;  // the two tiles have the same columns; else the same rows
};
inline constexpr int32_t kNoMoreWork = -1;

/// The work of forward and dX: tiles of the rows of segments, expert by expert. Used by a whole
/// warp, whose lanes hold 32 segments at a time.
template <typename Shape>
class SegmentUnits {
 public:
  struct Args {
    const int64_t* starts;
    const int64_t* counts;
    int num_experts;
    int out_columns;
    int num_steps;
  };

  __device__ explicit SegmentUnits(const Args& args)
      : args_(args), column_tiles_(divide_up(args.out_columns, Shape::kColumns)) {}

  /// Finds unit `number`, not less than in earlier calls, for block `rank`. False: there is none.
  __device__ bool find(int number, int rank, WorkUnit& unit) {
    while (number >= end_of_batch_) {
      if (next_expert_ >= args_.num_experts) return false;
      load_next_batch();
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, number < end_))) - 1;
    const int start = __shfl_sync(~0u, start_, owner);
    const int count = __shfl_sync(~0u, count_, owner);
    const PairedTiles<Shape> tiles{divide_up(count, Shape::kRows), column_tiles_};
    const int first_number = __shfl_sync(~0u, end_, owner) - tiles.num_pairs();
    const auto place = tiles.place(number - first_number, rank);
    const int row = place.row_tile * Shape::kRows;
    unit.num_steps = args_.num_steps;
    unit.num_rows = count - row;
    unit.row_blocks = max(0, min(Shape::kRowBlocks, divide_up(unit.num_rows, kBlock)));
    unit.expert = next_expert_ - kLanes + owner;
    unit.a_row = start + row;
    unit.out_row = start + row;
    unit.column_tile = place.column_tile;
    unit.share_columns = place.share_columns ? 1 : 0;
    return true;
  }

 private:
  static constexpr int kLanes = 32;

  __device__ void load_next_batch() {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int expert = next_expert_ + lane;
    start_ = expert < args_.num_experts ? static_cast<int>(args_.starts[expert]) : 0;
    count_ = expert < args_.num_experts ? static_cast<int>(args_.counts[expert]) : 0;
    end_ = PairedTiles<Shape>{divide_up(count_, Shape::kRows), column_tiles_}.num_pairs();
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end_, distance);
      if (lane >= distance) end_ += before;
    }
    end_ += end_of_batch_;
    end_of_batch_ = __shfl_sync(~0u, end_, kLanes - 1);
    next_expert_ += kLanes;
  }

  Args args_;
  int column_tiles_;
  int next_expert_ = 0;   // after the batch
  int end_of_batch_ = 0;  // one past its last unit
  int start_ = 0;         // of this lane's segment
  int count_ = 0;
  int end_ = 0;  // one past its last unit
};

/// The work of dW: tiles of the weights, equally many for each expert.
template <typename Shape>
class ExpertUnits {
 public:
  struct Args {
    const OrderedExpert* order;
    int num_experts;
    int out_rows;  // of one expert
    int out_columns;
  };

  __device__ explicit ExpertUnits(const Args& args)
      : args_(args),
        tiles_{divide_up(args.out_rows, Shape::kRows),
               divide_up(args.out_columns, Shape::kColumns)} {}

  __device__ bool find(int number, int rank, WorkUnit& unit) {
    const int num_pairs = tiles_.num_pairs();
    const int position = number / num_pairs;
    if (position >= args_.num_experts) return false;
    const OrderedExpert expert = args_.order[position];
    const auto place = tiles_.place(number - position * num_pairs, rank);
    const int row = place.row_tile * Shape::kRows;
    unit.num_steps = divide_up(expert.num_rows, kDepth);
    unit.num_rows = args_.out_rows - row;
    unit.row_blocks = max(0, min(Shape::kRowBlocks, divide_up(unit.num_rows, kBlock)));
    unit.expert = position;
    unit.a_row = row;
    unit.out_row = expert.expert * args_.out_rows + row;
    unit.column_tile = place.column_tile;
    unit.share_columns = place.share_columns ? 1 : 0;
    return true;
  }

 private:
  Args args_;
  PairedTiles<Shape> tiles_;
};

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

// How the roles of a block learn what to do next.

/// A block's next work units. The scheduler of block 0 of a cluster draws a number and sends it to
/// block 1; the scheduler of each block writes what its own block has to do. Numbers are drawn as
/// late as the loader allows, so that the last units go to clusters that are about to be idle.
struct WorkQueue {
  static constexpr int kLength = 4;

  /// A place in the queue: a RingPlace in one register.
  struct Place {
    int round = 0;
    __device__ int slot() const { return round % kLength; }
    __device__ int parity() const { return round / kLength % 2; }
  };

  uint64_t full[kLength];         // a unit has been written
  uint64_t empty[kLength];        // loader and math warps have read it
  uint64_t drawn_full[kLength];   // block 1: a number has arrived
  uint64_t drawn_empty[kLength];  // block 0: block 1 has read it
  uint64_t request;               // block 0: the loader wants another unit
  WorkUnit units[kLength];
  int32_t drawn[kLength];  // block 1

  __device__ void init() {
    for (int i = 0; i < kLength; ++i) {
      init_barrier(full[i], 1);
      init_barrier(empty[i], 1 + kMathWarps);
      init_barrier(drawn_full[i], 1);
      init_barrier(drawn_empty[i], 1);
    }
    init_barrier(request, 1);
  }

  /// The next unit, for the loader.
  __device__ WorkUnit take(Place& place) {
    wait(full[place.slot()], place.parity());
    const WorkUnit unit = units[place.slot()];
    arrive(empty[place.slot()]);
    ++place.round;
    return unit;
  }

  /// The next unit, for a math warp.
  __device__ WorkUnit take(Place& place, int lane) {
    wait(full[place.slot()], place.parity());
    const WorkUnit unit = units[place.slot()];
    __syncwarp();
    if (lane == 0) arrive(empty[place.slot()]);
    ++place.round;
    return unit;
  }
};

/// Draws a number, the same in both blocks of the cluster. Called by a whole warp.
__device__ inline int draw_unit(const ProductParams& params, WorkQueue& queue,
                                const WorkQueue::Place& place, int rank, int lane) {
  const int slot = place.slot();
  if (rank == 0) {
    if (place.round > 0) wait(queue.request, (place.round - 1) % 2);
    wait(queue.drawn_empty[slot], place.parity() ^ 1);
    __syncwarp();  // all lanes have waited before one releases others
    int number = 0;
    if (lane == 0) {
      number = atomicAdd(params.counters, 1);
      send_word(queue.drawn[slot], queue.drawn_full[slot], number, 1);
    }
    return __shfl_sync(~0u, number, 0);
  }
  wait_for_cluster(queue.drawn_full[slot], place.parity());
  const int number = queue.drawn[slot];
  __syncwarp();
  if (lane == 0) arrive_at(queue.drawn_empty[slot], 0);
  return number;
}

/// The scheduler: fills the queue until there is no work left. Called by a whole warp.
template <typename Product>
__device__ void schedule(const ProductParams& params, WorkQueue& queue, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto units = Product::units(params);
  WorkQueue::Place place;
  bool is_found = true;
  for (; is_found; ++place.round) {
    const int number = draw_unit(params, queue, place, rank, lane);
    WorkUnit unit{};
    unit.num_steps = kNoMoreWork;
    is_found = units.find(number, rank, unit);
    wait(queue.empty[place.slot()], place.parity() ^ 1);
    __syncwarp();
    if (lane == 0) {
      queue.units[place.slot()] = unit;
      arrive(queue.full[place.slot()]);
    }
  }
  // The last cluster leaves the counters as it found them, for the next kernel.
  if (rank == 0 && lane == 0) {
    const int num_clusters = static_cast<int>(gridDim.x) / kClusterSize;
    if (atomicAdd(params.counters + 1, 1) == num_clusters - 1) {
      params.counters[0] = 0;
      params.counters[1] = 0;
    }
  }
}

}  // namespace crossdock::ops::hopper
