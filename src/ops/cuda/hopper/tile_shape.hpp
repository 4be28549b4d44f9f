#pragma once

// Sizes of the tiles that a thread block computes, for host and device.

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

}  // namespace crossdock::ops::hopper
