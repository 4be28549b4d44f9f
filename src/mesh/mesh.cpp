// The rules that the sizes of a mesh must follow.
// Coordinates and members: how the two grids number the ranks.
#include "crossdock/mesh.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"

namespace crossdock {
namespace {

// The largest divisor of `ranks` that is at most `wanted`.
int64_t largest_divisor(int64_t ranks, int64_t wanted) {
  int64_t divisor = std::min(wanted, ranks);
  while (ranks % divisor != 0) --divisor;
  return divisor;
}

void check_not_negative(const char* name, int64_t size) {
  CROSSDOCK_CHECK(size >= 0, name, " must be at least 1, or 0 to be derived, got ", size);
}

// A size of 0 becomes 1.
void set_default(int64_t& size) {
  if (size == 0) size = 1;
}

// The product of the grid whose sizes are given.
int64_t derived_world(const MeshShape& shape) {
  CROSSDOCK_CHECK(shape.dp > 0 || (shape.ep > 0 && shape.edp > 0),
                  "world must be given, or dp, or ep and edp, to tell the number of ranks");
  const bool by_dense = shape.dp > 0;
  const std::optional<int64_t> world =
      by_dense ? product_within(kMaxMeshRanks, {shape.tp, shape.cp, shape.dp, shape.pp})
               : product_within(kMaxMeshRanks, {shape.etp, shape.ep, shape.edp, shape.pp});
  CROSSDOCK_CHECK(world, by_dense ? "tp * cp * dp * pp" : "etp * ep * edp * pp",
                  " must be at most ", kMaxMeshRanks, " ranks");
  return *world;
}

// `stage`: the number of ranks of a pipeline stage.
void resolve_dense(MeshShape& shape, int64_t stage) {
  CROSSDOCK_CHECK(stage % shape.tp == 0 && (stage / shape.tp) % shape.cp == 0, "tp (", shape.tp,
                  ") times cp (", shape.cp, ") must divide the ", stage,
                  " ranks of a pipeline stage; for example, tp ", largest_divisor(stage, shape.tp),
                  " and cp ", largest_divisor(stage / largest_divisor(stage, shape.tp), shape.cp),
                  " would");
  const int64_t dp = stage / shape.tp / shape.cp;
  CROSSDOCK_CHECK(shape.dp == 0 || shape.dp == dp, "tp (", shape.tp, ") times cp (", shape.cp,
                  ") times dp (", shape.dp, ") must be the ", stage,
                  " ranks of a pipeline stage; with this tp and cp, dp is ", dp);
  shape.dp = dp;
}

void resolve_experts(MeshShape& shape, int64_t stage) {
  CROSSDOCK_CHECK(stage % shape.etp == 0, "etp (", shape.etp, ") must divide the ", stage,
                  " ranks of a pipeline stage; the largest etp below that does is ",
                  largest_divisor(stage, shape.etp));
  const std::string etp_times = shape.etp > 1 ? concat("etp (", shape.etp, ") times ") : "";
  const int64_t rest = stage / shape.etp;
  if (shape.ep == 0) {
    const int64_t edp = std::max<int64_t>(1, shape.edp);
    CROSSDOCK_CHECK(rest % edp == 0, etp_times, "edp (", edp, ") must divide the ", stage,
                    " ranks of a pipeline stage; the largest edp below that does is ",
                    largest_divisor(rest, edp));
    shape.ep = rest / edp;
  }
  CROSSDOCK_CHECK(rest % shape.ep == 0, etp_times, "ep (", shape.ep, ") must divide the ", stage,
                  " ranks of a pipeline stage; the largest ep below that does is ",
                  largest_divisor(rest, shape.ep));
  const int64_t edp = rest / shape.ep;
  CROSSDOCK_CHECK(shape.edp == 0 || shape.edp == edp, etp_times, "ep (", shape.ep, ") times edp (",
                  shape.edp, ") must be the ", stage, " ranks of a pipeline stage; with this ",
                  shape.etp > 1 ? "etp and ep" : "ep", ", edp is ", edp);
  shape.edp = edp;
}

}  // namespace

MeshShape resolve_mesh(const MeshShape& given) {
  MeshShape shape = given;
  check_not_negative("world", shape.world);
  check_not_negative("tp", shape.tp);
  check_not_negative("cp", shape.cp);
  check_not_negative("dp", shape.dp);
  check_not_negative("pp", shape.pp);
  check_not_negative("etp", shape.etp);
  check_not_negative("ep", shape.ep);
  check_not_negative("edp", shape.edp);
  set_default(shape.tp);
  set_default(shape.cp);
  set_default(shape.pp);
  set_default(shape.etp);
  if (shape.world == 0) shape.world = derived_world(shape);
  CROSSDOCK_CHECK(shape.world <= kMaxMeshRanks, "world must be at most ", kMaxMeshRanks, ", got ",
                  shape.world);
  CROSSDOCK_CHECK(shape.world % shape.pp == 0, "pp (", shape.pp, ") must divide the ", shape.world,
                  " ranks; the largest pp below that does is ",
                  largest_divisor(shape.world, shape.pp));
  const int64_t stage = shape.world / shape.pp;
  resolve_dense(shape, stage);
  resolve_experts(shape, stage);
  return shape;
}

namespace {

constexpr size_t kDims = 4;
using Numbers = std::array<int64_t, kDims>;  // of a grid; the first varies fastest with the rank

struct AxisTraits {
  MeshAxis axis;
  std::string_view name;
  bool is_of_experts;               // the grid: {etp, ep, edp, pp}, else {tp, cp, dp, pp}
  std::array<bool, kDims> differs;  // the coordinates in which members differ
};

constexpr std::array<AxisTraits, kMeshAxes.size()> kTraits = {{
    {MeshAxis::kTp, "tp", false, {true, false, false, false}},
    {MeshAxis::kCp, "cp", false, {false, true, false, false}},
    {MeshAxis::kDp, "dp", false, {false, false, true, false}},
    {MeshAxis::kPp, "pp", false, {false, false, false, true}},
    {MeshAxis::kTpCp, "tp_cp", false, {true, true, false, false}},
    {MeshAxis::kCpDp, "cp_dp", false, {false, true, true, false}},
    {MeshAxis::kTpCpDp, "tp_cp_dp", false, {true, true, true, false}},
    {MeshAxis::kEtp, "etp", true, {true, false, false, false}},
    {MeshAxis::kEp, "ep", true, {false, true, false, false}},
    {MeshAxis::kEdp, "edp", true, {false, false, true, false}},
    {MeshAxis::kEtpEp, "etp_ep", true, {true, true, false, false}},
    {MeshAxis::kEtpEdp, "etp_edp", true, {true, false, true, false}},
}};

constexpr bool are_in_order() {
  for (size_t i = 0; i < kTraits.size(); ++i) {
    if (kTraits[i].axis != kMeshAxes[i] || static_cast<size_t>(kMeshAxes[i]) != i) return false;
  }
  return true;
}
static_assert(are_in_order(), "traits_of finds an axis by its number");

const AxisTraits& traits_of(MeshAxis axis) {
  return kTraits[static_cast<size_t>(axis)];
}

Numbers sizes_of(const MeshShape& shape, bool is_of_experts) {
  return is_of_experts ? Numbers{shape.etp, shape.ep, shape.edp, shape.pp}
                       : Numbers{shape.tp, shape.cp, shape.dp, shape.pp};
}

Numbers place_of(int64_t rank, const Numbers& sizes) {
  Numbers place{};
  for (size_t i = 0; i < kDims; ++i) {
    place[i] = rank % sizes[i];
    rank /= sizes[i];
  }
  return place;
}

// The lowest rank of the group: its coordinates are 0 where members differ.
int64_t lowest_member(int64_t rank, const Numbers& sizes, const AxisTraits& traits) {
  const Numbers place = place_of(rank, sizes);
  int64_t stride = 1;
  for (size_t i = 0; i < kDims; ++i) {
    if (traits.differs[i]) rank -= place[i] * stride;
    stride *= sizes[i];
  }
  return rank;
}

// All members, starting from the lowest. Faster coordinates vary first, so ranks ascend.
std::vector<int> members_from(int64_t lowest, const Numbers& sizes, const AxisTraits& traits) {
  std::vector<int> members = {static_cast<int>(lowest)};
  int64_t stride = 1;
  for (size_t i = 0; i < kDims; ++i) {
    const size_t num_before = members.size();
    for (int64_t k = 1; traits.differs[i] && k < sizes[i]; ++k) {
      for (size_t m = 0; m < num_before; ++m) {
        members.push_back(members[m] + static_cast<int>(k * stride));
      }
    }
    stride *= sizes[i];
  }
  return members;
}

void check_rank(int rank, const MeshShape& shape) {
  CROSSDOCK_CHECK(rank >= 0 && rank < shape.world, "rank must be in [0, ", shape.world, "), got ",
                  rank);
}

}  // namespace

std::string_view name_of(MeshAxis axis) noexcept {
  return traits_of(axis).name;
}

MeshAxis parse_mesh_axis(std::string_view name) {
  return kTraits[index_of_name("a group of a mesh", name, kTraits, &AxisTraits::name)].axis;
}

MeshLayout::MeshLayout(const MeshShape& shape) : shape_(resolve_mesh(shape)) {}

MeshCoordinates MeshLayout::coordinates(int rank) const {
  check_rank(rank, shape_);
  const Numbers dense = place_of(rank, sizes_of(shape_, false));
  const Numbers experts = place_of(rank, sizes_of(shape_, true));
  return {.tp = static_cast<int>(dense[0]),
          .cp = static_cast<int>(dense[1]),
          .dp = static_cast<int>(dense[2]),
          .pp = static_cast<int>(dense[3]),
          .etp = static_cast<int>(experts[0]),
          .ep = static_cast<int>(experts[1]),
          .edp = static_cast<int>(experts[2])};
}

int MeshLayout::group_size(MeshAxis axis) const {
  const AxisTraits& traits = traits_of(axis);
  const Numbers sizes = sizes_of(shape_, traits.is_of_experts);
  int64_t size = 1;
  for (size_t i = 0; i < kDims; ++i) size *= traits.differs[i] ? sizes[i] : 1;
  return static_cast<int>(size);
}

std::vector<int> MeshLayout::members(MeshAxis axis, int rank) const {
  check_rank(rank, shape_);
  const AxisTraits& traits = traits_of(axis);
  const Numbers sizes = sizes_of(shape_, traits.is_of_experts);
  return members_from(lowest_member(rank, sizes, traits), sizes, traits);
}

std::vector<std::vector<int>> MeshLayout::groups(MeshAxis axis) const {
  const AxisTraits& traits = traits_of(axis);
  const Numbers sizes = sizes_of(shape_, traits.is_of_experts);
  std::vector<std::vector<int>> groups;
  for (int64_t rank = 0; rank < shape_.world; ++rank) {
    if (lowest_member(rank, sizes, traits) != rank) continue;
    groups.push_back(members_from(rank, sizes, traits));
  }
  return groups;
}

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
