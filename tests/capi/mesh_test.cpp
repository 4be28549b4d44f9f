// Meshes and sums through the C API equal those of the C++ API.
#include "crossdock/mesh.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int kAxes = CROSSDOCK_MESH_ETP_EDP + 1;

crossdock_mesh_shape shape_of_eight() {
  auto shape = made<crossdock_mesh_shape>();
  shape.tp = 2;
  shape.cp = 2;
  shape.pp = 2;
  shape.ep = 2;
  return shape;
}

std::vector<int> members_of(const crossdock_mesh* mesh, int axis, int rank) {
  int32_t size = 0;
  EXPECT_OK(crossdock_mesh_group_size(mesh, axis, &size));
  std::vector<int32_t> members(static_cast<size_t>(size));
  EXPECT_OK(crossdock_mesh_members(mesh, axis, rank, members.data()));
  return {members.begin(), members.end()};
}

TEST(CMesh, HasTheListsOfTheLayoutWithoutAGroup) {
  auto shape = shape_of_eight();
  shape.world = 16;
  crossdock_mesh* mesh = nullptr;
  ASSERT_OK(crossdock_mesh_create(nullptr, &shape, &mesh));
  const MeshLayout layout({.world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 2});
  auto whole = made<crossdock_mesh_shape>();
  ASSERT_OK(crossdock_mesh_describe(mesh, &whole));
  EXPECT_EQ((MeshShape{whole.world, whole.tp, whole.cp, whole.dp, whole.pp, whole.etp, whole.ep,
                       whole.edp}),
            layout.shape());
  for (int rank = 0; rank < 16; ++rank) {
    auto place = made<crossdock_mesh_coordinates>();
    ASSERT_OK(crossdock_mesh_locate(mesh, rank, &place));
    EXPECT_EQ(
        (MeshCoordinates{place.tp, place.cp, place.dp, place.pp, place.etp, place.ep, place.edp}),
        layout.coordinates(rank));
    for (int axis = 0; axis < kAxes; ++axis) {
      EXPECT_EQ(members_of(mesh, axis, rank), layout.members(static_cast<MeshAxis>(axis), rank));
    }
  }
  crossdock_group* group = nullptr;
  EXPECT_EQ(crossdock_mesh_group(mesh, CROSSDOCK_MESH_TP, &group), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "the mesh was created without a group; it has lists of ranks only");
  crossdock_mesh_destroy(mesh);

  shape.ep = 3;
  mesh = nullptr;
  EXPECT_EQ(crossdock_mesh_create(nullptr, &shape, &mesh), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "ep (3) must divide the 8 ranks of a pipeline stage; the largest ep below that does "
               "is 2");
  EXPECT_EQ(mesh, nullptr);
}

TEST(CMesh, GivesGroupsOfItsOwn) {
  run_c_ranks(8, [](crossdock_group* world, int rank) {
    const auto shape = shape_of_eight();
    crossdock_mesh* mesh = nullptr;
    ASSERT_OK(crossdock_mesh_create(world, &shape, &mesh));
    for (int axis = 0; axis < kAxes; ++axis) {
      crossdock_group* group = nullptr;
      ASSERT_OK(crossdock_mesh_group(mesh, axis, &group));
      crossdock_group_destroy(group);  // does nothing: it belongs to the mesh
      int64_t sum = rank + 1;
      const crossdock_tensor tensor = crossdock_tensor_1d(&sum, CROSSDOCK_I64, 1);
      ASSERT_OK(crossdock_group_all_reduce(group, &tensor, 1));
      int64_t expected = 0;
      for (const int member : members_of(mesh, axis, rank)) expected += member + 1;
      EXPECT_EQ(sum, expected) << axis;
      crossdock_group* again = nullptr;
      ASSERT_OK(crossdock_mesh_group(mesh, axis, &again));
      EXPECT_EQ(again, group);
    }
    crossdock_mesh_destroy(mesh);
    EXPECT_OK(crossdock_group_check(world));
  });
}

