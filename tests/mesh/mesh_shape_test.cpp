// Which meshes are possible, and the messages about the others.
#include <gtest/gtest.h>

#include <limits>

#include "crossdock/mesh.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

std::string refusal_of(const MeshShape& shape) {
  return message_of([&] { static_cast<void>(resolve_mesh(shape)); }, ErrorCode::kInvalidArgument);
}

TEST(MeshShape, DerivesTheSizesThatAreLeftOut) {
  const MeshShape folded = {
      .world = 16, .tp = 2, .cp = 2, .dp = 2, .pp = 2, .etp = 1, .ep = 2, .edp = 4};
  EXPECT_EQ(resolve_mesh({.world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 2}), folded);
  EXPECT_EQ(resolve_mesh({.tp = 2, .cp = 2, .dp = 2, .pp = 2, .ep = 2}), folded);
  EXPECT_EQ(resolve_mesh({.tp = 2, .cp = 2, .pp = 2, .ep = 2, .edp = 4}), folded);
  EXPECT_EQ(resolve_mesh({.world = 16, .tp = 2, .cp = 2, .pp = 2, .edp = 4}), folded);
  EXPECT_EQ(resolve_mesh(folded), folded);
  EXPECT_EQ(
      resolve_mesh({.world = 12, .pp = 2, .etp = 3}),
      (MeshShape{.world = 12, .tp = 1, .cp = 1, .dp = 6, .pp = 2, .etp = 3, .ep = 2, .edp = 1}));
  EXPECT_EQ(
      resolve_mesh({.world = 1}),
      (MeshShape{.world = 1, .tp = 1, .cp = 1, .dp = 1, .pp = 1, .etp = 1, .ep = 1, .edp = 1}));
}

// tp2 cp2 pp2 with ep2 inside is 8 ranks, and 16 only with dp2.
TEST(MeshShape, FoldsExpertsIntoTheDenseRanks) {
  EXPECT_EQ(resolve_mesh({.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2}).world, 8);
  EXPECT_EQ(resolve_mesh({.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2}).edp, 2);
  EXPECT_EQ(resolve_mesh({.tp = 2, .cp = 2, .dp = 2, .pp = 2, .ep = 2}).world, 16);
}

TEST(MeshShape, NamesTheRuleAndTheNumbers) {
  const std::vector<std::pair<MeshShape, std::string>> known = {
      {{.world = 16, .pp = 3},
       "pp (3) must divide the 16 ranks; the largest pp below that does is 2"},
      {{.world = 16, .tp = 3, .cp = 2, .pp = 2},
       "tp (3) times cp (2) must divide the 8 ranks of a pipeline stage; for example, tp 2 and cp "
       "2 "
       "would"},
      {{.world = 16, .tp = 2, .dp = 4},
       "tp (2) times cp (1) times dp (4) must be the 16 ranks of a pipeline stage; with this tp "
       "and "
       "cp, dp is 8"},
      {{.world = 16, .pp = 2, .ep = 5},
       "ep (5) must divide the 8 ranks of a pipeline stage; the largest ep below that does is 4"},
      {{.world = 16, .pp = 2, .etp = 2, .ep = 8},
       "etp (2) times ep (8) must divide the 8 ranks of a pipeline stage; the largest ep below "
       "that "
       "does is 4"},
      {{.world = 8, .etp = 3},
       "etp (3) must divide the 8 ranks of a pipeline stage; the largest etp below that does is 2"},
      {{.world = 8, .edp = 3},
       "edp (3) must divide the 8 ranks of a pipeline stage; the largest edp below that does is 2"},
      {{.world = 8, .ep = 2, .edp = 2},
       "ep (2) times edp (2) must be the 8 ranks of a pipeline stage; with this ep, edp is 4"},
      {{.world = 8, .etp = 2, .ep = 2, .edp = 4},
       "etp (2) times ep (2) times edp (4) must be the 8 ranks of a pipeline stage; with this etp "
       "and "
       "ep, edp is 2"},
      {{.tp = 2, .ep = 2},
       "world must be given, or dp, or ep and edp, to tell the number of ranks"},
      {{.world = 70000}, "world must be at most 65536, got 70000"},
      {{.tp = 1 << 20, .dp = 1 << 20}, "tp * cp * dp * pp must be at most 65536 ranks"},
      {{.ep = std::numeric_limits<int64_t>::max(), .edp = 3},
       "etp * ep * edp * pp must be at most 65536 ranks"},
      {{.world = -1}, "world must be at least 1, or 0 to be derived, got -1"},
      {{.world = 4, .edp = -2}, "edp must be at least 1, or 0 to be derived, got -2"},
  };
  for (const auto& [shape, text] : known) EXPECT_EQ(refusal_of(shape), text);
}

}  // namespace
}  // namespace crossdock
