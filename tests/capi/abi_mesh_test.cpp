// Structs and constants of meshes.
#include "capi/abi.hpp"

namespace {

TEST(CAbi, MeshShape) {
  EXPECT_SIZE(crossdock_mesh_shape, 72);
  EXPECT_FIELD(crossdock_mesh_shape, struct_size, 0);
  EXPECT_FIELD(crossdock_mesh_shape, world, 8);
  EXPECT_FIELD(crossdock_mesh_shape, tp, 16);
  EXPECT_FIELD(crossdock_mesh_shape, cp, 24);
  EXPECT_FIELD(crossdock_mesh_shape, dp, 32);
  EXPECT_FIELD(crossdock_mesh_shape, pp, 40);
  EXPECT_FIELD(crossdock_mesh_shape, etp, 48);
  EXPECT_FIELD(crossdock_mesh_shape, ep, 56);
  EXPECT_FIELD(crossdock_mesh_shape, edp, 64);
}

TEST(CAbi, MeshCoordinates) {
  EXPECT_SIZE(crossdock_mesh_coordinates, 40);
  EXPECT_FIELD(crossdock_mesh_coordinates, struct_size, 0);
  EXPECT_FIELD(crossdock_mesh_coordinates, tp, 8);
  EXPECT_FIELD(crossdock_mesh_coordinates, cp, 12);
  EXPECT_FIELD(crossdock_mesh_coordinates, dp, 16);
  EXPECT_FIELD(crossdock_mesh_coordinates, pp, 20);
  EXPECT_FIELD(crossdock_mesh_coordinates, etp, 24);
  EXPECT_FIELD(crossdock_mesh_coordinates, ep, 28);
  EXPECT_FIELD(crossdock_mesh_coordinates, edp, 32);
  EXPECT_FIELD(crossdock_mesh_coordinates, padding, 36);
}

TEST(CAbi, TensorList) {
  EXPECT_SIZE(crossdock_tensor_list, 16);
  EXPECT_FIELD(crossdock_tensor_list, tensors, 0);
  EXPECT_FIELD(crossdock_tensor_list, num_tensors, 8);
}

TEST(CAbi, MeshGradients) {
  EXPECT_SIZE(crossdock_mesh_gradients, 88);
  EXPECT_FIELD(crossdock_mesh_gradients, struct_size, 0);
  EXPECT_FIELD(crossdock_mesh_gradients, experts, 8);
  EXPECT_FIELD(crossdock_mesh_gradients, experts_replicated, 24);
  EXPECT_FIELD(crossdock_mesh_gradients, dense, 40);
  EXPECT_FIELD(crossdock_mesh_gradients, replicated, 56);
  EXPECT_FIELD(crossdock_mesh_gradients, tensor_parallel, 72);
}

TEST(CAbi, MeshAxes) {
  EXPECT_EQ(CROSSDOCK_MESH_TP, 0);
  EXPECT_EQ(CROSSDOCK_MESH_CP, 1);
  EXPECT_EQ(CROSSDOCK_MESH_DP, 2);
  EXPECT_EQ(CROSSDOCK_MESH_PP, 3);
  EXPECT_EQ(CROSSDOCK_MESH_TP_CP, 4);
  EXPECT_EQ(CROSSDOCK_MESH_CP_DP, 5);
  EXPECT_EQ(CROSSDOCK_MESH_TP_CP_DP, 6);
  EXPECT_EQ(CROSSDOCK_MESH_ETP, 7);
  EXPECT_EQ(CROSSDOCK_MESH_EP, 8);
  EXPECT_EQ(CROSSDOCK_MESH_EDP, 9);
  EXPECT_EQ(CROSSDOCK_MESH_ETP_EP, 10);
  EXPECT_EQ(CROSSDOCK_MESH_ETP_EDP, 11);
}

}  // namespace
