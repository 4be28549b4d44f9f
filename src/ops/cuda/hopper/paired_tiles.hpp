#pragma once

#include "crossdock/dtype.hpp"
#include "ops/cuda/hopper/tile_shape.hpp"

namespace crossdock::ops::hopper {

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
