// The groups of a mesh, and refusals: compiled into the tests of every communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/group_runner.hpp"
#include "crossdock/mesh.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

/// The group of every kind consists of the ranks that the layout lists, in their order.
void expect_groups(Group& world, const MeshShape& shape) {
  Mesh mesh(world, shape);
  for (const MeshAxis axis : kMeshAxes) {
    const std::vector<int> members = mesh.layout().members(axis, world.rank());
    Group& group = mesh.group(axis);
    ASSERT_EQ(group.size(), std::ssize(members)) << name_of(axis);
    EXPECT_EQ(members[static_cast<size_t>(group.rank())], world.rank()) << name_of(axis);
    std::vector<int64_t> sum = {world.rank() + 1};
    int64_t expected = 0;
    for (const int member : members) expected += member + 1;
    group.all_reduce(TensorView(sum.data(), {1}));
    EXPECT_EQ(sum[0], expected) << name_of(axis);
    EXPECT_EQ(&mesh.group(axis), &group);
  }
}

TEST(MeshGroups, HaveTheMembersThatTheLayoutLists) {
  for (const int size : group_sizes()) {
    run_healthy_group(size, [&](Group& world) {
      expect_groups(world, {});
      if (size == 8) expect_groups(world, {.tp = 2, .cp = 2, .pp = 2, .ep = 2});
      if (size == 4) expect_groups(world, {.tp = 2, .dp = 2, .etp = 2, .ep = 2});
    });
  }
}

/// Every rank must end in this error, and the world must stay usable.
void expect_same_error(int size, const std::function<void(Group&)>& body, const std::string& text) {
  const auto outcomes = run_group(
      size,
      [&](Group& world) {
        const Outcome outcome = outcome_of([&] { body(world); });
        world.agree({.operation = "recheck"});
        if (outcome.threw) throw Error(outcome.code, outcome.message);
      },
      ample_deadlines());
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.threw);
    EXPECT_THAT(outcome.message, HasSubstr(text));
    EXPECT_EQ(outcome.message, outcomes[0].message);
  }
}

TEST(MeshGroups, AreRefusedAlikeOnEveryRank) {
  for (const int size : group_sizes()) {
    if (size < 2) continue;
    const int last = size - 1;
    expect_same_error(
        size, [&](Group& world) { const Mesh mesh(world, {.tp = world.rank() == last ? 5 : 1}); },
        "rank " + std::to_string(last) + ": tp (5) times cp (1) must divide the " +
            std::to_string(size) + " ranks");
    expect_same_error(
        size, [&](Group& world) { const Mesh mesh(world, {.world = size + 1}); },
        "world (" + std::to_string(size + 1) + ") must be the " + std::to_string(size) +
            " ranks of the group");
    expect_same_error(
        size,
        [&](Group& world) { const Mesh mesh(world, {.ep = world.rank() == last ? 1 : size}); },
        "all ranks of a group must have the same configuration");
    expect_same_error(
        size,
        [&](Group& world) {
          Mesh mesh(world, {});
          mesh.group(world.rank() == last ? MeshAxis::kTp : MeshAxis::kEp);
        },
        "has group=");
  }
}

}  // namespace
}  // namespace crossdock::testing