// A dispatcher keeps the parts of the mesh that it needs.
TEST(CMesh, MayBeDestroyedBeforeADispatcherOfItsGroups) {
  run_c_ranks(2, [](crossdock_group* world, int /*rank*/) {
    auto shape = made<crossdock_mesh_shape>();
    shape.ep = 1;
    crossdock_mesh* mesh = nullptr;
    ASSERT_OK(crossdock_mesh_create(world, &shape, &mesh));
    crossdock_group* rows = nullptr;
    ASSERT_OK(crossdock_mesh_group(mesh, CROSSDOCK_MESH_ETP_EP, &rows));
    const auto config = Case::config();
    crossdock_dispatcher* dispatcher = nullptr;
    ASSERT_OK(crossdock_dispatcher_create(rows, &config, &dispatcher));
    crossdock_mesh_destroy(mesh);
    const Case input(0);
    const crossdock_routing routing = input.routing();
    crossdock_plan* plan = nullptr;
    EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(),
                 "the group has been destroyed; destroy it after the last call");
    crossdock_dispatcher_destroy(dispatcher);
  });
}

TEST(CMesh, SumsGradientsAndTheirNorm) {
  run_c_ranks(4, [](crossdock_group* world, int rank) {
    auto shape = made<crossdock_mesh_shape>();
    shape.tp = 2;
    shape.ep = 2;
    crossdock_mesh* mesh = nullptr;
    ASSERT_OK(crossdock_mesh_create(world, &shape, &mesh));
    std::vector<float> expert = {static_cast<float>(1 << rank)};
    std::vector<float> gate = {static_cast<float>(10 + rank), 1};
    const crossdock_tensor experts = tensor(expert, 1, 1);
    const crossdock_tensor dense = tensor(gate, 1, 2);
    auto gradients = made<crossdock_mesh_gradients>();
    gradients.experts = {&experts, 1};
    gradients.dense = {&dense, 1};
    ASSERT_OK(crossdock_mesh_sum_gradients(mesh, &gradients));
    EXPECT_EQ(expert[0], rank % 2 == 0 ? 1 + 4 : 2 + 8);
    EXPECT_EQ(gate, (std::vector<float>{46, 4}));
    double norm = 0;
    ASSERT_OK(crossdock_mesh_grad_norm(mesh, &gradients, &norm));
    EXPECT_EQ(norm, std::sqrt(5.0 * 5 + 10 * 10 + 46 * 46 + 4 * 4));

    // A mistake that only C allows is also the same error on every rank.
    if (rank == 3) gradients.struct_size = 3;
    EXPECT_EQ(crossdock_mesh_sum_gradients(mesh, &gradients), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(crossdock_last_error()).rfind("rank 3: crossdock_mesh_gradients", 0), 0U);
    crossdock_mesh_destroy(mesh);
  });
}

TEST(CSums, ReduceScatterGivesEachRankItsPart) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    const std::vector<float> input = {1, 2, 4, static_cast<float>(rank)};
    std::vector<float> out(rank == 1 ? 0 : 2);
    const crossdock_tensor from = crossdock_tensor_1d(input.data(), CROSSDOCK_F32, 4);
    const crossdock_tensor to =
        crossdock_tensor_1d(out.data(), CROSSDOCK_F32, static_cast<int64_t>(out.size()));
    ASSERT_OK(crossdock_group_reduce_scatter(group, &from, &to));
    if (rank == 0) {
      EXPECT_EQ(out, (std::vector<float>{3, 6}));
    }
    if (rank == 2) {
      EXPECT_EQ(out, (std::vector<float>{12, 3}));
    }
    EXPECT_EQ(crossdock_group_reduce_scatter(group, rank == 0 ? nullptr : &from, &to),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 0: input must not be NULL");
    EXPECT_EQ(crossdock_group_all_reduce(group, &to, rank == 2 ? -1 : 1),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_OK(crossdock_group_check(group));
  });
}

}  // namespace
}  // namespace crossdock::capi_test
