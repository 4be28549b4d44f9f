// Sizes of the tiles that a thread block computes, for host and device.

#pragma once

#include "crossdock/dtype.hpp"

namespace crossdock::ops::hopper {

inline constexpr int kBlock = 64;                      // rows of one wgmma; columns in 128 bytes
inline constexpr int kBlockBytes = kBlock * 128;       // a block of 64 x 64 values of 16 bits
inline constexpr int kDepth = 64;                      // of one step along the inner dimension
inline constexpr int kClusterSize = 2;                 // blocks that share what they load
inline constexpr int kThreads = 384;                   // a warpgroup that loads, two that multiply
inline constexpr int kMathWarps = 8;                   // of the two that multiply
inline constexpr int kStageBytes = 2048;               // a warp's 16 rows x 128 bytes of results
inline constexpr int kDynamicSharedBytes = 225 << 10;  // at most, besides barriers and queues

/// A tile has row_blocks x 64 rows and `columns` columns. Its operands are loaded in steps of
/// kDepth into a ring of slots. The two math warpgroups either share each tile (its 64-row blocks
/// alternate) or take tiles in turn, so that one stores while the other multiplies.
template <int row_blocks, int columns, bool take_turns>
struct TileShape {
  static_assert(row_blocks == 2 || row_blocks == 4);
  static_assert(columns == 192 || columns == 256);

  static constexpr int kRowBlocks = row_blocks;
  static constexpr int kColumnBlocks = columns / kBlock;
  static constexpr int kRows = row_blocks * kBlock;
  static constexpr int kColumns = columns;
  static constexpr bool kTakeTurns = take_turns;
  static constexpr int kGroupBlocks = take_turns ? row_blocks : row_blocks / 2;  // per warpgroup
  static_assert(kGroupBlocks * columns <= 2 * 192, "the sums do not fit into registers");

  /// Whether the two tiles of a cluster preferably lie side by side (they share their rows), or one
  /// above the other (they share their columns). Shares the larger operand.
  static constexpr bool kSideBySide = row_blocks == 4;

  static constexpr int kABytes = row_blocks * kBlockBytes;     // of a slot: rows
  static constexpr int kBBytes = kColumnBlocks * kBlockBytes;  // of a slot: columns
  static constexpr int kSlotBytes = kABytes + kBBytes;
  // A second buffer where it does not cost a slot.
  static constexpr int kStageBuffers = row_blocks == 2 && columns == 192 ? 1 : 2;
  static constexpr int kStagesBytes = kMathWarps * kStageBytes * kStageBuffers;
  static constexpr int kAlignment = 1024;  // of slots, which the copy engine swizzles
  static constexpr int kSlots = (kDynamicSharedBytes - kAlignment - kStagesBytes) / kSlotBytes;
  static constexpr int kSharedBytes = kAlignment + kSlots * kSlotBytes + kStagesBytes;
  static_assert(kSlots >= 3);

  // Registers per thread: what the loading warpgroup gives up, the others get.
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMathRegisters = 232;
};

CROSSDOCK_HOST_DEVICE constexpr int divide_up(int n, int by) {
  return (n + by - 1) / by;
}

/// The tiles of one expert as pairs. Tiles are paired in the preferred direction of the shape; an
/// odd last row or column of tiles is paired in the other direction, leaving at most one half pair.
template <typename Shape>
struct PairedTiles {
  int row_tiles;
  int column_tiles;

  struct Place {
    int row_tile;
    int column_tile;
    bool share_columns;
  };

  CROSSDOCK_HOST_DEVICE int rows_of_pairs() const {
    return Shape::kSideBySide ? row_tiles : row_tiles / 2;
  }
  CROSSDOCK_HOST_DEVICE int columns_of_pairs() const {
    return Shape::kSideBySide ? column_tiles / 2 : column_tiles;
  }
  CROSSDOCK_HOST_DEVICE int num_pairs() const {
    const int left_over = Shape::kSideBySide ? (column_tiles & 1) * ((row_tiles + 1) / 2)
                                             : (row_tiles & 1) * ((column_tiles + 1) / 2);
    return rows_of_pairs() * columns_of_pairs() + left_over;
  }

  /// The tile of block `rank` in a pair. Pairs run down bands of kBandRows rows of pairs, column by
  /// column: pairs that run at the same time then share rows and columns in the L2 cache.
  CROSSDOCK_HOST_DEVICE Place place(int pair, int rank) const {
    constexpr int kBandRows = 8;
    const int rows = rows_of_pairs();
    const int columns = columns_of_pairs();
    if (pair < rows * columns) {
      const int band = pair / (kBandRows * columns);
      const int in_band = pair - band * kBandRows * columns;
      const int rows_left = rows - band * kBandRows;
      const int band_rows = rows_left < kBandRows ? rows_left : kBandRows;
      const int column = in_band / band_rows;
      const int row = band * kBandRows + in_band - column * band_rows;
      if (Shape::kSideBySide) return {row, 2 * column + rank, false};
      return {2 * row + rank, column, true};
    }
    const int along = 2 * (pair - rows * columns) + rank;
    if (Shape::kSideBySide) return {along, column_tiles - 1, true};
    return {row_tiles - 1, along, false};
  }
};

}  // namespace crossdock::ops::hopper
