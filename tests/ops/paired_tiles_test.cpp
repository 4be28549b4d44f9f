#include <gtest/gtest.h>

#include <vector>

#include "ops/cuda/hopper/tile_shape.hpp"

namespace crossdock::ops::hopper {
namespace {

template <typename Shape>
class PairedTilesTest : public ::testing::Test {};

using Shapes = ::testing::Types<TileShape<2, 192, true>, TileShape<4, 192, false>>;
TYPED_TEST_SUITE(PairedTilesTest, Shapes);

TYPED_TEST(PairedTilesTest, TakeEveryTileOnceAndLeaveAtMostOneHalfPair) {
  for (int row_tiles = 0; row_tiles <= 21; ++row_tiles) {
    for (int column_tiles = 1; column_tiles <= 11; ++column_tiles) {
      const PairedTiles<TypeParam> tiles{row_tiles, column_tiles};
      std::vector<int> times(static_cast<size_t>(row_tiles * column_tiles), 0);
      int outside = 0;
      for (int pair = 0; pair < tiles.num_pairs(); ++pair) {
        const auto first = tiles.place(pair, 0);
        const auto second = tiles.place(pair, 1);
        ASSERT_EQ(first.share_columns, second.share_columns);
        ASSERT_EQ(first.share_columns, first.column_tile == second.column_tile);
        ASSERT_EQ(!first.share_columns, first.row_tile == second.row_tile);
        for (const auto& place : {first, second}) {
          if (place.row_tile >= row_tiles || place.column_tile >= column_tiles) {
            ++outside;
          } else {
            const int tile = place.row_tile * column_tiles + place.column_tile;
            ++times[static_cast<size_t>(tile)];
          }
        }
      }
      EXPECT_EQ(times, std::vector<int>(times.size(), 1)) << row_tiles << " x " << column_tiles;
      EXPECT_EQ(outside, row_tiles * column_tiles % 2) << row_tiles << " x " << column_tiles;
    }
  }
}

}  // namespace
}  // namespace crossdock::ops::hopper
