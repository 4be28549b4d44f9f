// Coordinates and members of all ranks, compared with grids enumerated by loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "crossdock/mesh.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using Lists = std::vector<std::vector<int>>;

const std::vector<MeshShape> kShapes = {
    {.world = 1},
    {.world = 7},
    {.tp = 2, .dp = 2, .ep = 4},
    {.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2},
    {.world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 2},
    {.world = 24, .tp = 3, .cp = 2, .pp = 2, .etp = 2, .ep = 3},
    {.world = 24, .tp = 1, .cp = 4, .pp = 3, .etp = 4, .ep = 1},
};

/// The coordinates of all ranks, [world], by enumeration: tp and etp vary fastest, pp slowest.
std::vector<MeshCoordinates> counted_coordinates(const MeshShape& shape) {
  std::vector<MeshCoordinates> all;
  for (int pp = 0; pp < shape.pp; ++pp) {
    for (int dp = 0; dp < shape.dp; ++dp) {
      for (int cp = 0; cp < shape.cp; ++cp) {
        for (int tp = 0; tp < shape.tp; ++tp)
          all.push_back({.tp = tp, .cp = cp, .dp = dp, .pp = pp});
      }
    }
  }
  size_t rank = 0;
  for (int pp = 0; pp < shape.pp; ++pp) {
    for (int edp = 0; edp < shape.edp; ++edp) {
      for (int ep = 0; ep < shape.ep; ++ep) {
        for (int etp = 0; etp < shape.etp; ++etp) {
          EXPECT_EQ(all[rank].pp, pp);
          all[rank].etp = etp;
          all[rank].ep = ep;
          all[rank++].edp = edp;
        }
      }
    }
  }
  return all;
}

/// The coordinates that the members of a group have in common.
using Common = std::function<std::vector<int>(const MeshCoordinates&)>;

const std::map<MeshAxis, Common> kCommon = {
    {MeshAxis::kTp,
     [](const auto& c) {
       return std::vector{c.cp, c.dp, c.pp};
     }},
    {MeshAxis::kCp,
     [](const auto& c) {
       return std::vector{c.tp, c.dp, c.pp};
     }},
    {MeshAxis::kDp,
     [](const auto& c) {
       return std::vector{c.tp, c.cp, c.pp};
     }},
    {MeshAxis::kPp,
     [](const auto& c) {
       return std::vector{c.tp, c.cp, c.dp};
     }},
    {MeshAxis::kTpCp,
     [](const auto& c) {
       return std::vector{c.dp, c.pp};
     }},
    {MeshAxis::kCpDp,
     [](const auto& c) {
       return std::vector{c.tp, c.pp};
     }},
    {MeshAxis::kTpCpDp, [](const auto& c) { return std::vector{c.pp}; }},
    {MeshAxis::kEtp,
     [](const auto& c) {
       return std::vector{c.ep, c.edp, c.pp};
     }},
    {MeshAxis::kEp,
     [](const auto& c) {
       return std::vector{c.etp, c.edp, c.pp};
     }},
    {MeshAxis::kEdp,
     [](const auto& c) {
       return std::vector{c.etp, c.ep, c.pp};
     }},
    {MeshAxis::kEtpEp,
     [](const auto& c) {
       return std::vector{c.edp, c.pp};
     }},
    {MeshAxis::kEtpEdp,
     [](const auto& c) {
       return std::vector{c.ep, c.pp};
     }},
};

TEST(MeshLayout, CoordinatesCountThroughBothGrids) {
  for (const MeshShape& shape : kShapes) {
    const MeshLayout mesh(shape);
    const auto expected = counted_coordinates(mesh.shape());
    ASSERT_EQ(mesh.num_ranks(), std::ssize(expected));
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      EXPECT_EQ(mesh.coordinates(rank), expected[static_cast<size_t>(rank)]) << rank;
    }
  }
}

TEST(MeshLayout, MembersDifferInTheNamedCoordinatesOnly) {
  for (const MeshShape& shape : kShapes) {
    const MeshLayout mesh(shape);
    const auto places = counted_coordinates(mesh.shape());
    for (const auto& [axis, common] : kCommon) {
      std::map<std::vector<int>, std::vector<int>> expected;
      for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
        expected[common(places[static_cast<size_t>(rank)])].push_back(rank);
      }
      for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
        const auto& members = expected[common(places[static_cast<size_t>(rank)])];
        EXPECT_EQ(mesh.members(axis, rank), members) << name_of(axis) << " of rank " << rank;
        EXPECT_EQ(mesh.group_size(axis), std::ssize(members)) << name_of(axis);
      }
    }
  }
}

TEST(MeshLayout, GroupsHoldEveryRankOnceAndAscend) {
  for (const MeshShape& shape : kShapes) {
    const MeshLayout mesh(shape);
    for (const MeshAxis axis : kMeshAxes) {
      std::vector<int> all;
      int last_lowest = -1;
      for (const std::vector<int>& group : mesh.groups(axis)) {
        EXPECT_EQ(group, mesh.members(axis, group.front())) << name_of(axis);
        EXPECT_GT(group.front(), last_lowest);
        last_lowest = group.front();
        all.insert(all.end(), group.begin(), group.end());
      }
      std::sort(all.begin(), all.end());
      std::vector<int> expected(static_cast<size_t>(mesh.num_ranks()));
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(all, expected) << name_of(axis);
    }
  }
}

// dp2 tp2 with ep4: the experts span both copies of the dense parts.
TEST(MeshLayout, AFoldedMeshByHand) {
  const MeshLayout mesh({.tp = 2, .dp = 2, .ep = 4});
  EXPECT_EQ(mesh.groups(MeshAxis::kTp), (Lists{{0, 1}, {2, 3}}));
  EXPECT_EQ(mesh.groups(MeshAxis::kDp), (Lists{{0, 2}, {1, 3}}));
  EXPECT_EQ(mesh.groups(MeshAxis::kEtpEp), (Lists{{0, 1, 2, 3}}));
  EXPECT_EQ(mesh.groups(MeshAxis::kEdp), (Lists{{0}, {1}, {2}, {3}}));

  const MeshLayout eight({.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2});
  EXPECT_EQ(eight.groups(MeshAxis::kCp), (Lists{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(eight.groups(MeshAxis::kPp), (Lists{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(eight.groups(MeshAxis::kTpCpDp), (Lists{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(eight.groups(MeshAxis::kEtpEp), (Lists{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(eight.groups(MeshAxis::kEdp), (Lists{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
}

TEST(MeshLayout, RefusesARankThatIsNotInTheMesh) {
  const MeshLayout mesh({.world = 4});
  for (const int rank : {-1, 4}) {
    const std::string text = "rank must be in [0, 4), got " + std::to_string(rank);
    EXPECT_EQ(message_of([&] { static_cast<void>(mesh.coordinates(rank)); }), text);
    EXPECT_EQ(message_of([&] { static_cast<void>(mesh.members(MeshAxis::kEp, rank)); }), text);
  }
}

TEST(MeshAxis, HasAName) {
  for (const MeshAxis axis : kMeshAxes) EXPECT_EQ(parse_mesh_axis(name_of(axis)), axis);
  EXPECT_EQ(
      message_of([] { parse_mesh_axis("dp_tp"); }),
      "a group of a mesh must be one of tp, cp, dp, pp, tp_cp, cp_dp, tp_cp_dp, etp, ep, edp, "
      "etp_ep, etp_edp; got \"dp_tp\"");
}

}  // namespace
}  // namespace crossdock
