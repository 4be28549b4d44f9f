#include <algorithm>
#include <vector>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"
#include "comm/failure.hpp"

namespace crossdock::capi {
namespace {

static_assert(static_cast<int>(MeshAxis::kTp) == CROSSDOCK_MESH_TP);
static_assert(static_cast<int>(MeshAxis::kCp) == CROSSDOCK_MESH_CP);
static_assert(static_cast<int>(MeshAxis::kDp) == CROSSDOCK_MESH_DP);
static_assert(static_cast<int>(MeshAxis::kPp) == CROSSDOCK_MESH_PP);
static_assert(static_cast<int>(MeshAxis::kTpCp) == CROSSDOCK_MESH_TP_CP);
static_assert(static_cast<int>(MeshAxis::kCpDp) == CROSSDOCK_MESH_CP_DP);
static_assert(static_cast<int>(MeshAxis::kTpCpDp) == CROSSDOCK_MESH_TP_CP_DP);
static_assert(static_cast<int>(MeshAxis::kEtp) == CROSSDOCK_MESH_ETP);
static_assert(static_cast<int>(MeshAxis::kEp) == CROSSDOCK_MESH_EP);
static_assert(static_cast<int>(MeshAxis::kEdp) == CROSSDOCK_MESH_EDP);
static_assert(static_cast<int>(MeshAxis::kEtpEp) == CROSSDOCK_MESH_ETP_EP);
static_assert(static_cast<int>(MeshAxis::kEtpEdp) == CROSSDOCK_MESH_ETP_EDP);

MeshAxis to_axis(int32_t axis) {
  CROSSDOCK_CHECK(axis >= CROSSDOCK_MESH_TP && axis <= CROSSDOCK_MESH_ETP_EDP,
                  "axis must be one of CROSSDOCK_MESH_TP (", CROSSDOCK_MESH_TP,
                  ") to CROSSDOCK_MESH_ETP_EDP (", CROSSDOCK_MESH_ETP_EDP, "), got ", axis);
  return static_cast<MeshAxis>(axis);
}

MeshShape to_shape(const crossdock_mesh_shape* given) {
  const auto shape = read_struct("crossdock_mesh_shape", given);
  return {.world = shape.world,
          .tp = shape.tp,
          .cp = shape.cp,
          .dp = shape.dp,
          .pp = shape.pp,
          .etp = shape.etp,
          .ep = shape.ep,
          .edp = shape.edp};
}

// Throws if the mesh has only lists of ranks, or if its group has been destroyed.
Mesh& open(crossdock_mesh& mesh) {
  CROSSDOCK_CHECK(mesh.shared, "the mesh was created without a group; it has lists of ranks only");
  mesh.shared->world->open();
  return mesh.shared->mesh;
}

// Views of the caller's lists.
struct Gradients {
  void read(const crossdock_mesh_gradients* given) {
    const auto lists = read_struct("crossdock_mesh_gradients", given);
    experts = to_views("experts", lists.experts);
    experts_replicated = to_views("experts_replicated", lists.experts_replicated);
    dense = to_views("dense", lists.dense);
    replicated = to_views("replicated", lists.replicated);
    tensor_parallel = to_views("tensor_parallel", lists.tensor_parallel);
  }

  static std::vector<TensorView> to_views(const char* name, const crossdock_tensor_list& list) {
    return capi::to_views(name, list.tensors, list.num_tensors);
  }

  MeshGradients views() const {
    return {.experts = experts,
            .experts_replicated = experts_replicated,
            .dense = dense,
            .replicated = replicated,
            .tensor_parallel = tensor_parallel};
  }

