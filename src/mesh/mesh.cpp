#include "crossdock/mesh.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "comm/refusal.hpp"
#include "core/check.hpp"

namespace crossdock {
namespace {

// Must be identical on every rank.
std::string text_of(const MeshShape& shape) {
  return concat("world=", shape.world, ";tp=", shape.tp, ";cp=", shape.cp, ";dp=", shape.dp,
                ";pp=", shape.pp, ";etp=", shape.etp, ";ep=", shape.ep, ";edp=", shape.edp);
}

MeshShape shape_over(const Group& world, MeshShape shape) {
  CROSSDOCK_CHECK(shape.world == 0 || shape.world == world.size(), "world (", shape.world,
                  ") must be the ", world.size(), " ranks of the group, or 0");
  shape.world = world.size();
  return shape;
}

}  // namespace

struct Mesh::State {
  State(Group& world_in, const MeshShape& shape)
      : world(world_in),
        layout(shape_over(world_in, shape)),
        coordinates(layout.coordinates(world_in.rank())) {}

  Group*& found(MeshAxis axis) { return by_axis[static_cast<size_t>(axis)]; }

  // A group that has the same members as the group of `axis`, on every rank of the mesh; null if
  // there is none. The answer is the same on every rank.
  Group* find_equal(MeshAxis axis) {
    if (layout.group_size(axis) == layout.num_ranks()) return &world;
    const auto groups = layout.groups(axis);
    const auto* equal = std::find_if(kMeshAxes.begin(), kMeshAxes.end(), [&](MeshAxis other) {
      return found(other) != nullptr && layout.groups(other) == groups;
    });
    return equal == kMeshAxes.end() ? nullptr : found(*equal);
  }

  Group& world;
  MeshLayout layout;
  MeshCoordinates coordinates;
  std::vector<std::unique_ptr<Group>> made;
  std::array<Group*, kMeshAxes.size()> by_axis{};  // null: not requested yet
};

Mesh::Mesh(Group& world, const MeshShape& shape) {
  std::string config;
  const std::optional<Error> refusal = refusal_of([&] {
    state_ = std::make_unique<State>(world, shape);
    config = text_of(state_->layout.shape());
  });
  world.agree({.operation = "mesh", .config = std::move(config), .refusal = as_refusal(refusal)});
}

Mesh::~Mesh() = default;

const MeshLayout& Mesh::layout() const {
  return state_->layout;
}
const MeshShape& Mesh::shape() const {
  return state_->layout.shape();
}
const MeshCoordinates& Mesh::coordinates() const {
  return state_->coordinates;
}
Group& Mesh::world() {
  return state_->world;
}

Group& Mesh::group(MeshAxis axis) {
  Group*& found = state_->found(axis);
  if (found != nullptr) return *found;
  Group* equal = nullptr;
  std::vector<int> members;
  std::string config;
  const std::optional<Error> refusal = refusal_of([&] {
    equal = state_->find_equal(axis);
    members = state_->layout.members(axis, world().rank());
    config = concat("group=", name_of(axis));
    state_->made.reserve(kMeshAxes.size());
  });
  world().agree(
      {.operation = "mesh_group", .config = std::move(config), .refusal = as_refusal(refusal)});
  if (equal == nullptr) {
    run_agreed(world(), [&] { state_->made.push_back(world().subgroup(members)); });
    equal = state_->made.back().get();
  }
  return *(found = equal);
}

void Mesh::make_groups(std::span<const MeshAxis> axes) {
  for (const MeshAxis axis : axes) group(axis);
}

void Mesh::fail(const Error& cause) noexcept {
  for (const std::unique_ptr<Group>& group : state_->made) group->fail(cause);
  world().fail(cause);
}

}  // namespace crossdock