  std::vector<TensorView> experts, experts_replicated, dense, replicated, tensor_parallel;
};

// A handle of the mesh for one of its groups; axes that share a group share the handle.
crossdock_group& handle_of(crossdock_mesh& mesh, Group& group) {
  for (const auto& made : mesh.groups) {
    if (made->shared->group.get() == &group) return *made;
  }
  const GroupPtr& world = mesh.shared->world;
  const bool is_world = world->group.get() == &group;
  mesh.groups.push_back(std::make_unique<crossdock_group>(
      is_world ? world
               : std::make_shared<SharedGroup>(std::shared_ptr<Group>(mesh.shared, &group))));
  mesh.groups.back()->belongs_to_mesh = true;
  return *mesh.groups.back();
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::pointee;

crossdock_status crossdock_mesh_create(crossdock_group* group, const crossdock_mesh_shape* shape,
                                       crossdock_mesh** mesh) {
  return guarded([&] {
    if (group == nullptr) {
      crossdock_mesh*& made = pointee("mesh", mesh);
      made = new crossdock_mesh(MeshLayout(capi::to_shape(shape)), nullptr);
      return;
    }
    const capi::GroupPtr world = handle("group", group).shared;
    MeshShape whole;
    capi::convert({world->open(), "mesh"}, [&] {
      pointee("mesh", mesh);
      whole = capi::to_shape(shape);
    });
    auto shared = std::make_shared<capi::SharedMesh>(world, whole);
    *mesh = new crossdock_mesh(shared->mesh.layout(), shared);
  });
}

void crossdock_mesh_destroy(crossdock_mesh* mesh) {
  if (!capi::is_usable(mesh)) return;
  for (const auto& group : mesh->groups) {
    if (group->shared == mesh->shared->world) continue;
    group->shared->is_destroyed = true;
    group->shared->group->leave(comm::kPlainLeave);
  }
  capi::destroy(mesh);
}

crossdock_status crossdock_mesh_describe(const crossdock_mesh* mesh, crossdock_mesh_shape* shape) {
  return guarded([&] {
    const MeshShape& whole = handle("mesh", mesh).layout.shape();
    crossdock_mesh_shape value = {};
    value.world = whole.world;
    value.tp = whole.tp;
    value.cp = whole.cp;
    value.dp = whole.dp;
    value.pp = whole.pp;
    value.etp = whole.etp;
    value.ep = whole.ep;
    value.edp = whole.edp;
    capi::write_struct("crossdock_mesh_shape", shape, value);
  });
}

crossdock_status crossdock_mesh_locate(const crossdock_mesh* mesh, int32_t rank,
                                       crossdock_mesh_coordinates* coordinates) {
  return guarded([&] {
    const MeshCoordinates place = handle("mesh", mesh).layout.coordinates(rank);
    crossdock_mesh_coordinates value = {};
    value.tp = place.tp;
    value.cp = place.cp;
    value.dp = place.dp;
    value.pp = place.pp;
    value.etp = place.etp;
    value.ep = place.ep;
    value.edp = place.edp;
    capi::write_struct("crossdock_mesh_coordinates", coordinates, value);
  });
}

crossdock_status crossdock_mesh_group_size(const crossdock_mesh* mesh, int32_t axis,
                                           int32_t* size) {
  return guarded([&] {
    const MeshLayout& layout = handle("mesh", mesh).layout;
    pointee("size", size) = layout.group_size(capi::to_axis(axis));
  });
}

crossdock_status crossdock_mesh_members(const crossdock_mesh* mesh, int32_t axis, int32_t rank,
                                        int32_t* members) {
  return guarded([&] {
    const MeshLayout& layout = handle("mesh", mesh).layout;
    pointee("members", members);
    const std::vector<int> ranks = layout.members(capi::to_axis(axis), rank);
    std::copy(ranks.begin(), ranks.end(), members);
  });
}

crossdock_status crossdock_mesh_group(crossdock_mesh* mesh, int32_t axis, crossdock_group** group) {
  return guarded([&] {
    crossdock_mesh& given = handle("mesh", mesh);
    Mesh& opened = capi::open(given);
    MeshAxis wanted{};
    capi::convert({opened.world(), "mesh_group"}, [&] {
      pointee("group", group);
      wanted = capi::to_axis(axis);
    });
    *group = &capi::handle_of(given, opened.group(wanted));
  });
}

crossdock_status crossdock_mesh_sum_gradients(crossdock_mesh* mesh,
                                              const crossdock_mesh_gradients* gradients) {
  return guarded([&] {
    Mesh& opened = capi::open(handle("mesh", mesh));
    capi::Gradients lists;
    capi::convert({opened.world(), "sum_gradients"}, [&] { lists.read(gradients); });
    sum_gradients(opened, lists.views());
  });
}

crossdock_status crossdock_mesh_grad_norm(crossdock_mesh* mesh,
                                          const crossdock_mesh_gradients* gradients, double* norm) {
  return guarded([&] {
    Mesh& opened = capi::open(handle("mesh", mesh));
    capi::Gradients lists;
    capi::convert({opened.world(), "global_grad_norm"}, [&] {
      pointee("norm", norm);
      lists.read(gradients);
    });
    *norm = global_grad_norm(opened, lists.views());
  });
}
